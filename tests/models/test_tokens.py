# SPDX-License-Identifier: Apache-2.0
"""Token ids back to text: many at once as one by one, and as far as a text that ends them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from evoalign import tokens
from evoalign.config import from_dict
from evoalign.tokens import Tokens, stopped


def some(stop_ids: tuple[int, ...] = ()) -> tuple[Tokens, list[tuple[int, ...]]]:
    loaded = tokens.load(from_dict({"model": {"name": "tiny"}, "es": {"sigma": 0.1}}).model)
    draw, size = random.Random(0), len(loaded.tokenizer)
    asked = [tuple(draw.randrange(size) for _ in range(draw.randrange(40))) for _ in range(200)]
    asked += [(*ids, loaded.stop_ids[0]) for ids in asked[:20]]
    return Tokens(loaded.tokenizer, stop_ids or loaded.stop_ids), [*asked, (), loaded.stop_ids[:1]]


def test_many_at_once_are_what_each_is_alone() -> None:
    """Special tokens, stop tokens that are no special ones, and bytes of no character among them."""
    for stop_ids in ((), (37, 41)):
        loaded, asked = some(stop_ids)
        assert loaded.decode_all(asked) == [loaded.decode(ids) for ids in asked]
        assert any("\ufffd" in text for text in loaded.decode_all(asked))
    assert loaded.decode_all([]) == []
    assert loaded.decode_all([(50, 60, 37), (50, 60), (37, 60)]) == [
        loaded.tokenizer.decode(ids) for ids in ([50, 60], [50, 60], [37, 60])
    ]


def test_a_tokenizer_that_makes_its_text_itself_is_asked_for_each() -> None:
    loaded, asked = some()

    class Shouting(type(loaded.tokenizer)):  # type: ignore[misc]
        def _decode(self, *args: Any, **kwargs: Any) -> str:
            return str(super()._decode(*args, **kwargs)).upper()

    loaded.tokenizer.__class__ = Shouting
    found = loaded.decode_all(asked)
    assert found == [loaded.decode(ids) for ids in asked] and all(text == text.upper() for text in found)


def test_a_text_to_stop_at_is_found_at_the_token_it_ends_in() -> None:
    def decode(ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")

    ids = list("so it ends €nd".encode())
    assert stopped(decode, ids[:8], 0, ("never", "\u20acn")) == 0
    assert stopped(decode, ids, 8, ("never", "\u20acn")) == 15
    assert stopped(decode, ids, 0, ("it",)) == 5
    assert stopped(decode, ids, 0, ("\u20ac",)) == 14
    assert stopped(decode, ids, 0, ("none",)) == 0


def test_a_text_that_bytes_of_no_character_hide_is_found() -> None:
    """A tokenizer of bytes, by which a line break before a broken character cannot be read any more."""

    def decode(ids: Sequence[int]) -> str:
        return "a\n" if ids[-1] == 1 else "\ufffd" * len(ids)

    assert stopped(decode, [0, 0, 1, 2, 2], 1, ("\n",)) == 3
    assert stopped(decode, [0, 0, 2, 2, 2], 1, ("\n",)) == 0
