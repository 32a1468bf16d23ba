# SPDX-License-Identifier: Apache-2.0
"""A scorer as an HTTP service: POST /score, GET /health, GET /metrics, GET /openapi.json.

Neither logs nor errors hold text of a pair.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator

from evoalign.config.secrets import public_path
from evoalign.errors import RewardError
from evoalign.rewards.scorer.batching import Batcher, FullError
from evoalign.rewards.scorer.local import Local
from evoalign.rewards.scorer.metrics import Meter
from evoalign.rewards.scorer.wire import DIGEST
from evoalign.version import __version__

logger = logging.getLogger(__name__)
Text = Annotated[str, Field(description="As it is; the service puts the template round it.")]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Item(_Body):
    """One pair."""

    prompt: Text
    response: Text


class Items(_Body):
    """Pairs, each by itself."""

    items: list[Item]


class Lists(_Body):
    """Pairs as two lists of one length."""

    prompts: list[Text]
    responses: list[Text]

    @model_validator(mode="after")
    def _fit(self) -> Lists:
        if len(self.prompts) != len(self.responses):
            raise ValueError(f"{len(self.prompts)} prompts and {len(self.responses)} responses")
        return self


class Scores(BaseModel):
    """A finite number of each column for each pair, in their order."""

    reward: list[float]
    cost: list[float] | None = None


_KEYS = frozenset({"body", *Items.model_fields, *Lists.model_fields, *Item.model_fields, "Items", "Lists"})


@dataclass(frozen=True, slots=True)
class Limits:
    """Of a service: pairs in a batch, seconds that a batch waits for more, pairs that wait, bytes of a body."""

    batch_size: int = 16
    max_wait: float = 0.005
    queue: int = 1024
    max_body: int = 1 << 20


class Service:
    """The FastAPI application `app` of one scorer. `end` lets it finish what is queued."""

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
        self.app.get("/health")(self.health)
        self.app.get("/metrics", response_class=PlainTextResponse)(self.metrics)
        self.app.exception_handler(RequestValidationError)(self._unread)

    def end(self) -> None:
        """At a signal, before requests are waited for."""
        self._ends = True
        self._batcher.hurry()

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncGenerator[None]:
        worker = asyncio.create_task(self._batcher.run())
        yield  # until all requests have been answered
        self._batcher.end()
        await worker

    async def score(self, body: Lists | Items) -> Response:
        """Score pairs: a number of each column for each pair, in their order."""
        begun = time.monotonic()
        answer = await self._answer(body)
        self.meter.statuses[answer.status_code] += 1
        self.meter.seconds.add(time.monotonic() - begun)
        return answer

    async def _answer(self, body: Lists | Items) -> Response:
        if isinstance(body, Items):
            body = Lists(prompts=[i.prompt for i in body.items], responses=[i.response for i in body.items])
        if len(body.prompts) > self._limits.queue:
            return _refused(413, f"{len(body.prompts)} pairs, and the queue holds {self._limits.queue}; send fewer")
        try:
            found = await self._batcher.score(body.prompts, body.responses)
        except FullError as error:
            return _refused(429, str(error), {"Retry-After": str(error.seconds)})
        except RewardError as error:  # of a model: the same pairs come to the same again
            logger.error("%s", error)
            return JSONResponse({"detail": str(error), "again": False}, 500)
        except Exception as error:  # its words might hold some of a text
            logger.error("scoring failed: %s", type(error).__name__)
            return JSONResponse({"detail": f"scoring failed: {type(error).__name__}", "again": True}, 500)
        self.meter.cut = self._scorer.cut
        return JSONResponse(found, headers={DIGEST: self._digest})

    async def health(self) -> Response:
        """What answers here, and whether it is ready: 200, and 503 while it comes to its end."""
        models = self._scorer.models
        first = next(iter(models.values()))
        found: dict[str, Any] = {
            "ready": not self._ends,
            "columns": list(self._scorer.columns),
            "digest": self._digest,
            "models": {
                column: {
                    "name": public_path(model.name), "kind": model.kind, "digest": model.digest, "dtype": model.dtype,
                    "max_tokens": model.pairs.max_tokens,
                }
                for column, model in models.items()
            },
            "device": str(first.device),
            "template": self._scorer.template,
            "limits": {"items": self._limits.queue, "body": self._limits.max_body},
        }  # fmt: skip
        return JSONResponse(found, 503 if self._ends else 200)

    async def metrics(self) -> Response:
        """Counts, as Prometheus reads them."""
        return PlainTextResponse(self.meter.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _unread(self, _: Request, error: Exception) -> Response:
        """422 without what was sent: neither values nor keys that are none of ours."""
        self.meter.statuses[422] += 1
        assert isinstance(error, RequestValidationError)
        said = [
            {"loc": [part for part in found["loc"] if isinstance(part, int) or part in _KEYS], "type": found["type"]}
            for found in error.errors()[:8]
        ]
        return JSONResponse(
            {"detail": said, "form": "prompts and responses, two lists of texts of one length; or items of both"}, 422
        )


def _refused(status: int, words: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"detail": words}, status, headers)
