# SPDX-License-Identifier: Apache-2.0
"""Bradley-Terry ratings with Davidson's (1970) ties, by maximum likelihood on the Elo scale, 400 log10 pi.

    P(i beats j) = pi_i / (pi_i + pi_j + nu sqrt(pi_i pi_j)),   P(tie) = nu sqrt(pi_i pi_j) / (the same)

Davidson, J. American Statistical Association 65, equation 2.4. In theta = ln pi and ln nu it is an exponential family:
the likelihood is concave, and at its maximum the expected wins plus half the ties of each model, and the expected
number of ties, equal the observed ones. Without ties nu is 0, which is the model of Bradley and Terry (1952).

Intervals are from a bootstrap over questions: all judgments of a question are drawn together. Ends are percentiles
at the levels of the expanded percentile interval (Hesterberg 2015, The American Statistician 69, section 4), since
plain percentiles are too narrow for few questions. They are of differences to the reference model, whose own rating is
fixed. A draw without a finite estimate counts as infinite, so an end may be missing; `why` then says so.

Array suffixes: B draws (1 without a bootstrap), Q questions, P pairs of models, M models, 3 the outcomes of a pair
(i, j) in the order i won, j won, tie.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evoalign.analysis.judge.judgments import Consistency, Judgment, consistency, models_of
from evoalign.errors import ConfigError
from evoalign.statistics import FEWEST, t_of

Floats: TypeAlias = NDArray[np.float64]
Flags: TypeAlias = NDArray[np.bool_]
Unparsed: TypeAlias = Literal["leave-out", "tie"]
Ties: TypeAlias = Literal["davidson", "half"]
FORMAT_VERSION = 1
SCALE, BASE = 400.0, 1000.0
"""Rating points per factor of ten in pi, and the rating of the reference model."""
ABOVE, BELOW, OPEN = "unbounded above", "unbounded below", "undetermined"
"""Why a rating is not finite: the likelihood grows with it, falls with it, or does not depend on it."""
STEPS, NEAR = 500, 1e-10
"""Maximum number of Newton steps, and the largest change of a parameter at convergence."""
STRIDE = 0.5
"""Largest change of a parameter in one step: with it the likelihood cannot fall, see `fit`."""
BLOCK = 2**22
"""Number of drawn questions that are in memory at once."""
ELO_STEP, ELO_START = 32.0, 1000.0
"""Points at stake in a judgment, and the rating before the first, of `elo`."""
LEAST = 1e-4
"""Extra judgments per pair that make every estimate finite and change the finite ones by a negligible amount."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How judgments are rated.

    `anchor` is the model rated 1000; None: the weakest. `prior` extra judgments per pair of models, half won by
    either, make every estimate finite; 0 is pure maximum likelihood. `draws` and `seed` are those of the bootstrap.
    `ties`: Davidson's model, or half a win for either in Bradley and Terry's. `elo`: the seed of the order of judgments
    for Elo ratings, or None for none.
    """

    anchor: str | None = None
    unparsed: Unparsed = "leave-out"
    prior: float = 0.0
    draws: int = 2000
    seed: int = 0
    ties: Ties = "davidson"
    elo: int | None = None


@dataclass(frozen=True, slots=True)
class Rating:
    """A number on the Elo scale with its 95 % interval; `why` says why it or an end is None, which means not finite."""

    rating: float | None
    low: float | None = None
    high: float | None = None
    why: str | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A model's rating in a dimension, and its wins, losses and ties in judgments with scores."""

    model: str
    rated: Rating
    won: int
    lost: int
    tied: int


