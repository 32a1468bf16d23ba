# SPDX-License-Identifier: Apache-2.0
"""The model that `model.name` refers to; adapters are merged into their base before anything else.

    tiny, a folder, a hub name     the model itself
    a folder with a PEFT adapter   its base, which its adapter_config.json or `model.base` names, and the adapter
    a hub name of an adapter       the same
    a run directory                its latest saved mean: a checkpoint, or an adapter over the run's own model
    one saved mean of a run        the same, of that generation

A run that starts from an adapter does not train that adapter: it starts from the merged weights, with a new adapter of
zero. The frozen factor of space `lora` is drawn from the run's seed, on which its journal depends, so it cannot be that
of an existing adapter. Merged, the start is the same model for every space.

Merged models are kept in a cache, where all engines and checks read them like any model:

    $EVOALIGN_CACHE, $XDG_CACHE_HOME/evoalign or ~/.cache/evoalign
      merged/KEY/     config.json, model*.safetensors, generation_config.json, tokenizer files, merged.json

KEY is a hash of the adapters' bytes, the base's files and the dtype. A folder is written whole or not at all. It, or
any of its files, may be deleted at any time: merged.json has the names and sizes of the files, and an incomplete folder
is made again. The sum is formed in float32 and rounded once, to `model.dtype`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from evoalign.config import ModelConfig
from evoalign.config.reading import read_object
from evoalign.config.secrets import public_path
from evoalign.errors import DataError, EvoalignError, ModelError, RunExistsError, plain, shown
from evoalign.models.adapters import ADAPTER_CONFIG, PICKLE, WEIGHTS, put_into, weights_of
from evoalign.models.files import LOADING, find, load_whole, place, read_settings, refuse_hooks, why_not
from evoalign.models.forms import Quantised, quantised
from evoalign.rundir import checkpoint, files
from evoalign.rundir.directory import generation_of, saved_folders
from evoalign.rundir.method import method_of
from evoalign.rundir.own import read_own

FORM = 2
"""Version of the merge: a higher one makes all merged models anew."""
SHARD = "5GB"
RECORD = "merged.json"
"""The sizes in bytes of the other files of a merged model, by name."""
PATIENCE = 0.5
"""Seconds between two looks at a folder that another process is filling."""
MODEL_FILES = (".json", ".jinja", ".model", ".safetensors")
"""Suffixes of the files of a model and its tokenizer."""
Signature = tuple[tuple[str, int, int], ...]
DEEPEST = 16
"""Most adapters on top of one another; more are a circle."""


@dataclass(frozen=True, slots=True)
class Source:
    """One part of a model, for messages: the kind `what`, its `name`, and `more` about it."""

    what: str
    name: str
    more: str = ""

    def words(self, name: str | None = None) -> str:
        """Describe the part, with another name if given."""
        return f"{self.what} {self.name if name is None else name}{self.more}"


@dataclass(frozen=True, slots=True)
class Origin:
    """A model, as a folder or a hub name, and the adapters that are merged into it, in order.

    `tokenizer` is the place of the tokenizer's files and its revision: those of the last adapter that has any.
    `sources` describe how the model was found; empty for a plain model. `trained_on` describes the quantised base that
    an adapter names where `model.base` takes its place.
    """

    base: str
    revision: str | None
    tokenizer: tuple[str, str | None]
    adapters: tuple[Path, ...] = ()
    sources: tuple[Source, ...] = ()
    trained_on: str = ""


def origin(config: ModelConfig) -> Origin:
    """Resolve a model from a few small files. Raises ModelError, CheckpointError, ConfigError."""
    found = _origin(config.name, config.revision, config.base, 0)
    packed = _packed(found.base, found.revision) if found.adapters else None
    if packed is not None:
        raise ModelError(
            f"model {config.name} is an adapter over {found.base}, which is quantised ({packed.words}), and merging "
            "would round the adapter away; set model.base to the model that was quantised, in bfloat16 or float16"
        )
    return found


def _packed(path: str, revision: str | None) -> Quantised | None:
    """Return how a model is quantised; None where it is not, or has no config.json. Raises ModelError."""
    try:
        file = find(path, "config.json", revision)
    except (OSError, ValueError):  # not the name of a model: loading it reports that
        return None
    return None if file is None else quantised(path, read_settings(path, file))


def model_path(config: ModelConfig) -> str:
    """Return a folder or hub name with the weights that a run starts from, adapters merged. Raises ModelError."""
    found = origin(config)
    return str(merged(found, config.dtype)) if found.adapters else found.base


def described(config: ModelConfig) -> tuple[str, str | None]:
    """Return a folder, or a hub name and its revision, that has the model's config.json, without merging."""
    found = origin(config)
    there = folder_of(found, config.dtype) if found.adapters else None
    return (found.base, found.revision) if there is None or not is_whole(there) else (str(there), None)


