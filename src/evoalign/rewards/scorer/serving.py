# SPDX-License-Identifier: Apache-2.0
"""`evoalign score serve`: the service at an address, until it is told to stop."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager

import uvicorn

from evoalign.config.scorer import ScorerConfig
from evoalign.errors import ConfigError
from evoalign.http import is_loopback
from evoalign.rewards.scorer.guard import NAMES, Guard
from evoalign.rewards.scorer.local import Local
from evoalign.rewards.scorer.service import Limits, Service

SHORTEST_TOKEN = 16
CONNECTIONS = 1024
"""At once; more are answered 503."""


def serve(
    config: ScorerConfig, limits: Limits, *, host: str, port: int, token_env: str | None, tell: Callable[[str], None]
) -> None:
    """Load the models, answer until SIGTERM or SIGINT, and finish what is queued then.

    `tell` is given one line when all is ready. Raises ConfigError, ModelError.
    """
    token = None if token_env is None else token_of(token_env)
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"--host {host} is open to other machines: give --token-env, the name of an environment variable that "
            "holds a token, or keep to 127.0.0.1"
        )
    with _bound(host, port) as listening:
        service = Service(Local(config), limits)
        names = NAMES if is_loopback(host) else None
        guarded = Guard(service.app, token=token, names=names, max_body=limits.max_body)
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{listening.getsockname()[1]}"
        settings = uvicorn.Config(
            guarded, log_config=None, log_level="warning", access_log=False, server_header=False, proxy_headers=False,
            http="h11", loop="asyncio", ws="none", lifespan="on", limit_concurrency=CONNECTIONS,
        )  # fmt: skip
        with _quiet_end():
            _Server(settings, service, lambda: tell(address)).run(sockets=[listening])


def token_of(variable: str) -> str:
    """The token in an environment variable. Raises ConfigError, which does not say it."""
    token = os.environ.get(variable, "")
    if len(token) < SHORTEST_TOKEN or not (token.isascii() and token.isprintable() and " " not in token):
        raise ConfigError(
            f"token_env {variable}: the environment variable of that name has to hold a token of at least "
            f"{SHORTEST_TOKEN} letters and figures, such as `openssl rand -hex 16` makes"
        )
    return token


class _Server(uvicorn.Server):
    """Says when it is ready, and passes the word to end on to what is queued."""

    def __init__(self, config: uvicorn.Config, service: Service, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._service, self._ready = service, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.end()
        await super().shutdown(sockets)


@contextmanager
def _bound(host: str, port: int) -> Generator[socket.socket]:
    """A socket at the address, before the models are loaded, so that a port in use is said at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--host {host} is no address here ({error})") from None
    with listening:
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--port {port} cannot be used ({error}); choose another, or 0 for any") from None
        yield listening


@contextmanager
def _quiet_end() -> Generator[None]:
    """uvicorn raises the signal again that ended it: that was in order, and is no failure."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, _pass) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _pass(_: int, __: object) -> None:
    """Nothing."""
