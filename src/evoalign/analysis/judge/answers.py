# SPDX-License-Identifier: Apache-2.0
"""What models answered, from files: lines of JSON, a finished run, its tables of completions, or what `eval` wrote.

Prompts are what answers of different models are matched by. Those of messages count by their text, as in the tables
that a run keeps.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from evoalign.config import read as read_config
from evoalign.config.reading import FILE_BYTES, parse, read_bytes, read_object
from evoalign.errors import ConfigError, DataError, plain, shown
from evoalign.rundir import parquet
from evoalign.rundir.method import is_run
from evoalign.types import text_of

FORMS = (".jsonl", ".json", ".parquet")
AFTER = "after"
"""Of a run, the completions of the test split that its trained model gave."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Of one model: an answer to each prompt. `further` answers to a prompt that had one were left out.

    `scorers` are the reward and cost models that trained it, by their names, where the run says so.
    """

    name: str
    by_prompt: Mapping[str, str]
    further: int = 0
    scorers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Asked:
    """Prompts that all models answered, in the first model's order; `alone` counts by model those that not all did."""

    prompts: tuple[str, ...]
    models: tuple[Answers, ...]
    alone: Mapping[str, int]


def read(target: str) -> Answers:
    """From `PATH` or `NAME=PATH`; the name is else that of the file or folder. Raises ConfigError, DataError."""
    name, path = _named(target)
    if path.is_dir():
        if not is_run(path):
            raise ConfigError(f"{path} is a folder and no run; of a model or an adapter, {_answered_by(name, path)}")
        return _answers(name, _of_run(name, path), str(path), scorers=_scorers(path))
    rows = _of_parquet(path) if path.suffix == ".parquet" else _of_eval(path) if path.suffix == ".json" else None
    return _answers(name, _of_lines(path) if rows is None else rows, str(path))


def asked(models: Sequence[Answers], most: int | None = None) -> Asked:
    """The prompts that all answered, the first `most`. Raises ConfigError: two models are needed, of two names."""
    if len(models) < 2:
        raise ConfigError("one model has nothing beside it; give two or more to compare")
    names = [model.name for model in models]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"two targets are called {twice}; name them: evoalign judge NAME=PATH OTHER=PATH")
    shared = [prompt for prompt in models[0].by_prompt if all(prompt in model.by_prompt for model in models)]
    if not shared:
        raise ConfigError(
            f"{' and '.join(names)} have no prompt in common; give answers to the same test prompts, to the letter; "
            "of a run of task safety, give RUN/results/points.jsonl in place of the run, whose prompts are as written"
        )
    alone = {model.name: len(model.by_prompt) - len(shared) for model in models}
    return Asked(tuple(shared[:most]), tuple(models), alone)


def _answered_by(name: str, model: Path, asked: Sequence[str] = ("--config", "CONFIG")) -> str:
    """How a model is asked, whose answers are then judged: its prompts and decoding are those of a config."""
    command = shlex.join(["evoalign", "eval", str(model), *asked, "--output", f"{name}.json"])
    return f"let `{command}` write its answers, and give {name}.json in its place"


def _named(target: str) -> tuple[str, Path]:
    head, sign, tail = target.partition("=")
    whole = Path(target)
    name, path = (head, Path(tail)) if sign and head and not whole.exists() else ("", whole)
    name = name or (path.stem if path.is_file() or path.suffix in FORMS else path.resolve().name)
    if not path.exists():
        hub = "" if path.suffix in FORMS else f"; of a model of the hub, {_answered_by(name, path)}"
        raise ConfigError(
            f"{path} does not exist; give a finished run, or a file of answers, as PATH or NAME=PATH{hub}"
        )
    if not name.strip() or not name.isprintable():
        raise ConfigError(f"{shown(target)}: {shown(name)} is no name of a model; name it: NAME=PATH")
    return name, path


def _answers(name: str, rows: Iterable[tuple[str, str]], where: str, scorers: tuple[str, ...] = ()) -> Answers:
    found: dict[str, str] = {}
    count = 0
    for prompt, response in rows:
        count += 1
        found.setdefault(prompt, response)
    if not found:
        raise DataError(f"{where} has no answers; give a file with a prompt and a response in each line")
    return Answers(name, found, count - len(found), scorers)


def _of_lines(path: Path) -> Iterable[tuple[str, str]]:
    mend = "write a JSON object with a prompt and a response in each line"
    for number, line in enumerate(read_bytes(path, FILE_BYTES, mend).splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number},"
        row = parse(line, where, mend)
        if not isinstance(row, dict):
            raise DataError(f"{where} is {shown(row)}; {mend}")
        yield _pair(cast("dict[str, Any]", row), "response", where)


def _of_parquet(path: Path) -> Iterable[tuple[str, str]]:
    return [_pair(row, "text", f"{path}, row {i},") for i, row in enumerate(parquet.read(path), start=1)]


def _of_eval(path: Path) -> Iterable[tuple[str, str]]:
    rows = read_object(path, FILE_BYTES).get("completions")
    if not isinstance(rows, list):
        raise DataError(f"{path} has no completions; of one model, `evoalign eval MODEL --output FILE` writes them")
    return [
        _pair(cast("dict[str, Any]", row) if isinstance(row, dict) else {}, "text", f"{path}, completion {i},")
        for i, row in enumerate(cast("list[Any]", rows), start=1)
    ]


def _of_run(name: str, path: Path) -> Iterable[tuple[str, str]]:
    from evoalign.rundir.checksums import verify
    from evoalign.rundir.directory import RunDir  # these two bring torch, which files of answers do without

    found = RunDir(path).completions(AFTER)
    if not found.is_file():
        raise ConfigError(
            f"{path} has no {found.relative_to(found.parents[2])}; let it end, or {_answered_by(name, path, ())}"
        )
    verify(path, found.relative_to(found.parents[2]).as_posix())
    return _of_parquet(found)


def _pair(row: Mapping[str, Any], answer: str, where: str) -> tuple[str, str]:
    prompt, response = row.get("prompt"), row.get(answer)
    if isinstance(prompt, list):
        messages = cast("list[Any]", prompt)
        if all(isinstance(m, dict) and isinstance(cast("Any", m).get("content"), str) for m in messages) and messages:
            prompt = text_of(messages)
    if not isinstance(prompt, str) or not prompt.strip():
        raise DataError(f"{where} prompt is {shown(prompt)}; write a text, or messages of role and content")
    if not isinstance(response, str):
        known = plain(", ".join(map(str, row)))
        raise DataError(f"{where} {answer} is {shown(response)}; write what the model answered (there is: {known})")
    return prompt, response


def _scorers(run: Path) -> tuple[str, ...]:
    """`scorer.reward` and `scorer.cost` of a run's config, where it has them."""
    try:
        section = read_config(run / "config.yaml").get("scorer")
    except ConfigError:  # the answers are there, and are what counts
        return ()
    parts = cast("dict[str, Any]", section) if isinstance(section, dict) else {}
    return tuple(name for name in (parts.get("reward"), parts.get("cost")) if isinstance(name, str))
