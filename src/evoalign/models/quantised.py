# SPDX-License-Identifier: Apache-2.0
"""A quantised base: find out whether the configured model is one, and hash its files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from evoalign.config import ModelConfig
from evoalign.models.files import find, read_settings, weight_files
from evoalign.models.forms import Quantised, quantised
from evoalign.models.origin import described
from evoalign.models.tensors import open_file

PIECE = 1 << 22
"""Bytes read at once by `files_hash`."""


def quantised_of(config: ModelConfig) -> Quantised | None:
    """Return how the configured model is quantised; None: it is not, or has no config.json. Raises ModelError."""
    path, revision = described(config)
    try:
        file = find(path, "config.json", revision)
    except (OSError, ValueError):  # not the name of a model: loading it reports that
        return None
    return None if file is None else quantised(config.name, read_settings(config.name, file))


def files_hash(path: str, revision: str | None, name: str) -> str:
    """Return the `model_hash` of a quantised base: SHA-256 over (tensor name, dtype, shape, SHA-256 of its bytes) of
    its safetensors files, sorted by name, and its quantization_config. It is the same in every engine, and for every
    sharding.

    Call `files.refuse_pickles` first. Raises ModelError.
    """
    found: list[tuple[Path, int, str, Mapping[str, Any]]] = []
    for file in weight_files(path, revision, name):
        open_file(file)  # checks header and size
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header: Mapping[str, Any] = json.loads(opened.read(size))
        found += [(file, 8 + size, key, entry) for key, entry in header.items() if key != "__metadata__"]
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        rows = list(pool.map(_row, *zip(*found, strict=True)))
    file = find(path, "config.json", revision)
    packed = None if file is None else quantised(name, read_settings(name, file))
    whole = sorted(rows) if packed is None else [sorted(rows), packed.settings]
    return hashlib.sha256(json.dumps(whole, separators=(",", ":"), sort_keys=True).encode()).hexdigest()


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
