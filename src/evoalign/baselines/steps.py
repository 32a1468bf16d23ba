# SPDX-License-Identifier: Apache-2.0
"""Each optimizer step of GRPO as a row of metrics.jsonl, with its evaluation, divergence, cost and completions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import TrainerCallback

from evoalign import tracking
from evoalign.baselines.policy import SAVE_EVERY, Policy
from evoalign.baselines.rollouts import answering
from evoalign.baselines.settings import cycle
from evoalign.checks import divergence
from evoalign.checks.divergence import Reference
from evoalign.cost import budget
from evoalign.cost.budget import Cost
from evoalign.evaluation import Evaluation
from evoalign.report import figures
from evoalign.report.progress import Display
from evoalign.report.rows import Row, spread
from evoalign.rewards.objective import means
from evoalign.rollouts import columns_of, scores_of
from evoalign.rundir import parquet
from evoalign.rundir.directory import RunDir
from evoalign.training import saving
from evoalign.training.result import Tell
from evoalign.training.stop import Stop

DRAW_SHARE = 10
LOGGED = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "kl": "kl",
    "entropy": "entropy",
    "frac_reward_zero_std": "zero_std_share",
    "clip_ratio/region_mean": "clipped_share",
}
"""What TRL logs at each step, and its name in a row."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion of a round: `row` of the training split, rewarded."""

    row: int
    text: str
    reward: float
    tokens: int
    truncated: bool
    rewards: Mapping[str, float | None]
    """By column."""


def save_every(every: int | None) -> int:
    """Steps between checkpoints; 0 is never."""
    return SAVE_EVERY if every is None else every


