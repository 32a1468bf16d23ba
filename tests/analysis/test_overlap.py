# SPDX-License-Identifier: Apache-2.0
"""Overlap of the largest singular directions: against numpy and scipy, planted, by chance, and in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import Run, caller
from perturbed import MODEL, base, changed
from safetensors.torch import load_file, save_file
from scipy.linalg import subspace_angles

from evoalign.analysis.similarity import measures, results
from evoalign.analysis.similarity.measures import (
    SIDES,
    SIZES,
    Directions,
    Overlap,
    decompose,
    overlaps_of,
    p_of,
    together,
    variance_by_chance,
)
from evoalign.analysis.similarity.results import Cosine, Pair
from evoalign.checks.distance import Change, Product, difference

SHAPES = [(40, 90), (90, 40), (50, 50)]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)
    return caller(monkeypatch, capsys, 400)


def dense(array: Any) -> Change:
    tensor = torch.as_tensor(array, dtype=torch.float64)
    return difference(tensor, torch.zeros_like(tensor))


def directions(change: Change) -> Directions | None:
    found = decompose(change)
    return None if found is None else found[1]


def by_scipy(one: Any, other: Any, k: int) -> tuple[float, float]:
    """Mean squared cosines of the principal angles, left and right, by full SVDs."""
    (u, _, v), (x, _, y) = (np.linalg.svd(m, full_matrices=False) for m in (one, other))
    pairs = [(u[:, :k], x[:, :k]), (v[:k].T, y[:k].T)]
    left, right = (float(np.mean(np.cos(subspace_angles(a, b)) ** 2)) for a, b in pairs)
    return left, right


def overlap(one: Change, other: Change) -> dict[int, tuple[float, float]]:
    found = overlaps_of([directions(one), directions(other)])
    return {k: (float(of[0, 0, 1]), float(of[1, 0, 1])) for k, of in found.items()}


@pytest.mark.parametrize("shape", SHAPES)
def test_directions_and_overlaps_are_those_of_full_svds(shape: tuple[int, int], monkeypatch: Any) -> None:
    """In blocks of a few rows; the two have something in common, and not all."""
    monkeypatch.setattr(measures, "MATRIX_BLOCK", 300)
    generator = np.random.default_rng(0)
    common = generator.normal(size=(shape[0], 3)) @ generator.normal(size=(3, shape[1]))
    one, other = (common + 3 * generator.normal(size=shape) for _ in range(2))
    u, s, v = np.linalg.svd(one, full_matrices=False)
    own = directions(dense(one))
    assert own is not None and own[0].dtype == own[1].dtype == torch.float32
    for found, expected in zip(own, (u[:, :16], v[:16].T), strict=True):
        assert found.shape == expected.shape
        assert np.abs((found.numpy() * expected).sum(0)) == pytest.approx(np.ones(16), abs=1e-5)
    assert s[15] > s[16]
    found = overlap(dense(one), dense(other))
    assert list(found) == list(SIZES)
    for k, both in found.items():
        assert both == pytest.approx(by_scipy(one, other, k), abs=1e-5)
        assert min(both) > 0.02 and max(both) < 0.98


@pytest.mark.parametrize("shape", SHAPES)
def test_adapters_are_as_their_matrices_written_out(shape: tuple[int, int]) -> None:
    """Of rank 8 and 5: there are no 16 directions to compare, and of rank 3 no 4."""
    generator = np.random.default_rng(1)

    def adapter(rank: int, fixed: Any = None) -> Product:
        a, b = (
            generator.normal(size=(rank, shape[1])) if fixed is None else fixed,
            generator.normal(size=(shape[0], rank)),
        )
        return Product(torch.as_tensor(a), torch.as_tensor(b), 0.5)

    eight, five, three = adapter(8), adapter(5), adapter(3)
    for one, other, sizes in ((eight, five, [1, 4]), (eight, adapter(8, eight.a.numpy()), [1, 4]), (five, three, [1])):
        written = [m.rows(slice(None)).numpy() for m in (one, other)]
        factors = overlap(one, other)
        assert [k for k, both in factors.items() if not np.isnan(both).any()] == sizes
        for k in sizes:
            expected = by_scipy(written[0], written[1], k)
            for found in (factors, overlap(dense(written[0]), other), overlap(dense(written[0]), dense(written[1]))):
                assert found[k] == pytest.approx(expected, abs=1e-5)


def test_directions_of_very_unequal_size_stay_orthonormal() -> None:
    """Near what counts as 0 those of the other side would not be, without the QR: by some 1e-3."""
    generator = np.random.default_rng(2)
    u, v = (np.linalg.qr(generator.normal(size=(n, 5)))[0] for n in (60, 30))
    for sides in ((u, v), (v, u)):
        own = directions(dense((sides[0] * [1, 0.1, 1e-2, 4e-7, 3e-7]) @ sides[1].T))
        assert own is not None and own[0].shape[1] == 5
        for found, planted in zip(own, sides, strict=True):
            np.testing.assert_allclose(found.T @ found, np.eye(5), atol=1e-6)
            assert np.abs((found.numpy() * planted).sum(0)) == pytest.approx(np.ones(5), abs=0.01)


def test_what_has_no_directions() -> None:
    zero, vector, one = np.zeros((20, 20)), np.ones(20), np.eye(20)
    assert directions(dense(zero)) is None and directions(dense(vector)) is None
    found = overlaps_of([None, directions(dense(one)), None])
    assert found[1].shape == (2, 3, 3) and np.isnan(found[1]).sum() == 16 and found[1][0, 1, 1] == pytest.approx(1)
    assert overlaps_of([None, None]) == {}


def test_a_planted_subspace_is_found_on_its_side_alone() -> None:
    generator = np.random.default_rng(3)
    shared, *rest = (np.linalg.qr(generator.normal(size=(300, 4)))[0] for _ in range(3))
    turned = shared @ np.linalg.qr(generator.normal(size=(4, 4)))[0]
    sizes = np.array([4.0, 3.0, 2.0, 1.0])
    noise = 1e-3 * generator.normal(size=(2, 300, 300))
    found = overlap(dense(shared * sizes @ rest[0].T + noise[0]), dense(turned * sizes @ rest[1].T + noise[1]))
    assert found[4][0] == pytest.approx(1, abs=0.01) and found[1][0] < 0.9  # one subspace, other directions in it
    assert found[4][1] == pytest.approx(4 / 300, abs=0.02)


@pytest.mark.parametrize("shape", [(60, 25), (18, 70)])
def test_random_changes_are_at_chance(shape: tuple[int, int]) -> None:
    """Means over matrices, and their standard deviations, against those that are told."""
    generator = np.random.default_rng(4)
    draws = 400
    drawn = [directions(dense(generator.normal(size=shape))) for _ in range(2 * draws)]
    each = [(shape, overlaps_of(pair)) for pair in zip(drawn[::2], drawn[1::2], strict=True)]
    for k, found in together(each).items():
        assert found.matrices_KK[0, 1] == draws
        for side, m in enumerate(shape):
            values = np.array([own[k][side, 0, 1] for _, own in each])
            spread = np.sqrt(variance_by_chance(np.array(float(m)), k))
            assert found.chances_SKK[side, 0, 1] == pytest.approx(k / m)
            assert found.spreads_SKK[side, 0, 1] == pytest.approx(spread / np.sqrt(draws))
            assert found.values_SKK[side, 0, 1] == pytest.approx(values.mean(), rel=1e-9)
            assert values.mean() == pytest.approx(k / m, abs=4 * spread / np.sqrt(draws))
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


def test_the_command_tells_of_parts_and_tensors(tmp_path: Path, run: Run) -> None:
    """Against SVDs of the files. What is planted in a and b is told in words, of c nothing is."""
    own, states = base(), {}
    generator = torch.Generator().manual_seed(5)
    planted = {name: torch.randn(tensor.shape[0], 4, generator=generator) for name, tensor in own.items()}
    for name in "abc":
        folder = changed(tmp_path / name, ord(name))
        states[name] = load_file(folder / MODEL)
        for key, tensor in states[name].items():
            if name != "c" and tensor.ndim == 2 and ".layers." in key:
                tensor += 0.05 * planted[key] @ torch.randn(4, tensor.shape[1], generator=generator)
        save_file(states[name], folder / MODEL, metadata={"format": "pt"})
    done = run("analyze", "similarity", "a", "b", "c", "--set", "base=tiny", "--to", "out")
    assert (done.code, done.err) == (0, "")
    (line,) = (line for line in done.out.splitlines() if "overlap of the" in line)
    assert line.startswith("a and b: overlap of the 4 largest left singular directions beyond chance ")
    assert line.endswith("; matrices 29")
    numbers = json.loads(Path("out/similarity.json").read_text())["numbers"]
    pair = numbers["pairs"][0]["overlaps"]
    assert set(pair) == set(numbers["pairs"][0]["cosines"]) and pair["norms"] == {}
    moved = {n: {key: (s[key].double() - own[key].double()).numpy() for key in own} for n, s in states.items()}
    matrices = [key for key in own if own[key].ndim == 2]
    for k in (1, 4, 16):
        each = {key: by_scipy(moved["a"][key], moved["b"][key], k) for key in matrices}
        for tensor in numbers["tensors"]:
            if tensor["name"] in each:
                found = [tensor["overlaps"][str(k)][side][0][1] for side in ("left", "right")]
                assert found == pytest.approx(each[tensor["name"]], abs=1e-4)
            else:
                assert tensor["overlaps"] == {}
        inside = {"all": "", "layer 2": ".layers.2.", "attention": "self_attn", "mlp": ".mlp.", "embeddings": "embed"}
        for part, word in inside.items():
            names = [key for key in matrices if word in key]
            for axis, side in enumerate(("left", "right")):
                found = pair[part][str(k)][side]
                assert found["matrices"] == len(names) and (found["placebos"], found["p"]) == ([], None)
                assert found["value"] == pytest.approx(np.mean([each[key][axis] for key in names]), abs=1e-4)
                assert found["chance"] == pytest.approx(np.mean([k / own[key].shape[axis] for key in names]))
    assert pair["mlp"]["4"]["left"]["value"] > 0.9


def rows_of(
    left: float, right: float, placebos: tuple[float, ...] = (), *, k: int = 4, same_noise: bool = False, pairs: int = 1
) -> list[str]:
    """The sides of a pair that are reported to overlap beyond chance."""
    both = {side: Overlap(x, 0.1, 0.01, 28, placebos, p_of(x, placebos)) for side, x in zip(SIDES, (left, right))}  # noqa: B905
    pair = Pair("a", "b", same_noise, {"all": Cosine(0.0, 0.001, (), None)}, {"all": {k: both}})
    return [line.partition(f"the {k} largest ")[2].split()[0] for line in results.overlap_lines([pair] * pairs)]


FEW, MANY, FAR = (0.1,) * 5, tuple(np.linspace(0.08, 0.12, 19)), tuple(np.linspace(0.1, 0.5, 19))
NEAR = tuple(np.linspace(0.08, 0.29, 19))


@pytest.mark.parametrize(
    ("sides", "options", "expected"),
    [
        ((0.3, 0.11), {"placebos": MANY}, ["left"]),
        ((0.3, 0.3), {}, ["left", "right"]),
        ((0.3, 0.1), {"k": 1}, ["left"]),
        ((0.11, 0.0), {}, []),  # less than chance is not more
        ((0.3, 0.3), {"placebos": FEW}, []),
        ((0.3, 0.3), {"placebos": FAR}, []),
        ((0.3, 0.3), {"k": 16}, []),
        ((0.124, 0.1), {}, ["left"]),  # 2.4 standard deviations, of 2 tests and of 8
        ((0.124, 0.1), {"pairs": 4}, []),
        ((0.3, 0.3), {"same_noise": True}, []),
        ((0.2, 0.2), {"same_noise": True, "placebos": NEAR}, []),
        ((0.3, 0.2), {"same_noise": True, "placebos": NEAR}, ["left"]),
    ],
)
def test_overlap_is_reported_beyond_chance_and_placebos(sides: Any, options: Any, expected: list[str]) -> None:
    assert rows_of(*sides, **options) == expected
