# SPDX-License-Identifier: Apache-2.0
"""The library decoder: batched generation for rows of many members, with the forward of transformers.

A batch is a list of (slot, request), in the order of the M slots of members. The stages:

    1. the tokens that all prompts begin with: one row per slot
    2. the rest of each distinct (slot, prompt), left-padded: one row each
    3. decoding, one token per step: one row per pair, fewer as they finish

Shapes: B current rows, T filled columns of the cache, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from evoalign import noise
from evoalign.engines.transformers.adapters import Adapters
from evoalign.engines.transformers.prefill import Forward, Prefill, RoomCache
from evoalign.engines.transformers.settings import Footprint
from evoalign.errors import NotFiniteError
from evoalign.tokens import tail_of
from evoalign.types import FinishReason, Request, Sampling

COMPACT_EVERY = 8
"""If `deterministic`, finished rows leave every COMPACT_EVERY steps, so that repeated work has the same shapes."""
SIZES = 8
"""Otherwise they leave when a smaller batch size is reached; there are SIZES sizes between two powers of two. Sizes are
few because a GPU selects and loads kernels for each new size, which takes longer than the step itself."""
BLOCK = 512
"""Tokens whose probabilities are added up first when one is drawn: about the root of a large vocabulary."""


@dataclass(slots=True)
class Completion:
    """The tokens that one row has generated."""

    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    finish_reason: FinishReason = "length"


@dataclass(slots=True)
class _Rows:
    """The rows still in the batch. `identity` is the index of the pair; `stream` seeds the draws.

    `mask` is the result of `Forward.decoding_mask`; None: all columns count.
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
    """Generates with one model. `sampling_key` is the Philox key of the run's draws."""

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
        """Return how many rows fit in `room` bytes, for requests with the same sampling, by the longest prompt."""
        sampling, longest = requests[0].sampling, max(len(r.prompt_ids) for r in requests)
        row = self.footprint.row(longest + sampling.max_tokens, sampling)
        return max(1, int((room - self.footprint.least(longest)) / row))

    @torch.inference_mode()
    def generate(
        self, pairs: Sequence[tuple[int, Request]], adapters: Adapters | None, room: float = math.inf
    ) -> Iterator[list[tuple[int, Completion]]]:
        """Yield a completion of each (slot, request) with the index of the pair, as lists of rows that ended together.

        All requests have the same sampling settings. `room` is the memory in bytes, which must suffice by `rows`.
        """
        sampling, wants_logprobs = pairs[0][1].sampling, any(r.logprobs for _, r in pairs)
        columns = max(len(r.prompt_ids) for _, r in pairs) + sampling.max_tokens
        spare = room - len(pairs) * self.footprint.row(columns, sampling)
        slots = torch.tensor([slot for slot, _ in pairs], device=self._device)
        cache = RoomCache(self.forward.layers, columns)
        prefill = Prefill(self.forward, self.footprint, cache, adapters, spare)
        logits, mask = prefill.run(pairs, columns, self.pad_id)
        rows = self._rows(pairs, mask)
        out = [Completion() for _ in pairs]
        alone = pairs[-1][0] == 0
        given = self._given([r for _, r in pairs], sampling.max_tokens)
        for step in range(sampling.max_tokens):
            token = self._choose(logits, rows, step, sampling)
            ended = torch.isin(token, self.stop)
            if given is not None:
                token, ended = given[rows.identity, step], given[rows.identity, step + 1] < 0
                token = token.where(token >= 0, self.pad_id)
            self._record(out, rows, token, ended, logits if wants_logprobs else None)
            if sampling.stop:
                ended = ended | self._stopped(out, rows, sampling.stop)
            last = step + 1 == sampling.max_tokens
            finished = rows.identity[(ended | last) & ~rows.done].tolist()
            if finished:
                yield [(place, out[place]) for place in finished]
            rows.done |= ended
            if last or bool(rows.done.all()):
                break
            index = self._staying(step, rows)
            if index is not None:
                rows, token = rows.keep(index), token[index]
                cache.select(index)
                if adapters is not None and not alone:
                    adapters.scatter(slots[rows.identity])
            logits = self.forward(token[:, None], rows.mask, rows.position[:, None], cache)
            rows.position = rows.position + 1

    def _given(self, requests: Sequence[Request], most: int) -> torch.Tensor | None:
        """Return the given tokens [B, most + 1], -1 after their ends; None: tokens are chosen."""
        if not requests[0].given:
            return None
        return torch.tensor([[*r.given, *[-1] * (most + 1 - len(r.given))] for r in requests], device=self._device)

    def _staying(self, step: int, rows: _Rows) -> torch.Tensor | None:
        """Return the rows that stay in the batch, in order, or None for all. Finished rows pad it to its size."""
        done = int(rows.done.sum())
        if self.deterministic:
            return (~rows.done).nonzero()[:, 0] if done and (step + 1) % COMPACT_EVERY == 0 else None
        size = size_for(len(rows.done) - done)
        return rows.done.argsort(stable=True)[:size].sort().values if size < len(rows.done) else None

    def _rows(self, pairs: Sequence[tuple[int, Request]], mask: torch.Tensor | None) -> _Rows:
        device = self._device
        return _Rows(
            identity=torch.arange(len(pairs), device=device),
            position=torch.tensor([len(r.prompt_ids) for _, r in pairs], device=device),
            stream=torch.tensor([r.seed for _, r in pairs], dtype=torch.int64, device=device),
            mask=None if mask is None else self.forward.decoding_mask(mask),
            done=torch.zeros(len(pairs), dtype=torch.bool, device=device),
        )

    def _choose(self, logits: torch.Tensor, rows: _Rows, step: int, sampling: Sampling) -> torch.Tensor:
        if not bool(logits.amax(-1).isfinite().all()):
            raise NotFiniteError(
                "the model's logits are not finite; lower es.sigma (GRPO: grpo.learning_rate), or set model.dtype to "
                "bfloat16 or float32"
            )
        if sampling.temperature == 0:
            return logits.argmax(-1)
        position = torch.full_like(rows.stream, step)
        return draw(logits, noise.uniforms(self.key, position, rows.stream), sampling)

    def _stopped(self, out: Sequence[Completion], rows: _Rows, stop: Sequence[str]) -> torch.Tensor:
        """Return which rows [B] contain a stop text in their completion."""
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
    """Return the smallest batch size for a number of rows; there are SIZES sizes between 2^k and 2^(k+1)."""
    step = 1 << max(0, (rows - 1).bit_length() - SIZES.bit_length())
    return -(-rows // step) * step


def draw(logits: torch.Tensor, uniform: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Draw tokens [B] by inverse transform, in the order of the vocabulary; with `top_p` below 1 likeliest first.

    `uniform` [B], of 32 bits in (0, 1), is common to all members of a (prompt, sample), so members with the same
    distribution draw the same token. `top_p` keeps the smallest set that reaches it, as in transformers; its sort can
    take longer than the rest of a step.
    """
    if sampling.top_p < 1:
        return _draw_likeliest(logits, uniform, sampling)
    below = logits.float() - logits.amax(-1, keepdim=True).float()
    weight = below.div_(sampling.temperature).exp_()
    blocks = functional.pad(weight, (0, -weight.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    cumulative = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    target = uniform[:, None] * cumulative[:, -1:]
    block = (cumulative < target).sum(-1, keepdim=True)  # 0 for NaN
    before = cumulative.gather(1, (block - 1).clamp(min=0)) * (block > 0)
    within = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0].double().cumsum(-1)
    place = (within < torch.minimum(target - before, within[:, -1:])).sum(-1, keepdim=True)
    return (block * BLOCK + place)[:, 0]


def _draw_likeliest(logits: torch.Tensor, uniform: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    probability, order = (logits.double() / sampling.temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
    cumulative = probability.cumsum(-1)
    kept = (cumulative - probability < sampling.top_p).sum(-1, keepdim=True).clamp(min=1)  # 0 for NaN
    total = cumulative.gather(1, kept - 1)
    place = (cumulative < uniform[:, None] * total).sum(-1, keepdim=True)
    return order.gather(1, torch.minimum(place, kept - 1))[:, 0]
