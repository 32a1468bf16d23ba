# SPDX-License-Identifier: Apache-2.0
"""The process of one episode's harness: start it, wait for its score, and kill it with all its descendants.

A guard process removes what is left once the trainer is gone, also by SIGKILL. If it is killed, another one starts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

from evoalign.errors import DataError, EvoalignError, cut, plain
from evoalign.gateway.guarding import FOLDER
from evoalign.marked import MARK, kill_marked
from evoalign.tasks.harness import FUNCTION
from evoalign.transcripts import REWARD, checked_scores
from evoalign.types import Example

TAIL = 1 << 16
"""Bytes of a harness's output that are read, from the end."""
GUARD = "from evoalign.gateway import guarding; guarding.main()"
CALLED = "from evoalign.gateway import calling; calling.main()"


class FailedError(EvoalignError):
    """A harness ended without a score. `output` is what it wrote to stderr, `mend` what to change."""

    def __init__(self, message: str, output: str = "", mend: str = "fix task.command") -> None:
        super().__init__(message)
        self.output, self.mend = output, mend


class NotStartedError(FailedError):
    """A command cannot be run, however often it is tried."""


class Processes:
    """The processes of the harnesses that are running. Leaving the context kills them."""

    def __init__(self) -> None:
        self._mark, self._groups, self._lock, self._closed = uuid.uuid4().hex, set[int](), threading.Lock(), False
        self._prefix = FOLDER.format(mark=self._mark)
        self._environment = {"PYTHONHASHSEED": "0"} | os.environ | {MARK: self._mark}
        self._guard = self._started_guard()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            self._closed = True
            groups = list(self._groups)
        for group in groups:
            _kill(group)
        kill_marked(self._mark, but=self._guard.pid)
        self._guard.kill()  # nothing is left for it to do
        self._guard.communicate()

    def run(
        self, command: Sequence[str], base_url: str, key: str, example: Example, seconds: float, *, by_file: bool
    ) -> str | None:
        """Run the harness of one episode; return its output, or None if it was killed after `seconds`.

        With `by_file` the output is that in the file $EVOALIGN_SCORE. Raises NotStartedError if the harness cannot be
        started, and FailedError if it ends with an error.
        """
        with tempfile.TemporaryDirectory(prefix=self._prefix, ignore_cleanup_errors=True) as folder:
            row, score = Path(folder, "example.json"), Path(folder, "score.json")
            row.write_text(json.dumps(dict(example), ensure_ascii=False, default=str), encoding="utf-8")
            places = {"base_url": base_url, "api_key": key, "example": str(row)}
            words = [word.format(**places) for word in command]
            if FUNCTION.fullmatch(command[0]):
                words = [sys.executable, "-c", CALLED, command[0], base_url, str(row)]  # all users can read these
            given = {
                "OPENAI_BASE_URL": base_url,
                "OPENAI_API_KEY": key,
                "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
                "ANTHROPIC_API_KEY": key,
                "EVOALIGN_EXAMPLE": str(row),
                "EVOALIGN_SCORE": str(score),
                "TMPDIR": folder,
            }
            with Path(folder, "out").open("w+b") as out, Path(folder, "err").open("w+b") as err:
                status = self._wait(words, given, seconds, out, err)
                if status is None:
                    return None
                if status:
                    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"has exit status {status}"
                    output = _tail(err).replace(key, "API_KEY")
                    raise FailedError(f"{how}{_last_words(output)}", output)
                if by_file:
                    return score.read_text("utf-8", "replace") if score.is_file() else ""
                return _tail(out)

    def _wait(
        self, words: Sequence[str], given: Mapping[str, str], seconds: float, out: IO[bytes], err: IO[bytes]
    ) -> int | None:
        """Return the exit status of a process, or None after `seconds`; kill its group in any case."""
        with self._lock:
            if self._closed:
                raise FailedError("was not started: the run is ending")
            try:
                child = subprocess.Popen(
                    list(words),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    env={**self._environment, **given},
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                raise NotStartedError(f"cannot be started: {error}", mend=_how_to_start(words[0])) from error
            self._groups.add(child.pid)
            self._tell_guard(f"+{child.pid}")
        try:
            return child.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _kill(child.pid)
            child.wait()
            with self._lock:
                self._groups.discard(child.pid)
                self._tell_guard(f"-{child.pid}")

    def _started_guard(self) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", GUARD]
        return subprocess.Popen(words, bufsize=0, stdin=subprocess.PIPE, env=self._environment, start_new_session=True)

    def _tell_guard(self, line: str) -> None:
        """Send a line to the guard. If it was killed, start another one, which learns of all groups."""
        if self._closed:
            return
        try:
            self._write_guard(line)
        except BrokenPipeError:
            self._guard.communicate()
            self._guard = self._started_guard()
            with suppress(BrokenPipeError):
                for group in self._groups:
                    self._write_guard(f"+{group}")

    def _write_guard(self, line: str) -> None:
        assert self._guard.stdin is not None
        self._guard.stdin.write(f"{line}\n".encode())


def reported(output: str) -> dict[str, float]:
    """Return the scores that a harness reported: the last line of its output that is a JSON object with a `reward`, or
    a number. Raises FailedError."""
    for line in reversed(output.splitlines()):
        try:
            found: Any = json.loads(line)
        except (ValueError, RecursionError):
            continue
        try:
            return checked_scores(found)
        except DataError as error:
            if isinstance(found, dict) and REWARD in found:
                raise FailedError(f"reported a wrong score: {error}") from None
    raise FailedError(
        'ended without a score; print {"reward": 0.5} as the last line, or set task.score to file (then write it to '
        "$EVOALIGN_SCORE) or post (then POST it to BASE_URL/score); its last output is "
        f"{plain(cut(output.strip()[-300:], 300))!r}"
    )


def _how_to_start(word: str) -> str:
    """Return how a command has to begin whose first word the system does not find, or may not run."""
    if not Path(word).is_file():
        return "fix task.command"
    program = word if os.sep in word else f"./{word}"
    return f"begin task.command with {program} (chmod +x {word}), or with the program that runs it, as in python {word}"


def _kill(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _tail(file: IO[bytes]) -> str:
    file.seek(0, os.SEEK_END)
    file.seek(max(0, file.tell() - TAIL))
    return file.read().decode("utf-8", "replace")


def _last_words(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return f": {plain(cut(lines[-1], 300))}" if lines else ""
