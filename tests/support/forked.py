# SPDX-License-Identifier: Apache-2.0
"""Processes of Python without the seconds that their imports take: forks of one that has imported what a run needs.

For tests of what a process of its own does. Of what one imports, or reads as it is started, a real one tells.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import reduction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, ClassVar

import pytest
from kill_points import PROCESSES

from evoalign.analysis.sweeping import children


class Handle:
    """A file descriptor that goes along to the process, and is a number there."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _taken, (reduction.DupFd(self.number),)


def _taken(handle: Any) -> int:
    return handle.detach()


class Popen:
    """As `subprocess.Popen([sys.executable, "-m", MODULE, *WORDS])` in a session of its own."""

    latest: ClassVar[Popen | None] = None
    """The one that was started last."""

    def __init__(
        self, words: Sequence[str], *, pass_fds: Sequence[int] = (), env: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL, stdout: BinaryIO | None = None,
        stderr: BinaryIO | int = subprocess.STDOUT, start_new_session: bool = True,
    ) -> None:  # fmt: skip
        assert list(words[:2]) == [sys.executable, "-m"] and start_new_session, words
        assert stdin == subprocess.DEVNULL and (not isinstance(stderr, int) or stderr == subprocess.STDOUT)
        with Path(os.devnull).open("wb") as nothing:
            said = (stdout or nothing).fileno()
            errors = said if isinstance(stderr, int) else stderr.fileno()
            sources = {1: said, 2: errors, **{n: n for n in pass_fds}}
            handles = {number: Handle(source) for number, source in sources.items()}
            own = list(words[2:]), dict(os.environ if env is None else env), str(Path.cwd()), handles
            self._process = PROCESSES.Process(target=_be, args=own, daemon=True)
            self._process.start()
        Popen.latest = self
        with suppress(ProcessLookupError):
            while self.poll() is None and os.getpgid(self.pid) != self.pid:  # who asks for its session finds it
                time.sleep(0.01)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        assert code is not None, "it does not end"
        return code

    def send_signal(self, number: int) -> None:
        # The server of forks reaps a process that ends a moment before `poll` tells its code.
        with suppress(ProcessLookupError):
            if self.poll() is None:
                os.kill(self.pid, number)


@contextmanager
def runs_of_sweeps() -> Iterator[None]:
    """The processes that a sweep starts here are such ones."""
    own = SimpleNamespace(Popen=Popen, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(children, "subprocess", own)
        yield


def _be(words: list[str], environment: dict[str, str], cwd: str, handles: dict[int, int]) -> None:
    os.setsid()
    for number in sorted(handles):  # a handle that came is above all that were asked for, or in its own place
        os.dup2(handles[number], number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    try:
        code = _run(*words)
        for file in (sys.stdout, sys.stderr):
            file.flush()
        os._exit(code)
    except KeyboardInterrupt:  # as Python ends by it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        raise


def _run(module: str, *words: str) -> int:
    sys.argv[1:] = words
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
