# SPDX-License-Identifier: Apache-2.0
"""The Lagrangian of helpfulness and cost, against plain loops. A run with it is in test_safety_task.py."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoalign.config import ObjectiveConfig
from evoalign.errors import ConfigError, RewardError
from evoalign.rewards.objective import create, grouped, score
from evoalign.tasks.safety import Lagrangian

numbers = st.floats(-20, 20).map(lambda x: round(x, 3))


def group(reward, cost, mean=(), prompts=2):
    texts, rows = ["x"] * len(reward), [{"prompt": str(i)} for i in range(prompts)]
    found = grouped({"reward": reward, "cost": cost}, texts, rows, 0)
    if not mean:
        return found
    return replace(found, mean=grouped({"reward": [0.0] * len(mean), "cost": mean}, ["y"] * len(mean), rows, 0))


@given(st.lists(st.tuples(numbers, numbers), min_size=4, max_size=4), st.floats(0.01, 5), st.floats(0, 1))
def test_each_score_is_helpfulness_minus_lambda_times_cost(pairs, start, factor):
    """And the mean over prompts is mean(R_eff) - lambda mean(C), the published fitness."""
    reward, cost = zip(*pairs, strict=True)
    for way in ("none", "product", "published"):
        objective = Lagrangian(start=start, safe_first=way, factor=factor)
        effective = []
        for r, c in pairs:
            lesser = {"none": r, "product": min(r, factor * r), "published": factor * r}[way]
            effective.append(lesser if c > 0 else r)
        scores = objective.scores(group(reward, cost))
        assert scores.ravel().tolist() == [e - start * c for e, c in zip(effective, cost, strict=True)]
        for member in range(2):
            part = slice(2 * member, 2 * member + 2)
            wanted = np.mean(effective[part]) - start * np.mean(cost[part])
            assert scores[member].mean() == pytest.approx(wanted, abs=1e-9)


def test_safe_first_product_never_raises_an_unsafe_score():
    unsafe = group([-3.0, 3.0], [0.5, 0.5])
    assert Lagrangian(safe_first="published", rate=0).scores(unsafe).tolist() == [[-0.5, -0.5]]
    assert Lagrangian(safe_first="product", rate=0).scores(unsafe).tolist() == [[-3.5, -0.5]]
    assert Lagrangian(safe_first="product", rate=0).scores(group([-3.0, 3.0], [0.0, 0.0])).tolist() == [[-3.0, 3.0]]


def test_standardize_divides_by_the_deviation_of_the_generation():
    """Standardising by member would hide that the second one is much better."""
    reward, cost = [1.0, 3.0, 10.0, 30.0], [1.0, -1.0, 2.0, 0.0]
    found = Lagrangian(standardize=True, start=2.0).scores(group(reward, cost))

    def deviation(values):
        middle = sum(values) / len(values)
        return math.sqrt(sum((v - middle) ** 2 for v in values) / len(values))

    wanted = [r / deviation(reward) - 2.0 * c / deviation(cost) for r, c in zip(reward, cost, strict=True)]
    assert found.ravel().tolist() == pytest.approx(wanted, rel=1e-12)
    flat = Lagrangian(standardize=True).scores(group([0.1, 0.1, 0.1, 0.1], cost))
    assert flat.ravel().tolist() == pytest.approx([0.1 - c / deviation(cost) for c in cost], rel=1e-12)
    small = Lagrangian(standardize=True).scores(group([5e-324, 0.0], [0.0, 0.0]))
    assert np.isfinite(small).all()
    assert Lagrangian().scores_alone and not Lagrangian(standardize=True).scores_alone


@given(st.lists(numbers, min_size=1, max_size=30), st.floats(-3, 3), st.booleans(), st.sampled_from([0.005, 0.5, 9.0]))
def test_lambda_follows_the_mean_cost_of_the_unperturbed_model(costs, margin, positive_only, rate):
    objective = Lagrangian(rate=rate, margin=margin, positive_only=positive_only)
    log, average = 0.0, 0.0
    for c in costs:
        wanted = c + margin
        if positive_only and wanted < 0:
            wanted = 0.0
        average = 0.9 * average + 0.1 * wanted
        log = min(max(log + rate * average, math.log(1e-4)), math.log(5.0))
        before = objective.price
        score(objective, group([1.0, 2.0], [100.0, -50.0], mean=[c - 1.0, c + 1.0]))
        assert objective.price == pytest.approx(math.exp(log), rel=1e-9)
        assert 1e-4 <= objective.price <= 5.0
        if positive_only:
            assert objective.price >= before * (1 - 1e-12)


def test_lambda_reaches_its_maximum_after_the_published_number_of_generations():
    """A constant cost of 2 from lambda 1: the average is 2 (1 - 0.9^t), and ln 5 is reached when its sum is 322."""
    objective = Lagrangian()
    total, steps = 0.0, 0
    while 0.005 * total < math.log(5):
        steps += 1
        total += 2 * (1 - 0.9**steps)
    for step in range(1, steps + 1):
        objective.update(group([0.0], [0.0], mean=[2.0], prompts=1))
        assert (objective.price == 5.0) == (step == steps)
    assert steps == 170


def test_rate_zero_has_no_state_and_needs_no_mean():
    fixed = Lagrangian(start=0.3, rate=0)
    assert fixed.state == {} and not fixed.asks_mean and fixed.price == 0.3
    score(fixed, group([1.0, 2.0], [1.0, 1.0]))
    assert fixed.price == 0.3


@pytest.mark.parametrize(("options", "told"), [
    ({"start": 0.0}, "lagrangian.start: 0.0; give a number from 0.0001 to maximum 5"),
    ({"start": 6.0}, "lagrangian.start: 6.0"), ({"maximum": math.inf}, "lagrangian.maximum: inf"),
    ({"rate": -0.1}, "lagrangian.rate: -0.1; give 0"), ({"margin": math.nan}, "lagrangian.margin: nan"),
    ({"factor": 1.5}, "lagrangian.factor: 1.5; give a number from 0 to 1"),
    ({"safe_first": "yes"}, "lagrangian.safe_first: 'yes'; give none, product, published"),
    ({"standardize": "no"}, "lagrangian.standardize: 'no'; give true or false"),
    ({"positive": True}, "cannot be created with"), ({"rate": "fast"}, "cannot be created with"),
])  # fmt: skip
def test_invalid_settings_raise_config_error(options, told):
    with pytest.raises(ConfigError) as refused:
        create(ObjectiveConfig(name="lagrangian", **options))
    assert told in str(refused.value)


def test_missing_columns_raise_reward_error():
    with pytest.raises(RewardError, match="needs a column cost, but the columns are reward; set"):
        score(Lagrangian(), grouped({"reward": [1.0]}, ["x"], [{}], 0))
    with pytest.raises(RewardError, match="1 of 2 completions have no cost"):
        score(Lagrangian(), grouped({"reward": [1.0, 2.0], "cost": [None, 1.0]}, ["x", "y"], [{}], 0))
    with pytest.raises(RewardError, match="needs completions of the unperturbed model"):
        score(Lagrangian(), group([1.0, 2.0], [1.0, 1.0]))
    own = Lagrangian(rate=0, reward="good", cost="bad")
    assert score(own, grouped({"good": [3.0], "bad": [1.0]}, ["x"], [{}], 0)).tolist() == [[2.0]]
