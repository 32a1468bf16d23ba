# SPDX-License-Identifier: Apache-2.0
"""One forward of the model over a cache, and the layers that members share."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from evoalign.engines.transformers.cache import RoomCache

ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""All but cuDNN's, to which torch turns on recent GPUs where there is a mask: it plans anew for each shape, and in
decoding each step has another, since a column comes and rows go."""


class Forward:
    """The model as rollouts ask it: token ids in, logits of the last position out.

    `trunk` are the decoder layers below the first that members change, `crown` the others: see `share`.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        text = model.config.get_text_config()
        self.device: torch.device = model.device
        self.layers: int = text.num_hidden_layers
        self.reach = _reach(text)
        self._hidden = torch.empty(0, dtype=torch.int64, device=self.device)
        # Such models give a mask of four dimensions to each layer as it is; others read positions off that of two.
        self._takes_masks = (
            self.reach == math.inf
            and getattr(model.config, "_attn_implementation", None) == "sdpa"
            and getattr(model, "_supports_attention_backend", False)
        )
        self.trunk: Sequence[nn.Module] = ()
        self.crown: Sequence[nn.Module] = ()

    def __call__(
        self, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor, cache: RoomCache, *,
        answers: bool = True,
    ) -> torch.Tensor:  # fmt: skip
        """Logits [B, V] after the last column of `ids` [B, T]; without `answers` none, and no product with the head.

        `mask` is [B, columns] or, of one new column, what `decoding_mask` made of that.
        """
        seen = cache.get_seq_length() + ids.shape[1]
        with sdpa_kernel(ATTENTION):
            out = self._model(
                input_ids=ids,
                attention_mask=None if mask is None else mask[..., :seen],
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1 if answers else self._hidden,
            )
        return out.logits[:, -1] if answers else out.logits

    def decoding_mask(self, mask: torch.Tensor) -> torch.Tensor:
        """What the library makes of [B, columns] in every step, once for all: [B, 1, 1, columns], where it is that."""
        return mask.bool()[:, None, None] if self._takes_masks else mask

    def share(self, modules: Mapping[str, nn.Module]) -> None:
        """Let the layers below all of these modules, which alone differ between members, be computed once a prompt."""
        self.trunk, self.crown = _split(self._model, self.layers, set(modules.values()))

    @contextmanager
    def trunk_alone(self) -> Generator[Callable[[], Any]]:
        """A forward stops above the trunk; what it came to there, by a call."""
        found: list[Any] = []
        handle = self.trunk[-1].register_forward_hook(lambda _module, _inputs, output: found.append(output))
        try:
            with _standing_in(self.crown, lambda: found[-1]):
                yield lambda: found.pop()
        finally:
            handle.remove()

    @contextmanager
    def crown_alone(self, hidden: Any) -> Generator[None]:
        """A forward starts above the trunk, with what that came to."""
        with _standing_in(self.trunk, lambda: hidden):
            yield


def rows_of(output: Any, rows: Sequence[int]) -> Any:
    """Some rows of what a decoder layer returns: hidden states [B, T, H], or a tuple that begins with them."""
    return (output[0][list(rows)], *output[1:]) if isinstance(output, tuple) else output[list(rows)]


def joined(outputs: Sequence[Any]) -> Any:
    """What a decoder layer returned for consecutive rows, as for all of them at once."""
    first = outputs[0]
    if len(outputs) == 1:
        return first
    return (torch.cat([o[0] for o in outputs]), *first[1:]) if isinstance(first, tuple) else torch.cat(list(outputs))


@contextmanager
def _standing_in(blocks: Sequence[nn.Module], output: Callable[[], Any]) -> Generator[None]:
    """These layers compute nothing and return `output()`, whatever they are given."""
    own = [vars(block).get("forward") for block in blocks]
    for block in blocks:
        block.forward = lambda *_args, **_kwargs: output()
    try:
        yield
    finally:
        for block, forward in zip(blocks, own, strict=True):
            if forward is None:
                del block.forward
            else:
                block.forward = forward


def _split(model: nn.Module, layers: int, changed: set[nn.Module]) -> tuple[Sequence[nn.Module], Sequence[nn.Module]]:
    """The decoder layers below the first that holds a changed module, and the others; none where one lies elsewhere."""
    text: Any = getattr(model, "config").get_text_config()  # noqa: B009 - a module's attributes are unknown
    if getattr(text, "num_kv_shared_layers", 0):
        return (), ()  # a layer there reads keys that another has made in the same forward
    for blocks in model.modules():
        if isinstance(blocks, nn.ModuleList) and len(blocks) == layers:
            holds = [bool(changed & set(block.modules())) for block in blocks]
            if any(holds) and changed <= {m for block in blocks for m in block.modules()}:
                first = holds.index(True)
                return list(blocks)[:first], list(blocks)[first:]
    return (), ()


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
