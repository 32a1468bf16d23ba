# SPDX-License-Identifier: Apache-2.0
"""A session of `evoalign canary` with a running server: it loads adapters and compares greedy completions.

Log-probabilities distinguish weights whose greedy tokens are the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import secrets
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from evoalign.engines.server.adapters import AdapterStore, PeftAdapter
from evoalign.engines.server.client import Client, LostError, RefusedError
from evoalign.engines.server.dialect import Dialect, ServerInfo, as_list, as_object, checked_logprobs
from evoalign.engines.server.sglang import SglangDialect
from evoalign.engines.server.vllm import VllmDialect
from evoalign.errors import ConfigError, EvoalignError
from evoalign.http import is_here

Api: TypeAlias = Literal["completions", "chat", "generate"]
TOKENS = 8
"""Tokens of a completion."""
MOST = 8.0
"""Nats that one token counts at most."""
SURE = -0.25
"""Log-probability above which rounding does not exchange a token for another."""
SECONDS = 120.0
"""Seconds for a completion."""
PATIENCE, UNLOAD = 30.0, 10.0
"""Seconds for an interrupted load to end, so that it can be undone, and for unloading an adapter."""
DIALECTS: dict[str, tuple[str, type[Dialect]]] = {"sglang": ("SGLang", SglangDialect), "vllm": ("vLLM", VllmDialect)}
"""The kinds of server by their names on the command line: name in messages, requests."""


# --- completions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Completion:
    """Greedy tokens, as the server names them, with their log-probabilities; empty where it ended at once."""

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]


Completions: TypeAlias = tuple[Completion, ...]
"""Completions of all prompts, in order."""


def distance(one: Completions, other: Completions) -> float:
    """Return the mean distance over all tokens, in nats.

    A token's is a lower bound of the largest change of any token's log-probability, up to and including the first token
    at which two completions differ. Tokens that rounding exchanges, because they are equally likely, are at distance 0.
    """
    found: list[float] = []
    for a, b in zip(one, other, strict=True):
        if not a.tokens or not b.tokens:  # the stop token is not reported: a sure token of the other counts
            first = next((c.logprobs[0] for c in (a, b) if c.tokens), -math.inf)
            found.append(1.0 if first > SURE else 0.0)
        for token, p, token_other, q in zip(a.tokens, a.logprobs, b.tokens, b.logprobs, strict=False):
            moved = abs(p - q) if token == token_other else max(abs(p - q), q - _rest(p), p - _rest(q))
            found.append(min(MOST, moved))
            if token != token_other:
                break
    return sum(found) / len(found)


def _rest(p: float) -> float:
    """Return the highest log-probability that another token can have."""
    return math.log(-math.expm1(p)) if p < 0 else -math.inf


@dataclass(frozen=True, slots=True)
class Prompter:
    """Sends prompts as text. `base` is the model's name; `as_model` sends an adapter's name instead of it."""

    client: Client
    dialect: Dialect
    api: Api
    base: str
    as_model: bool = False

    async def complete(self, prompt: str, adapter: str | None) -> Completion:
        """Return a greedy completion by an adapter, or by the base model. Raises LostError, RefusedError."""
        if self.api == "generate":
            path, sampling = "/generate", {"temperature": 0.0, "max_new_tokens": TOKENS}
            body = {"text": prompt, "sampling_params": sampling, "return_logprob": True, "lora_path": adapter}
        else:
            named = {"model": adapter} if self.as_model and adapter else self.dialect.naming(adapter, self.base)
            body = {**named, "max_tokens": TOKENS, "temperature": 0.0}
            path = "/v1/chat/completions" if self.api == "chat" else "/v1/completions"
            if self.api == "chat":
                body |= {"messages": [{"role": "user", "content": prompt}], "logprobs": True}
            else:
                body |= {"prompt": prompt, "logprobs": 1}
        reply, where = await self.client.post(path, body, seconds=SECONDS), f"{self.client.url}{path}"
        if self.api == "generate":
            rows = as_object(as_object(reply).get("meta_info")).get("output_token_logprobs")
            if not isinstance(rows, list) or not all(len(as_list(row)) >= 2 for row in rows):
                raise LostError(f"{where} returns no log-probabilities: {str(reply)[:80]!r}")
            tokens, logprobs = [row[1] for row in rows], [row[0] for row in rows]
        else:
            choices = as_list(as_object(reply).get("choices"))
            if not choices or not isinstance(choices[0], dict):
                raise LostError(f"{where} returns no completion: {str(reply)[:80]!r}")
            tokens, logprobs = _tokens_of(as_object(choices[0]))
        if not isinstance(tokens, list):
            raise LostError(f"{where} returns no log-probabilities, which the canary compares")
        return Completion(tuple(map(str, tokens)), checked_logprobs(logprobs, len(tokens), where))


def _tokens_of(choice: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return tokens and log-probabilities of OpenAI's choice; of a chat its content may be null."""
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        message = choice.get("message")
        content = as_object(message).get("content") if isinstance(message, dict) else choice.get("text")
        return (None, None) if content else ([], [])
    found = as_object(logprobs)
    if "content" not in found:
        return found.get("tokens"), found.get("token_logprobs")
    rows = [as_object(row) for row in as_list(found["content"])]
    return [row.get("token") for row in rows], [row.get("logprob") for row in rows]


# --- a session -------------------------------------------------------------------------------------------------------


