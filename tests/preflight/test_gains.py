# SPDX-License-Identifier: Apache-2.0
"""Tests of gains: against formulas written out here, and by simulation of rewards that cannot be learned."""

import math
from itertools import permutations

import numpy as np
import pytest

from evoalign.preflight import gains
from evoalign.preflight.gains import advantages, both_rise, direction, rise, worths


def test_worth_is_the_mean_product_on_different_prompts():
    rng = np.random.default_rng(0)
    near, far = rng.standard_normal((2, 5, 6))
    both = [far[k, p] * near[k, q] for k in range(5) for p, q in permutations(range(6), 2)]
    (worth,) = worths([near, far])
    assert worth.value == pytest.approx(np.mean(both))

    def without(prompt):
        return np.mean([far[k, p] * near[k, q] for k in range(5) for p, q in permutations(set(range(6)) - {prompt}, 2)])

    by_pair = [np.mean([far[k, p] * near[k, q] for p, q in permutations(range(6), 2)]) for k in range(5)]
    left = np.array([without(p) for p in range(6)])
    variance = np.var(by_pair, ddof=1) / 5 + 5 / 6 * ((left - left.mean()) ** 2).sum()
    assert worth.error == pytest.approx(math.sqrt(variance))


def test_worth_on_one_prompt_is_that_on_this_prompt_and_zero_of_equal_scores():
    rng = np.random.default_rng(1)
    near, far = rng.standard_normal((2, 7, 1))
    (worth,) = worths([near, far])
    products = (far * near)[:, 0]
    assert worth.value == pytest.approx(products.mean())
    assert worth.error == pytest.approx(products.std(ddof=1) / math.sqrt(7))
    flat = np.zeros((4, 8))
    (worth,) = worths([flat, flat])
    assert (worth.value, worth.error) == (0.0, 0.0) and worths([flat]) == []
    assert direction([flat, flat]).chance == direction([]).chance == 1.0


@pytest.mark.parametrize("prompts", [1, 2, 3])
def test_chance_is_the_share_of_signs_with_as_large_a_sum(prompts):
    """Compare with all signs of four pairs. With one prompt the two widths are what has to agree."""
    near, far = np.random.default_rng(3).standard_normal((2, 4, prompts))
    far += near + 0.5 * near[:, :1]
    units = [x / np.sqrt((x**2).mean()) for x in (near, far)]
    table = units[0] + units[1] if prompts > 1 else np.hstack(units)
    table /= np.sqrt((table**2).mean(axis=0) / (table**2).mean() + 0.5)
    columns = table.shape[1]
    all_signs = np.array(np.meshgrid(*[[-1, 1]] * 4 * columns)).reshape(4 * columns, -1).T.reshape(-1, 4, columns)
    sums = ((all_signs * table).sum(axis=2) ** 2).sum(axis=1) - (table**2).sum()
    total = (table.sum(axis=1) ** 2).sum() - (table**2).sum()
    exact, found = np.mean(sums >= total - 1e-9), direction([near, far])
    assert total > 0 and exact < 0.6 and found.chance == pytest.approx(exact, abs=0.02)
    assert found.z == pytest.approx(total / sums.std())


def test_linear_rewards_are_significant():
    """However few the pairs: a t test would miss half of such gains, since the products are chi-squared."""
    slope_K = np.random.default_rng(5).standard_normal(16)
    ladder = [width * np.repeat(slope_K[:, None], 8, axis=1) for width in (1.0, 2.0)]
    assert direction(ladder).chance < 0.001


def test_both_rise_is_positive_only_if_both_members_are_better():
    rng = np.random.default_rng(0)
    slopes_KP, start_P = rng.normal(size=(16, 8)), np.zeros(8)
    linear_MP = np.zeros((32, 8))
    linear_MP[0::2], linear_MP[1::2] = slopes_KP.mean(1, keepdims=True), -slopes_KP.mean(1, keepdims=True)
    assert both_rise(np.maximum(linear_MP, 0.0), start_P) == 0.0
    assert both_rise(rng.uniform(0.2, 1.0, size=(32, 8)), start_P) > 3.0
    assert both_rise(np.ones((32, 8)), start_P) == math.inf
    lower_K = np.array([0.1, 0.3])
    scores_MP = np.array([[0.1], [0.5], [0.9], [0.3]])
    assert both_rise(scores_MP, np.zeros(1)) == pytest.approx(lower_K.mean() / (lower_K.std(ddof=1) / math.sqrt(2)))


