# SPDX-License-Identifier: Apache-2.0
"""Record each optimizer step of GRPO: a row of metrics.jsonl, its cost, its completions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from evoalign import transcripts
from evoalign.baselines import trainer_state
from evoalign.baselines.policy import Policy
from evoalign.baselines.settings import cycle, pairs, save_every
from evoalign.cost import budget
from evoalign.cost.budget import Cost
from evoalign.report import watching
from evoalign.report.rows import WEIGHTS, Row, prompt_columns, spread
from evoalign.rewards.objective import Columns, means, move
from evoalign.rollouts import alone, columns_of, derive_seed, scores_of
from evoalign.rundir import parquet
from evoalign.training.session import Session
from evoalign.training.stopping import Stop

LOGGED = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "kl": "kl",
    "entropy": "entropy",
    "frac_reward_zero_std": "zero_std_share",
    "clip_ratio/region_mean": "clipped_share",
}
"""Names of TRL's logged values in a row of metrics.jsonl."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A scored completion of the prompt in `row` of the training split."""

    row: int
    text: str
    reward: float
    tokens: int
    truncated: bool
    rewards: Mapping[str, float | None]
    """Rewards by column."""


class Steps(TrainerCallback):
    """Callback of the trainer at each step, and the reward function of each round of completions.

    On several GPUs each process has an instance. Only the first process has a session, which writes files.
    """

    def __init__(self, policy: Policy, trainer: Any, stop: Stop) -> None:
        self.policy, self.config, self.trainer, self.stop = policy, policy.config, trainer, stop
        self.objective = policy.task.objective()
        self.session: Session | None = None
        self.saved = 0
        """The last step that was saved, in each process."""
        self._pending: list[Completion] = []
        self._round: list[Completion] = []
        self._score_seconds = self._began = self._spent = 0.0
        self._working = ExitStack()

    def rewards(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        """Score completions as ES does and return the objective's rewards: TRL's only reward function."""
        start = time.perf_counter()
        policy, ids_of = self.policy, columns["completion_ids"]
        texts = [policy.tokens.decode(ids) for ids in ids_of]
        if policy.task.player:
            texts = [transcripts.of_messages(messages) for messages in completions]
        examples = [policy.data.train[row] for row in columns["row"]]
        found = columns_of(policy.task, texts, examples)
        rewards = scores_of(self.objective, found, texts, examples)
        if self.config.grpo.reward == "random":
            rewards = self._random(columns["row"])
        for i, (row, text, ids) in enumerate(zip(columns["row"], texts, ids_of, strict=True)):
            ended = bool(len(ids)) and int(ids[-1]) in policy.tokens.stop_ids
            own = {name: values[i] for name, values in found.items()}
            self._pending.append(Completion(int(row), text, rewards[i], len(ids), not ended, own))
        self._score_seconds += time.perf_counter() - start
        return rewards

    def _random(self, rows: Sequence[int]) -> list[float]:
        """Return rewards of 0 or 1 for completions of these prompts; a resumed step draws the same."""
        step, process = int(self.trainer.state.global_step), int(self.trainer.accelerator.process_index)
        first = len(self._pending)  # of earlier rounds of the step
        seeds = (derive_seed(self.config.seed, "reward", step, process, first + i, row) for i, row in enumerate(rows))
        return [float(seed & 1) for seed in seeds]

    @property
    def has_begun(self) -> bool:
        """Whether a step has begun, which is after a resumed state was read completely."""
        return self._began > 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock of the step; time between steps is not counted."""
        self.policy.before_step()
        self.trainer.rollout_seconds = self._score_seconds = 0.0
        self._began = time.perf_counter()
        self._working.enter_context(watching.phase("updating"))  # within it: answering and scoring

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the clock after the weights were updated, and decide whether to save and stop."""
        self._working.close()
        if self.policy.device.type == "cuda":
            torch.cuda.synchronize(self.policy.device)
        self._spent = time.perf_counter() - self._began
        done, every = int(state.global_step), save_every(self.config.checkpoint.every)
        whole = done % cycle(self.config.grpo) == 0  # stopping inside a round would lose its completions
        asked = self.stop.asked is not None
        control.should_save = whole and (asked or (every > 0 and done % every == 0))
        control.should_training_stop = control.should_training_stop or (asked and whole)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Record the step; TRL logs each step once, after it."""
        if not logs or "loss" not in logs:
            return
        from accelerate.utils import gather_object

        start, step = time.perf_counter(), int(state.global_step) - 1
        fresh: list[Completion] = list(gather_object(self._pending))  # empty if the step trained on an earlier round
        self._pending = []
        if fresh:
            # All processes have the same completions in the same order, and so reach the same state.
            self._round = fresh
            examples = [self.policy.data.train[c.row] for c in fresh]
            texts = [c.text for c in fresh]
            move(self.objective, alone(self.objective, _columns(fresh), texts, examples, step))
        row = self._row(step, logs, fresh)
        session, every = self.session, self.config.evaluation.every
        if session is not None:
            session.done = step + 1
            # The session itself evaluates after the last step.
            if every > 0 and session.done % every == 0 and session.done < session.total:
                row |= {"evaluation": session.evaluate().measures, **session.validation()}
            row["divergence"] = session.divergence_if_due()
            row["seconds"]["other"] = time.perf_counter() - start
            session.recorder.distribute(step, _columns(fresh) if fresh and "rewards" in row else {})
            session.record(row)
            self._write_completions(session, fresh)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the policy after the trainer saved its own state, then mark that state as complete.

        A run that dies in between resumes from the state before, and saves this policy again.
        """
        self.saved = int(state.global_step)
        self.trainer.accelerator.wait_for_everyone()  # each process writes its own random state
        if self.session is not None:
            self.session.save()
            trainer_state.keep_objective(self.session.run, int(state.global_step), self.objective.state)
            trainer_state.mark(self.session.run, int(state.global_step))
            self.session.resumable = int(state.global_step)

    def _row(self, step: int, logs: Mapping[str, Any], fresh: Sequence[Completion]) -> Row:
        answers, group = self._round, self.config.grpo.num_generations
        rewards = np.asarray([a.reward for a in answers], dtype=np.float64)
        groups = rewards.reshape(-1, group)
        rollout, score = float(self.trainer.rollout_seconds), self._score_seconds
        weights = self.policy.task.weighted.by_name(list(answers[0].rewards))
        by_column, kept = means(_columns(answers)), dict(self.objective.state)
        seconds = {"rollout": rollout, "score": score, "update": max(0.0, self._spent - rollout - score)}
        return {
            "generation": step,
            **spread(rewards),
            "zero_variance": bool((groups.max(1) == groups.min(1)).all()),
            "rms_c": None,
            "tokens": sum(a.tokens for a in fresh),
            "seconds": seconds,
            "empty_share": float(np.mean([not a.text.strip() for a in answers])),
            "truncated_share": float(np.mean([a.truncated for a in answers])),
            "evaluation": None,
            "diagnosis": None,
            "divergence": None,
            "budget": self._cost(fresh).as_dict(),
            "grpo": {name: _number(logs.get(key)) for key, name in LOGGED.items()},
            **({"rewards": by_column, WEIGHTS: weights} if by_column else {}),
            **({"objective": kept} if kept else {}),
        }

    def _cost(self, fresh: Sequence[Completion]) -> Cost:
        passes = int(self.trainer.current_gradient_accumulation_steps)  # an epoch's last step may have fewer
        trained, grpo = self._round, self.config.grpo
        if grpo.algorithm == "dpo":
            ranked = pairs([a.reward for a in trained], grpo.num_generations)
            trained = [trained[place] for pair in ranked for place in pair]
        cost = self.policy.cost_of_update([(a.row, a.tokens) for a in trained], passes)
        if fresh:
            cost += self.policy.cost_of_round([(a.row, a.tokens) for a in fresh])
        return replace(
            cost,
            wall_seconds=self._spent,
            device_seconds=self._spent * self.policy.processes,
            peak_memory_bytes=budget.peak_memory(str(self.policy.device)),
        )

    def _write_completions(self, session: Session, answers: Sequence[Completion]) -> None:
        """Write the completions of a step, one row each, if tracking.completions_every selects the step."""
        every, step = self.config.tracking.completions_every, session.done - 1
        if not every or not answers or (step % every and session.done < session.total):
            return
        policy = self.policy
        known = prompt_columns(policy.task, policy.tokens, {a.row: policy.data.train[a.row] for a in answers})
        rows = [
            {
                "generation": step,
                **known[a.row],
                "text": a.text,
                "score": a.reward,
                "finish_reason": "length" if a.truncated else "stop",
                "tokens": a.tokens,
            }
            for a in answers
        ]
        session.run.check()
        parquet.write(session.run.completions(f"generation_{step:04d}"), rows)


def _columns(answers: Sequence[Completion]) -> Columns:
    return {name: [a.rewards[name] for a in answers] for name in answers[0].rewards}


def _number(value: Any) -> float | None:
    return None if value is None or not np.isfinite(value) else float(value)
