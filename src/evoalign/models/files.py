# SPDX-License-Identifier: Apache-2.0
"""Files of models, in a folder or in the hub's cache: find, load and write them, and refuse what cannot be trained.

Weights are read from safetensors only, and no code of a model is run.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, Literal, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from evoalign.config.outside import is_hub_name, look_for_hub
from evoalign.config.reading import read_object
from evoalign.errors import DataError, EvoalignError, ModelError, plain, shown
from evoalign.models import tiny, unpack
from evoalign.models.forms import quantised
from evoalign.models.tensors import foreign_prefix, tensors_of

MODEL = "model.safetensors"
INDEX = f"{MODEL}.index.json"
SHARD_BYTES = 5 * 10**9
PACKED_DTYPES = frozenset({"F8_E4M3", "F8_E5M2", "I8", "U8", "I32"})
FOLDER = "give model.name the folder of a model: config.json, its safetensors and its tokenizer files"
GGUF = (
    "GGUF, the quantised format of llama.cpp; set model.name to the folder or hub name of the model that it was made "
    "from, or convert it with recipes/gguf"
)
PICKLES = (".bin", ".pth", ".pt", ".ckpt", ".pkl")
CONVERT = (
    "which is not read (a pickle can run code); load it with transformers where you trust it, and write it with "
    "save_pretrained, which makes safetensors"
)
MOST_LAYERS = 1000
"""Layers that a config.json may name before they are compared with the tensors of the files."""
LAYERS = re.compile(r"(num|n|encoder|decoder)_(hidden_|encoder_|decoder_)?layers?")
LOADING = threading.RLock()
OTHER = {".h5": "weights of TensorFlow", ".msgpack": "weights of Flax"}
_KINDS = {
    "ForMaskedLM": "an encoder, which does not generate text",
    "ForSequenceClassification": "a classifier",
    "ForTokenClassification": "a classifier",
    "ForQuestionAnswering": "an extractive model",
    "ForConditionalGeneration": "an encoder-decoder or multimodal model",
    "Model": "a model without a language head",
}


def place(name: str) -> str:
    """Return a folder or a hub name; `tiny` is the model of the package. Raises ModelError."""
    if name == "tiny":
        return str(tiny())
    try:
        path = Path(name).expanduser()
    except RuntimeError:
        raise ModelError(f"model.name: {name}: there is no user of that name") from None
    if not path.is_dir():
        refuse_file(name, path)
        if not is_hub_name(name):
            raise ModelError(f"model.name: no folder {name}")
        look_for_hub()
        return name
    try:
        with os.scandir(path) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except OSError as error:
        raise ModelError(f"model {name}: its folder cannot be read ({error.strerror})") from error
    for entry in entries:
        with suppress(OSError):  # a broken link, or no permission
            if any(is_kind(entry.stat().st_mode) for is_kind in (stat.S_ISFIFO, stat.S_ISCHR, stat.S_ISBLK)):
                raise ModelError(f"model {name}: {shown(entry.name)} is a pipe or a device; remove it from the folder")
    refuse_folder(name, [entry.name for entry in entries])
    return str(path)


@contextmanager
def set_by(setting: str) -> Generator[None]:
    """Name another setting, such as scorer.reward, in place of `model.name` in the messages of ModelErrors.

    Advice on `model.base` is removed, since only `model.name` has such a setting.
    """
    try:
        yield
    except ModelError as error:
        words = re.sub(r", or (with|set) model\.base", "", str(error))
        raise ModelError(words.replace("model.name", setting)) from error


def find(path: str, name: str, revision: str | None) -> Path | None:
    """Return a file of a model, in its folder or the hub's cache; None where it is missing."""
    from transformers.utils.hub import cached_file

    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    found = cached_file(path, name, revision=revision, **quiet)
    return None if found is None else Path(found)


def read_settings(name: str, file: Path) -> dict[str, Any]:
    """Read a JSON object among the files of the model `name`. Raises ModelError."""
    try:
        return read_object(file, mend="fetch it again")
    except DataError as error:
        raise ModelError(f"model {name}: {error}") from error


def weight_files(path: str, revision: str | None, name: str) -> Iterator[Path]:
    """Yield a model's safetensors files. Call `refuse_pickles` first. Raises ModelError."""
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
    """Raise ModelError where one of `weight_files` is missing or has a damaged header."""
    for file in weight_files(path, revision, name):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(f"model {name} does not load: {why_not(error)}") from error


def load_whole(path: str, revision: str | None, dtype: torch.dtype | Literal["auto"], name: str) -> Any:
    """Load a causal language model on the CPU. `name` is for messages.

    Raises ModelError, also for a missing tensor, which transformers would initialize at random.
    """
    from transformers import AutoModelForCausalLM

    try:
        refuse_pickles(path, revision)
        with loading(path):
            # Another shape is reported by `check_whole`.
            how: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}
            file = find(path, "config.json", revision)
            packed = None if file is None else quantised(name, read_settings(name, file))
            if packed is None:
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    path, revision=revision, dtype=dtype, trust_remote_code=False, use_safetensors=True, **how
                )
                refuse_packed(path, revision, name)
            else:
                files = list(weight_files(path, revision, name))
                loaded = unpack.load(name, path, revision, dtype, packed, files, **how)
    except EvoalignError:
        raise
    except Exception as error:  # transformers raises many types for damaged files
        raise ModelError(f"model {name} does not load: {why_not(error)}") from error
    model, info = loaded
    check_whole(name, info)
    if packed is not None:
        layers = model.config.get_text_config().num_hidden_layers
        unpack.refuse_unexpected(name, packed, info["unexpected_keys"], weight_files(path, revision, name), layers)
    return model.eval().requires_grad_(False)


