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
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from evoalign import noise
from evoalign.engines.transformers.adapters import Adapters
from evoalign.engines.transformers.cache import RoomCache
from evoalign.errors import NotFiniteError
from evoalign.types import FinishReason, Request, Sampling

MIN_SHARED_PREFIX = 4
TAIL_TOKENS = 4
"""Tokens that one character takes at most: the bytes of UTF-8."""
COMPACT_EVERY = 8
"""Finished rows leave at every so many steps when `deterministic`, so that redone work repeats the same shapes."""
COMPACT_SHARE = 0.125
"""Otherwise they leave as soon as they make up this share of the batch."""


@dataclass(slots=True)
class Completion:
    """What one row has generated."""

    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    finish_reason: FinishReason = "length"


@dataclass(slots=True)
class _Rows:
    """The rows still in the batch. `identity` is the place in the chunk; `stream` seeds the draws."""

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
        self._model, self._pad_id, self._decode, self._deterministic = model, pad_id, decode, deterministic
        text = model.config.get_text_config()
        self._layers: int = text.num_hidden_layers
        self._reach = _reach(text)
        self._device: torch.device = model.device
        self._stop = torch.tensor(list(stop_ids), dtype=torch.int64, device=self._device)
        self._key = sampling_key

    @torch.inference_mode()
    def generate(self, asked: Sequence[tuple[int, Request]], adapters: Adapters | None) -> list[Completion]:
        """A completion of each (slot, request), in order. All requests share their sampling settings."""
        sampling, wants_logprobs = asked[0][1].sampling, any(r.logprobs for _, r in asked)
        room = max(len(r.prompt_ids) for _, r in asked) + sampling.max_tokens
        slots = torch.tensor([slot for slot, _ in asked], device=self._device)
        cache = RoomCache(self._layers, room)
        logits, rows = self._prefill(asked, cache, room, adapters)
        out = [Completion() for _ in asked]
        alone = asked[-1][0] == 0
        for step in range(sampling.max_tokens):
            token = self._choose(logits, rows, step, sampling)
            ended = torch.isin(token, self._stop)
            self._record(out, rows, token, ended, logits if wants_logprobs else None)
            if sampling.stop:
                ended = ended | self._stopped(out, rows, sampling.stop)
            rows.done |= ended
            last = step + 1 == sampling.max_tokens
            if last or bool(rows.done.all()):
                break
            if self._compacts(step, rows):
                index = (~rows.done).nonzero()[:, 0]
                rows, token = rows.keep(index), token[index]
                cache.select(index)
                if adapters is not None and not alone:
                    adapters.scatter(slots[rows.identity])
            logits = self._step(token, rows, cache)
        return out

    def _compacts(self, step: int, rows: _Rows) -> bool:
        if self._deterministic:
            return (step + 1) % COMPACT_EVERY == 0 and bool(rows.done.any())
        return int(rows.done.sum()) >= max(1, int(COMPACT_SHARE * len(rows.done)))

    def _prefill(
        self, asked: Sequence[tuple[int, Request]], cache: RoomCache, room: int, adapters: Adapters | None
    ) -> tuple[torch.Tensor, _Rows]:
        """Logits [B, V] after the prompts, and the rows."""
        device, count = self._device, asked[-1][0] + 1
        heads = list(dict.fromkeys((slot, r.prompt_ids) for slot, r in asked))
        prompts = list(dict.fromkeys(prompt for _, prompt in heads))
        uneven = len(set(map(len, prompts))) > 1
        shared = shared_prefix(prompts) if len(prompts) > 1 and not (uneven and room > self._reach) else 0
        if shared:
            self._arrange(adapters, range(count))
            prefix = torch.tensor([prompts[0][:shared]] * count, device=device)
            self._forward(prefix, None, torch.arange(shared, device=device).expand(count, -1), cache)
            cache.select(torch.tensor([slot for slot, _ in heads], device=device))
        self._arrange(adapters, [slot for slot, _ in heads])
        rest = [prompt[shared:] for _, prompt in heads]
        width = max(map(len, rest))
        ids = torch.tensor([[self._pad_id] * (width - len(p)) + list(p) for p in rest], device=device)
        pads = torch.tensor([width - len(p) for p in rest], device=device)
        columns = torch.arange(width, device=device)
        positions = (columns - pads[:, None]).clamp_(min=0) + shared
        mask = None
        if bool(pads.any()):
            mask = torch.ones(len(heads), room, dtype=torch.int64, device=device)
            mask[:, shared : shared + width] = columns >= pads[:, None]
        logits = self._forward(ids, mask, positions, cache)
        self._arrange(adapters, [slot for slot, _ in asked])
        return self._spread(logits, cache, heads, asked, mask)

    def _arrange(self, adapters: Adapters | None, slots: Sequence[int]) -> None:
        """Tell the adapters whose the rows of the next batches are: equal groups where they can be."""
        if adapters is None:
            return
        if len(set(Counter(slots).values())) == 1:
            adapters.group()
        else:
            adapters.scatter(torch.tensor(slots, device=self._device))

    def _spread(
        self,
        logits: torch.Tensor,
        cache: RoomCache,
        heads: Sequence[tuple[int, tuple[int, ...]]],
        asked: Sequence[tuple[int, Request]],
        mask: torch.Tensor | None,
    ) -> tuple[torch.Tensor, _Rows]:
        """From one row a head to one row a pair."""
        device = self._device
        place = {head: i for i, head in enumerate(heads)}
        index = torch.tensor([place[slot, r.prompt_ids] for slot, r in asked], device=device)
        if len(asked) != len(heads):
            cache.select(index)
            logits = logits[index]
        rows = _Rows(
            identity=torch.arange(len(asked), device=device),
            position=torch.tensor([len(r.prompt_ids) for _, r in asked], device=device),
            stream=torch.tensor([r.seed for _, r in asked], dtype=torch.int64, device=device),
            mask=None if mask is None else mask[index],
            done=torch.zeros(len(asked), dtype=torch.bool, device=device),
        )
        return logits, rows

    def _step(self, token: torch.Tensor, rows: _Rows, cache: RoomCache) -> torch.Tensor:
        """Logits [B, V] after one more token a row."""
        logits = self._forward(token[:, None], rows.mask, rows.position[:, None], cache)
        rows.position = rows.position + 1
        return logits

    def _forward(
        self, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor, cache: RoomCache
    ) -> torch.Tensor:
        seen = cache.get_seq_length() + ids.shape[1]
        out = self._model(
            input_ids=ids,
            attention_mask=None if mask is None else mask[:, :seen],
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1]

    def _choose(self, logits: torch.Tensor, rows: _Rows, step: int, sampling: Sampling) -> torch.Tensor:
        if bool(logits.isnan().any()):
            raise NotFiniteError(
                "the model's logits are not numbers; lower es.sigma (GRPO: grpo.learning_rate), or use model.dtype "
                "bfloat16 or float32"
            )
        if sampling.temperature == 0:
            return logits.argmax(-1)
        position = torch.full_like(rows.stream, step)
        return draw(logits, noise.uniforms(self._key, position, rows.stream), sampling)

    def _stopped(self, out: Sequence[Completion], rows: _Rows, stop: Sequence[str]) -> torch.Tensor:
        """Rows [B] whose completion holds one of the texts `stop` by now; a token may hold more than its end."""
        found: list[bool] = []
        tail = TAIL_TOKENS * (1 + max(map(len, stop)))  # and one character, of which a slice may lose the space
        for identity, done in zip(rows.identity.tolist(), rows.done.tolist(), strict=True):
            completion = out[identity]
            text = "" if done else self._decode(completion.ids[-tail:])
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