@dataclass(frozen=True, slots=True)
class Dimension:
    """Ratings of one dimension, strongest first, relative to the model `reference`.

    `differences` are by pair of models, the first minus the second; `nu` is Davidson's tie parameter (0 where ties are
    halves), None without scores. `elo` is the Elo rating of each model, if requested.
    """

    name: str
    reference: str
    rows: tuple[Row, ...]
    trust: Consistency
    differences: dict[tuple[str, str], Rating]
    nu: float | None
    elo: dict[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Ratings:
    """All dimensions in order of first appearance, and the settings."""

    settings: Settings
    dimensions: tuple[Dimension, ...]

    def tree(self) -> dict[str, Any]:
        """Return the ratings as plain data for JSON."""
        return {
            "format_version": FORMAT_VERSION,
            "settings": asdict(self.settings),
            "dimensions": [_tree(dimension) for dimension in self.dimensions],
        }


def rate(judgments: Sequence[Judgment], settings: Settings) -> Ratings:
    """Rate each dimension separately. Raises ConfigError for an anchor that a dimension does not have."""
    names = list(dict.fromkeys(one.dimension for one in judgments))
    found = [_rate([one for one in judgments if one.dimension == name], name, settings) for name in names]
    return Ratings(settings, tuple(found))


def _rate(judgments: Sequence[Judgment], name: str, settings: Settings) -> Dimension:
    models, anchor = models_of(judgments), settings.anchor
    if anchor is not None and anchor not in models:
        raise ConfigError(f"--anchor {anchor}: {name} has {', '.join(models)}; give one of these")
    counts_QP3 = _counts(judgments, models, settings)
    trust = consistency(judgments, models)
    if not len(counts_QP3):
        unrated = [Row(model, Rating(None, why="no judgment has scores"), 0, 0, 0) for model in models]
        return Dimension(name, anchor or models[0], tuple(unrated), trust, {}, None)
    reference, ratings, differences, nu = _estimate(counts_QP3, models, settings)
    rows: list[Row] = []
    for model in models:
        of = [(p.won, p.lost) if p.models[0] == model else (p.lost, p.won) for p in trust.pairs if model in p.models]
        tied = sum(p.tied for p in trust.pairs if model in p.models)
        rows.append(Row(model, ratings[model], sum(won for won, _ in of), sum(lost for _, lost in of), tied))
    unbounded = {ABOVE: math.inf, BELOW: -math.inf}

    def strength(row: Row) -> float:
        return unbounded.get(row.rated.why or "", -math.inf) if row.rated.rating is None else row.rated.rating

    ranked = tuple(sorted(rows, key=strength, reverse=True))
    return Dimension(name, reference, ranked, trust, differences, nu, elo(judgments, reference, settings))


def elo(judgments: Sequence[Judgment], reference: str, settings: Settings) -> dict[str, float] | None:
    """Return Elo ratings after one pass over the judgments, in an order shuffled by `settings.elo`.

    As in published comparisons: 32 points, all models start at 1000, and the reference is moved to 1000 at the end. The
    result depends on the order, unlike a maximum likelihood.
    """
    if settings.elo is None:
        return None
    order, found = list(judgments), dict.fromkeys(models_of(judgments), ELO_START)
    random.Random(settings.elo).shuffle(order)
    for one in order:
        outcome = 0.5 if one.outcome is None and settings.unparsed == "tie" else one.outcome
        if outcome is not None:
            gap = (found[one.model_b] - found[one.model_a]) / SCALE
            gained = ELO_STEP * (outcome - 1 / (1 + 10**gap))
            found[one.model_a] += gained
            found[one.model_b] -= gained
    return {model: rating - found[reference] + BASE for model, rating in found.items()}


def _tree(found: Dimension) -> dict[str, Any]:
    trust = found.trust
    gaps = {models: asdict(gap) for models, gap in found.differences.items()}
    return {
        "dimension": found.name,
        "reference": found.reference,
        "nu": found.nu,
        "elo": found.elo,
        "models": [
            {"model": row.model, **asdict(row.rated), "won": row.won, "lost": row.lost, "tied": row.tied}
            for row in found.rows
        ],
        "pairs": [{**asdict(pair), "difference": gaps.get(pair.models)} for pair in trust.pairs],
        "judgments": trust.judgments,
        "questions": trust.questions,
        "unparsed": trust.unparsed,
        "ties": trust.ties,
        "both_orders": trust.both,
        "agreement": trust.agreement.tree(),
        "first_wins": trust.first_wins.tree(),
    }


# --- estimates and intervals ------------------------------------------------------------------------------------------


def _counts(judgments: Sequence[Judgment], models: Sequence[str], settings: Settings) -> Floats:
    """Count the outcomes of each pair by question, [Q, P, 3]; questions without scores are left out."""
    place = {pair: p for p, pair in enumerate(combinations(models, 2))}
    questions = {name: q for q, name in enumerate(dict.fromkeys(one.question for one in judgments))}
    counts_QP3 = np.zeros((len(questions), len(place), 3))
    for one in judgments:
        outcome = 0.5 if one.outcome is None and settings.unparsed == "tie" else one.outcome
        if outcome is None:
            continue
        pair = (one.model_a, one.model_b)
        if pair not in place:
            pair, outcome = (one.model_b, one.model_a), 1.0 - outcome
        counts_QP3[questions[one.question], place[pair], {1.0: 0, 0.0: 1, 0.5: 2}[outcome]] += 1
    counts_QP3 = counts_QP3[counts_QP3.any((1, 2))]
    if settings.ties == "half":
        counts_QP3[..., :2] += counts_QP3[..., 2:] / 2
        counts_QP3[..., 2] = 0.0
    return counts_QP3


def _estimate(
    counts_QP3: Floats, models: Sequence[str], settings: Settings
) -> tuple[str, dict[str, Rating], dict[tuple[str, str], Rating], float]:
    """Return the reference, ratings by model, differences by pair, and nu."""
    more_3 = np.array([settings.prior / 2, settings.prior / 2, 0.0])
    whole_P3 = counts_QP3.sum(0) + more_3
    limits_MM = limits(whole_P3 > 0, len(models))
    theta_M, nu = (found[0] for found in _points(whole_P3[None], limits_MM[None]))
    if settings.anchor is None:  # the weakest of the models with the most finite differences
        finite_M = (limits_MM == 0).sum(1)
        reference = min(np.flatnonzero(finite_M == finite_M.max()).tolist(), key=lambda i: theta_M[i])
    else:
        reference = models.index(settings.anchor)
    totals_BP3, draw_B = np.unique(_bootstrap(counts_QP3, settings) + more_3, axis=0, return_inverse=True)
    seen_BP3, which_B = np.unique(totals_BP3 > 0, axis=0, return_inverse=True)
    limits_BMM = np.stack([limits(seen_P3, len(models)) for seen_P3 in seen_BP3])[which_B.reshape(-1)]
    theta_BM, _ = _points(totals_BP3, limits_BMM)
    theta_BM, limits_BMM = theta_BM[draw_B.reshape(-1)], limits_BMM[draw_B.reshape(-1)]

    def between(i: int, j: int, start: float) -> Rating:
        value, limit = float(start + theta_M[i] - theta_M[j]), float(limits_MM[i, j])
        return _rated(value, limit, start + theta_BM[:, i] - theta_BM[:, j], limits_BMM[:, i, j], len(counts_QP3))

    ratings = {name: between(i, reference, BASE) for i, name in enumerate(models)}
    ratings[models[reference]] = Rating(BASE, why="reference, fixed at 1000")
    differences = {(models[i], models[j]): between(i, j, 0.0) for i, j in combinations(range(len(models)), 2)}
    return models[reference], ratings, differences, float(nu)


def _points(counts_BP3: Floats, limits_BMM: Floats) -> tuple[Floats, Floats]:
    """Fit in rating points. If some estimates are not finite, the others get the limits they tend to."""
    odd_B = (limits_BMM != 0).any((1, 2))
    theta_BM, nu_B = fit(counts_BP3 + LEAST * odd_B[:, None, None] * np.array([0.5, 0.5, 0.0]), limits_BMM.shape[1])
    return theta_BM * SCALE / np.log(10), nu_B


def _bootstrap(counts_QP3: Floats, settings: Settings) -> Floats:
    """Return sums over Q questions drawn with replacement, [B, P, 3]."""
    generator, questions = np.random.default_rng(settings.seed), len(counts_QP3)
    flat_QK = counts_QP3.reshape(questions, -1)
    found: list[Floats] = []
    for start in range(0, settings.draws, step := max(1, BLOCK // questions)):
        size = min(step, settings.draws - start)
        drawn_BQ = generator.integers(questions, size=(size, questions)) + questions * np.arange(size)[:, None]
        times_BQ = np.bincount(drawn_BQ.reshape(-1), minlength=size * questions).reshape(size, questions)
        found.append(times_BQ @ flat_QK)
    return np.concatenate(found).reshape(settings.draws, *counts_QP3.shape[1:])


def _rated(value: float, limit: float, values_B: Floats, limits_B: Floats, questions: int) -> Rating:
    from scipy.special import ndtr

    if limit != 0:
        return Rating(None, why=OPEN if np.isnan(limit) else ABOVE if limit > 0 else BELOW)
    if questions < FEWEST:
        return Rating(value, why=f"{questions} question{'s' if questions > 1 else ''}: no interval")
    level = float(ndtr(-t_of(questions - 1) * (questions / (questions - 1)) ** 0.5))
    open_B, ends = np.isnan(limits_B), list[float | None]()
    for side, at in ((-np.inf, level), (np.inf, 1 - level)):  # an order statistic, since draws may be infinite
        end = np.quantile(np.where(open_B, side, values_B + limits_B), at, method="closest_observation")
        ends.append(float(end) if np.isfinite(end) else None)
    odd = float((limits_B != 0).mean())
    return Rating(value, *ends, why=f"not finite in {odd:.1%} of the draws" if None in ends else None)


# --- the model --------------------------------------------------------------------------------------------------------


def pairs_of(models: int) -> NDArray[np.intp]:
    """Return all pairs (i, j) of models with i < j, [P, 2]."""
    return np.array(list(combinations(range(models), 2)), dtype=np.intp).reshape(-1, 2)


def fit(counts_BP3: Floats, models: int) -> tuple[Floats, Floats]:
    """Maximise the likelihood: theta [B, M], of mean 0, and nu [B]. Every draw needs a finite estimate, see `limits`.

    Newton's method with steps of at most `STRIDE`, in which no two logits of a pair separate by more than 1: the
    second-order loss is then below e - 2 = 0.72 of the first-order gain (Bach 2010, Electronic J. Statistics 4,
    proposition 1), and the likelihood rises with every step.
    """
    pairs_P2 = pairs_of(models)
    contrast_PM = np.zeros((len(pairs_P2), models))
    rows = np.arange(len(pairs_P2))
    contrast_PM[rows, pairs_P2[:, 0]], contrast_PM[rows, pairs_P2[:, 1]] = 1.0, -1.0
    square_PMM = contrast_PM[:, :, None] * contrast_PM[:, None, :]
    number_BP, ties_B = counts_BP3.sum(2), counts_BP3[:, :, 2].sum(1)
    tied_B = ties_B > 0
    theta_BM = np.zeros((len(counts_BP3), models))
    log_nu_B = np.where(tied_B, 0.0, -np.inf)
    for _ in range(STEPS):
        half_BP = theta_BM @ contrast_PM.T / 2
        logits_BP3 = np.stack([half_BP, -half_BP, np.broadcast_to(log_nu_B[:, None], half_BP.shape)], axis=-1)
        odds_BP3 = np.exp(logits_BP3 - logits_BP3.max(2, keepdims=True))
        chance_BP3 = odds_BP3 / odds_BP3.sum(2, keepdims=True)
        gap_BP, tie_BP = chance_BP3[..., 0] - chance_BP3[..., 1], chance_BP3[..., 2]
        seen_BP = (counts_BP3[..., 0] - counts_BP3[..., 1]) / 2
        slope_BK = np.concatenate(
            [(seen_BP - number_BP * gap_BP / 2) @ contrast_PM, (ties_B - (number_BP * tie_BP).sum(1))[:, None]], axis=1
        )
        curve_BKK = np.zeros((len(counts_BP3), models + 1, models + 1))
        own_BP = number_BP * (1 - tie_BP - gap_BP**2) / 4
        curve_BKK[:, :-1, :-1] = np.tensordot(own_BP, square_PMM, 1) + number_BP.sum(1)[:, None, None] / models**2
        curve_BKK[:, :-1, -1] = curve_BKK[:, -1, :-1] = -(number_BP * gap_BP * tie_BP / 2) @ contrast_PM
        curve_BKK[:, -1, -1] = np.where(tied_B, (number_BP * tie_BP * (1 - tie_BP)).sum(1), 1.0)
        step_BK = np.linalg.solve(curve_BKK, slope_BK[..., None])[..., 0].astype(np.float64)
        largest_B = np.abs(step_BK).max(1)
        step_BK *= np.minimum(1.0, STRIDE / np.maximum(largest_B, NEAR))[:, None]
        theta_BM += step_BK[:, :-1]
        log_nu_B = log_nu_B + step_BK[:, -1]
        if largest_B.max() < NEAR:
            break
    return theta_BM - theta_BM.mean(1, keepdims=True), np.exp(log_nu_B)


def limits(seen_P3: Flags, models: int) -> Floats:
    """Return whether the maximum likelihood estimate of theta_i - theta_j is finite, [M, M], given the outcomes seen.

    0: finite. inf, -inf: unbounded. nan: undetermined, such as for models without a chain of judgments between them.

    The likelihood is unbounded along u (of theta) and t (of ln nu) exactly if each win of i over j has
    u_i - u_j >= 2 t, each tie |u_i - u_j| <= 2 t, and not all are equal. For t = 0 this is reachability by wins and
    ties (Ford, American Mathematical Monthly 64, 1957); for t > 0, a problem of shortest paths.
    """
    over_MM, most_MM = np.eye(models, dtype=bool), np.full((models, models), np.inf)
    np.fill_diagonal(most_MM, 0.0)
    for (i, j), (won, lost, tied) in zip(pairs_of(models), seen_P3, strict=True):
        over_MM[i, j] |= won | tied
        over_MM[j, i] |= lost | tied
        for winner, loser, is_won in ((i, j, won), (j, i, lost)):
            apart, back = 1.0 if tied else np.inf, -1.0 if is_won else np.inf  # bounds of u_winner - u_loser at t = 1/2
            most_MM[winner, loser] = min(most_MM[winner, loser], apart)
            most_MM[loser, winner] = min(most_MM[loser, winner], apart, back)
    for k in range(models):
        over_MM |= over_MM[:, k, None] & over_MM[None, k, :]
        most_MM = np.minimum(most_MM, most_MM[:, k, None] + most_MM[None, k, :])
    rises_MM = ~over_MM.T
    if (np.diag(most_MM) >= 0).all():  # otherwise no t > 0 is feasible
        rises_MM |= most_MM > 0
    falls_MM = rises_MM.T
    found: Any = np.select([rises_MM & falls_MM, rises_MM, falls_MM], [np.nan, np.inf, -np.inf], 0.0)
    return found