def own_dtype(config: ModelConfig) -> str | None:
    """Return the dtype in which the base model was saved, by its config.json; None where that has none."""
    found = origin(config)
    file = find(found.base, "config.json", found.revision)
    tree = {} if file is None else read_object(file)
    for part in (tree, tree.get("text_config") or {}):
        dtype = part.get("dtype") or part.get("torch_dtype")
        if dtype in ("float32", "bfloat16", "float16"):
            return str(dtype)
    return None


def lines(config: ModelConfig) -> list[str]:
    """Return the lines that a run prints about its start; none for a plain model."""
    found = origin(config)
    if config.base is not None and not found.adapters:
        return [f"warning: model.base {config.base} is not used: model.name {config.name} is not an adapter"]
    sources = "; ".join(part.words() for part in found.sources)
    if not found.adapters:
        packed = _packed(found.base, found.revision)
        kept = [] if packed is None else [f"base: quantised, {packed.words}; its weights stay as they are"]
        return [*([f"start: {sources}"] if sources else []), *kept]
    other = (
        f"warning: the adapter was trained on a quantised base ({found.trained_on}), whose numbers differ from those "
        f"of {found.base}: the start was not measured; compare its evaluation with the adapter's"
    )
    return [
        f"start: {sources}: merged into {found.base} in float32 and kept in "
        f"{folder_of(found, config.dtype)}; the run starts from the merged model",
        *([other] if found.trained_on else []),
    ]


def record(config: ModelConfig) -> dict[str, Any]:
    """Return the entries of a run's manifest about its start and its quantised base; empty for a plain model.

    Folders of this machine are given by their last part, as on a model card.
    """
    found = origin(config)
    merged = [part.words(public_path(part.name)) for part in found.sources]
    packed = None if found.adapters else _packed(found.base, found.revision)
    return {
        **({"start": {"base": public_path(found.base), "merged": merged}} if merged else {}),
        **({} if packed is None else {"quantised": {**packed.record(), "words": packed.words}}),
    }


def elsewhere(config: ModelConfig, name: str) -> ModelConfig:
    """Return the settings for a model in another place, whose own files name its base if it is an adapter."""
    return config.model_copy(update={"name": name, "revision": None, "base": None})


def _origin(name: str, revision: str | None, base: str | None, depth: int) -> Origin:
    if depth > DEEPEST:
        raise ModelError(f"model {name}: adapters are on top of one another more than {DEEPEST} deep, or in a circle")
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
        source = Source("run", name, f", after generation {generation_of(saved[-1])}")
        return _of_mean(name, saved[-1], base, depth, source)
    run = folder.resolve().parent.parent
    if (folder / checkpoint.RECORD).is_file() and (run / "config.yaml").is_file() and method_of(run) is not None:
        return _of_mean(name, folder, base, depth, Source("the mean that a run saved in", name))
    if not (folder / ADAPTER_CONFIG).is_file():
        return Origin(path, revision, (path, revision))
    if any(folder.glob("model*.safetensors")):
        raise ModelError(
            f"model {name} has both a model and an adapter ({ADAPTER_CONFIG}); put them into separate folders, and "
            "name the model's folder in that file or as model.base"
        )
    own = (path, None) if (folder / "tokenizer_config.json").is_file() else None
    return _over(name, folder, own, base, depth)


