# SPDX-License-Identifier: Apache-2.0
"""The run, written down: one hash-chained JSON line for each update, ahead of the weights, and one to seal it.

A line's `hash` is the SHA-256 of the line without it; `previous` is the hash of the line before. Nothing in it
depends on time, so two runs of one config and seed on one machine have identical journals. The header holds the
resolved config, so that the base model and this one file rebuild the mean of any generation.

    {"type": "header", format_version, versions, device, dtype, config, given_as, space, evolved_parameters,
     hashes of config, noise table, tokenizer, data, model and the starting mean, machine, summation}
    {"type": "update", index, generation, members, signs, scores, coefficients, rms_c, sigma, step, decay, objective,
     scored_by}
    {"type": "seal", index, weights_hash}
    {"type": "validation", index, reward}
    {"type": "end", index, reason, limit}

A `validation` line has the reward of the mean on the validation split, where the training depends on it: where it ends
on a plateau, or its sigma follows one. An `end` line says that the run ended there, before its last generation, and by
which limit of the settings: evaluations without a better reward (`plateau`), or seconds (`time`). A run that was then
given a larger limit goes on after it. Both come after the seal of their generation, are there only where a setting asks
for them, and leave the hashes that stand for a generation as they are: those of its update and its seal.

`objective` is the state of the objective after the generation. It is there only where an objective has a state, which
no earlier release could have: journals without one are what they always were, and readers of before refuse such a line
by name. So the format is still version 1. Weights do not depend on it.

`scored_by` says which replica of engine ray scored which members, and which scored them again. It is there only where
answers are checked so (`engine.audit`); weights do not depend on it either.

`summation` is how products of factors are added in an update (`evoalign.types.Summation`), `machine` what a library's
product may depend on: the CPU's instructions, the threads. A journal of before has neither: see `Header.sums`.
`scorer_digest` is there only where models score.

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
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError

from evoalign.config import FORMAT_VERSION
from evoalign.config.reading import MissingError, parse, read_bytes
from evoalign.errors import DataError, JournalError
from evoalign.rundir.checkpoint import NO_JOURNAL
from evoalign.rundir.files import check_at, sync_folder
from evoalign.rundir.lines import EndedLine, Header, Reason, SealedLine, UpdatedLine, ValidatedLine
from evoalign.types import Member, Summation, Update

GENESIS = "0" * 64
MOST_BYTES = 2**36

_M = TypeVar("_M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a run ended before its last generation, and the limit that it had reached."""

    reason: Reason
    limit: float
    """Evaluations without a better reward, or seconds."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One generation of a journal. `weights_hash` is None where the run ended before the update was sealed.

    `hash` is that of its seal, or of its update; `objective` the state of the objective after it, `validation` the
    reward on the validation split, where that is recorded, and `ending` why the run ended, or once ended, there.
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

    @property
    def validated(self) -> list[float]:
        """The rewards on the validation split that are recorded, in order."""
        return [recorded.validation for recorded in self.generations if recorded.validation is not None]

    @property
    def ending(self) -> Ending | None:
        """Why the run ended where the journal does, if it did so before its last generation."""
        return self.generations[-1].ending if self.generations else None

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
        self._place = self._write({"type": "header", "format_version": FORMAT_VERSION, **header})

    @classmethod
    def resume(cls, log: Log) -> Journal:
        """Go on after the last whole line; what follows it is cut off."""
        self = cls.__new__(cls)
        self._path, self._file = log.path, log.path.open("r+b")
        self._previous = log.last_hash
        self._place = log.generations[-1].hash if log.generations else log.last_hash
        self.summation = log.header.sums
        self._file.truncate(log.size)
        self._file.seek(log.size)
        return self

    def append(
        self,
        update: Update,
        fitness_M: Sequence[float],
        objective: Mapping[str, float] | None = None,
        scored_by: Mapping[str, Any] | None = None,
    ) -> None:
        """Record an update, the objective's state after it, and who scored what, before any weight moves."""
        c = update.coefficients
        self._place = self._write(
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
                **({"scored_by": dict(scored_by)} if scored_by else {}),
            }
        )

    def seal(self, index: int, weights_hash: str) -> None:
        """Record what the weights came to."""
        self._place = self._write({"type": "seal", "index": index, "weights_hash": weights_hash})

    def validated(self, index: int, reward: float) -> None:
        """Record the reward on the validation split after a generation, which what comes depends on."""
        self._write({"type": "validation", "index": index, "reward": reward})

    def end(self, index: int, ending: Ending) -> None:
        """Record that the run ends after this generation."""
        self._write({"type": "end", "index": index, "reason": ending.reason, "limit": ending.limit})

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    @property
    def last_hash(self) -> str:
        """The hash of the last line that seals or moves the mean: it stands for the whole run so far."""
        return self._place

    def close(self) -> None:
        """Close the file. Each line is on disk already; on a full disk there may be half a one to give up."""
        with suppress(OSError):
            self._file.close()

    def _write(self, record: Mapping[str, Any]) -> str:
        """Append a line; its hash."""
        check_at(self._file, self._path)  # else a line would go to a file that nobody finds
        line = {**record, "previous": self._previous}
        digest = line["hash"] = _digest(line)
        self._file.write(_dump(line) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._previous = digest
        return digest


def last_hash(path: Path) -> str:
    """Return the hash of a journal's last line, which depends on all before it; zeros without a journal."""
    try:
        lines = read_bytes(path, MOST_BYTES).splitlines()
        found: Any = parse(lines[-1], str(path)) if lines else None
    except DataError:
        return NO_JOURNAL
    return str(cast("dict[str, Any]", found).get("hash")) if isinstance(found, dict) else NO_JOURNAL


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
            damage = Damage(number, cut, f"{path}, line {number} {error}; {_up_to(generations, number)}")
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
        update = _model(UpdatedLine, line)
        generations.append(Recorded(_update(update, sums), tuple(update.scores), None, digest, update.objective or {}))
    elif line.get("type") == "seal" and count > sealed and line.get("index") == count - 1:
        weights_hash = _model(SealedLine, line).weights_hash
        generations[-1] = replace(generations[-1], weights_hash=weights_hash, hash=digest)
    elif line.get("type") == "validation" and _is_after(generations, line) and generations[-1].validation is None:
        generations[-1] = replace(generations[-1], validation=_model(ValidatedLine, line).reward)
    elif line.get("type") == "end" and _is_after(generations, line):
        end = _model(EndedLine, line)
        generations[-1] = replace(generations[-1], ending=Ending(end.reason, end.limit))
    else:
        raise _BadLineError("does not belong there")


def _is_after(generations: Sequence[Recorded], line: Mapping[str, Any]) -> bool:
    """Whether a line may say something of the last generation, which is sealed."""
    count = len(generations)
    return 0 < count == _sealed(generations) and line.get("index") == count - 1


def _sealed(generations: Sequence[Recorded]) -> int:
    return len(generations) - bool(generations and generations[-1].weights_hash is None)


def _update(line: UpdatedLine, sums: Summation) -> Update:
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


def _up_to(generations: Sequence[Recorded], line: int) -> str:
    """What is whole before a damaged line."""
    done = _sealed(generations)
    if not done:
        return "before it is the start of the run alone: keep its first line to begin from there"
    lines = line - 1 - (len(generations) - done)
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
