# SPDX-License-Identifier: Apache-2.0
"""Where the files lie that come with the package: task data and configs, in a checkout and in an installed package."""

from __future__ import annotations

import os
from pathlib import Path

FOLDERS = (("data", "tasks"), ("configs",))
"""Beginnings of their paths. In a wheel they lie in the package, in a checkout beside `src`."""


def locate(source: str | Path) -> Path:
    """The path itself, or, for a `data/tasks/..` or `configs/..` that is not under the working folder, the shipped one.

    So the quickstart and the experiments run from any folder, without a checkout.
    """
    path = Path(source)
    known = any(path.parts[: len(folder)] == folder for folder in FOLDERS)
    if not known or os.path.exists(path):  # noqa: PTH110 (which raises nothing)
        return path
    package = Path(__file__).resolve().parents[1]
    return next((place / path for place in (package, package.parents[1]) if (place / path).is_file()), path)
