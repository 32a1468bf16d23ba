# SPDX-License-Identifier: Apache-2.0
"""Encode prompts and decode completions, outside of the engines, so that all engines get the same ids."""

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
"""Most tokens of one character: the bytes of UTF-8."""
UNREADABLE = "\ufffd"
"""The replacement character, for a character with missing bytes."""


class Tokens:
    """A tokenizer, its chat template and its stop tokens. `guarded`: the template is untrusted."""

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int], *, guarded: bool = False) -> None:
        self.tokenizer = tokenizer
        self._render = templates.Renderer(tokenizer) if guarded else partial(templates.render, tokenizer)
        self.stop_ids = tuple(sorted(set(stop_ids)))
        pad = tokenizer.pad_token_id
        self.pad_id: int = int(pad) if pad is not None else (self.stop_ids[0] if self.stop_ids else 0)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the token ids of a prompt. Messages use the chat template; without one, their texts are joined."""
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
        """Return the token ids of a text without special tokens, such as a completion."""
        return tuple(int(i) for i in self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def fingerprint(self) -> str:
        """Return the SHA-256 of the vocabulary and the chat template."""
        found = json.dumps([sorted(self.tokenizer.get_vocab().items()), self.tokenizer.chat_template], sort_keys=True)
        return hashlib.sha256(found.encode()).hexdigest()

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a completion without a last stop token and special tokens, spaces unchanged."""
        return str(
            self.tokenizer.decode(self._inside(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def decode_all(self, completions: Sequence[Sequence[int]]) -> list[str]:
        """Decode several completions at once."""
        if not _is_plain(self.tokenizer):
            return [self.decode(ids) for ids in completions]
        backend, inside = self.tokenizer.backend_tokenizer, [self._inside(ids) for ids in completions]
        return [str(text) for text in backend.decode_batch(inside, skip_special_tokens=True)]

    def _inside(self, ids: Sequence[int]) -> list[int]:
        """Remove a last stop token, which may not be one of the tokenizer's special tokens."""
        return list(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)


def _is_plain(tokenizer: Any) -> bool:
    """Return whether a tokenizer decodes exactly as its backend, which decodes batches."""
    from transformers import PreTrainedTokenizerFast

    return getattr(type(tokenizer), "_decode", None) is getattr(PreTrainedTokenizerFast, "_decode", False)


def before_stop(text: str, stop: Sequence[str], keep: bool = False) -> str:
    """Cut a completion before the first stop text; with `keep`, after the shortest stop text at that place."""
    ends = [(place, place + keep * len(s)) for s in stop if (place := text.find(s)) >= 0]
    return text[: min(ends)[1]] if ends else text


def tail_of(stop: Sequence[str]) -> int:
    """Return the number of last tokens that contain any stop text and one more character, since a slice may lose its
    first space."""
    return TAIL_TOKENS * (1 + max(map(len, stop)))


def stopped(decode: Callable[[Sequence[int]], str], ids: Sequence[int], looked: int, stop: Sequence[str]) -> int:
    """Return the number of tokens after which a stop text is complete, above `looked`; 0 where there is none."""
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
    """Load the tokenizer of a model and its stop tokens. Raises ModelError."""
    from transformers import AutoTokenizer

    where, revision = origin(config).tokenizer
    refuse_hooks(*described(config))
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(where, revision=revision, trust_remote_code=False)
    except Exception as error:  # transformers raises many types, also bare Exception
        if why := not_cached(error):
            raise ModelError(f"model {config.name}: {why}") from error
        raise ModelError(
            f"model {config.name} has no tokenizer that loads; are its files, such as tokenizer.json, there? "
            f"({_one_line(error)})"
        ) from error
    if set(tokenizer.get_vocab()) <= set(tokenizer.get_added_vocab()):  # transformers makes an empty one without files
        raise ModelError(
            f"model {config.name} has no tokenizer: put its tokenizer files, such as tokenizer.json, into the folder"
        )
    own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    return Tokens(tokenizer, [*_stops(config.name, *described(config)), *own], guarded=config.name != "tiny")


def _stops(name: str, path: str, revision: str | None) -> list[int]:
    """Return the stop tokens of the model's generation config; none without one."""
    from transformers import GenerationConfig

    try:
        found: Any = GenerationConfig.from_pretrained(path, revision=revision or "main").eos_token_id
    except OSError as error:
        if find(path, "generation_config.json", revision) is None:
            return []
        raise ModelError(f"model {name}: generation_config.json is damaged ({_one_line(error)})") from error
    except Exception as error:  # the file is untrusted
        raise ModelError(f"model {name}: generation_config.json is damaged ({_one_line(error)})") from error
    ids: list[Any] = found if isinstance(found, list) else [] if found is None else [found]
    for i in ids:
        if type(i) is not int or i < 0:
            raise ModelError(f"model {name}: eos_token_id {shown(found)} is not a token id; fix it in its files")
    return ids


def _one_line(error: Exception) -> str:
    return textwrap.shorten(str(error), 200) or type(error).__name__
