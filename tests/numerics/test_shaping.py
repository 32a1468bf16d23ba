# SPDX-License-Identifier: Apache-2.0
"""Shaping against its definitions, as properties of random scores; schedules at their ends."""

import math

import numpy as np
import numpy_reference as reference
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from evoalign import shaping
from evoalign.config import ScheduleConfig
from evoalign.config.es import SHAPINGS
from evoalign.errors import ConfigError, RewardError

NAMES = list(shaping.SHAPINGS)
numbers = st.floats(-1e4, 1e4).map(lambda x: round(x, 3))
scores = arrays(np.float64, array_shapes(min_dims=2, max_dims=2, min_side=2, max_side=12), elements=numbers)


def exact_fitness(scores_MP):
    return [math.fsum(row) / len(row) for row in scores_MP.tolist()]


def test_the_registry():
    assert tuple(NAMES) == SHAPINGS


OWN = """
import numpy as np
def good(scores_MP): return scores_MP.mean(axis=1) - scores_MP.mean()
def listed(scores_MP): return [1, *[0] * (len(scores_MP) - 1)]
def greedy(scores_MP): scores_MP[:] = 7; return scores_MP.mean(axis=1)
def by_prompt(scores_MP): return scores_MP
def short(scores_MP): return np.zeros(len(scores_MP) - 1)
def infinite(scores_MP): return np.full(len(scores_MP), np.inf)
def failing(scores_MP): return 1 / 0
def texts(scores_MP): return ["a"] * len(scores_MP)
number = 3
"""


@pytest.mark.parametrize(
    ("name", "outcome"),
    {
        "good": [-0.5, -0.5, 1.0], "listed": [1.0, 0.0, 0.0], "greedy": [7.0, 7.0, 7.0],
        "by_prompt": RewardError, "short": RewardError, "infinite": RewardError, "failing": RewardError,
        "texts": RewardError, "number": ConfigError, "absent": ConfigError,
    }.items(),
)  # fmt: skip
def test_shape_calls_custom_function_and_checks_what_it_returns(name, outcome, tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    scores_MP = np.array([[1.0, 1.0], [2.0, 0.0], [3.0, 2.0]])
    before = scores_MP.copy()
    if isinstance(outcome, list):
        assert shaping.shape(scores_MP, f"{file}:{name}").tolist() == outcome
        assert shaping.shape(np.ones((3, 2)), f"{file}:{name}").tolist() == [0.0] * 3, "equal scores are not passed on"
    else:
        with pytest.raises(outcome, match=name):
            shaping.shape(scores_MP, f"{file}:{name}")
    assert (scores_MP == before).all(), "a function gets a copy"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0.0715, 0.06, 1 / 3, 0.1, 0.0, -17.3, 1e-300, 1e99])
@pytest.mark.parametrize("shape", [(30, 1), (30, 2), (30, 7), (2, 200)])
def test_equal_scores_give_exactly_zero(name, value, shape):
    """In float32, 30 scores of 0.0715 have a z of -0.60."""
    got = shaping.shape(np.full(shape, value), name)
    assert got.dtype == np.float64
    assert got.tolist() == [0.0] * shape[0]


@pytest.mark.parametrize("name", NAMES)
@given(row=arrays(np.float64, st.integers(2, 40), elements=numbers), seed=st.integers(0, 1000))
def test_the_same_scores_in_another_order_tie(name, row, seed):
    draw = np.random.default_rng(seed)
    equal_MP = np.stack([draw.permutation(row) for _ in range(6)])
    assert shaping.shape(equal_MP, name).tolist() == [0.0] * 6
    other = row + 1.0
    scores_MP = np.stack([other, *equal_MP])
    assume(exact_fitness(scores_MP)[0] != exact_fitness(scores_MP)[1])
    if name not in shaping.BY_PROMPT:
        assert len(set(shaping.shape(scores_MP, name).tolist()[1:])) == 1


@pytest.mark.parametrize("name", NAMES)
def test_by_prompt_names_the_shapings_that_need_more_than_the_fitness(name):
    scores_MP = np.random.default_rng(0).normal(size=(6, 5)) * [1, 2, 4, 8, 16]
    alone = shaping.shape(shaping.fitness(scores_MP)[:, None], name)
    assert np.allclose(shaping.shape(scores_MP, name), alone) == (name not in shaping.BY_PROMPT)


