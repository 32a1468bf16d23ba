# SPDX-License-Identifier: Apache-2.0
"""What the package computes, written a second time in pure Python and numpy, from its documentation alone.

Nothing here imports the package, so that an expectation is never computed by the code under test.
"""

from __future__ import annotations

import hashlib
import math
from functools import cache
from pathlib import Path

import numpy as np

MASK = 0xFFFFFFFF
TABLE = Path(__file__).resolve().parents[2] / "src" / "evoalign" / "kernels" / "noise_table.bin"


def philox(counter, key):
    """Philox 4x32-10 of one counter: Python integers, as Salmon et al. (SC 2011) write it down."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * x0, 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * x2, 1 << 32)
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return x0, x1, x2, x3


def philox_arrays(counter, key):
    x0, x1, x2, x3 = (np.asarray(c, dtype=np.uint64) for c in counter)
    k0, k1 = key
    low, shift = np.uint64(MASK), np.uint64(32)
    for _ in range(10):
        p0, p1 = x0 * np.uint64(0xD2511F53), x2 * np.uint64(0xCD9E8D57)
        x0, x1, x2, x3 = (p1 >> shift) ^ x1 ^ np.uint64(k0), p1 & low, (p0 >> shift) ^ x3 ^ np.uint64(k1), p0 & low
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return x0, x1, x2, x3


def key(seed, purpose, name, factor=""):
    """BLAKE2b-64 of the four parts, separated by the unit separator; two little-endian words."""
    digest = hashlib.blake2b(f"{seed}\x1f{purpose}\x1f{name}\x1f{factor}".encode(), digest_size=8).digest()
    word = int.from_bytes(digest, "little")
    return word & MASK, word >> 32


@cache
def quantiles():
    """The table by unsigned 16-bit index; the shipped half is the positive one."""
    positive = np.fromfile(TABLE, dtype="<f4")
    return np.concatenate([-positive[::-1], positive])


def element(key, index, generation, member):
    """One normal, by its row-major index."""
    block, place = divmod(index, 8)
    words = philox((block & MASK, block >> 32, generation, member), key)
    word = words[place // 2]
    return quantiles()[word & 0xFFFF if place % 2 == 0 else word >> 16]


def normals(key, shape, generation, members):
    """Float32 [M, *shape]."""
    size = math.prod(shape)
    blocks = np.arange(-(-size // 8), dtype=np.uint64)
    member = np.asarray(list(members), dtype=np.uint64)[:, None]
    words = philox_arrays((blocks & np.uint64(MASK), blocks >> np.uint64(32), np.uint64(generation), member), key)
    halves = [h for w in words for h in (w & np.uint64(0xFFFF), w >> np.uint64(16))]
    drawn = quantiles()[np.stack(halves, axis=-1).astype(np.int64)]
    return drawn.reshape(len(member), -1)[:, :size].reshape(len(member), *shape)


def noise(seed, name, shape, generation, members, factor=""):
    return normals(key(seed, "noise", name, factor), shape, generation, members)


def bfloat16(values):
    """Round float32 to the nearest bfloat16, ties to even; given back as float32."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + np.uint64(0x7FFF) + ((bits >> np.uint64(16)) & np.uint64(1))) & np.uint64(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32)


def zscore(fitness):
    """(f - mean) / (std + 1e-8), ddof 0, in Python floats."""
    mean = math.fsum(fitness) / len(fitness)
    std = math.sqrt(math.fsum((f - mean) ** 2 for f in fitness) / len(fitness))
    return [(f - mean) / (std + 1e-8) for f in fitness]


def weighted(eps, coefficients, signs):
    """(1/N) sum_i c_i sign_i eps_i in float64."""
    weights = np.asarray(coefficients, dtype=np.float64) * np.asarray(signs, dtype=np.float64)
    return np.tensordot(weights, eps.astype(np.float64), axes=1) / len(weights)


def splitmix64(x):
    x &= (1 << 64) - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & ((1 << 64) - 1)
    return x ^ (x >> 31)


def relative(got, want):
    got, want = np.asarray(got, dtype=np.float64), np.asarray(want, dtype=np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def cosine(left, right):
    left, right = np.asarray(left, dtype=np.float64).ravel(), np.asarray(right, dtype=np.float64).ravel()
    return float(left @ right / (np.linalg.norm(left) * np.linalg.norm(right)))
