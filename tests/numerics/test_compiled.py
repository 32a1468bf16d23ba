# SPDX-License-Identifier: Apache-2.0
"""The compiled numbers of a CPU against plain torch, bit for bit, and what stands in where they cannot be built."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from evoalign import noise, spaces
from evoalign.config import OptimizerConfig, from_dict
from evoalign.engines.hash import tensor_sum
from evoalign.kernels import compiled, products
from evoalign.optimizer import create
from evoalign.types import TensorSpec, Update, population

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
ROOT = Path(__file__).parents[2]

# A build that fails is no reason to leave these out.
needs_library = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")


@pytest.fixture
def in_torch(monkeypatch):
    """Calls a function without the library."""

    def call(function, *args):
        with monkeypatch.context() as patch:
            patch.setenv("EVOALIGN_COMPILED", "0")
            assert not compiled.available("cpu")
            return function(*args)

    return call


@pytest.fixture(params=[1, 3])
def threads(request, monkeypatch):
    """Work in pieces of any size, shared by threads."""
    before = torch.get_num_threads()
    monkeypatch.setattr(compiled, "_PIECE", 64)
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def same(got, want):
    return got.dtype == want.dtype and torch.equal(
        got.contiguous().view(BITS[got.dtype]), want.contiguous().view(BITS[want.dtype])
    )


def random(shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 0.02, shape).astype(np.float32))


def parts(shape, count=4):
    rng = np.random.default_rng(sum(shape))
    cuts = (tuple(slice(*map(int, sorted(rng.choice(n + 1, 2, replace=False)))) for n in shape) for _ in range(count))
    return [tuple(slice(0, n) for n in shape), *cuts]


@needs_library
def test_the_library_is_there_where_there_is_a_compiler():
    assert compiled.available("cpu")


SHAPES = [(7,), (1, 1), (33, 65), (3, 5, 7), (300, 257), (2, 1, 9), (896, 1), (4, 896), ()]


@needs_library
@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_noise_has_the_same_bits(in_torch, threads, shape, dtype):
    """Of any part, around any mean, into any memory, pairs and single members."""
    compared = 0
    for part in parts(shape):
        size = [s.stop - s.start for s in part]
        mean = random(size)
        for centre in (None, mean, mean.T.contiguous().T if mean.dim() == 2 else mean):
            for members, widths in (([3, 3, 9, 3], [0.1, -0.1, 0.2, 0.3]), ([2**32 - 1], [1e-3])):

                def draw(members=members, widths=widths, centre=centre, part=part, size=size):
                    out = torch.zeros(len(members), *[n + 3 for n in size], dtype=dtype)
                    view = out[(slice(None), *[slice(1, 1 + n) for n in size])]
                    noise.scaled((1, 2**32 - 1), shape, 5, members, widths, mean=centre, slices=part, out=view)
                    alone = noise.scaled((1, 2**32 - 1), shape, 5, members, widths, mean=centre, dtype=dtype,
                                         slices=part, device="cpu")  # fmt: skip
                    return out, alone, noise.normals((1, 2**32 - 1), shape, 5, members, part)

                for got, want in zip(draw(), in_torch(draw), strict=True):
                    assert same(got, want)
                    compared += got.numel() > 0
    assert compared >= 90


@needs_library
@pytest.mark.parametrize("x", [3.4028234e38, 1e-45, float("inf"), -0.0, 1.00390625, 1.01171875])
def test_rounding_to_bfloat16_is_that_of_torch_at_the_edges(in_torch, x):
    def draw():
        return noise.scaled((1, 2), (1, 9), 0, [0], [0.0], mean=torch.full((1, 9), x), dtype=torch.bfloat16)

    assert same(draw(), in_torch(draw))


@needs_library
def test_what_is_no_number_stays_none():
    mean = torch.full((1, 9), float("nan"))
    assert noise.scaled((1, 2), (1, 9), 0, [0], [0.0], mean=mean, dtype=torch.bfloat16).isnan().all()


@needs_library
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_hash_has_the_same_bits(in_torch, threads, shape):
    whole = random(shape)
    for part in parts(shape):
        of = whole[part] if shape else whole
        for tensor in (of, of.bfloat16()):
            assert (tensor_sum(tensor, shape, part) - in_torch(tensor_sum, tensor, shape, part)) % 2**64 == 0


NAMES = {"full": "layers.0.w.weight", "lora": "layers.0.w.lora_B.weight", "lowrank": "layers.0.w.weight"}


def moved(space, rank, dtype, size, antithetic, optimizer, decay, part, shape=(41, 300)):
    tree = {
        "seed": 7, "space": space, "lora": {"rank": rank}, "lowrank": {"rank": rank},
        "es": {"sigma": 0.01, "learning_rate": 0.005, "population_size": size},
    }  # fmt: skip
    made = spaces.create(from_dict(tree))
    layout = made.layout([TensorSpec(NAMES["full"], shape, "linear", 0, 0.1)], dtype)
    shape, optimizer = layout[NAMES[space]].shape, OptimizerConfig(name=optimizer)
    coefficients = tuple(map(float, np.random.default_rng(size).normal(size=size)))
    update = Update(0, 2**32 - 1, population(size, antithetic=antithetic), coefficients, 0.01, 0.005, decay)
    part = tuple(slice(0, n) for n in shape) if part is None else tuple(slice(1, n // 2 + 1) for n in shape)
    master, start = random(shape), random(shape, 1)[part]
    served = torch.zeros(shape, dtype=dtype)
    made.accumulate(layout, master[part], NAMES[space], part, update, start, create(optimizer), served[part])
    return master, served


@needs_library
@pytest.mark.first("8-True-torch.bfloat16-sgd-0.125-half", "9-False-torch.float32-adam-0.0-None")
@pytest.mark.parametrize("part", [None, "half"])
@pytest.mark.parametrize(("optimizer", "decay"), [("sgd", 0.0), ("sgd", 0.125), ("adam", 0.0)])
@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize(("size", "antithetic"), [(9, False), (8, True)])
@pytest.mark.parametrize(("space", "rank"), [("full", 1), ("lora", 3), ("lowrank", 1), ("lowrank", 3)])
def test_updates_have_the_same_bits(in_torch, threads, space, rank, dtype, size, antithetic, optimizer, decay, part):
    args = (space, rank, dtype, size, antithetic, optimizer, decay, part)
    for got, want, before in zip(moved(*args), in_torch(moved, *args), (random((41, 300)), None), strict=True):
        assert same(got, want)
        assert before is None or got.shape != before.shape or not torch.equal(got, before)


def test_products_are_added_one_after_another(monkeypatch):
    """Against the definition in numpy, number by number: no library's order, no fused operation."""
    rng = np.random.default_rng(1)
    left, right = (rng.normal(size=(19, n)).astype(np.float32) for n in (23, 270))
    total = np.zeros((23, 270), np.float32)
    for a, b in zip(left, right, strict=True):
        total = total + a[:, None] * b[None]
    start = rng.normal(size=total.shape).astype(np.float32)
    want = start + total * np.float32(1 / 7) * np.float32(0.3)
    for way in ("1", "0"):
        monkeypatch.setenv("EVOALIGN_COMPILED", way)
        master = torch.from_numpy(start.copy())
        products.move(master, None, None, torch.from_numpy(left), torch.from_numpy(right), 7, 0.3, 0.0)
        assert np.array_equal(master.numpy().view(np.int32), want.view(np.int32))


