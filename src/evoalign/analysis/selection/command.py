# SPDX-License-Identifier: Apache-2.0
"""Other rules on one generation of a run, from its journal: a vote of the best members, or a merge of them.

- The vote is RandOpt (Neural Thickets, arXiv 2603.12228): the K members with the best fitness each complete every test
  prompt greedily, and the most frequent final answer counts. Self-consistency (arXiv 2203.11171) is reported next to
  it: K samples of the mean before the generation, so that both generate equally many completions.
- `mean` moves the mean to the average of the K members. If members are no linear function of the noise (`lora.evolve:
  ab`, `singular`), the average of their products B A is saved as one adapter of rank K r.
- `corp` is CoRP (arXiv 2605.31494): weights of `rules.corp_weights`, whose step is made only if the validation split
  shows a reliable gain. Deviations: one generation, without further ones around the new mean; half of the validation
  split chooses K, beta and the length of the step, and the other half decides, by a 95 % interval instead of one
  standard error.

Members are ranked by the recorded fitness; ties go to the lower index. Several K are compared on the validation split.

    evoalign select runs/my_task --top 50 --vote
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from evoalign import evaluation, statistics
from evoalign.analysis.base import Finding
from evoalign.analysis.selection.rules import BETAS, SCALES, Floats, best, corp_weights, elected, merged
from evoalign.config import Config, EvaluationConfig
from evoalign.engines import weights_hash
from evoalign.errors import ConfigError, ModelError
from evoalign.evaluation import RIGHT, Evaluation, Scored
from evoalign.models.origin import model_path
from evoalign.placebos.run import Counterfactuals, open_run
from evoalign.rollouts import Encoded, rows_of
from evoalign.rundir import checkpoint
from evoalign.rundir.checkpoint import Mark
from evoalign.rundir.journal import Recorded
from evoalign.spaces.lora import factor_name
from evoalign.statistics import Estimate
from evoalign.training import saving
from evoalign.training.replay import generation_of, log_of, refuse_taken
from evoalign.types import Example, Plan

Rule: TypeAlias = Literal["mean", "corp"]


def select(
    run: str | Path,
    *,
    top: Sequence[int],
    vote: bool = False,
    merge: Rule | None = None,
    generation: int = 0,
    temperature: float = 0.7,
    to: Path | None = None,
    config: Config | None = None,
    model: str | None = None,
) -> Finding:
    """Apply other rules to one generation of a finished run, and evaluate them on the test split.

    `top` are the numbers K of members to choose from; of several, the validation split decides. `to` is a new folder
    for the merged model. Raises ConfigError, JournalError, and as `placebo` does.
    """
    refuse_taken(to, of=run)
    log = log_of(run)
    recorded = generation_of(log, generation, 0)
    _check(recorded, top, vote=vote, merge=merge, temperature=temperature, saves=to is not None)
    with open_run(run, config=config, model=model, generation=generation + 1) as found:
        return _Selection(found, recorded, [*dict.fromkeys(top)], temperature).run(vote=vote, merge=merge, to=to)


def _check(
    recorded: Recorded, top: Sequence[int], *, vote: bool, merge: Rule | None, temperature: float, saves: bool
) -> None:
    """Raise ConfigError for options that are missing or do not fit the generation."""
    count = len(recorded.update.members)
    if not vote and merge is None:
        raise ConfigError("nothing to do: give --vote, --merge mean or --merge corp")
    if saves and merge is None:
        raise ConfigError("--to saves a merged model; give --merge, or leave out --to")
    if wrong := [k for k in top if not 1 <= k <= count]:
        raise ConfigError(
            f"--top {wrong[0]}: generation {recorded.update.generation} has {count} members; set 1 to {count}"
        )
    if not top:
        raise ConfigError(
            "--top is empty; give a number of members, or several for the validation split to choose from"
        )
    if not 0 < temperature < 100:
        raise ConfigError(f"--temperature {temperature:g}: samples for a vote need a temperature above 0, such as 0.7")


class _Selection:
    """A generation of a run whose engine is at the mean before it."""

    def __init__(self, found: Counterfactuals, recorded: Recorded, top: list[int], temperature: float) -> None:
        self.parts, self.log, self.recorded = found.parts, found.log, recorded
        if searched := [n for n, one in self.parts.config.task.settings.items() if len(one.options) > 1]:
            raise ConfigError(
                f"the members drew task.settings.{searched[0]}, so their fitness does not rank their weights alone; "
                "select needs a run without searched settings"
            )
        self.top, self.temperature = top, temperature
        self.ranked = best(recorded.fitness_M, max(top))
        found.follower.back()
        for earlier in found.log.generations[: recorded.update.generation]:
            saving.apply(self.parts.engine, found.log, earlier)
        self.before = {name: tensor.clone() for name, tensor in self.parts.engine.state()}
        greedy = {"temperature": 0.0, "samples": 1, "seeds": [0]}
        self.greedy = self.parts.config.evaluation.model_copy(update=greedy)
        self.spent = 0
        self.measure = RIGHT
        self.rows, self.lines = list[dict[str, Any]](), list[str]()

    def run(self, *, vote: bool, merge: Rule | None, to: Path | None) -> Finding:
        """Measure all rows."""
        if vote:
            self.parts.task.final_answer("", self.parts.task.handed(self.parts.data.test[0]))  # refused where undefined
        if (len(self.top) > 1 or merge == "corp") and not self.parts.data.validation:
            what = f"--top {','.join(map(str, self.top))} chooses" if len(self.top) > 1 else "--merge corp decides"
            raise ConfigError(
                f"{what} on the validation split, and task {self.parts.task.name} has none: set task.validation_size "
                "or task.validation_data in the config of the next run; the test split is never used for it"
            )
        if merge is not None:
            self._check_merge(merge, saves=to is not None)
        fitness = self.recorded.fitness_M
        if max(fitness) == min(fitness):
            raise ConfigError(
                f"all {len(fitness)} members of generation {self.recorded.update.generation} have the same fitness, "
                f"{fitness[0]:g}: there are no best ones; choose another generation"
            )
        base = self._mean(self.parts.data.test, self.greedy)
        self.measure = RIGHT if RIGHT in base.measures_E and not np.isnan(base.measures_E[RIGHT]).any() else "reward"
        self._add_evaluated("base", base)
        trained = self._about()
        if vote:
            self._votes()
        else:
            self._add_evaluated("best member", self._members(self.ranked[:1], self.parts.data.test)[0])
        if merge is not None and self.parts.space.has_pairs:
            self._corp(to) if merge == "corp" else self._average(to)
        elif to is not None:
            self._save_products(to)
        numbers = {
            "generation": self.recorded.update.generation,
            "journal": self.recorded.hash,
            "measure": "accuracy" if self.measure == RIGHT else self.measure,
            "prompts": len(self.parts.data.test),
            "training_completions": trained,
            "validation_completions": self.spent,
            "top": self.top,
            "ranked": self.ranked,
            "temperature": self.temperature,
            "rows": self.rows,
        }
        return Finding(numbers, [*self.lines, "intervals are for new prompts, with these members, samples and weights"])

    def _check_merge(self, merge: Rule, *, saves: bool) -> None:
        """Raise ConfigError for a merge that the run's space or optimizer does not allow."""
        config, space = self.parts.config, self.parts.space
        if config.es.optimizer.name != "sgd":
            raise ConfigError(
                f"es.optimizer {config.es.optimizer.name} would change the step of a merge; use a run of optimizer sgd"
            )
        if space.has_pairs:
            return
        if merge == "corp":
            raise ConfigError(
                f"members of space {space.name} are no linear function of the noise, as --merge corp needs; use "
                "--merge mean"
            )
        if len(self.top) > 1 or not saves:
            raise ConfigError(
                f"the average of members of space {space.name} is an adapter of a larger rank, which is saved and not "
                "evaluated here: give one --top, and --to FOLDER"
            )

    def _values(self, found: Evaluation) -> Floats:
        """Return the measure per prompt."""
        return np.array(found.measures_E[self.measure])

    def _against(self, before_P: Floats, after_P: Floats) -> Estimate:
        """Return the interval of the change over prompts, paired."""
        return statistics.paired(before_P, after_P, shares=self.measure == RIGHT)

    def _mean(self, examples: Sequence[Example], settings: EvaluationConfig) -> Evaluation:
        parts = self.parts
        return evaluation.evaluate(parts.engine, parts.tokens, parts.task, examples, settings)

    def _validated(self, examples: Sequence[Example]) -> Floats:
        """Return the measure of the engine's mean per prompt of some rows of the validation split."""
        self.spent += len(examples)
        return self._values(self._mean(examples, self.greedy))

    def _members(self, chosen: Sequence[int], examples: Sequence[Example]) -> list[Evaluation]:
        parts, update = self.parts, self.recorded.update
        plan = Plan(update.generation, update.sigma, tuple(update.members[i] for i in chosen))
        asked = [(examples, Encoded(parts.task, parts.tokens, examples))]
        return evaluation.evaluate_together(parts.engine, parts.task, asked, self.greedy, plan=plan)[0]

    def _move(self, weights_K: Floats, scale: float = 1.0) -> None:
        """Move the engine from the mean before the generation by a weighted sum of the best members' perturbations."""
        self.parts.engine.load(self.before)
        self.parts.engine.apply(merged(self.recorded.update, self.ranked[: len(weights_K)], weights_K, scale))

    def _average(self, to: Path | None) -> None:
        """Add the average of the top K, and how K was chosen."""

        def validated(k: int) -> float:
            self._move(np.full(k, 1 / k))
            return float(self._validated(self.parts.data.validation).mean())

        count, said = self._choose(lambda: {k: validated(k) for k in self.top})
        self._move(np.full(count, 1 / count))
        name = f"average of the top {count}"
        self._add_evaluated(name, self._mean(self.parts.data.test, self.greedy))
        self.lines.append(f"{name}: {said}{self._save(name, to)}")

    def _choose(self, values: Callable[[], Mapping[int, float]]) -> tuple[int, str]:
        """Return K and how it was chosen: of several, by the highest of `values` on the validation split.

        The smallest of equally good ones is chosen.
        """
        if len(self.top) == 1:
            return self.top[0], "K was given"
        found = values()
        listed = ", ".join(f"{k}: {value:.4f}" for k, value in found.items())
        return max(sorted(found), key=found.__getitem__), f"K was chosen on the validation split ({listed})"

    def _corp(self, to: Path | None) -> None:
        """Add CoRP's model, or the base if the gate refuses it, and the gate's result."""
        update, fitness_M, validation = self.recorded.update, self.recorded.fitness_M, self.parts.data.validation
        choosing, gating = ([validation[i] for i in range(half, len(validation), 2)] for half in (0, 1))
        before_P = self._validated(gating)
        highest, chosen = -np.inf, (np.ones(1), 1.0, "")
        for k, beta, scale in product(sorted(self.top), BETAS, SCALES):
            weights_K = corp_weights(fitness_M, update.members, self.ranked[:k], beta)
            self._move(weights_K, scale)
            value = float(self._validated(choosing).mean())
            if value > highest:
                highest, chosen = value, (weights_K, scale, f"top {k}, beta {beta:g}, scale {scale:g}")
        weights_K, scale, how = chosen
        self._move(weights_K, scale)
        gain = self._against(before_P, self._validated(gating))
        said = f"corp ({how}): gain {gain:+.4f} on the half of the validation split that did not choose"
        if gain.low is None or gain.low <= 0:
            name, base = "corp, refused by its gate: the base", self.rows[0]
            self._add(name, base["per_prompt"], base["test_completions"], committed=False)
            kept = f"; not reliable, so the mean stays as it is{f' and {to} is not written' if to else ''}"
        else:
            self._add_evaluated("corp", self._mean(self.parts.data.test, self.greedy))
            kept = f"; committed{self._save('corp', to)}"
        self.lines.append(said + kept)

    def _save(self, name: str, to: Path | None) -> str:
        """Save the engine's mean, marked as no mean of the run, and return that in words."""
        if to is None:
            return ""
        mark = self._mark(name, self.parts.engine.fingerprint())
        saving.save(self.parts, to, mark, replace=False)
        return f"; saved in {to}"

    def _mark(self, name: str, weights_hash: str) -> Mark:
        generation, found = self.recorded.update.generation, self.recorded
        what = f"{name}, generation {generation}"
        return Mark(generation + 1, weights_hash, found.hash, objective=found.objective, counterfactual=what)

    def _save_products(self, to: Path) -> None:
        """Save the average of the products B A of the top K in a single adapter."""
        count, parts = self.top[0], self.parts
        wide = replace(parts.layout, rank=parts.layout.rank * count)
        name, digest = f"average of the top {count}", weights_hash(self._products(count))
        base, mark = model_path(parts.config.model), self._mark(name, digest)
        checkpoint.save(to, mark, parts.config, wide, base, lambda: self._products(count), replace=False)
        self.lines.append(
            f"{name}: saved in {to} as an adapter of rank {wide.rank}; evaluate it with evoalign eval {to}"
        )

    def _products(self, count: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the factors of the average of the top members' products: A_1, A_2, ... and B_1 / K, B_2 / K, ..."""
        update, exact = self.recorded.update, replace(self.parts.layout, dtype="float32")
        members = [update.members[i] for i in self.ranked[:count]]
        plan = Plan(update.generation, update.sigma, tuple(members))
        for module in exact.modules:
            adapter = self.parts.space.adapter(exact, module, self.before.__getitem__, plan, members)
            if adapter is None:
                raise ModelError(f"space {self.parts.space.name} has no adapters of members for {module}")
            a, b = adapter.a.expand(count, -1, -1), adapter.b.expand(count, -1, -1) / count
            yield factor_name(module, "A"), a.flatten(0, 1)
            yield factor_name(module, "B"), b.transpose(0, 1).flatten(1)

    def _add(self, name: str, values_P: Floats, completions: int, *, committed: bool = True) -> None:
        """Add a row: the mean over prompts, its change from the first row, and the completions that it took."""
        row = {
            "name": name,
            "value": statistics.share(values_P) if self.measure == RIGHT else statistics.mean(values_P),
            "minus_base": self._against(self.rows[0]["per_prompt"], values_P) if self.rows else None,
            "test_completions": completions,
            "committed": committed,
            "per_prompt": values_P,
        }
        self.rows.append(row)

    def _add_evaluated(self, name: str, found: Evaluation) -> None:
        self._add(name, self._values(found), len(found.completions))

    def _votes(self) -> None:
        """Add the members, their vote, and self-consistency, and which K was chosen."""
        if self.measure != RIGHT:
            raise ConfigError(
                f"task {self.parts.task.name} does not say which completions are right (is_right); a vote needs that"
            )

        def validated() -> dict[int, float]:
            validation = self.parts.data.validation
            found = self._members(self.ranked, validation)
            self.spent += len(found) * len(validation)
            return {k: float(self._voted(_by_prompt(found[:k]), validation).mean()) for k in self.top}

        count, said = self._choose(validated)
        members = self._members(self.ranked[:count], self.parts.data.test)
        sampled = {"temperature": self.temperature, "samples": count, "seeds": [0]}
        samples = self._mean(self.parts.data.test, self.parts.config.evaluation.model_copy(update=sampled))
        of_samples = _by_prompt([samples])
        total = sum(len(one.completions) for one in members)
        values_KP = np.array([self._values(one) for one in members])
        vote_P, own_P = (self._voted(of, self.parts.data.test) for of in (_by_prompt(members), of_samples))
        solved_P = np.array([float(any(c.right for c in completions)) for completions in of_samples])
        name, drawn = f"vote of the top {count}", len(samples.completions)
        self._add_evaluated("best member", members[0])
        self._add(f"mean of the top {count}", values_KP.mean(0), total)
        self._add(name, vote_P, total)
        self._add(f"self-consistency at {count}, temperature {self.temperature:g}", own_P, drawn)
        self._add(f"pass@{count} of the members", values_KP.max(0), total)
        self._add(f"pass@{count} of the samples", solved_P, drawn)
        gap = self._against(own_P, vote_P)
        equal = f"{total:,} test completions each" if total == drawn else "completions differ"
        self.lines += [f"{name}: {said}", f"{name} minus self-consistency: {gap:+.4f} over prompts, paired, {equal}"]

    def _voted(self, of_prompts: Sequence[Sequence[Scored]], examples: Sequence[Example]) -> Floats:
        """Return whether the vote of the completions of each prompt, best first, is right."""
        task, right = self.parts.task, list[float]()
        for example, completions in zip(examples, of_prompts, strict=True):
            place = elected([task.final_answer(task.clean(c.text), task.handed(example)) for c in completions])
            right.append(0.0 if place is None else float(bool(completions[place].right)))
        return np.array(right)

    def _about(self) -> int:
        """Describe the generation, and ties at the last place of the top K; return the completions of its fitness."""
        config, update, fitness_M = self.parts.config, self.recorded.update, self.recorded.fitness_M
        prompts = len(rows_of(config, len(self.parts.data.train), update.generation))
        trained = (len(update.members) + self.parts.objective.asks_mean) * prompts
        self.lines.append(
            f"generation {update.generation}: {len(update.members):,} members, {prompts:,} completions each for the "
            f"fitness, {trained:,} in all, which the base and self-consistency did not need"
        )
        for k in self.top:
            last = fitness_M[self.ranked[k - 1]]
            tied, inside = fitness_M.count(last), [fitness_M[i] for i in self.ranked[:k]].count(last)
            if tied > inside:
                self.lines.append(
                    f"top {k}: {tied:,} members tie at fitness {last:g}; the first {inside:,} by index are taken"
                )
        return trained


def _by_prompt(found: Sequence[Evaluation]) -> list[list[Scored]]:
    """Return the completions of each prompt, in the order of the evaluations and their samples."""
    of_prompts: dict[int, list[Scored]] = {}
    for one in found:
        for completion in one.completions:
            of_prompts.setdefault(completion.example, []).append(completion)
    return [of_prompts[example] for example in sorted(of_prompts)]
