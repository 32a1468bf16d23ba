# SPDX-License-Identifier: Apache-2.0
"""The journal: one hash-chained JSON line per update, written before the weights move, and one with the new hash.

A line's `hash` is the SHA-256 of the line without it; `previous` is the hash of the line before. Nothing in it
depends on time, so two runs of one config and seed on one machine have identical journals. The header holds the
resolved config, so that the base model and this one file rebuild the mean of any generation.

    {"type": "header", format_version, versions, device, dtype, config, given_as, space, evolved_parameters,
     hashes of config, noise table, tokenizer, data, model, starting mean, inputs, machine, summation, scorer_digest}
    {"type": "update", index, generation, members, signs, scores, coefficients, rms_c, sigma, step, decay, objective,
     scored_by}
    {"type": "seal", index, weights_hash}
    {"type": "validation", index, reward}
    {"type": "end", index, reason, limit}

`validation` and `end` lines follow a seal, and only where a setting needs them. A run that is given a larger limit
continues after its `end` line. `objective`, `inputs`, `machine`, `summation` and `scorer_digest` are left out where
they do not apply, and by earlier releases; `scored_by` is in journals of earlier releases alone. A line is canonical
JSON: keys sorted, no white space, ASCII, floats as Python's `repr` writes them.
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
from evoalign.config.reading import MissingError, as_finite, read_bytes
from evoalign.config.spaces import SECTIONS, SpaceSection
from evoalign.errors import DataError, JournalError
from evoalign.rundir.checkpoint import Finite, Hash
from evoalign.rundir.files import check_at, sync_folder
from evoalign.types import Member, Summation, Update

GENESIS = "0" * 64
MOST_BYTES = 2**36
Count = Annotated[int, Field(ge=0, lt=2**63)]
Word = Annotated[int, Field(ge=0, lt=2**32)]
"""A word of the noise counter."""
Reason = Literal["plateau", "time"]
"""Why a run ended before its last generation."""

_M = TypeVar("_M", bound=BaseModel)


class Strict(BaseModel):
    """Base of all records: no unknown keys, no conversions."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Line(Strict):
    """Base of all lines. `previous` is the hash of the line before."""

    previous: Hash


class Header(Line):
    """The first line: what the run is, and what has to be equal for a replay to give the same weights."""

    type: Literal["header"]
    format_version: int
    versions: dict[str, str]
    device: str
    dtype: Literal["float32", "bfloat16", "float16"]
    """The dtype the model was served in."""
    config: dict[str, Any]
    config_hash: Hash
    noise_table: Hash
    tokenizer_hash: Hash
    data_hash: Hash
    """Hash of the rows of all splits."""
    given_as: Literal["task", "reward"] | None
    """Kind of the Python object that was given in place of what the config names."""
    space: str
    evolved_parameters: Count
    model_hash: Hash
    weights_hash: Hash
    """Hash of the mean before the first update."""
    inputs: dict[str, str] | None = None
    """Stop tokens, weights that earlier releases ignored, hashes of the model's config.json and of custom rewards."""
    machine: dict[str, str] | None = None
    """`capability` and `threads`: what the last bits of a library's results may depend on besides the versions."""
    summation: Summation | None = None
    prompts_hash: Hash | None = None  # of prompts of messages, as the chat template renders them
    scorer_digest: Hash | None = None
    """Digest of the scoring models: files, template, tokens, dtype."""

    @property
    def sums(self) -> Summation:
        """How the terms of an update were added.

        A journal of an earlier release does not record it. Its sums are ordered, except for `lowrank` or a custom space
        on a CPU or with an optimizer, which used a library's matrix product.
        """
        if self.summation is not None or not SECTIONS.get(self.space, SpaceSection).took_library_sums:
            return self.summation or "ordered"
        es: Any = self.config.get("es")
        optimizer: Any = es.get("optimizer") if isinstance(es, dict) else None
        plain = not isinstance(optimizer, dict) or optimizer.get("name", "sgd") == "sgd"
        return "ordered" if plain and not self.device.startswith("cpu") else "library"

    @model_validator(mode="after")
    def _check_hash(self) -> Header:
        if self.config_hash != hashlib.sha256(json.dumps(self.config, sort_keys=True).encode()).hexdigest():
            raise ValueError("config_hash is not that of config")
        return self


class ScoredChunk(Strict):
    """Members that were scored together, and the replicas that gave the accepted result."""

    members: list[Count]
    by: Annotated[list[Count], Field(min_length=1)]


class ScoredBy(Strict):
    """Replicas that scored a generation, and why replicas were excluded so far, in journals of earlier releases."""

    chunks: Annotated[list[ScoredChunk], Field(min_length=1)]
    expelled: dict[str, str]


