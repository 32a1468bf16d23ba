# SPDX-License-Identifier: Apache-2.0
"""One model as a server, for evaluation and demos: the mean of a run, one of its members, or any other model."""

from __future__ import annotations

import asyncio
import queue
import secrets
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from evoalign.engines import Answering
from evoalign.episodes import derive_seed, new_session
from evoalign.errors import ConfigError
from evoalign.gateway import open_server
from evoalign.gateway.batches import Asked, answered
from evoalign.gateway.chat import Answer, Chat
from evoalign.http import is_loopback
from evoalign.tokens import Tokens
from evoalign.types import Member, Plan, Sampling

MOST_REQUESTS = 256
"""Most requests at a time; a client with more gets status 429 and tries again."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model in an engine, to be served."""

    what: str
    """The model in words."""
    engine: Answering
    tokens: Tokens
    plan: Plan
    member: Member
    """The member of the plan that answers."""
    sampling: Sampling
    """Settings of requests that leave them open."""
    seed: int
    is_serial: bool
    """Whether the engine gets one completion at a time, so that a text depends on no other request."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen. `token_env` is the environment variable with the key of clients; None: a random key."""

    host: str = "127.0.0.1"
    port: int = 0
    token_env: str | None = None
    certfile: Path | None = None
    keyfile: Path | None = None


class _Backend:
    """Takes requests to `events`; see `evoalign.gateway.chat.Backend`. The server's token is the whole key."""

    def __init__(self) -> None:
        self.events, self._model, self._count = queue.SimpleQueue[Asked | None](), None, 0
        self._session = new_session()

    def serve(self, model: Model) -> None:
        """Take requests for this model, which the caller's thread answers."""
        self._model = model

    def knows(self, key: str) -> bool:
        return not key

    async def complete(self, key: str, chat: Chat) -> list[Answer]:
        assert self._model is not None
        loop, place = asyncio.get_running_loop(), self._count
        self._count += 1
        asked = Asked(
            member=self._model.member,
            chat=chat,
            sampling=self._model.sampling,
            most=None,
            seed=derive_seed(self._model.seed, "request", place),
            session=self._session,
            order=(place,),
            loop=loop,
            reply=loop.create_future(),
        )
        self.events.put(asked)
        return await asked.reply

    async def score(self, key: str, scores: Mapping[str, float]) -> None:
        """Accept the score of a harness, which nothing is trained on."""


def serve(
    load: Callable[[], AbstractContextManager[Model]], address: Address, tell: Callable[[Model, str, str | None], None]
) -> None:
    """Serve a model until an exception, such as KeyboardInterrupt, ends it.

    Calls `tell` when ready, with the model, the base address of OpenAI's clients, and the key if it was made here. The
    port is opened before the model is loaded. Raises ConfigError.
    """
    made = None if address.token_env else f"sk-{secrets.token_urlsafe(24)}"
    if not is_loopback(address.host) and not (address.token_env and address.certfile and address.keyfile):
        raise ConfigError(
            f"--host {address.host} is reachable from other machines: set --token-env, --certfile and --keyfile, or "
            "use 127.0.0.1"
        )
    backend = _Backend()
    server = open_server(
        backend,
        "evoalign gateway",
        address.host,
        address.port,
        token=made or _token(address),
        certfile=address.certfile,
        keyfile=address.keyfile,
        most_requests=MOST_REQUESTS,
    )
    with server.listen(), load() as model:
        backend.serve(model)
        with server:
            tell(model, server.url, made)
            for _ in answered(
                model.engine,
                model.plan,
                model.tokens,
                backend.events,
                is_serial=model.is_serial,
                is_all=lambda waiting: len(waiting) >= MOST_REQUESTS,
            ):
                pass


def _token(address: Address) -> str:
    from evoalign.http.guard import token_of  # needs the extra gateway

    return token_of(str(address.token_env))
