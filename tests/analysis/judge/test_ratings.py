# SPDX-License-Identifier: Apache-2.0
"""Ratings from judgments: against closed forms, an optimiser of another kind, hand computations and simulations."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from math import inf, log, log10, nan
from typing import Any

import numpy as np
import pytest
from scipy.optimize import linprog, minimize
from tournaments import one, planted

from evoalign.analysis.judge.judgments import Judgment
from evoalign.analysis.judge.ratings import Dimension, Settings, fit, limits, pairs_of, rate
from evoalign.analysis.judge.report import sentences
from evoalign.errors import ConfigError

FEW = Settings(draws=200)


def rated(judgments: list[Judgment], **changed: Any) -> Dimension:
    (found,) = rate(judgments, replace(FEW, **changed)).dimensions
    return found


def numbers(found: Dimension) -> dict[str, float | None]:
    return {row.model: row.rated.rating for row in found.rows}


def told(judgments: list[Judgment], **changed: Any) -> str:
    return "\n".join(sentences(rate(judgments, replace(FEW, **changed))))


def match(a: str, b: str, won: int = 0, lost: int = 0, tied: int = 0) -> list[Judgment]:
    """Judgments of a beside b, of a question each."""
    came = ["won"] * won + ["lost"] * lost + ["tied"] * tied
    return [one(a, b, each, str(q)) for q, each in enumerate(came)]


def drawn(theta: Sequence[float], questions: int, seed: int, nu: float = 0.4, **options: Any) -> list[Judgment]:
    return planted(theta, nu, questions, np.random.default_rng(seed), **options)


@pytest.mark.parametrize("models", [2, 3, 6])
@pytest.mark.parametrize("ties", [True, False])
def test_fit_maximises_the_likelihood(models: int, ties: bool) -> None:
    random, pairs = np.random.default_rng(models), pairs_of(models)
    counts = random.integers(1, 40, size=(3, len(pairs), 3)).astype(float)
    counts[..., 2] *= ties
    theta, nu = fit(counts, models)
    for b in range(3):

        def loss(x: Any, b: int = b) -> float:
            gap = x[pairs[:, 0]] - x[pairs[:, 1]]
            logits = np.stack([gap / 2, -gap / 2, np.full(len(pairs), x[-1] if ties else -inf)], -1)
            shares = logits - np.log(np.exp(logits).sum(1, keepdims=True))
            return -float((counts[b] * np.where(counts[b] > 0, shares, 0.0)).sum())

        best = minimize(loss, np.zeros(models + 1), method="BFGS", options={"gtol": 1e-7})
        assert theta[b] == pytest.approx(best.x[:-1] - best.x[:-1].mean(), abs=1e-4)
        assert nu[b] == pytest.approx(np.exp(best.x[-1]) if ties else 0.0, rel=1e-3)


def test_two_models_match_the_closed_form() -> None:
    """pi_a / pi_b is wins over losses, and nu ties over their geometric mean."""
    found = rated(match("a", "b", 30, 10, 8))
    assert numbers(found) == {"a": pytest.approx(1000 + 400 * log10(3)), "b": 1000.0}
    assert found.nu == pytest.approx(8 / 300**0.5)
    theta, _ = fit(np.array([[[1e6, 1.0, 3.0]]]), 2)
    assert theta[0, 0] - theta[0, 1] == pytest.approx(log(1e6)), "of distant models"


def test_ties_as_halves_match_the_closed_form() -> None:
    """Each tie is half a win for either: pi_a / pi_b is (30 + 4) / (10 + 4)."""
    found = rated(match("a", "b", 30, 10, 8), ties="half")
    assert numbers(found) == {"a": pytest.approx(1000 + 400 * log10(34 / 14)), "b": 1000.0}
    assert found.nu == 0.0 and [(row.won, row.lost, row.tied) for row in found.rows] == [(30, 10, 8), (10, 30, 8)]
    assert "half a win for either" in told(match("a", "b", 2, 1, 1), ties="half")
    only = rated(match("a", "b", 0, 0, 6), ties="half")
    assert numbers(only) == {"a": pytest.approx(1000), "b": 1000.0}, "Davidson's model has no estimate of these"


def test_elo_is_of_one_pass_in_the_shuffled_order() -> None:
    """The first game moves 16 points, the second 32 (1 - E) with the gap of 32; the seed decides which is first."""
    games = [*match("a", "b", 1), one("b", "a", "tied", "t"), one("a", "b", "none", "n")]
    won_first = {"a": 32 - 64 * (1 / (1 + 10 ** (-32 / 400)) - 0.5), "b": 0}
    tied_first = {"a": 32, "b": 0}
    found = {seed: rated(games, elo=seed, anchor="b").elo for seed in range(8)}
    for ratings in found.values():
        assert ratings is not None
        assert any(ratings == {m: pytest.approx(1000 + v) for m, v in one_.items()} for one_ in (won_first, tied_first))
    assert len({tuple(ratings.values()) for ratings in found.values() if ratings}) == 2
    assert found[0] == rated(games, elo=0, anchor="b").elo
    assert rated(games).elo is None and "shuffled by seed 3" in told(games, elo=3)


def test_many_dimensions_are_rated_in_seconds() -> None:
    start = time.process_time()
    games = [replace(game, dimension=f"d{d}") for d in range(150) for game in match("a", "b", 2, 1)]
    assert len(rate(games, Settings()).dimensions) == 150
    assert time.process_time() - start < 15


def test_rate_recovers_planted_strengths() -> None:
    theta = [0.0, 0.5, 1.2, -0.4]
    found = rated(drawn(theta, 3000, 1, nu=0.5), anchor="m0", draws=2)
    for row in found.rows:
        assert row.rated.rating == pytest.approx(1000 + 400 / log(10) * theta[int(row.model[1])], abs=12)
    assert [row.model for row in found.rows] == ["m2", "m1", "m0", "m3"]
    assert found.nu == pytest.approx(0.5, abs=0.03)


def test_rate_ignores_the_order_of_models() -> None:
    games = drawn([0.0, 1.0], 50, 2)
    turned = [
        replace(g, model_a=g.model_b, model_b=g.model_a, scores=g.scores and g.scores[::-1], order_ab=not g.order_ab)
        for g in games
    ]
    a, b = rated(games), rated([g if q % 3 else turned[q] for q, g in enumerate(games)])
    assert numbers(a) == pytest.approx(numbers(b))
    assert all(getattr(a.trust, name) == getattr(b.trust, name) for name in ("agreement", "first_wins", "both"))


def test_weakest_or_anchor_is_1000() -> None:
    games = drawn([0.0, 1.0, 2.0], 60, 3)
    free, held = numbers(rated(games)), rated(games, anchor="m2")
    assert free["m0"] == 1000.0 and min(v for v in free.values() if v is not None) == 1000.0
    assert held.reference == "m2" and numbers(held)["m2"] == 1000.0
    shift = 1000.0 - (free["m2"] or nan)
    assert numbers(held) == {name: pytest.approx((value or nan) + shift) for name, value in free.items()}
    ends = {row.model: (row.rated.low, row.rated.high) for row in held.rows}
    assert ends["m2"] == (None, None)
    assert all(low is not None and high is not None and low < high for m, (low, high) in ends.items() if m != "m2")
    with pytest.raises(ConfigError, match="--anchor m9: helpfulness has m0, m1, m2"):
        rated(games, anchor="m9")


def test_intervals_are_reproducible_and_few_questions_have_none() -> None:
    games = drawn([0.0, 0.7], 30, 4)
    assert rated(games) == rated(games) != rated(games, seed=1)
    games = [*drawn([0.0, 0.0], 1, 6, nu=1.0), one("m0", "m1", "won", "q0"), one("m0", "m1", "lost", "q1")]
    row = rated(games).rows[0]
    assert (row.rated.low, row.rated.high) == (None, None)


def test_bootstrap_draws_whole_questions() -> None:
    """The same judgments, each said ten times: ten times as many, and no more known."""
    games = drawn([0.0, 0.7], 40, 5)
    assert rated(games * 10).rows[0].rated == rated(games).rows[0].rated
    apart = [replace(game, question=f"{game.question} {copy}") for copy in range(10) for game in games]
    whole, cut = rated(games).rows[0].rated, rated(apart).rows[0].rated
    assert None not in (whole.low, whole.high, cut.low, cut.high)
    assert (cut.high - cut.low) < 0.5 * (whole.high - whole.low)  # type: ignore[operator]


@pytest.mark.long
@pytest.mark.parametrize(
    ("questions", "theta"), [(12, [0.0, 0.6]), (40, [0.0, 0.5, 1.0]), (150, [0.0, 0.3, 0.9, -0.5])]
)
def test_intervals_cover_the_truth_in_95_percent(questions: int, theta: list[float]) -> None:
    """Of each model but the anchor, which is named beforehand. Found: 95.4, 95.2 and 93.3 %."""
    random, held = np.random.default_rng(7), list[bool]()
    for _ in range(500):
        for row in rated(planted(theta, 0.5, questions, random), anchor="m0", draws=1000).rows:
            truth = 1000 + 400 / log(10) * (theta[int(row.model[1])] - theta[0])
            if row.model != "m0":
                held.append((row.rated.low or -inf) <= truth <= (row.rated.high or inf))
    assert 0.92 <= np.mean(held) <= 0.98, np.mean(held)


@pytest.mark.long
def test_intervals_cover_the_truth_for_correlated_judgments() -> None:
    """Both judgments of a question come out alike, so that there are half as many as it seems. Found: 97.6 %."""
    random, truth, held = np.random.default_rng(8), 1000 + 400 * log10(0.5 / 0.3), list[bool]()
    for _ in range(500):
        came = random.choice(["won", "lost", "tied"], p=[0.5, 0.3, 0.2], size=60)
        games = [one("a", "b", c, str(q), order_ab=order) for q, c in enumerate(came) for order in (True, False)]
        found = next(row.rated for row in rated(games, anchor="b", draws=1000).rows if row.model == "a")
        held.append((found.low or -inf) <= truth <= (found.high or inf))
    assert 0.92 <= np.mean(held) <= 0.98, np.mean(held)


def endless(seen: Any, models: int) -> np.ndarray:
    """As `limits`, from linear programs: how far theta_i - theta_j can go along which the likelihood never falls."""
    pairs, rows = pairs_of(models), list[Any]()
    for (i, j), (won, lost, tied) in zip(pairs, seen, strict=True):
        e = np.eye(models + 1)
        wins = e[i] - e[j]
        if won:
            rows += [-wins, 2 * e[-1] - wins]
        if lost:
            rows += [wins, 2 * e[-1] + wins]
        if tied:
            rows += [wins - 2 * e[-1], -wins - 2 * e[-1]]
    found = np.zeros((models, models))
    for i, j in permutations(range(models), 2):
        goal = np.eye(models + 1)[j] - np.eye(models + 1)[i]
        up, down = (
            -linprog(s * goal, A_ub=rows or None, b_ub=[0.0] * len(rows) or None, bounds=(-9, 9)).fun > 1e-6
            for s in (1, -1)
        )
        found[i, j] = nan if up and down else inf if up else -inf if down else 0.0
    return found


@pytest.mark.first("[2]", "[3]")
@pytest.mark.parametrize("models", [2, 3, 4])
def test_limits_match_linear_programs(models: int) -> None:
    random = np.random.default_rng(models)
    kinds = set[str]()
    for density in np.repeat([0.15, 0.3, 0.45, 0.6], 12):
        seen = random.random((len(pairs_of(models)), 3)) < density
        found = limits(seen, models)
        np.testing.assert_array_equal(found, endless(seen, models))
        kinds |= set(map(str, found.ravel()))
    assert kinds == {"0.0", "inf", "-inf", "nan"}


X_Y = {"won": ["won", "won", "won", "lost", "tied"], "lost": ["won", "lost", "lost"]}


@pytest.mark.parametrize(("came", "place", "why"), [("won", 0, "unbounded above"), ("lost", -1, "unbounded below")])
def test_model_that_won_or_lost_everything_is_unbounded(came: str, place: int, why: str) -> None:
    games = [one("far", other, came, str(q)) for q in range(5) for other in ("x", "y")]
    games += [one("x", "y", each, str(q)) for q, each in enumerate(X_Y[came])]
    found, text = rated(games), told(games)
    assert numbers(found)["far"] is None and found.reference == ("y" if came == "won" else "x")
    assert came == "lost" or numbers(found)["x"] == pytest.approx(1000 + 400 * log10(3), abs=0.1)
    assert numbers(found)[found.reference] == 1000.0
    assert found.rows[place].model == "far" and found.rows[place].rated.why == why
    assert "no finite rating of far" in text and "--prior 1" in text and "inf" not in text.replace("finite", "")


def test_only_wins_and_ties_give_no_rating() -> None:
    """nu keeps pace with the distance, so that a tie is no bound: with nu = e^(d/2) / 9 the likelihood rises with d."""
    assert "no finite rating of a" in told(match("a", "b", 9, 0, 1))

    def log_likelihood(d: float) -> float:
        won, lost = np.exp(d / 2), np.exp(-d / 2)
        return float(9 * log(won) + log(won / 9) - 10 * log(won + won / 9 + lost))

    assert log_likelihood(2.0) < log_likelihood(4.0) < log_likelihood(8.0)


def test_unconnected_models_and_only_ties_give_no_rating() -> None:
    apart = [*match("a", "b", 3, 3), *match("c", "d", 3, 3)]
    assert sorted(row.model for row in rated(apart).rows if row.rated.rating is None) in (["a", "b"], ["c", "d"])
    assert "no chain of judgments connects" in told(apart)
    ties = match("a", "b", tied=9)
    assert sorted(numbers(rated(ties)).values(), key=str) == [1000.0, None]
    assert "all judgments are ties" in told(ties)


def test_prior_makes_all_ratings_finite() -> None:
    games = match("a", "b", 9)
    found, text = rated(games, prior=1.0), told(games, prior=1.0)
    assert numbers(found) == {"a": pytest.approx(1000 + 400 * log10(9.5 / 0.5)), "b": 1000.0}
    assert "a prior of 1 judgments per pair" in text and "no finite" not in text


def test_unbounded_interval_end_is_none() -> None:
    """One loss in twelve questions: a third of the draws have none, and nothing above is excluded."""
    row = rated(match("a", "b", 11, 1), draws=2000).rows[0]
    assert row.rated.rating == pytest.approx(1000 + 400 * log10(11)) and row.rated.high is None
    assert row.rated.low is not None and row.rated.low < row.rated.rating
    share = float((row.rated.why or "").split("in ")[1].split("%")[0])
    assert share == pytest.approx(100 * (11 / 12) ** 12, abs=4)


def test_unparsed_judgments_are_left_out_or_ties_and_counted() -> None:
    games = drawn([0.0, 0.8], 40, 9)
    with_none, with_ties = ([*games, *(one("m0", "m1", came, f"q{q}") for q in range(20))] for came in ("none", "tied"))
    found, asked = rated(with_none), rated(with_none, unparsed="tie")
    assert numbers(found) == numbers(rated(games)) and found.trust.pairs[0].unparsed == 20
    assert "20 (20.0%) without scores" in told(with_none)
    assert numbers(asked) == numbers(rated(with_ties)) != numbers(found)
    assert asked.trust.unparsed == found.trust.unparsed == 20, "they are counted still"
    assert "without scores count as ties" in told(with_none, unparsed="tie")


def test_models_without_scores_have_no_rating() -> None:
    games = [*drawn([0.0, 0.8], 20, 9), one("m0", "mute", "none", "q1")]
    assert {name for name, rating in numbers(rated(games)).items() if rating is None} == {"mute"}
    assert "no finite rating of mute: no chain of judgments connects it" in told(games)
    games = [one("a", "b", "none", str(q)) for q in range(4)]
    assert numbers(rated(games)) == {"a": None, "b": None}
    assert "no ratings: no judgment has scores" in told(games)


@pytest.mark.parametrize(
    ("scores", "outcome"),
    [((5, 5), 0.5), ((5, 5.5), 0.5), ((1.1, 0.6), 0.5), ((5.51, 5), 1.0), ((5, 5.51), 0.0), ((1, 10), 0.0)],
)
def test_outcome_is_a_tie_within_half_a_point(scores: tuple[float, float], outcome: float) -> None:
    assert Judgment("a", "b", "d", "q", scores, True).outcome == outcome


BOTH = [(q, order) for q in range(40) for order in (True, False)]


def test_agreement_of_a_judge_without_bias() -> None:
    games = [one("a", "b", "won" if q % 2 else "lost", str(q), order_ab=order) for q, order in BOTH]
    trust = rated(games).trust
    assert trust.both == 40 and trust.agreement.mean == 1.0 and trust.agreement.low is not None
    assert 0.9 < trust.agreement.low < 1.0
    assert trust.first_wins.mean == 0.5 and "which shows no bias" in told(games)


@pytest.mark.parametrize(("first", "word"), [(True, "a bias to the first"), (False, "a bias to the second")])
def test_position_bias_is_reported(first: bool, word: str) -> None:
    games = [one("a", "b", "won" if order == first else "lost", str(q), order_ab=order) for q, order in BOTH]
    trust = rated(games).trust
    assert trust.agreement.mean == 0.0 and trust.first_wins.mean == float(first)
    assert word in told(games) and numbers(rated(games))["a"] == pytest.approx(1000.0)


def test_first_wins_interval_covers_a_planted_bias() -> None:
    trust = rated(drawn([0.0, 0.0], 400, 11, nu=0.5, bias=0.6)).trust
    share = 1 / (1 + np.exp(-0.6))
    assert trust.first_wins.low is not None and trust.first_wins.high is not None
    assert 0.5 < trust.first_wins.low < share < trust.first_wins.high < 0.75


def test_agreement_and_bias_use_pairs_in_both_orders() -> None:
    games = match("a", "b", 13, 7)
    assert rated(games).trust.both == 0 and "each pair of answers was judged in one order only" in told(games)
    assert "no share" not in told(games)
    games = [one("a", "b", "won", "1"), one("a", "b", "none", "1", order_ab=False), one("a", "b", "won", "2"),
             one("b", "a", "lost", "2"), one("a", "b", "lost", "3")]  # fmt: skip
    trust = rated(games).trust
    assert trust.both == 1 and trust.agreement.mean == 1.0  # of question 2: once a was first, once b
    assert [(p.won, p.lost, p.tied, p.unparsed) for p in trust.pairs] == [(3, 1, 0, 1)]


def test_pair_counts_ignore_the_order_of_models() -> None:
    games = [one("a", "b", "won", "1"), one("b", "a", "won", "2"), one("b", "a", "tied", "3"),
             one("c", "b", "lost", "4"), one("a", "c", "lost", "5")]  # fmt: skip
    pairs = {p.models: (p.won, p.lost, p.tied) for p in rated(games).trust.pairs}
    assert pairs == {("a", "b"): (1, 1, 1), ("a", "c"): (0, 1, 0), ("b", "c"): (1, 0, 0)}
    rows = {row.model: (row.won, row.lost, row.tied) for row in rated(games).rows}
    assert rows == {"a": (1, 2, 1), "b": (2, 1, 1), "c": (1, 1, 0)}


def test_dimensions_are_rated_separately() -> None:
    helpful = drawn([0.0, 1.0], 40, 12)
    harmless = [replace(g, dimension="harmlessness") for g in drawn([1.0, 0.0], 40, 13)]
    both = rate([g for pair in zip(helpful, harmless, strict=True) for g in pair], FEW).dimensions
    assert [found.name for found in both] == ["helpfulness", "harmlessness"]
    assert [found.reference for found in both] == ["m0", "m1"]
    assert numbers(both[0]) == numbers(rated(helpful)) and numbers(both[1]) == numbers(rated(harmless))