@pytest.fixture
def building(tmp_path, monkeypatch):
    """The build, in a copy of the sources."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    shutil.copy(found.SOURCE, tmp_path)
    for name in ("SOURCE", "LIBRARY"):
        monkeypatch.setattr(found, name, tmp_path / getattr(found, name).name)
    monkeypatch.setattr(found, "KERNELS", tmp_path)
    return found


def test_without_a_compiler_torch_stands_in(building, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr(building.shutil, "which", lambda name: None)
    building.LIBRARY.write_bytes(b"of another source")
    assert not building.build() and not building.LIBRARY.exists()
    monkeypatch.setenv("EVOALIGN_COMPILE", "1")
    with pytest.raises(RuntimeError, match="made no library"):
        building.build()


@pytest.mark.parametrize("script", ["exit 1", "exit 0", 'echo rubbish > "$(eval echo \\${$#})"'])
def test_a_compiler_that_fails_breaks_no_installation(building, monkeypatch, tmp_path, script):
    compiler = tmp_path / "bin" / "cc"
    compiler.parent.mkdir()
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert not building.build()
    assert not building.LIBRARY.exists() and not list(tmp_path.glob("tmp*"))


@needs_library
def test_a_library_of_another_source_is_not_used(building, monkeypatch):
    monkeypatch.setattr(building, "CLONES", ((),))  # quick to compile
    assert building.build()
    program = (
        "import sys, pathlib\nfrom evoalign.kernels import compiled\n"
        "compiled.LIBRARY, compiled.SOURCE = map(pathlib.Path, sys.argv[1:])\nprint(compiled.available('cpu'))"
    )

    def said(library):
        command = [sys.executable, "-c", program, str(library), str(building.SOURCE)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert said(building.LIBRARY) == "True"
    assert said(building.SOURCE) == "False"  # no library at all
    building.SOURCE.write_text(building.SOURCE.read_text() + "\n// another\n")
    assert said(building.LIBRARY) == "False"
