# SPDX-License-Identifier: Apache-2.0
"""The compiled library: how it is built, what replaces it where it cannot be, and what it refuses."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from number_checks import in_torch, moved, random, same, update

from evoalign import noise
from evoalign.config import from_dict
from evoalign.kernels import compiled, products
from evoalign.preflight.doctor import check_versions
from evoalign.rundir.identity import make_manifest

__all__ = ["in_torch"]  # a fixture

ROOT = Path(__file__).parents[2]

# A build that fails is no reason to leave these out.
needs_library = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")


@needs_library
def test_the_library_is_there_where_there_is_a_compiler():
    assert compiled.available("cpu")


@pytest.fixture
def building(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    shutil.copy(found.SOURCE, tmp_path)
    monkeypatch.setattr(found, "SOURCE", tmp_path / found.SOURCE.name)
    monkeypatch.setattr(found, "LIBRARY", tmp_path / found.LIBRARY.name)
    monkeypatch.setattr(found.build, "__defaults__", (found.LIBRARY,))
    return found


def test_without_a_compiler_torch_stands_in(building, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr(building.shutil, "which", lambda name: None)
    building.LIBRARY.write_bytes(b"of another source")
    assert not building.build() and not building.LIBRARY.exists()
    monkeypatch.setenv("EVOALIGN_COMPILE", "1")
    with pytest.raises(RuntimeError, match="made no library"):
        building.build()


@needs_library
def test_a_library_in_use_stays_until_another_replaces_it(building, monkeypatch):
    building.LIBRARY.write_bytes(b"in use")
    seen = []
    compile_ = building._compile
    monkeypatch.setattr(building, "CLONES", ((),))
    monkeypatch.setattr(
        building, "_compile", lambda *given: (seen.append(building.LIBRARY.exists()), compile_(*given))[1]
    )
    assert building.build() and seen == [True] and building.LIBRARY.read_bytes() != b"in use"


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
@pytest.mark.slow
def test_a_compiler_that_is_named_and_not_there_is_not_exchanged_for_another(building, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    assert not building.build() and not building.LIBRARY.exists()
    monkeypatch.delenv("CC")
    monkeypatch.setattr(building, "CLONES", ((),))
    assert building.build()


def test_a_folder_that_cannot_be_written_breaks_no_installation(building):
    building.SOURCE.with_name("file").touch()
    assert not building.build(building.SOURCE.with_name("file") / "library.so")


DIGEST = """
import hashlib, pathlib, sys, numpy as np, torch
from evoalign import noise
from evoalign.kernels import attention, compiled, population, products

def digest(*files):
    compiled.LIBRARY, compiled.SOURCE = map(pathlib.Path, files)
    compiled._library.cache_clear()
    if not compiled.available("cpu"):
        return "no library"
    sha = hashlib.sha256()
    for dtype in (torch.float32, torch.bfloat16):
        mean = noise.normals((5, 6), (37, 300), 0, [0])[0]
        out = noise.scaled((1, 2**32 - 1), (37, 300), 5, [3, 3, 9], [0.1, -0.1, 0.2], mean=mean, dtype=dtype)
        served = torch.zeros(37, 300, dtype=dtype)
        compiled.dense(mean, served, mean * 2, (1, 2), noise.table(), (37, 300), [(0, 37), (0, 300)], 5,
                       {1: 0.3, 4: 2.0}, 3, 0.01, 0.1)
        left, right = noise.normals((7, 8), (19, 37), 0, [0])[0], noise.normals((7, 8), (19, 300), 0, [1])[0]
        products.move(mean, served, None, left, right, 19, 0.1, 0.0)
        for tensor in (out, served, mean):
            sha.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    x, a, b, qkv, gates = (noise.normals((9, 9), shape, 0, [k])[0] for k, shape in enumerate(
        ((7, 83), (2, 1, 3, 83), (2, 1, 83, 3), (7, 5 * 22), (7, 2 * 83))))
    owners, table = torch.tensor([0, 1, -1, 1, 0, 0, 1], dtype=torch.int32), noise.normals((9, 9), (9, 16), 0, [5])[0]
    dots = noise.normals((9, 9), (7, 3, 3), 0, [6])[0]
    heads = [part.contiguous() for part in noise.normals((9, 9), (2, 1, 110, 3), 0, [7])[0].split([66, 22, 22], dim=2)]
    owed = population.Dot(x, a, b)
    terms = population.Terms(owners, 3)
    said = [*population.norm(x.clone(), x.clone(), x[0], 1e-6, terms, [a, a], owed)]
    shape = population.Heads(3, 1, 22, x[0, :22].clone(), x[1, :22].clone())
    population.rotate(qkv, torch.arange(7), table, dots, heads, terms, shape)
    shape = population.Heads(3, 1, 22, x[:3, :22].clone(), x[4:, :22].clone(), bias=x.flatten()[: 3 * 110].view(3, 110))
    population.rotate(qkv, torch.arange(7), table, dots, heads, terms, shape)
    said += population.norm(x.clone(), None, x[:3].clone(), 1e-6, terms)
    said += population.gate(gates * 9, dots[:, :2].contiguous(), [b, b], a, terms)
    population.add(gates, x, [a, a], [b, b], terms)
    cache = [noise.normals((9, 9), (7, 1, 300, 22), 0, [k])[0] for k in (8, 9)]
    said.append(attention.decode(qkv, *cache, torch.arange(7).flip(0), torch.arange(7) * 49, heads=3, scale=0.3))
    for tensor in (*said, qkv, gates):
        assert tensor.isfinite().all()
        sha.update(tensor.numpy().tobytes())
    sha.update(str(compiled.tensor_sum(mean, (37, 300), [(0, 37), (0, 300)])).encode())
    return sha.hexdigest()

