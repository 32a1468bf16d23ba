# SPDX-License-Identifier: Apache-2.0
"""Lines and planes between models: a barrier that was planted is found where it is, and none where there is none."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from test_lab import of_task, plain, write, write_negated

from calling import Run, caller
from drawn import figures_of, words_of
from evoalign.analysis.connectivity import barrier as module
from evoalign.analysis.connectivity import figure
from evoalign.analysis.connectivity.barrier import Barrier, barrier, dips
from evoalign.analysis.connectivity.command import Settings
from evoalign.analysis.connectivity.compute import Connectivity, alphas, connectivity
from evoalign.analysis.lab import BASE, Asked, Lab, Perturbation
from evoalign.config import Config
from evoalign.errors import ConfigError
from evoalign.statistics import t_of

COUNTDOWN = {"name": "countdown"}


@pytest.fixture(scope="module")
def config() -> Config:
    return of_task(task=COUNTDOWN, evaluation={"max_tokens": 40})


@pytest.fixture(scope="module")
def negated(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model in other weights; half-way between the two all logits are 0, elsewhere they are multiples."""
    return str(write_negated(tmp_path_factory.mktemp("negated") / "model"))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)
    return caller(monkeypatch, capsys, 200)


# --- the statistic ---


def line(
    height: float, examples: int, points: int = 21, draws: int = 1, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Alphas [A] and rewards [K, A, E] of examples of their own level and roughness; a bump of `height` at 0.5."""
    random = np.random.default_rng(seed)
    alphas_A = np.arange(points) / (points - 1)
    dip_A = height * np.clip(1 - np.abs(alphas_A - 0.5) / 0.25, 0, None)
    level_E, rough_AE = random.normal(size=examples), random.normal(size=(points, examples))
    rough_K = 0.3 * random.normal(size=(draws, points, 1))
    rest_KAE = 0.3 * random.normal(size=(draws, points, examples)) if draws > 1 else 0.0
    return alphas_A, (level_E - dip_A[:, None] + rough_AE)[None] + (rough_K if draws > 1 else 0.0) + rest_KAE


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
    monkeypatch.setattr(module, "DRAWS", 2000)
    times = 120
    wrong = missed = naive = 0
    chance: list[float] = []
    for seed in range(times):
        none = barrier(*line(0.0, examples, draws=draws, seed=seed))
        one = barrier(*line(2.0, examples, draws=draws, seed=1000 + seed))
        assert none.low is not None and one.low is not None and one.high is not None and none.corrected is not None
        wrong += none.low > 0
        missed += not one.low <= 2.0 <= one.high
        chance.append(none.corrected)
        dips_IE = dips(*line(0.0, examples, draws=draws, seed=seed)).mean(0)
        at = dips_IE[dips_IE.mean(1).argmax()]
        naive += at.mean() > t_of(len(at) - 1) * at.std(ddof=1) / len(at) ** 0.5
    assert wrong <= 0.07 * times and missed <= 0.08 * times
    assert naive > 3 * max(1, wrong)
    assert abs(np.mean(chance)) < 4 * np.std(chance) / times**0.5 + 0.02, "corrected has no bias where no point dips"


def test_a_large_dip_is_sure_and_so_is_one_that_all_examples_share_alike() -> None:
    found = barrier(*line(2.0, 60))
    assert found.is_sure and abs(found.alpha - 0.5) <= 0.1 and found.p is not None and found.p < 0.001
    alphas_A = np.array([0.0, 0.5, 1.0])
    alike = barrier(alphas_A, np.array([[[1.0] * 20, [0.0] * 20, [1.0] * 20]]))
    assert alike.height == 1 and alike.low is not None and 0.7 < alike.low < 1 < (alike.high or 0) < 1.3
    few = barrier(alphas_A, np.array([[[1.0] * 3, [0.0] * 3, [1.0] * 3]]))
    assert few.low is not None and few.low < 0, "three examples say little"
    straight = barrier(alphas_A, np.tile(np.array([[0.0], [0.5], [1.0]]), (1, 1, 9)))
    assert straight == Barrier(0.0, 0.5, 9, why=straight.why) and "no interval" in str(straight.why)


def test_alphas_have_both_ends_exactly_and_go_beyond() -> None:
    found = alphas(Settings())
    assert {0.0, 1.0, 0.5, -0.5, 1.5} <= set(found) and ((found >= 0) & (found <= 1)).sum() == 21 and len(found) == 41
    for settings, said in (
        (Settings(points=2), "points: 2"),
        (Settings(low=0.1), "leaves out an end"),
        (Settings(high=float("inf")), "leaves out an end"),
        (Settings(sigma=-1), "no noise"),
        (Settings(sigma=0.1, trials=0), "no noise"),
    ):
        with pytest.raises(ConfigError, match=said):
            alphas(settings)


# --- models ---


@pytest.fixture(scope="module")
def found(config: Config, negated: str) -> Connectivity:
    return connectivity([BASE, negated], Settings(points=5, low=-0.25, high=1.25, examples=12), config)


def test_a_planted_barrier_is_found_where_it_is(found: Connectivity, config: Config, negated: str) -> None:
    """Logits are those of the base times (1 - 2 alpha)^2: greedy answers are the base's but at alpha 0.5."""
    (between,) = found.lines
    assert between.alphas_A.tolist() == [-0.25, 0.0, 0.25, 0.5, 0.75, 1.0, 1.25]
    start_E = between.rewards_AE[1]
    assert (between.rewards_AE[[0, 2, 4, 5, 6]] == start_E).all() and start_E.mean() > 0.1
    assert (between.rewards_AE[3] == 0).all()
    known = between.barrier
    assert known.is_sure and known.alpha == 0.5 and known.height == pytest.approx(start_E.mean())
    assert found.numbers["lines"][0]["barrier"]["height"] == known.height
    assert any("a barrier: the largest dip of 3 inner points" in line for line in found.sentences)


def test_the_divergence_along_it_is_that_of_scaled_logits(found: Connectivity) -> None:
    (between,) = found.lines
    kl = dict(zip(between.alphas_A.tolist(), between.kl or [], strict=True))
    assert kl[0.0].mean == 0 and abs(kl[1.0].mean) < 1e-6
    assert kl[0.25].mean == pytest.approx(kl[0.75].mean, rel=1e-3) and kl[0.25].mean > 0.01
    assert kl[0.5].mean == max(one.mean for one in kl.values())


def test_there_is_none_where_the_function_is_one_all_along(config: Config, negated: str) -> None:
    """From the negated model to beyond itself no sign turns; the base and itself cannot be given."""
    settings = Settings(points=3, low=0.0, high=1.0, examples=12, kl=False, sigma=1e-30, trials=3)
    with Lab([negated], config, Asked(examples=12)) as lab:
        at = [lab.rewards(lab.answer({negated: 1 + a, BASE: -a})) for a in (0.0, 0.1, 0.2)]
    assert barrier(np.array([0.0, 0.5, 1.0]), np.array([at])).height == 0
    both = connectivity([BASE, negated], settings, config)
    (between,) = both.lines
    assert between.smooth_KAE is not None
    assert (between.smooth_KAE == between.rewards_AE).all(), "noise too small for any bit changes nothing"
    assert between.kl is None and "kl" not in both.numbers["lines"][0]["points"][0]


def test_smoothing_is_the_mean_over_the_same_noise_at_every_point(negated: str) -> None:
    brief = of_task()
    settings = Settings(points=3, low=0, high=1, examples=4, kl=False, sigma=0.05, trials=2, tokens=8)
    (between,) = connectivity([BASE, negated], settings, brief).lines
    assert between.smooth_KAE is not None and between.smooth_KAE.shape == (2, 3, 4)
    with Lab([BASE, negated], brief, Asked(examples=4, max_tokens=8)) as lab:
        noisy = np.array([lab.rewards(lab.answer({negated: 1.0}, Perturbation(0.05, k))) for k in range(2)])
    assert (between.smooth_KAE[:, 2] == noisy).all()
    assert (noisy[0] != noisy[1]).any() and (noisy[0] != between.rewards_AE[2]).any()


def test_the_plane_has_the_models_at_their_distances(
    config: Config, negated: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One model is 0.01 away in one matrix, the other turns the signs of others: at right angles."""
    model = plain()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.add_(0.01)
        sizes = [float(p.double().square().sum()) for p in (model.lm_head.weight, model.model.norm.weight)]
    names = [BASE, str(write(tmp_path / "moved", dict(model.named_parameters()))), negated]
    settings = Settings(points=3, low=0, high=1, examples=3, kl=False, tokens=4, plane=3)
    found = connectivity(names, settings, config)
    flat = found.plane
    assert flat is not None and len(found.lines) == 3
    (_, (bx, _), (cx, cy)) = flat.corners
    assert bx == pytest.approx(0.01 * (96 * 288) ** 0.5, rel=1e-4)
    assert (cx, cy) == (pytest.approx(0, abs=1e-6), pytest.approx(2 * sum(sizes) ** 0.5, rel=1e-6))
    assert flat.xs.tolist() == pytest.approx([-0.3 * bx, 0.5 * bx, 1.3 * bx])
    with Lab(names, config, Asked(examples=3, max_tokens=4)) as lab:
        corner = lab.rewards(lab.answer({BASE: 1 - 1.3 - 1.3, names[1]: 1.3, negated: 1.3})).mean()
        own = [lab.rewards(lab.answer({name: 1.0})).mean() for name in names]
    assert flat.rewards[2][2].mean == pytest.approx(corner)
    tree = found.numbers["plane"]
    assert len(tree["reward"]) == 3 and len(tree["reward"][0]) == 3 and {"mean", "low"} <= set(tree["reward"][0][0])
    assert [one.mean for one in flat.own] == pytest.approx(own) and len(tree["own"]) == 3
    drawn = figures_of(figure, monkeypatch)
    paths = found.draw(tmp_path)
    surface, *signs = [drawn["connectivity_plane"].axes[0].collections[i] for i in (0, -3, -2, -1)]
    assert [float(sign.get_array()[0]) for sign in signs] == pytest.approx(own), "and not what the grid has there"
    assert all((sign.norm, sign.cmap) == (surface.norm, surface.cmap) for sign in signs), "on one scale"
    assert "9 points, colours between them interpolated; 3 examples" in words_of(drawn["connectivity_plane"])
    hacked = any(one.mean for one in found.lines[0].hacked)
    assert hacked is ("hacked share" in words_of(drawn["connectivity_1"]))
    assert [p.name for p in paths][-2:] == ["connectivity_plane.png", "connectivity_plane.svg"] and len(paths) == 8
    assert all(path.stat().st_size > 0 for path in paths)
    with pytest.raises(ConfigError, match="plane: 3 points a side of 2 targets"):
        connectivity(names[:2], settings, config)


def test_three_on_a_line_have_no_plane(config: Config, negated: str) -> None:
    from evoalign.analysis.connectivity.plane import corners

    with Lab([BASE, negated], config, Asked(examples=1)) as lab, pytest.raises(ConfigError, match="lie on one line"):
        corners(lab, BASE, negated, BASE)


def test_the_command_writes_numbers_and_figures(negated: str, tmp_path: Path, run: Run) -> None:
    words = ["examples=3", "points=3", "low=0", "high=1", "tokens=4"]
    sets = [word for setting in words for word in ("--set", setting)]
    (tmp_path / "c.yaml").write_text("model: {name: tiny}\ntask: {name: countdown}\n")
    done = run("analyze", "connectivity", "base", negated, "-c", "c.yaml", *sets, "--to", "out")
    assert (done.code, done.err) == (0, "") and "barrier" in done.out
    tree = json.loads(Path("out/connectivity.json").read_text())["numbers"]
    assert [point["alpha"] for point in tree["lines"][0]["points"]] == [0.0, 0.5, 1.0]
    assert Path("out/connectivity_1.png").is_file() and Path("out/connectivity_1.svg").is_file()
    refused = run("analyze", "connectivity", "base", "-c", "c.yaml")
    assert refused.code == 2 and "base alone has no line" in refused.err
