# SPDX-License-Identifier: Apache-2.0
"""Folders of adapters in memory: none outlives its process for long, however that ends, and nothing else is touched."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from evoalign.engines.server import adapters
from evoalign.engines.server.adapters import PeftAdapter, Shelf
from evoalign.errors import ModelError

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
    (memory / "evoalign-adapters-file").touch()
    (memory / "evoalign-adapters-link").symlink_to(memory)
    (memory / "evoalign-adapters-unmarked").mkdir()
    (memory / "evoalign-bench").mkdir()
    before = {path.name for path in memory.iterdir()}
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
    assert {path.name for path in memory.iterdir()} == before


def test_in_a_folder_of_the_user_nothing_is_taken_away(memory: Path) -> None:
    """It may lie on a disk that knows no locks."""
    left = memory / "evoalign-adapters-left"
    left.mkdir()
    (left / adapters.MARK).touch()
    Shelf(str(memory)).close()
    assert left.exists()
    Shelf(None).close()
    assert not left.exists()


@pytest.mark.parametrize("name", ["evoalign-x", "evoalign-adapters-x"])
def test_a_folder_that_a_run_was_given_in_memory_keeps_its_adapters(memory: Path, name: str) -> None:
    (memory / name).mkdir()
    run = Shelf(str(memory / name))
    folder = run.folder("member")
    Shelf(None).close()
    assert folder.exists()


@pytest.mark.parametrize("where", ["tempfile.mkdtemp", "evoalign.engines.server.adapters.locked"])
def test_another_process_may_sweep_while_a_folder_is_made(
    memory: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right after it is there, and right before it is locked."""
    swept = list[bool]()

    def sweep_once(given: Any) -> None:
        if not swept:
            swept.append(True)
            adapters._take_away_orphans(memory)

    if where.endswith("mkdtemp"):
        make = adapters.tempfile.mkdtemp

        def made(**words: Any) -> str:
            folder = make(**words)
            sweep_once(folder)
            return folder

        monkeypatch.setattr(where, made)
    else:
        lock = adapters.locked

        def locked(file: Any) -> bool:
            sweep_once(file)
            return lock(file)

        monkeypatch.setattr(where, locked)
    shelf = Shelf(str(memory))
    assert swept and shelf.folder("member").is_dir()
    Shelf(None).close()
    assert shelf._folder.is_dir(), "it is locked"
    shelf.close()


def adapter(size: int = 1) -> PeftAdapter:
    return PeftAdapter({"r": 1}, {"a": torch.zeros(size)})


def test_where_there_is_no_room_the_setting_is_named() -> None:
    shelf, before = Shelf(None), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(ModelError, match=r"set engine\.adapter_folder to one with more room"):
            shelf.put("member", adapter(100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    shelf.close()


def test_a_server_of_another_user_may_read_whatever_the_umask() -> None:
    before = os.umask(0o077)
    try:
        shelf = Shelf(None)
        put, made = shelf.put("member", adapter()), shelf.folder("weights")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (shelf._folder, put, made)} == {0o755}
    files = list(put.iterdir())
    assert len(files) == 2 and {file.stat().st_mode & 0o777 for file in files} == {0o644}
    shelf.close()