class Steps(TrainerCallback):
    """Told by the trainer of each step, and by the reward of each round of completions.

    On several GPUs each process has one; that of the first process writes.
    """

    def __init__(self, policy: Policy, run: RunDir | None, stop: Stop, console: Console, tell: Tell) -> None:
        self.policy, self.config, self.run, self.stop, self.tell = policy, policy.config, run, stop, tell
        self.objective = policy.task.objective()
        # Not "no update": what float32 leaves of a mean is an advantage of up to 1e-4, which Adam scales up.
        self.display = Display(policy.config.grpo.max_steps, console, unit="step", still="rewards equal")
        self.trackers: list[tracking.Tracker] = []
        self.baseline: float | None = None
        self.evaluating: Cost | None = Cost()
        """What evaluation has taken; None: a part of it is not known."""
        self.trainer: Any = None
        self._reference = Reference(policy.config, policy.device, policy.dtype, mixed=policy.mixed)
        self._pending: list[Answer] = []
        self._round: list[Answer] = []
        self._drawn_cost = Cost()
        self._score_seconds = self._began = self._spent = 0.0
        self._drawing = self._drawn = 0.0

    def rewards(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        """The one reward function that TRL is given: what the objective makes of the texts that ES would score."""
        start = time.perf_counter()
        policy, ids_of = self.policy, columns["completion_ids"]
        texts = [policy.tokens.decode(ids) for ids in ids_of]
        examples = [policy.data.train[row] for row in columns["row"]]
        found = columns_of(policy.task, texts, examples)
        rewards = scores_of(self.objective, found, texts, examples)
        for i, (row, text, ids) in enumerate(zip(columns["row"], texts, ids_of, strict=True)):
            ended = bool(len(ids)) and int(ids[-1]) in policy.tokens.stop_ids
            own = {name: values[i] for name, values in found.items()}
            self._pending.append(Answer(int(row), text, rewards[i], len(ids), not ended, own))
        self._score_seconds += time.perf_counter() - start
        return rewards

    @property
    def has_begun(self) -> bool:
        """Whether a step has begun: all of a state that is resumed from is read by then."""
        return self._began > 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The clock of training starts; it stands still between steps."""
        self.trainer.rollout_seconds = self._score_seconds = 0.0
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The weights have moved."""
        if self.policy.device.type == "cuda":
            torch.cuda.synchronize(self.policy.device)
        self._spent = time.perf_counter() - self._began
        done, every = int(state.global_step), save_every(self.config.checkpoint.every)
        whole = done % cycle(self.config.grpo) == 0  # else a round of completions would be lost
        asked = self.stop.asked is not None
        control.should_save = whole and (asked or (every > 0 and done % every == 0))
        control.should_training_stop = control.should_training_stop or (asked and whole)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Write, draw and show the step. TRL logs each once, after it."""
        if not logs or "loss" not in logs:
            return
        start = time.perf_counter()
        fresh = self._gather()
        row = self._row(int(state.global_step) - 1, logs, fresh)
        if self.run is not None:
            row |= self._looked_at(int(state.global_step))
            row["seconds"]["other"] = time.perf_counter() - start
            self._write(row, fresh)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The trainer's own state is on disk: say so, and save the policy as others load it."""
        self.trainer.accelerator.wait_for_everyone()  # each process writes its own random state
        if self.run is not None:
            done = int(state.global_step)
            self.policy.mark_state(self.run, done)
            self.save(done)

    def save(self, done: int) -> Any:
        """The policy after so many steps, as a PEFT adapter or a checkpoint; its folder."""
        assert self.run is not None
        measures = self.run.rows[done - 1].get("evaluation") if 0 < done <= len(self.run.rows) else None
        folder = self.policy.save(self.run, done, float(measures["reward"]) if measures else None)
        saving.retain(self.run, self.config)
        return folder

    def evaluate(self) -> Evaluation:
        """The policy on the test split."""
        found, cost = self.policy.evaluate()
        self.evaluating = None if self.evaluating is None else self.evaluating + cost
        self.write_budget()
        return found

    def write_budget(self) -> None:
        """results/budget.json, once the run has its folder."""
        if self.run is not None and self.run.results.is_dir():
            policy = self.policy
            budget.write(self.run.budget, "grpo", policy.processes, self.run.rows, self.evaluating, policy.note)

    def measure(self) -> dict[str, Any]:
        """KL of the policy from the base model."""
        policy, config = self.policy, self.config
        with answering(policy.model, mixed=policy.mixed):
            samples = divergence.draw(policy.engine, policy.tokens, policy.task, policy.data.test, config)
        return asdict(self._reference.divergence(policy.model, samples))

    def measure_start(self) -> None:
        """What cannot be measured, or does not fit, is reported before the first step."""
        if self.run is not None and self.config.checks.kl_every:
            start = time.monotonic()
            kl, seconds = self.measure()["exact"], time.monotonic() - start
            self.tell(f"KL of the start from the base model: {kl:.3g} nats a token, measured in {seconds:.1f} s")

    def close(self) -> None:
        """Let the trackers go, and the copy of the base model."""
        self._reference.close()
        for tracker in self.trackers:
            tracker.close()

    def draw(self, final: tuple[float, float] | None = None) -> None:
        """The figures of the rows so far; `final` is the KL and test reward of the finished policy."""
        if self.run is None or not self.run.rows:
            return
        start = time.monotonic()
        rows, folder, grpo = self.run.rows, self.run.figures, self.config.grpo
        title = f"{self.policy.task.name}, GRPO ({grpo.tune}), {grpo.num_generations} completions a prompt"
        words = figures.GRPO_WORDS
        figures.evolution(rows, folder / "evolution.png", title=title, baseline=self.baseline, words=words)
        figures.time_breakdown(rows, folder / "time_breakdown.png", title=title, words=words)
        figures.rewards(rows, folder / "rewards.png", title=title, words=words)
        figures.divergence(rows, folder / "divergence.png", title=title, baseline=self.baseline, final=final)
        self._drawn = time.monotonic()
        self._drawing = self._drawn - start

    def _gather(self) -> list[Answer]:
        """A new round of completions, those of all processes; empty where the step trained on older ones."""
        from accelerate.utils import gather_object

        fresh: list[Answer] = list(gather_object(self._pending))
        self._pending = []
        if fresh:
            self._round = fresh
        return fresh

    def _row(self, step: int, logs: Mapping[str, Any], fresh: Sequence[Answer]) -> Row:
        answers, group = self._round, self.config.grpo.num_generations
        rewards = np.asarray([a.reward for a in answers], dtype=np.float64)
        groups = rewards.reshape(-1, group)
        rollout, score = float(self.trainer.rollout_seconds), self._score_seconds
        by_column = means({name: [a.rewards[name] for a in answers] for name in answers[0].rewards})
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
            **({"rewards": by_column} if by_column else {}),
        }

    def _cost(self, fresh: Sequence[Answer]) -> Cost:
        passes = int(self.trainer.current_gradient_accumulation_steps)  # an epoch's last step may have fewer
        cost = self.policy.cost_of_update([(a.row, a.tokens) for a in self._round], passes)
        if fresh:
            cost += self.policy.cost_of_round([(a.row, a.tokens) for a in fresh])
        return replace(
            cost,
            wall_seconds=self._spent,
            device_seconds=self._spent * self.policy.processes,
            peak_memory_bytes=budget.peak_memory(str(self.policy.device)),
        )

    def _looked_at(self, done: int) -> dict[str, Any]:
        """Evaluation and divergence, where they are due after so many steps."""
        every, last = self.config.evaluation.every, done == self.config.grpo.max_steps
        found: dict[str, Any] = {}
        if every and done % every == 0 and not last:
            found["evaluation"] = self.evaluate().measures
        if divergence.is_due(self.config, done):
            found["divergence"] = self.measure()
        return found

    def _write(self, row: Row, fresh: Sequence[Answer]) -> None:
        assert self.run is not None
        self.run.append_metrics(row)
        if time.monotonic() - self._drawn >= DRAW_SHARE * self._drawing:
            self.draw()
        self.display.update(row)
        for tracker in self.trackers:
            tracker.log(row)
        every, step = self.config.tracking.completions_every, int(row["generation"])
        if every and fresh and (step % every == 0 or step + 1 == self.config.grpo.max_steps):
            self._keep(step, fresh)

    def _keep(self, step: int, answers: Sequence[Answer]) -> None:
        """The completions of a step, one row each."""
        assert self.run is not None
        rows = [
            {
                "generation": step,
                "prompt": self.policy.shown(a.row),
                "target": self.policy.task.gold(self.policy.data.train[a.row]),
                "text": a.text,
                "score": a.reward,
                "finish_reason": "length" if a.truncated else "stop",
                "tokens": a.tokens,
            }
            for a in answers
        ]
        parquet.write(self.run.completions(f"generation_{step:04d}"), rows)


def _number(value: Any) -> float | None:
    return None if value is None or not np.isfinite(value) else float(value)
