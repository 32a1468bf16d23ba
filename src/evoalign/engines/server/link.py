# SPDX-License-Identifier: Apache-2.0
"""A server and the way to it: started here or running already, waited for, and had again where it was lost."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from evoalign.engines.server.client import Client
from evoalign.engines.server.dialect import Dialect, Server
from evoalign.engines.server.errors import LostError
from evoalign.engines.server.process import Command, ServerProcess, free_port
from evoalign.engines.server.settings import ServerSettings
from evoalign.errors import ConfigError, EvoalignError, ModelError
from evoalign.http import is_here

BEGINNING, STARTING = 10.0, 900.0
"""Seconds that are waited for a server that should run already, and for one that starts."""
POLL = 0.2
"""Seconds between looks at whether a server is there."""
PATIENCE = 4
"""After so many times `engine.timeout` without an answer a server counts as hung that says it is well."""


class Link:
    """`command` makes the words that start the server, of its port and key, where `settings` name none that runs.

    `open` it, and `close` it. `about` is what the server says of itself.
    """

    def __init__(self, settings: ServerSettings, dialect: Dialect, command: Callable[[int, str], Command]) -> None:
        self._settings, self._dialect, self._command = settings, dialect, command
        self._client: Client | None = None
        self._process: ServerProcess | None = None
        self._silent_since, self._losses, self._why = 0.0, 0, ""
        self.about = Server("")
        self._key = _key_of(settings)

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
        """Whether the server is started here, and ends with this."""
        return self._settings.url is None

    @property
    def sees_files(self) -> bool:
        """Whether the server is on this machine, or a folder is named that both see."""
        url = self._settings.url
        return url is None or self._settings.adapter_folder is not None or is_here(url)

    def open(self) -> None:
        """Raises ModelError where the server does not come."""
        try:
            self._reach()
        except LostError as error:
            raise ModelError(str(error)) from error

    def recover(self, error: LostError, meet: Callable[[], None]) -> None:
        """After a loss: the server is there again, and `meet` has found that it is the right one.

        Raises EvoalignError where it was lost too often, or does not come back.
        """
        while True:
            self._losses += 1
            if self._losses > self._settings.restarts:
                raise EvoalignError(
                    f"{error}; the server was lost {self._losses} times (engine.restarts {self._settings.restarts})"
                ) from error
            try:
                self._reach()
                meet()
            except LostError as again:
                error = again
            except ModelError as gone:
                raise EvoalignError(f"{error}; {gone}") from error
            else:
                return

    def _reach(self) -> None:
        if self.is_ours:
            self._launch()
        else:
            if self._client is None:
                self._client = self._connected(str(self._settings.url), self._key)
            self._wait(self._settings.start_timeout or (STARTING if self.about.version else BEGINNING))
        self.about = self.client.call(self._dialect.about(self.client))

    def _launch(self) -> None:
        """Start the server, at a new port and with a new key. Raises LostError."""
        if self._client is not None:
            self._client.close()
        port, key = free_port(), secrets.token_hex(16)
        self._client = self._connected(f"http://127.0.0.1:{port}", key)
        command = self._command(port, key)
        if self._process is None:
            self._process = ServerProcess(command, f"the {self._settings.serves} server")
        self._process.command = command
        self._process.start(self._is_ready, self._settings.start_timeout or STARTING)

    def _connected(self, url: str, key: str | None) -> Client:
        return Client(url, key, ca_file=self._settings.ca_file, concurrency=self._settings.concurrency)

    def _is_ready(self) -> bool:
        try:
            is_ready = self.client.call(self._dialect.is_ready(self.client))
        except LostError as error:
            self._why = str(error).removeprefix(self.client.url)
            return False
        self._why = "it says that it is not ready"
        return is_ready

    def _wait(self, seconds: float) -> None:
        """Until a server at `url` is ready. Raises ModelError."""
        deadline = time.monotonic() + seconds
        while not self._is_ready():
            if time.monotonic() > deadline:
                raise ModelError(
                    f"no {self._settings.serves} answers at {self.client.url} (waited {seconds:g} s, "
                    f"engine.start_timeout; {self._why}); start it, or set engine.url"
                )
            time.sleep(POLL)

    # --- while answers are owed --------------------------------------------------------------------------------------

    def heard(self) -> None:
        """An answer has come, or the wait for answers begins."""
        self._silent_since = self._asked = time.monotonic()

    def silent(self) -> None:
        """No answer has come for now. Raises LostError where the server has died, or has said nothing for too long."""
        if self._process is not None:
            self._process.check()
        now, timeout = time.monotonic(), self._settings.timeout
        if now - self._asked <= timeout:
            return
        self._asked = now
        if not self._is_ready():
            raise LostError(f"{self.where} hangs: no answer for {timeout:g} s")
        if now - self._silent_since > PATIENCE * timeout:
            raise LostError(
                f"{self.where} says that it is well, and has answered nothing for {now - self._silent_since:.0f} s; "
                "where its answers take as long as that, raise engine.timeout"
            )

    # --- the end -----------------------------------------------------------------------------------------------------

    def keep_log(self, folder: Path) -> None:
        """Have the log of a server that is ours lie in a folder."""
        if self._process is not None:
            self._process.keep_log(folder)

    def close(self, logs: Path | None) -> None:
        """End the server that was started here, with all its processes. `logs`: where its log is to be kept."""
        client, process = self._client, self._process
        self._client = self._process = None
        if client is not None:
            client.close()
        if process is not None:
            process.stop()
            if logs is not None:
                process.keep_log(logs)
            process.drop_log()


def _key_of(settings: ServerSettings) -> str | None:
    name = settings.key_variable
    if name is None:
        return None
    if not os.environ.get(name):
        raise ConfigError(
            "engine.key_variable: the environment has no variable of that name; it takes the name of the variable that "
            "holds the server's key, never the key itself"
        )
    return os.environ[name]
