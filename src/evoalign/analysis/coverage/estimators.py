# SPDX-License-Identifier: Apache-2.0
"""Estimators for n tries at each of P problems: pass@k and its error, which problems two models solve, and variety.

Array suffixes: N tries, P problems. `solved_NP` says which try solved which problem.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from evoalign import statistics
from evoalign.rewards.functions import normalized
from evoalign.statistics import Estimate, between, bounded

Floats: TypeAlias = NDArray[np.float64]
Solved: TypeAlias = NDArray[np.bool_]
TEMPERATURE, SIGMA = "temperature", "sigma"
"""Kinds of ways to try a problem: sampling, and weight noise."""


@dataclass(frozen=True, slots=True)
class Way:
    """How tries differ: sampled at a temperature, or each with its own noise of width sigma on the weights."""

    kind: str
    value: float

    @property
    def name(self) -> str:
        return f"{self.kind} {self.value:g}"

    @property
    def short(self) -> str:
        """The name in the heading of a column."""
        return f"{'T' if self.kind == TEMPERATURE else 'σ'} {self.value:g}"

    @property
    def shared(self) -> bool:
        """Whether one draw is the same at all problems."""
        return self.kind == SIGMA


@dataclass(frozen=True, slots=True)
class Tries:
    """The tries of a target in one way: which try solved which problem, and the completions, [P][N]."""

    solved_NP: Solved
    texts_PN: Sequence[Sequence[str]]

    def variety(self) -> dict[str, Estimate]:
        """Estimate the entropy of the completions (nats), distinct n-grams, and the mean difference of two of them."""
        alike = [[normalized(text) for text in texts] for texts in self.texts_PN]
        values = {"entropy": [entropy(texts) for texts in alike]}
        values |= {f"distinct_{n}": [distinct(texts, n) for texts in self.texts_PN] for n in (1, 2)}
        values["pairwise"] = [pairwise(texts) for texts in self.texts_PN]
        found: dict[str, Estimate] = {}
        for name, value_P in values.items():
            known = [value for value in value_P if not math.isnan(value)]
            most = math.log(len(self.solved_NP)) if name == "entropy" else 1.0
            none = Estimate(math.nan, 0, why="no words: no interval")
            found[name] = bounded(statistics.mean(known), high=most) if known else none
        return found


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt, and its gold answer where there is one."""

    prompt: str
    target: str | None


All: TypeAlias = Mapping[str, Mapping[Way, Tries]]
"""Tries by target and way."""


@lru_cache(maxsize=256)
def _table(n: int, k: int) -> Floats:
    """Return 1 - C(n - c, k) / C(n, k) for c from 0 to n, computed with integers and rounded once."""
    every = math.comb(n, k)
    return np.array([(every - math.comb(n - c, k)) / every for c in range(n + 1)])


def pass_at(solved_NP: Solved, k: int) -> Floats:
    """Return the unbiased estimate of pass@k for each problem, [P] (Chen et al. 2021); 1 <= k <= N."""
    return _table(len(solved_NP), k)[solved_NP.sum(0)]


def gaps(solved_NP: Solved, k: int) -> Floats:
    """Return what each try adds to pass@k of each problem, [N, P]: the estimate minus that without the try.

    For k = N, where N - 1 tries have no pass@k, pass@(N - 1) is subtracted.
    """
    n = len(solved_NP)
    without = _table(n - 1, min(k, n - 1))[solved_NP.sum(0)[None, :] - solved_NP]
    return pass_at(solved_NP, k)[None, :] - without


def error(gaps_NP: Floats, *, shared: bool) -> float:
    """Return the standard error of the mean over problems, for other tries at the same problems.

    It is the root of the summed squared gaps. Their expectation is at least the variance (Efron and Stein 1981, for any
    function of independent tries), so the error is conservative. `shared`: try j is the same at all problems, such as a
    draw of noise on the weights; else tries are independent.
    """
    if shared:
        return float(np.sqrt((gaps_NP.mean(1) ** 2).sum()))
    return float(np.sqrt((gaps_NP**2).sum())) / gaps_NP.shape[1]


def estimate(solved_NP: Solved, k: int, *, shared: bool) -> Estimate:
    """Estimate the mean pass@k for new problems and new tries.

    Where tries at different problems are independent, the spread between problems includes their error. Where they are
    shared, it is added.
    """
    return widened(between(pass_at(solved_NP, k), 0.0, 1.0), gaps(solved_NP, k), shared=shared)


