# SPDX-License-Identifier: Apache-2.0
"""A scorer as an HTTP service: POST /score, GET /health, GET /metrics, GET /openapi.json.

POST /score_batch and /score_texts take and answer requests in the form of published clients of Safe RLHF scorers.
`serve` is `evoalign score serve`. `Guard` checks requests before the service reads them.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import signal
import socket
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, Field, model_validator
from starlette.datastructures import Headers
from starlette.types import Scope

from evoalign.config.scorer import DIGEST, PROMPT, RESPONSE, ScorerConfig
from evoalign.config.secrets import public_path
from evoalign.errors import ConfigError, RefusedError, RewardError
from evoalign.http import is_loopback
from evoalign.http.guard import NAMES, Guard, GuardedServer, settings, token_of
from evoalign.rewards.scorer.batching import Batcher, FullError, Meter
from evoalign.rewards.scorer.models import Local
from evoalign.version import __version__

logger = logging.getLogger(__name__)
Text = Annotated[str, Field(description="Plain text; the service adds the template.")]
CHALLENGE = {"WWW-Authenticate": "Bearer"}
ADVICE = "; send fewer pairs, or raise --max-body"


class Item(BaseModel, extra="forbid"):
    """One pair."""

    prompt: Text
    response: Text


class Items(BaseModel, extra="forbid"):
    """Pairs as a list."""

    items: list[Item]


class Lists(BaseModel, extra="forbid"):
    """Pairs as two lists of the same length."""

    prompts: list[Text]
    responses: list[Text]

    @model_validator(mode="after")
    def _fit(self) -> Lists:
        if len(self.prompts) != len(self.responses):
            raise ValueError(f"{len(self.prompts)} prompts and {len(self.responses)} responses")
        return self


class Texts(BaseModel, extra="forbid"):
    """Pairs as texts of the service's template, such as `BEGINNING OF CONVERSATION: USER: .. ASSISTANT:..`."""

    texts: list[str]


class Plural(BaseModel):
    """Scores in the form of published services."""

    rewards: list[float]
    costs: list[float] | None = None


PLURAL = {"reward": "rewards", "cost": "costs"}
END = "</s>"
"""End token of the published models, which their clients may add to a text; the service adds the model's own."""


class Scores(BaseModel):
    """Finite numbers per column, in the order of the pairs."""

    reward: list[float]
    cost: list[float] | None = None