def draw(logits: torch.Tensor, uniform: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Tokens [B] by inverse transform over the distribution sorted from the likeliest, cut at `top_p`.

    `uniform` [B] in (0, 1) is common to all members of a (prompt, sample): members that agree on the distribution
    draw the same token. `top_p` keeps the smallest set that reaches it, as transformers does.
    """
    probability, order = (logits.double() / sampling.temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
    cumulative = probability.cumsum(-1)
    kept = (cumulative - probability < sampling.top_p).sum(-1, keepdim=True)
    total = cumulative.gather(1, kept - 1)
    place = (cumulative < uniform[:, None] * total).sum(-1, keepdim=True)
    return order.gather(1, torch.minimum(place, kept - 1))[:, 0]


def _reach(config: Any) -> float:
    """Columns within which attention does not count columns, so that padding may stand behind a shared prefix.

    A sliding window or a chunk counts them beyond its size, ALiBi over columns (MPT) from the first.
    """
    if getattr(getattr(config, "attn_config", None), "alibi", False):
        return 0
    kinds = set(getattr(config, "layer_types", None) or ("unknown",))
    if kinds == {"full_attention"}:
        return math.inf
    sizes = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    return min((size for size in sizes if size), default=math.inf)


def shared_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens that all prompts begin with, at least one left over for each; 0 where too few to be worth a pass."""
    shared = min(map(len, prompts)) - 1
    first = prompts[0]
    for prompt in prompts[1:]:
        shared = next((i for i in range(shared) if prompt[i] != first[i]), shared)
    return shared if shared >= MIN_SHARED_PREFIX else 0
