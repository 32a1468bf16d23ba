# SPDX-License-Identifier: Apache-2.0
"""Models: the one that comes with the package, and how all others are found, read and merged."""

from __future__ import annotations

from pathlib import Path


def tiny() -> Path:
    """Return the folder of the tiny base model.

    It is a Qwen2-architecture model of half a million parameters, trained from
    nothing by ``recipes/tiny_base``; tests and the CPU demonstration use it.  Hand the
    path to anything that loads a transformers model folder.
    """
    return Path(__file__).resolve().parent / "tiny"
