# SPDX-License-Identifier: Apache-2.0
"""A server that is started here: ready or told why not, without keys in its log, and never left behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from evoalign.engines.server.errors import LostError
from evoalign.engines.server.process import Command, ServerProcess, free_port, refuse_missing
from evoalign.errors import ConfigError, ModelError
from evoalign.version import install

TREE = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("serves with", *sys.argv[1:], flush=True)
sys.stderr.write("ValueError: no room for " + sys.argv[1] + "\\n") if sys.argv[2:] == ["fail"] else time.sleep(600)
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with a child of its own, to be run as a module."""
    (tmp_path / "own_server.py").write_text(TREE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def lives(group: int) -> bool:
    """Whether a process of the group is there that is no zombie."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                return True
    return False


def gone(group: int) -> bool:
    deadline = time.monotonic() + 30
    while lives(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not lives(group)


def started(*words: str) -> ServerProcess:
    process = ServerProcess(Command("own_server", words, hidden=["the-key"]), "the server")
    process.start(lambda: "serves" in process.log.read_text(), 60)
    return process


def test_it_is_ready_and_ends_with_all_its_children() -> None:
    process = started("a", "the-key")
    group = process.pid
    assert group is not None and lives(group)
    assert process.log.read_text() == "serves with a [key]\n", "no log has a key"
    process.check()
    process.stop()
    assert not lives(group) and process.pid is None
    process.drop_log()
    assert not process.log.exists()


def test_one_that_has_stopped_is_ended_too() -> None:
    process = started("a")
    group = process.pid
    assert group is not None
    os.killpg(group, signal.SIGSTOP)
    process.stop(patience=0.5)
    assert not lives(group)
    process.drop_log()


def test_a_start_that_fails_says_the_last_error_and_leaves_its_log() -> None:
    process = ServerProcess(Command("own_server", ["weights", "fail"]), "the server")
    with pytest.raises(LostError, match=r"ended \(exit code 0\): ValueError: no room for weights \(its log: "):
        process.start(lambda: False, 60)
    process.drop_log()
    assert process.log.is_file(), "the message names it"
    process.log.unlink()


def test_one_that_does_not_come_is_ended_at_the_deadline() -> None:
    process = ServerProcess(Command("own_server", ["a"]), "the server")
    with pytest.raises(LostError, match=r"the server is not ready after 2 s \(engine.start_timeout\): serves with a"):
        process.start(lambda: False, 2)
    assert process.pid is None
    process.log.unlink()


def test_one_that_dies_is_told_and_its_log_is_where_that_says(tmp_path: Path) -> None:
    process = started("a")
    assert process.pid is not None
    os.killpg(process.pid, signal.SIGKILL)
    with pytest.raises(LostError, match="the server ended \\(signal 9\\)") as said:
        while True:
            process.check()
            time.sleep(0.05)
    process.stop()
    process.drop_log()
    log = Path(str(said.value).rpartition("(its log: ")[2].rstrip(")"))
    assert log.read_text().startswith("serves with a")
    process.keep_log(tmp_path / "logs")
    process.drop_log()
    assert not log.exists() and (tmp_path / "logs/server.log").is_file(), "a run has it with its own"


@pytest.mark.parametrize("stopped", [False, True])
def test_it_ends_where_whoever_started_it_is_killed(stopped: bool) -> None:
    """Also where a signal has stopped the server; and not at the end of the thread that started it."""
    code = """
        import threading, time
        from evoalign.engines.server.process import Command, ServerProcess
        process = ServerProcess(Command("own_server", ["a"]), "the server")
        thread = threading.Thread(target=process.start, args=(lambda: "serves" in process.log.read_text(), 60))
        thread.start(); thread.join()
        time.sleep(1.0)
        process.check()
        print(process.pid, process.log, flush=True)
        time.sleep(600)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    group, log = parent.stdout.readline().split()
    assert lives(int(group))
    if stopped:
        os.killpg(int(group), signal.SIGSTOP)
    parent.kill()
    parent.wait()
    assert gone(int(group))
    Path(log).unlink()


def test_the_log_comes_to_lie_with_the_run(tmp_path: Path) -> None:
    process = started("a")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/server.log").write_text("of before")
    process.keep_log(tmp_path / "logs")
    process.stop()
    process.keep_log(tmp_path / "logs")
    process.drop_log()
    assert (tmp_path / "logs/server2.log").read_text().startswith("serves with a")
    assert (tmp_path / "logs/server.log").read_text() == "of before"


def test_a_free_port_is_free() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))


def test_what_is_not_installed_is_told_with_where() -> None:
    with pytest.raises(
        ModelError, match=re.escape(f"SGLang is not installed in this environment: {install('sglang')}")
    ):
        refuse_missing("SGLang", "sglang", None, "no_such_module_at_all")
    with pytest.raises(ModelError, match="in the environment of /no/python"):
        refuse_missing("SGLang", "sglang", "/no/python", "json")
    refuse_missing("SGLang", "sglang", sys.executable, "json")
    with pytest.raises(ConfigError, match=r"engine\.python: /no/python is no program"):
        ServerProcess(Command("json", [], python="/no/python"), "the server")
