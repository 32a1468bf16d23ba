# SPDX-License-Identifier: Apache-2.0
"""Axis report: shares of the coefficients that the reward's columns, length and truncation explain.

**Shares** are of the variance of the coefficients over members, in a regression on the members' mean columns. The
columns of the reward come first. Each has the product of its regression weight and its covariance with the coefficients
(Pratt 1987), so independent columns have weight^2 x variance, and a column that the reward does not pay for has 0
however it is correlated. A negative share is of a column that members are selected against despite its weight. Tokens
and truncation have what they add to that, averaged over both orders: length that only goes along with a rewarded column
has no share. All shares add up to 1.

**Lasting** shares are of the generalising differences between members: those that hold on other prompts, which is all
that an update can teach. A rare right answer makes large coefficients by luck: with 2 % accuracy on 16 prompts luck
explains most of them. The covariances are then means of products of *different* prompts, in which luck has mean 0, over
the last ten generations. To first order, a lasting share is the column's part of the rise of the reward.

With antithetic pairs the step sums c(+) - c(-) times the pair's noise, so everything is of differences within pairs.

Array suffixes: M members, P prompts, K columns, C the coefficient and the columns.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evoalign.config import Config
from evoalign.plugins import FAILURES, raised
from evoalign.report.tables import percent
from evoalign.rewards.objective import Columns
from evoalign.tasks import TASKS, Task
from evoalign.tasks.grading import joined, pieces
from evoalign.tasks.joint import Settings
from evoalign.types import Example, Generation, Member

logger = logging.getLogger("evoalign.grader")

Floats: TypeAlias = NDArray[np.float64]
FEWEST = 5
"""Fewest generations for lasting shares."""
MOST = 29
"""Most columns of the reward: `rundir.metrics` reads covariances up to 32 x 32."""
PER_COLUMN = 4
"""Fewest members per column, over the pooled generations, for shares."""
OF_OTHERS, PREDICTABLE = 0.4, 0.6
"""Smallest shares of the generalising differences for a warning: of the other columns of the reward, and what all other
columns predict together, with length and truncation."""
TEACHING = 0.3
"""Largest gain of correctness with the other columns for a warning, see `Axes.gain_of`: partial credit has more."""
CERTAIN = 3.0
"""Standard errors of the generalising variance for a warning: each generation tests anew, so 2 are often chance."""
LARGEST = 1e100
"""Largest covariance that is reported: products of larger ones overflow."""
RIGHT = 0.25
"""Share of right completions from which there is no warning: format may be what is left to learn."""
CUT = 0.05
"""Smallest share of cut off completions for which the warning names `sampling.max_tokens`."""
TOKENS, TRUNCATED, UNEXPLAINED = "tokens", "truncated", "unexplained"
EFFECTS = (TOKENS, TRUNCATED)
RESERVED = (*EFFECTS, UNEXPLAINED)
"""Names that a column of the reward cannot have: it is then `reward/` and its name."""
CORRECT = ("accuracy", "exact")
"""Names of columns that say whether a completion is right, if the task declares none."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Columns of a generation, [members, prompts], those of the reward before `EFFECTS`.

    `correctness` is the name of the column that says whether a completion is right.
    """

    columns_MP: Mapping[str, Floats]
    correctness: str | None = None


def reader(task: Task, examples: Sequence[Example], settings: Settings) -> Callable[[Generation], Measurement | None]:
    """Return a function that measures the columns of a generation, whose rows are among `examples`.

    Each completion is measured on its row under the settings of its member, with which it was made.

    It returns None for good once `parts` has failed, so that one that hangs does not cost each generation its timeout.
    """
    failed = False

    def read(generation: Generation) -> Measurement | None:
        nonlocal failed
        rollouts, shape = generation.rollouts, (len(generation.fitness_M), len(generation.rows))
        if failed or not rollouts or len(rollouts) != math.prod(shape):
            return None
        try:
            rows = settings.asked(examples, generation.rows, generation.settings)
            found = _parts(task, [r.text for r in rollouts], [*rows] * (len(rollouts) // len(rows)))
        except FAILURES as error:
            failed = True
            logger.warning("no further axis report: `parts` of task %s failed: %s; fix it", task.name, raised(error))
            return None
        found, right = found or generation.columns, (*([task.correctness] if task.correctness else []), *CORRECT)
        only = next(iter(task.weighted.weights or ["reward"]))
        if not found and only in right and len(generation.scores_MP[0]) == shape[1]:
            found = {only: [score for row in generation.scores_MP for score in row]}
        own = {name: _free(name, found) for name in list(found)[:MOST]}
        columns: Columns = {
            **{own[name]: found[name] for name in own},
            TOKENS: [float(len(r.token_ids)) for r in rollouts],
            TRUNCATED: [float(r.finish_reason == "length") for r in rollouts],
        }
        # A reward that does not apply adds nothing to the weighted sum.
        columns_MP = {n: np.nan_to_num(np.array(v, dtype=np.float64)).reshape(shape) for n, v in columns.items()}
        return Measurement(columns_MP, next((own[name] for name in right if name in own), None))

    return read


def _parts(task: Task, texts: Sequence[str], examples: Sequence[Example]) -> Columns:
    """Return the task's `parts`, checked and in pieces like its columns. Raises RewardError and what user code does."""
    found: list[Columns] = []
    for piece in pieces(len(texts), task.per_call):
        part = slice(piece.start, piece.stop)
        columns = task.parts(texts[part], [task.handed(example) for example in examples[part]])
        found.append(task.checked_columns(columns, texts[part], examples[part]) if columns else {})
    return joined(task, found)


