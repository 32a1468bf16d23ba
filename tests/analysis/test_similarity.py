# SPDX-License-Identifier: Apache-2.0
"""Cosines, ranks and sparsity of weight changes against numpy, what chance gives against draws, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from command_line import Run, caller
from drawings import figures_of, words_of
from perturbed import MODEL, base, changed, measured
from safetensors.torch import load_file, save_file

from evoalign.analysis.similarity import chance, measures, results
from evoalign.analysis.similarity.chance import Group, from_rewards, jackknifed, mean_of_halves
from evoalign.analysis.similarity.measures import Spectrum, cut, decompose, measure, p_of, participation_of_noise
from evoalign.analysis.similarity.results import Cosine, Pair
from evoalign.checks.distance import Change, Difference, Product
from evoalign.types import TensorSpec

HEAD = "model.embed_tokens.weight"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)
    return caller(monkeypatch, capsys, 400)


def differences(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    own = base()
    found = load_file(folder / MODEL)
    return {name: (found[name].double() - own[name].double()).numpy() for name in own}


def plain(array: Any) -> Difference:
    tensor = torch.as_tensor(array)
    return Difference(tuple(tensor.shape), tensor.__getitem__, torch.zeros_like(tensor).__getitem__)


def spectrum(change: Change) -> Spectrum | None:
    found = decompose(change)
    return None if found is None else found[0]


def test_cosines_norms_and_sparsity_are_those_of_numpy(tmp_path: Path, run: Run, monkeypatch: Any) -> None:
    monkeypatch.setattr(measures, "BLOCK", 500)
    monkeypatch.setattr(measures, "LEAST", 1)
    a, b = changed(tmp_path / "a", 1), changed(tmp_path / "b", 2)
    done = run("analyze", "similarity", "a", "b", "--set", "base=tiny", "--set", "spectrum=false", "--to", "out")
    assert (done.code, done.err) == (0, "") and "tied to the embeddings" in done.out
    numbers = json.loads(Path("out/similarity.json").read_text())["numbers"]
    c, d, own = differences(a), differences(b), base()
    sets = {
        "all": list(c),
        "layer 1": [n for n in c if ".layers.1." in n],
        "attention": [n for n in c if "self_attn" in n],
        "mlp": [n for n in c if ".mlp." in n],
        "norms": [n for n in c if "norm" in n],
        "embeddings": [HEAD],
        "unembedding": [HEAD],
    }
    (pair,) = numbers["pairs"]
    assert set(pair["cosines"]) == {*sets, "layer 0", "layer 2", "layer 3"}
    assert numbers["unembedding"] == {"tensor": HEAD, "tied": True}
    assert not any(pair["overlaps"].values()) and not any(t["overlaps"] for t in numbers["tensors"]), "no spectrum"
    for name, tensors in sets.items():
        u, v = (np.concatenate([side[n].ravel() for n in tensors]) for side in (c, d))
        assert pair["cosines"][name]["value"] == pytest.approx(u @ v / np.linalg.norm(u) / np.linalg.norm(v), abs=1e-12)
        where = numbers["targets"][0]["where"][name]
        assert where["norm"] == pytest.approx(np.linalg.norm(u), rel=1e-12)
        assert where["share_of_numbers"] == pytest.approx(u.size / sum(x.size for x in c.values()))
        assert where["at_most"]["absolute"]["0.001"] == pytest.approx(np.mean(np.abs(u) <= 1e-3), abs=1e-12)
        rms = np.concatenate([np.full(c[n].size, np.sqrt(np.mean(own[n].double().numpy() ** 2))) for n in tensors])
        assert where["at_most"]["relative"]["0.1"] == pytest.approx(np.mean(np.abs(u) <= 0.1 * rms), abs=1e-12)
    shares = {name: t["share"] for name, t in numbers["targets"][0]["where"].items()}
    assert sum(shares[n] for n in ("attention", "mlp", "norms", "embeddings")) == pytest.approx(1)
    drawn = {f"similarity_{name}.{form}" for name in ("cosines", "pairs", "shares") for form in ("png", "svg")}
    assert {path.name for path in Path("out").iterdir()} == {"similarity.json", *drawn}
    svgs = figures_of(results, monkeypatch)
    small = Pair("a", "b", False, dict.fromkeys(("all", "mlp"), Cosine(0.005, 0.0014, (), None)))
    where = {"all": [1.0, 1.0], "mlp": [1.0, 1.0]}
    results.draw(["a", "b"], [small, replace(small, same_noise=True)], where, Path("out"))
    (shown,) = svgs["similarity_pairs"].axes[0].images
    assert shown.get_clim() == (-0.1, 0.1), "a cosine next to nothing has next to no colour"
    said = words_of(svgs["similarity_pairs"])
    assert "by chance: within 0.0027 in 95 %" in said and "chance not known" in said


@pytest.mark.parametrize("shape", [(40, 90), (90, 40)])
def test_singular_values_of_either_form(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    b, a = torch.randn(shape[0], 5, generator=generator), torch.randn(5, shape[1], generator=generator)
    matrix = (0.5 * b.double() @ a.double()).numpy()
    s = np.linalg.svd(matrix, compute_uv=False)[:5]
    p, energy = s / s.sum(), s**2 / (s**2).sum()
    for change in (plain(matrix), Product(a, b, 0.5)):
        found = spectrum(change)
        assert found is not None
        assert found.entropy == pytest.approx(np.exp(-(p * np.log(p)).sum()), rel=1e-6)
        assert found.participation == pytest.approx(1 / (energy**2).sum(), rel=1e-9)
        assert found.energy[2] == pytest.approx(energy[:2].sum(), rel=1e-9)
        assert found.energy[8] == pytest.approx(1) if 8 in found.energy else found.energy[4] < 1
        u, values, v = np.linalg.svd(matrix)
        for rank in (1, 3, 5):
            best = (u[:, :rank] * values[:rank]) @ v[:rank]
            near = cut(change, rank)
            assert near.a.shape[0] == rank
            np.testing.assert_allclose(near.rows(slice(None)).numpy(), best, atol=1e-5)


def test_a_planted_rank_is_recovered(tmp_path: Path) -> None:
    """Also where the checkpoint is rounded to float32."""
    found = measured([changed(tmp_path / "a", 1, rank=3)])
    ranks = [one.spectra[0] for one in found if one.spectra[0] is not None]
    assert len(ranks) == 28
    assert all(s.energy[4] > 1 - 1e-9 and s.energy[2] < 0.95 for s in ranks)
    assert all(1.5 < s.participation < 3 for s in ranks)


def test_a_planted_number_of_directions_is_recovered_within_the_stated_error(tmp_path: Path) -> None:
    """Five of equal size in each matrix of the layers. The rest is the rounding of a checkpoint in float32."""
    folder = changed(tmp_path / "a", 1, rank=5)
    state, own = load_file(folder / MODEL), base()
    for name, tensor in state.items():
        if tensor.ndim == 2 and ".layers." in name:
            u, _, v = torch.linalg.svd((tensor - own[name].float()).double(), full_matrices=False)
            state[name] = (own[name].double() + 0.5 * u[:, :5] @ v[:5]).float()
    save_file(state, folder / MODEL, metadata={"format": "pt"})
    ranks = [s for one in measured([folder]) if (s := one.spectra[0]) is not None]
    assert len(ranks) == 28
    for s in ranks:
        assert s.participation == pytest.approx(5, abs=1e-5) and s.entropy == pytest.approx(5, rel=1e-3)
        assert s.energy[4] == pytest.approx(0.8, abs=1e-6) and s.energy[8] == pytest.approx(1, abs=1e-9)


def test_a_rank_of_nothing_is_none() -> None:
    assert spectrum(plain(np.zeros((4, 4)))) is None and spectrum(plain(np.ones(4))) is None


def draws(kind: str, generator: np.random.Generator, rows: int = 12) -> tuple[Any, Any]:
    """Two independent changes of a matrix; those of an adapter have a frozen A of few directions."""
    if kind in ("dense", "few rows"):
        sizes = np.where(np.arange(rows) < (rows if kind == "dense" else 3), 1.0, 0.1)[:, None]
        return plain(sizes * generator.normal(size=(rows, 20))), plain(sizes * generator.normal(size=(rows, 20)))
    fixed = np.random.default_rng(0).normal(size=(3, 20)) * [[3.0], [1.0], [0.3]]
    other = fixed if kind == "one A" else np.random.default_rng(1).normal(size=(3, 20))
    b = [torch.as_tensor(generator.normal(size=(rows, 3))) for _ in range(2)]
    return Product(torch.as_tensor(fixed), b[0], 2.0), Product(torch.as_tensor(other), b[1], 1.0)


@pytest.mark.parametrize("kind", ["dense", "one A", "two A", "few rows"])
def test_the_spread_of_cosines_by_chance(kind: str, monkeypatch: Any) -> None:
    """Of one draw against the standard deviation over many, whatever the changes have in common but a direction."""
    monkeypatch.setattr(measures, "BLOCK", 100)
    monkeypatch.setattr(measures, "LEAST", 1)
    generator = np.random.default_rng(3)
    cosines, spreads = list[float](), list[float]()
    for _ in range(1000):
        sums = sums_of(draws(kind, generator))
        cosines.append(float(sums.cosines[0, 1]))
        spreads.append(float(sums.spread[0, 1]))
    assert np.std(cosines) == pytest.approx(np.sqrt(np.mean(np.square(spreads))), rel=0.1)
    assert np.std(cosines) > 1 / np.sqrt(12 * 20) * (1.3 if kind in ("one A", "few rows") else 0.9)


def sums_of(pair: tuple[Any, Any]) -> measures.Sums:
    """Of a model with one tensor."""
    spec = TensorSpec("w", tuple(pair[0].shape), "linear", None, 0.0, True)
    base_: Any = SimpleNamespace(square=lambda _: 1.0, specs={"w": spec})
    own: Any = [SimpleNamespace(base=base_, changes={"w": change}) for change in pair]
    (one,) = measure(own, (), (), spectra=False)
    return one.sums


@pytest.mark.parametrize("kind", ["dense", "one A"])
def test_the_participation_rank_of_noise(kind: str) -> None:
    generator = np.random.default_rng(4)
    found = [spectrum(draws(kind, generator, 80)[0]) for _ in range(300)]
    mean = np.mean([s.participation for s in found if s is not None])
    assert participation_of_noise(draws(kind, generator, 80)[0]) == pytest.approx(mean, rel=0.03)


def test_seeds_that_share_a_direction_and_seeds_that_do_not() -> None:
    generator = np.random.default_rng(5)
    common = generator.normal(size=400)
    alike = np.stack([common + generator.normal(size=400) for _ in range(6)])
    apart = generator.normal(size=(6, 400))
    halves = {}
    for name, rows in (("alike", alike), ("apart", apart)):
        products = rows @ rows.T
        by_hand = [
            np.corrcoef(rows[list(half)].mean(0), np.delete(rows, half, axis=0).mean(0))[0, 1]
            for half in combinations(range(6), 3)
        ]
        halves[name] = jackknifed(products, mean_of_halves, 4)
        assert halves[name].mean == pytest.approx(np.mean(by_hand), abs=0.01)
    assert 0.6 < halves["alike"].low < 0.75 < halves["alike"].high  # each half: 3 parts of the direction, 1 of noise
    assert halves["apart"].low < 0 < halves["apart"].high < 0.2
    assert jackknifed(np.eye(3), mean_of_halves, 4).why == "3 seeds: no interval"


def test_a_common_direction_is_found_and_none_is_not_claimed(tmp_path: Path, run: Run) -> None:
    """Half of the change of two models is one direction; of a third, none. The cosine is 1/2 within its spread."""
    for name in "ab":
        folder, half = changed(tmp_path / name, ord(name)), load_file(changed(tmp_path / f"half_{name}", 7) / MODEL)
        state, own = load_file(folder / MODEL), base()
        state = {n: tensor + half[n] - own[n].float() for n, tensor in state.items()}
        save_file(state, folder / MODEL, metadata={"format": "pt"})
    changed(tmp_path / "c", 3)
    done = run("analyze", "similarity", "a", "b", "c", "--set", "base=tiny", "--set", "spectrum=false", "--to", "out")
    assert (done.code, done.err) == (0, "")
    first, second, third = done.out.splitlines()[:3]
    assert first.endswith(": a common direction")
    assert all(line.endswith(": no common direction is shown") for line in (second, third))
    cosine = json.loads(Path("out/similarity.json").read_text())["numbers"]["pairs"][0]["cosines"]["all"]
    assert cosine["value"] == pytest.approx(0.5, abs=0.01) and 0.0005 < cosine["spread"] < 0.02


def cosine_of(value: float, placebos: tuple[float, ...]) -> Pair:
    one = Cosine(value, 0.001, placebos, p_of(value, placebos))
    return Pair("a", "b", False, {"all": one})


def test_a_direction_that_placebos_have_too_is_not_claimed() -> None:
    """And a few placebos are too few."""
    small, far = tuple(np.linspace(-0.002, 0.002, 19)), tuple(np.linspace(-0.3, 0.3, 19))
    for value, placebos, verdict in (
        (0.1, small, "a common direction"),
        (-0.1, small, "opposite directions"),
        (0.1, far, results.NONE),
        (0.1, small[:5], f"{results.NONE}, which takes 19 placebos"),
        (0.0015, (), results.NONE),
    ):
        assert results.verdict_of(cosine_of(value, placebos), 1) == verdict
    (line,) = results.pair_lines([cosine_of(0.1, small)])
    assert line.endswith("placebos -0.002 to 0.002 (19, p 0.05): a common direction")
    lines = results.pair_lines([cosine_of(0.1, small[:5])] * 10 + [cosine_of(0.1, ())])
    assert len(lines) == 2 and lines[1].startswith(f"10 other pairs: {results.NONE}")


def test_agreement_of_seeds_and_of_their_placebos() -> None:
    generator = np.random.default_rng(8)
    common, other = generator.normal(size=(2, 400))
    rows = generator.normal(size=(24, 400))  # four seeds of a, two of b, three placebos each of a
    rows[:4] += 2 * common
    rows[4:6] += 2 * (common + other)
    products = rows[:18] @ rows[:18].T
    placebos = {k: list(range(6 + 3 * k, 9 + 3 * k)) for k in range(4)}
    a, b = Group("a", (0, 1, 2, 3), (1, 2, 3, 4)), Group("b", (4, 5), (1, 2))
    found = chance.agreement(a, products, placebos)
    assert found is not None and found.halves.mean > 0.8 and found.p == 1 / 4
    by_hand = [mean_of_halves(products[np.ix_(at, at)]) for at in ([6, 9, 12, 15], [7, 10, 13, 16], [8, 11, 14, 17])]
    assert found.placebos == pytest.approx(by_hand) and max(map(abs, by_hand)) < 0.3
    norms = np.sqrt(np.diag(products))
    cosines = products / np.outer(norms, norms)
    across = chance.between(a, b, cosines, placebos)
    assert across.cosine.mean == pytest.approx(cosines[:4, 4:6].mean()) and across.cosine.mean > 0.4
    assert across.placebos[0] == pytest.approx(cosines[np.ix_([6, 9, 12, 15], [4, 5])].mean()) and across.p == 1 / 4
    alike = chance.between(a, b, cosines, placebos, same_noise=True)
    assert (alike.cosine.mean, alike.cosine.low) == (across.cosine.mean, None)
    assert "same noise" in results.seed_lines([], [alike])[0]
    assert chance.agreement(b, products, placebos).p is None  # type: ignore[union-attr]


def test_columns_that_stand_for_targets() -> None:
    placebos = {0: [3, 4], 1: [5, 6]}
    assert chance.placebo_columns((0, 1), placebos) == [(3, 5), (4, 6)]
    assert chance.placebo_columns((0, 2), placebos) == [(3, 2), (4, 2)]
    assert chance.placebo_columns((2,), placebos) == chance.placebo_columns((0, 1), {}) == []


def test_the_minimal_rank_and_its_interval() -> None:
    generator = np.random.default_rng(6)
    before = generator.normal(size=80)
    gain = 1 + 0.1 * generator.normal(size=80)
    noise = {rank: 0.3 * generator.normal(size=80) for rank in (1, 2, 4)}
    shares = {1: 0.3, 2: 0.93, 4: 1.0}
    cuts = {rank: before + share * gain + noise[rank] for rank, share in shares.items()}
    found = from_rewards(before, before + gain, cuts)
    assert [c.share.mean for c in found.cuts if c.share] == pytest.approx([0.3, 0.93, 1.0], abs=0.08)
    assert (found.minimal, found.low, found.high) == (2, 2, 4)
    nothing = from_rewards(before, before + generator.normal(size=80), cuts)
    assert nothing.minimal is None and all(c.share is None for c in nothing.cuts)
