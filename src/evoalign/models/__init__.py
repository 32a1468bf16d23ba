# SPDX-License-Identifier: Apache-2.0
"""The model that ships with the package, what else `model.name` may stand for, and what is to be known of models."""

from __future__ import annotations

from pathlib import Path


def tiny() -> Path:
    """Return the folder of the tiny base model.

    It is a Qwen2-architecture model of half a million parameters, trained from
    nothing by ``recipes/tiny_base``; tests and the CPU demonstration use it.  Hand the
    path to anything that loads a transformers model folder.
    """
    return Path(__file__).resolve().parent / "tiny"