def _free(name: str, taken: Container[str]) -> str:
    """Return the name, with a prefix if it is reserved."""
    if name in RESERVED:
        name = f"reward/{name}"
        while name in taken:
            name = f"reward/{name}"
    return name


def row_of(generation: Generation, measured: Measurement | None) -> dict[str, Any] | None:
    """Return the covariances of a generation, for the field `axes` of its diagnosis; None without an update.

    Coefficients are in units of their standard deviation and columns in units of the fitness's, so that generations can
    be pooled. With antithetic pairs, all are differences of pairs: what both members share moves nothing. None as well
    if a covariance is too large.
    """
    if measured is None:
        return None
    names, pairs = list(measured.columns_MP), _pairs(generation.update.members)
    columns_KMP = np.array([measured.columns_MP[name] for name in names])
    with np.errstate(all="ignore"):
        means_K = columns_KMP.mean(axis=(1, 2))
        fitness_M, coefficients_M = (
            _differences(np.array(values, dtype=np.float64)[None, :, None], pairs)[0, :, 0]
            for values in (generation.fitness_M, generation.update.coefficients)
        )
        units = [math.sqrt(np.mean(np.square(values_M))) for values_M in (fitness_M, coefficients_M)]
        if not all(0 < unit < math.inf for unit in units):
            return None
        columns_KMP = _differences(columns_KMP, pairs) / units[0]
        members, prompts = columns_KMP.shape[1:]
        sums_KM = columns_KMP.sum(axis=2)
        both_CM = np.vstack([coefficients_M / units[1], sums_KM / prompts])
        covariance, lasting = both_CM @ both_CM.T / members, None
        if prompts > 1:  # products of all pairs of different prompts
            flat_KN = columns_KMP.reshape(len(names), -1)
            lasting = (sums_KM @ sums_KM.T - flat_KN @ flat_KN.T) / (prompts * (prompts - 1) * members)
    found = [means_K, covariance, *([] if lasting is None else [lasting])]
    if not all(np.all(np.abs(numbers) <= LARGEST) for numbers in found):
        return None
    return {
        "columns": names,
        "correctness": measured.correctness,
        "members": members,
        "means": dict(zip(names, means_K.tolist(), strict=True)),
        "covariance": _rounded(covariance),
        "lasting_covariance": None if lasting is None else _rounded(lasting),
    }


def _pairs(members: Sequence[Member]) -> tuple[list[int], list[int]] | None:
    """Return the places of the positive and the negative members, by pair; None unless all members are in pairs."""
    plus, minus = ({m.noise: i for i, m in enumerate(members) if m.sign == sign} for sign in (1, -1))
    if plus.keys() != minus.keys() or len(plus) + len(minus) != len(members):
        return None
    return list(plus.values()), [minus[noise] for noise in plus]


def _differences(values_KMP: Floats, pairs: tuple[list[int], list[int]] | None) -> Floats:
    """Return the differences within pairs; without pairs, from the mean over members."""
    if pairs is not None:
        return values_KMP[:, pairs[0]] - values_KMP[:, pairs[1]]
    same_KP = np.ptp(values_KMP, axis=1, keepdims=True) == 0  # exactly 0, whatever the rounding of the mean
    return np.where(same_KP, 0.0, values_KMP - values_KMP.mean(axis=1, keepdims=True))


def _rounded(matrix: Floats) -> list[list[float]]:
    return [[float(f"{value:.6g}") for value in row] for row in matrix.tolist()]


