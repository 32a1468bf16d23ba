# SPDX-License-Identifier: Apache-2.0
"""A server asked as its users ask it: prompts as text, an adapter by name, greedy answers with log-probabilities.

Log-probabilities tell weights apart where the greedy tokens are the same. The likeliest token's moves by no more than
the largest move of any, so that a tie, which rounding decides, is no difference here.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

from evoalign.engines.server.client import Client
from evoalign.engines.server.dialect import Dialect, checked_logprobs
from evoalign.engines.server.errors import LostError

Api: TypeAlias = Literal["completions", "chat", "generate"]
TOKENS = 8
"""Of an answer."""
MOST = 8.0
"""Nats that one token counts for."""
SURE = -0.25
"""Log-probability of a token that rounding swaps with no other."""
SECONDS = 120.0
"""Within which a server has answered a prompt."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Greedy tokens, as the server names them, with their log-probabilities. None at all: it ended at once."""

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]


Answers: TypeAlias = tuple[Answer, ...]
"""Of each prompt, in order."""


@dataclass(frozen=True, slots=True)
class Asker:
    """`base` is the served model's name. `as_model`: an adapter's name takes its place, whatever the server."""

    client: Client
    dialect: Dialect
    api: Api
    base: str
    as_model: bool = False

    async def answers(self, prompts: Sequence[str], adapter: str | None) -> Answers:
        """All prompts in flight at once, so that they share batches."""
        return tuple(await asyncio.gather(*(self.answer(prompt, adapter) for prompt in prompts)))

    async def answer(self, prompt: str, adapter: str | None) -> Answer:
        """One answer. Raises LostError, RefusedError."""
        if self.api == "generate":
            return await self._generated(prompt, adapter)
        named = {"model": adapter} if self.as_model and adapter else self.dialect.naming(adapter, self.base)
        body: dict[str, Any] = {**named, "max_tokens": TOKENS, "temperature": 0.0}
        if self.api == "chat":
            path = "/v1/chat/completions"
            body |= {"messages": [{"role": "user", "content": prompt}], "logprobs": True}
        else:
            path = "/v1/completions"
            body |= {"prompt": prompt, "logprobs": 1}
        where, said = f"{self.client.url}{path}", await self.client.post(path, body, seconds=SECONDS)
        rows = said.get("choices") if isinstance(said, dict) else None
        if not isinstance(rows, list) or not rows or not isinstance(rows[0], dict):
            raise LostError(f"{where} answers no completion: {str(said)[:80]!r}")
        return _answer(*_rows(cast(dict[str, Any], rows[0])), where)

    async def _generated(self, prompt: str, adapter: str | None) -> Answer:
        """By SGLang's own route, which knows no model's name."""
        sampling = {"temperature": 0.0, "max_new_tokens": TOKENS}
        body = {"text": prompt, "sampling_params": sampling, "return_logprob": True, "lora_path": adapter}
        said = await self.client.post("/generate", body, seconds=SECONDS)
        where, meta = f"{self.client.url}/generate", said.get("meta_info") if isinstance(said, dict) else None
        rows = cast(dict[str, Any], meta).get("output_token_logprobs") if isinstance(meta, dict) else None
        if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) >= 2 for row in rows):
            raise LostError(f"{where} answers no log-probabilities: {str(said)[:80]!r}")
        return _answer([row[1] for row in rows], [row[0] for row in rows], where)


def _rows(choice: Mapping[str, Any]) -> tuple[Any, Any]:
    """Tokens and log-probabilities of an OpenAI choice, of a completion or a chat, whose content may be null."""
    told = choice.get("logprobs")
    if not isinstance(told, dict):
        message = choice.get("message")
        content = message.get("content") if isinstance(message, dict) else choice.get("text")
        return ([], []) if not content else (None, None)
    found = cast(dict[str, Any], told)
    if "content" not in found:
        return found.get("tokens"), found.get("token_logprobs")
    rows = cast(list[Any], found["content"] or [])
    if not all(isinstance(row, dict) for row in rows):
        return None, None
    return [row.get("token") for row in rows], [row.get("logprob") for row in rows]


def _answer(tokens: Any, logprobs: Any, where: str) -> Answer:
    if not isinstance(tokens, list):
        raise LostError(f"{where} gives no log-probabilities, by which alone an adapter is seen")
    return Answer(tuple(map(str, tokens)), checked_logprobs(logprobs, len(tokens), where))


def apart(one: Answers, other: Answers) -> float:
    """Mean over all tokens of how far apart two sets of answers are, in nats: a lower bound of the largest move of any
    token's log-probability, up to and with the first token where two answers part.
    """
    found: list[float] = []
    for a, b in zip(one, other, strict=True):
        if not a.tokens or not b.tokens:
            found.append(_apart_of_none(a, b))
        for token, p, token_other, q in zip(a.tokens, a.logprobs, b.tokens, b.logprobs, strict=False):
            found.append(min(MOST, abs(p - q) if token == token_other else max(abs(p - q), q - _left(p), p - _left(q))))
            if token != token_other:
                break
    return sum(found) / len(found)


def _apart_of_none(a: Answer, b: Answer) -> float:
    """Of answers of which one ended at once: what ended it is not told, so that a sure token of the other counts."""
    first = next((answer.logprobs[0] for answer in (a, b) if answer.tokens), -math.inf)
    return 1.0 if first > SURE else 0.0


def _left(p: float) -> float:
    """The most that another token's log-probability can be."""
    return math.log(-math.expm1(p)) if p < 0 else -math.inf
