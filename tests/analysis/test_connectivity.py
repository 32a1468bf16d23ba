# SPDX-License-Identifier: Apache-2.0
"""Lines between models: a planted barrier is found where it is, and none where there is none."""

from __future__ import annotations

import numpy as np
import pytest
from test_mixer import of_task, write_negated

from evoalign.analysis import Finding, connectivity
from evoalign.analysis.base import BASE
from evoalign.analysis.connectivity import Barrier, Connectivity, Line, Settings, alphas, barrier, dips, measure
from evoalign.analysis.mixer import EvalSettings, ModelMixer, Perturbation
from evoalign.config import Config
from evoalign.errors import ConfigError
from evoalign.statistics import t_of

FIVE = Settings(points=5, low=-0.25, high=1.25, examples=12)


@pytest.fixture(scope="module")
def config() -> Config:
    return of_task(task={"name": "countdown"}, evaluation={"max_tokens": 40})


@pytest.fixture(scope="module")
def negated(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model in other weights; half-way between the two all logits are 0, elsewhere they are multiples."""
    return str(write_negated(tmp_path_factory.mktemp("negated") / "model"))


def line_of(targets: list[str], settings: Settings, config: Config) -> Line:
    with ModelMixer(targets, config, EvalSettings(settings.examples, max_tokens=settings.tokens)) as mixer:
        return measure(mixer, targets[0], targets[1], alphas(settings), settings)


def line(height: float, examples: int, draws: int = 1, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Alphas [A] and rewards [K, A, E] of examples of their own level and roughness; a bump of `height` at 0.5."""
    random, alphas_A = np.random.default_rng(seed), np.arange(21) / 20
    dip_A = height * np.clip(1 - np.abs(alphas_A - 0.5) / 0.25, 0, None)
    level_E, rough_AE = random.normal(size=examples), random.normal(size=(21, examples))
    rewards_AE = level_E - dip_A[:, None] + rough_AE
    rough_K = 0.3 * random.normal(size=(draws, 21, 1))
    rest_KAE = 0.3 * random.normal(size=(draws, 21, examples)) if draws > 1 else 0.0
    return alphas_A, rewards_AE[None] + (rough_K if draws > 1 else 0.0) + rest_KAE


def test_dips_are_the_chord_less_the_reward_at_the_inner_points() -> None:
    alphas_A = np.array([-0.5, 0.0, 0.25, 0.5, 1.0, 1.5])
    rewards_KAE = np.array([[[9.0], [1.0], [1.0], [0.5], [3.0], [9.0]]])
    np.testing.assert_allclose(dips(alphas_A, rewards_KAE), [[[0.5], [1.5]]])
    found = barrier(alphas_A, rewards_KAE)
    assert (found.height, found.alpha, found.n, found.low, found.why) == (1.5, 0.5, 1, None, "1 examples: no interval")


@pytest.mark.parametrize(("draws", "examples"), [(1, 12), (1, 60), (8, 40)])
def test_the_interval_holds_the_largest_dip_and_seldom_sees_one_where_there_is_none(
    draws: int, examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 95 % of lines or more; the interval of one point that is picked for its dip is wrong far more often."""
    monkeypatch.setattr(connectivity, "DRAWS", 2000)
    times, chance = 120, list[float]()
    wrong = missed = naive = 0
    for seed in range(times):
        flat = line(0.0, examples, draws, seed)
        none, one = barrier(*flat), barrier(*line(2.0, examples, draws, 1000 + seed))
        assert none.low is not None and one.low is not None and one.high is not None and none.corrected is not None
        wrong += none.low > 0
        missed += not one.low <= 2.0 <= one.high
        chance.append(none.corrected)
        dips_IE = dips(*flat).mean(0)
        at = dips_IE[dips_IE.mean(1).argmax()]
        naive += at.mean() > t_of(len(at) - 1) * at.std(ddof=1) / len(at) ** 0.5
    assert wrong <= 0.07 * times and missed <= 0.08 * times and naive > 3 * max(1, wrong)
    assert abs(np.mean(chance)) < 4 * np.std(chance) / times**0.5 + 0.02, "corrected has no bias where no point dips"


def test_a_large_dip_is_sure_and_so_is_one_that_all_examples_share_alike() -> None:
    found, alphas_A = barrier(*line(2.0, 60)), np.array([0.0, 0.5, 1.0])
    assert (found.low or 0) > 0 and abs(found.alpha - 0.5) <= 0.1 and found.p is not None and found.p < 0.001
    alike, few = (barrier(alphas_A, np.array([[[1.0] * n, [0.0] * n, [1.0] * n]])) for n in (20, 3))
    assert alike.height == 1 and alike.low is not None and 0.7 < alike.low < 1 < (alike.high or 0) < 1.3
    assert few.low is not None and few.low < 0, "three examples say little"
    straight = barrier(alphas_A, np.tile(np.array([[0.0], [0.5], [1.0]]), (1, 1, 9)))
    assert straight == Barrier(0.0, 0.5, 9, why=straight.why) and "no interval" in str(straight.why)


def test_alphas_have_both_ends_exactly_and_go_beyond() -> None:
    found = alphas(Settings())
    assert {0.0, 1.0, 0.5, -0.5, 1.5} <= set(found) and ((found >= 0) & (found <= 1)).sum() == 21 and len(found) == 41
    for settings, said in (({"points": 2}, "points: 2"), ({"low": 0.1}, "leaves out a model"),
                           ({"high": float("inf")}, "leaves out a model"), ({"sigma": -1}, "sigma, trials: -1"),
                           ({"sigma": 0.1, "trials": 0}, "sigma, trials: 0.1, 0")):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            alphas(Settings(**settings))


@pytest.fixture(scope="module")
def analysed(config: Config, negated: str) -> tuple[Finding, Line]:
    lines: list[Line] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connectivity, "measure", lambda *given: lines.append(measure(*given)) or lines[0])
        return Connectivity().run([BASE, negated], FIVE, config), lines[0]


def test_a_planted_barrier_is_found_where_it_is(analysed: tuple[Finding, Line]) -> None:
    """Logits are those of the base times (1 - 2 alpha)^2: greedy completions are the base's but at alpha 0.5."""
    found, between = analysed
    assert between.alphas_A.tolist() == [-0.25, 0.0, 0.25, 0.5, 0.75, 1.0, 1.25]
    start_E, known = between.rewards_AE[1], between.barriers["barrier"]
    assert (between.rewards_AE[[0, 2, 4, 5, 6]] == start_E).all() and start_E.mean() > 0.1
    assert (between.rewards_AE[3] == 0).all()
    assert known is not None and (known.low or 0) > 0 and known.alpha == 0.5
    assert found.numbers["lines"][0]["barrier"]["height"] == known.height == pytest.approx(start_E.mean())
    assert any("a barrier yes" in line and "at alpha 0.5" in line for line in found.sentences)


def test_the_divergence_along_it_is_that_of_scaled_logits(analysed: tuple[Finding, Line]) -> None:
    between = analysed[1]
    kl = dict(zip(between.alphas_A.tolist(), (one.mean for one in between.estimates["kl"]), strict=True))
    assert kl[0.0] == 0 and abs(kl[1.0]) < 1e-6 and kl[0.5] == max(kl.values())
    assert kl[0.25] == pytest.approx(kl[0.75], rel=1e-3) and kl[0.25] > 0.01


@pytest.mark.slow
def test_there_is_none_where_the_function_is_one_all_along(config: Config, negated: str) -> None:
    """From the negated model to beyond itself no sign turns; the base and itself cannot be given."""
    settings = Settings(points=3, low=0.0, high=1.0, examples=12, kl=False, sigma=1e-30, trials=3)
    with ModelMixer([negated], config, EvalSettings(examples=12)) as mixer:
        at = [mixer.rewards(mixer.evaluate({negated: 1 + a, BASE: -a})) for a in (0.0, 0.1, 0.2)]
    assert barrier(np.array([0.0, 0.5, 1.0]), np.array([at])).height == 0
    between = line_of([BASE, negated], settings, config)
    assert between.smooth_KAE is not None and "kl" not in between.estimates
    assert (between.smooth_KAE == between.rewards_AE).all(), "noise too small for any bit changes nothing"


def test_smoothing_is_the_mean_over_the_same_noise_at_every_point(negated: str) -> None:
    settings = Settings(points=3, low=0, high=1, examples=4, kl=False, sigma=0.05, trials=2, tokens=8)
    between = line_of([BASE, negated], settings, of_task())
    assert between.smooth_KAE is not None and between.smooth_KAE.shape == (2, 3, 4)
    with ModelMixer([BASE, negated], of_task(), EvalSettings(examples=4, max_tokens=8)) as mixer:
        noisy = np.array([mixer.rewards(mixer.evaluate({negated: 1.0}, Perturbation(0.05, k))) for k in range(2)])
    assert (between.smooth_KAE[:, 2] == noisy).all()
    assert (noisy[0] != noisy[1]).any() and (noisy[0] != between.rewards_AE[2]).any()