def refuse_packed(path: str, revision: str | None, name: str) -> None:
    """Raise ModelError for packed matrices in the files of a model whose config.json has no quantization_config: they
    would be taken for numbers. ModelOpt, for one, may describe them in another file."""
    for file in weight_files(path, revision, name):
        with suppress(SafetensorError, OSError), safe_open(file, framework="pt") as opened:  # loading reports damage
            for key in opened.keys():  # noqa: SIM118  # not a mapping
                part = opened.get_slice(key)
                if part.get_dtype() in PACKED_DTYPES and len(part.get_shape()) > 1 and not key.endswith("bias"):
                    raise ModelError(
                        f"model {name}: its files have {shown(key)} in {part.get_dtype()}, and its config.json no "
                        "quantization_config, which says how to read it; use a checkpoint that has one, or the model "
                        "in bfloat16 or float16"
                    )


class WholeModel:
    """Writes a model with changed tensors, in `dtype`, and its tokenizer.

    Tensors of the base that do not change, and fused experts, stay in memory.
    """

    def __init__(self, base: str, revision: str | None, dtype: torch.dtype) -> None:
        self._base, self._revision, self._dtype = base, revision, dtype
        self._model: Any = None
        self._tokenizer: Any = None

    def __call__(self, folder: Path, state: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write the model with the tensors of `state` put in."""
        self.load()
        with without_bar():
            parameters, changed = dict[str, nn.Parameter](self._model.named_parameters()), list[nn.Parameter]()
            others = tensors_of(self._model)
            for name, tensor in state:
                if name in parameters:
                    changed.append(parameters[name])
                    changed[-1].data = tensor.to(changed[-1].dtype)
                else:
                    others[name].copy_(tensor)
            self._model.save_pretrained(folder, max_shard_size=SHARD_BYTES)
            for parameter in changed:
                parameter.data = parameter.data.new_empty(0)
        self._tokenizer.save_pretrained(folder)

    def load(self) -> None:
        """Load the base, once. Other threads must not compute meanwhile: transformers sets torch's default dtype."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        if self._model is None:
            base, settings = self._base, {"revision": self._revision, "trust_remote_code": False}
            with loading(base):
                self._model = AutoModelForCausalLM.from_pretrained(
                    base, dtype=self._dtype, use_safetensors=True, **settings
                )
            self._model.requires_grad_(False)
            self._tokenizer = AutoTokenizer.from_pretrained(base, **settings)


@contextmanager
def loading(path: str) -> Generator[None]:
    """Load models one at a time, without a progress bar, see `without_bar`.

    transformers replaces functions of torch while it makes a model: in two threads, it may report tensors as missing,
    and keep the replaced functions for good.
    """
    with LOADING, without_bar(path):
        yield


@contextmanager
def without_bar(path: str | None = None) -> Generator[None]:
    """Hide transformers' progress bar, but not for a download: where `path` is the name of a model, and no folder."""
    from transformers.utils import logging

    downloads = path is not None and not Path(path).is_dir()
    if downloads or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def check_whole(name: str, info: Mapping[str, Any]) -> None:
    """Raise ModelError where transformers reports that a tensor is missing, or has another shape."""
    if info["missing_keys"]:
        missing, there = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
        if other := next(((own, key) for own in missing for key in there if key.endswith(f".{own}")), None):
            remedy = foreign_prefix([other[1]]) or "save the model without the first part of the names"
            raise ModelError(f"model {name} does not load: its files have {shown(other[1])} for {other[0]}; {remedy}")
        raise ModelError(f"model {name} does not load: its files lack {missing[0]}; fetch it again")
    if info["mismatched_keys"]:
        tensor, found, wanted = min(info["mismatched_keys"])
        raise ModelError(
            f"model {name} does not load: {tensor} is {tuple(found)} in its files, and {tuple(wanted)} by its "
            "config.json; fetch it again"
        )


def refuse_hooks(path: str, revision: str | None, *, writes: bool = True) -> None:
    """Raise ModelError where a model's config.json makes transformers download code, or read another file of weights.

    A kernel of the hub, such as `_attn_implementation: "someone/kernel"`, is downloaded and run without a question.
    With `writes`, raise also for a kind of model that cannot be trained here.
    """
    try:
        found = find(path, "config.json", revision)
    except (OSError, ValueError):  # not the name of a model: loading it reports that
        return
    if found is None:
        return
    tree = read_settings(path, found)
    for name, value in _settings(tree):
        kernel = name.removesuffix("_internal").endswith("_implementation") and isinstance(value, str) and "/" in value
        if LAYERS.fullmatch(name) and isinstance(value, int) and value > MOST_LAYERS:
            _refuse_layers(path, found.parent, name, value)
        if kernel or (value and name in ("use_kernels", "kernel_config", "transformers_weights")):
            raise ModelError(
                f"model {path}: its config.json sets {name} to {shown(value)}, which is not allowed; remove "
                "it from the file if you trust the model"
            )
    if writes:
        refuse_config(path, tree)


def _refuse_layers(path: str, folder: Path, name: str, layers: int) -> None:
    """Raise ModelError for more layers than tensors: transformers would make them all before it reads a file."""
    tensors = 0
    for file in folder.glob("*.safetensors"):
        with suppress(SafetensorError, OSError), safe_open(file, framework="pt") as opened:
            tensors += len(opened.keys())
    if layers > tensors:
        raise ModelError(
            f"model {path}: its config.json sets {name} to {layers}, and its files have {tensors} tensors; fetch it "
            "again"
        )


def _settings(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each setting at any depth; the entries of an `_implementation` mapping also under its name."""
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
    """Raise ModelError where a model's index names pickles, which transformers would read, or as `refuse_hooks`
    does."""
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
    """Return in one line why a model does not load."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    if why := not_cached(error):
        return why
    if "file named model.safetensors" in line:
        return "it has no model.safetensors, and weights in any other form are not read; convert it to safetensors"
    return line


def not_cached(error: Exception) -> str | None:
    """Return advice where a model is not cached and the hub is offline; None for other errors."""
    from huggingface_hub import constants

    if not re.search("in the cached files|in the disk cache", str(error)):
        return None
    is_set = constants.HF_HUB_OFFLINE and {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"} & os.environ.keys()
    why = "HF_HUB_OFFLINE is set" if is_set else "the hub cannot be reached"
    return (
        f"it is not in the cache of this machine, and {why}; download it on a machine with a network, copy "
        "it here, set model.name to its folder and HF_HUB_OFFLINE=1, or use `tiny`"
    )


# --- what cannot be trained ------------------------------------------------------------------------------------------


def refuse_file(name: str, path: Path) -> None:
    """Raise ModelError where a model's name is a file."""
    try:
        if not path.is_file():
            return
    except OSError:
        return
    kind = path.suffix.lower()
    whys = {
        ".gguf": f"a file of {GGUF}",
        ".safetensors": f"one file of a model; give model.name its folder, {path.parent}",
        ".onnx": f"an ONNX graph, whose weights cannot be trained here; {FOLDER}",
        **dict.fromkeys(PICKLES, f"a pickle, {CONVERT}; then {FOLDER}"),
    }
    raise ModelError(f"model.name: {name} is {whys.get(kind, f'a file; {FOLDER}')}")


def refuse_folder(name: str, entries: Sequence[str]) -> None:
    """Raise ModelError for a folder with weights of another format or kind of model, by the names of its files."""
    kinds = {Path(entry).suffix.lower(): entry for entry in entries}
    if any(entry in ("config.json", "adapter_config.json", "config.yaml") for entry in entries):
        weights = [e for e in entries if "model" in e and not e.startswith("adapter_")]
        found = next((e for e in weights if Path(e).suffix in (*PICKLES, *OTHER)), None)
        if "config.json" in entries and found is not None and ".safetensors" not in kinds:
            what = OTHER.get(Path(found).suffix, "a pickle")
            raise ModelError(f"model {name}: its weights are in {shown(found)}, {what}, {CONVERT}")
        return
    if "model_index.json" in entries:
        raise ModelError(f"model {name} is a diffusers pipeline, which makes images; {FOLDER} of language")
    if ".gguf" in kinds:
        raise ModelError(f"model {name}: {shown(kinds['.gguf'])} is a file of {GGUF}")
    if ".onnx" in kinds:
        raise ModelError(f"model {name}: {shown(kinds['.onnx'])} is an ONNX graph, which cannot be trained; {FOLDER}")


def refuse_config(name: str, config: Mapping[str, Any]) -> None:
    """Raise ModelError for a model that is multimodal, no causal language model, or quantised in a form that no engine
    serves, by its config.json."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    quantised(name, config)
    parts = [part for part in ("vision_config", "audio_config") if isinstance(config.get(part), Mapping)]
    if parts:
        raise ModelError(
            f"model {name} takes images or audio ({parts[0]} in its config.json), whose weights text cannot "
            "evaluate; save its language model alone, or use a text-only model"
        )
    named = config.get("architectures")
    architectures = [a for a in named if isinstance(a, str)] if isinstance(named, list) else []
    named_ones = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    writes = {name for value in named_ones for name in ([value] if isinstance(value, str) else value)}
    if not architectures or any(a in writes or a.endswith(("ForCausalLM", "LMHeadModel")) for a in architectures):
        return
    first = plain(architectures[0])[:60]
    kind = next((what for end, what in _KINDS.items() if first.endswith(end)), "another kind of model")
    raise ModelError(
        f"model {name} is not a causal language model: its config.json has {first}, {kind}; use one "
        "whose architecture ends in ForCausalLM"
    )
