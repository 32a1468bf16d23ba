# SPDX-License-Identifier: Apache-2.0
"""Reward scripts: executables that read JSON lines and print numbers, in any language.

A script is started once per batch, without a shell. Its standard input has a line per completion: an object with the
columns of the row, `prompt` and `completion`. It prints a line per completion: one number, or `null` if it does not
apply. It runs where reward functions run, within the grader's limits of time and memory.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from evoalign.errors import ConfigError, RewardError, cut
from evoalign.errors import shown as short
from evoalign.rewards.functions import Batch, RewardFunction, Values, failure

_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
"""Numbers as programs print them: awk and bc print `.5`. No `nan` or `inf`."""


class ScriptError(Exception):
    """A script failed to run. Like a function that raises, it is retried."""


class Script(RewardFunction):
    """An executable with the interface of a reward function. Raises ConfigError if it cannot be run."""

    def __init__(self, path: str) -> None:
        found = Path(path).expanduser()
        if not found.is_file():
            raise ConfigError(
                f"task.rewards: {path!r} is neither an import path nor a file; write package.module:function, "
                "file.py:function, or the path of an executable file"
            )
        if not os.access(found, os.X_OK):
            meant = f"write {path}:FUNCTION for a function in it; as a script, " if found.suffix == ".py" else ""
            raise ConfigError(f"task.rewards: {path} is not executable; {meant}make it executable: chmod +x {path}")
        self.path = found.absolute()
        super().__init__(self.call)
        self.name = found.name

    def call(self, batch: Batch) -> Any:
        """Return its output and the last line of its stderr. Raises ScriptError."""
        lines = (
            json.dumps(
                {**{str(name): value for name, value in example.items()}, "prompt": prompt, "completion": text},
                default=str,
                skipkeys=True,
            )
            for prompt, text, example in zip(batch.prompts, batch.texts, batch.examples, strict=True)
        )
        given = "".join(f"{line}\n" for line in lines).encode("ascii")
        try:
            done = subprocess.run([self.path], input=given, capture_output=True, check=False)
        except OSError as error:
            hint = "; its first line has to name its interpreter, such as #!/bin/sh"
            how = hint if error.errno == errno.ENOEXEC else ""
            raise ScriptError(f"it does not start: {error.strerror}{how}") from None
        printed = done.stderr.decode("utf-8", "replace")
        sys.stderr.write(printed)
        last = next((line.strip() for line in reversed(printed.splitlines()) if line.strip()), "")
        if done.returncode:
            how = f"exit status {done.returncode}" if done.returncode > 0 else f"killed by signal {-done.returncode}"
            raise ScriptError(f"{how}{_quoted(last)}")
        return done.stdout.decode("utf-8", "replace"), last

    def reads(self, column: str) -> bool:
        """Return True: a script gets every column."""
        return True

    def missing(self, columns: Any) -> list[str]:
        """Return nothing: a script gets every column."""
        return []

    def checked(self, result: Any, batch: Batch) -> Values:
        """Return one finite number or None per completion. Raises RewardError that quotes the output."""
        printed, last = result
        lines = printed.split("\n")
        lines = lines[:-1] if not lines[-1] else lines
        if len(lines) != len(batch.texts):
            end = f"; the last is {short(lines[-1])}" if lines else ""
            raise RewardError(
                f"reward script {self.name} printed {len(lines)} lines for {len(batch.texts)} completions{end}"
                f"{_quoted(last)}; print one number, or null, for each",
                failure("value", self.name, texts=batch.texts),
            )
        values: Values = []
        for row, line in enumerate(map(str.strip, lines)):
            values.append(float(line) if _NUMBER.fullmatch(line) else None)
            if line != "null" and (values[-1] is None or not math.isfinite(values[-1])):
                raise RewardError(
                    f"reward script {self.name} printed {short(line)} for the completion {batch.texts[row][:80]!r}"
                    f"{_quoted(last)}; print one finite number, or null if the script does not apply",
                    failure("value", self.name, (batch.prompts[row], batch.texts[row], batch.examples[row])),
                )
        return values


def _quoted(last: str) -> str:
    return f" (on stderr: {cut(last, 200)!r})" if last else ""
