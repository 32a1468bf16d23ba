# SPDX-License-Identifier: Apache-2.0
"""Diagnosis of a run: figures of each generation, warnings with a cause and a setting, and a summary.

Fitness jumps between generations because the prompts change, so windows of generations are compared by the standard
errors of their means. The A/A control scores the unperturbed model twice on a generation's prompts; the difference is
noise, and a population that spreads no wider cannot be ranked. Greedy completions have no such noise; reliability then
says whether members rank alike on different prompts. The summary needs the rows of metrics.jsonl only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evoalign.checks import axes, hacking
from evoalign.checks.axes import Axes, Measurement
from evoalign.checks.control import Control, reliability
from evoalign.checks.rules import SURE, WINDOW, History, LearningRateTooLarge, Row, causes, mean_of, values
from evoalign.config import Config
from evoalign.report.tables import percent
from evoalign.types import Generation, Layout, Rollout

SAMPLE = 65536
"""Numbers of the mean that are followed: a cosine of this many is accurate to 1/256."""
SEARCHED = 512
"""Most completions of a generation that are searched for signs of broken text, which takes about 0.1 ms each: those of
evenly spaced members, all prompts of each."""
LOOKS = 100
"""Most checks for earlier warnings when resuming: each goes over all generations before it."""
WARNING = "warning: "
"""Prefix of the summary's warnings."""


class Diagnosis:
    """Diagnosis of one run. `start` is the engine's sample of `SAMPLE` numbers before the first update.

    `max_score` is the highest score of a completion, `gold` returns the gold answer of a training row, `known` are the
    scripts of the prompts, and `columns` measures a generation for the axis report; `deterministic` and `given` are as
    in `History`. Memory: two samples, and a row of figures per generation.
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        start: torch.Tensor,
        max_score: float = math.inf,
        *,
        gold: Callable[[int], str | None] = lambda row: None,
        known: frozenset[str] = frozenset(),
        columns: Callable[[Generation], Measurement | None] = lambda generation: None,
        generates: bool = True,
        deterministic: bool = False,
        given: str | None = None,
    ) -> None:
        self.config, self.max_score, self._columns = config, max_score, columns
        self._gold, self._known, self._generates = cache(gold), known, generates
        self._start = start.double().numpy()
        self._last: NDArray[np.float64] | None = self._start
        self._step: NDArray[np.float64] | None = None
        self._scale = math.sqrt(layout.parameters / max(1, len(start)))
        self._noise_norm = config.es.width * math.sqrt(sum(math.prod(t.shape) * t.scale**2 for t in layout.tensors))
        self.history = History(config, deterministic=deterministic, given=given)
        self._reported: set[str] = set()

    def update(self, generation: Generation, sample: torch.Tensor, control: Control | None = None) -> Row:
        """Return the `diagnosis` of a generation's row; `sample` is taken after the update, None is not known.

        - `spread`: standard deviation of the members' fitness
        - `reliability`: how well the members' fitness on some prompts predicts that on others (`control.reliability`)
        - `mean_error`: standard error of the population's mean fitness
        - `noise_floor`: root mean square of all controls so far; `signal_to_noise`: spread over it
        - `reward_noise`: the part of the control's floor that the reward alone makes, per completion
        - `cosine`: of this update and the one before
        - `distance`: L2 distance from the start; `distance_sigmas`: over the expected norm of one member's noise
        - `population_minus_mean`: population's mean fitness minus the unperturbed model's on the same prompts;
          `population_minus_mean_error`: its standard error over members (or pairs) and the control's draws
        - `kept_share`: share of the unperturbed model's fitness, above the lowest score, that the population has
        - `changed_share`, `solved_share` and the shares of `hacking.SHARES`
        - `axes`: see `checks.axes`; `shares` of this generation, `lasting` of the last `WINDOW`
        """
        cosine, distance = self._movement(sample)
        scores_MP = np.asarray(generation.scores_MP, dtype=np.float64)
        members, prompts = scores_MP.shape
        mean_error = float(np.std(generation.fitness_M, ddof=1)) / math.sqrt(members)
        if self.config.task.batch_size is not None and prompts > 1:  # the prompts change
            mean_error = math.hypot(mean_error, float(scores_MP.mean(axis=0).std(ddof=1)) / math.sqrt(prompts))
        diagnosis: Row = {
            "spread": float(np.std(generation.fitness_M)),
            "reliability": reliability(scores_MP),
            "mean_error": mean_error,
            "control": None if control is None else [control.first, control.second, control.floor],
            "reward_noise": None if control is None else control.of_reward,
            "cosine": cosine,
            "distance": distance,
            "distance_sigmas": distance / self._noise_norm,
            "changed_share": changed_share(generation),
            "solved_share": float(np.mean(scores_MP >= self.max_score)),
            **_population_minus_mean(generation, control, paired=self.config.es.antithetic),
            **self._text_shares(generation),
            "axes": self._axes(generation),
        }
        mean = float(np.mean(generation.fitness_M))
        self.history.rows.append(
            {"generation": generation.index, "mean": mean, "zero_variance": generation.zero_variance, **diagnosis}
        )
        floor = self.history.noise_floor()
        diagnosis["noise_floor"] = floor
        diagnosis["signal_to_noise"] = diagnosis["spread"] / floor if floor else None
        return diagnosis

    def restore(self, rows: Sequence[Mapping[str, Any]], sample: torch.Tensor | None = None) -> None:
        """Continue a resumed run from its rows of metrics.jsonl and the engine's current sample.

        Earlier warnings are not repeated, unless their cause lasted less than a hundredth of the run.
        """
        every = 1 + len(rows) // LOOKS
        for count, row in enumerate(rows, 1):
            self.history.rows.append(_recorded(row, self.config))
            if count % every == 0 or count == len(rows):
                self._reported |= set(causes(self.history))
        self._step = None
        self._last = None if sample is None else sample.double().numpy()

    def warnings(self) -> list[str]:
        """Return new warnings: one sentence each with the figure, the likely cause and the setting to change."""
        new = {name: line for name, line in causes(self.history).items() if name not in self._reported}
        self._reported |= set(new)
        return list(new.values())

    def _movement(self, sample: torch.Tensor) -> tuple[float | None, float]:
        """Return the cosine of the last two updates and the distance from the start, scaled up from the sample."""
        now, cosine = sample.double().numpy(), None
        step = None if self._last is None else now - self._last
        if step is not None and self._step is not None:
            norms = math.sqrt(_dot(step, step) * _dot(self._step, self._step))
            cosine = _dot(step, self._step) / norms if norms else None
        self._last, self._step = now, step
        moved = now - self._start
        return cosine, math.sqrt(_dot(moved, moved)) * self._scale

    def _axes(self, generation: Generation) -> Row | None:
        found = axes.row_of(generation, self._columns(generation))
        if found is None:
            return None
        members = self.config.es.population_size
        pooled = Axes.of([*(row.get("axes") for row in self.history.rows[1 - WINDOW :]), found], members)
        assert pooled is not None
        shares = {"lasting_share": pooled.lasting_share, "lasting": pooled.lasting}
        return {**found, "shares": Axes([found], found["members"]).shares, **shares}

    def _text_shares(self, generation: Generation) -> Row:
        rollouts = _searched(generation)
        if not (rollouts and self._generates):  # a given completion shows no signs of training
            return {f"{name}_share": None for name in hacking.SHARES}
        rows = [generation.rows[r.request] for r in rollouts]
        texts, reasons = [r.text for r in rollouts], [r.finish_reason for r in rollouts]
        shares = hacking.text_shares(texts, reasons, rows, list(map(self._gold, rows)), self._known)
        return {f"{name}_share": share for name, share in shares.items()}


def _dot(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Return the inner product. In this thread: to wake the threads of torch or BLAS would take longer."""
    return float(np.einsum("i,i->", one, other))


