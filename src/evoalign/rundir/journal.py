# SPDX-License-Identifier: Apache-2.0
"""The run, written down: one hash-chained JSON line for each update, ahead of the weights, and one to seal it.

A line's `hash` is the SHA-256 of the line without it; `previous` is the hash of the line before. Nothing in it
depends on time, so two runs of one config and seed on one machine have identical journals. The header holds the
resolved config, so that the base model and this one file rebuild the mean of any generation.

    {"type": "header", format_version, versions, device, dtype, config, given_as, space, evolved_parameters,
     hashes of config, noise table, tokenizer, data, model and the starting mean, machine, summation}
    {"type": "update", index, generation, members, signs, scores, coefficients, rms_c, sigma, step, decay, objective}
    {"type": "seal", index, weights_hash}

`objective` is the state of the objective after the generation. It is there only where an objective has a state, which
no earlier release could have: journals without one are what they always were, and readers of before refuse such a line
by name. So the format is still version 1. Weights do not depend on it.

`summation` is how products of factors are added in an update (`evoalign.types.Summation`), `machine` what a library's
product may depend on: the CPU's instructions, the threads. A journal of before has neither: see `Header.sums`.

A line is canonical JSON: keys sorted, no white space, ASCII, floats as Python's `repr` has them.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from evoalign.config import FORMAT_VERSION
from evoalign.config.reading import MissingError, read_bytes
from evoalign.config.spaces import SECTIONS, SpaceSection
from evoalign.errors import DataError, JournalError
from evoalign.rundir.checkpoint import Hash
from evoalign.rundir.files import check_at, sync_folder
from evoalign.types import Member, Summation, Update

GENESIS = "0" * 64
MOST_BYTES = 2**36

Finite = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Word = Annotated[int, Field(ge=0, lt=2**32)]
"""A word of the noise counter."""


class _Line(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    previous: Hash


_M = TypeVar("_M", bound=BaseModel)


class Header(_Line):
    """The first line: what the run is, and what has to be the same for it to come out the same."""

    type: Literal["header"]
    format_version: int
    versions: dict[str, str]
    device: str
    dtype: Literal["float32", "bfloat16", "float16"]
    """The one the model was served in."""
    config: dict[str, Any]
    config_hash: Hash
    noise_table: Hash
    tokenizer_hash: Hash
    data_hash: Hash
    """Of the rows of all splits."""
    given_as: Literal["task", "reward"] | None
    """What was handed over as a Python object, in place of what the config names."""
    space: str
    evolved_parameters: Count
    model_hash: Hash
    weights_hash: Hash
    """Of the mean before the first update."""
    machine: dict[str, str] | None = None
    """What the last bits of a library's results may depend on, beside the versions: `capability` and `threads`."""
    summation: Summation | None = None

    @property
    def sums(self) -> Summation:
        """How the terms of an update were added.

        Where a journal of before does not say: in order, but for `lowrank` (or a space of one's own) on a CPU or with
        an optimizer, which took a library's matrix product.
        """
        if self.summation is not None or not SECTIONS.get(self.space, SpaceSection).took_library_sums:
            return self.summation or "ordered"
        es: Any = self.config.get("es")
        optimizer: Any = es.get("optimizer") if isinstance(es, dict) else None
        plain = not isinstance(optimizer, dict) or optimizer.get("name", "sgd") == "sgd"
        return "ordered" if plain and not self.device.startswith("cpu") else "library"

    @model_validator(mode="after")
    def _hash_of_config(self) -> Header:
        if self.config_hash != hashlib.sha256(json.dumps(self.config, sort_keys=True).encode()).hexdigest():
            raise ValueError("config_hash is not that of config")
        return self


