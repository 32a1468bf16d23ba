# SPDX-License-Identifier: Apache-2.0
"""A server that is started here: on loopback, with keys of its own, in a process group that ends with this process."""

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
from typing import IO

from evoalign.engines.server.errors import LostError
from evoalign.errors import ConfigError, ModelError, cut, plain
from evoalign.version import install

LAUNCHER = Path(__file__).with_name("launcher.py")
PATIENCE = 10.0
"""Seconds that a server has to end by itself."""
TAIL = 64 * 2**10
"""Bytes of the log's end in which the reason is looked for."""
WORDS = 500
POLL = 0.25
LAST_WORDS = 1.0
"""Seconds after which all that a server said before it died is in its log."""
_BLAME = re.compile(r"^(?:\S*(?:Error|Exception|Interrupt)\b.*|.*\b(?:error|fatal|killed)\b.*)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Command:
    """How a server is started: a module of the environment `python`, with what it is told."""

    module: str
    arguments: Sequence[str]
    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    hidden: Sequence[str] = ()
    """What of all that no log is to have: keys."""


class ServerProcess:
    """A server, from `start` to `stop`. `log` is where its output goes; `is_ready` asks it whether it serves."""

    def __init__(self, command: Command, what: str) -> None:
        self.command, self.what = command, what
        if shutil.which(command.python) is None:
            raise ConfigError(f"engine.python: {command.python} is no program; give the Python that has {what}")
        handle, name = tempfile.mkstemp(prefix="evoalign-", suffix=".log")
        os.close(handle)
        self.log = Path(name)
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., ServerProcess] | None = None
        self._is_told = self._is_kept = False

    @property
    def pid(self) -> int | None:
        """Of the server, whose process group has the same number."""
        return None if self._process is None else self._process.pid

    def start(self, is_ready: Callable[[], bool], seconds: float) -> None:
        """Start it and wait until it is ready. Raises ModelError with the log's last error where it does not come."""
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
                start_new_session=True,  # Ctrl-C is for this process, which then ends the server in order
            )
        self._process = process
        self._finalizer = weakref.finalize(self, _end, process, 0.0)
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it ended at once: told below
                process.stdin.write(json.dumps(order).encode() + b"\n")
                process.stdin.flush()
            self._wait(is_ready, seconds)
        except BaseException:
            self.stop()
            raise

    def _wait(self, is_ready: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            self.check()
            if is_ready():
                return
            if time.monotonic() > deadline:
                raise LostError(f"{self.what} is not ready after {seconds:g} s (engine.start_timeout){self._said()}")
            time.sleep(POLL)

    def check(self) -> None:
        """Raise LostError where the server has ended, with the log's last error."""
        process = self._process
        if process is None:
            raise LostError(f"{self.what} does not run")
        if process.poll() is not None:
            time.sleep(LAST_WORDS)
            how = f"signal {-process.returncode}" if process.returncode < 0 else f"exit code {process.returncode}"
            raise LostError(f"{self.what} ended ({how}){self._said()}")

    def stop(self, patience: float = PATIENCE) -> None:
        """End the whole process group: asked first, then killed. Nothing of it is left."""
        process, self._process = self._process, None
        if process is not None:
            if self._finalizer is not None:
                self._finalizer.detach()
            _end(process, patience)

    def keep_log(self, folder: Path) -> None:
        """Let the log lie there from now on; the server goes on writing to it."""
        if self._is_kept or not self.log.is_file():
            return
        folder.mkdir(parents=True, exist_ok=True)
        count = 1
        while os.path.lexists(to := folder / f"server{count if count > 1 else ''}.log"):  # a link to nothing, too
            count += 1
        with contextlib.suppress(OSError):  # a full disk costs the log, and no run
            if self.log.stat().st_dev == folder.stat().st_dev:
                self.log.rename(to)
                self.log, self._is_kept = to, True
            elif self._process is None:  # what is open elsewhere cannot be moved to another disk
                shutil.copyfile(self.log, to)
                self.log.unlink()
                self.log, self._is_kept = to, True

    def drop_log(self) -> None:
        """Take the log away, unless it is kept, or an error has said where it is."""
        if not (self._is_kept or self._is_told):
            self.log.unlink(missing_ok=True)

    def _said(self) -> str:
        """The last line of the log that looks like an error, or its last line."""
        try:
            with self.log.open("rb") as file:
                _seek_tail(file)
                lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
        except OSError:
            lines = []
        if not lines:
            return ", and says nothing"
        self._is_told = True
        found = next((line for line in reversed(lines) if _BLAME.match(line)), lines[-1])
        return f": {plain(cut(found, WORDS))} (its log: {self.log})"


def free_port() -> int:
    """A port of loopback that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def refuse_missing(what: str, extra: str, python: str | None, module: str) -> None:
    """Raise ModelError where the server is not installed in the environment that is to have it."""
    command = [
        python or sys.executable,
        "-c",
        f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)",
    ]
    try:
        missing = subprocess.run(command, capture_output=True, timeout=60).returncode != 0
    except (OSError, subprocess.TimeoutExpired):
        missing = True
    if missing:
        where = f"the environment of {python}" if python else "this environment"
        raise ModelError(
            f"{what} is not installed in {where}: {install(extra)} in one of its own, and set "
            "engine.python to the Python there, or engine.url to a server that runs"
        )


def _seek_tail(file: IO[bytes]) -> None:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - TAIL))


def _end(process: subprocess.Popen[bytes], patience: float) -> None:
    """SIGTERM to the group, then SIGKILL, until nobody of it is left."""
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
    """Whether the group is there."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
