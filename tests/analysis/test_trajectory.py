# SPDX-License-Identifier: Apache-2.0
"""Ways through the weights: a planted straight one and a planted random one are told apart; PCA against numpy."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_lab import plain, write

from calling import Run, caller
from drawn import figures_of, words_of
from evoalign.analysis.trajectory import figure, measures
from evoalign.analysis.trajectory.command import Settings
from evoalign.analysis.trajectory.compute import trajectory
from evoalign.analysis.trajectory.measures import beside, gram, principal, signal_share, way
from evoalign.config import Config, from_dict, to_yaml
from evoalign.errors import ConfigError, ModelError, ResumeError
from evoalign.rundir.journal import Journal
from evoalign.setup import Parts, assemble
from evoalign.training import saving
from evoalign.types import Plan, Update, population
from plain import UNCHECKED

GENERATIONS, MEMBERS = 12, 64
Coefficients = Callable[[Parts, int, Update], list[float]]
SMALL = Settings(points=0, placebos=5, members=2, drawn=2)


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
    scores = np.random.default_rng(generation).normal(size=len(update.members))
    return list((scores - scores.mean()) / scores.std())


def straight(parts: Parts, generation: int, update: Update) -> list[float]:
    """How far each member's noise goes along one direction, as z-scores: an ES of a linear reward without noise."""
    plan = Plan(generation, update.sigma, update.members)
    along = np.zeros(len(update.members))
    for name, mean in parts.engine.state():
        if name in {t.name for t in parts.layout.tensors}:
            for i, member in enumerate(update.members):
                noise = parts.space.perturbed(parts.layout, name, mean, plan, member) - mean
                along[i] += float(noise.sum())
    return list((along - along.mean()) / along.std())


# --- whole analyses ---


@pytest.mark.parametrize("space", ["lora", pytest.param("lowrank", marks=pytest.mark.slow),
                                   pytest.param("full", marks=pytest.mark.slow)])  # fmt: skip
def test_a_planted_straight_way_and_a_planted_random_walk_are_told_apart(space: str, tmp_path: Path) -> None:
    planted(tmp_path / "straight", configured(space), straight)
    planted(tmp_path / "random", configured(space, 2), random)
    found = trajectory([str(tmp_path / name) for name in ("straight", "random")], replace(SMALL, placebos=20), None)
    there, walk = found.paths
    assert there.onward.is_beyond and there.onward.reached == 0 and there.onward.value > 0.04
    assert there.share.low is not None and there.share.low > 0.05
    assert not walk.along.is_beyond and not walk.onward.is_beyond
    assert walk.share.low is not None and walk.share.low <= 0
    for path in found.paths:
        assert path.expected is not None
        ratio = path.own.distances_P[-1] / path.expected[-1]
        assert ratio > 1.1 if path is there else 0.7 < ratio < 1.1
        drift = np.mean([p.distances_P[-1] for p in path.placebos]) / path.expected[-1]
        assert 0.95 < drift < 1.05, "placebos go by the law"
    said = " ".join(found.sentences)
    assert said.count("is signal, more than its placebos have") == 1
    assert said.count("No movement beyond a random walk is shown") == 1
    assert "a curve is no finding" in said


def test_the_map_is_that_of_numpy_on_whole_weights(tmp_path: Path) -> None:
    """Two adapters of other seeds, and so of other A, in the weights of the model; one has momentum."""
    configs = [configured("lora", 0), configured("lora", 1, es={"optimizer": {"name": "momentum"}})]
    changes: list[np.ndarray[Any, Any]] = []
    for i, config in enumerate(configs):
        for state in planted(tmp_path / str(i), config, random, 6):
            names = sorted(name for name in state if ".lora_A." in name)
            dense = [state[n.replace("lora_A", "lora_B")].double() @ state[n].double() for n in names]
            scaling = config.lora.alpha / config.lora.rank
            changes.append(scaling * torch.cat([d.flatten() for d in dense]).numpy())
    found = trajectory([str(tmp_path / "0"), str(tmp_path / "1")], replace(SMALL, placebos=0, members=0), None)
    X_PW = np.array(changes)
    left, values, _ = np.linalg.svd(X_PW - X_PW.mean(0), full_matrices=False)
    np.testing.assert_allclose(found.places.shares_C, (values**2 / (values**2).sum())[:2], rtol=1e-5)
    want_PC = left[:, :2] * values[:2]
    signs = np.sign((want_PC * found.places.places_PC).sum(0))
    np.testing.assert_allclose(found.places.places_PC, want_PC * signs, atol=1e-5 * np.abs(want_PC).max())
    assert [p.reward for p in found.points[:7]] == [0, 1, 2, 3, 4, 5, None]
    assert [p.kind for p in found.points] == ["mean"] * 14


