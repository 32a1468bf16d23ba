# SPDX-License-Identifier: Apache-2.0
"""Data files of three tasks, as JSON, JSONL and parquet: what is accepted has the rows that were written."""

import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
from fuzzing import REFUSED, check, damage, judged, same, wrong_in
from pyarrow import parquet

from evoalign import tasks
from evoalign.config import from_dict

ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, Any]
WORDS = (
    "a", "Why?", "é", "日本", "😀", "\u2028", "\x85", "\n", "\t", '"', "\\", "{", "[", "\x00", "</s>", " ",
    "\ufeff",
)  # fmt: skip
PLAIN: tuple[Any, ...] = (
    0, -1, 2**60, 0.1, 1e-300, True, None, "", "x", [], ["a", "b"], {"a": {"b": [1, 2.5]}}, [[[]]],
)  # fmt: skip
FLAT: tuple[Any, ...] = (0, 2**60, 0.1, True, "x", ["a", "b"])
PROMPTS: dict[str, tuple[str | None, ...]] = {
    "conciseness": (None, "raw", "chat"), "countdown": (None, "raw", "chat", "short"), "custom": (None, "chat"),
}  # fmt: skip
NESTED = "[" * 80 + "]" * 80
ABYSS = "[" * 200_000 + "]" * 200_000
WRONG_VALUES: dict[str, tuple[tuple[str, Any], ...]] = {
    "conciseness": (
        ("prompt", 5), ("prompt", None), ("prompt", ""), ("target", 5), ("target", None), ("prompt", ["a"]),
    ),
    "countdown": (
        ("numbers", []), ("numbers", [True]), ("numbers", [-1]), ("numbers", "1 2"), ("numbers", [1.5]),
        ("target", "x"), ("target", "1e3"), ("target", True), ("target", None), ("solution", 5), ("solution", "1 + 1"),
        ("numbers", {}),
    ),
    "custom": (
        ("prompt", 5), ("prompt", ""), ("prompt", []), ("prompt", [{}]), ("prompt", [{"role": "user"}]),
        ("prompt", ["a"]), ("prompt", [{"role": 1, "content": "a"}]), ("prompt", None),
    ),
}  # fmt: skip
WRONG_TEXTS: tuple[Callable[[str], bytes], ...] = (
    lambda line: b"", lambda line: b"[]", lambda line: b"\n\n", lambda line: b"[5]", lambda line: b"null",
    lambda line: b'"a"', lambda line: b"[[]]", lambda line: line[:-1].encode(), lambda line: b"\xff" + line.encode(),
    lambda line: b"PAR1", lambda line: b"PAR1" + line.encode(), lambda line: (line + "{").encode(),
    lambda line: f'{line[:-1]}, "deep": {NESTED}}}'.encode(), lambda line: f'{line[:-1]}, "deep": {ABYSS}}}'.encode(),
    lambda line: f'{line[:-1]}, "half": "\\ud800"}}'.encode(), lambda line: f'{line[:-1]}, "\\udfff": 1}}'.encode(),
    lambda line: f'{line[:-1]}, "digits": {"9" * 5000}}}'.encode(), lambda line: f"[{line},]".encode(),
)  # fmt: skip


def spoil(completions: list[Any], **columns: Any) -> list[float]:
    """A reward function that leaves nothing as it was given."""
    for value in [v for column in columns.values() if isinstance(column, list) for v in column]:
        if isinstance(value, list):
            value.append("spoilt")
        elif isinstance(value, dict):
            value.clear()
    return [0.0] * len(completions)


