# SPDX-License-Identifier: Apache-2.0
"""A run in plain words: is it learning and how sure is that, how it moved, and what is still wrong.

Of the rows of metrics.jsonl alone, so that a run that was made elsewhere is told of as at its own end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from evoalign.checks import hacking
from evoalign.checks.rules import NOISE_EARNS, OPPOSED, SURE, History, Row, causes, mean_of, values
from evoalign.config import Config

WARNING = "warning: "
"""What a line begins with that says what is wrong."""


def history_of(
    rows: Sequence[Mapping[str, Any]], config: Config, *, deterministic: bool = False, given: str | None = None
) -> History:
    """What a run has shown, by its rows of metrics.jsonl; the others are as `History` has them."""
    history = History(config, deterministic=deterministic, given=given)
    history.rows += [recorded(row, config) for row in rows]
    return history


def recorded(row: Mapping[str, Any], config: Config) -> Row:
    """A row of metrics.jsonl as a `History` has it."""
    known = {"spread": row["std"], "mean_error": row["std"] / math.sqrt(config.es.population_size - 1)}
    kept = {name: row[name] for name in ("generation", "mean", "zero_variance")}
    shares = {name: row.get(name) for name in ("empty_share", "truncated_share")}
    return {**known, **shares, **kept, **(row.get("diagnosis") or {})}


def told(history: History, alarm: str | None = None, *, beats_noise: bool = False) -> list[str]:
    """Sentences; those that begin with `WARNING` come last.

    `alarm`: what the completions of the test split say of it, which then comes first. `beats_noise`: it is above all
    its placebos, which have told what noise alone earns.
    """
    if not history.rows:
        return ["no generation yet"]
    verdict = _verdict(history) if alarm is None else f"{alarm}, by what it says; {_verdict(history)}"
    lines = [verdict, _signal(history), _movement(history), _completions(history)]
    wrong = {name: line for name, line in causes(history).items() if not (beats_noise and name == NOISE_EARNS)}
    return [line for line in lines if line] + [f"{WARNING}{line}" for line in wrong.values()]


def _verdict(history: History) -> str:
    trend = history.trend()
    if trend is None:
        return f"is it learning? {len(history.rows)} generations are too few to tell"
    before, after, change, error = trend
    figures = (
        f"population fitness went from {before:.4g} to {after:.4g} ({change:+.3g}, standard error {error:.2g})"
        f" between the first and the last third of {len(history.rows)} generations"
    )
    if abs(change) <= SURE * error or change == 0:
        low = " (eta is below 0.05: raise es.learning_rate)" if history.eta() < 0.05 else ""
        return f"not shown to learn: {figures}; that can be chance{low}"
    return f"{'learning' if change > 0 else 'getting worse'}: {figures}"


def _signal(history: History) -> str:
    useless = float(np.mean([row["zero_variance"] for row in history.rows]))
    spread, floor = float(np.median(values(history.rows, "spread"))), history.noise_floor()
    if floor is None:
        against = "no control was run, so the noise floor is not known (checks.control_every)"
    elif floor == 0:
        against = "the unperturbed model scored twice came out the same"
    else:
        whose = ", of a reward that gives the same text different scores" if history.reward_noise() else ""
        against = f"{spread / floor:.1f} times the noise floor of {floor:.2g}{whose}"
    return f"signal: members spread by {spread:.3g}, {against}; {useless:.0%} of the generations moved nothing"


def _movement(history: History) -> str:
    distance, cosine = values(history.rows[-1:], "distance_sigmas"), mean_of(history.rows, "cosine")
    if not distance:
        return ""
    how = "" if cosine is None else f"; successive updates have cosine {cosine:+.3f} on average{_meaning(cosine)}"
    return f"movement of the numbers that evolve: {distance[0]:.2g} times one member's noise from the start{how}"


def _completions(history: History) -> str:
    said: list[str] = []
    first, last = history.ends()
    for name in hacking.SHARES:
        before, now = (mean_of(part, f"{name}_share") for part in (first, last))
        shares = None if before is None or now is None else f"{before:.0%} to {now:.0%}"
        if shares is not None and shares != "0% to 0%":
            said.append(f"{name.replace('_', ' ')} {shares}")
    what = ", ".join(said) or "none of the signs"
    known = any(mean_of(first, f"{name}_share") is not None for name in hacking.SHARES)
    return f"completions, first to last {len(first)} generations: {what}" if known else ""


def _meaning(cosine: float) -> str:
    """Of the mean cosine of successive updates."""
    if abs(cosine) < -OPPOSED:
        return " (near 0, which is usual: each is made of noise of its own)"
    return " (they go on the same way)" if cosine > 0 else " (they undo each other)"
