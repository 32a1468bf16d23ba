# SPDX-License-Identifier: Apache-2.0
"""Read the answers of models from JSON lines, finished runs, tables of completions or the output of `evoalign eval`.

Answers of different models are matched by prompt. A prompt given as messages is matched by its text, as in the tables
that a run keeps.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from evoalign.config import read as read_config
from evoalign.config.reading import FILE_BYTES, parse, read_bytes, read_object
from evoalign.errors import ConfigError, DataError, plain, shown
from evoalign.rundir import parquet
from evoalign.rundir.method import is_run
from evoalign.types import text_of

MEND = "write a JSON object with a prompt and a response in each line"
FORMS = (".jsonl", ".json", ".parquet")
AFTER = "results/completions/after.parquet"
"""Completions of the trained model on a run's test split."""


@dataclass(frozen=True, slots=True)
class Answers:
    """One model's first answer to each prompt; `further` counts the answers to the same prompts that were left out.

    `scorers` names the reward and cost models that the model was trained with, if its run records them.
    """

    name: str
    by_prompt: Mapping[str, str]
    further: int = 0
    scorers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """Prompts answered by every model, in the first model's order.

    `alone` counts, per model, the prompts that some other model did not answer.
    """

    prompts: tuple[str, ...]
    models: tuple[Answers, ...]
    alone: Mapping[str, int]


def read(target: str) -> Answers:
    """Read `PATH` or `NAME=PATH`; the name defaults to the file's or folder's. Raises ConfigError, DataError."""
    name, path = _named(target)
    file, scorers = path, tuple[str, ...]()
    if path.is_dir():
        file, scorers = _completions(name, path), _scorers(path)
    by_prompt: dict[str, str] = {}
    count = 0
    for row, answer, where in _rows(file):
        count += 1
        by_prompt.setdefault(*_pair(row, answer, where))
    if not by_prompt:
        raise DataError(f"{path} has no answers; give a file with a prompt and a response in each line")
    return Answers(name, by_prompt, count - len(by_prompt), scorers)


def share(models: Sequence[Answers], most: int | None = None) -> SharedPrompts:
    """Return the first `most` prompts that all models answered.

    Raises ConfigError for fewer than two models, equal names, or no shared prompt.
    """
    if len(models) < 2:
        raise ConfigError("only one model given; give two or more to compare")
    names = [model.name for model in models]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"two targets have the name {twice}; rename one: evoalign judge ask NAME=PATH OTHER=PATH")
    shared = [prompt for prompt in models[0].by_prompt if all(prompt in model.by_prompt for model in models)]
    if not shared:
        raise ConfigError(
            f"{' and '.join(names)} have no prompt in common; give answers to exactly the same test prompts; "
            "for a run of task safety, give RUN/results/points.jsonl instead of the run: it has the prompts unchanged"
        )
    alone = {model.name: len(model.by_prompt) - len(shared) for model in models}
    return SharedPrompts(tuple(shared[:most]), tuple(models), alone)


def _eval_hint(name: str, model: Path, options: Sequence[str] = ("--config", "CONFIG")) -> str:
    command = shlex.join(["evoalign", "eval", str(model), *options, "--output", f"{name}.json"])
    return f"generate its answers with `{command}` and give {name}.json instead"


def _named(target: str) -> tuple[str, Path]:
    head, sign, tail = target.partition("=")
    whole = Path(target)
    name, path = (head, Path(tail)) if sign and head and not whole.exists() else ("", whole)
    name = name or (path.stem if path.is_file() or path.suffix in FORMS else path.resolve().name)
    if not path.exists():
        hub = "" if path.suffix in FORMS else f"; for a model on the hub, {_eval_hint(name, path)}"
        raise ConfigError(f"{path} does not exist; give a finished run or a file of answers as PATH or NAME=PATH{hub}")
    if not name.strip() or not name.isprintable():
        raise ConfigError(f"{shown(target)}: {shown(name)} is not a valid model name; give NAME=PATH")
    return name, path


def _rows(path: Path) -> Iterator[tuple[Any, str, str]]:
    """Yield each row of a file, the name of the answer in it, and where it is."""
    if path.suffix == ".parquet":
        for number, table_row in enumerate(parquet.read(path), start=1):
            yield table_row, "text", f"{path}, row {number},"
    elif path.suffix == ".json":
        completions = read_object(path, FILE_BYTES).get("completions")
        if not isinstance(completions, list):
            raise DataError(f"{path} has no completions; write it with `evoalign eval MODEL --output FILE`")
        for number, row in enumerate(cast("list[Any]", completions), start=1):
            where = f"{path}, completion {number},"
            if not isinstance(row, dict):
                raise DataError(f"{where} is {shown(row)}; write the file with `evoalign eval MODEL --output FILE`")
            yield row, "text", where
    else:
        for number, line in enumerate(read_bytes(path, FILE_BYTES, MEND).splitlines(), start=1):
            if line.strip():
                where = f"{path}, line {number},"
                yield parse(line, where, MEND), "response", where


def _completions(name: str, path: Path) -> Path:
    """Return the final completions of a run. Raises ConfigError without them, DataError for a broken seal."""
    from evoalign.rundir.checksums import verify  # imports torch, which files of answers do not need

    if not is_run(path):
        raise ConfigError(f"{path} is not a run directory; for a model or an adapter, {_eval_hint(name, path)}")
    if not (path / AFTER).is_file():
        raise ConfigError(f"{path} has no {AFTER}; let the run finish, or {_eval_hint(name, path, ())}")
    verify(path, AFTER)
    return path / AFTER


def _pair(row: Any, answer: str, where: str) -> tuple[str, str]:
    """Return prompt and answer of a row."""
    if not isinstance(row, dict):
        raise DataError(f"{where} is {shown(row)}; {MEND}")
    fields = cast("dict[str, Any]", row)
    prompt, response = fields.get("prompt"), fields.get(answer)
    if isinstance(prompt, list):
        messages = cast("list[Any]", prompt)
        if all(isinstance(m, dict) and isinstance(cast("Any", m).get("content"), str) for m in messages) and messages:
            prompt = text_of(messages)
    if not isinstance(prompt, str) or not prompt.strip():
        raise DataError(f"{where} prompt is {shown(prompt)}; give a string, or messages with role and content")
    if not isinstance(response, str):
        known = plain(", ".join(map(str, fields)))
        raise DataError(f"{where} {answer} is {shown(response)}; give the model's answer (fields found: {known})")
    return prompt, response


def _scorers(run: Path) -> tuple[str, ...]:
    try:
        section = read_config(run / "config.yaml").get("scorer")
    except ConfigError:  # the answers can still be judged
        return ()
    parts = cast("dict[str, Any]", section) if isinstance(section, dict) else {}
    return tuple(name for name in (parts.get("reward"), parts.get("cost")) if isinstance(name, str))