def _of_mean(name: str, saved: Path, base: str | None, depth: int, source: Source) -> Origin:
    """Resolve a saved mean of a run, whose config names the base of an adapter."""
    _verified(saved, signature(saved))
    if not (saved / ADAPTER_CONFIG).is_file():
        return Origin(str(saved), None, (str(saved), None), sources=(source,))
    model = read_own(saved.resolve().parent.parent).model
    below = _below(name, "the config of the run", base, model, depth)
    return replace(below, adapters=(*below.adapters, saved), sources=(*below.sources, source))


def _over(name: str, adapter: Path, tokenizer: tuple[str, str | None] | None, base: str | None, depth: int) -> Origin:
    """Resolve an adapter over the base that it names, or over `base`."""
    settings = read_settings(name, adapter / ADAPTER_CONFIG)
    below_name, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    if base is None and (not isinstance(below_name, str) or not below_name):
        raise ModelError(
            f"model {name} is an adapter whose {ADAPTER_CONFIG} names no base; name it there, or with model.base"
        )
    model = ModelConfig(name=str(below_name or ""), revision=revision if isinstance(revision, str) else None)
    below = _below(name, f"its {ADAPTER_CONFIG}", base, model, depth)
    weights_of(adapter)
    kind = f"{plain(str(settings.get('peft_type')))[:20]}, rank {shown(settings.get('r'))}"
    return replace(
        below,
        adapters=(*below.adapters, adapter),
        sources=(*below.sources, Source("adapter", name, f" ({kind})")),
        tokenizer=tokenizer or below.tokenizer,
    )


def _below(name: str, who: str, base: str | None, model: ModelConfig, depth: int) -> Origin:
    """Resolve the model below an adapter: `base` if set, else the one that its files name."""
    if base is not None:
        packed = None
        with suppress(EvoalignError, OSError):  # the model that is replaced need not exist
            packed = _packed(model.name, model.revision)
        return replace(_origin(base, None, None, depth + 1), trained_on="" if packed is None else packed.words)
    try:
        return _origin(model.name, model.revision, model.base, depth + 1)
    except EvoalignError as error:
        raise ModelError(
            f"model {name} is an adapter over {shown(model.name)}, by {who}, which cannot be found ({error}); put it "
            "there, or set model.base"
        ) from error


@cache
def _adapter_of_hub(name: str, revision: str | None) -> Path | None:
    """Return the folder in the hub's cache of an adapter; None where it is not an adapter."""
    try:
        settings = find(name, ADAPTER_CONFIG, revision)
        if settings is None:
            return None
        # Download the weights into the same folder; a pickle is downloaded so that it can be refused.
        if find(name, WEIGHTS, revision) is None:
            find(name, PICKLE, revision)
    except (OSError, ValueError):  # not the name of a model: loading it reports that
        return None
    return settings.parent


@cache
def _verified(folder: Path, files: object) -> None:
    """Raise CheckpointError where a saved mean is damaged; cached by the state of its files."""
    checkpoint.verify(folder)


# --- models without weights ------------------------------------------------------------------------------------------


def model_config(config: ModelConfig) -> Any:
    """Return the model's configuration of transformers. Raises ModelError."""
    from transformers import AutoConfig

    path, revision = described(config)
    refuse_hooks(path, revision)
    try:
        return AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
    except Exception as error:  # the file is untrusted
        raise ModelError(f"model {config.name}: {why_not(error)}") from error


def empty_model(config: ModelConfig) -> Any:
    """Return the model on the meta device, from its configuration alone. Raises ModelError."""
    from transformers import AutoModelForCausalLM

    hf = model_config(config)
    check_layers(config.name, hf)
    try:
        with LOADING, torch.device("meta"):
            return AutoModelForCausalLM.from_config(hf, trust_remote_code=False)
    except Exception as error:
        raise ModelError(
            f"model {config.name} ({hf.model_type}) is not a causal language model that can be made: {why_not(error)}"
        ) from error


def check_layers(name: str, config: Any) -> None:
    """Raise ModelError for a model without layers, which transformers would silently make, or with several stacks."""
    count = getattr(config.get_text_config(), "num_hidden_layers", None)
    if not isinstance(count, int):
        raise ModelError(
            f"model {name} ({config.model_type}) has no num_hidden_layers in its config.json, as a single stack of "
            "layers has; choose another model"
        )
    if count < 1:
        raise ModelError(f"model {name}: its config.json has {count} layers; fetch it again")


