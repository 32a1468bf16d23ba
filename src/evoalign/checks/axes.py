# SPDX-License-Identifier: Apache-2.0
"""Axis report: shares of the coefficients that the reward's columns, length and truncation explain.

**Shares** are of the variance of the coefficients over members, in a regression on the members' mean columns. The
columns of the reward come first. Each has the product of its regression weight and its covariance with the coefficients
(Pratt 1987), so independent columns have weight^2 x variance, and a column that the reward does not pay for has 0
however it is correlated. A negative share is of a column that members are selected against despite its weight. Tokens
and truncation have what they add to that, averaged over both orders: length that only goes along with a rewarded column
has no share. The rest is not explained. All shares add up to 1.

**Lasting** shares are of the differences between members that hold on other prompts, which is all that an update can
teach. A rare right answer makes large coefficients by luck: with 2 % accuracy on 16 prompts luck explains most of them.
The covariances are then means of products of *different* prompts, in which luck has mean 0, over the last ten
generations. To first order, a lasting share is the column's part of the rise of the reward.

Array suffixes: M members, P prompts, K columns, C the coefficient and the columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evoalign.config import Config
from evoalign.report.tables import percent
from evoalign.rewards.objective import Columns
from evoalign.tasks import TASKS, Task
from evoalign.types import Example, Generation

Floats: TypeAlias = NDArray[np.float64]
FEWEST = 5
"""Fewest generations for lasting shares."""
MOST = 30
"""Most columns of the reward."""
PER_COLUMN = 4
"""Fewest members per column, over the pooled generations, for shares."""
BROUGHT, PREDICTED = 0.4, 0.6
"""A warning needs these shares of what holds on other prompts: of the other columns of the reward, and what all other
columns predict together, with length and truncation."""
RIGHT = 0.25
"""Share of right completions from which there is no warning: format may be what is left to learn."""
CUT = 0.05
"""Smallest share of cut off completions for which the warning names `sampling.max_tokens`."""
TOKENS, TRUNCATED, REST = "tokens", "truncated", "rest"
EFFECTS = (TOKENS, TRUNCATED)
CORRECT = ("accuracy", "exact")
"""Names of columns that say whether a completion is right, if the task declares none."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Columns of a generation, [members, prompts], those of the reward before `EFFECTS`.

    `correctness` is the name of the column that says whether a completion is right.
    """

    columns_MP: Mapping[str, Floats]
    correctness: str | None = None


def reader(task: Task, examples: Sequence[Example]) -> Callable[[Generation], Measured | None]:
    """Return a function that measures the columns of a generation, whose rows are among `examples`."""

    def read(generation: Generation) -> Measured | None:
        rollouts, shape = generation.rollouts, (len(generation.fitness_M), len(generation.rows))
        if not rollouts or len(rollouts) != math.prod(shape):
            return None
        handed = [task.handed(examples[row]) for row in generation.rows]
        found: Columns = task.parts([r.text for r in rollouts], [handed[r.request] for r in rollouts])
        found, right = found or generation.columns, (*([task.correctness] if task.correctness else []), *CORRECT)
        only = next(iter(task.weighted.weights or ["reward"]))
        if not found and only in right and len(generation.scores_MP[0]) == shape[1]:
            found = {only: [score for row in generation.scores_MP for score in row]}
        effects = {
            TOKENS: [float(len(r.token_ids)) for r in rollouts],
            TRUNCATED: [float(r.finish_reason == "length") for r in rollouts],
        }
        named = [name for name in found if name not in EFFECTS][:MOST]
        columns = {**{name: found[name] for name in named}, **effects}
        # A reward that does not apply adds nothing to the weighted sum.
        columns_MP = {n: np.nan_to_num(np.array(v, dtype=np.float64)).reshape(shape) for n, v in columns.items()}
        return Measured(columns_MP, next((name for name in right if name in named), None))

    return read


def row_of(generation: Generation, measured: Measured | None) -> dict[str, Any] | None:
    """Return the covariances of a generation, for the field `axes` of its diagnosis; None without an update.

    Coefficients are in units of their standard deviation and columns in units of the fitness's, so that generations can
    be pooled.
    """
    fitness_M, coefficients_M = np.asarray(generation.fitness_M), np.asarray(generation.update.coefficients)
    if measured is None or not (fitness_M.std() > 0 and coefficients_M.std() > 0):
        return None
    names = list(measured.columns_MP)
    columns_KMP = np.array([measured.columns_MP[name] for name in names])
    means_K = columns_KMP.mean(axis=(1, 2))
    same_KP = np.ptp(columns_KMP, axis=1, keepdims=True) == 0  # exactly 0, whatever the rounding of the mean
    columns_KMP = np.where(same_KP, 0.0, columns_KMP - columns_KMP.mean(axis=1, keepdims=True)) / fitness_M.std()
    members, prompts = columns_KMP.shape[1:]
    sums_KM = columns_KMP.sum(axis=2)
    both_CM = np.vstack([(coefficients_M - coefficients_M.mean()) / coefficients_M.std(), sums_KM / prompts])
    lasting = None
    if prompts > 1:  # products of all pairs of different prompts
        flat_KN = columns_KMP.reshape(len(names), -1)
        lasting = _rounded((sums_KM @ sums_KM.T - flat_KN @ flat_KN.T) / (prompts * (prompts - 1) * members))
    return {
        "columns": names,
        "correctness": measured.correctness,
        "means": dict(zip(names, means_K.tolist(), strict=True)),
        "covariance": _rounded(both_CM @ both_CM.T / members),
        "lasting_covariance": lasting,
    }


def _rounded(matrix: Floats) -> list[list[float]]:
    return [[float(f"{value:.6g}") for value in row] for row in matrix.tolist()]


@dataclass(frozen=True)
class Axes:
    """Pooled generations of populations of `members`, as rows of `row_of` with the same columns."""

    rows: Sequence[Mapping[str, Any]]
    members: int

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any] | None], members: int) -> Axes | None:
        """Pool rows; None if none is known. Generations without update do not count."""
        known = [row for row in rows if row]
        return cls([row for row in known if row["columns"] == known[-1]["columns"]], members) if known else None

    @cached_property
    def names(self) -> list[str]:
        """Names of the columns, `EFFECTS` last."""
        return list(self.rows[-1]["columns"])

    @property
    def rewarded(self) -> list[str]:
        """Names of the columns of the reward."""
        return self.names[: -len(EFFECTS)]

    @property
    def correctness(self) -> str | None:
        """Name of the column that says whether a completion is right, if the task declares one."""
        return self.rows[-1]["correctness"]

    @cached_property
    def means(self) -> dict[str, float]:
        """Mean of each column."""
        return {name: float(np.mean([row["means"][name] for row in self.rows])) for name in self.names}

    @cached_property
    def shares(self) -> dict[str, float] | None:
        """Share of the coefficients' variance that each column explains, and the rest; None with too few members."""
        if len(self.rows) * self.members < PER_COLUMN * len(self.names):
            return None
        matrix, first = self._covariance, [*range(len(self.rewarded))]
        paid_K = self._weights * matrix[1 : 1 + len(first), 0] / matrix[0, 0]
        one, other = (len(first) + i for i in range(len(EFFECTS)))
        none, both = _r2(matrix, first), _r2(matrix, [*first, one, other])
        with_one, with_other = _r2(matrix, [*first, one]), _r2(matrix, [*first, other])
        effects = (with_one - none + both - with_other) / 2, (with_other - none + both - with_one) / 2
        found = dict(zip(self.names, (*map(float, paid_K), *effects), strict=True))
        return {name: round(share, 6) + 0.0 for name, share in {**found, REST: 1 - sum(found.values())}.items()}

    @cached_property
    def lasting_share(self) -> float | None:
        """Share of the variance explained by the reward's columns that holds on other prompts.

        None with fewer than `FEWEST` generations, or less than two standard errors above 0.
        """
        if len(self.rows) < FEWEST or not self.rewarded or any(r["lasting_covariance"] is None for r in self.rows):
            return None
        count, weights_K = len(self.rewarded), self._weights
        each = [weights_K @ np.array(row["lasting_covariance"])[:count, :count] @ weights_K for row in self.rows]
        whole = float(weights_K @ self._covariance[1 : 1 + count, 1 : 1 + count] @ weights_K)
        if whole <= 0 or np.mean(each) <= 2 * np.std(each, ddof=1) / math.sqrt(len(each)):
            return None
        return min(1.0, float(np.mean(each)) / whole)

    @cached_property
    def lasting(self) -> dict[str, float] | None:
        """Share of each of the reward's columns in what holds on other prompts; None as `lasting_share`."""
        if self.lasting_share is None:
            return None
        held_K = self._lasting[1 : 1 + len(self.rewarded), 0] * self._weights
        return dict(zip(self.rewarded, (held_K / held_K.sum()).tolist(), strict=True))

    def predicted(self, names: Sequence[str]) -> float:
        """Return the share of what holds on other prompts that some columns predict together.

        A column counts only as far as its variance exceeds its standard error.
        """
        ridge_K = np.diag(self._covariance)[1:] * math.sqrt(2 / (len(self.rows) * self.members))
        return _r2(self._lasting, [self.names.index(name) for name in names], ridge_K)

    @cached_property
    def _covariance(self) -> Floats:
        return np.mean([np.array(row["covariance"]) for row in self.rows], axis=0)

    @cached_property
    def _weights(self) -> Floats:
        """Regression weights of the coefficients on the reward's columns."""
        end = 1 + len(self.rewarded)
        return _inverse(self._covariance[1:end, 1:end]) @ self._covariance[1:end, 0]

    @cached_property
    def _lasting(self) -> Floats:
        """Covariance [C, C] on other prompts of the coefficient, as far as the reward's columns explain it."""
        found_KK = np.mean([np.array(row["lasting_covariance"]) for row in self.rows], axis=0)
        scale = np.outer(*[_deviations(self._covariance[1:, 1:])] * 2)
        values, vectors = np.linalg.eigh(found_KK / scale)
        found_KK = (vectors * np.maximum(values, 0.0)) @ vectors.T * scale  # estimates of variances may be below 0
        weights_K = np.concatenate([self._weights, np.zeros(len(EFFECTS))])
        held_K = found_KK @ weights_K
        return np.block([[np.array([[weights_K @ held_K]]), held_K[None, :]], [held_K[:, None], found_KK]])


