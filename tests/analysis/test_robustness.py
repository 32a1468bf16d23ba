# SPDX-License-Identifier: Apache-2.0
"""Reward under noise on the weights: what is measured, that differences are paired, and what is said of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawings import figures_of
from test_mixer import of_task, write_negated

from evoalign import statistics
from evoalign.analysis import Finding, robustness
from evoalign.analysis.base import BASE
from evoalign.analysis.mixer import EvalSettings, KlSums, ModelMixer, Perturbation
from evoalign.analysis.robustness import Perturbed, Profile, Robustness, Settings, difference, measure, sentences
from evoalign.config import Config
from evoalign.models import tiny
from evoalign.statistics import Estimate

SMALL = Settings(sigma=(1e-30, 0.05), trials=3, examples=3, tokens=4, parts=("all", "unembedding", "mlp"))
Analysed = tuple[Finding, dict[str, Profile]]


@pytest.fixture(scope="module")
def config() -> Config:
    return of_task(task={"name": "countdown"}, evaluation={"max_tokens": 12})


@pytest.fixture(scope="module")
def analysed(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Analysed:
    profiles: dict[str, Profile] = {}

    def keep(mixer: ModelMixer, name: str, *rest: Any) -> Profile:
        return profiles.setdefault(name, measure(mixer, name, *rest))

    twin = str(shutil.copytree(tiny(), tmp_path_factory.mktemp("twin") / "model"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(robustness, "measure", keep)
        return Robustness().run([BASE, twin], SMALL, config), profiles


@pytest.mark.slow
def test_twins_get_the_same_noise_and_do_not_differ(analysed: Analysed) -> None:
    found, profiles = analysed
    a, b = profiles.values()
    for place, one in a.perturbed.items():
        assert (one.rewards_KE == b.perturbed[place].rewards_KE).all()
        other = b.perturbed[place].nats
        assert one.nats is not None and other is not None and (one.nats.nats_P == other.nats_P).all()
    assert all(row["change"]["mean"] == 0 for row in found.numbers["differences"])
    assert any(line.startswith("0 of 4 differences") for line in found.sentences)


def test_noise_below_the_last_bit_changes_nothing_and_wide_noise_does(analysed: Analysed) -> None:
    own = analysed[1][BASE]
    none, wide, mlp = (own.perturbed[place] for place in (("all", 1e-30), ("all", 0.05), ("mlp", 0.05)))
    assert none.kl is not None and wide.kl is not None and mlp.kl is not None and wide.nats is not None
    assert (none.rewards_KE == own.rewards_E).all() and none.kl.mean == 0
    assert mlp.kl.mean != wide.kl.mean > 0.1
    assert len({*map(tuple, wide.nats.nats_P)}) == 3, "each draw is another"


def test_a_tied_head_is_reported_as_the_embeddings(analysed: Analysed, config: Config, tmp_path: Path) -> None:
    settings = Settings(sigma=(0.05,), trials=1, examples=2, tokens=4, parts=("unembedding",), kl=False)
    untied = Robustness().run([str(write_negated(tmp_path / "untied"))], settings, config)
    for found, tied, parts in ((analysed[0], True, ["all", "mlp"]), (untied, False, ["unembedding"])):
        assert (found.numbers["tied_head"], found.numbers["parts"]) == (tied, parts)
        assert any("(tied)" in line for line in found.sentences) == tied
    assert untied.numbers["targets"][0]["perturbed"][0]["change"]["why"] == "1 value: no interval"


def test_numbers_are_those_of_the_mixer(analysed: Analysed, config: Config) -> None:
    found, profiles = analysed
    with ModelMixer([BASE], config, EvalSettings(examples=3, max_tokens=4)) as mixer:
        noisy = [mixer.evaluate({BASE: 1.0}, Perturbation(0.05, trial, "mlp")) for trial in range(3)]
        rewards_KE = np.stack([mixer.rewards(one) for one in noisy])
        nats = mixer.divergence({BASE: 1.0}, {BASE: 1.0}, Perturbation(0.05, 2, "mlp"))
    cell = profiles[BASE].perturbed["mlp", 0.05]
    assert (
        cell.nats is not None and (cell.nats.nats_P[2] == nats.nats_P).all() and (cell.rewards_KE == rewards_KE).all()
    )
    (row,) = [r for r in found.numbers["targets"][0]["perturbed"] if (r["part"], r["sigma"]) == ("mlp", 0.05)]
    assert row["reward"]["mean"] == pytest.approx(rewards_KE.mean())
    assert row["kl"]["mean"] == pytest.approx(cell.nats.nats_P.sum() / cell.nats.tokens_P.sum())


PLACE = ("all", 0.01)


def profile(change: float, seed: int = 0) -> Profile:
    """A target whose reward noise changes by this much; what noise does is alike between profiles of one seed."""
    random, ones = np.random.default_rng(seed), np.ones((8, 20))
    rewards_E, noise_KE = random.normal(size=20), 0.3 * random.normal(size=(8, 20))
    cell = Perturbed(rewards_E + change + noise_KE, np.zeros((8, 20)), KlSums(ones, ones, ones))
    return Profile(rewards_E, np.zeros(20), {PLACE: cell})


def verdicts(a: Profile, b: Profile) -> tuple[Estimate, list[str]]:
    gap = difference(a, b, PLACE)
    return gap, [line for line in sentences({"a": a, "b": b}, {("a", "b", PLACE): gap}) if "differen" in line]


def test_differences_are_paired_by_draw_and_example() -> None:
    estimate, _ = verdicts(profile(-0.5), profile(-0.52))
    assert estimate.mean == pytest.approx(0.02) and estimate.why == "all alike: no interval", "the same noise cancels"
    gap, (line, count) = verdicts(profile(-0.1, 1), profile(-0.9, 2))
    assert 0.6 < gap.mean < 1 and f"{gap.mean:+.3g} (95 %" in line and line.endswith("keeps more of its reward a")
    assert count.startswith("1 of 1 differences") and "reward b" in verdicts(profile(-0.9, 2), profile(-0.1, 1))[1][0]
    (count,) = verdicts(profile(-0.5, 1), profile(-0.5, 2))[1]
    assert count.startswith("0 of 1 differences")
    changes = statistics.crossed(profile(-0.9, 2).changes(PLACE))
    assert changes.low is not None and changes.low < -0.9 < (changes.high or 0) < -0.5


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("count", [1, 3])
def test_one_sigma_is_one_place_on_the_axis(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = figures_of(robustness, monkeypatch)
    robustness.draw({name: profile(-0.1 * i, i) for i, name in enumerate("abc"[:count])}, tmp_path)
    (figure,) = drawn.values()
    figure.canvas.draw()
    for axes in figure.axes:
        across = [axes.transAxes.inverted().transform(axes.transData.transform((x, 0)))[0]
                  for line in axes.lines if line.get_marker() not in ("", "None", "_", "|", None)
                  for x in line.get_xdata()]  # fmt: skip
        assert len(across) >= count and all(abs(at - 0.5) < 0.06 for at in across)
        assert list(axes.get_xticks()) == [0.01]
