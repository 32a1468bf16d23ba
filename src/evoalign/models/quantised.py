# SPDX-License-Identifier: Apache-2.0
"""Quantised models: how a config.json describes one, which engines serve which form, and what cannot evolve on one.

ES adds adapters to such a base and leaves its packed weights alone: a step of ES is far smaller than the distance
between two numbers of 4 bits, so spaces that move the weights themselves are refused.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from evoalign.errors import ModelError, plain, shown

if TYPE_CHECKING:
    from evoalign.config import ModelConfig

PIECE = 1 << 22
"""Bytes read at once by `files_hash`."""
FULL_PRECISION = "set model.name to the model that it was made from, in bfloat16 or float16"
_ALIASES = {"awq_marlin": "awq", "gptq_marlin": "gptq", "modelopt_fp4": "modelopt"}
_WORDS = {
    "awq": "AWQ",
    "gptq": "GPTQ",
    "bitsandbytes": "bitsandbytes",
    "fp8": "FP8",
    "modelopt": "ModelOpt",
    "mxfp4": "MXFP4",
    "pack-quantized": "compressed-tensors, packed integers",
    "int-quantized": "compressed-tensors, integers",
    "float-quantized": "compressed-tensors, FP8",
    "nvfp4-pack-quantized": "compressed-tensors, NVFP4",
    "mxfp4-pack-quantized": "compressed-tensors, MXFP4",
}
"""Forms that some engine serves (`EngineSettings.quantised`), and their names in messages."""


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

    def record(self) -> dict[str, Any]:
        """Return the entry of a run's manifest."""
        return {"form": self.form, "bits": self.bits, "group_size": self.group}


def quantised(name: str, tree: Mapping[str, Any]) -> Quantised | None:
    """Return how the model `name` with this config.json is quantised; None: it is not. Raises ModelError for a form
    that no engine serves."""
    settings = tree.get("quantization_config") or tree.get("compression_config")
    if not settings:
        return None
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    if not isinstance(method, str):
        raise ModelError(f"model {name}: its quantization_config names no quant_method; {FULL_PRECISION}")
    found = cast(Mapping[str, Any], settings)
    form = _ALIASES.get(method, method)
    if method == "compressed-tensors":
        formats = {found.get("format"), *(group.get("format") for group in _groups(found))} - {None}
        form = str(next(iter(formats))) if len(formats) == 1 else "of several formats"
    if form not in _WORDS:
        how = method if form == _ALIASES.get(method, method) else f"{method}, format {form}"
        raise ModelError(
            f"model {name} is quantised by {shown(plain(how)[:60])}, which no engine here serves; use a checkpoint of "
            f"the same model in AWQ, GPTQ or compressed-tensors, or {FULL_PRECISION}"
        )
    weights = next((group["weights"] for group in _groups(found) if isinstance(group.get("weights"), Mapping)), found)
    bits = weights.get("num_bits", weights.get("bits", weights.get("w_bit")))
    if form == "bitsandbytes":
        bits = 4 if found.get("load_in_4bit") else 8
    group = weights.get("group_size", weights.get("q_group_size"))
    return Quantised(
        form,
        bits if isinstance(bits, int) else 8 if "fp8" in form else None,
        group if isinstance(group, int) and group > 0 else None,
        found,
    )


def _groups(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the groups of a config of compressed-tensors."""
    groups = settings.get("config_groups")
    if isinstance(groups, Mapping):
        for group in cast(Mapping[str, Any], groups).values():
            if isinstance(group, Mapping):
                yield cast(Mapping[str, Any], group)


def quantised_of(config: ModelConfig) -> Quantised | None:
    """Return how the configured model is quantised; None: it is not, or has no config.json. Raises ModelError."""
    from evoalign.models.files import find, read_settings
    from evoalign.models.origin import described

    path, revision = described(config)
    try:
        file = find(path, "config.json", revision)
    except (OSError, ValueError):  # not the name of a model: loading it reports that
        return None
    return None if file is None else quantised(config.name, read_settings(config.name, file))


def files_hash(path: str, revision: str | None, name: str) -> str:
    """Return the `model_hash` of a quantised base: SHA-256 over (tensor name, dtype, shape, SHA-256 of its bytes) of
    its safetensors files, sorted by name. It is the same in every engine, and for every sharding.

    Call `files.refuse_pickles` first. Raises ModelError.
    """
    from evoalign.models.files import weight_files
    from evoalign.models.tensors import open_file

    found: list[tuple[Path, int, str, Mapping[str, Any]]] = []
    for file in weight_files(path, revision, name):
        open_file(file)  # checks header and size
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header: Mapping[str, Any] = json.loads(opened.read(size))
        found += [(file, 8 + size, key, entry) for key, entry in header.items() if key != "__metadata__"]
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        rows = list(pool.map(_row, *zip(*found, strict=True)))
    return hashlib.sha256(json.dumps(sorted(rows), separators=(",", ":")).encode()).hexdigest()


def _row(file: Path, start: int, key: str, entry: Mapping[str, Any]) -> list[Any]:
    """Return name, dtype, shape and SHA-256 of a tensor in a file whose data begin at `start`."""
    first, end = entry["data_offsets"]
    digest, left = hashlib.sha256(), end - first
    with file.open("rb", buffering=0) as opened:
        opened.seek(start + first)
        while left and (piece := opened.read(min(PIECE, left))):
            digest.update(piece)
            left -= len(piece)
    return [key, entry["dtype"], entry["shape"], digest.hexdigest()]