class Session:
    """Loads adapters under new names, sends them `prompts`, and unloads them, also after an error or interruption.

    `folder` is visible to the server too; None: in memory, and where an SGLang server does not see that, as tensors.
    """

    def __init__(
        self, prompter: Prompter, info: ServerInfo, prompts: Sequence[str], folder: Path | None, takes_tensors: bool
    ) -> None:
        self.prompter, self.info, self.prompts = prompter, info, list(prompts)
        self.client = prompter.client
        self.takes_tensors, self._may_send = takes_tensors, takes_tensors and folder is None
        self.by_files = not self._may_send or is_here(self.client.url)
        self._store = AdapterStore(None if folder is None else str(folder), "--folder")
        self._run, self._serial = secrets.token_hex(4), itertools.count()
        self._loaded: dict[str, bool] = {}
        """Names that the server may have, and whether it confirmed them."""
        self._loading: Future[None] | None = None

    def new_name(self) -> str:
        """Return a name that was never used."""
        return f"evoalign-canary-{self._run}-{next(self._serial)}"

    @contextmanager
    def loaded(self, adapter: PeftAdapter, name: str | None = None, place: str | None = None) -> Generator[str]:
        """Load an adapter and yield its name; `place` names its folder. Raises RefusedError, LostError."""
        name, place = name or self.new_name(), place or self.new_name()
        try:
            if self.by_files:
                try:
                    self._load(adapter, name, self._store.put(place, adapter))
                    self._may_send = False
                except RefusedError:
                    self._store.drop(place)
                    if not self._may_send:
                        raise
                    self.by_files = False
            if not self.by_files:
                self._load(adapter, name, None)
            yield name
        finally:
            self._unload(name)
            self._store.drop(place)

    def _load(self, adapter: PeftAdapter, name: str, folder: Path | None) -> None:
        self._loaded.setdefault(name, False)
        work = self.prompter.dialect.load(self.client, name, adapter, folder, self.info.ranks)
        self._loading = self.client.submit(work)
        self._loading.result()
        self._loading, self._loaded[name] = None, True

    def _unload(self, name: str) -> None:
        """Unload an adapter, also after a load that was interrupted or refused. A failure is retried by `close`."""
        loading, self._loading = self._loading, None
        if loading is not None:
            with contextlib.suppress(EvoalignError, LateError):
                loading.result(PATIENCE)
                self._loaded[name] = True
        if name not in self._loaded:
            return
        try:
            self.client.submit(self.prompter.dialect.unload(self.client, name)).result(UNLOAD)
        except RefusedError:
            if self._loaded[name]:
                return
        except (EvoalignError, LateError):
            self._loaded[name] = False
            return
        del self._loaded[name]

    def complete(self, names: Sequence[str | None], prompter: Prompter | None = None) -> list[Completions]:
        """Return the completions of each adapter, None for the base model; all are in flight together."""
        chosen = prompter or self.prompter

        async def complete() -> list[Completion]:
            pairs = [(prompt, name) for prompt in self.prompts for name in names]
            return list(await asyncio.gather(*(chosen.complete(*pair) for pair in pairs)))

        found = self.client.call(complete())
        return [tuple(found[place :: len(names)]) for place in range(len(names))]

    def completions_of(self, adapter: PeftAdapter) -> Completions:
        """Return the completions of an adapter that is loaded for them."""
        with self.loaded(adapter) as name:
            return self.complete([name])[0]

    def noise(self, name: str | None, completions: Completions) -> float:
        """Return the largest distance between equal weights: the prompts one by one, and three times at once."""
        alone = tuple(self.client.call(self.prompter.complete(prompt, name)) for prompt in self.prompts)
        return max(distance(completions, other) for other in (alone, *self.complete([name, name, name])))

    def drop_refused(self) -> None:
        """Drop prompts that the server refuses as too long. Raises the refusal where none is left."""
        kept, refused = list[str](), None
        for prompt in self.prompts:
            try:
                self.client.call(self.prompter.complete(prompt, None))
                kept.append(prompt)
            except RefusedError as error:
                if error.status in (401, 403):
                    raise
                refused = error
        if not kept and refused is not None:
            raise refused
        self.prompts = kept

    def close(self) -> list[str]:
        """Unload and delete what is left. Returns the names that the server may still have."""
        for name in list(self._loaded):
            self._unload(name)
        self._store.close()
        return list(self._loaded)


async def identify(client: Client, server: str) -> tuple[str, str | None]:
    """Return the kind of a server, and the name of its model where it lists one. Raises EvoalignError."""
    reply: Any = {"data": []}
    try:
        reply = await client.get("/v1/models")
    except RefusedError as error:
        if error.status in (401, 403):
            raise
    if not isinstance(as_object(reply).get("data"), list):
        raise LostError(f"{client.url}/v1/models names no model: {str(reply)[:80]!r}")
    rows = [as_object(row) for row in as_list(reply["data"])]
    names = [row["id"] for row in rows if not row.get("parent") and isinstance(row.get("id"), str)]
    name = names[0] if names else None
    owners = [server, *(row.get("owned_by") for row in rows)]
    kind = next((kind for kind in DIALECTS for owner in owners if owner == kind), None)
    for path, known in (("/server_info", "sglang"), ("/get_server_info", "sglang"), ("/version", "vllm")):
        if kind is None:
            with contextlib.suppress(RefusedError):
                kind = known if isinstance(await client.get(path), dict) else None
    if kind is None:
        raise ConfigError(f"{client.url} does not report whether it is SGLang or vLLM; set --server")
    return kind, name
