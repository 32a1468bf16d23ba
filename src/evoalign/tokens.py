# SPDX-License-Identifier: Apache-2.0
"""Prompts to token ids and back. Done once, outside the engines, so that all of them see the same ids."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, cast

from evoalign.config import ModelConfig
from evoalign.config.reading import read_object
from evoalign.errors import DataError, ModelError, shown
from evoalign.models import templates, tiny
from evoalign.types import Prompt, text_of


def model_path(config: ModelConfig) -> str:
    """A folder or a hub name; `tiny` is the model that comes with the package. Raises ModelError."""
    name = config.name
    if name == "tiny":
        return str(tiny())
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    try:
        path = Path(name).expanduser()
    except RuntimeError:
        raise ModelError(f"model.name: {name} names the home of nobody here") from None
    if not path.is_dir():
        if looks_local:
            raise ModelError(f"model.name: no folder {name}")
        return name
    for entry in _entries(name, path):
        with suppress(OSError):  # a link to nothing, or to where nobody may look
            if any(is_kind(entry.stat().st_mode) for is_kind in (stat.S_ISFIFO, stat.S_ISCHR, stat.S_ISBLK)):
                raise ModelError(
                    f"model {name}: {shown(entry.name)} is a pipe or a device and no file; take it out of the folder"
                )
    return str(path)


def _entries(name: str, folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise ModelError(f"model {name}: its folder cannot be read ({error.strerror})") from error


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
        if ids and ids[-1] in self.stop_ids:  # which a tokenizer may not count among the special ones
            ids = ids[:-1]
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def before_stop(text: str, stop: Sequence[str], keep: bool = False) -> str:
    """A completion as far as the first of the texts that end it; `keep`: with that, the shortest of those there."""
    ends = [(place, place + keep * len(s)) for s in stop if (place := text.find(s)) >= 0]
    return text[: min(ends)[1]] if ends else text


def load(config: ModelConfig) -> Tokens:
    """The tokenizer of a model and its stop tokens. Raises ModelError."""
    from transformers import AutoTokenizer

    path = model_path(config)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, revision=config.revision, trust_remote_code=False)
    except Exception as error:  # the library raises a score of kinds, bare Exception among them
        if why := _not_cached(error):
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
    return Tokens(tokenizer, [*_stops(config.name, path, config.revision), *own], guarded=config.name != "tiny")


def _stops(name: str, path: str, revision: str | None) -> list[int]:
    """The stop tokens of the model's generation config; without one, it stops at the tokenizer's own end."""
    from transformers import GenerationConfig

    try:
        found: Any = GenerationConfig.from_pretrained(path, revision=revision or "main").eos_token_id
    except OSError as error:
        if _file(path, "generation_config.json", revision) is None:
            return []
        raise ModelError(f"model {name}: generation_config.json is damaged ({_one_line(error)})") from error
    except Exception as error:  # of a file that holds something else than settings
        raise ModelError(f"model {name}: generation_config.json is damaged ({_one_line(error)})") from error
    ids: list[Any] = found if isinstance(found, list) else [] if found is None else [found]
    for i in ids:
        if type(i) is not int or i < 0:
            raise ModelError(f"model {name}: eos_token_id {shown(found)} is no id of a token; fix it in its files")
    return ids


def _file(path: str, name: str, revision: str | None) -> Path | None:
    """A file of a model, in its folder or as the hub's cache has it; None where it has none of that name."""
    from transformers.utils.hub import cached_file

    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    found = cached_file(path, name, revision=revision, **quiet)
    return None if found is None else Path(found)


def refuse_hooks(path: str, revision: str | None) -> None:
    """Raise ModelError where a model's config.json has the library fetch code, or read another file of weights.

    A kernel of a hub, such as `_attn_implementation: "someone/kernel"`, is fetched and run without a question.
    """
    try:
        found = _file(path, "config.json", revision)
    except (OSError, ValueError):  # no name of a model: who loads it says so
        return
    if found is None:
        return
    try:
        tree = read_object(found, mend="fetch it again")
    except DataError as error:
        raise ModelError(f"model {path}: {error}") from error
    for name, value in _settings(tree):
        kernel = name.removesuffix("_internal").endswith("_implementation") and isinstance(value, str) and "/" in value
        if kernel or (value and name in ("use_kernels", "kernel_config", "transformers_weights")):
            raise ModelError(
                f"model {path}: its config.json sets {name} to {shown(value)}, which is not taken from a model; take "
                "it out of the file if you trust the model"
            )


def _settings(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Each setting at any depth; a mapping's entries also under its own name."""
    yield name, tree
    if isinstance(tree, Mapping):
        for key, value in cast("Mapping[str, Any]", tree).items():
            yield from _settings(value, key)
            if name.endswith("_implementation"):
                yield name, value
    elif isinstance(tree, list):
        for value in cast("list[Any]", tree):
            yield from _settings(value, name)


def refuse_pickles(path: str, revision: str | None) -> None:
    """Raise ModelError where a model's index names files of another form: the library would read those too.

    And for what `refuse_hooks` refuses.
    """
    refuse_hooks(path, revision)
    index = "model.safetensors.index.json"
    found = _file(path, index, revision)
    if found is None:
        return
    try:
        names = read_object(found)["weight_map"].values()
        odd = [name for name in names if not name.endswith(".safetensors")]
        far = [name for name in names if "\\" in name or PurePosixPath(name).is_absolute() or ".." in name.split("/")]
    except (DataError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"model {path}: {index} is damaged ({type(error).__name__}); fetch it again") from error
    if odd:
        raise ModelError(f"model {path}: {index} names {odd[0]!r}; convert it to safetensors")
    if far:
        raise ModelError(f"model {path}: {index} names {shown(far[0])}, which is not in the folder; copy it there")


def why_not(error: Exception) -> str:
    """Why a model does not load, in one line."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    if why := _not_cached(error):
        return why
    if "file named model.safetensors" in line:
        return "it has no model.safetensors, and weights in any other form are not read; convert it to safetensors"
    return line


def _not_cached(error: Exception) -> str | None:
    """What to do where the hub is not there to be asked; None of any other error."""
    from huggingface_hub import constants

    if not re.search("in the cached files|in the disk cache", str(error)):
        return None
    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
    return (
        f"it is not in the cache of this machine, and {why}; fetch it where there is a network, give model.name the "
        "folder that it is in and set HF_HUB_OFFLINE=1, or use `tiny`"
    )


def _one_line(error: Exception) -> str:
    return textwrap.shorten(str(error), 200) or type(error).__name__