class UpdatedLine(Line):
    """An update."""

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
    """State of the objective and of `task.settings` after the generation."""
    scored_by: ScoredBy | None = None

    @model_validator(mode="after")
    def _check_lengths(self) -> UpdatedLine:
        if len({len(self.members), len(self.signs), len(self.scores), len(self.coefficients)}) > 1:
            raise ValueError("members, signs, scores and coefficients differ in number")
        if self.generation != self.index:
            raise ValueError(f"generation {self.generation} is not index {self.index}")
        return self


class SealedLine(Line):
    """The hash of the mean after an update."""

    type: Literal["seal"]
    index: Word
    weights_hash: Hash


class ValidatedLine(Line):
    """The reward of the mean on the validation split, where early stopping or a plateau schedule uses it."""

    type: Literal["validation"]
    index: Word
    reward: Finite


class EndedLine(Line):
    """The end of a run before its last generation."""

    type: Literal["end"]
    index: Word
    reason: Reason
    limit: Finite


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a run ended before its last generation, and the limit that it reached: evaluations, or seconds."""

    reason: Reason
    limit: float


@dataclass(frozen=True, slots=True)
class Recorded:
    """One generation of a journal. `weights_hash` is None where the run died before the update was sealed.

    `hash` is that of its seal, or else of its update. `objective` is the state after it, `validation` the
    reward on the validation split if recorded, and `ending` why the run ended there, if it did.
    """

    update: Update
    fitness_M: tuple[float, ...]
    weights_hash: str | None
    hash: str
    objective: Mapping[str, float] = field(default_factory=dict[str, float])
    validation: float | None = None
    ending: Ending | None = None


@dataclass(frozen=True, slots=True)
class Damage:
    """The first damaged line. `cut`: it is the last line, without its end, as a killed process leaves it."""

    line: int
    cut: bool
    message: str


@dataclass(frozen=True, slots=True)
class Log:
    """The contents of a journal up to its first damaged line; `size` is the bytes of the whole lines."""

    path: Path
    header: Header
    generations: tuple[Recorded, ...]
    size: int
    last_hash: str
    damage: Damage | None = None

    @property
    def sealed(self) -> int:
        """Number of generations whose mean has a recorded hash."""
        return _sealed(self.generations)

    @property
    def validated(self) -> list[float]:
        """The recorded rewards on the validation split, in order."""
        return [reward for g in self.generations if (reward := g.validation) is not None]

    @property
    def ending(self) -> Ending | None:
        """Why the run ended at the last recorded generation, if it ended early."""
        return self.generations[-1].ending if self.generations else None

    def whole(self, generations: int | None = None) -> Log:
        """Return the journal without a last line that was cut off. Raises JournalError for any other damage.

        With `generations`, only that many have to be whole.
        """
        if self.damage is None or self.damage.cut or (generations is not None and generations <= self.sealed):
            return replace(self, damage=None)
        raise JournalError(self.damage.message)


class Journal:
    """Appends lines to journal.jsonl; each is on disk when the call returns. The caller holds the run's lock.

    `last_hash` is the hash of the last header, update or seal line. Each method that writes raises RunGoneError where
    the file was removed, moved or replaced.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        """Create a journal. Raises FileExistsError."""
        self.path, self._file = path, path.open("xb")
        self._previous = GENESIS
        self.summation: Summation = header.get("summation") or "ordered"
        sync_folder(path.parent)
        self.last_hash = self._write({"type": "header", "format_version": FORMAT_VERSION, **header})

    @classmethod
    def resume(cls, log: Log) -> Journal:
        """Open a journal to continue after its last whole line; what follows that line is cut off."""
        self = cls.__new__(cls)
        self.path, self._file = log.path, log.path.open("r+b")
        self._previous = log.last_hash
        self.last_hash = log.generations[-1].hash if log.generations else log.last_hash
        self.summation = log.header.sums
        self._file.truncate(log.size)
        self._file.seek(log.size)
        return self

    def append(self, update: Update, fitness_M: Sequence[float], objective: Mapping[str, float] | None = None) -> None:
        """Record an update and the state of objective and settings after it, before any weight moves."""
        c = update.coefficients
        line: dict[str, Any] = {
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
        if objective:
            line["objective"] = dict(objective)
        self.last_hash = self._write(line)

    def seal(self, index: int, weights_hash: str) -> None:
        """Record the hash of the weights after an update."""
        self.last_hash = self._write({"type": "seal", "index": index, "weights_hash": weights_hash})

    def validated(self, index: int, reward: float) -> None:
        """Record the reward on the validation split after a generation."""
        self._write({"type": "validation", "index": index, "reward": reward})

    def end(self, index: int, ending: Ending) -> None:
        """Record that the run ends after this generation."""
        self._write({"type": "end", "index": index, "reason": ending.reason, "limit": ending.limit})

    def close(self) -> None:
        """Close the file; a full disk is ignored, since all whole lines are on it."""
        with suppress(OSError):
            self._file.close()

    def _write(self, record: Mapping[str, Any]) -> str:
        """Append a line and return its hash."""
        check_at(self._file, self.path)  # a line must not go to a deleted file
        line = {**record, "previous": self._previous}
        digest = line["hash"] = _digest(line)
        self._file.write(_dump(line) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._previous = digest
        return digest


def is_blank(path: Path) -> bool:
    """Return whether there is no file, or one whose first line was never finished. Raises JournalError."""
    try:
        return b"\n" not in read_bytes(path, MOST_BYTES)
    except MissingError:
        return True
    except DataError as error:
        raise JournalError(str(error)) from error


def read_header(path: Path) -> Header:
    """Read the first line of a journal. Raises JournalError where it is damaged."""
    return _begin(path)[1]


def _begin(path: Path) -> tuple[list[bytes], Header, str]:
    """Return the lines of a journal, its header and the header's hash. Raises JournalError."""
    try:
        lines = list(io.BytesIO(read_bytes(path, MOST_BYTES)))
        found, last = _parse(lines[0] if lines else b"", GENESIS)
        if found.get("type") != "header":
            raise _BadLineError("is no header")
        if (version := found.get("format_version")) != FORMAT_VERSION:
            raise _BadLineError(f"has format_version {version!r}, and this release reads {FORMAT_VERSION}")
        return lines, _model(Header, found), last
    except DataError as error:
        raise JournalError(f"{error}; is this a run directory?") from error
    except _BadLineError as error:
        raise JournalError(f"{path}, line 1 {error}; without its header, the run cannot be rebuilt") from None


def read(path: Path) -> Log:
    """Read a journal up to its first damaged line. Raises JournalError where the header is damaged."""
    lines, header, last = _begin(path)
    generations: list[Recorded] = []
    size, damage = len(lines[0]), None
    for number, text in enumerate(lines[1:], 2):
        try:
            line, digest = _parse(text, last)
            _follow(generations, line, digest, header.sums)
        except _BadLineError as error:
            cut = number == len(lines) and not text.endswith(b"\n")
            damage = Damage(number, cut, f"{path}, line {number} {error}; {_up_to(generations, number)}")
            break
        size, last = size + len(text), digest
    return Log(path, header, tuple(generations), size, last, damage)


class _BadLineError(Exception):
    """The error in a line."""


def _follow(generations: list[Recorded], line: Mapping[str, Any], digest: str, sums: Summation) -> None:
    """Add a line to the generations. Raises _BadLineError for a line that may not follow."""
    kind, index = line.get("type"), line.get("index")
    count, sealed = len(generations), _sealed(generations)
    is_of_last = count > 0 and index == count - 1
    if kind == "update" and count == sealed and index == count:
        new = _model(UpdatedLine, line)
        members = tuple(Member(i, n, s) for i, (n, s) in enumerate(zip(new.members, new.signs, strict=True)))
        c = tuple(new.coefficients)
        update = Update(new.index, new.generation, members, c, new.sigma, new.step, new.decay, sums)
        generations.append(Recorded(update, tuple(new.scores), None, digest, new.objective or {}))
    elif kind == "seal" and is_of_last and count > sealed:
        sealed_line = _model(SealedLine, line)
        generations[-1] = replace(generations[-1], weights_hash=sealed_line.weights_hash, hash=digest)
    elif kind == "validation" and is_of_last and count == sealed and generations[-1].validation is None:
        generations[-1] = replace(generations[-1], validation=_model(ValidatedLine, line).reward)
    elif kind == "end" and is_of_last and count == sealed:
        end = _model(EndedLine, line)
        generations[-1] = replace(generations[-1], ending=Ending(end.reason, end.limit))
    else:
        raise _BadLineError("does not belong there")


def _sealed(generations: Sequence[Recorded]) -> int:
    return len(generations) - bool(generations and generations[-1].weights_hash is None)


def _parse(text: bytes, previous: str) -> tuple[dict[str, Any], str]:
    """Return a line without its hash, and the hash. Raises _BadLineError."""
    try:
        line: object = json.loads(text.decode("ascii"), parse_float=as_finite, parse_constant=as_finite)
        canonical = _dump(line) + b"\n" == text
    except (ValueError, RecursionError):  # not ASCII, not JSON, or not a finite number
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
        raise _BadLineError(f"has an invalid {where or 'record'}: {first['msg']}") from None


def _up_to(generations: Sequence[Recorded], line: int) -> str:
    """Say how many lines before a damaged line can be kept."""
    done = _sealed(generations)
    if not done:
        return "before it there is no whole generation: keep its first line to begin from there"
    lines = line - 1 - (len(generations) - done)
    return f"the run is whole up to generation {done} (line {lines}): keep its first {lines} lines to resume from there"


def _digest(line: Mapping[str, Any]) -> str:
    return hashlib.sha256(_dump(line)).hexdigest()


def _dump(line: object) -> bytes:
    return json.dumps(line, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
