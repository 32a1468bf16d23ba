# SPDX-License-Identifier: Apache-2.0
"""What is handed over in a model's place and is none that can be trained here: each is named, with what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evoalign.errors import ModelError, plain, shown

FOLDER = "give model.name the folder of a model: config.json, its safetensors and its tokenizer files"
GGUF = (
    "GGUF, the form of llama.cpp, in which weights are mostly rounded to a few bits; give model.name the folder or hub "
    "name of the model that it was made from"
)
PICKLES = (".bin", ".pth", ".pt", ".ckpt", ".pkl")
CONVERT = (
    "which is not read (a pickle can run code); load it with transformers where you trust it, and write it with "
    "save_pretrained, which makes safetensors"
)
OTHER = {".h5": "weights of TensorFlow", ".msgpack": "weights of Flax"}
_KINDS = {
    "ForMaskedLM": "an encoder, which fills gaps and does not go on with a text",
    "ForSequenceClassification": "a classifier",
    "ForTokenClassification": "a classifier",
    "ForQuestionAnswering": "an extractor of answers",
    "ForConditionalGeneration": "an encoder with a decoder, or a model of more than text",
    "Model": "a model without a head that writes",
}


def refuse_file(name: str, path: Path) -> None:
    """Raise ModelError where a model's name leads to a file."""
    try:
        if not path.is_file():
            return
    except OSError:
        return
    kind = path.suffix.lower()
    if kind == ".gguf":
        why = f"a file of {GGUF}"
    elif kind == ".safetensors":
        why = f"one file of a model; give model.name its folder, {path.parent}"
    elif kind in PICKLES:
        why = f"a pickle, {CONVERT}; then {FOLDER}"
    elif kind == ".onnx":
        why = f"an ONNX graph, whose weights cannot be trained here; {FOLDER}"
    else:
        why = f"a file; {FOLDER}"
    raise ModelError(f"model.name: {name} is {why}")


def refuse_folder(name: str, entries: Sequence[str]) -> None:
    """Raise ModelError for a folder with weights of another form, or of another kind of model, by its files' names."""
    kinds = {Path(entry).suffix.lower(): entry for entry in entries}
    if any(entry in ("config.json", "adapter_config.json", "config.yaml") for entry in entries):
        weights = [e for e in entries if "model" in e and not e.startswith("adapter_")]
        found = next((e for e in weights if Path(e).suffix in (*PICKLES, *OTHER)), None)
        if "config.json" in entries and found is not None and ".safetensors" not in kinds:
            what = OTHER.get(Path(found).suffix, "a pickle")
            raise ModelError(f"model {name}: its weights are in {shown(found)}, {what}, {CONVERT}")
        return
    if "model_index.json" in entries:
        raise ModelError(f"model {name} is a pipeline of diffusers, which makes pictures; {FOLDER} of language")
    if ".gguf" in kinds:
        raise ModelError(f"model {name}: {shown(kinds['.gguf'])} is a file of {GGUF}")
    if ".onnx" in kinds:
        raise ModelError(f"model {name}: {shown(kinds['.onnx'])} is an ONNX graph, which cannot be trained; {FOLDER}")


def refuse_config(name: str, config: Mapping[str, Any]) -> None:
    """Raise ModelError for a model that is quantised, reads more than text, or does not write, by its config.json."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    quantised = config.get("quantization_config")
    if quantised:
        how = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
        raise ModelError(
            f"model {name} is quantised ({plain(str(how))[:40] if how else 'quantization_config in its config.json'}): "
            "weights of a few bits cannot take small steps; give model.name the model that it was made from, in "
            "bfloat16 or float16"
        )
    parts = [part for part in ("vision_config", "audio_config") if isinstance(config.get(part), Mapping)]
    if parts:
        raise ModelError(
            f"model {name} takes pictures or sound too ({parts[0]} in its config.json), and would get noise where no "
            "text shows it; save its language model by itself, or take one of text alone"
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
        f"model {name} is no causal language model: its config.json says {first}, {kind}; take one "
        "whose name ends in ForCausalLM"
    )
