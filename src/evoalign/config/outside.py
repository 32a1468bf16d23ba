# SPDX-License-Identifier: Apache-2.0
"""Settings that lead out of a run: to code, a program, an address, a secret, a folder that is written to, or a hub.

The sender of a run directory chooses the config in it. So each section marks its settings of this kind with `Outside`,
and all other settings that hold free text with `INSIDE`. A command that takes a run follows a marked setting only where
the user gives it, by `--config` or `--set`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit
from urllib.request import getproxies

from pydantic import BaseModel

from evoalign.config.reading import parse_yaml, read_bytes, read_object
from evoalign.errors import ConfigError, DataError, shown

EVALUATION_SKIPS = ("tracking", "grpo", "es.shaping")
"""Sections and settings that only training reads."""
REPLAY_SKIPS = (*EVALUATION_SKIPS, "task", "engine", "scorer")
"""Sections and settings that a replay or an export does not read: it chooses its own engine and scores nothing."""
SERVING_SKIPS = (*EVALUATION_SKIPS, "task", "scorer")
"""Sections and settings that a server of a model does not read: it scores nothing."""
DEEPEST = 16
"""Adapters and runs over one another that are followed."""
HUB_SECONDS = 5.0
"""Time limit of the connection that checks whether the hub is there."""


@dataclass(frozen=True, slots=True)
class Outside:
    """Mark of a setting that leads out of the run: `what` it leads to, and which values do.

    `leads` gets the value, or each item of a list. Of a mapping, the `keys` lead out that have a true value.
    """

    what: str
    leads: Callable[[Any], bool] = bool
    keys: frozenset[str] = frozenset()

    def items(self, place: str, value: object) -> Iterator[tuple[str, object]]:
        """Yield the place and value of each part that leads out."""
        if isinstance(value, Mapping):
            named = cast("Mapping[str, object]", value)
            yield from ((f"{place}.{key}", item) for key, item in named.items() if key in self.keys and item)
            return
        parts = cast("list[object]", value) if isinstance(value, list) else [value]
        yield from ((place, part) for part in parts if part is not None and self.leads(part))


class Inside:
    """Mark of a setting that holds free text and leads nowhere: names of columns, modules, files that are read."""


def _downloads(name: str, depth: int = 0) -> bool:
    """Return whether a model is downloaded: itself, or what an adapter or a run in its folder names as its base."""
    if is_hub_name(name):
        return _is_away(name, "model")
    if "\0" in name:  # the command itself refuses it
        return False
    folder = Path(os.path.expanduser(name))  # noqa: PTH111 (which raises nothing)
    bases: list[object] = []
    with contextlib.suppress(DataError):  # missing or damaged: not an adapter
        bases.append(read_object(folder / "adapter_config.json").get("base_model_name_or_path"))
    saved = [folder, *folder.glob("loras/generation_*")]  # each may be a link, and its run is where it leads
    for run in {folder, *(mean.resolve().parent.parent for mean in saved)}:
        bases += _models_of(run / "config.yaml")
    return depth < DEEPEST and any(_downloads(base, depth + 1) for base in bases if isinstance(base, str))


def _models_of(file: Path) -> list[object]:
    try:
        tree = parse_yaml(read_bytes(file).decode("utf-8", "replace"), str(file))
    except (ConfigError, DataError):
        return []
    model = cast("Mapping[str, object]", tree).get("model") if isinstance(tree, Mapping) else None
    found = cast("Mapping[str, object]", model) if isinstance(model, Mapping) else {"name": model}
    return [found.get("name"), found.get("base")]


def is_hub_name(name: str) -> bool:
    """Return whether a model's name is one of the hub, and not a folder."""
    looks_local = name == "tiny" or name.startswith((".", "/", "~")) or name.count("/") > 1
    return not looks_local and not Path(name).is_dir()


def _is_away(name: str, kind: str) -> bool:
    """Return whether a repository is missing in this machine's hub cache, so that it would be downloaded."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return not (Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type=kind)).is_dir()


INSIDE = Inside()
SCRIPT = Outside("code that is run")
CODE = Outside("code that is run", lambda name: ":" in name)
PROGRAM = Outside("a program that is started, or its arguments")
ADDRESS = Outside("an address that is connected to")
CERTIFICATES = Outside("certificates that an address is trusted by")
SECRET = Outside("an environment variable that is sent")
FOLDER = Outside("a folder that is written to")
TRACKER = Outside("a service that records are sent to, or code", lambda name: name != "tensorboard")
MODEL = Outside("a model that is downloaded", _downloads)
OF_CODE = Outside("a setting of code that is run")
DATA = Outside(
    "data that are downloaded", lambda name: name.startswith("hub:") and _is_away(name.split(":")[1], "dataset")
)


def followed(config: BaseModel, skip: Sequence[str]) -> list[tuple[str, object, Outside]]:
    """Return what `marked` yields, without the sections and settings in `skip`, which a command does not read."""
    return [found for found in marked(config) if not {found[0], found[0].partition(".")[0]} & set(skip)]


def marked(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, object, Outside]]:
    """Yield the dotted place, the value and the mark of each setting that leads out, in all sections below."""
    for name, info in type(section).model_fields.items():
        place, value = prefix + (info.alias or name), getattr(section, name)
        mark = next((m for m in info.metadata if isinstance(m, Outside)), None)
        if mark is not None:
            yield from ((where, part, mark) for where, part in mark.items(place, value))
        elif isinstance(value, BaseModel):
            yield from marked(value, f"{place}.")
    if section.model_extra and ":" in str(getattr(section, "name", "")):
        yield from ((f"{prefix}{name}", value, OF_CODE) for name, value in section.model_extra.items())


def refuse(
    config: BaseModel, where: Path, fix: str, given: Mapping[str, Any] | None = None, skip: Sequence[str] = ()
) -> None:
    """Raise ConfigError for settings that lead out and are not in `given`, what the user gave over the config.

    `where` is the run or journal that the config came with; what is in `skip` is not read by the command.
    """
    found = [
        f"{place} to {shown(value)} ({mark.what})"
        for place, value, mark in followed(config, skip)
        if not _has(given or {}, place)
    ]
    if found:
        raise ConfigError(
            f"{where} sets {'; '.join(found)}. Settings like this are not taken from a run. If you trust it, {fix}; if "
            "not, give another value with --set"
        )


def _has(tree: object, place: str) -> bool:
    """Return whether a tree has a dotted place; `engine: vllm` has `engine.name`."""
    name, _, below = place.partition(".")
    if not isinstance(tree, Mapping):
        return name == "name" and tree is not None
    found = cast("Mapping[str, object]", tree)
    return name in found and (not below or _has(found[name], below))


@functools.cache
def look_for_hub() -> bool:
    """Return whether the hub can be reached, by one attempt; if not, set it offline, since its libraries would retry
    for up to a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or getproxies():
        return not constants.HF_HUB_OFFLINE
    try:
        address = urlsplit(constants.ENDPOINT)
        port = address.port or (80 if address.scheme == "http" else 443)
        socket.create_connection((address.hostname, port), timeout=HUB_SECONDS).close()
    except OSError:
        constants.HF_HUB_OFFLINE = True
        return False
    return True