@dataclass(frozen=True)
class Axes:
    """Pooled generations, as rows of `row_of` with the same columns; of `members` members or antithetic pairs."""

    rows: Sequence[Mapping[str, Any]]
    members: int

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any] | None], members: int) -> Axes | None:
        """Pool rows; None if none is known. Generations without update do not count.

        `members` is the number of members of rows that do not have it.
        """
        known = [row for row in rows if row]
        if not known:
            return None
        same = [row for row in known if row["columns"] == known[-1]["columns"]]
        return cls(same, known[-1].get("members") or members)

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
        return {name: round(share, 6) + 0.0 for name, share in {**found, UNEXPLAINED: 1 - sum(found.values())}.items()}

    @cached_property
    def lasting_share(self) -> float | None:
        """Share that generalises to other prompts, of the variance that the reward's columns explain.

        None with fewer than `FEWEST` generations, or less than two standard errors above 0.
        """
        whole_CC, weights_K = self._covariance[1 : 1 + len(self.rewarded), 1 : 1 + len(self.rewarded)], self._weights
        whole = float(weights_K @ whole_CC @ weights_K)
        return min(1.0, float(np.mean(self._held)) / whole) if whole > 0 and self.errors > 2 else None

    @cached_property
    def errors(self) -> float:
        """Standard errors by which the generalising variance is above 0; 0 with fewer than `FEWEST` generations."""
        each = self._held
        if len(each) < FEWEST or np.mean(each) <= 0:
            return 0.0
        error = float(np.std(each, ddof=1)) / math.sqrt(len(each))
        return float(np.mean(each)) / error if error > 0 else math.inf

    @cached_property
    def _held(self) -> list[float]:
        """Generalising variance of what the reward's columns explain, of each generation; empty if not known."""
        if not self.rewarded or any(row["lasting_covariance"] is None for row in self.rows):
            return []
        count, weights_K = len(self.rewarded), self._weights
        found = (np.array(row["lasting_covariance"])[:count, :count] for row in self.rows)
        return [float(weights_K @ held_KK @ weights_K) for held_KK in found]

    def gain_of(self, right: str) -> float:
        """Return the gain of one column with a gain of the others, over members and on other prompts.

        Both are in standard deviations of the luck of one completion. Partial credit has about 1. Format has little,
        even if all right completions are formatted: few of the formatted ones are right.
        """
        first, at = len(self.rewarded), self.rewarded.index(right)
        sides_2K = np.zeros((2, first))
        sides_2K[0], sides_2K[1, at] = np.where(np.arange(first) == at, 0.0, self._weights), 1.0
        whole_22, held_22 = (
            sides_2K @ matrix[1 : 1 + first, 1 : 1 + first] @ sides_2K.T for matrix in (self._covariance, self._lasting)
        )
        luck_2 = np.maximum(np.diag(whole_22) - np.diag(held_22), 1e-3 * np.diag(whole_22))
        if held_22[0, 0] <= 0 or luck_2[1] <= 0:
            return 0.0
        return float(held_22[0, 1] / held_22[0, 0] * math.sqrt(luck_2[0] / luck_2[1]))

    @cached_property
    def lasting(self) -> dict[str, float] | None:
        """Share of each of the reward's columns in the generalising differences; None as `lasting_share`."""
        if self.lasting_share is None:
            return None
        held_K = self._lasting[1 : 1 + len(self.rewarded), 0] * self._weights
        return dict(zip(self.rewarded, (held_K / held_K.sum()).tolist(), strict=True))

    def predicted(self, names: Sequence[str]) -> float:
        """Return the share of the generalising variance that some columns predict together.

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

    Only generalising differences count: the luck of rare right answers is no selection. There is no warning where the
    other columns teach what is right (`Axes.gain_of`).
    """
    right, lasting = axes.correctness, axes.lasting
    if right is None or lasting is None:
        return None
    others = {name: share for name, share in lasting.items() if name != right}
    share, solved = axes.predicted([*others, *EFFECTS]), axes.means[right]
    if sum(others.values()) < OF_OTHERS or share < PREDICTABLE or solved >= RIGHT:
        return None
    if axes.errors < CERTAIN or axes.gain_of(right) > TEACHING:
        return None
    cls, tokens, is_cut = TASKS.get(config.task.name), config.sampling.max_tokens, axes.means[TRUNCATED]
    setting = f"task.objective {{name: weighted_sum, weights: {{{right}: 1}}}}"
    if cls is not None and cls.takes_weights and config.task.objective is None:
        setting = f"task.reward_weights {[float(name == right) for name in lasting]}"
    longer = f"; sampling.max_tokens {2 * tokens}, as {is_cut:.0%} are cut off" if is_cut >= CUT else ""
    length = " and length" if axes.predicted(EFFECTS) >= PREDICTABLE else ""
    return (
        f"the coefficients follow {max(others, key=others.__getitem__)}{length}, not {right}: {percent(lasting)} of "
        f"the generalising differences between members, of which {', '.join([*others, *EFFECTS])} predict {share:.0%} "
        f"without {right}; {solved:.1%} of the completions are right: if {right} does not rise soon, reward it alone "
        f"with {setting}{longer}"
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
