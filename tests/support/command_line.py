# SPDX-License-Identifier: Apache-2.0
"""The command line in the tests' own process."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from evoalign import cli


@dataclass
class Done:
    code: int
    out: str
    err: str


Run = Callable[..., Done]


def caller(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int = 80) -> Run:
    """A function from the words of a command to what came of it, on a terminal of so many columns."""
    monkeypatch.setenv("COLUMNS", str(columns))

    def go(*words: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["evoalign", *map(str, words)])
        code: Any = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
        captured = capsys.readouterr()
        return Done(int(code or 0), captured.out, captured.err)

    return go
