# SPDX-License-Identifier: Apache-2.0
"""What n tries at each of P problems say: pass@k, its error, and which problems one model solves and another does not.

Array suffixes: N tries, P problems. `solved_NP` says which try solved which problem.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from evoalign import statistics
from evoalign.analysis.estimates import between, bounded
from evoalign.statistics import Estimate

Floats = NDArray[np.float64]
Solved = NDArray[np.bool_]


@lru_cache(maxsize=256)
def _table(n: int, k: int) -> Floats:
    """1 - C(n - c, k) / C(n, k) for c from 0 to n, by whole numbers, rounded once."""
    every = math.comb(n, k)
    return np.array([(every - math.comb(n - c, k)) / every for c in range(n + 1)])


def pass_at(solved_NP: Solved, k: int) -> Floats:
    """The unbiased estimate for each problem, [P], that one of k tries solves it (Chen et al. 2021): 1 <= k <= N."""
    return _table(len(solved_NP), k)[solved_NP.sum(0)]


def gaps(solved_NP: Solved, k: int) -> Floats:
    """What each try adds to pass@k of each problem, [N, P]: the estimate less that without the try.

    Of k = N, where N - 1 tries say nothing of k, less pass@(N - 1).
    """
    n = len(solved_NP)
    without = _table(n - 1, min(k, n - 1))[solved_NP.sum(0)[None, :] - solved_NP]
    return pass_at(solved_NP, k)[None, :] - without


def error(gaps_NP: Floats, *, shared: bool) -> float:
    """The standard error, by other tries at the same problems, of the mean over problems of what the gaps are of.

    The root of the summed squared gaps. Their expectation is no less than the variance (Efron and Stein 1981; their
    bound holds for any function of independent tries), so that the error is too large rather than too small.
    `shared`: try j is the same at all problems, as one draw of noise on the weights is; else tries are independent.
    """
    if shared:
        return float(np.sqrt((gaps_NP.mean(1) ** 2).sum()))
    return float(np.sqrt((gaps_NP**2).sum())) / gaps_NP.shape[1]


def estimate(solved_NP: Solved, k: int, *, shared: bool) -> Estimate:
    """Mean pass@k with its interval, for new problems and new tries.

    Where tries at different problems are independent, the spread between problems has their error in it. Where they
    are shared, it is added.
    """
    return widened(between(pass_at(solved_NP, k), 0.0, 1.0), gaps(solved_NP, k), shared=shared)


def change(before_NP: Solved, after_NP: Solved, k: int, *, shared: bool) -> Estimate:
    """By how much pass@k of the same problems differs, paired, for new problems and new tries."""
    found = between(pass_at(after_NP, k) - pass_at(before_NP, k), -1.0, 1.0)
    return widened(found, gaps(after_NP, k) - gaps(before_NP, k), shared=shared, least=-1.0)


def widened(found: Estimate, gaps_NP: Floats, *, shared: bool, least: float = 0.0) -> Estimate:
    """An interval over problems with the error of shared tries added, squared, by a t of its own; `least` to 1."""
    if not shared or found.low is None or found.high is None:
        return found
    more = statistics.t_of(len(gaps_NP) - 1) * error(gaps_NP, shared=True)
    low, high = (math.hypot(found.mean - end, more) for end in (found.low, found.high))
    return replace(found, low=max(least, found.mean - low), high=min(1.0, found.mean + high))


def chosen_elsewhere(ways: Sequence[Solved], k: int) -> tuple[Solved, tuple[int, int]]:
    """The best way for pass@k, chosen for every second problem by the others: its tries, and which ways were chosen.

    The best of several on the problems that it was chosen by looks better than it is.
    """
    values_WP = np.stack([pass_at(solved_NP, k) for solved_NP in ways])
    best = (int(values_WP[:, 1::2].mean(1).argmax()), int(values_WP[:, ::2].mean(1).argmax()))
    found_NP = ways[best[0]].copy()
    found_NP[:, 1::2] = ways[best[1]][:, 1::2]
    return found_NP, best


@dataclass(frozen=True, slots=True)
class Support:
    """The chance, of each problem [P], that both solve it, the first alone, the second alone, none."""

    preserved_P: Floats
    shrunk_P: Floats
    expanded_P: Floats
    neither_P: Floats


def support(base_NP: Solved, target_NP: Solved) -> Support:
    """What N / 2 tries of the base and N / 2 others of the target solve, in the mean over all ways to halve N tries.

    The halves are disjoint, so that tries of both by the same seeds do not count as agreement; and of the base against
    itself it is what chance alone shows. N is even.
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
    return Support(*np.array(rows).T)


def jaccard(a_NP: Solved, b_NP: Solved) -> Estimate:
    """Problems that both solve in N tries over those that either does, with Fieller's interval for new problems."""
    a_P, b_P = a_NP.any(0), b_NP.any(0)
    return bounded(statistics.ratio((a_P & b_P).astype(float), (a_P | b_P).astype(float)))


# --- how varied answers are -------------------------------------------------------------------------------------------


def entropy(answers: Sequence[str]) -> float:
    """Of the answers to one problem, nats, by their frequencies: at most ln N, and too small where many come once."""
    shares = np.array(list(Counter(answers).values())) / len(answers)
    return float(-(shares * np.log(shares)).sum()) + 0.0


def distinct(texts: Sequence[str], n: int) -> float:
    """Different n-grams of words over all of them, of the answers to one problem (Li et al. 2016); NaN without any."""
    grams = [tuple(words[i : i + n]) for words in map(str.split, texts) for i in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) if grams else math.nan


def pairwise(texts: Sequence[str]) -> float:
    """Mean over pairs of answers of the share of their words that only one of the two has; two without words: 0."""
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