def wrong_axis(axes: Axes, config: Config) -> str | None:
    """Return a warning if other columns of the reward select members, and the one that says what is right does not.

    Only differences that hold on other prompts count: the luck of rare right answers is no selection.
    """
    right, lasting = axes.correctness, axes.lasting
    if right is None or lasting is None:
        return None
    others = {name: share for name, share in lasting.items() if name != right}
    share, solved = axes.predicted([*others, *EFFECTS]), axes.means[right]
    if sum(others.values()) < BROUGHT or share < PREDICTED or solved >= RIGHT:
        return None
    cls, tokens, is_cut = TASKS.get(config.task.name), config.sampling.max_tokens, axes.means[TRUNCATED]
    setting = f"task.objective {{name: weighted_sum, weights: {{{right}: 1}}}}"
    if cls is not None and cls.takes_weights and config.task.objective is None:
        setting = f"task.reward_weights {[float(name == right) for name in lasting]}"
    longer = f", and sampling.max_tokens {2 * tokens} ({is_cut:.0%} are cut off)" if is_cut >= CUT else ""
    length = " and length" if axes.predicted(EFFECTS) >= PREDICTED else ""
    return (
        f"the coefficients follow {max(others, key=others.__getitem__)}{length}, not {right}: the differences between "
        f"members that hold on other prompts are of {percent(lasting)}, and {', '.join([*others, *EFFECTS])} predict "
        f"{share:.0%} of them without {right}; {solved:.1%} of the completions are right: reward {right} alone with "
        f"{setting}{longer}"
    )


def _r2(matrix_CC: Floats, chosen: Sequence[int], ridge_K: Floats | None = None) -> float:
    """Return R^2 of the first variable of a covariance on the columns `chosen`."""
    if not chosen or matrix_CC[0, 0] <= 0:
        return 0.0
    places = [1 + k for k in chosen]
    among, along = matrix_CC[np.ix_(places, places)], matrix_CC[places, 0]
    among = among if ridge_K is None else among + np.diag(ridge_K[list(chosen)])
    return float(np.clip(along @ _inverse(among) @ along / matrix_CC[0, 0], 0.0, 1.0))


def _inverse(covariance: Floats) -> Floats:
    """Return the pseudo-inverse, in units of the standard deviations."""
    scale = np.outer(*[_deviations(covariance)] * 2)
    return np.linalg.pinv(covariance / scale, rcond=1e-6, hermitian=True) / scale if len(covariance) else covariance


def _deviations(covariance: Floats) -> Floats:
    """Return the standard deviations, 1 for those that are 0."""
    found = np.sqrt(np.maximum(np.diag(covariance), 0.0))
    return np.where(found > 0, found, 1.0)
