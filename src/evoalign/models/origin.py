# SPDX-License-Identifier: Apache-2.0
"""What `model.name` stands for: a model, or adapters over one, which are merged into it before anything begins.

    tiny, a folder, a hub name     the model itself
    a folder with a PEFT adapter   its base, which its adapter_config.json or `model.base` names, and the adapter
    a hub name of an adapter       the same
    a run directory                its latest saved mean: a checkpoint, or an adapter over the run's own model
    one saved mean of a run        the same, of that generation

A run that starts from an adapter does not move that adapter: it starts from the merged weights, with a new one that is
zero. The frozen factor of space `lora` is drawn from the run's seed, which its journal counts on, so that an adapter
from elsewhere has no place in it; merged, the start is the same model for every space.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from evoalign.config import ModelConfig, load
from evoalign.config.reading import read_object
from evoalign.config.secrets import public_path
from evoalign.errors import DataError, EvoalignError, ModelError, plain, shown
from evoalign.models import merging
from evoalign.models.adapters import ADAPTER_CONFIG, PICKLE, WEIGHTS, weights_of
from evoalign.models.files import find, place
from evoalign.rundir import checkpoint
from evoalign.rundir.directory import generation_of, saved_folders
from evoalign.rundir.method import method_of

DEEPEST = 16
"""Adapters over one another: more are a circle."""


@dataclass(frozen=True, slots=True)
class Found:
    """How one thing that a model is made of was found: as `what` of a `name`, and `more` about it."""

    what: str
    name: str
    more: str = ""

    def words(self, name: str | None = None) -> str:
        """In words; `name` stands for its own."""
        return f"{self.what} {self.name if name is None else name}{self.more}"


@dataclass(frozen=True, slots=True)
class Origin:
    """A model, a folder or a hub name, and the adapters that are merged into it, the first one first.

    `tokenizer` is where the tokenizer's files are, with its revision: those beside the last adapter that has any.
    `told` is how it was found; nothing of a model that is given as it is.
    """

    base: str
    revision: str | None
    tokenizer: tuple[str, str | None]
    adapters: tuple[Path, ...] = ()
    told: tuple[Found, ...] = ()


def origin(config: ModelConfig) -> Origin:
    """Where the weights come from, by reading a few small files. Raises ModelError, CheckpointError, ConfigError."""
    return _origin(config.name, config.revision, config.base, 0)


def model_path(config: ModelConfig) -> str:
    """A folder, or a hub name, with all weights that a run starts from: adapters are merged. Raises ModelError."""
    found = origin(config)
    return str(merging.merged(found, config.dtype)) if found.adapters else found.base


def described(config: ModelConfig) -> tuple[str, str | None]:
    """A folder, or a hub name and its revision, whose config.json is that of the model; nothing is merged for it."""
    found = origin(config)
    there = merging.folder_of(found, config.dtype) if found.adapters else None
    return (found.base, found.revision) if there is None or not merging.is_whole(there) else (str(there), None)


def own_dtype(config: ModelConfig) -> str | None:
    """What the model itself, before any adapter, was saved in, as its config.json says; None where it does not."""
    found = origin(config)
    file = find(found.base, "config.json", found.revision)
    tree = {} if file is None else read_object(file)
    for part in (tree, tree.get("text_config") or {}):
        said = part.get("dtype") or part.get("torch_dtype")
        if said in ("float32", "bfloat16", "float16"):
            return str(said)
    return None


def lines(config: ModelConfig) -> list[str]:
    """What a run says of where it starts; nothing where `model.name` is a model itself."""
    found = origin(config)
    if config.base is not None and not found.adapters:
        return [f"warning: model.base {config.base} is not used: model.name {config.name} is no adapter"]
    told = "; ".join(part.words() for part in found.told)
    if not found.adapters:
        return [f"start: {told}"] if told else []
    return [
        f"start: {told}: merged into {found.base} in float32 and kept in "
        f"{merging.folder_of(found, config.dtype)}; the run trains the merged model, not the adapter itself"
    ]


def record(config: ModelConfig) -> dict[str, Any]:
    """What a run's manifest says of where it starts; nothing where `model.name` is a model itself.

    Folders of this machine are named by their last part, as on a model card: nothing is found by what stands here.
    """
    found = origin(config)
    merged = [part.words(public_path(part.name)) for part in found.told]
    return {"start": {"base": public_path(found.base), "merged": merged}} if merged else {}


def elsewhere(config: ModelConfig, name: str) -> ModelConfig:
    """The same settings for a model that is elsewhere; what its adapter lies over is said by its own files."""
    return config.model_copy(update={"name": name, "revision": None, "base": None})


def _origin(name: str, revision: str | None, base: str | None, depth: int) -> Origin:
    if depth > DEEPEST:
        raise ModelError(f"model {name}: adapters lie over one another more than {DEEPEST} deep, or in a circle")
    path = place(name)
    folder = Path(path)
    if not folder.is_dir():
        adapter = _adapter_of_hub(path, revision)
        if adapter is None:
            return Origin(path, revision, (path, revision))
        own = (path, revision) if find(path, "tokenizer_config.json", revision) else None
        return _over(name, adapter, own, base, depth)
    if (folder / "config.yaml").is_file() and method_of(folder) is not None:
        saved = saved_folders(folder)
        if not saved:
            raise ModelError(f"model {name} is a run that saved no weights yet; train it first, or name its own model")
        return _of_mean(
            name, saved[-1], base, depth, Found("run", name, f", after generation {generation_of(saved[-1])}")
        )
    run = folder.resolve().parent.parent
    if (folder / checkpoint.RECORD).is_file() and (run / "config.yaml").is_file() and method_of(run) is not None:
        return _of_mean(name, folder, base, depth, Found("the mean that a run saved in", name))
    if not (folder / ADAPTER_CONFIG).is_file():
        return Origin(path, revision, (path, revision))
    if any(folder.glob("model*.safetensors")):
        raise ModelError(
            f"model {name} holds a model and an adapter, {ADAPTER_CONFIG}; put them into folders of their own, and "
            "name the model's in that file, or with model.base"
        )
    own = (path, None) if (folder / "tokenizer_config.json").is_file() else None
    return _over(name, folder, own, base, depth)


def _of_mean(name: str, saved: Path, base: str | None, depth: int, told: Found) -> Origin:
    """A saved mean of a run, whose config says what is below an adapter."""
    _verified(saved, merging.signature(saved))
    if not (saved / ADAPTER_CONFIG).is_file():
        return Origin(str(saved), None, (str(saved), None), told=(told,))
    model = load([saved.resolve().parent.parent / "config.yaml"], needs_es=False).model
    below = _below(name, "the config of the run", base, model, depth)
    return replace(below, adapters=(*below.adapters, saved), told=(*below.told, told))


def _over(name: str, adapter: Path, tokenizer: tuple[str, str | None] | None, base: str | None, depth: int) -> Origin:
    """An adapter over what it names, or `base`."""
    settings = _settings(name, adapter / ADAPTER_CONFIG)
    said, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    if base is None and (not isinstance(said, str) or not said):
        raise ModelError(
            f"model {name} is an adapter whose {ADAPTER_CONFIG} names no base; name it there, or with model.base"
        )
    model = ModelConfig(name=str(said or ""), revision=revision if isinstance(revision, str) else None)
    below = _below(name, f"its {ADAPTER_CONFIG}", base, model, depth)
    weights_of(adapter)
    kind = f"{plain(str(settings.get('peft_type')))[:20]}, rank {shown(settings.get('r'))}"
    return replace(
        below,
        adapters=(*below.adapters, adapter),
        told=(*below.told, Found("adapter", name, f" ({kind})")),
        tokenizer=tokenizer or below.tokenizer,
    )


def _below(name: str, who: str, base: str | None, model: ModelConfig, depth: int) -> Origin:
    """What an adapter lies over: `base` where that is set, else what its files say."""
    if base is not None:
        return _origin(base, None, None, depth + 1)
    try:
        return _origin(model.name, model.revision, model.base, depth + 1)
    except EvoalignError as error:
        raise ModelError(
            f"model {name} is an adapter over {shown(model.name)}, by {who}, and that is not to be had ({error}); put "
            "it there, or say where it is with model.base"
        ) from error


def _settings(name: str, file: Path) -> Mapping[str, Any]:
    try:
        return read_object(file, mend="fetch it again")
    except DataError as error:
        raise ModelError(f"model {name}: {error}") from error


@cache
def _adapter_of_hub(name: str, revision: str | None) -> Path | None:
    """The folder in the hub's cache that holds an adapter, and nothing of a model; None of anything else."""
    try:
        settings = find(name, ADAPTER_CONFIG, revision)
        if settings is None:
            return None
        # Fetched into the folder of the settings, where they are looked for; a pickle to be refused as one.
        if find(name, WEIGHTS, revision) is None:
            find(name, PICKLE, revision)
    except (OSError, ValueError):  # no name of a model: who loads it says so
        return None
    return settings.parent


@cache
def _verified(folder: Path, files: object) -> None:
    """Raise CheckpointError where a saved mean is not whole; asked once for the files as they are."""
    checkpoint.verify(folder)
