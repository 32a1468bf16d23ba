# SPDX-License-Identifier: Apache-2.0
"""The connection to a server: one started here or already running; waited for, watched, and recovered when lost.

A server that is started here listens on loopback, has a random key, and is in a process group that ends with this
process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from evoalign.engines.server.client import Client, LostError
from evoalign.engines.server.dialect import Dialect, ServerInfo
from evoalign.engines.server.settings import ServerSettings
from evoalign.errors import ConfigError, EvoalignError, ModelError, cut, plain
from evoalign.http import is_here
from evoalign.version import install

LAUNCHER = Path(__file__).with_name("launcher.py")
GRACE = 10.0
"""Seconds that a server has to end after SIGTERM."""
TAIL = 64 * 2**10
"""Bytes at the end of the log that are searched for an error."""
WORDS = 500
"""Characters of the log that an error message quotes."""
LAST_WORDS = 1.0
"""Seconds until the last output of a dead server is in its log."""
_BLAME = re.compile(r"^(?:\S*(?:Error|Exception|Interrupt)\b.*|.*\b(?:error|fatal|killed)\b.*)$", re.IGNORECASE)
BEGINNING, STARTING = 10.0, 900.0
"""Seconds to wait for a server that should already run, and for one that starts."""
POLL = 0.2
"""Seconds between checks of the server."""
PATIENCE = 4
"""A server that passes its health check counts as hung after this many times `engine.timeout` without a completion."""


class Connection:
    """`command` returns the command that starts the server at a port, with a key, where `settings` name no url.

    `open` it, and `close` it. `about` is the server's description of itself.
    """

    def __init__(self, settings: ServerSettings, dialect: Dialect, command: Callable[[int, str], Command]) -> None:
        self._settings, self._dialect, self._command = settings, dialect, command
        self._client: Client | None = None
        self.process: ServerProcess | None = None
        self._last_reply = self._last_check = 0.0
        self.losses, self._why = 0, ""
        self.about = ServerInfo("")
        self._key = None if settings.key_variable is None else os.environ.get(settings.key_variable)
        if settings.key_variable is not None and not self._key:
            raise ConfigError(
                "engine.key_variable: the environment has no variable with the given name; give the name of the "
                "variable that holds the server's key, never the key itself"
            )

    @property
    def client(self) -> Client:
        if self._client is None:
            raise EvoalignError("the engine is closed")
        return self._client

    @property
    def where(self) -> str:
        """The server's name and address."""
        return f"{self._settings.serves} at {self.client.url}"

    @property
    def is_ours(self) -> bool:
        """Whether the server is started here."""
        return self._settings.url is None

    @property
    def sees_files(self) -> bool:
        """Whether the server reads files of this process: it is on this machine, or a shared folder is named."""
        url = self._settings.url
        return url is None or self._settings.adapter_folder is not None or is_here(url)

    def open(self) -> None:
        """Connect. Raises ModelError where the server does not become ready."""
        try:
            self._reach()
        except LostError as error:
            raise ModelError(str(error)) from error

    def recover(self, error: LostError, check: Callable[[], None]) -> None:
        """Connect again after a loss, and `check` that it is the right server.

        Raises EvoalignError where it was lost too often, or does not come back.
        """
        while True:
            self.losses += 1
            if self.losses > self._settings.restarts:
                raise EvoalignError(
                    f"{error}; the server was lost {self.losses} times (engine.restarts {self._settings.restarts})"
                ) from error
            try:
                self._reach()
                check()
                return
            except LostError as again:
                error = again
            except ModelError as failed:
                raise EvoalignError(f"{error}; {failed}") from error

    def _reach(self) -> None:
        settings = self._settings
        if self.is_ours:
            self._launch()
        else:
            if self._client is None:
                self._client = self._new_client(str(settings.url), self._key)
            seconds = settings.start_timeout or (STARTING if self.about.version else BEGINNING)
            deadline = time.monotonic() + seconds
            while not self.is_ready():
                if time.monotonic() > deadline:
                    raise ModelError(
                        f"no {settings.serves} answers at {self.client.url} (waited {seconds:g} s, "
                        f"engine.start_timeout; {self._why}); start it, or set engine.url"
                    )
                time.sleep(POLL)
        self.about = self.client.call(self._dialect.about(self.client))

    def _launch(self) -> None:
        """Start the server, at a new port and with a new key. Raises LostError."""
        if self._client is not None:
            self._client.close()
        port, key = free_port(), secrets.token_hex(16)
        self._client = self._new_client(f"http://127.0.0.1:{port}", key)
        command = self._command(port, key)
        if self.process is None:
            self.process = ServerProcess(command, f"the {self._settings.serves} server")
        self.process.command = command
        self.process.start(self.is_ready, self._settings.start_timeout or STARTING)

    def _new_client(self, url: str, key: str | None) -> Client:
        return Client(url, key, ca_file=self._settings.ca_file, concurrency=self._settings.concurrency)

    def is_ready(self) -> bool:
        """Return whether the server replies and its model is loaded."""
        return self.client.call(self._check_ready())

    async def _check_ready(self) -> bool:
        try:
            is_ready = await self._dialect.is_ready(self.client)
        except LostError as error:
            self._why = str(error).removeprefix(self.client.url)
            return False
        self._why = "it reports that it is not ready"
        return is_ready

    # --- while completions are in flight -----------------------------------------------------------------------------

    def received(self) -> None:
        """Note that the server has replied, or that waiting begins."""
        self._last_reply = self._last_check = time.monotonic()

    async def watch(self) -> None:
        """Run until cancelled. Raises LostError where the server dies, or completes nothing for too long."""
        timeout = self._settings.timeout
        while True:
            await asyncio.sleep(POLL)
            if self.process is not None:
                self.process.check()
            if time.monotonic() - self._last_check <= timeout:
                continue
            self._last_check = time.monotonic()
            if not await self._check_ready():
                raise LostError(f"{self.where} hangs: no answer for {timeout:g} s")
            silent = time.monotonic() - self._last_reply
            if silent > PATIENCE * timeout:
                raise LostError(
                    f"{self.where} passes its health check but has completed nothing for {silent:.0f} s; where "
                    "completions take this long, raise engine.timeout"
                )

    # --- the end -----------------------------------------------------------------------------------------------------

    def keep_log(self, folder: Path) -> None:
        """Move the log of a server that was started here into a folder."""
        if self.process is not None:
            self.process.keep_log(folder)

    def close(self, logs: Path | None) -> None:
        """End the server that was started here, with all its processes. `logs`: folder to keep its log in."""
        client, process = self._client, self.process
        self._client = self.process = None
        if client is not None:
            client.close()
        if process is not None:
            process.stop()
            if logs is not None:
                process.keep_log(logs)
            process.drop_log()


# --- the process -----------------------------------------------------------------------------------------------------


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
                process.stdin.write(json.dumps(asdict(self.command)).encode() + b"\n")
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

    def stop(self, patience: float = GRACE) -> None:
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
    deadline = time.monotonic() + GRACE
    while _signal(process.pid, signal.SIGKILL) and time.monotonic() < deadline:
        time.sleep(0.02)


def _signal(group: int, number: int) -> bool:
    """Send a signal to a process group. Returns whether it exists."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
