# SPDX-License-Identifier: Apache-2.0
"""A LoRA adapter of PEFT, of any form that can be put into its base, merged by PEFT itself.

What its files may say is bounded: weights are safetensors, settings that this module does not know are refused by name,
and so is what PEFT would import by name (`megatron_core`), what it would compute the base anew by, and what cannot be
merged. Nothing is left out in silence: each tensor of the file has a place, and each factor comes from the file.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evoalign.config.reading import check_regular, read_object
from evoalign.errors import DataError, ModelError, plain, shown
from evoalign.models.experts import tensors_of

ADAPTER_CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
MOST_BYTES = 2**40
MERGED = (
    "r", "lora_alpha", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern",
    "alpha_pattern", "use_rslora", "use_dora", "fan_in_fan_out", "bias", "lora_bias", "modules_to_save",
    "target_parameters", "trainable_token_indices", "task_type",
)  # fmt: skip
"""What says how the weights are read."""
OF_TRAINING = (
    "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "runtime_config", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_core",
    "qalora_group_size", "ensure_weight_tying",
)  # fmt: skip
"""What says how they were trained, and what only names: left out."""
MOVES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to begin that take the first factors out of the base, which is then another one."""
MERGE_FIRST = "merge it with PEFT (merge_and_unload), save the model, and give model.name that folder"


def weights_of(folder: Path) -> Path:
    """The file of an adapter's weights. Raises ModelError where it is missing or a pickle."""
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
    """A model with an adapter merged into it, by PEFT, in the model's own dtype. `name` is the model's, for messages.

    The model itself is used up. Raises ModelError.
    """
    from peft import get_peft_model, set_peft_model_state_dict

    settings, state = _settings(folder / ADAPTER_CONFIG), _load(weights_of(folder))
    try:
        config = _lora_config(settings, state)
        if any(".experts." in key for key in state) and _is_plain(settings):
            named = {key.removeprefix("base_model.model."): tensor for key, tensor in state.items()}
            add(model, named, settings["lora_alpha"] / settings["r"])
            return model
        _untie(model, state)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of names it guessed, and of a config without a base's name
            adapted: Any = get_peft_model(model, config)  # pyright: ignore[reportArgumentType]
            found: Any = set_peft_model_state_dict(adapted, state)
    except ModelError:
        raise
    except Exception as error:  # of PEFT, for files that may say anything
        why = " ".join(str(error).split())[:300] or type(error).__name__
        raise ModelError(f"adapter {folder} does not fit model {name}: {why}") from error
    idle = sorted(found.unexpected_keys)
    lacking = sorted(key for key in found.missing_keys if "lora_" in key or "modules_to_save" in key)
    if idle or lacking:
        what = f"has no place for its {shown(idle[0])}" if idle else f"would have {shown(lacking[0])}, which it lacks"
        raise ModelError(f"adapter {folder} does not fit model {name}, which {what}; is that its base?")
    try:
        return adapted.merge_and_unload(safe_merge=True)
    except ValueError as error:
        raise ModelError(f"adapter {folder} has weights that are not finite numbers") from error


@torch.no_grad()
def add(model: nn.Module, state: Mapping[str, torch.Tensor], scaling: float) -> None:
    """W + scaling B A in place, in the dtype of W, of each matrix that has factors, one expert's among them.

    `state` has `MODULE.lora_A.weight` [r, in] and `MODULE.lora_B.weight` [out, r] under the model's own names. Raises
    KeyError for a matrix that the model does not have.
    """
    weights = tensors_of(model)
    for name, a in state.items():
        module, found, _ = name.partition(".lora_A.")
        if found:
            weights[f"{module}.weight"].add_((state[f"{module}.lora_B.weight"] @ a).mul_(scaling))


def _settings(file: Path) -> Mapping[str, Any]:
    """adapter_config.json, of a LoRA that can be merged. Raises ModelError naming what cannot."""
    try:
        found = read_object(file, mend="fetch it again")
    except DataError as error:
        raise ModelError(str(error)) from error
    if found.get("peft_type") != "LORA":
        raise ModelError(f"{file}: peft_type {shown(found.get('peft_type'))} is no LoRA; {MERGE_FIRST}")
    begun = str(found.get("init_lora_weights", True)).lower()
    if begun.startswith(MOVES_BASE):
        raise ModelError(
            f"{file}: init_lora_weights {shown(found['init_lora_weights'])} took its factors out of the base, which is "
            f"another model since; {MERGE_FIRST}"
        )
    known = (*MERGED, *OF_TRAINING, "init_lora_weights")
    odd = sorted(plain(name)[:60] for name, value in found.items() if value and name not in known)
    if odd:
        raise ModelError(f"{file} sets {odd[0]}, which is not merged here; {MERGE_FIRST}")
    return found


def _is_plain(settings: Mapping[str, Any]) -> bool:
    """Whether an adapter is nothing but (alpha / r) B A, as evoalign writes it; PEFT has experts otherwise."""
    usual = {"r", "lora_alpha", "target_modules", "layers_to_transform", "layers_pattern", "task_type", "bias"}
    return settings.get("bias", "none") == "none" and not any(
        settings.get(name) for name in MERGED if name not in usual
    )


def _lora_config(settings: Mapping[str, Any], state: Mapping[str, torch.Tensor]) -> Any:
    from peft import LoraConfig

    chosen = {name: settings[name] for name in MERGED if settings.get(name) is not None}
    if isinstance(chosen.get("target_modules"), str) and chosen["target_modules"] != "all-linear":
        # A pattern, which from a stranger may take for ever: the tensors name the same modules.
        modules = {key.partition(".lora_")[0].removeprefix("base_model.model.") for key in state if ".lora_" in key}
        chosen["target_modules"] = sorted(modules)
    return LoraConfig(**chosen)


def is_tied(model: Any) -> bool:
    """Whether a causal language model's head is its embedding matrix."""
    words, head = model.get_input_embeddings(), model.get_output_embeddings()
    return head is not None and words is not None and head.weight is words.weight


def untie(model: Any) -> None:
    """Make two weights of the one that is both embedding and head, which are equal until either is changed."""
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False


def _untie(model: Any, state: Mapping[str, torch.Tensor]) -> None:
    """Where an adapter changes one of two weights that are one in the base, they are two from now on."""
    if not is_tied(model):
        return
    both = model.get_input_embeddings(), model.get_output_embeddings()
    names = {path.rsplit(".", 1)[-1] for path, module in model.named_modules() if module in both}
    if any(f".{name}." in f".{key}" for key in state for name in names):
        untie(model)


def _load(file: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        check_regular(file, MOST_BYTES)
        return load_file(file)
    except (DataError, OSError, SafetensorError) as error:
        raise ModelError(f"{file} does not load: {error}") from error
