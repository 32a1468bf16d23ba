# SPDX-License-Identifier: Apache-2.0
"""Batched generation for rows of many members: shared prefixes, left padding, finished rows leave the batch.

A chunk is a list of (slot, request), in the order of the M slots that members have. The stages:

    1. the tokens that all prompts begin with: a row a slot
    2. the rest of each distinct (slot, prompt), left-padded: H rows, the heads
    3. decoding, one token a step: a row a pair, fewer as they finish

Shapes: B rows of the moment, T columns of the cache so far, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from evoalign import noise
from evoalign.engines.transformers.adapters import Adapters
from evoalign.engines.transformers.cache import RoomCache
from evoalign.engines.transformers.forward import Forward
from evoalign.engines.transformers.memory import Footprint
from evoalign.engines.transformers.prefill import Prefill
from evoalign.errors import NotFiniteError
from evoalign.tokens import tail_of
from evoalign.types import FinishReason, Request, Sampling

COMPACT_EVERY = 8
"""Finished rows leave at every so many steps when `deterministic`, so that redone work repeats the same shapes."""
SIZES = 8
"""Otherwise they leave for the next smaller size of a batch, so many of which lie between a power of two and the next.
Few sizes, since a GPU picks and loads kernels for each that is new, which takes longer than the step itself."""


@dataclass(slots=True)
class Completion:
    """What one row has generated."""

    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    finish_reason: FinishReason = "length"


@dataclass(slots=True)
class _Rows:
    """The rows still in the batch. `identity` is the place in the chunk; `stream` seeds the draws.

    `mask` is what `Forward.decoding_mask` made; None: all columns count.
    """

    identity: torch.Tensor
    position: torch.Tensor
    stream: torch.Tensor
    mask: torch.Tensor | None
    done: torch.Tensor

    def keep(self, index: torch.Tensor) -> _Rows:
        mask = None if self.mask is None else self.mask[index]
        return _Rows(self.identity[index], self.position[index], self.stream[index], mask, self.done[index])


class Decoder:
    """Generates with one model; `sampling_key` is the Philox key of the run's draws."""

    def __init__(
        self,
        model: Any,
        stop_ids: Sequence[int],
        pad_id: int,
        decode: Callable[[Sequence[int]], str],
        sampling_key: tuple[int, int],
        *,
        deterministic: bool,
    ) -> None:
        self.forward, self.footprint = Forward(model), Footprint.of(model)
        self.pad_id, self.decode, self.deterministic = pad_id, decode, deterministic
        self._device = self.forward.device
        self.stop = torch.tensor(list(stop_ids), dtype=torch.int64, device=self._device)
        self.key = sampling_key

    def rows(self, requests: Sequence[Request], room: float) -> int:
        """How many find room together, of requests of one sampling: the longest counts."""
        sampling = requests[0].sampling
        tokens = max(len(r.prompt_ids) for r in requests) + sampling.max_tokens
        row = self.footprint.row(tokens, greedy=sampling.temperature == 0)
        return max(1, int((room - self.footprint.least(max(len(r.prompt_ids) for r in requests))) / row))

    @torch.inference_mode()
    def generate(
        self, asked: Sequence[tuple[int, Request]], adapters: Adapters | None, room: float = math.inf
    ) -> Iterator[list[tuple[int, Completion]]]:
        """A completion of each (slot, request), with its place among them: those that have ended together, in turn.

        All requests share their sampling settings; `room` is bytes for everything that they take, of which `rows` has
        said that it is enough.
        """
        sampling, wants_logprobs = asked[0][1].sampling, any(r.logprobs for _, r in asked)
        columns = max(len(r.prompt_ids) for _, r in asked) + sampling.max_tokens
        spare = room - len(asked) * self.footprint.row(columns, greedy=sampling.temperature == 0)
        slots = torch.tensor([slot for slot, _ in asked], device=self._device)
        cache = RoomCache(self.forward.layers, columns)
        read = Prefill(self.forward, self.footprint, cache, adapters, spare).run(asked, columns, self.pad_id)
        logits, rows = read.logits, self._rows(asked, read.mask)
        out = [Completion() for _ in asked]
        alone = asked[-1][0] == 0
        for step in range(sampling.max_tokens):
            token = self._choose(logits, rows, step, sampling)
            ended = torch.isin(token, self.stop)
            self._record(out, rows, token, ended, logits if wants_logprobs else None)
            if sampling.stop:
                ended = ended | self._stopped(out, rows, sampling.stop)
            last = step + 1 == sampling.max_tokens
            said = rows.identity[(ended | last) & ~rows.done].tolist()
            if said:
                yield [(place, out[place]) for place in said]
            rows.done |= ended
            if last or bool(rows.done.all()):
                break
            index = self._staying(step, rows)
            if index is not None:
                rows, token = rows.keep(index), token[index]
                cache.select(index)
                if adapters is not None and not alone:
                    adapters.scatter(slots[rows.identity])
            logits = self._step(token, rows, cache)

    def _staying(self, step: int, rows: _Rows) -> torch.Tensor | None:
        """Which rows the batch goes on with, in order; None: all. Finished ones fill it up to its size."""
        done = int(rows.done.sum())
        if self.deterministic:
            return (~rows.done).nonzero()[:, 0] if done and (step + 1) % COMPACT_EVERY == 0 else None
        size = size_for(len(rows.done) - done)
        return rows.done.argsort(stable=True)[:size].sort().values if size < len(rows.done) else None

    def _rows(self, asked: Sequence[tuple[int, Request]], mask: torch.Tensor | None) -> _Rows:
        device = self._device
        return _Rows(
            identity=torch.arange(len(asked), device=device),
            position=torch.tensor([len(r.prompt_ids) for _, r in asked], device=device),
            stream=torch.tensor([r.seed for _, r in asked], dtype=torch.int64, device=device),
            mask=None if mask is None else self.forward.decoding_mask(mask),
            done=torch.zeros(len(asked), dtype=torch.bool, device=device),
        )

    def _step(self, token: torch.Tensor, rows: _Rows, cache: RoomCache) -> torch.Tensor:
        """Logits [B, V] after one more token a row."""
        logits = self.forward(token[:, None], rows.mask, rows.position[:, None], cache)
        rows.position = rows.position + 1
        return logits

    def _choose(self, logits: torch.Tensor, rows: _Rows, step: int, sampling: Sampling) -> torch.Tensor:
        if bool(logits.isnan().any()):
            raise NotFiniteError(
                "the model's logits are not numbers; lower es.sigma (GRPO: grpo.learning_rate), or use model.dtype "
                "bfloat16 or float32"
            )
        if sampling.temperature == 0:
            return logits.argmax(-1)
        position = torch.full_like(rows.stream, step)
        return draw(logits, noise.uniforms(self.key, position, rows.stream), sampling)

    def _stopped(self, out: Sequence[Completion], rows: _Rows, stop: Sequence[str]) -> torch.Tensor:
        """Rows [B] whose completion holds one of the texts `stop` by now; a token may hold more than its end."""
        found: list[bool] = []
        tail = tail_of(stop)
        for identity, done in zip(rows.identity.tolist(), rows.done.tolist(), strict=True):
            completion = out[identity]
            text = "" if done else self.decode(completion.ids[-tail:])
            hit = any(s in text for s in stop)
            completion.finish_reason = "stop" if hit else completion.finish_reason
            found.append(hit)
        return torch.tensor(found, device=self._device)

    def _record(
        self, out: list[Completion], rows: _Rows, token: torch.Tensor, ended: torch.Tensor, logits: torch.Tensor | None
    ) -> None:
        logprobs = None
        if logits is not None:
            logprobs = logits.float().log_softmax(-1).gather(1, token[:, None])[:, 0].tolist()
        flags = zip(rows.identity.tolist(), token.tolist(), ended.tolist(), rows.done.tolist(), strict=True)
        for i, (identity, chosen, stop, done) in enumerate(flags):
            if done:
                continue
            completion = out[identity]
            completion.ids.append(chosen)
            if logprobs is not None:
                completion.logprobs.append(logprobs[i])
            if stop:
                completion.finish_reason = "stop"


def size_for(rows: int) -> int:
    """The least size of a batch that holds so many rows: SIZES between 2^k and 2^(k+1), all integers where few."""
    step = 1 << max(0, (rows - 1).bit_length() - SIZES.bit_length())
    return -(-rows // step) * step


def draw(logits: torch.Tensor, uniform: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Tokens [B] by inverse transform over the distribution sorted from the likeliest, cut at `top_p`.

    `uniform` [B] in (0, 1) is common to all members of a (prompt, sample): members that agree on the distribution
    draw the same token. `top_p` keeps the smallest set that reaches it, as transformers does.
    """
    probability, order = (logits.double() / sampling.temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
    cumulative = probability.cumsum(-1)
    kept = (cumulative - probability < sampling.top_p).sum(-1, keepdim=True).clamp(min=1)  # 0 of what is no number
    total = cumulative.gather(1, kept - 1)
    place = (cumulative < uniform[:, None] * total).sum(-1, keepdim=True)
    return order.gather(1, torch.minimum(place, kept - 1))[:, 0]
