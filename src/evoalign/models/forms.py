# SPDX-License-Identifier: Apache-2.0
"""Forms of quantised models, as a config.json describes them.

ES adds adapters to such a base and leaves its packed weights alone: a step of ES is far smaller than the distance
between two numbers of 4 bits, so spaces that move the weights themselves are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from evoalign.errors import ModelError, plain, shown

FULL_PRECISION = "set model.name to the model that it was made from, in bfloat16 or float16"
_ALIASES = {"awq_marlin": "awq", "gptq_marlin": "gptq", "modelopt_fp4": "modelopt"}
_WORDS = {
    "awq": "AWQ",
    "gptq": "GPTQ",
    "bitsandbytes": "bitsandbytes",
    "fp8": "FP8",
    "modelopt": "ModelOpt",
    "pack-quantized": "compressed-tensors, packed integers",
    "int-quantized": "compressed-tensors, integers",
    "float-quantized": "compressed-tensors, FP8",
    "nvfp4-pack-quantized": "compressed-tensors, NVFP4",
    "mxfp4-pack-quantized": "compressed-tensors, MXFP4",
}
"""Forms that some engine serves (`EngineSettings.quantised`), and their names in messages."""
IN_SERVERS = frozenset(
    {"awq", "gptq", "fp8", "modelopt", "pack-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized"}
)
"""Forms that both vLLM and SGLang load with adapters, where their device has a product for them."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """How a model's linear weights are packed. `form` is a key of the forms that engines name.

    `bits` per weight and `group` (weights that share a scale; None: a whole row, or more) are None if they do not
    follow from config.json. `settings` is its `quantization_config`.
    """

    form: str
    bits: int | None
    group: int | None
    settings: Mapping[str, Any]

    @property
    def words(self) -> str:
        """Describe it, as in `AWQ, 4 bits, groups of 128`."""
        parts = [_WORDS[self.form]]
        parts += [f"{self.bits} bits"] if self.bits else []
        parts += [f"groups of {self.group}"] if self.group else []
        return ", ".join(parts)

    @property
    def rounds_activations(self) -> bool:
        """Whether activations may be rounded, too, where the weights stay packed."""
        return self.form in ("fp8", "modelopt") or any(
            group.get("input_activations") for group in groups_of(self.settings)
        )

    def record(self) -> dict[str, Any]:
        """Return the entry of a run's manifest."""
        return {"form": self.form, "bits": self.bits, "group_size": self.group}


def quantised(name: str, tree: Mapping[str, Any]) -> Quantised | None:
    """Return how the model `name` with this config.json is quantised; None: it is not. Raises ModelError for a form
    that no engine serves."""
    settings = tree.get("quantization_config") or tree.get("compression_config")
    if not settings:
        inner = tree.get("text_config")
        if isinstance(inner, Mapping) and cast("Mapping[str, Any]", inner).get("quantization_config"):
            raise ModelError(
                f"model {name} has its quantization_config in text_config, which is not read; {FULL_PRECISION}"
            )
        return None
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    if not isinstance(method, str):
        raise ModelError(f"model {name}: its quantization_config names no quant_method; {FULL_PRECISION}")
    found = cast(Mapping[str, Any], settings)
    form = _ALIASES.get(method, method)
    if method == "compressed-tensors":
        formats = {str(part["format"]) for part in (found, *groups_of(found)) if part.get("format") is not None}
        form = next(iter(formats)) if len(formats) == 1 else "mixed" if formats else "unknown"
    if form not in _WORDS:
        how = method if form == _ALIASES.get(method, method) else f"{method}, format {form}"
        raise ModelError(
            f"model {name} is quantised by {shown(plain(how)[:60])}, which no engine here serves; use a checkpoint of "
            f"the same model in AWQ, GPTQ or compressed-tensors, or {FULL_PRECISION}"
        )
    weights = next((group["weights"] for group in groups_of(found) if isinstance(group.get("weights"), Mapping)), found)
    bits = weights.get("num_bits", weights.get("bits", weights.get("w_bit")))
    if form == "bitsandbytes":
        bits = 4 if found.get("load_in_4bit") else 8
    group = weights.get("group_size", weights.get("q_group_size"))
    return Quantised(
        form,
        bits if type(bits) is int else 8 if "fp8" in form else None,
        group if type(group) is int and group > 0 else None,
        found,
    )


def groups_of(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the groups of a config of compressed-tensors."""
    groups = settings.get("config_groups")
    if isinstance(groups, Mapping):
        for group in cast(Mapping[str, Any], groups).values():
            if isinstance(group, Mapping):
                yield cast(Mapping[str, Any], group)


def not_packed(name: str, found: Quantised) -> ModelError:
    """Return the error for files without a packed weight."""
    return ModelError(
        f"model {name} is quantised ({found.words}) by its config.json, and its files have no packed weight; fetch it "
        "again, or remove quantization_config from config.json if they are in full precision"
    )
