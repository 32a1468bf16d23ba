# SPDX-License-Identifier: Apache-2.0
"""One real run, and copies of it: what comparisons of runs are tested on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from copied_runs import STEPS, Copy, copy_run, real_run


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return real_run(tmp_path_factory.mktemp("real") / "run", steps=STEPS, every=2)


@pytest.fixture
def copy(source: Path, tmp_path: Path) -> Copy:
    def make(name: str, **changes: Any) -> Path:
        return copy_run(source, tmp_path / "runs" / name, **changes)

    return make
