# SPDX-License-Identifier: Apache-2.0
"""The file that judgments are written into, a line as each comes, so that a stop loses none that was paid for.

Its lines are judgments as `judgments` has them, with what says which ones they are: `models` (all that are compared),
`judge`, `rubric` (a hash of what the judge was told), `asked` (a hash of question and answers), and `why` there are no
scores. What was asked is not asked again; a file of other judgments is refused before anything is written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from evoalign.analysis.judge.answers import Asked
from evoalign.analysis.judge.judgments import Judgment, judgment_of
from evoalign.analysis.judge.rubrics import rubric_hash
from evoalign.config.reading import MissingError, parse, read_bytes
from evoalign.errors import ConfigError, RunExistsError, shown
from evoalign.rundir.files import is_at, is_link, locked, make_folder, write_text

Key: TypeAlias = tuple[str, str, str, str, bool]


@dataclass(frozen=True, slots=True)
class Item:
    """A judgment to be asked for: two models' answers to a question, in a dimension, in one order."""

    model_a: str
    model_b: str
    dimension: str
    question: str
    order_ab: bool
    answer_a: str
    answer_b: str

    @property
    def key(self) -> Key:
        """What no other item of a plan has."""
        return self.model_a, self.model_b, self.dimension, self.question, self.order_ab

    @property
    def shown(self) -> tuple[str, str]:
        """The answers in the order in which the judge sees them."""
        return (self.answer_a, self.answer_b) if self.order_ab else (self.answer_b, self.answer_a)

    @property
    def asked(self) -> str:
        """A hash of question and answers."""
        text = json.dumps([self.question, self.answer_a, self.answer_b])
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Plan:
    """All that is to be judged, question by question, so that what is there after a stop is balanced; and by whom."""

    models: tuple[str, ...]
    judge: str
    items: tuple[Item, ...]

    def marks(self, item: Item) -> dict[str, Any]:
        """What a line has beside the judgment."""
        rubric = rubric_hash(item.dimension)
        return {"models": sorted(self.models), "judge": self.judge, "rubric": rubric, "asked": item.asked}


def planned(found: Asked, judge: str, dimensions: Sequence[str]) -> Plan:
    """Each question, pair of models and dimension in both orders."""
    items = [
        Item(a.name, b.name, dimension, prompt, order, a.by_prompt[prompt], b.by_prompt[prompt])
        for prompt in found.prompts
        for a, b in combinations(found.models, 2)
        for dimension in dimensions
        for order in (True, False)
    ]
    return Plan(tuple(model.name for model in found.models), judge, tuple(items))


class Transcript:
    """A file of judgments of one plan. Raises DataError, ConfigError for one that is there and holds others."""

    def __init__(self, path: Path, plan: Plan) -> None:
        self.path, self._plan = path, plan
        try:
            raw = read_bytes(path)
        except MissingError:
            raw = b""
        self._raw, whole = raw, raw[: raw.rfind(b"\n") + 1]
        self.rows = list(self._checked(whole.splitlines()))
        if raw and not whole and not raw.startswith(b'{"model_a"'):
            raise ConfigError(f"{path} is no file of judgments; give another folder with --to")

    def _checked(self, lines: Sequence[bytes]) -> Iterator[dict[str, Any]]:
        items = {item.key: item for item in self._plan.items}
        for number, line in enumerate(lines, start=1):
            where = f"{self.path}, line {number},"
            row = parse(line, where, "delete the line, or give another folder with --to")
            read = judgment_of(row, where)
            key = (read.model_a, read.model_b, read.dimension, read.question, read.order_ab)
            self._check_same(row, "models", sorted(self._plan.models), where)
            self._check_same(row, "judge", self._plan.judge, where)
            if key not in items:
                raise ConfigError(
                    f"{where} judges what is not asked for now ({read.dimension} of {shown(read.question)}); ask as "
                    "before, or give another folder with --to"
                )
            for name, value in self._plan.marks(items[key]).items():
                self._check_same(row, name, value, where)
            yield row

    def _check_same(self, row: Mapping[str, Any], name: str, value: Any, where: str) -> None:
        if row.get(name) != value:
            what = {"rubric": "by another rubric", "asked": "of other answers to this question"}.get(
                name, f"with {name} {shown(row.get(name))} and not {shown(value)}"
            )
            raise ConfigError(f"{where} was judged {what}; ask as before, or give another folder with --to")

    @property
    def judgments(self) -> list[Judgment]:
        """Those that are there."""
        return [judgment_of(row, str(self.path)) for row in self.rows]

    def left(self) -> list[Item]:
        """What is still to be asked."""
        done: Collection[Key] = {
            (row["model_a"], row["model_b"], row["dimension"], row["question"], row["order_ab"]) for row in self.rows
        }
        return [item for item in self._plan.items if item.key not in done]

    def forget_unparsed(self) -> None:
        """Take out judgments without scores, so that they are asked again; the file changes when it is opened."""
        self.rows = [row for row in self.rows if row["scores"] is not None]

    @contextmanager
    def opened(self) -> Generator[None]:
        """To be written to by this process alone. A line that a stop cut off goes. Raises RunExistsError."""
        make_folder(self.path.parent)
        place = self.path.with_name(f".{self.path.name}.lock")
        if is_link(place):
            place.unlink()
        with place.open("ab") as lock:
            if not (locked(lock) and is_at(lock, place)):
                raise RunExistsError(f"{self.path}: another process writes there; wait for it, or give another --to")
            try:
                if self.path.exists() and read_bytes(self.path) != self._raw:
                    raise RunExistsError(f"{self.path} was changed meanwhile; give the command again")
                kept = "".join(map(_line, self.rows))
                if kept.encode() != self._raw or is_link(self.path):  # lines are appended to no file elsewhere
                    write_text(self.path, kept)
                with self.path.open("ab") as self._file:
                    yield
            finally:
                place.unlink(missing_ok=True)

    _file: BinaryIO

    def add(self, item: Item, scores: tuple[float, float] | None, raw: str, why: str | None) -> None:
        """A judgment; `scores` are of model_a and model_b."""
        judged = Judgment(item.model_a, item.model_b, item.dimension, item.question, scores, item.order_ab, raw)
        row = {
            **asdict(judged),
            "scores": None if scores is None else list(scores),
            **self._plan.marks(item),
            "why": why,
        }
        self.rows.append(row)
        self._file.write(_line(row).encode())
        self._file.flush()


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row) + "\n"