@pytest.mark.slow
@pytest.mark.parametrize("space", ["lowrank", "full"])
def test_members_and_distances_are_those_of_the_engine(space: str, tmp_path: Path) -> None:
    """Weights that evolve themselves: the Gram matrix against whole states, in blocks that cut tensors."""
    config = configured(space)
    states = planted(tmp_path / "run", config, random, 4)
    evolving = sorted(states[0])

    def flat(state: Any) -> np.ndarray[Any, Any]:
        return torch.cat([state[n].double().flatten() for n in evolving]).numpy()

    monkey = pytest.MonkeyPatch()
    with monkey.context() as patched:
        patched.setattr(measures, "NUMBERS", 4096)
        found = trajectory([str(tmp_path / "run")], replace(SMALL, placebos=1), None)
    far = [np.linalg.norm(flat(state) - flat(states[0])) for state in states]
    np.testing.assert_allclose(found.paths[0].own.distances_P, far, rtol=1e-5)
    (members,) = {tuple((p.step, p.number) for p in found.points if p.kind == "member")}
    assert members == ((0, 0), (0, 1), (3, 0), (3, 1))
    assert [p.kind for p in found.points] == ["mean"] * 5 + ["placebo"] * 5 + ["member"] * 4
    steps = np.diff([flat(state) for state in states], axis=0)
    cosine = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in pairwise(steps)]
    np.testing.assert_allclose(found.paths[0].own.next_S, cosine, atol=1e-5)


