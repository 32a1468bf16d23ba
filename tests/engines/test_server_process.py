# SPDX-License-Identifier: Apache-2.0
"""`ServerProcess`: ready or an error with the reason, no keys in the log, and no process left behind."""

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

from evoalign.engines.server.client import LostError
from evoalign.engines.server.connection import Command, ServerProcess, free_port, refuse_missing
from evoalign.errors import ConfigError, ModelError
from evoalign.version import install

TREE = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("serves with", *sys.argv[1:], flush=True)
sys.stderr.write("ValueError: no room for " + sys.argv[1] + "\\n") if sys.argv[2:] == ["fail"] else time.sleep(600)
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    """Write a server with a child process, to be run as a module."""
    (tmp_path / "own_server.py").write_text(TREE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def lives(group):
    """Return whether the group has a process that is not a zombie."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                return True
    return False


def gone(group):
    deadline = time.monotonic() + 30
    while lives(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not lives(group)


def started(*words):
    process = ServerProcess(Command("own_server", words, hidden=["the-key"]), "the server")
    process.start(lambda: "serves" in process.log.read_text(), 60)
    return process


def test_server_starts_and_ends_with_all_its_children():
    process = started("a", "the-key")
    group = process.pid
    assert group is not None and lives(group)
    assert process.log.read_text() == "serves with a [key]\n", "no log has a key"
    process.check()
    process.stop()
    assert not lives(group) and process.pid is None
    process.drop_log()
    assert not process.log.exists()


def test_stop_ends_a_suspended_server():
    process = started("a")
    group = process.pid
    assert group is not None
    os.killpg(group, signal.SIGSTOP)
    process.stop(patience=0.5)
    assert not lives(group)
    process.drop_log()


def test_start_reports_the_last_error_and_keeps_its_log():
    process = ServerProcess(Command("own_server", ["weights", "fail"]), "the server")
    with pytest.raises(LostError, match=r"exit code 0.*ValueError: no room for weights \(its log: "):
        process.start(lambda: False, 60)
    process.drop_log()
    assert process.log.is_file(), "the message names the log"
    process.log.unlink()


def test_start_ends_a_server_that_is_not_ready_at_the_deadline():
    process = ServerProcess(Command("own_server", ["a"]), "the server")
    with pytest.raises(LostError, match=r"2 s \(engine.start_timeout\): serves with a"):
        process.start(lambda: False, 2)
    assert process.pid is None
    process.log.unlink()


def test_check_reports_a_dead_server_and_the_place_of_its_log(tmp_path):
    process = started("a")
    assert process.pid is not None
    os.killpg(process.pid, signal.SIGKILL)
    with pytest.raises(LostError, match="signal 9") as said:
        while True:
            process.check()
            time.sleep(0.05)
    process.stop()
    process.drop_log()
    log = Path(str(said.value).rpartition("(its log: ")[2].rstrip(")"))
    assert log.read_text().startswith("serves with a")
    process.keep_log(tmp_path / "logs")
    process.drop_log()
    assert not log.exists() and (tmp_path / "logs/server.log").is_file(), "it was moved into the run"


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.first("True")
def test_server_ends_when_its_parent_is_killed(stopped):
    """Also a suspended one; and not when the thread ends that started it."""
    code = """
        import threading, time
        from evoalign.engines.server.connection import Command, ServerProcess
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


def test_keep_log_moves_the_log_without_overwriting(tmp_path):
    process = started("a")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/server.log").write_text("of before")
    process.keep_log(tmp_path / "logs")
    process.stop()
    process.keep_log(tmp_path / "logs")
    process.drop_log()
    assert (tmp_path / "logs/server2.log").read_text().startswith("serves with a")
    assert (tmp_path / "logs/server.log").read_text() == "of before"


def test_free_port_can_be_bound():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))


def test_refuse_missing_names_the_environment_and_the_installation():
    with pytest.raises(ModelError, match=re.escape(install("sglang"))):
        refuse_missing("SGLang", "sglang", None, "no_such_module_at_all")
    with pytest.raises(ModelError, match="/no/python"):
        refuse_missing("SGLang", "sglang", "/no/python", "json")
    refuse_missing("SGLang", "sglang", sys.executable, "json")
    with pytest.raises(ConfigError, match=r"engine\.python: /no/python"):
        ServerProcess(Command("json", [], python="/no/python"), "the server")