_KEYS = frozenset(
    {"body", *Items.model_fields, *Lists.model_fields, *Item.model_fields, *Texts.model_fields, "Items", "Lists"}
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Pairs per batch, seconds that a batch waits for more pairs, pairs that may wait, bytes of a body."""

    batch_size: int = 16
    max_wait: float = 0.005
    queue: int = 1024
    max_body: int = 1 << 20


class Service:
    """FastAPI application `app` of one scorer. Logs and errors contain no text of pairs."""

    def __init__(self, scorer: Local, limits: Limits) -> None:
        self._scorer, self._limits, self._ends = scorer, limits, False
        self.meter = Meter()
        self._batcher = Batcher(
            scorer, self.meter, batch_size=limits.batch_size, max_wait=limits.max_wait, capacity=limits.queue
        )
        self._digest = scorer.digest
        self.app = FastAPI(
            title="evoalign scorer", version=__version__, docs_url=None, redoc_url=None, lifespan=self._lifespan
        )
        self.app.post("/score", response_model=Scores, response_model_exclude_none=True)(self.score)
        plural: dict[str, Any] = {"response_model": Plural, "response_model_exclude_none": True}
        self.app.post("/score_batch", **plural)(self.score_batch)
        self.app.post("/score_texts", **plural)(self.score_texts)
        self.app.get("/health")(self.health)
        self.app.get("/metrics", response_class=PlainTextResponse)(self.metrics)
        self.app.exception_handler(RequestValidationError)(self._unread)

    def end(self) -> None:
        """Start the shutdown: report not ready, and stop waiting for full batches."""
        self._ends = True
        self._batcher.hurry()

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncGenerator[None]:
        worker = asyncio.create_task(self._batcher.run())
        yield  # until all requests are finished
        self._batcher.end()
        await worker

    async def score(self, body: Lists | Items) -> Response:
        """Score pairs: numbers per column, in the order of the pairs."""
        if isinstance(body, Items):
            body = Lists(prompts=[i.prompt for i in body.items], responses=[i.response for i in body.items])
        return await self._timed(body)

    async def score_batch(self, body: Lists) -> Response:
        """Score pairs for a published client. A prompt may already be in the service's template."""
        split = [self._split(prompt + response) for prompt, response in zip(body.prompts, body.responses, strict=True)]
        given = zip(body.prompts, body.responses, strict=True)
        return await self._timed(_lists(one or pair for one, pair in zip(split, given, strict=True)), PLURAL)

    async def score_texts(self, body: Texts) -> Response:
        """Score texts of the service's template for a published client."""
        split = [self._split(text) for text in body.texts]
        if None in split:
            self.meter.statuses[422] += 1
            return refused(422, f"text {split.index(None)} is not of the service's template; see /health")
        return await self._timed(_lists(one for one in split if one is not None), PLURAL)

    def _split(self, text: str) -> tuple[str, str] | None:
        """Return prompt and response of a text in the template, which the scorer joins again; else None."""
        before, is_text, rest = self._scorer.template.partition(PROMPT)
        between, _, after = rest.partition(RESPONSE)
        text = text.removesuffix(END)
        if not (is_text and between and text.startswith(before) and text.endswith(after)):
            return None
        prompt, is_pair, response = text[len(before) : len(text) - len(after)].partition(between)
        return (prompt, response) if is_pair else None

    async def _timed(self, body: Lists, names: Mapping[str, str] = MappingProxyType({})) -> Response:
        begun = time.monotonic()
        answer = await self._answer(body, names)
        self.meter.statuses[answer.status_code] += 1
        self.meter.seconds.add(time.monotonic() - begun)
        return answer

    async def _answer(self, body: Lists, names: Mapping[str, str]) -> Response:
        """Score pairs; `names` renames columns."""
        if len(body.prompts) > self._limits.queue:
            return refused(413, f"{len(body.prompts)} pairs exceed the queue of {self._limits.queue}; send fewer")
        try:
            found = await self._batcher.score(body.prompts, body.responses)
        except FullError as error:
            return refused(429, str(error), {"Retry-After": str(error.seconds)})
        except RewardError as error:  # from a model: a retry gives the same error
            logger.error("%s", error)
            return JSONResponse({"detail": str(error), "again": False}, 500)
        except Exception as error:  # its message might contain text of a pair
            logger.error("scoring failed: %s", type(error).__name__)
            return JSONResponse({"detail": f"scoring failed: {type(error).__name__}", "again": True}, 500)
        self.meter.cut = self._scorer.cut
        return JSONResponse({names.get(c, c): list(v) for c, v in found.items()}, headers={DIGEST: self._digest})

    async def health(self) -> Response:
        """Describe the scorer. The status is 200, or 503 during shutdown."""
        models = self._scorer.models
        first = next(iter(models.values()))
        found: dict[str, Any] = {
            "ready": not self._ends,
            "columns": list(self._scorer.columns),
            "digest": self._digest,
            "models": {
                column: {
                    "name": public_path(model.name),
                    "kind": model.kind,
                    "digest": model.digest,
                    "dtype": model.dtype,
                    "max_tokens": model.pairs.max_tokens,
                }
                for column, model in models.items()
            },
            "device": str(first.device),
            "template": self._scorer.template,
            "limits": {"items": self._limits.queue, "body": self._limits.max_body},
        }
        return JSONResponse(found, 503 if self._ends else 200)

    async def metrics(self) -> Response:
        """Return Prometheus metrics."""
        return PlainTextResponse(self.meter.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _unread(self, _: Request, error: Exception) -> Response:
        """Return 422 without repeating values or unknown keys of the request."""
        self.meter.statuses[422] += 1
        assert isinstance(error, RequestValidationError)
        details = [
            {"loc": [part for part in found["loc"] if isinstance(part, int) or part in _KEYS], "type": found["type"]}
            for found in error.errors()[:8]
        ]
        return JSONResponse(
            {
                "detail": details,
                "form": "prompts and responses, two lists of texts of the same length; or items of both",
            },
            422,
        )


def refused(status: int, words: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with the reason."""
    return JSONResponse({"detail": words}, status, headers)


def _lists(pairs: Iterable[tuple[str, str]]) -> Lists:
    both = list(pairs)
    return Lists(prompts=[prompt for prompt, _ in both], responses=[response for _, response in both])


def serve(
    config: ScorerConfig, limits: Limits, *, host: str, port: int, token_env: str | None, tell: Callable[[str], None]
) -> None:
    """Load the models, serve until SIGTERM or SIGINT, and then finish queued requests.

    Calls `tell` with the address when ready. Raises ConfigError, ModelError.
    """
    token = None if token_env is None else token_of(token_env)
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"--host {host} is reachable from other machines: set --token-env to the name of an environment variable "
            "with a token, or use 127.0.0.1"
        )
    with _bound(host, port) as listening:
        service = Service(Local(config), limits)
        guarded = Guard(
            service.app,
            admit=lambda scope: _admit(scope, token),
            refused=lambda _, error: refused(error.status, str(error), CHALLENGE if error.status == 401 else None),
            names=NAMES if is_loopback(host) else None,
            max_body=limits.max_body,
            advice=ADVICE,
        )
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{listening.getsockname()[1]}"
        server = GuardedServer(settings(guarded, lifespan="on"), ready=lambda: tell(address), end=service.end)
        with _quiet_end():
            server.run(sockets=[listening])


@contextmanager
def _admit(scope: Scope, token: str | None) -> Generator[None]:
    """Raise RefusedError unless a request has the token, compared in constant time, and no other credentials."""
    given = Headers(scope=scope).getlist("authorization")
    if token is not None and not (
        len(given) == 1 and hmac.compare_digest(given[0].encode("latin-1"), f"Bearer {token}".encode())
    ):
        raise RefusedError("the bearer token of the service is required", 401)
    yield


@contextmanager
def _bound(host: str, port: int) -> Generator[socket.socket]:
    """Bind the address before loading the models, so that a port in use fails early."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--host {host} is not an address of this machine ({error})") from None
    with listening:
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--port {port} cannot be used ({error}); choose another, or 0 for any") from None
        yield listening


@contextmanager
def _quiet_end() -> Generator[None]:
    """Ignore the signal that uvicorn raises again after a regular shutdown."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
