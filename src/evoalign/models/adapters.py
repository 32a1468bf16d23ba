# SPDX-License-Identifier: Apache-2.0
"""Merge a LoRA adapter of PEFT into its base, with `peft.merge_and_unload`.

The adapter's files are untrusted. Weights are read from safetensors only. Unknown settings are refused by name, and so
are settings that recompute the base or cannot be merged. `megatron_core`, which PEFT would import, is ignored. Each
tensor of the file must have a place in the model, and each factor of the adapter must be in the file.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from evoalign.config.reading import read_object
from evoalign.errors import DataError, ModelError, plain, shown
from evoalign.models.tensors import foreign_prefix, open_file, tensors_of

ADAPTER_CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
MOST_BYTES = 2**40
MERGED = (
    "r", "lora_alpha", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern",
    "alpha_pattern", "use_rslora", "use_dora", "fan_in_fan_out", "bias", "lora_bias", "modules_to_save",
    "target_parameters", "trainable_token_indices", "ensure_weight_tying", "task_type",
)  # fmt: skip
"""Settings that say how the weights are used."""
IGNORED = (
    "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "runtime_config", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_core",
    "qalora_group_size",
)  # fmt: skip
"""Settings that say how the adapter was trained, or are names only. They are ignored."""
MOVES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of `init_lora_weights` that change the base model."""
MERGE_FIRST = "merge it with PEFT (merge_and_unload), save the model, and set model.name to its folder"


def weights_of(folder: Path) -> Path:
    """Return the file of an adapter's weights. Raises ModelError where it is missing or a pickle."""
    file = folder / WEIGHTS
    if not file.is_file():
        if any(folder.glob("adapter_model.*")):
            raise ModelError(
                f"adapter {folder}: its weights are a pickle, which is not read; load it with PEFT where you trust it, "
                "and write it with save_pretrained, which makes safetensors"
            )
        raise ModelError(f"adapter {folder} has no {WEIGHTS}; fetch it again")
    return file


@torch.no_grad()
def put_into(model: nn.Module, folder: Path, name: str) -> nn.Module:
    """Return a model with an adapter merged into it, in the model's dtype. `name` is the model's, for messages.

    The given model is changed and must not be used afterwards. Raises ModelError.
    """
    from peft import get_peft_model, set_peft_model_state_dict

    settings, state = _settings(folder / ADAPTER_CONFIG), _state(folder)
    try:
        config = _lora_config(settings, state)
        if any(".experts." in key for key in state) and _is_plain(settings):
            named = {key.removeprefix("base_model.model."): tensor for key, tensor in state.items()}
            add(model, named, settings["lora_alpha"] / settings["r"])
            return model
        _resize(model, state, folder)
        head = _shared_head(model, state)
        for key in state:
            module = key.removeprefix("base_model.model.").removesuffix(".lora_B.bias")
            if key.endswith(".lora_B.bias") and getattr(model.get_submodule(module), "bias", None) is None:
                raise ModelError(
                    f"adapter {folder} adds a bias to {module}, which has none in model {name}, so that it cannot be "
                    "merged; load it with PEFT, or give the run that made it"
                )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about guessed names and a missing base name
            adapted: Any = get_peft_model(model, config)  # pyright: ignore[reportArgumentType]
            found: Any = set_peft_model_state_dict(adapted, state)
        if head is not None:  # after PEFT has tied what the adapter ties, and before it merges
            untied: Any = head
            untied.weight = nn.Parameter(untied.weight.detach().clone(), requires_grad=False)
    except ModelError:
        raise
    except Exception as error:  # PEFT raises many types for damaged files
        why = " ".join(str(error).split())[:300] or type(error).__name__
        raise ModelError(f"adapter {folder} does not fit model {name}: {why}") from error
    unused = {*found.unexpected_keys}
    used = [tensor for key, tensor in state.items() if key not in unused]
    idle = sorted(key for key in unused if not _is_copy(key, state, used))
    lacking = sorted(key for key in found.missing_keys if "lora_" in key or "modules_to_save" in key)
    if idle or lacking:
        what = f"the model has no {shown(idle[0])}" if idle else f"the adapter has no {shown(lacking[0])}"
        raise ModelError(
            f"adapter {folder} does not fit model {name}: {what}; {foreign_prefix(idle) or 'is that its base?'}"
        )
    try:
        return adapted.merge_and_unload(safe_merge=True)
    except ValueError as error:
        raise ModelError(f"adapter {folder} has weights that are not finite numbers") from error


def _state(folder: Path) -> dict[str, torch.Tensor]:
    file = weights_of(folder)
    opened = open_file(file, MOST_BYTES)
    try:
        return {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} does not load: {error}") from error