def _searched(generation: Generation) -> Sequence[Rollout]:
    """Return the completions that are searched for signs, see `SEARCHED`: all of some members."""
    rollouts, prompts = generation.rollouts, len(generation.rows)
    if len(rollouts) <= SEARCHED:
        return rollouts
    members, count = len(rollouts) // prompts, max(1, SEARCHED // prompts)
    starts = [i * members // count * prompts for i in range(count)]
    return [rollout for start in starts for rollout in rollouts[start : start + prompts]]


def changed_share(generation: Generation) -> float | None:
    """Return the share of completions whose text is not the most common one of their prompt."""
    counts = Counter((rollout.request, rollout.text) for rollout in generation.rollouts)
    if not counts:
        return None
    most = dict[int, int]()
    for (request, _), count in counts.items():
        most[request] = max(count, most.get(request, 0))
    return 1 - sum(most.values()) / len(generation.rollouts)


def _population_minus_mean(generation: Generation, control: Control | None, *, paired: bool) -> Row:
    if control is None:
        return dict.fromkeys(("population_minus_mean", "population_minus_mean_error", "kept_share"))
    fitness_M = np.asarray(generation.fitness_M, dtype=np.float64)
    mean, own = float(fitness_M.mean()), (control.first + control.second) / 2
    lowest = min(min(row) for row in generation.scores_MP)
    alone = (fitness_M[0::2] + fitness_M[1::2]) / 2 if paired else fitness_M
    error = float(alone.std(ddof=1)) / math.sqrt(len(alone)) if len(alone) > 1 else None
    return {
        "population_minus_mean": mean - own,
        "population_minus_mean_error": None if error is None else math.hypot(error, control.floor / math.sqrt(2)),
        "kept_share": float((mean - lowest) / (own - lowest)) if own > lowest else None,
    }


def history_of(
    rows: Sequence[Mapping[str, Any]], config: Config, *, deterministic: bool = False, given: str | None = None
) -> History:
    """Return the history of a run from its rows of metrics.jsonl; the other arguments are those of `History`."""
    history = History(config, deterministic=deterministic, given=given)
    history.rows += [_recorded(row, config) for row in rows]
    return history


def _recorded(row: Mapping[str, Any], config: Config) -> Row:
    known = {"spread": row["std"], "mean_error": row["std"] / math.sqrt(config.es.population_size - 1)}
    kept = {name: row[name] for name in ("generation", "mean", "zero_variance")}
    shares = {name: row.get(name) for name in ("empty_share", "truncated_share")}
    return {**known, **shares, **kept, **(row.get("diagnosis") or {})}


def summary(history: History, alarm: str | None = None, *, beats_noise: bool = False) -> list[str]:
    """Summarise a run: whether it learns and how certain that is, how it moved, and what is still wrong.

    Warnings come last and begin with `WARNING`. `alarm` is the verdict on the test completions, which comes first.
    `beats_noise`: the run is above all its placebos, so the warning that noise earns reward is left out.
    """
    if not history.rows:
        return ["no generation yet"]
    verdict = _verdict(history) if alarm is None else f"{alarm}, judging by the completions; {_verdict(history)}"
    lines = [verdict, _signal(history), _selection(history), _moved(history), _completions(history)]
    wrong = {name: line for name, line in causes(history).items() if not (beats_noise and name == "noise earns")}
    return [line for line in lines if line] + [f"{WARNING}{line}" for line in wrong.values()]


def _verdict(history: History) -> str:
    trend = history.trend()
    if trend is None:
        return f"is it learning? {len(history.rows)} generations are too few to say"
    before, after, change, error = trend
    figures = (
        f"population fitness went from {before:.4g} to {after:.4g} ({change:+.3g}, standard error {error:.2g})"
        f" between the first and the last third of {len(history.rows)} generations"
    )
    if abs(change) <= SURE * error or change == 0:
        eta = history.eta()
        low = " (eta is below 0.05: raise es.learning_rate)" if eta is not None and eta < 0.05 else ""
        return f"not shown to learn: {figures}; that can be chance{low}"
    return f"{'learning' if change > 0 else 'getting worse'}: {figures}"


def _signal(history: History) -> str:
    useless = float(np.mean([row["zero_variance"] for row in history.rows]))
    spread, floor = float(np.median(values(history.rows, "spread"))), history.noise_floor()
    against = ""
    if floor is None:
        against = ", no control was run, so the noise floor is not known (checks.control_every)"
    elif floor > 0:
        source = ", of a reward that gives the same text different scores" if history.reward_noise() else ""
        against = f", {spread / floor:.1f} times the noise floor of {floor:.2g}{source}"
    if (found := mean_of(history.rows, "reliability")) is not None:
        against += f", with reliability {found:.2f} (0: ranks on some prompts say nothing about others; 1: all agree)"
    equal = f"in {useless:.0%} of the generations all members scored the same"
    return f"signal: members spread by {spread:.3g}{against}; {equal}"


def _selection(history: History) -> str:
    pooled = history.axes()
    shares = None if pooled is None else pooled.shares
    if pooled is None or shares is None:
        return ""
    line = f"what selects, last {len(pooled.rows)} generations: the coefficients follow {percent(shares)}"
    if pooled.lasting is None or pooled.lasting_share is None:
        return line
    return (
        f"{line}; {pooled.lasting_share:.0%} of that generalises to other prompts, which is what an update can "
        f"teach: {percent(pooled.lasting)}"
    )


def _moved(history: History) -> str:
    distance, cosine = values(history.rows[-1:], "distance_sigmas"), mean_of(history.rows, "cosine")
    if not distance:
        return ""
    how = ""
    if cosine is not None:
        meaning = "they undo each other" if cosine <= 0 else "they point the same way"
        if abs(cosine) < -LearningRateTooLarge.opposed:
            meaning = "near 0, as usual: each is made of new noise"
        how = f"; successive updates have cosine {cosine:+.3f} on average ({meaning})"
    return f"movement of the evolved numbers: {distance[0]:.2g} times one member's noise from the start{how}"


def _completions(history: History) -> str:
    first, last = history.ends()
    shares = {name: [mean_of(part, f"{name}_share") for part in (first, last)] for name in hacking.SHARES}
    if all(before is None for before, _ in shares.values()):
        return ""
    changes: list[str] = []
    for name, (before, now) in shares.items():
        change = "" if before is None or now is None else f"{before:.0%} to {now:.0%}"
        if change not in ("", "0% to 0%"):
            changes.append(f"{name.replace('_', ' ')} {change}")
    found = ", ".join(changes) or "no signs of broken text"
    ends = "generation" if len(first) == 1 else f"{len(first)} generations"
    return f"completions, first to last {ends}: {found}"
