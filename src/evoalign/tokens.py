# SPDX-License-Identifier: Apache-2.0
"""Prompts to token ids and back. Done once, outside the engines, so that all of them see the same ids."""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from evoalign.config import ModelConfig
from evoalign.errors import ModelError, shown
from evoalign.models import templates
from evoalign.models.files import find, not_cached, refuse_hooks
from evoalign.models.origin import described, origin
from evoalign.types import Prompt, text_of

TAIL_TOKENS = 4
"""Tokens that one character takes at most: the bytes of UTF-8."""
UNREADABLE = "\ufffd"
"""Of a character of which some bytes are not there yet; some tokenizers make it of whole tokens before it."""


class Tokens:
    """A tokenizer, its chat template and its stop tokens. `guarded`: the template is that of somebody else."""

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int], *, guarded: bool = False) -> None:
        self.tokenizer = tokenizer
        self._render = templates.Renderer(tokenizer) if guarded else partial(templates.render, tokenizer)
        self.stop_ids = tuple(sorted(set(stop_ids)))
        pad = tokenizer.pad_token_id
        self.pad_id: int = int(pad) if pad is not None else (self.stop_ids[0] if self.stop_ids else 0)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt. Messages go through the chat template; without one, their texts are joined."""
        if isinstance(prompt, str):
            ids = self.tokenizer(prompt)["input_ids"]
        elif self.tokenizer.chat_template:
            try:
                text = self._render(prompt)
            except ModelError:
                raise
            except Exception as error:  # of jinja2, or whatever the template calls
                raise ModelError(
                    f"the model's chat template refuses the prompt {str(prompt)[:80]}: {_one_line(error)}; "
                    "fix the messages or set task.prompt: raw"
                ) from error
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = self.tokenizer(text_of(prompt))["input_ids"]
        if not ids:
            raise ModelError(f"the prompt {prompt!r} has no tokens; fix the row")
        return tuple(int(i) for i in ids)

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Token ids of a text alone, nothing put before or after it: of a completion, or a part of one."""
        return tuple(int(i) for i in self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def fingerprint(self) -> str:
        """SHA-256 of the vocabulary and the chat template."""
        found = json.dumps([sorted(self.tokenizer.get_vocab().items()), self.tokenizer.chat_template], sort_keys=True)
        return hashlib.sha256(found.encode()).hexdigest()

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a completion, a last stop token and all special tokens left out, spaces as they are."""
        return str(
            self.tokenizer.decode(self._inside(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def decode_all(self, completions: Sequence[Sequence[int]]) -> list[str]:
        """`decode` of each."""
        if not _is_plain(self.tokenizer):
            return [self.decode(ids) for ids in completions]
        backend, inside = self.tokenizer.backend_tokenizer, [self._inside(ids) for ids in completions]
        return [str(text) for text in backend.decode_batch(inside, skip_special_tokens=True)]

    def _inside(self, ids: Sequence[int]) -> list[int]:
        """Without a last stop token, which a tokenizer may not count among the special ones."""
        return list(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)


def _is_plain(tokenizer: Any) -> bool:
    """Whether its text is its backend's as it is, which makes many at once."""
    from transformers import PreTrainedTokenizerFast

    return getattr(type(tokenizer), "_decode", None) is getattr(PreTrainedTokenizerFast, "_decode", False)


def before_stop(text: str, stop: Sequence[str], keep: bool = False) -> str:
    """A completion as far as the first of the texts that end it; `keep`: with that, the shortest of those there."""
    ends = [(place, place + keep * len(s)) for s in stop if (place := text.find(s)) >= 0]
    return text[: min(ends)[1]] if ends else text


def tail_of(stop: Sequence[str]) -> int:
    """So many last tokens hold any of the texts that end a completion, and one character more, of which a slice may
    lose the space."""
    return TAIL_TOKENS * (1 + max(map(len, stop)))


def stopped(decode: Callable[[Sequence[int]], str], ids: Sequence[int], looked: int, stop: Sequence[str]) -> int:
    """Tokens up to the first after `looked` with which one of the texts `stop` is there; 0 where none is."""
    tail = tail_of(stop)
    whole = decode(ids[max(0, looked + 1 - tail) :])
    if not any(s in whole for s in stop) and UNREADABLE not in whole:
        return 0
    for count in range(looked + 1, len(ids) + 1):
        text = decode(ids[max(0, count - tail) : count])
        if any(s in text for s in stop):
            return count
    return 0


def load(config: ModelConfig) -> Tokens:
    """The tokenizer of a model and its stop tokens. Raises ModelError."""
    from transformers import AutoTokenizer

    where, revision = origin(config).tokenizer
    refuse_hooks(*described(config))
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(where, revision=revision, trust_remote_code=False)
    except Exception as error:  # the library raises a score of kinds, bare Exception among them
        if why := not_cached(error):
            raise ModelError(f"model {config.name}: {why}") from error
        raise ModelError(
            f"model {config.name} has no tokenizer that loads; are its files, such as tokenizer.json, there? "
            f"({_one_line(error)})"
        ) from error
    if set(tokenizer.get_vocab()) <= set(tokenizer.get_added_vocab()):  # what the library makes of no files at all
        raise ModelError(
            f"model {config.name} has no tokenizer: put its tokenizer files, such as tokenizer.json, into the folder"
        )
    own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    return Tokens(tokenizer, [*_stops(config.name, *described(config)), *own], guarded=config.name != "tiny")


def _stops(name: str, path: str, revision: str | None) -> list[int]:
    """The stop tokens of the model's generation config; without one, it stops at the tokenizer's own end."""
    from transformers import GenerationConfig

    try:
        found: Any = GenerationConfig.from_pretrained(path, revision=revision or "main").eos_token_id
    except OSError as error:
        if find(path, "generation_config.json", revision) is None:
            return []
        raise ModelError(f"model {name}: generation_config.json is damaged ({_one_line(error)})") from error
    except Exception as error:  # of a file that holds something else than settings
        raise ModelError(f"model {name}: generation_config.json is damaged ({_one_line(error)})") from error
    ids: list[Any] = found if isinstance(found, list) else [] if found is None else [found]
    for i in ids:
        if type(i) is not int or i < 0:
            raise ModelError(f"model {name}: eos_token_id {shown(found)} is no id of a token; fix it in its files")
    return ids


def _one_line(error: Exception) -> str:
    return textwrap.shorten(str(error), 200) or type(error).__name__
