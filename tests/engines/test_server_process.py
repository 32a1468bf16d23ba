# SPDX-License-Identifier: Apache-2.0
"""`ServerProcess`: ready or an error with the reason, no keys in the log, and no process left behind."""

import os
import re
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
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
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def process_of(*words, **more):
    return ServerProcess(Command("own_server", words, **more), "the server")


@pytest.fixture
def started():
    process = process_of("a", "the-key", hidden=["the-key"])
    process.start(lambda: "serves" in process.log.read_text(), 60)
    yield process
    process.stop()
    process.drop_log()


def test_server_starts_and_ends_with_all_its_children(started):
    group = started.pid
    assert group is not None and lives(group)
    assert started.log.read_text() == "serves with a [key]\n", "no log has a key"
    started.check()
    started.stop()
    assert not lives(group) and started.pid is None
    started.drop_log()
    assert not started.log.exists()


def test_stop_ends_a_suspended_server(started):
    group = started.pid
    os.killpg(group, signal.SIGSTOP)
    started.stop(patience=0.5)
    assert not lives(group)


@pytest.mark.parametrize(
    ("words", "seconds", "message"),
    [
        (["weights", "fail"], 60, r"exit code 0.*ValueError: no room for weights \(its log: "),
        (["a"], 2, r"2 s \(engine.start_timeout\): serves with a"),
    ],
)
def test_start_reports_why_no_server_is_ready_and_keeps_its_log(words, seconds, message):
    process = process_of(*words)

    def is_ready():
        while seconds < 60 and "serves" not in process.log.read_text():
            time.sleep(0.01)
        return False

    with pytest.raises(LostError, match=message):
        process.start(is_ready, seconds)
    assert process.pid is None
    process.drop_log()
    assert process.log.is_file(), "the message names the log"
    process.log.unlink()


def test_check_reports_a_dead_server_and_the_place_of_its_log(started, tmp_path):
    os.killpg(started.pid, signal.SIGKILL)
    with pytest.raises(LostError, match="signal 9") as said:
        while True:
            started.check()
            time.sleep(0.05)
    started.stop()
    started.drop_log()
    log = Path(str(said.value).rpartition("(its log: ")[2].rstrip(")"))
    assert log.read_text().startswith("serves with a")
    started.keep_log(tmp_path / "logs")
    started.drop_log()
    assert not log.exists() and (tmp_path / "logs/server.log").is_file(), "it was moved into the run"


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.first("True", others="slow")
def test_server_ends_when_its_parent_is_killed(stopped):
    """Also a suspended one; and not when the thread ends that started it."""
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        try:
            process = process_of("a")
            thread = threading.Thread(target=process.start, args=(lambda: "serves" in process.log.read_text(), 60))
            thread.start()
            thread.join()
            time.sleep(1.0)
            process.check()
            os.write(write, f"{process.pid} {process.log}".encode())
            time.sleep(600)
        finally:
            os._exit(1)
    os.close(write)
    try:
        group, log = os.read(read, 4096).decode().split()
        assert lives(int(group))
        if stopped:
            os.killpg(int(group), signal.SIGSTOP)
    finally:
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        os.close(read)
    deadline = time.monotonic() + 30
    while lives(int(group)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    Path(log).unlink()


def test_keep_log_moves_the_log_without_overwriting(started, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/server.log").write_text("of before")
    started.keep_log(tmp_path / "logs")
    started.stop()
    started.keep_log(tmp_path / "logs")
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
