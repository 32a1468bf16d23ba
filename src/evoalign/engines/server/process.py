# SPDX-License-Identifier: Apache-2.0
"""A server process: on loopback, with a random key, in a process group that ends with this process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evoalign.engines.server.client import LostError
from evoalign.errors import ConfigError, ModelError, cut, plain
from evoalign.version import install

LAUNCHER = Path(__file__).with_name("launcher.py")
PATIENCE = 10.0
"""Seconds that a server has to end after SIGTERM."""
TAIL = 64 * 2**10
"""Bytes at the end of the log that are searched for an error."""
WORDS = 500
"""Characters of the log that an error message quotes."""
POLL = 0.25
"""Seconds between checks of a server that starts."""
LAST_WORDS = 1.0
"""Seconds until the last output of a dead server is in its log."""
_BLAME = re.compile(r"^(?:\S*(?:Error|Exception|Interrupt)\b.*|.*\b(?:error|fatal|killed)\b.*)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Command:
    """How a server is started: a module of the environment `python`, and its arguments."""

    module: str
    arguments: Sequence[str]
    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    hidden: Sequence[str] = ()
    """Words to remove from the log: keys."""


class ServerProcess:
    """A server, from `start` to `stop`. Its output goes to the file `log`."""

    def __init__(self, command: Command, what: str) -> None:
        self.command, self.what = command, what
        if shutil.which(command.python) is None:
            raise ConfigError(
                f"engine.python: {command.python} is not a program; give the Python of the environment that has {what}"
            )
        handle, name = tempfile.mkstemp(prefix="evoalign-", suffix=".log")
        os.close(handle)
        self.log = Path(name)
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., ServerProcess] | None = None
        self._is_named = self._is_kept = False

    @property
    def pid(self) -> int | None:
        """Id of the server's process and of its process group."""
        return None if self._process is None else self._process.pid

    def start(self, is_ready: Callable[[], bool], seconds: float) -> None:
        """Start the server and wait until `is_ready`. Raises LostError with the log's last error where it fails."""
        self.stop()
        order = {
            "module": self.command.module,
            "arguments": list(self.command.arguments),
            "environment": dict(self.command.environment),
            "hidden": list(self.command.hidden),
        }
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [self.command.python, str(LAUNCHER)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C goes to this process, which then ends the server
            )
        self._process = process
        self._finalizer = weakref.finalize(self, _end, process, 0.0)
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it ended at once: `check` raises
                process.stdin.write(json.dumps(order).encode() + b"\n")
                process.stdin.flush()
            deadline = time.monotonic() + seconds
            self.check()
            while not is_ready():
                if time.monotonic() > deadline:
                    reason = f"is not ready after {seconds:g} s (engine.start_timeout){self._last_error()}"
                    raise LostError(f"{self.what} {reason}")
                time.sleep(POLL)
                self.check()
        except BaseException:
            self.stop()
            raise

    def check(self) -> None:
        """Raise LostError where the server has ended, with the log's last error."""
        process = self._process
        if process is None:
            raise LostError(f"{self.what} is not running")
        if process.poll() is not None:
            time.sleep(LAST_WORDS)
            how = f"signal {-process.returncode}" if process.returncode < 0 else f"exit code {process.returncode}"
            raise LostError(f"{self.what} ended ({how}){self._last_error()}")

    def stop(self, patience: float = PATIENCE) -> None:
        """End the whole process group, by SIGTERM and then by SIGKILL."""
        process, self._process = self._process, None
        if process is not None:
            if self._finalizer is not None:
                self._finalizer.detach()
            _end(process, patience)

    def keep_log(self, folder: Path) -> None:
        """Move the log into a folder; the server continues to write to it."""
        if self._is_kept or not self.log.is_file():
            return
        folder.mkdir(parents=True, exist_ok=True)
        count = 1
        while os.path.lexists(to := folder / f"server{count if count > 1 else ''}.log"):  # also a dangling link
            count += 1
        with contextlib.suppress(OSError):  # a full disk costs the log, not the run
            if self.log.stat().st_dev == folder.stat().st_dev:
                self.log.rename(to)
                self.log, self._is_kept = to, True
            elif self._process is None:  # an open file cannot be moved to another disk
                shutil.copyfile(self.log, to)
                self.log.unlink()
                self.log, self._is_kept = to, True

    def drop_log(self) -> None:
        """Delete the log, unless it was moved, or an error message names it."""
        if not (self._is_kept or self._is_named):
            self.log.unlink(missing_ok=True)

    def _last_error(self) -> str:
        """Return the last line of the log that looks like an error, or its last line."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
                lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
        except OSError:
            lines = []
        if not lines:
            return ", without any output"
        self._is_named = True
        found = next((line for line in reversed(lines) if _BLAME.match(line)), lines[-1])
        return f": {plain(cut(found, WORDS))} (its log: {self.log})"


def free_port() -> int:
    """Return a free port of loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def refuse_missing(what: str, extra: str, python: str | None, module: str) -> None:
    """Raise ModelError where the server is not installed in the environment of `python`; None: this one."""
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
    command = [python or sys.executable, "-c", code]
    try:
        missing = subprocess.run(command, capture_output=True, timeout=60).returncode != 0
    except (OSError, subprocess.TimeoutExpired):
        missing = True
    if missing:
        where = f"the environment of {python}" if python else "this environment"
        raise ModelError(
            f"{what} is not installed in {where}: {install(extra)} in a separate environment, and set "
            "engine.python to its Python, or engine.url to a running server"
        )


def _end(process: subprocess.Popen[bytes], patience: float) -> None:
    """Send SIGTERM to the process group, then SIGKILL until it is gone."""
    if patience and process.poll() is None:
        _signal(process.pid, signal.SIGTERM)
        _signal(process.pid, signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    _signal(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    deadline = time.monotonic() + PATIENCE
    while _signal(process.pid, signal.SIGKILL) and time.monotonic() < deadline:
        time.sleep(0.02)


def _signal(group: int, number: int) -> bool:
    """Send a signal to a process group. Returns whether it exists."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
