# SPDX-License-Identifier: Apache-2.0
"""Models: the one that comes with the package, and how all others are found, read and merged."""

from __future__ import annotations

from pathlib import Path


def tiny() -> Path:
    """Return the folder of the model `tiny`: a Qwen2 of half a million parameters, trained by `recipes/tiny_base`."""
    return Path(__file__).resolve().parent / "tiny"