@given(scores)
def test_zscore(scores_MP):
    fitness = exact_fitness(scores_MP)
    got = shaping.shape(scores_MP, "zscore")
    if max(fitness) == min(fitness):
        assert not got.any()
        return
    np.testing.assert_allclose(got, reference.zscore(fitness), rtol=1e-6, atol=1e-6)
    std = np.std(fitness)
    assume(std > 1e-3)
    assert abs(got.mean()) < 1e-6
    assert got.std() == pytest.approx(std / (std + 1e-8), rel=1e-9)


def test_zscore_has_ddof_0_and_eps():
    assert shaping.shape(np.array([[0.0], [2e-8]]), "zscore").tolist() == pytest.approx([-0.5, 0.5], rel=1e-12)
    got = shaping.shape(np.array([[1.0, 3.0], [2.0, 4.0], [3.0, 8.0]]), "zscore")  # fitness 2, 3, 5.5
    std = math.sqrt((2**2 + 3**2 + 5.5**2) / 3 - 3.5**2)
    assert got.tolist() == pytest.approx([(f - 3.5) / (std + 1e-8) for f in (2, 3, 5.5)], rel=1e-12)


@given(scores)
def test_centered_is_leave_one_out_over_one_std(scores_MP):
    members, prompts = scores_MP.shape
    fitness = exact_fitness(scores_MP)
    assume(max(fitness) != min(fitness))
    advantage = [
        [scores_MP[m, p] - sum(scores_MP[k, p] for k in range(members) if k != m) / (members - 1)
         for p in range(prompts)] for m in range(members)
    ]  # fmt: skip
    flat = [a for row in advantage for a in row]
    mean = math.fsum(flat) / len(flat)
    std = math.sqrt(math.fsum((a - mean) ** 2 for a in flat) / len(flat))
    want = [math.fsum(row) / prompts / (std + 1e-8) for row in advantage]
    np.testing.assert_allclose(shaping.shape(scores_MP, "centered"), want, rtol=1e-6, atol=1e-6)


def test_centered_is_leave_one_out_before_eps():
    """The other member's score is the baseline: advantages of 2e-8, not of 1e-8 against the mean of both."""
    got = shaping.shape(np.array([[0.0], [2e-8]]), "centered")
    assert got.tolist() == pytest.approx([-2 / 3, 2 / 3], rel=1e-9)


@given(scores)
def test_centered_does_not_see_how_hard_a_prompt_is(scores_MP):
    shifted = scores_MP + 8.0 * np.arange(scores_MP.shape[1])
    for each in (scores_MP, shifted):
        assume(max(exact_fitness(each)) - min(exact_fitness(each)) > 1e-3)
    a, b = shaping.shape(scores_MP, "centered"), shaping.shape(shifted, "centered")
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@given(arrays(np.float64, st.integers(2, 30), elements=st.integers(-6, 6).map(float)))
def test_ranks_are_averaged_over_ties(fitness):
    got = shaping.shape(fitness[:, None], "ranks")
    if fitness.max() == fitness.min():
        assert not got.any()
        return
    members = len(fitness)
    for value, coefficient in zip(fitness, got, strict=True):
        rank = np.sum(fitness < value) + (np.sum(fitness == value) - 1) / 2
        assert coefficient == pytest.approx(rank / (members - 1) - 0.5, abs=1e-12)
    assert got.sum() == pytest.approx(0, abs=1e-12)
    assert got.min() >= -0.5
    assert got.max() <= 0.5


@given(arrays(np.float64, st.integers(2, 30), elements=st.integers(-20, 20).map(float)))
def test_ranks_do_not_change_under_a_monotone_map(fitness):
    plain = shaping.shape(fitness[:, None], "ranks")
    for mapped in (fitness**3, np.exp(fitness), 2 * fitness - 7):
        assert shaping.shape(mapped[:, None], "ranks").tolist() == plain.tolist()
    assert shaping.shape(-fitness[:, None], "ranks").tolist() == pytest.approx((-plain).tolist(), abs=1e-12)


