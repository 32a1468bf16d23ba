# SPDX-License-Identifier: Apache-2.0
"""Sizes and positions from a model's configuration, layer by layer: some models have layers of different sizes.

A configuration of transformers with such layers raises an error where one of these attributes is read for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast


def layers_of(config: Any) -> list[Any]:
    """Return the text configuration of each layer."""
    text = config.get_text_config()
    by_layer = getattr(text, "per_layer_config", None)  # not in older versions of transformers
    return [text if by_layer is None else by_layer[i] for i in range(text.num_hidden_layers)]


def cached(config: Any) -> int:
    """Return the numbers that the cache holds per token: keys and values of all layers that do not share another's."""
    layers = layers_of(config)
    own = len(layers) - (getattr(config.get_text_config(), "num_kv_shared_layers", 0) or 0)
    return sum(2 * key_heads(layer) * head_size(layer) for layer in layers[:own])


def key_heads(layer: Any) -> int:
    """Return the number of heads of keys and values."""
    return getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads


def head_size(layer: Any) -> int:
    """Return the numbers of a query of one head."""
    return getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads


def windows(config: Any) -> list[int | None]:
    """Return the size of each layer's sliding window, as configured."""
    return [getattr(layer, "sliding_window", None) for layer in layers_of(config)]


def positions(config: Any) -> tuple[int | None, str]:
    """Return the most tokens of a prompt and its completion that a forward computes alike in any batch, and the reason.

    From `original_max_position_embeddings` on, longrope turns all rows of a batch by other angles, also keys that are
    cached with the earlier ones. None: unbounded. The reason has `{}` in the number's place.
    """
    text = config.get_text_config()
    most: int | None = getattr(text, "max_position_embeddings", None)
    most = most if most is not None and most > 0 else None  # -1 in XLNet
    switch = min(_switches(text), default=None)
    if switch is not None and (most is None or switch < most):
        return switch, "the {} positions of the model's original length, above which longrope changes all rows"
    return most, "the model's {} positions"


def _switches(text: Any) -> Iterator[int]:
    """Yield the lengths at which the rotary embeddings of a configuration, of all layers or by kind, switch."""
    found = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    nested = cast(Mapping[str, Any], found) if isinstance(found, Mapping) else {}
    for rope in (nested, *nested.values()):
        if isinstance(rope, Mapping):
            kind = cast(Mapping[str, Any], rope)
            original = kind.get("original_max_position_embeddings") or getattr(
                text, "original_max_position_embeddings", None
            )
            if kind.get("rope_type", kind.get("type")) == "longrope" and original:
                yield int(original)
