# SPDX-License-Identifier: Apache-2.0
"""A reward that is a program: JSON lines in, numbers out, in whatever language it is written.

It is started once for each batch, without a shell. Its standard input has a line for each completion, an object with
the columns of the row and with `prompt` and `completion`; it prints a line for each, one number, or `null` where it has
nothing to say. It runs where reward functions do, and so under the grader's limits of time and memory.
"""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evoalign.errors import ConfigError, RewardError, cut
from evoalign.errors import shown as short
from evoalign.rewards.functions import Batch, RewardFunction, Values, failure

_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
"""As programs print them: awk and bc write `.5`, which JSON has not. No `nan` and no `inf`."""


class ScriptError(Exception):
    """A script did not run to its end. Not a value: like a function that raises, it is asked again."""


class Script(RewardFunction):
    """An executable file with the face of a reward function. Raises ConfigError where it cannot be run."""

    def __init__(self, path: str) -> None:
        found = Path(path).expanduser()
        if not found.is_file():
            raise ConfigError(
                f"task.rewards: {path!r} is no import path and no file; write package.module:function, "
                "file.py:function, or the path of an executable file"
            )
        if not os.access(found, os.X_OK):
            meant = f"write {path}:FUNCTION for a function in it; as a script, " if found.suffix == ".py" else ""
            raise ConfigError(f"task.rewards: {path} is not executable; {meant}make it executable: chmod +x {path}")
        self.path = found.absolute()
        super().__init__(self._run)
        self.name = found.name

    def call(self, batch: Batch) -> Any:
        """What it prints, with the last line of its stderr. Raises ScriptError."""
        return self._run("".join(_lines(batch)))

    def _run(self, lines: str) -> tuple[str, str]:
        try:
            done = subprocess.run([self.path], input=lines.encode("ascii"), capture_output=True, check=False)
        except OSError as error:
            how = "; does its first line name its interpreter, such as #!/bin/sh ?" if _no_format(error) else ""
            raise ScriptError(f"it does not start: {error.strerror}{how}") from None
        said = done.stderr.decode("utf-8", "replace")
        sys.stderr.write(said)  # as what a function prints
        last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")
        if done.returncode:
            how = f"exit status {done.returncode}" if done.returncode > 0 else f"killed by signal {-done.returncode}"
            raise ScriptError(f"{how}{_said(last)}")
        return done.stdout.decode("utf-8", "replace"), last

    def missing(self, columns: Any) -> list[str]:
        """Nothing: it gets every column, and what it makes of them is its own."""
        return []

    def checked(self, result: Any, batch: Batch) -> Values:
        """One finite number or None a completion. Raises RewardError that quotes what it printed."""
        printed, last = result
        lines = printed.split("\n")
        lines = lines[:-1] if not lines[-1] else lines
        if len(lines) != len(batch.texts):
            end = f"; the last is {short(lines[-1])}" if lines else ""
            raise RewardError(
                f"reward script {self.name} printed {len(lines)} lines for {len(batch.texts)} completions{end}"
                f"{_said(last)}; print one number, or null, for each",
                failure("value", self.name, texts=batch.texts),
            )
        return [self._value(line.strip(), last, batch, row) for row, line in enumerate(lines)]

    def _value(self, line: str, last: str, batch: Batch, row: int) -> float | None:
        if line == "null":
            return None
        number = float(line) if _NUMBER.fullmatch(line) else float("nan")
        if abs(number) <= sys.float_info.max:  # False for NaN
            return number
        raise RewardError(
            f"reward script {self.name} printed {short(line)} for the completion {batch.texts[row][:80]!r}"
            f"{_said(last)}; a line is one finite number, or null where the script does not apply",
            failure("value", self.name, (batch.prompts[row], batch.texts[row], batch.examples[row])),
        )


def _lines(batch: Batch) -> Iterator[str]:
    """A completion is its text, also where prompts are messages. What JSON does not have goes as text."""
    for prompt, text, example in zip(batch.prompts, batch.texts, batch.examples, strict=True):
        row = {str(name): value for name, value in example.items()}
        yield json.dumps({**row, "prompt": prompt, "completion": text}, default=str, skipkeys=True) + "\n"


def _no_format(error: OSError) -> bool:
    return error.errno == errno.ENOEXEC


def _said(last: str) -> str:
    return f" (on stderr: {cut(last, 200)!r})" if last else ""