def test_models_that_others_wrote_stand_on_the_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint and a PEFT adapter, by the distance of their places: with three points two components are exact."""
    from peft import LoraConfig, get_peft_model

    monkeypatch.chdir(tmp_path)
    start = {name: p.detach().clone() for name, p in plain().named_parameters()}
    moved = {name: p + 0.01 * torch.ones_like(p) for name, p in start.items()}
    write(tmp_path / "model", moved)
    torch.manual_seed(0)
    model = get_peft_model(plain(), LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    model.save_pretrained("adapter")
    merged = dict(model.merge_and_unload().named_parameters())
    write(tmp_path / "same", start)
    found = trajectory(["model", "adapter", "same"], SMALL, configured("lora"))
    want = [sum(float((w[n] - start[n]).detach().square().sum()) for n in start) ** 0.5 for w in (moved, merged)]
    a, b, origin = found.places.places_PC
    np.testing.assert_allclose([np.linalg.norm(a - origin), np.linalg.norm(b - origin)], want, rtol=1e-4)
    assert "no journal, and so no placebo" in found.sentences[-1]
    with pytest.raises(ModelError, match=r"model.embed_tokens.weight of shape \[3, 2\]"):
        other = {**start, "model.embed_tokens.weight": torch.zeros(3, 2)}
        folder = tmp_path / "odd"
        folder.mkdir()
        from safetensors.torch import save_file

        save_file(other, folder / "model.safetensors")
        trajectory(["odd"], SMALL, configured("lora"))


def test_the_command_writes_numbers_words_and_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run: Run = caller(monkeypatch, capsys, 300)
    monkeypatch.chdir(tmp_path)
    planted(tmp_path / "run", configured("lora"), random, 5)
    drawn = figures_of(figure, monkeypatch)
    done = run("analyze", "trajectory", "run", "--set", "points=2", "--set", "placebos=3", "--to", "out")
    assert done.code == 0, done.err
    assert "run: after 5 generations" in done.out and "3 placebos" in done.out
    found = json.loads((tmp_path / "out/trajectory.json").read_text())["numbers"]
    assert found["paths"][0]["steps"] == [0, 2, 5] and len(found["paths"][0]["placebos"]) == 3
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "trajectory.json", "trajectory_map.png", "trajectory_map.svg", "trajectory_1.png", "trajectory_1.svg",
    }  # fmt: skip
    said = words_of(drawn["trajectory_map"])
    assert "run: placebo, a random walk (1 of 3 that were followed; x: its end)" in said
    members = [p for p in found["points"] if p["kind"] == "member"]
    assert f"run: {len(members)} members, small signs, of {len({p['step'] for p in members})} generations" in said
    assert "of a member its own" in said, "what the colours are of"


def test_refusals_name_what_is_wrong(tmp_path: Path) -> None:
    planted(tmp_path / "run", configured("lora"), random, 1)
    run = str(tmp_path / "run")
    with pytest.raises(ConfigError, match="is given twice"):
        trajectory([run, run], SMALL, None)
    with pytest.raises(ConfigError, match="placebos: -1 is less than none"):
        trajectory([run], replace(SMALL, placebos=-1), None)
    moved = write(tmp_path / "moved", {name: p + 0.01 for name, p in plain().named_parameters()})
    with pytest.raises(ResumeError, match="other base weights, or in another dtype"):
        trajectory([run], SMALL, configured("lora", model={"name": str(moved)}))


def test_a_path_that_is_not_that_of_the_journal_is_refused(tmp_path: Path) -> None:
    planted(tmp_path / "run", configured("lora"), random, 2, seal="0" * 64)
    with pytest.raises(ResumeError, match="after 2 generations the mean comes out as"):
        trajectory([str(tmp_path / "run")], SMALL, None)


# --- measures ---


def test_steps_and_cosines_against_numpy() -> None:
    X_PW = np.cumsum(np.random.default_rng(0).normal(size=(7, 50)), axis=0)
    X_PW -= X_PW[0]
    found, steps = way(X_PW @ X_PW.T), np.diff(X_PW, axis=0)

    def cosine(a: Any, b: Any) -> float:
        return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))

    np.testing.assert_allclose(found.distances_P, np.linalg.norm(X_PW, axis=1), atol=1e-9)
    np.testing.assert_allclose(found.next_S, [cosine(*pair) for pair in pairwise(steps)])
    np.testing.assert_allclose(found.rest_S, [cosine(s, X_PW[-1] - s) for s in steps])
    still = np.zeros((3, 3))
    assert np.isnan(way(still).along) and way(still).distances_P.tolist() == [0, 0, 0]


def test_a_gram_matrix_is_summed_over_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"a": torch.randn(3, 40, 5), "b": torch.randn(3, 7)}
    want = sum(v.reshape(3, -1).double() @ v.reshape(3, -1).double().T for v in values.values())
    monkeypatch.setattr(measures, "NUMBERS", 60)
    asked: list[str] = []

    def change(name: str, slices: Any) -> torch.Tensor:
        asked.append(name)
        return values[name][(slice(None), *slices)]

    found = gram([("a", (40, 5)), ("b", (7,))], 3, change)
    np.testing.assert_allclose(found, want.numpy(), rtol=1e-12)
    assert len(asked) > 10


def test_points_that_are_not_fitted_are_projected() -> None:
    random = np.random.default_rng(1)
    X_PW = random.normal(size=(9, 30))
    fitted = [0, 2, 3, 5, 8]
    found = principal(X_PW @ X_PW.T, fitted)
    mean = X_PW[fitted].mean(0)
    _, _, axes = np.linalg.svd(X_PW[fitted] - mean, full_matrices=False)
    want = (X_PW - mean) @ axes[:2].T
    signs = np.sign((want * found.places_PC).sum(0))
    np.testing.assert_allclose(found.places_PC, want * signs, atol=1e-9)
    assert principal(np.zeros((3, 3)), [0, 1, 2]).places_PC.tolist() == [[0, 0]] * 3


def test_the_share_of_signal_holds_what_was_planted() -> None:
    """Noise of d directions and a signal along one of them, known: how often the interval has its share in it."""
    random, d, signal, hits, sure = np.random.default_rng(2), 300, 12.0, 0, 0
    for _ in range(300):
        noise = random.normal(size=(21, d))
        share = signal**2 / (signal**2 + d)
        placebos = np.linalg.norm(noise[1:], axis=1)
        there = signal_share(float(np.linalg.norm(noise[0] + signal * np.eye(d)[0])), list(placebos))
        nothing = signal_share(float(np.linalg.norm(noise[0])), list(placebos))
        assert there.low is not None and there.high is not None and nothing.low is not None
        hits += there.low <= share <= there.high
        sure += nothing.low > 0
    assert 0.92 <= hits / 300 <= 0.99
    assert sure / 300 <= 0.05


def test_random_walks_are_seldom_taken_for_more() -> None:
    """Of walks whose steps know nothing of each other, each held against 20 others."""
    random, flagged = np.random.default_rng(3), 0
    for _ in range(200):
        ways = [way(X_PW @ X_PW.T) for X_PW in np.cumsum(random.normal(size=(21, 9, 40)), axis=1)]
        flagged += beside(ways[0].onward, [one.onward for one in ways[1:]]).is_beyond
    assert flagged / 200 <= 0.06


def test_placebos_that_are_few_give_no_interval() -> None:
    assert beside(1.0, [0.1, 0.2]).excess.low is None and not beside(1.0, [0.1, 0.2]).is_beyond
    assert beside(1.0, [0.1, float("nan")]).p == 0.5
    assert signal_share(2.0, []).why == "no placebo: no share"
    assert signal_share(0.0, [1.0]).why == "it never moved: no share"
    far = beside(1.0, [0.1 + 0.001 * i for i in range(20)])
    assert far.is_beyond and far.p == pytest.approx(1 / 21)
