# SPDX-License-Identifier: Apache-2.0
"""Adapters merged into their base, once, in a folder that every engine and check reads as it reads any model.

    $EVOALIGN_CACHE, $XDG_CACHE_HOME/evoalign or ~/.cache/evoalign
      merged/KEY/     config.json, model*.safetensors, generation_config.json, tokenizer files, merged.json

KEY follows from the adapters' bytes, the base's files and the dtype, so that what has changed is merged anew. A folder
is written whole or not at all. It, or any of its files, may be deleted at any time: merged.json has their names and
sizes, and what is not whole by that is made again. The sum is formed in float32 and
rounded once: kept in float32, or in half precision where `model.dtype` asks for that.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from evoalign.config.reading import read_object
from evoalign.errors import DataError, EvoalignError, ModelError, RunExistsError
from evoalign.models.adapters import ADAPTER_CONFIG, put_into, weights_of
from evoalign.models.files import find, load_whole
from evoalign.rundir import files

if TYPE_CHECKING:
    from evoalign.models.origin import Origin

FORM = 1
"""Goes up where the same files are merged into others."""
SHARD = "5GB"
RECORD = "merged.json"
"""Of a folder: its other files' sizes in bytes, by name."""
PATIENCE = 0.5
"""Seconds between two looks at a folder that another process is filling."""
OF_MODEL = (".json", ".jinja", ".model", ".safetensors")
"""Endings of the files that make a model and its tokenizer."""
Signature = tuple[tuple[str, int, int], ...]


def cache_folder() -> Path:
    """Where merged models are kept."""
    own, shared = os.environ.get("EVOALIGN_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(own).expanduser() if own else Path(shared or "~/.cache").expanduser() / "evoalign"


def kept_dtype(dtype: str) -> str:
    """Of the merged weights, by `model.dtype`."""
    return "float32" if dtype == "auto" else dtype


def folder_of(origin: Origin, dtype: str) -> Path:
    """Where the merged model is, or will be. Raises ModelError."""
    adapters = [_digest(adapter, signature(adapter)) for adapter in origin.adapters]
    tokenizer = _of_base(*origin.tokenizer, "tokenizer_config.json")
    key = [FORM, kept_dtype(dtype), _of_base(origin.base, origin.revision, "config.json"), tokenizer, adapters]
    return cache_folder() / "merged" / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]


def merged(origin: Origin, dtype: str) -> Path:
    """The folder of the merged model, made where it is not there, or not whole. Raises ModelError.

    Where another process is making it, as of several runs that begin at once, that is waited for, however it ends.
    """
    folder = folder_of(origin, dtype)
    while not is_whole(folder):
        try:
            _make(folder, origin, dtype)
        except RunExistsError:
            time.sleep(PATIENCE)
    return folder


def is_whole(folder: Path) -> bool:
    """Whether all that was written there is there still, by names and sizes: what clears a cache takes single files."""
    try:
        recorded: Mapping[str, Any] = read_object(folder / RECORD)
        return recorded.items() <= _sizes(folder).items()
    except (DataError, OSError):  # also of a release that kept no record
        return False


def _sizes(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()}


def _make(folder: Path, origin: Origin, dtype: str) -> None:
    """Fill the folder. Raises ModelError, RunExistsError where another process is filling it, or has just done so."""
    try:
        with files.filled(folder) as temporary:
            if is_whole(folder):  # and may be read by now
                raise RunExistsError(f"{folder} was made by another process")
            _fill(temporary, origin, getattr(torch, kept_dtype(dtype)))
            (temporary / RECORD).write_text(json.dumps(_sizes(temporary)), encoding="utf-8")
    except EvoalignError:
        raise
    except OSError as error:
        raise ModelError(
            f"the merged model does not go into {folder} ({error.strerror or error}); EVOALIGN_CACHE names another "
            "place"
        ) from error


def _fill(folder: Path, origin: Origin, dtype: torch.dtype) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    model: Any = load_whole(origin.base, origin.revision, torch.float32, origin.base)
    for adapter in origin.adapters:
        model = put_into(model, adapter, origin.base)
    model.generation_config = GenerationConfig()  # the base's own may be one that the library does not write
    model.to(dtype).save_pretrained(folder, max_shard_size=SHARD)
    decoding = find(origin.base, "generation_config.json", origin.revision)
    if decoding is not None:
        shutil.copyfile(decoding, folder / "generation_config.json")
    where, revision = origin.tokenizer
    tokenizer: Any = AutoTokenizer.from_pretrained(where, revision=revision, trust_remote_code=False)
    tokenizer.save_pretrained(folder)


def signature(folder: Path) -> Signature:
    """Names, sizes and times of a folder's files: what changes where one of them does."""
    found = ((path, path.stat()) for path in folder.iterdir() if path.suffix in OF_MODEL and path.is_file())
    return tuple(sorted((path.name, stat.st_size, stat.st_mtime_ns) for path, stat in found))


@cache
def _digest(adapter: Path, _: Signature) -> list[str]:
    return [files.digest_of(adapter / ADAPTER_CONFIG), files.digest_of(weights_of(adapter))]


def _of_base(path: str, revision: str | None, name: str) -> object:
    """What stands for a model's files: where they are, which of the hub's cache names the commit, and their times."""
    if Path(path).is_dir():
        return [str(Path(path).resolve()), signature(Path(path))]
    file = find(path, name, revision)
    return [path, revision, None if file is None else str(file.parent)]