for library, source in zip(sys.argv[1::2], sys.argv[2::2]):
    print(digest(library, source))
"""


def digests(*files):
    """Return the digest of each pair of a library and a source, in turn."""
    command = [sys.executable, "-c", DIGEST, *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]


@pytest.mark.parametrize(
    ("library", "word"), [("1", "; compiled kernels"), ("0", "switched off by EVOALIGN_COMPILED=0")]
)
def test_the_doctor_and_the_manifest_say_whether_it_is_there(monkeypatch, library, word):
    monkeypatch.setenv("EVOALIGN_COMPILED", library)
    there = compiled.available("cpu")
    assert word in check_versions().detail or (not there and library == "1")
    assert make_manifest(from_dict({"es": {"sigma": 0.1}}), {}, [])["hardware"]["compiled"] is there


@pytest.mark.slow
@needs_library
def test_a_library_for_the_least_of_machines_has_the_bits_of_the_one_for_this(building, monkeypatch):
    """And one of another source, or none, is not used."""
    monkeypatch.setattr(building, "CLONES", ((),))
    assert building.build()
    other = building.SOURCE.with_name("other.c")
    other.write_text(building.SOURCE.read_text() + "\n// another\n")
    library, source = building.LIBRARY, building.SOURCE
    here, own, *unused = digests(compiled.LIBRARY, compiled.SOURCE, library, source, source, source, library, other)
    assert len(here) == 64 and own == here
    assert unused == ["no library", "no library"]


@needs_library
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("space", ["lowrank", "full"])
def test_the_default_dtype_of_torch_changes_nothing(in_torch, space, default):
    args = (space, 3, torch.bfloat16, update(5))
    want = moved(*args)
    torch.set_default_dtype(default)
    try:
        found = (moved(*args), in_torch(moved, *args))
    finally:
        torch.set_default_dtype(torch.float32)
    for got in found:
        assert all(same(a, b) for a, b in zip(got, want, strict=True))


@needs_library
def test_factors_that_take_too_much_memory_go_in_parts(monkeypatch):
    args = ("lowrank", 3, torch.bfloat16, update(9, decay=0.125), (slice(1, 21), slice(1, 151)))
    want = moved(*args)
    monkeypatch.setattr("evoalign.spaces.lowrank._ROOM", 500)
    sizes = []
    factors = products.factors

    def seen(terms, rows, columns, device):
        sizes.append(terms * (rows + columns))
        return factors(terms, rows, columns, device)

    monkeypatch.setattr(products, "factors", seen)
    assert all(same(a, b) for a, b in zip(moved(*args), want, strict=True))
    assert len(sizes) > 8 and max(sizes) <= 500


@needs_library
def test_what_c_would_read_wrongly_is_refused_or_goes_to_torch(in_torch):
    args = ((1, 2), (3, 40), 0, [0, 1], [0.1, 0.2])
    for mean in (random((3, 40)).double(), torch._neg_view(random((3, 40))), torch.tensor(0.5), random((1, 40))):
        assert same(noise.scaled(*args, mean=mean), in_torch(lambda m=mean: noise.scaled(*args, mean=m)))
    shared = random((2, 3, 40))

    def over():
        out = shared.clone()
        return noise.scaled(*args, mean=out[0], out=out)

    assert same(over(), in_torch(over))
    matrix, left, right = random((4, 9)), random((2, 4)), random((2, 9))
    for wrong in ((matrix.double(), left, right), (matrix, left, right[:1]), (matrix[:3], left, right)):
        with pytest.raises(ValueError, match="is not float32"):
            compiled.product(wrong[0], None, None, *wrong[1:], 1, 1.0, 0.0)
    with pytest.raises(ValueError, match="is not float32"):
        bounds = [(0, 4), (0, 9)]
        compiled.dense(matrix[:3], None, None, (1, 2), noise.table(), (4, 9), bounds, 0, {0: 1.0}, 1, 1.0, 0.0)


@needs_library
def test_what_fails_in_a_thread_is_raised():
    """Else a part of the mean would not have moved, and nobody would know."""
    for bad in range(3):

        def work(place, bad=bad):
            if place == bad:
                raise MemoryError
            return place

        with pytest.raises(MemoryError):
            compiled._run(work, [(0,), (1,), (2,)])
    assert compiled._run(lambda place: place, [(0,), (1,), (2,)]) == [0, 1, 2]


def test_where_no_thread_can_be_started_the_work_is_done_here_once(monkeypatch):
    args = ("lowrank", 3, torch.bfloat16, update(9))
    want, before = moved(*args), torch.get_num_threads()

    def refused(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(compiled, "_PIECE", 64)
    monkeypatch.setattr(compiled.threading.Thread, "start", refused)
    torch.set_num_threads(4)
    try:
        assert all(same(a, b) for a, b in zip(moved(*args), want, strict=True))
    finally:
        torch.set_num_threads(before)
