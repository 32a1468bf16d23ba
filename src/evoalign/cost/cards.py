# SPDX-License-Identifier: Apache-2.0
"""Which population and context of a run fit on GPUs of usual sizes: an estimate without a GPU.

The constants are in `evoalign.engines.gpu`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from evoalign import spaces
from evoalign.config import Config
from evoalign.config.engines import Serving
from evoalign.cost.estimate import gib, memory
from evoalign.engines.gpu import CARDS, GRAPH_LAYER, HIDDEN, LOGIT, OUTSIDE, SHARED, WIDE, step_tokens
from evoalign.engines.transformers.settings import Footprint
from evoalign.engines.transformers.static import FACTORS
from evoalign.models.layers import key_heads, layers_of, positions
from evoalign.models.origin import model_config
from evoalign.types import Layout, TensorSpec


@dataclass(frozen=True, slots=True)
class Work:
    """One generation: completions, and the most tokens of a prompt and its completion; None: not known."""

    completions: int
    length: int | None


@dataclass(frozen=True, slots=True)
class Card:
    """GPUs of `size` GiB each, with room for `left` bytes, or `tokens`, of keys and values of `at_once` completions.

    `members` is the largest population with a completion each, None if members take no memory. `context` is the most
    tokens per completion if all of a generation are generated at once. `lacks` says why the run does not fit.
    """

    label: str
    size: float
    left: float
    tokens: int
    at_once: int
    members: int | None
    context: int
    lacks: str


class CardEstimate:
    """The memory of a run on GPUs, by part, in bytes per GPU. `parts` are allocated before keys and values."""

    def __init__(
        self, config: Config, serving: Serving, specs: Sequence[TensorSpec], layout: Layout, work: Work
    ) -> None:
        self._config, self.serving = config, serving
        dtype: torch.dtype = getattr(torch, config.model.served_dtype(on_gpu=True))
        need, model, split = memory(config, specs, layout, dtype), model_config(config.model), serving.devices
        layers = layers_of(model)
        footprint = Footprint.of_shapes(model, [(s.name, s.shape) for s in specs], dtype.itemsize)
        logits = footprint.logits(config.sampling)
        self._token = footprint.cache / min(split, key_heads(layers[0]))
        self._row = 0 if serving.reserved else logits
        # One side of each adapter is whole on every GPU.
        adapters = need.own.adapters * (1 + 1 / split) / 2
        self._slot = adapters / serving.slots if serving.slots else _slot_bytes(specs, layout, dtype)
        widest = max((max(s.shape[-2:]) for s in specs if s.layer is not None and len(s.shape) > 1), default=0)
        experts = getattr(model.get_text_config(), "num_experts_per_tok", None) or 1
        self._wide = (WIDE * widest * experts / split + HIDDEN * model.get_text_config().hidden_size) * dtype.itemsize
        self._drawn = serving.reserved * footprint.vocabulary * LOGIT
        graphs = serving.graphs * len(layers) * GRAPH_LAYER + bool(serving.graphs) * (serving.rows or 0) * self._wide
        mean = 0 if serving.mean_on_host else need.master + need.start
        self.parts: Mapping[str, float] = {
            "weights": need.weights / split,
            f"adapters of {serving.slots} slots": adapters,
            "mean": mean / split if spaces.create(config).evolves_model else mean,
            "CUDA graphs": graphs,
        }
        self._most = positions(model)[0] or 2**31
        self._context = self._most if serving.context == 0 else serving.context
        self._work = work
        self._length = work.length or self._context or self._most
        self._dense = spaces.create(config).carrier == "dense"

    @property
    def length(self) -> int:
        """Tokens of the prompt and the completion that are counted."""
        return self._length

    def step(self, size: float) -> float:
        """Return the bytes of a step's activations, or of its logits, whichever is more."""
        return max((self.serving.step or step_tokens(size)) * self._wide, self._drawn)

    def card(self, label: str, size: float) -> Card:
        """Return what fits on GPUs of `size` GiB."""
        serving, rows = self.serving, self.serving.rows or 2**31
        whole = size * 2**30
        step = self.step(size)
        share = serving.share * whole - (SHARED if serving.reserved else 0)
        room = min(share, whole - OUTSIDE) - sum(self.parts.values())
        room -= step if serving.reserved else 0
        if room > 0:
            room = room * serving.part if serving.cache is None else min(serving.cache, room)
        left = room - (0 if serving.reserved else step)
        row = self._length * self._token + self._row
        population = int((left + min(serving.members, serving.slots) * self._slot) / (row + self._slot))
        if not serving.slots:  # factors share the room for keys and values
            left -= min(self._config.es.population_size * self._slot, FACTORS * max(0, left))
        tokens, at_once = max(0, int(left / self._token)), max(0, min(rows, int(left / row)))
        context = int((left / min(rows, self._work.completions) - self._row) / self._token)
        lacks = f"lacks {gib(-left)}" if left < 0 else "" if at_once else f"no room for {self._length:,} tokens"
        if not lacks and self._context is not None and tokens < self._context:
            setting = self._config.engine.limit()
            named = f"{setting[0]} of at most" if setting else "engine.max_model_len of at most"
            lacks = f"needs {named} {tokens:,}"
        return Card(
            label,
            size,
            left,
            tokens,
            at_once,
            None if self._dense else max(0, population),
            max(0, min(context, self._context or self._most)),
            lacks,
        )

    def cards(self) -> list[Card]:
        """Return what fits on the usual sizes, and on that of `engine.gpu_memory_gib`."""
        split, cap = self.serving.devices, self.serving.cap
        many = f"{split} x " if split > 1 else ""
        found = [self.card(f"{many}{name} GiB", size) for name, size in CARDS.items()]
        return found + ([] if cap is None else [self.card(f"capped at {cap:g} GiB", cap)])


