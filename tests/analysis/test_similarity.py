# SPDX-License-Identifier: Apache-2.0
"""Cosines, ranks, sparsity and overlaps of weight changes against numpy and scipy, and chance against draws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from drawings import figures_of, words_of
from perturbed import MODEL, base, changed, measured
from safetensors.torch import load_file, save_file
from scipy.linalg import subspace_angles

from evoalign.analysis.similarity import chance, measures, results
from evoalign.analysis.similarity.chance import Group, from_rewards, jackknifed, mean_of_halves
from evoalign.analysis.similarity.measures import (
    SIDES,
    SIZES,
    Directions,
    Overlap,
    Spectrum,
    cut,
    decompose,
    measure,
    overlaps_of,
    p_of,
    participation_of_noise,
    together,
    variance_by_chance,
)  # fmt: skip
from evoalign.analysis.similarity.results import Cosine, Pair
from evoalign.checks.distance import Change, Difference, Product, difference
from evoalign.types import TensorSpec

HEAD = "model.embed_tokens.weight"
SHAPES = [(40, 90), (90, 40), (50, 50)]


def differences(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    own = base()
    found = load_file(folder / MODEL)
    return {name: (found[name].double() - own[name].double()).numpy() for name in own}


def plain(array: Any) -> Difference:
    tensor = torch.as_tensor(array, dtype=torch.float64)
    return difference(tensor, torch.zeros_like(tensor))


def spectrum(change: Change) -> Spectrum | None:
    found = decompose(change)
    return None if found is None else found[0]


def normal(seed: int) -> Callable[..., np.ndarray[Any, Any]]:
    """Draws of standard normal numbers of any size, in order."""
    generator = np.random.default_rng(seed)
    return lambda *size: generator.normal(size=size)


def perturb(folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    state = {name: change(name, tensor) for name, tensor in load_file(folder / MODEL).items()}
    save_file(state, folder / MODEL, metadata={"format": "pt"})
    return state


def test_cosines_norms_and_sparsity_are_those_of_numpy(tmp_path: Path, analyze: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(measures, "BLOCK", 500)
    monkeypatch.setattr(measures, "LEAST", 1)
    a, b = changed(tmp_path / "a", 1), changed(tmp_path / "b", 2)
    out, numbers = analyze("similarity", "a", "b", "--set", "base=tiny", "--set", "spectrum=false")
    assert "tied to the embeddings" in out
    c, d, own = differences(a), differences(b), base()
    inside = {"all": "", "layer 1": ".layers.1.", "attention": "self_attn", "mlp": ".mlp.", "norms": "norm",
              "embeddings": "embed", "unembedding": "embed"}  # fmt: skip
    (pair,) = numbers["pairs"]
    assert set(pair["cosines"]) == {*inside, "layer 0", "layer 2", "layer 3"}
    assert numbers["unembedding"] == {"tensor": HEAD, "tied": True}
    assert not any(pair["overlaps"].values()) and not any(t["overlaps"] for t in numbers["tensors"]), "no spectrum"
    for name, word in inside.items():
        tensors = [n for n in c if word in n]
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


def test_small_cosines_have_little_colour_and_say_what_chance_gives(tmp_path: Path, monkeypatch: Any) -> None:
    svgs = figures_of(results, monkeypatch)
    small = Pair("a", "b", False, dict.fromkeys(("all", "mlp"), Cosine(0.005, 0.0014, (), None)))
    where = {"all": [1.0, 1.0], "mlp": [1.0, 1.0]}
    results.draw(["a", "b"], [small, replace(small, same_noise=True)], where, tmp_path)
    (shown,) = svgs["similarity_pairs"].axes[0].images
    said = words_of(svgs["similarity_pairs"])
    assert shown.get_clim() == (-0.1, 0.1)
    assert "by chance: within 0.0027 in 95 %" in said and "chance not known" in said


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_singular_values_of_either_form(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    b, a = torch.randn(shape[0], 5, generator=generator), torch.randn(5, shape[1], generator=generator)
    matrix = (0.5 * b.double() @ a.double()).numpy()
    u, values, v = np.linalg.svd(matrix)
    s = values[:5]
    p, energy = s / s.sum(), s**2 / (s**2).sum()
    for change in (plain(matrix), Product(a, b, 0.5)):
        found = spectrum(change)
        assert found is not None and found.entropy == pytest.approx(np.exp(-(p * np.log(p)).sum()), rel=1e-6)
        assert found.participation == pytest.approx(1 / (energy**2).sum(), rel=1e-9)
        assert found.energy[2] == pytest.approx(energy[:2].sum(), rel=1e-9)
        assert found.energy[8] == pytest.approx(1) if 8 in found.energy else found.energy[4] < 1
        for rank in (1, 3, 5):
            near = cut(change, rank)
            assert near.a.shape[0] == rank
            best = (u[:, :rank] * values[:rank]) @ v[:rank]
            np.testing.assert_allclose(near.rows(slice(None)).numpy(), best, atol=1e-5)


def test_a_planted_number_of_directions_is_recovered_within_the_stated_error(tmp_path: Path) -> None:
    """Five of equal size in each matrix of the layers. The rest is the rounding of a checkpoint in float32."""
    folder, own = changed(tmp_path / "a", 1, rank=5), base()

    def level(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim != 2 or ".layers." not in name:
            return tensor
        u, _, v = torch.linalg.svd((tensor - own[name].float()).double(), full_matrices=False)
        return (own[name].double() + 0.5 * u[:, :5] @ v[:5]).float()

    perturb(folder, level)
    ranks = [s for one in measured([folder]) if (s := one.spectra[0]) is not None]
    assert len(ranks) == 28
    for s in ranks:
        assert s.participation == pytest.approx(5, abs=1e-5) and s.entropy == pytest.approx(5, rel=1e-3)
        assert s.energy[4] == pytest.approx(0.8, abs=1e-6) and s.energy[8] == pytest.approx(1, abs=1e-9)


def draws(kind: str, generator: np.random.Generator, rows: int = 12) -> tuple[Any, Any]:
    """Two independent changes of a matrix; those of an adapter have a frozen A of few directions."""
    if kind in ("dense", "few rows"):
        sizes = np.where(np.arange(rows) < (rows if kind == "dense" else 3), 1.0, 0.1)[:, None]
        return plain(sizes * generator.normal(size=(rows, 20))), plain(sizes * generator.normal(size=(rows, 20)))
    fixed = normal(0)(3, 20) * [[3.0], [1.0], [0.3]]
    other = fixed if kind == "one A" else normal(1)(3, 20)
    b = [torch.as_tensor(generator.normal(size=(rows, 3))) for _ in range(2)]
    return Product(torch.as_tensor(fixed), b[0], 2.0), Product(torch.as_tensor(other), b[1], 1.0)


@pytest.mark.first("dense", "one A")
@pytest.mark.parametrize("kind", ["dense", "one A", "two A", "few rows"])
def test_the_spread_of_cosines_by_chance(kind: str, monkeypatch: Any) -> None:
    """Of one draw against the standard deviation over many, whatever the changes have in common but a direction."""
    monkeypatch.setattr(measures, "BLOCK", 100)
    monkeypatch.setattr(measures, "LEAST", 1)
    generator, found = np.random.default_rng(3), list[tuple[float, float]]()
    base_: Any = SimpleNamespace(
        square=lambda _: 1.0, specs={"w": TensorSpec("w", (12, 20), "linear", None, 0.0, True)}
    )
    for _ in range(1000):
        own: Any = [SimpleNamespace(base=base_, changes={"w": change}) for change in draws(kind, generator)]
        (one,) = measure(own, (), (), spectra=False)
        found.append((float(one.sums.cosines[0, 1]), float(one.sums.spread[0, 1])))
    cosines, spreads = np.array(found).T
    assert np.std(cosines) == pytest.approx(np.sqrt(np.mean(np.square(spreads))), rel=0.1)
    assert np.std(cosines) > 1 / np.sqrt(12 * 20) * (1.3 if kind in ("one A", "few rows") else 0.9)


@pytest.mark.parametrize("kind", ["dense", "one A"])
def test_the_participation_rank_of_noise(kind: str) -> None:
    generator = np.random.default_rng(4)
    found = [spectrum(draws(kind, generator, 80)[0]) for _ in range(300)]
    mean = np.mean([s.participation for s in found if s is not None])
    assert participation_of_noise(draws(kind, generator, 80)[0]) == pytest.approx(mean, rel=0.03)


def test_seeds_that_share_a_direction_and_seeds_that_do_not() -> None:
    draw, halves = normal(5), {}
    alike, apart = draw(400) + draw(6, 400), draw(6, 400)
    for name, rows in (("alike", alike), ("apart", apart)):
        by_hand = [np.corrcoef(rows[list(half)].mean(0), np.delete(rows, half, axis=0).mean(0))[0, 1]
                   for half in combinations(range(6), 3)]  # fmt: skip
        halves[name] = jackknifed(rows @ rows.T, mean_of_halves, 4)
        assert halves[name].mean == pytest.approx(np.mean(by_hand), abs=0.01)
    assert 0.6 < halves["alike"].low < 0.75 < halves["alike"].high  # each half: 3 parts of the direction, 1 of noise
    assert halves["apart"].low < 0 < halves["apart"].high < 0.2
    assert jackknifed(np.eye(3), mean_of_halves, 4).why == "3 seeds: no interval"


def test_a_common_direction_is_found_and_none_is_not_claimed(tmp_path: Path, analyze: Any) -> None:
    """Half of the change of two models is one direction; of a third, none. The cosine is 1/2 within its spread."""
    own, half = base(), load_file(changed(tmp_path / "half", 7) / MODEL)
    for name in "ab":
        perturb(changed(tmp_path / name, ord(name)), lambda n, tensor: tensor + half[n] - own[n].float())
    changed(tmp_path / "c", 3)
    out, numbers = analyze("similarity", "a", "b", "c", "--set", "base=tiny", "--set", "spectrum=false")
    first, *others = out.splitlines()[:3]
    assert first.endswith(": a common direction") and all(line.endswith(f": {results.NONE}") for line in others)
    cosine = numbers["pairs"][0]["cosines"]["all"]
    assert cosine["value"] == pytest.approx(0.5, abs=0.01) and 0.0005 < cosine["spread"] < 0.02


def cosine_of(value: float, placebos: tuple[float, ...]) -> Pair:
    return Pair("a", "b", False, {"all": Cosine(value, 0.001, placebos, p_of(value, placebos))})


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
    draw = normal(8)
    (common, other), rows = draw(2, 400), draw(24, 400)  # four seeds of a, two of b, three placebos each of a
    rows[:4] += 2 * common
    rows[4:6] += 2 * (common + other)
    products = rows[:18] @ rows[:18].T
    placebos = {k: list(range(6 + 3 * k, 9 + 3 * k)) for k in range(4)}
    a, b = Group("a", (0, 1, 2, 3), (1, 2, 3, 4)), Group("b", (4, 5), (1, 2))
    found, few = (chance.agreement(group, products, placebos) for group in (a, b))
    assert found is not None and found.halves.mean > 0.8 and found.p == 1 / 4 and few is not None and few.p is None
    columns = [[6 + k, 9 + k, 12 + k, 15 + k] for k in range(3)]
    by_hand = [mean_of_halves(products[np.ix_(at, at)]) for at in columns]
    assert found.placebos == pytest.approx(by_hand) and max(map(abs, by_hand)) < 0.3
    cosines = products / np.outer(*[np.sqrt(np.diag(products))] * 2)
    across, alike = (chance.between(a, b, cosines, placebos, same_noise=same) for same in (False, True))
    assert across.cosine.mean == pytest.approx(cosines[:4, 4:6].mean()) and across.cosine.mean > 0.4
    assert across.placebos[0] == pytest.approx(cosines[np.ix_(columns[0], [4, 5])].mean()) and across.p == 1 / 4
    assert (alike.cosine.mean, alike.cosine.low) == (across.cosine.mean, None)
    assert "same noise" in results.seed_lines([], [alike])[0]


def test_the_minimal_rank_and_its_interval() -> None:
    draw = normal(6)
    before, gain = draw(80), 1 + 0.1 * draw(80)
    cuts = {rank: before + share * gain + 0.3 * draw(80) for rank, share in {1: 0.3, 2: 0.93, 4: 1.0}.items()}
    found, nothing = (from_rewards(before, before + grown, cuts) for grown in (gain, draw(80)))
    assert [c.share.mean for c in found.cuts if c.share] == pytest.approx([0.3, 0.93, 1.0], abs=0.08)
    assert (found.minimal, found.low, found.high) == (2, 2, 4)
    assert nothing.minimal is None and all(c.share is None for c in nothing.cuts)


def directions(change: Change) -> Directions | None:
    found = decompose(change)
    return None if found is None else found[1]


def by_scipy(one: Any, other: Any, k: int) -> tuple[float, float]:
    """Mean squared cosines of the principal angles, left and right, by full SVDs."""
    (u, _, v), (x, _, y) = (np.linalg.svd(m, full_matrices=False) for m in (one, other))
    left, right = (subspace_angles(a[:, :k], b[:, :k]) for a, b in ((u, x), (v.T, y.T)))
    return float(np.mean(np.cos(left) ** 2)), float(np.mean(np.cos(right) ** 2))


def overlap(one: Change, other: Change) -> dict[int, tuple[float, float]]:
    found = overlaps_of([directions(one), directions(other)])
    return {k: (float(of[0, 0, 1]), float(of[1, 0, 1])) for k, of in found.items()}


@pytest.mark.parametrize("shape", SHAPES)
def test_directions_and_overlaps_are_those_of_full_svds(shape: tuple[int, int], monkeypatch: Any) -> None:
    """In blocks of a few rows; the two have something in common, and not all."""
    monkeypatch.setattr(measures, "MATRIX_BLOCK", 300)
    draw = normal(0)
    common = draw(shape[0], 3) @ draw(3, shape[1])
    one, other = (common + 3 * draw(*shape) for _ in range(2))
    u, s, v = np.linalg.svd(one, full_matrices=False)
    own = directions(plain(one))
    assert own is not None and s[15] > s[16]
    for found, expected in zip(own, (u[:, :16], v[:16].T), strict=True):
        assert (found.dtype, found.shape) == (torch.float32, expected.shape)
        assert np.abs((found.numpy() * expected).sum(0)) == pytest.approx(np.ones(16), abs=1e-5)
    both = overlap(plain(one), plain(other))
    assert list(both) == list(SIZES) and both == {k: pytest.approx(by_scipy(one, other, k), abs=1e-5) for k in SIZES}
    assert all(0.02 < side < 0.98 for sides in both.values() for side in sides)


@pytest.mark.parametrize("shape", SHAPES)
def test_adapters_are_as_their_matrices_written_out(shape: tuple[int, int]) -> None:
    """Of rank 8 and 5: there are no 16 directions to compare, and of rank 3 no 4."""
    draw = normal(1)

    def adapter(rank: int, fixed: Any = None) -> Product:
        a = draw(rank, shape[1]) if fixed is None else fixed
        return Product(torch.as_tensor(a), torch.as_tensor(draw(shape[0], rank)), 0.5)

    eight, five, three = adapter(8), adapter(5), adapter(3)
    for one, other, sizes in ((eight, five, [1, 4]), (eight, adapter(8, eight.a.numpy()), [1, 4]), (five, three, [1])):
        written = [m.rows(slice(None)).numpy() for m in (one, other)]
        factors = overlap(one, other)
        assert [k for k, both in factors.items() if not np.isnan(both).any()] == sizes
        for found in (factors, overlap(plain(written[0]), other), overlap(*map(plain, written))):
            assert all(found[k] == pytest.approx(by_scipy(*written, k), abs=1e-5) for k in sizes)


def test_directions_of_very_unequal_size_stay_orthonormal() -> None:
    """Near what counts as 0 those of the other side would not be, without the QR: by some 1e-3."""
    draw = normal(2)
    u, v = (np.linalg.qr(draw(n, 5))[0] for n in (60, 30))
    for sides in ((u, v), (v, u)):
        own = directions(plain((sides[0] * [1, 0.1, 1e-2, 4e-7, 3e-7]) @ sides[1].T))
        assert own is not None and own[0].shape[1] == 5
        for found, planted in zip(own, sides, strict=True):
            np.testing.assert_allclose(found.T @ found, np.eye(5), atol=1e-6)
            assert np.abs((found.numpy() * planted).sum(0)) == pytest.approx(np.ones(5), abs=0.01)


def test_nothing_and_vectors_have_neither_rank_nor_directions() -> None:
    assert [decompose(plain(of)) for of in (np.zeros((20, 20)), np.ones(20))] == [None, None]
    found = overlaps_of([None, directions(plain(np.eye(20))), None])
    assert found[1].shape == (2, 3, 3) and np.isnan(found[1]).sum() == 16 and found[1][0, 1, 1] == pytest.approx(1)
    assert overlaps_of([None, None]) == {}


def test_a_planted_subspace_is_found_on_its_side_alone() -> None:
    draw = normal(3)
    shared, *rest = (np.linalg.qr(draw(300, 4))[0] for _ in range(3))
    turned = shared @ np.linalg.qr(draw(4, 4))[0]
    noise, sizes = 1e-3 * draw(2, 300, 300), np.array([4.0, 3.0, 2.0, 1.0])
    found = overlap(plain(shared * sizes @ rest[0].T + noise[0]), plain(turned * sizes @ rest[1].T + noise[1]))
    assert found[4][0] == pytest.approx(1, abs=0.01) and found[1][0] < 0.9  # one subspace, other directions in it
    assert found[4][1] == pytest.approx(4 / 300, abs=0.02)


@pytest.mark.parametrize("shape", [(60, 25), (18, 70)])
def test_random_changes_are_at_chance(shape: tuple[int, int]) -> None:
    """Means over 400 pairs of matrices, and their standard deviations, against those that are reported."""
    draw = normal(4)
    drawn = [directions(plain(draw(*shape))) for _ in range(800)]
    each = [(shape, overlaps_of(pair)) for pair in zip(drawn[::2], drawn[1::2], strict=True)]
    for k, found in together(each).items():
        assert found.matrices_KK[0, 1] == 400
        for side, m in enumerate(shape):
            values = np.array([own[k][side, 0, 1] for _, own in each])
            spread = np.sqrt(variance_by_chance(np.array(float(m)), k))
            assert found.chances_SKK[side, 0, 1] == pytest.approx(k / m)
            assert found.spreads_SKK[side, 0, 1] == pytest.approx(spread / 20)
            assert found.values_SKK[side, 0, 1] == pytest.approx(values.mean(), rel=1e-9)
            assert values.mean() == pytest.approx(k / m, abs=4 * spread / 20)
            assert values.std() == pytest.approx(spread, rel=0.15)


def test_several_matrices_have_equal_weight() -> None:
    """One of which a target has too few directions for is left out, for that target alone."""
    big, small = np.full((2, 3, 3), 0.5), np.full((2, 3, 3), 0.2)
    small[:, 2] = small[:, :, 2] = np.nan
    found = together([((100, 20), {4: big}), ((10, 40), {4: small}), ((3, 3), {})])
    assert list(found) == [4]
    left, right = found[4].pair(0, 1, [(0, 2), (1, 2)]).values()
    assert (left.value, left.matrices, left.placebos, left.p) == (pytest.approx(0.35), 2, (0.5, 0.5), 1.0)
    assert (left.chance, right.chance) == (pytest.approx((0.04 + 0.4) / 2), pytest.approx((0.2 + 0.1) / 2))
    expected = np.sqrt(variance_by_chance(np.array(100.0), 4) + variance_by_chance(np.array(10.0), 4)) / 2
    assert left.spread == pytest.approx(expected)
    alone = found[4].pair(0, 2, [])["left"]
    assert (alone.value, alone.chance, alone.matrices, alone.p) == (0.5, 0.04, 1, None)
    without = together([((10, 40), {4: small})])[4]
    assert without.pair(0, 2, []) == {} and without.pair(0, 1, [(0, 2)])["left"].placebos == ()


def test_the_command_reports_overlaps_of_parts_and_tensors(tmp_path: Path, analyze: Any) -> None:
    """Against SVDs of the files. What is planted in a and b is reported, and nothing of c."""
    own, generator = base(), torch.Generator().manual_seed(5)
    planted = {name: torch.randn(tensor.shape[0], 4, generator=generator) for name, tensor in own.items()}

    def plant(key: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim != 2 or ".layers." not in key:
            return tensor
        return tensor + 0.05 * planted[key] @ torch.randn(4, tensor.shape[1], generator=generator)

    for name in "abc":
        changed(tmp_path / name, ord(name))
    moved = [perturb(tmp_path / name, plant) for name in "ab"]
    out, numbers = analyze("similarity", "a", "b", "c", "--set", "base=tiny")
    (line,) = (line for line in out.splitlines() if "overlap of the" in line)
    assert line.startswith("a and b: overlap of the 4 largest left singular directions beyond chance ")
    assert line.endswith("; matrices 29")
    pair, matrices = numbers["pairs"][0]["overlaps"], [key for key in own if own[key].ndim == 2]
    assert set(pair) == set(numbers["pairs"][0]["cosines"]) and pair["norms"] == {}
    inside = {"all": "", "layer 2": ".layers.2.", "attention": "self_attn", "mlp": ".mlp.", "embeddings": "embed"}
    for k in (1, 4, 16):
        each = {key: by_scipy(*((s[key].double() - own[key].double()).numpy() for s in moved), k) for key in matrices}
        for tensor in numbers["tensors"]:
            of = tensor["overlaps"] and [tensor["overlaps"][str(k)][side][0][1] for side in ("left", "right")]
            assert of == (pytest.approx(each[tensor["name"]], abs=1e-4) if tensor["name"] in each else {})
        for part, word in inside.items():
            names = [key for key in matrices if word in key]
            for axis, side in enumerate(("left", "right")):
                found = pair[part][str(k)][side]
                assert found["matrices"] == len(names) and (found["placebos"], found["p"]) == ([], None)
                assert found["value"] == pytest.approx(np.mean([each[key][axis] for key in names]), abs=1e-4)
                assert found["chance"] == pytest.approx(np.mean([k / own[key].shape[axis] for key in names]))
    assert pair["mlp"]["4"]["left"]["value"] > 0.9


FEW, MANY, FAR = (0.1,) * 5, tuple(np.linspace(0.08, 0.12, 19)), tuple(np.linspace(0.1, 0.5, 19))
NEAR = tuple(np.linspace(0.08, 0.29, 19))


@pytest.mark.parametrize(
    ("sides", "options", "expected"),
    [
        ((0.3, 0.11), {"placebos": MANY}, ["left"]),
        ((0.3, 0.3), {}, ["left", "right"]),
        ((0.3, 0.1), {"k": 1}, ["left"]),
        ((0.11, 0.0), {}, []),  # less than chance is not more
        *(((0.3, 0.3), own, []) for own in ({"placebos": FEW}, {"placebos": FAR}, {"k": 16}, {"same_noise": True})),
        ((0.124, 0.1), {}, ["left"]),  # 2.4 standard deviations, of 2 tests and of 8
        ((0.124, 0.1), {"pairs": 4}, []),
        ((0.2, 0.2), {"same_noise": True, "placebos": NEAR}, []),
        ((0.3, 0.2), {"same_noise": True, "placebos": NEAR}, ["left"]),
    ],
)
def test_overlap_is_reported_beyond_chance_and_placebos(sides: Any, options: Any, expected: list[str]) -> None:
    own = {"placebos": (), "k": 4, "same_noise": False, "pairs": 1, **options}
    both = {s: Overlap(x, 0.1, 0.01, 28, own["placebos"], p_of(x, own["placebos"])) for s, x in zip(SIDES, sides)}  # noqa: B905
    pair = Pair("a", "b", own["same_noise"], {"all": Cosine(0.0, 0.001, (), None)}, {"all": {own["k"]: both}})
    lines = results.overlap_lines([pair] * own["pairs"])
    assert [line.partition(f"the {own['k']} largest ")[2].split()[0] for line in lines] == expected