def change(before_NP: Solved, after_NP: Solved, k: int, *, shared: bool) -> Estimate:
    """Estimate the change of pass@k on the same problems, paired, for new problems and new tries."""
    found = between(pass_at(after_NP, k) - pass_at(before_NP, k), -1.0, 1.0)
    return widened(found, gaps(after_NP, k) - gaps(before_NP, k), shared=shared, least=-1.0)


def widened(found: Estimate, gaps_NP: Floats, *, shared: bool, least: float = 0.0) -> Estimate:
    """Add the error of shared tries, with its own t quantile, to an interval over problems; clip to `least` to 1."""
    if not shared or found.low is None or found.high is None:
        return found
    more = statistics.t_of(len(gaps_NP) - 1) * error(gaps_NP, shared=True)
    low, high = (math.hypot(found.mean - end, more) for end in (found.low, found.high))
    return replace(found, low=max(least, found.mean - low), high=min(1.0, found.mean + high))


def chosen_elsewhere(ways: Sequence[Solved], k: int) -> tuple[Solved, tuple[int, int]]:
    """Return the completions of the best way for pass@k by cross-fitting, and the two ways that were chosen.

    Even problems are scored with the way that is best on odd problems, and odd ones with the best on even ones.

    Choosing a way on the problems that it is scored on would overestimate it.
    """
    values_WP = np.stack([pass_at(solved_NP, k) for solved_NP in ways])
    best = (int(values_WP[:, 1::2].mean(1).argmax()), int(values_WP[:, ::2].mean(1).argmax()))
    found_NP = ways[best[0]].copy()
    found_NP[:, 1::2] = ways[best[1]][:, 1::2]
    return found_NP, best


def support(base_NP: Solved, target_NP: Solved) -> dict[str, Floats]:
    """Return who solves what with N / 2 tries of the base and the N / 2 others of the target, averaged over all halves.

    For each problem [P], the probability that both solve it (`preserved`), the base alone (`shrunk`), the target alone
    (`expanded`), or `neither`. The halves are disjoint, so that tries of both with the same seed do not count as
    agreement. The base compared with itself gives what chance alone shows. N is even.
    """
    n = len(base_NP)
    half, ways = n // 2, math.comb(n, n // 2)

    def all_in_half(count: int) -> float:
        return math.comb(n - count, half - count) / ways if count <= half else 0.0

    rows: list[tuple[float, float, float, float]] = []
    for base_N, target_N in zip(base_NP.T, target_NP.T, strict=True):
        b, t = int(base_N.sum()), int(target_N.sum())
        apart = not bool((base_N & target_N).any())
        neither = math.comb(n - b - t, half - t) / ways if apart and t <= half else 0.0
        shrunk, expanded = all_in_half(t) - neither, all_in_half(b) - neither
        rows.append((1 - shrunk - expanded - neither, shrunk, expanded, neither))
    return dict(zip(("preserved", "shrunk", "expanded", "neither"), np.array(rows).T, strict=True))


def jaccard(a_NP: Solved, b_NP: Solved) -> Estimate:
    """Estimate the Jaccard index of the solved problems, with Fieller's interval for new problems."""
    a_P, b_P = a_NP.any(0), b_NP.any(0)
    return bounded(statistics.ratio((a_P & b_P).astype(float), (a_P | b_P).astype(float)))


def entropy(answers: Sequence[str]) -> float:
    """Return the entropy of the answers to one problem in nats: at most ln N, and biased low where many occur once."""
    shares = np.array(list(Counter(answers).values())) / len(answers)
    return float(-(shares * np.log(shares)).sum()) + 0.0


def distinct(texts: Sequence[str], n: int) -> float:
    """Return the share of distinct word n-grams in the texts for one problem (Li et al. 2016); NaN without any."""
    grams = [tuple(words[i : i + n]) for words in map(str.split, texts) for i in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) if grams else math.nan


def pairwise(texts: Sequence[str]) -> float:
    """Return the mean Jaccard distance of the word sets of two texts; 0 for two texts without words."""
    known: dict[str, int] = {}
    sets = [{known.setdefault(word, len(known)) for word in text.split()} for text in texts]
    has_NW = np.zeros((len(texts), max(1, len(known))), dtype=np.float32)
    for row, places in enumerate(sets):
        has_NW[row, list(places)] = 1
    common, sizes = has_NW @ has_NW.T, has_NW.sum(1)
    either = sizes[:, None] + sizes[None, :] - common
    alike = np.where(either > 0, common / np.maximum(either, 1), 1.0)
    pairs = len(texts) * (len(texts) - 1)
    return float(1 - (alike.sum() - np.trace(alike)) / pairs)