class _Updated(_Line):
    type: Literal["update"]
    index: Word
    generation: Word
    members: Annotated[list[Word], Field(min_length=1)]
    signs: list[Literal[-1, 1]]
    scores: list[Finite]
    coefficients: list[Finite]
    rms_c: Finite
    sigma: Finite
    step: Finite
    decay: Finite
    objective: Annotated[dict[str, Finite], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one_each(self) -> _Updated:
        if len({len(self.members), len(self.signs), len(self.scores), len(self.coefficients)}) > 1:
            raise ValueError("members, signs, scores and coefficients differ in number")
        if self.generation != self.index:
            raise ValueError(f"generation {self.generation} is not index {self.index}")
        return self


class _Sealed(_Line):
    type: Literal["seal"]
    index: Word
    weights_hash: Hash


@dataclass(frozen=True, slots=True)
class Recorded:
    """One generation of a journal. `weights_hash` is None where the run ended before the update was sealed.

    `hash` is that of its last line, `objective` the state of the objective after it.
    """

    update: Update
    fitness_M: tuple[float, ...]
    weights_hash: str | None
    hash: str
    objective: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class Damage:
    """The first line that is not whole. `cut`: the last one, without its end, as a process that died leaves it."""

    line: int
    cut: bool
    message: str


@dataclass(frozen=True, slots=True)
class Log:
    """What a journal says, up to the first line that is damaged."""

    path: Path
    header: Header
    generations: tuple[Recorded, ...]
    size: int
    """Bytes of the whole lines."""
    last_hash: str
    damage: Damage | None = None

    @property
    def sealed(self) -> int:
        """How many generations are whole: the mean after them is known and has a hash."""
        return _sealed(self.generations)

    def whole(self, generations: int | None = None) -> Log:
        """Itself, with a last line that was cut off left out. Raises JournalError for any other damage.

        With `generations`, only so many have to be whole.
        """
        if self.damage is None or self.damage.cut or (generations is not None and generations <= self.sealed):
            return replace(self, damage=None)
        raise JournalError(self.damage.message)


class Journal:
    """Appends to journal.jsonl; each line is on disk when the call returns. The run directory's lock is for others.

    Every line raises RunGoneError where the file was removed, moved or replaced.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        """A new journal. Raises FileExistsError."""
        self._path, self._file = path, path.open("xb")
        self._previous = GENESIS
        self.summation: Summation = header.get("summation") or "ordered"
        sync_folder(path.parent)
        self._write({"type": "header", "format_version": FORMAT_VERSION, **header})

    @classmethod
    def resume(cls, log: Log) -> Journal:
        """Go on after the last whole line; what follows it is cut off."""
        self = cls.__new__(cls)
        self._path, self._file = log.path, log.path.open("r+b")
        self._previous = log.last_hash
        self.summation = log.header.sums
        self._file.truncate(log.size)
        self._file.seek(log.size)
        return self

    def append(self, update: Update, fitness_M: Sequence[float], objective: Mapping[str, float] | None = None) -> None:
        """Record an update, and the objective's state after it, before any weight moves."""
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
                **({"objective": dict(objective)} if objective else {}),
            }
        )

    def seal(self, index: int, weights_hash: str) -> None:
        """Record what the weights came to."""
        self._write({"type": "seal", "index": index, "weights_hash": weights_hash})

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    @property
    def last_hash(self) -> str:
        """The hash of the last line: it stands for the whole run so far."""
        return self._previous

    def close(self) -> None:
        """Close the file. Each line is on disk already; on a full disk there may be half a one to give up."""
        with suppress(OSError):
            self._file.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        check_at(self._file, self._path)  # else a line would go to a file that nobody finds
        line = {**record, "previous": self._previous}
        digest = line["hash"] = _digest(line)
        self._file.write(_dump(line) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._previous = digest


def is_blank(path: Path) -> bool:
    """Whether there is no journal yet: no file, or one whose first line was never finished. Raises JournalError."""
    try:
        return b"\n" not in read_bytes(path, MOST_BYTES)
    except MissingError:
        return True
    except DataError as error:
        raise JournalError(str(error)) from error


def read(path: Path) -> Log:
    """What a journal says and where it is damaged. Raises JournalError where not even the header is whole."""
    try:
        lines = list(io.BytesIO(read_bytes(path, MOST_BYTES)))
    except DataError as error:
        raise JournalError(f"{error}; is this a run directory?") from error
    try:
        header, last = _header(lines)
    except _BadLineError as error:
        raise JournalError(f"{path}, line 1 {error}; without its header, nothing of the run can be rebuilt") from None
    generations: list[Recorded] = []
    size, damage = len(lines[0]), None
    for number, text in enumerate(lines[1:], 2):
        try:
            line, digest = _parse(text, last)
            _follow(generations, line, digest, header.sums)
        except _BadLineError as error:
            cut = number == len(lines) and not text.endswith(b"\n")
            damage = Damage(number, cut, f"{path}, line {number} {error}; {_up_to(generations)}")
            break
        size, last = size + len(text), digest
    return Log(path, header, tuple(generations), size, last, damage)


class _BadLineError(Exception):
    """Says what is wrong with a line."""


def _header(lines: Sequence[bytes]) -> tuple[Header, str]:
    found, digest = _parse(lines[0] if lines else b"", GENESIS)
    if found.get("type") != "header":
        raise _BadLineError("is no header")
    if found.get("format_version") != FORMAT_VERSION:
        version = found.get("format_version")
        raise _BadLineError(f"has format_version {version!r}, and this release reads {FORMAT_VERSION}")
    return _model(Header, found), digest


def _follow(generations: list[Recorded], line: Mapping[str, Any], digest: str, sums: Summation) -> None:
    """Take in one more line. Raises _BadLineError for one that does not belong there."""
    count, sealed = len(generations), _sealed(generations)
    if line.get("type") == "update" and count == sealed and line.get("index") == count:
        update = _model(_Updated, line)
        generations.append(Recorded(_update(update, sums), tuple(update.scores), None, digest, update.objective or {}))
    elif line.get("type") == "seal" and count > sealed and line.get("index") == count - 1:
        weights_hash = _model(_Sealed, line).weights_hash
        generations[-1] = replace(generations[-1], weights_hash=weights_hash, hash=digest)
    else:
        raise _BadLineError("does not belong there")


def _sealed(generations: Sequence[Recorded]) -> int:
    return len(generations) - bool(generations and generations[-1].weights_hash is None)


def _update(line: _Updated, sums: Summation) -> Update:
    members = tuple(Member(i, n, s) for i, (n, s) in enumerate(zip(line.members, line.signs, strict=True)))
    return Update(
        index=line.index,
        generation=line.generation,
        members=members,
        coefficients=tuple(line.coefficients),
        sigma=line.sigma,
        step=line.step,
        decay=line.decay,
        summation=sums,
    )


def _parse(text: bytes, previous: str) -> tuple[dict[str, Any], str]:
    """A line without its hash, and the hash. Raises _BadLineError."""
    try:
        line: object = json.loads(text.decode("ascii"), parse_float=_finite, parse_constant=_finite)
        canonical = _dump(line) + b"\n" == text
    except (ValueError, RecursionError):  # not ASCII, not JSON, not a number that a journal can hold
        line, canonical = None, False
    if not text.endswith(b"\n") or not isinstance(line, dict):
        raise _BadLineError("is cut or damaged")
    found = cast(dict[str, Any], line)
    digest = found.pop("hash", None)
    if not canonical or digest != _digest(found) or found.get("previous") != previous:
        raise _BadLineError("was altered or does not follow from the line before it")
    return found, cast(str, digest)


def _model(kind: type[_M], line: Mapping[str, Any]) -> _M:
    try:
        return kind.model_validate(dict(line))
    except ValidationError as error:
        first = error.errors()[0]
        where = json.dumps(".".join(map(str, first["loc"])))[1:-1]  # a name may hold any character
        raise _BadLineError(f"holds {where or 'a record'} that cannot be: {first['msg']}") from None


def _up_to(generations: Sequence[Recorded]) -> str:
    done = _sealed(generations)
    if not done:
        return "before it is the start of the run alone: keep its first line to begin from there"
    lines = 1 + 2 * done
    return f"the run is whole up to generation {done} (line {lines}): keep its first {lines} lines to resume from there"


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _digest(line: Mapping[str, Any]) -> str:
    return hashlib.sha256(_dump(line)).hexdigest()


def _dump(line: object) -> bytes:
    return json.dumps(line, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