def plain_factors(folder: Path) -> tuple[float, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Return alpha / r of an adapter, and A [r, in] and B [out, r], float32, by the name of the weight.

    Raises ModelError where it is more than (alpha / r) B A.
    """
    settings = _settings(folder / ADAPTER_CONFIG)
    state = {key.removeprefix("base_model.model."): tensor.float() for key, tensor in _state(folder).items()}
    modules = [key.removesuffix(".lora_A.weight") for key in state if key.endswith(".lora_A.weight")]
    whole = {f"{module}.lora_{factor}.weight" for module in modules for factor in "AB"}
    if not modules or not _is_plain(settings) or state.keys() != whole:
        raise ModelError(f"adapter {folder} is more than (alpha / r) B A; use an adapter of plain LoRA")
    found = {f"{m}.weight": (state[f"{m}.lora_A.weight"], state[f"{m}.lora_B.weight"]) for m in modules}
    return settings["lora_alpha"] / settings["r"], found


@torch.no_grad()
def add(model: nn.Module, state: Mapping[str, torch.Tensor], scaling: float) -> None:
    """Add scaling B A in place to each matrix W that has factors, in the dtype of W, matrices of experts included.

    `state` has `MODULE.lora_A.weight` [r, in] and `MODULE.lora_B.weight` [out, r] under the model's own names. Raises
    KeyError for a matrix that the model does not have, and ModelError for an adapter with biases.
    """
    biases = [name for name in state if name.endswith(".lora_B.bias")]
    if biases:
        raise ModelError(f"the adapter has {biases[0]}, for which the model has no tensor; load it with PEFT, unmerged")
    weights = tensors_of(model)
    for name, a in state.items():
        module, found, _ = name.partition(".lora_A.")
        if found:
            weights[f"{module}.weight"].add_((state[f"{module}.lora_B.weight"] @ a).mul_(scaling))


def _settings(file: Path) -> Mapping[str, Any]:
    """Read adapter_config.json. Raises ModelError for a setting that cannot be merged."""
    try:
        found = read_object(file, mend="fetch it again")
    except DataError as error:
        raise ModelError(str(error)) from error
    if found.get("peft_type") != "LORA":
        raise ModelError(f"{file}: peft_type {shown(found.get('peft_type'))} is not LORA; {MERGE_FIRST}")
    begun = str(found.get("init_lora_weights", True)).lower()
    if begun.startswith(MOVES_BASE):
        raise ModelError(
            f"{file}: init_lora_weights {shown(found['init_lora_weights'])} changed the base model; {MERGE_FIRST}"
        )
    known = (*MERGED, *IGNORED, "init_lora_weights")
    odd = sorted(plain(name)[:60] for name, value in found.items() if value and name not in known)
    if odd:
        raise ModelError(f"{file} sets {odd[0]}, which evoalign cannot merge; {MERGE_FIRST}")
    return found


def _is_plain(settings: Mapping[str, Any]) -> bool:
    """Return whether an adapter is only (alpha / r) B A, as evoalign writes it."""
    usual = {"r", "lora_alpha", "target_modules", "layers_to_transform", "layers_pattern", "task_type", "bias"}
    return settings.get("bias", "none") == "none" and not any(
        settings.get(name) for name in MERGED if name not in usual
    )


def _lora_config(settings: Mapping[str, Any], state: Mapping[str, torch.Tensor]) -> Any:
    from peft import LoraConfig

    chosen = {name: settings[name] for name in MERGED if settings.get(name) is not None}
    if isinstance(chosen.get("target_modules"), str) and chosen["target_modules"] != "all-linear":
        # An untrusted regular expression may never end; the tensors name the same modules.
        modules = {key.partition(".lora_")[0].removeprefix("base_model.model.") for key in state if ".lora_" in key}
        chosen["target_modules"] = sorted(modules)
    return LoraConfig(**chosen)


def is_tied(model: Any) -> bool:
    """Return whether a causal language model's head shares the embedding matrix."""
    words, head = model.get_input_embeddings(), model.get_output_embeddings()
    return head is not None and words is not None and head.weight is words.weight


def untie(model: Any) -> None:
    """Give the head a copy of the weight that it shares with the embedding."""
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False


def _shared_head(model: Any, state: Mapping[str, torch.Tensor]) -> nn.Module | None:
    """Return the head that shares its weight with the embedding, where the adapter changes one of them; else None."""
    if not is_tied(model):
        return None
    both = model.get_input_embeddings(), model.get_output_embeddings()
    names = {path.rsplit(".", 1)[-1] for path, module in model.named_modules() if module in both}
    return both[1] if any(f".{name}." in f".{key}" for key in state for name in names) else None


def _is_copy(key: str, state: Mapping[str, torch.Tensor], used: list[torch.Tensor]) -> bool:
    """Return whether an unused tensor repeats a used one, or is the base's own below a saved module.

    PEFT writes both where it saves a resized vocabulary.
    """
    module, is_below, _ = key.partition(".original_module.")
    return (is_below and f"{module}.weight" in state) or any(torch.equal(state[key], tensor) for tensor in used)


def _resize(model: Any, state: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Resize the vocabulary to the adapter's, which has the added rows. Raises ModelError where it lacks some."""
    words, head = model.get_input_embeddings(), model.get_output_embeddings()
    if words is None or head is None:
        return
    size, width = words.weight.shape
    rows: dict[str, int] = {}
    for path, module in model.named_modules():
        if module is words or module is head:
            name = path.rsplit(".", 1)[-1]
            shapes = [
                t.shape for key, t in state.items() if f".{name}." in key and key.endswith("weight") and t.ndim == 2
            ]
            rows[name] = max((count for count, columns in shapes if columns == width), default=0)
    most = max(rows.values())
    if most <= size:
        return
    lacking = [name for name, count in rows.items() if count < most]
    if lacking and not is_tied(model):
        raise ModelError(
            f"adapter {folder} was trained with a vocabulary of {most:,}, its base has {size:,}, and it has no rows of "
            f"{lacking[0]} for the added tokens; {MERGE_FIRST}"
        )
    model.resize_token_embeddings(most, mean_resizing=False)
