# SPDX-License-Identifier: Apache-2.0
"""Encode prompts and decode completions, outside of the engines, so that all engines get the same ids."""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from evoalign.config import ModelConfig
from evoalign.errors import ModelError, shown
from evoalign.models import templates
from evoalign.models.files import find, not_cached, read_settings, refuse_hooks
from evoalign.models.origin import described, model_config, origin
from evoalign.types import Prompt, text_of

TAIL_TOKENS = 4
"""Most tokens of one character: the bytes of UTF-8."""
UNREADABLE = "\ufffd"
"""The replacement character, for a character with missing bytes."""


class Tokens:
    """A tokenizer, its chat template and its stop tokens. `guarded`: the template is untrusted.

    `rows` is the number of the model's embedding rows, which no token may exceed; None: not known.
    """

    def __init__(
        self, tokenizer: Any, stop_ids: Sequence[int], *, guarded: bool = False, rows: int | None = None
    ) -> None:
        self.tokenizer, self.rows = tokenizer, rows
        self._render = templates.Renderer(tokenizer) if guarded else partial(templates.render, tokenizer)
        self.stop_ids = tuple(sorted(i for i in set(stop_ids) if rows is None or i < rows))
        pad = tokenizer.pad_token_id
        if pad is None or (rows is not None and pad >= rows):
            pad = self.stop_ids[0] if self.stop_ids else 0
        self.pad_id = int(pad)

    @property
    def has_more_tokens(self) -> bool:
        """Whether the tokenizer has tokens that the model has no embedding for."""
        return self.rows is not None and max(self.tokenizer.get_vocab().values(), default=0) >= self.rows

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
        return self._embedded(ids, prompt)

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text without special tokens, such as a completion."""
        return self._embedded(self.tokenizer(text, add_special_tokens=False)["input_ids"], text)

    def _embedded(self, ids: Sequence[int], text: Prompt) -> tuple[int, ...]:
        """Return token ids. Raises ModelError for one that the model has no embedding for."""
        most = max(ids, default=0)
        if self.rows is not None and most >= self.rows:
            name = str(self.tokenizer.convert_ids_to_tokens(most))
            raise ModelError(
                f"the text {shown(text_of(text))} has token {most} {name!r}, "
                f"and the model's embedding has {self.rows:,} rows; use the tokenizer that belongs to the weights, or "
                "take the token out of the text"
            )
        return tuple(int(i) for i in ids)

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
    rows = None
    with suppress(ModelError):  # the engine reports a damaged config.json
        rows = getattr(model_config(config).get_text_config(), "vocab_size", None)
    return Tokens(tokenizer, _stops(config, tokenizer), guarded=config.name != "tiny", rows=rows)


def _stops(config: ModelConfig, tokenizer: Any) -> list[int]:
    """Return the stop tokens of generation_config.json, config.json and the tokenizer.

    As in transformers, an ordinary token in config.json counts only without generation_config.json, since it is often
    left over from the model that a tokenizer was taken away from.
    """
    path, revision = described(config)
    generation = _ids(config.name, _generation_eos(config.name, path, revision))
    file = find(path, "config.json", revision)
    settings = {} if file is None else read_settings(config.name, file)
    inner = settings.get("text_config")
    found = [s.get("eos_token_id") for s in (settings, inner) if isinstance(s, Mapping)]
    named = [i for value in found for i in _ids(config.name, value)]
    special = set(tokenizer.added_tokens_decoder)
    own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    return [*generation, *(i for i in named if not generation or i in special), *own]


def _generation_eos(name: str, path: str, revision: str | None) -> object:
    """Return `eos_token_id` of generation_config.json; None without one. Raises ModelError."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(path, revision=revision or "main").eos_token_id
    except OSError as error:
        if find(path, "generation_config.json", revision) is None:
            return None
        raise ModelError(f"model {name}: generation_config.json is damaged ({_one_line(error)})") from error
    except Exception as error:  # the file is untrusted
        raise ModelError(f"model {name}: generation_config.json is damaged ({_one_line(error)})") from error


def _ids(name: str, found: Any) -> list[int]:
    """Return the token ids of an `eos_token_id`: one, a list, or none. Raises ModelError."""
    ids: list[Any] = found if isinstance(found, list) else [] if found is None else [found]
    for i in ids:
        if type(i) is not int or i < 0:
            raise ModelError(f"model {name}: eos_token_id {shown(found)} is not a token id; fix it in its files")
    return ids


def _one_line(error: Exception) -> str:
    return textwrap.shorten(str(error), 200) or type(error).__name__
