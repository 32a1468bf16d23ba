# SPDX-License-Identifier: Apache-2.0
"""The connection to a server: one started here or already running; waited for, watched, and recovered when lost."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from evoalign.engines.server.client import Client, LostError
from evoalign.engines.server.dialect import Dialect, ServerInfo
from evoalign.engines.server.process import Command, ServerProcess, free_port
from evoalign.engines.server.settings import ServerSettings
from evoalign.errors import ConfigError, EvoalignError, ModelError
from evoalign.http import is_here

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
