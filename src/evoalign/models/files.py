# SPDX-License-Identifier: Apache-2.0
"""A model's files, in a folder or in the hub's cache: where they are, and what of them is refused before it is read."""

from __future__ import annotations

import functools
import os
import re
import socket
import stat
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, Literal, cast
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from safetensors import SafetensorError, safe_open

from evoalign.config.outside import is_hub_name
from evoalign.config.reading import read_object
from evoalign.errors import DataError, EvoalignError, ModelError, shown
from evoalign.models import tiny
from evoalign.models.experts import tensors_of
from evoalign.models.refusals import refuse_config, refuse_file, refuse_folder

MODEL = "model.safetensors"
INDEX = f"{MODEL}.index.json"
SHARD_BYTES = 5 * 10**9


def place(name: str) -> str:
    """A folder or a hub name; `tiny` is the model that comes with the package. Raises ModelError."""
    if name == "tiny":
        return str(tiny())
    try:
        path = Path(name).expanduser()
    except RuntimeError:
        raise ModelError(f"model.name: {name} names the home of nobody here") from None
    if not path.is_dir():
        refuse_file(name, path)
        if not is_hub_name(name):
            raise ModelError(f"model.name: no folder {name}")
        look_for_hub()
        return name
    entries = _entries(name, path)
    for entry in entries:
        with suppress(OSError):  # a link to nothing, or to where nobody may look
            if any(is_kind(entry.stat().st_mode) for is_kind in (stat.S_ISFIFO, stat.S_ISCHR, stat.S_ISBLK)):
                raise ModelError(
                    f"model {name}: {shown(entry.name)} is a pipe or a device and no file; take it out of the folder"
                )
    refuse_folder(name, [entry.name for entry in entries])
    return str(path)


@contextmanager
def set_by(setting: str) -> Generator[None]:
    """Errors of a model that another setting or option than `model.name` names say which one, such as scorer.reward.

    And nothing of `model.base`, which has no such other.
    """
    try:
        yield
    except ModelError as error:
        words = re.sub(r", or (say where it is )?with model\.base", "", str(error))
        raise ModelError(words.replace("model.name", setting)) from error


def _entries(name: str, folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise ModelError(f"model {name}: its folder cannot be read ({error.strerror})") from error


def find(path: str, name: str, revision: str | None) -> Path | None:
    """A file of a model, in its folder or as the hub's cache has it; None where it has none of that name."""
    from transformers.utils.hub import cached_file

    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    found = cached_file(path, name, revision=revision, **quiet)
    return None if found is None else Path(found)


def weight_files(path: str, revision: str | None, name: str) -> Iterator[Path]:
    """A model's safetensors files, of which `refuse_pickles` has seen the index. Raises ModelError."""
    index = None if find(path, MODEL, revision) is not None else find(path, INDEX, revision)
    files = [MODEL] if index is None else sorted({str(file) for file in read_object(index)["weight_map"].values()})
    for file in files:
        found = find(path, file, revision)
        if found is None:
            raise ModelError(
                f"model {name} has no {file}, and weights in any other form are not read (a pickle can run code); "
                "convert it to safetensors, or fetch it again"
            )
        yield found


def check_weights(path: str, revision: str | None, name: str) -> None:
    """Raise ModelError where one of `weight_files` is missing or has no header that can be read."""
    for file in weight_files(path, revision, name):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(f"model {name} does not load: {why_not(error)}") from error


def load_whole(path: str, revision: str | None, dtype: torch.dtype | Literal["auto"], name: str) -> Any:
    """A causal language model on the CPU, from safetensors alone, without code of others. `name` is for messages.

    Raises ModelError, also for a tensor that the files lack: the library would start it at random and go on.
    """
    from transformers import AutoModelForCausalLM

    try:
        refuse_pickles(path, revision)
        with without_bar(path):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path,
                revision=revision,
                dtype=dtype,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # told below, with the tensor's name
            )
    except EvoalignError:
        raise
    except Exception as error:  # the library has a score of kinds for files that may say anything
        raise ModelError(f"model {name} does not load: {why_not(error)}") from error
    model, info = loaded
    check_whole(name, info)
    return model.eval().requires_grad_(False)


