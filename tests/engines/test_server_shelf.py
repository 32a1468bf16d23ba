# SPDX-License-Identifier: Apache-2.0
"""Folders of adapters in memory: none outlives its process for long, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from evoalign.engines.server import adapters
from evoalign.engines.server.adapters import Shelf

HOLD = """
import sys, time
from pathlib import Path
from evoalign.engines.server import adapters
adapters.IN_MEMORY = Path(sys.argv[1])
shelf = adapters.Shelf(None)
(shelf.folder("member") / "weights").write_bytes(b"0")
print(shelf._folder, flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(adapters, "IN_MEMORY", tmp_path)
    return tmp_path


def test_what_a_killed_process_left_is_taken_away_and_nothing_else(memory: Path) -> None:
    (memory / "evoalign-not-a-folder").touch()
    (memory / "evoalign-elsewhere").symlink_to(memory)
    (memory / "another").mkdir()
    with subprocess.Popen([sys.executable, "-c", HOLD, str(memory)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        first = Shelf(None)
        assert (left / "member" / "weights").exists(), "its process lives"
        os.kill(process.pid, signal.SIGKILL)
    second = Shelf(None)
    assert not left.exists()
    assert first._folder.exists(), "of this process, and in use"
    first.close()
    second.close()
    assert {path.name for path in memory.iterdir()} == {"evoalign-not-a-folder", "evoalign-elsewhere", "another"}


def test_in_a_folder_of_the_user_nothing_is_taken_away(memory: Path) -> None:
    """It may lie on a disk that knows no locks."""
    (memory / "evoalign-old").mkdir()
    Shelf(str(memory)).close()
    assert (memory / "evoalign-old").exists()