# --- merged models ---------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Return the cache folder of merged models."""
    own, shared = os.environ.get("EVOALIGN_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(own).expanduser() if own else Path(shared or "~/.cache").expanduser() / "evoalign"


def kept_dtype(dtype: str) -> str:
    """Return the dtype of merged weights for a `model.dtype`."""
    return "float32" if dtype == "auto" else dtype


def folder_of(origin: Origin, dtype: str) -> Path:
    """Return the folder of the merged model, whether it exists or not. Raises ModelError."""
    adapters = [_digest(adapter, signature(adapter)) for adapter in origin.adapters]
    tokenizer = _of_base(*origin.tokenizer, "tokenizer_config.json")
    key = [FORM, kept_dtype(dtype), _of_base(origin.base, origin.revision, "config.json"), tokenizer, adapters]
    return cache_folder() / "merged" / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]


def merged(origin: Origin, dtype: str) -> Path:
    """Return the folder of the merged model, and make it where it is missing or incomplete. Raises ModelError.

    Waits where another process is making it, as when several runs start at once.
    """
    folder = folder_of(origin, dtype)
    while not is_whole(folder):
        try:
            _make(folder, origin, getattr(torch, kept_dtype(dtype)))
        except RunExistsError:
            time.sleep(PATIENCE)
    return folder


def is_whole(folder: Path) -> bool:
    """Return whether no file is missing or shortened: cleaners of caches delete single files."""
    try:
        recorded: Mapping[str, Any] = read_object(folder / RECORD)
        return recorded.items() <= _sizes(folder).items()
    except (DataError, OSError):  # earlier releases wrote no record
        return False


def _sizes(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()}


def _make(folder: Path, origin: Origin, dtype: torch.dtype) -> None:
    """Fill the folder. Raises ModelError, and RunExistsError where another process fills or has just filled it."""
    from transformers import AutoTokenizer, GenerationConfig

    try:
        with files.filled(folder) as temporary:
            if is_whole(folder):  # it may be in use already
                raise RunExistsError(f"{folder} was made by another process")
            model: Any = load_whole(origin.base, origin.revision, torch.float32, origin.base)
            for adapter in origin.adapters:
                model = put_into(model, adapter, origin.base)
            model.generation_config = GenerationConfig()  # transformers may refuse to write the base's own
            model.to(dtype).save_pretrained(temporary, max_shard_size=SHARD)
            decoding = find(origin.base, "generation_config.json", origin.revision)
            if decoding is not None:
                shutil.copyfile(decoding, temporary / "generation_config.json")
            where, revision = origin.tokenizer
            tokenizer: Any = AutoTokenizer.from_pretrained(where, revision=revision, trust_remote_code=False)
            tokenizer.save_pretrained(temporary)
            (temporary / RECORD).write_text(json.dumps(_sizes(temporary)), encoding="utf-8")
    except EvoalignError:
        raise
    except OSError as error:
        raise ModelError(
            f"the merged model cannot be written to {folder} ({error.strerror or error}); set EVOALIGN_CACHE to "
            "another folder"
        ) from error


def signature(folder: Path) -> Signature:
    """Return names, sizes and times of a folder's model files, which change when a file does."""
    found = ((path, path.stat()) for path in folder.iterdir() if path.suffix in MODEL_FILES and path.is_file())
    return tuple(sorted((path.name, stat.st_size, stat.st_mtime_ns) for path, stat in found))


@cache
def _digest(adapter: Path, _: Signature) -> list[str]:
    return [files.digest_of(adapter / ADAPTER_CONFIG), files.digest_of(weights_of(adapter))]


def _of_base(path: str, revision: str | None, name: str) -> object:
    """Return what identifies a model's files: their folder and times, or their place in the hub's cache."""
    if Path(path).is_dir():
        return [str(Path(path).resolve()), signature(Path(path))]
    file = find(path, name, revision)
    return [path, revision, None if file is None else str(file.parent)]