def write_whole(
    base: str, revision: str | None, dtype: torch.dtype, folder: Path, state: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """A model with the tensors of `state` in place, in `dtype`, with its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with without_bar(base):
        model: Any = AutoModelForCausalLM.from_pretrained(
            base, revision=revision, dtype=dtype, trust_remote_code=False, use_safetensors=True
        )
    parameters = tensors_of(model)
    with torch.no_grad():
        for name, tensor in state:
            parameters[name].copy_(tensor)
    tokenizer: Any = AutoTokenizer.from_pretrained(base, revision=revision, trust_remote_code=False)
    model.save_pretrained(folder, max_shard_size=SHARD_BYTES)
    tokenizer.save_pretrained(folder)


@contextmanager
def without_bar(path: str) -> Generator[None]:
    """No bar of the library for a model that lies here, of which a run loads several; a download keeps its own."""
    from transformers.utils import logging

    if not Path(path).is_dir() or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def check_whole(name: str, info: Mapping[str, Any]) -> None:
    """Raise ModelError where the library says that a tensor is not in a model's files, or has another shape."""
    if info["missing_keys"]:
        raise ModelError(f"model {name} does not load: its files lack {min(info['missing_keys'])}; fetch it again")
    if info["mismatched_keys"]:
        tensor, found, wanted = min(info["mismatched_keys"])
        raise ModelError(
            f"model {name} does not load: {tensor} is {tuple(found)} in its files, and {tuple(wanted)} by its "
            "config.json; fetch it again"
        )


def refuse_hooks(path: str, revision: str | None, *, writes: bool = True) -> None:
    """Raise ModelError where a model's config.json has the library fetch code, or read another file of weights.

    A kernel of a hub, such as `_attn_implementation: "someone/kernel"`, is fetched and run without a question. With
    `writes`, also for a kind of model that cannot be trained here.
    """
    try:
        found = find(path, "config.json", revision)
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
    if writes:
        refuse_config(path, tree)


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


def refuse_pickles(path: str, revision: str | None, *, writes: bool = True) -> None:
    """Raise ModelError where a model's index names files of another form: the library would read those too.

    And for what `refuse_hooks` refuses.
    """
    refuse_hooks(path, revision, writes=writes)
    found = find(path, INDEX, revision)
    if found is None:
        return
    try:
        names = read_object(found)["weight_map"].values()
        odd = [name for name in names if not name.endswith(".safetensors")]
        far = [name for name in names if "\\" in name or PurePosixPath(name).is_absolute() or ".." in name.split("/")]
    except (DataError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"model {path}: {INDEX} is damaged ({type(error).__name__}); fetch it again") from error
    if odd:
        raise ModelError(f"model {path}: {INDEX} names {odd[0]!r}; convert it to safetensors")
    if far:
        raise ModelError(f"model {path}: {INDEX} names {shown(far[0])}, which is not in the folder; copy it there")


def why_not(error: Exception) -> str:
    """Why a model does not load, in one line."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    if why := not_cached(error):
        return why
    if "file named model.safetensors" in line:
        return "it has no model.safetensors, and weights in any other form are not read; convert it to safetensors"
    return line


@functools.cache
def look_for_hub() -> bool:
    """Whether the hub has an address here. Where not, its library is told, which would try for more than a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or getproxies():
        return not constants.HF_HUB_OFFLINE
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, None)
    except OSError:
        constants.HF_HUB_OFFLINE = True
        return False
    return True


def not_cached(error: Exception) -> str | None:
    """What to do where the hub is not there to be asked; None of any other error."""
    from huggingface_hub import constants

    if not re.search("in the cached files|in the disk cache", str(error)):
        return None
    is_set = constants.HF_HUB_OFFLINE and {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"} & os.environ.keys()
    why = "HF_HUB_OFFLINE is set" if is_set else "the hub cannot be reached"
    return (
        f"it is not in the cache of this machine, and {why}; fetch it where there is a network, give model.name the "
        "folder that it is in and set HF_HUB_OFFLINE=1, or use `tiny`"
    )
