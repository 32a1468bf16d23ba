# SPDX-License-Identifier: Apache-2.0
"""The run, written down: one hash-chained JSON line for each update, ahead of the weights, and one to seal it.

A line's `hash` is the SHA-256 of the line without it; `previous` is the hash of the line before. Nothing in it
depends on time or place, so two runs of one config and seed on one machine have identical journals. With the base
model, the coefficients here rebuild the mean of any generation.

    {"type": "header", format_version, hashes of config, tokenizer, noise table, model and the starting mean}
    {"type": "update", index, generation, members, signs, scores, coefficients, rms_c, sigma, step, decay}
    {"type": "seal", index, weights_hash}
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from evoalign.config import FORMAT_VERSION
from evoalign.errors import JournalError
from evoalign.types import Member, Update

GENESIS = "0" * 64


class Journal:
    """Appends to journal.jsonl; each line is on disk when the call returns."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self._file = path.open("x", encoding="utf-8")
        self._previous = GENESIS
        self._write({"type": "header", "format_version": FORMAT_VERSION, **header})

    def append(self, update: Update, fitness_M: Sequence[float]) -> None:
        """Record an update before any weight moves."""
        c = update.coefficients
        self._write(
            {
                "type": "update",
                "index": update.index,
                "generation": update.generation,
                "members": [m.noise for m in update.members],
                "signs": [m.sign for m in update.members],
                "scores": list(fitness_M),
                "coefficients": list(c),
                "rms_c": math.sqrt(sum(x * x for x in c) / len(c)),
                "sigma": update.sigma,
                "step": update.step,
                "decay": update.decay,
            }
        )

    def seal(self, index: int, weights_hash: str) -> None:
        """Record what the weights came to."""
        self._write({"type": "seal", "index": index, "weights_hash": weights_hash})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        line = {**record, "previous": self._previous}
        self._previous = line["hash"] = _digest(line)
        self._file.write(_dump(line) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a journal, checked. Raises JournalError naming the first line that is damaged or out of place."""
    previous = GENESIS
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            line = _parse(path, number, raw)
            digest = line.pop("hash", None)
            if digest != _digest(line) or line.get("previous") != previous:
                raise JournalError(f"{path}, line {number} was altered or does not follow from the line before it")
            previous = cast(str, digest)
            yield line


def to_update(line: Mapping[str, Any]) -> Update:
    """The update that a line of type `update` records."""
    members = tuple(Member(i, n, s) for i, (n, s) in enumerate(zip(line["members"], line["signs"], strict=True)))
    return Update(
        index=line["index"],
        generation=line["generation"],
        members=members,
        coefficients=tuple(line["coefficients"]),
        sigma=line["sigma"],
        step=line["step"],
        decay=line["decay"],
    )


def _parse(path: Path, number: int, raw: bytes) -> dict[str, Any]:
    try:
        line: object = json.loads(raw.decode("utf-8"), parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):  # not UTF-8, not JSON, not a number that a journal can hold
        line = None
    if not raw.endswith(b"\n") or not isinstance(line, dict):
        raise JournalError(f"{path}, line {number} is cut or damaged")
    return cast(dict[str, Any], line)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _digest(line: Mapping[str, Any]) -> str:
    return hashlib.sha256(_dump(line).encode()).hexdigest()


def _dump(line: Mapping[str, Any]) -> str:
    return json.dumps(line, sort_keys=True, separators=(",", ":"), allow_nan=False)