@given(arrays(np.float64, st.integers(2, 30), elements=st.integers(-6, 6).map(float)), st.data())
def test_truncation_averages_the_best_quarter_over_all_ways_to_break_ties(fitness, data):
    got, members = shaping.shape(fitness[:, None], "truncation"), len(fitness)
    if fitness.max() == fitness.min():
        assert not got.any()
        return
    selected = max(1, members // 4)
    assert got.min() >= 0.0 and got.sum() == pytest.approx(members)
    for value, coefficient in zip(fitness, got, strict=True):
        places = selected - np.sum(fitness > value)
        share = min(1.0, max(0.0, places / np.sum(fitness == value)))
        assert coefficient == pytest.approx(share * members / selected)
    noise = data.draw(arrays(np.float64, members, elements=st.integers(-9, 9).map(float)))
    distinct = fitness + np.arange(members) * 1e-3  # ties go to the later member
    best = sorted(range(members), key=lambda m: distinct[m])[-selected:]
    moved = shaping.shape(distinct[:, None], "truncation") @ noise / members
    assert moved == pytest.approx(noise[best].mean()), "a step of eta 1 ends at the average of the best"


@given(arrays(np.float64, st.integers(2, 30), elements=st.integers(-20, 20).map(float)))
def test_truncation_does_not_change_under_a_monotone_map(fitness):
    plain = shaping.shape(fitness[:, None], "truncation")
    for mapped in (fitness**3, np.exp(fitness), 2 * fitness - 7):
        assert shaping.shape(mapped[:, None], "truncation").tolist() == plain.tolist()


@pytest.mark.parametrize("members", [2, 3, 30, 64])
@pytest.mark.parametrize("name", ["zscore", "ranks", "truncation"])
def test_scale_is_the_root_mean_square_of_the_coefficients(name, members):
    coefficients = shaping.shape(np.random.default_rng(0).normal(size=(members, 1)), name)
    assert shaping.scale(name, members) == pytest.approx(float((coefficients**2).mean()) ** 0.5, rel=1e-6)
    assert shaping.scale(name, members, paired=True) == pytest.approx(float(coefficients.std()), rel=1e-6)


@given(scores)
def test_identity_is_the_fitness(scores_MP):
    fitness = exact_fitness(scores_MP)
    want = [0.0] * len(fitness) if max(fitness) == min(fitness) else fitness
    assert shaping.shape(scores_MP, "identity").tolist() == want
    assert shaping.fitness(scores_MP).tolist() == fitness


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@given(scores_MP=scores, seed=st.integers(0, 100))
def test_members_are_treated_alike(name, scores_MP, seed):
    fitness = exact_fitness(scores_MP)
    assume(max(fitness) - min(fitness) > 1e-3)
    order = np.random.default_rng(seed).permutation(len(scores_MP))
    plain, permuted = shaping.shape(scores_MP, name), shaping.shape(scores_MP[order], name)
    np.testing.assert_allclose(permuted, plain[order], rtol=1e-9, atol=1e-9)
    best, worst = int(np.argmax(fitness)), int(np.argmin(fitness))
    assert plain[best] > plain[worst]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("scores_MP", "message"),
    [
        *[([[0] * 3, [0] * 3, [0, v, 0]], f"member 2, prompt 1 is {v}") for v in (math.nan, math.inf, -math.inf)],
        *[(scores, r"score of member ., prompt . is 1e\+(308|200); fix the reward")
          for scores in ([[1e308, 1e308], [0, 0]], [[1e308], [-1e308]], [[2.0, 1], [3, 1e200]])],
    ],
)  # fmt: skip
def test_a_score_that_is_not_finite_or_overflows_when_squared_is_an_error(name, scores_MP, message):
    with pytest.raises(RewardError, match=message):
        shaping.shape(np.array(scores_MP), name)


@pytest.mark.parametrize("name", NAMES)
def test_large_scores_that_fit_are_shaped(name):
    got = shaping.shape(np.array([[1e100, 3.0], [-1e100, 4.0], [5.0, 6.0]]), name)
    assert np.isfinite(got).all()
    assert got[0] > got[1] and got[0] >= got[2] >= got[1]
    assert got[2] > got[1] or name == "truncation"


def factors(name, floor, total):
    return [shaping.schedule(ScheduleConfig(name=name, floor=floor), g, total) for g in range(total)]


@pytest.mark.parametrize("name", ["linear", "cosine"])
@given(floor=st.floats(0.001, 1.0), total=st.integers(2, 300))
def test_schedules_fall_from_1_to_the_floor(name, floor, total):
    got = factors(name, floor, total)
    assert got[0] == 1.0
    assert got[-1] == pytest.approx(floor, rel=1e-12)
    assert (np.diff(got) <= 1e-12).all()
    if total % 2:
        assert got[total // 2] == pytest.approx((1 + floor) / 2, rel=1e-9)
    quarter = [0.25, 0.75] if name == "linear" else [(1 - math.sqrt(0.5)) / 2, (1 + math.sqrt(0.5)) / 2]
    if total % 4 == 1:
        for place, fall in zip((total // 4, 3 * total // 4), quarter, strict=True):
            assert got[place] == pytest.approx(1 - (1 - floor) * fall, rel=1e-9)


def test_a_constant_schedule_and_a_single_generation():
    assert factors("constant", 0.1, 5) == [1.0] * 5
    for name in ("constant", "linear", "cosine"):
        assert factors(name, 0.1, 1) == [1.0]
