# SPDX-License-Identifier: Apache-2.0
"""Distances of runs from their start: a planted straight run and a planted random walk are distinguished."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from small_runs import UNCHECKED
from test_mixer import base_weights, write

from evoalign.analysis import trajectory
from evoalign.analysis.trajectory import Settings, measure, signal_share
from evoalign.config import Config, from_dict, to_yaml
from evoalign.errors import ConfigError, ResumeError
from evoalign.rundir.journal import Journal
from evoalign.setup import Parts, assemble
from evoalign.training import saving
from evoalign.types import Plan, Update, population

GENERATIONS, MEMBERS = 12, 64
Coefficients = Callable[[Parts, int, Update], list[float]]
SMALL = Settings(points=0, placebos=5)


def configured(space: str, seed: int = 0, **sections: Any) -> Config:
    one = {"target_layers": [0], "target_modules": ["k_proj"], "rank": 1}
    norms = {"exclude": ["embed", "lm_head", "proj", "layers.1", "layers.2", "layers.3"]}
    own = {"lora": one, "lowrank": one, "full": norms}
    es = {"sigma": 0.02, "learning_rate": 0.01, "num_generations": GENERATIONS, "population_size": MEMBERS}
    tree = {"seed": seed, "space": space, "es": {**es, **sections.pop("es", {})}, "checks": UNCHECKED}
    return from_dict({"model": {"name": "tiny", "dtype": "float32"}, **tree, space: own[space], **sections})


def planted(
    folder: Path, config: Config, coefficients: Coefficients, generations: int = GENERATIONS, seal: str | None = None
) -> list[Any]:
    """A run whose journal has these coefficients; returns what evolves, of the start and after each."""
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config))
    with closing(assemble(config)) as parts:
        log = Journal(folder / "journal.jsonl", saving.header(parts, None))
        engine, states = parts.engine, [dict(parts.engine.state())]
        for g in range(generations):
            members = population(config.es.population_size)
            update = Update(g, g, members, (0.0,) * len(members), config.es.width, config.es.eta * config.es.width)
            update = replace(update, coefficients=tuple(coefficients(parts, g, update)))
            log.append(update, [float(g)] * len(members))
            engine.apply(update)
            log.seal(g, seal or engine.fingerprint())
            states.append(dict(engine.state()))
        log.close()
    return states


def random(parts: Parts, generation: int, update: Update) -> list[float]:
    return list(stats.zscore(np.random.default_rng(generation).normal(size=len(update.members))))


def straight(parts: Parts, generation: int, update: Update) -> list[float]:
    """How far each member's noise goes along one direction, as z-scores: an ES of a linear reward without noise."""
    plan, names = Plan(generation, update.sigma, update.members), {t.name for t in parts.layout.tensors}
    along = np.zeros(len(update.members))
    for name, mean in parts.engine.state():
        if name in names:
            moved = (parts.space.perturbed(parts.layout, name, mean, plan, member) for member in update.members)
            along += [float((weights - mean).sum()) for weights in moved]
    return list(stats.zscore(along))


@pytest.mark.first("lora", "full")
@pytest.mark.parametrize("space", ["lora", "lowrank", "full"])
def test_a_straight_run_and_a_random_walk_are_distinguished(space: str, tmp_path: Path) -> None:
    planted(tmp_path / "straight", configured(space), straight)
    planted(tmp_path / "random", configured(space, 2), random)
    names = [str(tmp_path / name) for name in ("straight", "random")]
    (there, walk), _ = measure(names, replace(SMALL, placebos=20), None)
    assert there.signal_share.low is not None and there.signal_share.low > 0.05
    assert walk.signal_share.low is not None and walk.signal_share.low <= 0
    for one in (there, walk):
        assert one.expected_P is not None
        ratio = one.distances_P[-1] / one.expected_P[-1]
        assert ratio > 1.1 if one is there else 0.7 < ratio < 1.1
        assert 0.95 < one.placebos_KP[:, -1].mean() / one.expected_P[-1] < 1.05, "placebos follow the formula"


@pytest.mark.first("lora")
@pytest.mark.parametrize("space", ["lora", "lowrank", "full"])
def test_distances_are_those_of_the_engine_also_in_small_blocks(space: str, tmp_path: Path, monkeypatch: Any) -> None:
    es = {"optimizer": {"name": "momentum"}} if space == "lora" else {}
    states = planted(tmp_path / "run", configured(space, es=es), random, 4)
    flat = [torch.cat([state[n].double().flatten() for n in states[0]]).numpy() for state in states]
    far = [np.linalg.norm(state - flat[0]) for state in flat]
    monkeypatch.setattr(trajectory, "NUMBERS", 4096)
    (walk,), base = measure([str(tmp_path / "run")], replace(SMALL, placebos=1), None)
    np.testing.assert_allclose(walk.distances_P, far, rtol=1e-5)
    assert (walk.steps, base, walk.placebos_KP.shape) == ((0, 1, 2, 3, 4), "tiny", (1, 5))
    (coarse,), _ = measure([str(tmp_path / "run")], Settings(points=2, placebos=0), None)
    assert coarse.steps == (0, 2, 4) and coarse.signal_share.why == "no placebo: no share"
    np.testing.assert_array_equal(coarse.distances_P, walk.distances_P[[0, 2, 4]])


def test_refusals_name_what_is_wrong(tmp_path: Path) -> None:
    planted(tmp_path / "run", configured("lora"), random, 1)
    planted(tmp_path / "forged", configured("lora"), random, 2, seal="0" * 64)
    run, moved, forged = (str(tmp_path / name) for name in ("run", "moved", "forged"))
    write(Path(moved), {name: p + 0.01 for name, p in base_weights().items()})
    other = configured("lora", model={"name": moved})
    for target, settings, config, error, said in (
        (run, replace(SMALL, placebos=-1), None, ConfigError, "placebos: -1"),
        (moved, SMALL, configured("lora"), ConfigError, r"moved is no run of ES"),
        (run, SMALL, other, ResumeError, "other base weights, or in another dtype"),
        (forged, SMALL, None, ResumeError, "after 2 generations"),
    ):
        with pytest.raises(error, match=said):
            measure([target], settings, config)


def test_the_share_of_signal_holds_what_was_planted() -> None:
    random, signal, hits, sure = np.random.default_rng(2), 12.0, 0, 0
    share = signal**2 / (signal**2 + 300)
    for _ in range(300):
        noise = random.normal(size=(21, 300))
        placebos = list(np.linalg.norm(noise[1:], axis=1))
        nothing = signal_share(float(np.linalg.norm(noise[0])), placebos)
        noise[0, 0] += signal
        there = signal_share(float(np.linalg.norm(noise[0])), placebos)
        assert there.low is not None and there.high is not None and nothing.low is not None
        hits += there.low <= share <= there.high
        sure += nothing.low > 0
    assert 0.92 <= hits / 300 <= 0.99 and sure / 300 <= 0.05


def test_few_placebos_give_no_interval() -> None:
    assert signal_share(2.0, []).why == "no placebo: no share"
    assert signal_share(0.0, [1.0]).why == "it never moved: no share"
    for count, known in ((1, False), (3, False), (18, False), (19, True)):  # one-sided p 1 / (count + 1) at best
        found = signal_share(2.0, [1.0 + 0.01 * i for i in range(count)])
        assert 0.6 < found.mean <= 0.75 and (found.low is not None) == known, count