def test_rise_cancels_linear_effects():
    rng = np.random.default_rng(6)
    noise = rng.standard_normal((8, 3))
    start = np.array([1.0, 2.0, 3.0])
    scores = np.stack([start + noise + 0.25, start - noise + 0.25], axis=1).reshape(16, 3)
    above, error = rise(scores, start, paired=True)
    assert above == pytest.approx(0.25) and error == pytest.approx(0.0, abs=1e-12)
    assert rise(scores, start, paired=False)[1] > 0.1
    assert advantages(scores, paired=True) == pytest.approx(noise)


def chance(rng, members=32, prompts=64):
    """Yield scores of a coin that pays 30 %: 5 % of completions change at the narrowest width, all at the widest."""
    base_P = (rng.random(prompts) < 0.3).astype(float)
    for k in range(9):
        coin_MP = (rng.random((members, prompts)) < 0.3).astype(float)
        yield np.where(rng.random((members, prompts)) < min(1.0, 0.05 * 2**k), coin_MP, base_P)


def hashed(rng, members=32, prompts=16):
    """A ladder of a reward that is a hash of the text. A text once changed stays or changes again as the noise grows,
    so that one member earns much the same at two widths; what prompts have in common is nothing."""
    kept_MP = np.zeros((members, prompts), dtype=int)
    coin_MPT = rng.integers(0, 2, size=(members, prompts, 10)).astype(float)
    coin_MPT[:, :, 0] = rng.integers(0, 2, size=prompts)
    for k in range(9):
        kept_MP = np.where(rng.random((members, prompts)) < 0.3, k + 1, kept_MP)
        yield np.take_along_axis(coin_MPT, kept_MP[:, :, None], axis=2)[:, :, 0]


@pytest.mark.slow
@pytest.mark.parametrize("reward", [chance, hashed])
def test_unlearnable_rewards_are_rarely_significant(reward, monkeypatch):
    """At most the level plus three standard errors of the count, of two widths in the middle."""
    monkeypatch.setattr(gains, "DRAWS", 499)
    trials, found, level = 400, 0, gains.OFFERED
    for seed in range(trials):
        ladder = [advantages(s, paired=True) for s in reward(np.random.default_rng([7, seed]))]
        found += direction(ladder[4:6]).chance <= level
    assert found <= trials * level + 3 * math.sqrt(trials * level * (1 - level))


def persistent(rng, pairs=64):
    """Two prompts, on each of which a direction has an effect that is the same at all widths, and other on the next."""
    own_KP = rng.standard_normal((pairs, 2))
    for width in (1.0, 2.0):
        both = np.stack([own_KP, -own_KP], axis=1).reshape(2 * pairs, 2) * width
        yield both + 0.5 * rng.standard_normal(both.shape)


@pytest.mark.slow
def test_effects_that_persist_on_a_prompt_are_rarely_significant_on_two_prompts(monkeypatch):
    monkeypatch.setattr(gains, "DRAWS", 499)
    drawn = [[advantages(s, paired=True) for s in persistent(np.random.default_rng([9, i]))] for i in range(300)]
    assert sum(direction(ladder).chance <= 0.05 for ladder in drawn) <= 15 + 3 * math.sqrt(15)


def test_worth_ignores_products_on_the_same_prompt():
    """Products on equal prompts are biased for a hash of the text; those on different prompts are not."""
    same, other = [], []
    for seed in range(20):
        near, far = [advantages(s, paired=True) for s in hashed(np.random.default_rng([8, seed]))][1:3]
        same.append(float((far * near).mean()))
        other.append(worths([near, far])[0].value)
    assert np.mean(same) > 10 * np.std(same) / math.sqrt(20)
    assert abs(np.mean(other)) < 3 * np.std(other) / math.sqrt(20)
