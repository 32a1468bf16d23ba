# SPDX-License-Identifier: Apache-2.0
"""`AdapterStore`: deletes folders of ended processes, and no others."""

import os
import resource
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

from evoalign.engines.server import adapters
from evoalign.engines.server.adapters import AdapterStore, PeftAdapter
from evoalign.errors import ModelError


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    monkeypatch.setattr(adapters, "IN_MEMORY", tmp_path)
    return tmp_path


def test_folders_of_killed_processes_are_deleted_and_nothing_else(memory):
    (memory / "evoalign-adapters-file").touch()
    (memory / "evoalign-adapters-link").symlink_to(memory)
    (memory / "evoalign-adapters-unmarked").mkdir()
    (memory / "evoalign-bench").mkdir()
    before = {path.name for path in memory.iterdir()}
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        store = AdapterStore(None)
        (store.folder("member") / "weights").write_bytes(b"0")
        os.write(write, str(store._folder).encode())
        time.sleep(60)
        os._exit(0)
    try:
        left = Path(os.read(read, 4096).decode())
        first = AdapterStore(None)
        assert (left / "member" / "weights").exists(), "its process lives"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read)
        os.close(write)
    with closing(first), closing(AdapterStore(None)):
        assert not left.exists()
        assert first._folder.exists(), "of this process, and in use"
    assert {path.name for path in memory.iterdir()} == before


def test_nothing_is_deleted_in_a_folder_of_the_user(memory):
    """It may be on a disk without locks."""
    left = memory / "evoalign-adapters-left"
    left.mkdir()
    (left / adapters.MARK).touch()
    AdapterStore(str(memory)).close()
    assert left.exists()
    AdapterStore(None).close()
    assert not left.exists()


@pytest.mark.parametrize("name", ["evoalign-x", "evoalign-adapters-x"])
def test_a_folder_in_memory_that_was_given_keeps_its_adapters(memory, name):
    (memory / name).mkdir()
    run = AdapterStore(str(memory / name))
    folder = run.folder("member")
    AdapterStore(None).close()
    assert folder.exists()


@pytest.mark.parametrize("where", ["tempfile.mkdtemp", "evoalign.engines.server.adapters.locked"])
def test_a_folder_survives_deletion_by_another_process_while_it_is_created(memory, where, monkeypatch):
    """Right after it is created, and right before it is locked."""
    swept, creates = [], where.endswith("mkdtemp")
    own = adapters.tempfile.mkdtemp if creates else adapters.locked

    def sweeping(*given, **words):
        found = own(*given, **words) if creates else None
        if not swept:
            swept.append(True)
            adapters._delete_orphans(memory)
        return found if creates else own(*given, **words)

    monkeypatch.setattr(where, sweeping)
    store = AdapterStore(str(memory))
    assert swept and store.folder("member").is_dir()
    AdapterStore(None).close()
    assert store._folder.is_dir(), "it is locked"
    store.close()


def adapter(size=1):
    return PeftAdapter({"r": 1}, {"a": torch.zeros(size)})


def test_put_names_the_setting_where_the_disk_is_full():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with closing(AdapterStore(None)) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
        try:
            with pytest.raises(ModelError, match=r"engine\.adapter_folder"):
                store.put("member", adapter(100_000))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_adapters_are_readable_for_other_users_whatever_the_umask():
    before = os.umask(0o077)
    try:
        store = AdapterStore(None)
        put, made = store.put("member", adapter()), store.folder("weights")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (store._folder, put, made)} == {0o755}
    files = list(put.iterdir())
    assert len(files) == 2 and {file.stat().st_mode & 0o777 for file in files} == {0o644}
    store.close()