def _slot_bytes(specs: Sequence[TensorSpec], layout: Layout, dtype: torch.dtype) -> int:
    """Return the bytes of one member's factors."""
    modules = set(layout.modules)
    return layout.rank * dtype.itemsize * sum(sum(s.shape[-2:]) for s in specs if s.name in modules)


def card_estimate(config: Config, specs: Sequence[TensorSpec], layout: Layout, work: Work) -> CardEstimate | None:
    """Return the estimate of a run; None where its engine serves from a CPU or sizes its own memory."""
    serving = config.engine.serving(config)
    return None if serving is None else CardEstimate(config, serving, specs, layout, work)


def lines(config: Config, specs: Sequence[TensorSpec], layout: Layout, work: Work) -> list[str]:
    """Return a table of what fits on GPUs of usual sizes, for a dry run."""
    found = card_estimate(config, specs, layout, work)
    if found is None:
        return []
    cards = found.cards()
    steps = " or ".join(dict.fromkeys(gib(found.step(card.size)) for card in cards))
    parts = {**found.parts, "CUDA context and kernels": OUTSIDE}
    listed = ", ".join(f"{name} {gib(size)}" for name, size in parts.items() if size)
    head = ("card", "holds it", "for keys and values", "tokens", "at once", "members", "context")
    table = [head, *(_cells(card) for card in cards)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        f"memory on a GPU, estimated: {listed}, a step {steps}",
        *("  " + "  ".join(f"{cell:<{n}}" for cell, n in zip(row, widths, strict=True)).rstrip() for row in table),
        f"  at once: completions of {found.length:,} tokens with their prompts; members: largest population with one "
        f"such completion each; context: tokens per completion with all {work.completions:,} of a generation at once",
        *([f"  where a card is too small: {found.serving.advice}"] if any(card.lacks for card in cards) else []),
        *([f"  refused on a GPU: {refused}"] if (refused := config.engine.refused_on_gpu(config, specs)) else []),
    ]


def _cells(card: Card) -> tuple[str, ...]:
    label = f"{card.label} ({card.size:g})" if f"{card.size:g} GiB" not in card.label else card.label
    if card.left < 0:
        return (label, f"no, {card.lacks}", *["-"] * 5)
    counts = (card.tokens, card.at_once, card.members, card.context)
    numbers = ("any" if count is None else f"{count:,}" for count in counts)
    return (label, f"no, {card.lacks}" if card.lacks else "yes", gib(card.left), *numbers)


def summary(config: Config, specs: Sequence[TensorSpec], layout: Layout, work: Work) -> str:
    """Return which GPUs hold a run, to follow a sentence; empty where that is not estimated."""
    found = card_estimate(config, specs, layout, work)
    if found is None:
        return ""
    if refused := config.engine.refused_on_gpu(config, specs):
        return f"; refused on a GPU: {refused}"
    holding = (f"{card.label} {f'no ({card.lacks})' if card.lacks else 'yes'}" for card in found.cards())
    return f"; GPUs that hold the run, estimated: {', '.join(holding)}"