class DataFiles:
    """A case: rows of a task in one of the forms, whole, wrong in one place, or damaged."""

    aim = ""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "rows"
        self.solved: list[Row] = json.loads((ROOT / "data/tasks/countdown/countdown.json").read_text())[:60]

    def attempt(self, draw: random.Random) -> bool:
        task, form = draw.choice(sorted(PROMPTS)), draw.choice(["json", "jsonl", "parquet"])
        rows = self._rows(draw, task, form)
        wrong = wrong_in(draw, self.aim, ["value", "missing", "text", "bytes"])
        known: bool | None = not wrong
        if wrong in ("value", "missing"):
            at, (name, value) = draw.randrange(len(rows)), draw.choice(WRONG_VALUES[task])
            changed = {k: v for k, v in rows[at].items() if k != name} | ({name: value} if wrong == "value" else {})
            rows[at], form = changed, "jsonl" if form == "parquet" else form
            # A gold answer may be missing, and wrong in a row of no split; either pair of names may be there, too.
            known = None if name == "solution" else False
            if task == "conciseness" and {"question", "answer"} <= changed.keys():
                known = None
        raw = _written(draw, rows, form)
        if wrong == "text":
            raw, known = draw.choice(WRONG_TEXTS)(json.dumps(rows[0])), False
        elif wrong == "bytes":
            raw = damage(draw, raw)
            known = None
        self.file.write_bytes(raw)
        expected = rows if wrong not in ("text", "bytes") else _reference(raw)
        sizes = (
            {"split": "first_last", "train_size": 1, "test_size": 1} if len(rows) > 1 and draw.choice([0, 1]) else {}
        )
        prompt = draw.choice(PROMPTS[task])
        if prompt == "raw" and any(not isinstance(r.get("prompt", ""), str) for r in rows):
            prompt = None
        settings = {"name": task, "train_data": str(self.file), "prompt": prompt, **sizes}
        if not sizes:
            settings["test_data"] = str(self.file)
        found = judged(lambda: _read(settings), valid=known)
        if found is REFUSED:
            return False
        check(expected is not None, "what no reader takes was accepted")
        wanted = [*expected[:1], *expected[len(expected) - 1 :]] if sizes else [*expected, *expected]
        check(same(found[0], wanted), f"rows are {str(found[0])[:300]} and were {str(wanted)[:300]}")
        check(same(found[1], wanted), "rows were changed by those who score")
        for asked, row in zip(found[2], wanted, strict=True):
            text = row.get("prompt", row.get("question", row.get("context"))) if task != "countdown" else ""
            check(not isinstance(text, str) or text in str(asked) or text == _content(asked), "another prompt")
        return True

    def _rows(self, draw: random.Random, task: str, form: str) -> list[Row]:
        extras = {draw.choice(["x", "id", "é", "a b"]): draw.choice(FLAT) for _ in range(draw.randint(0, 2))}
        pair, messages = draw.choice([("prompt", "target"), ("question", "answer")]), draw.choice([True, False])
        rows: list[Row] = []
        for _ in range(draw.randint(1, 5)):
            if task == "countdown":
                row: Row = dict(draw.choice(self.solved))
                row["target"] = draw.choice(
                    [row["target"], f"{row['target']}.0", int(row["target"])][: 1 if form == "parquet" else 3]
                )
            elif task == "conciseness":
                row = {pair[0]: _text(draw), pair[1]: _text(draw)}
            else:
                said = [{"role": r, "content": _text(draw)} for r in draw.choice([["user"], ["system", "user"]])]
                row = {"prompt": said if messages else _text(draw)}
            if form != "parquet" and draw.choice([True, False]):
                row["more"] = draw.choice(PLAIN)
            rows.append({**extras, **row})
        return rows


def _text(draw: random.Random) -> str:
    """No white space at its ends: with `task.strip` no answer could be right."""
    return "Q" + "".join(draw.choice(WORDS) for _ in range(draw.randint(0, 6))) + "."


def _content(asked: Any) -> Any:
    return asked[-1]["content"] if isinstance(asked, list) else asked


def _written(draw: random.Random, rows: list[Row], form: str) -> bytes:
    """One of the ways to write rows down."""
    if form == "parquet":
        sink = io.BytesIO()
        parquet.write_table(pyarrow.Table.from_pylist(rows), sink, compression=draw.choice(["none", "snappy", "zstd"]))
        return sink.getvalue()
    plain = draw.choice([True, False])
    if form == "json":
        text = json.dumps(rows, ensure_ascii=plain, indent=draw.choice([None, 2])) + draw.choice(["", "\n", " \n\n"])
    else:
        end = draw.choice(["\n", "\r\n", "\n\n"])
        text = end.join(json.dumps(row, ensure_ascii=plain) for row in rows) + draw.choice(["", end])
    return (b"\xef\xbb\xbf" if draw.choice([0, 0, 1]) else b"") + text.encode()


def _reference(raw: bytes) -> list[Row] | None:
    """What a damaged file says by the libraries' own readers; None where they cannot read it."""
    try:
        if raw[:4] == b"PAR1":
            return parquet.ParquetFile(io.BytesIO(raw)).read().to_pylist()
        text = raw.decode("utf-8-sig").strip()
        return json.loads(text) if text[:1] == "[" else [json.loads(line) for line in text.split("\n") if line.strip()]
    except (ValueError, OSError, RecursionError, pyarrow.ArrowException):
        return None


def _read(settings: dict[str, Any]) -> tuple[list[Row], list[Row], list[Any]]:
    """The rows of both splits as they are read, and after they were scored; and their prompts."""
    made = tasks.create(from_dict({"task": settings}).task, [spoil] if settings["name"] == "custom" else None)
    data = made.load_data(0)
    rows = [*data.train, *data.test]
    before = json.loads(json.dumps(rows, default=repr))
    made.self_check(rows)
    prompts = [made.prompt(row) for row in rows]
    made.columns(["a"] * len(rows), rows)
    return before, [dict(row) for row in rows], prompts
