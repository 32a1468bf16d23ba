# SPDX-License-Identifier: Apache-2.0
"""The trainer's end of a worker: a process started or forked, asked over a socket, and killed where it does not answer.

`worker.py` is the other end. A task that its config alone can make again gets a fresh interpreter. A task or function
that was handed over as a Python object cannot travel, so its worker is a fork, which has the object already.
"""

from __future__ import annotations

import json
import os
import reprlib
import signal
import socket
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from pathlib import Path
from threading import Event
from typing import Any, Protocol, cast

from evoalign import errors
from evoalign.errors import EvoalignError, RewardError
from evoalign.plugins import described
from evoalign.tasks.base import Data, Task
from evoalign.tasks.isolated import worker

START_LIMIT = 600.0
"""Seconds for a worker to start (import the user's modules, load the data), and for a task's own `self_check`."""
CLOSE_LIMIT = 2.0
"""Seconds for an idle worker to leave by itself."""
READ = 1 << 20
"""Bytes asked of the socket at once."""
LINE_LIMIT = 256 << 20
"""Bytes of one answer, far more than the rewards of any batch take."""
TICK = 0.05
"""Seconds between looks at whether the worker still lives. Its end of the socket says nothing: children share it."""
PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from evoalign import tasks; from evoalign.tasks.isolated import worker; "
    "worker.main(int(sys.argv[2]), tasks.create)"
)


class NoAnswerError(Exception):
    """A call hung, died or raised. `function` is None where the worker had not even started."""

    def __init__(self, message: str, reason: str, function: str | None, trace: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.function = function
        self.trace = trace


class _Child(Protocol):
    """What is needed of a process, started or forked."""

    pid: int

    def poll(self) -> int | None:
        """The exit status (minus the signal that killed it), None while it runs."""
        ...

    def wait(self) -> int:
        """The exit status, once it has ended."""
        ...


class _Forked:
    """A forked child, with the face of a Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self) -> int:
        status = self._reap(0)
        return -signal.SIGKILL if status is None else status

    def _reap(self, options: int) -> int | None:
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # SIGCHLD is ignored here: nobody knows how it ended
                self._status = -signal.SIGKILL
            else:
                self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status


class Worker:
    """One worker at a time: started when needed, killed with all that it has started, and then started again."""

    def __init__(self, task: Task, memory_gib: float | None = None) -> None:
        self._task = task
        self._memory_gib = memory_gib
        self._data: Data | None = None
        self._seed: int | None = None
        self._folder = Path.cwd()
        self._owner = os.getpid()
        self._child: _Child | None = None
        self._end: socket.socket | None = None
        self._is_ready = False
        self._unread = bytearray()
        self._asked = 0
        self._stopping: Event | None = None
        self._mark = uuid.uuid4().hex

    def load(self, data: Data, seed: int | None) -> None:
        """Start, with the data: a fork has them, a fresh process loads them itself where `seed` is not None."""
        self.close()
        self._data, self._seed = data, seed
        try:
            self._start()
        except NoAnswerError:  # the first call tries again, and tells
            self.kill()

    def ask(
        self, request: Mapping[str, Any], limit: float, who: str | None = None, stopping: Event | None = None
    ) -> Any:
        """The value of one call, of `who` where that is not the task.

        Raises NoAnswerError, the EvoalignError that the task raised, or CancelledError soon after `stopping` is set.
        """
        self._stopping = stopping
        self._asked += 1  # over the life of this object, and so never twice
        message = worker.encode({**request, "id": self._asked})
        if self._is_ready and self._child is not None and self._child.poll() is not None:
            self.kill()  # died between two calls: no call has failed
        try:
            if not self._is_ready:
                self._start()
                self._value(self._exchange(b"", 0, START_LIMIT, None))
                self._is_ready = True
            return self._value(self._exchange(message, self._asked, limit, who or f"task {self._task.name}"))
        except NoAnswerError as problem:
            if problem.reason != "raised" or not self._is_ready:  # after an exception it lives on, with what it keeps
                self.kill()
            raise
        except EvoalignError:
            if not self._is_ready:
                self.kill()
            raise
        except BaseException:  # Ctrl-C in the middle of a call: the answer must not meet the next question
            self.kill()
            raise

    def kill(self) -> None:
        """End the worker and its process group, now. Nothing where there is none, or in a fork of this process."""
        child, end = self._child, self._end
        self._child, self._end, self._is_ready, self._unread = None, None, False, bytearray()
        if end is not None:
            end.close()
        if child is None or self._owner != os.getpid():
            return
        _quietly(os.killpg, child.pid)
        if child.poll() is None:  # a fork that has no group yet
            _quietly(os.kill, child.pid)
        child.wait()
        worker.kill_marked(self._mark)

    def close(self) -> None:
        """Let an idle worker leave by itself, with its exit handlers, and then end what is left of it."""
        if self._is_ready and self._child is not None and self._end is not None and self._owner == os.getpid():
            try:
                self._end.settimeout(CLOSE_LIMIT)
                self._end.sendall(worker.encode({"op": "close"}))
                deadline = time.monotonic() + CLOSE_LIMIT
                while self._child.poll() is None and time.monotonic() < deadline:
                    time.sleep(TICK / 10)
            except OSError:
                pass
        self.kill()

    def _start(self) -> None:
        if self._child is not None:
            return
        config = self._task.config.model_dump(mode="json")
        try:
            self._end, theirs = socket.socketpair()
            with theirs:
                self._child = self._fresh(theirs) if self._task.from_config else self._fork(theirs)
            start = {"op": "start", "config": config, "seed": self._seed, "memory_gib": self._memory_gib}
            self._end.sendall(worker.encode({"id": 0, **start}))
        except OSError as error:  # no process to be had, no such folder any more, or gone already
            raise _died(described(error), None) from error

    def _fresh(self, theirs: socket.socket) -> _Child:
        path = json.dumps([entry for entry in cast("list[object]", sys.path) if isinstance(entry, str)])
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, path, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=self._folder,
            # Fixed, unless it is set: the order of a set must not move a score from one worker to the next.
            env={"PYTHONHASHSEED": "0"} | os.environ | {worker.MARK: self._mark},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _fork(self, theirs: socket.socket) -> _Child:
        pid = os.fork()
        if pid:
            return _Forked(pid)
        status = 1
        try:
            os.setsid()
            os.environ[worker.MARK] = self._mark
            for number in (signal.SIGINT, signal.SIGTERM):  # the trainer's handlers are not the worker's
                signal.signal(number, signal.SIG_DFL)
            if self._end is not None:  # the trainer's end, which would never hang up while a copy is open here
                self._end.close()
            import torch

            torch.set_num_threads(1)  # the threads of the parent's pool are not here: waiting for them would never end
            worker.run(theirs, lambda start: (self._task, self._data))
            status = 0
        except SystemExit as leaving:
            status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def _exchange(self, message: bytes, request: int, limit: float, function: str | None) -> dict[str, Any]:
        """Send one request and read its answer within `limit` seconds. Raises NoAnswerError."""
        assert self._end is not None
        deadline = time.monotonic() + limit
        self._end.settimeout(TICK)
        left = memoryview(message)
        while True:
            if self._stopping is not None and self._stopping.is_set():
                raise CancelledError
            line = None
            try:
                if left:
                    left = left[self._end.send(left) :]
                else:
                    line = self._line(self._end)
            except TimeoutError:
                if (status := self._poll()) is not None:
                    raise _died(_ended(status), function) from None
            except (OSError, EOFError):
                raise _died(_ended(self._status()), function) from None
            if line is not None:
                answer = _answer(line, request, function)
                if "calling" not in answer:
                    return answer | {"function": function}
                function = answer["calling"]
            if len(self._unread) > LINE_LIMIT:
                raise _died(f"an answer of more than {LINE_LIMIT >> 20} MiB", function)
            if time.monotonic() > deadline:  # whatever came: bytes may drip for ever
                raise NoAnswerError(f"{_who(function)} hung: no answer within {limit:g} s", "hung", function)

    def _line(self, end: socket.socket) -> bytes | None:
        """The next line where it is whole, after one more read where it is not. Raises EOFError, OSError."""
        if self._unread.find(b"\n", -READ) < 0:
            part = end.recv(READ)
            if not part:
                raise EOFError
            self._unread += part
            if b"\n" not in part:
                return None
        line, _, rest = self._unread.partition(b"\n")
        self._unread = rest
        return bytes(line)

    def _poll(self) -> int | None:
        assert self._child is not None
        return self._child.poll()

    def _status(self) -> int | None:
        """How a worker ended whose socket is closed; None where it lives on without it."""
        for _ in range(20):
            if (status := self._poll()) is not None:
                return status
            time.sleep(TICK)
        return None

    def _value(self, answer: dict[str, Any]) -> Any:
        if "error" not in answer:
            return answer["value"]
        message, failed = answer["error"], answer["failed"]
        if failed is not None and failed["reason"] == "raised":
            function = None if answer["function"] is None else failed["function"]
            raise NoAnswerError(message.removesuffix("; fix it"), "raised", function, failed["traceback"])
        kind = getattr(errors, answer["kind"], RewardError)
        raise RewardError(message, failed) if kind is RewardError else kind(message)


def _who(function: str | None) -> str:
    if function is None:
        return "the worker of the reward functions, as it started,"
    return function if function.startswith(("task ", "task.")) else f"reward function {function}"


def _answer(line: bytes, request: int, function: str | None) -> dict[str, Any]:
    """What the worker says to this request. Raises NoAnswerError where it is something else.

    The user's code has the descriptor too, and so have the processes that it starts.
    """
    try:
        answer = worker.decode(line)
    except (ValueError, RecursionError):
        answer = None
    if isinstance(answer, dict):
        answer = cast("dict[str, Any]", answer)
        keys = answer.keys() - {"id"}
        if answer.get("id") == request and keys in ({"value"}, {"calling"}, {"error", "kind", "failed"}):
            return answer
    said = reprlib.repr(line.decode("utf-8", "replace"))
    raise _died(f"its connection carried {said}, which is no answer to this call", function)


def _ended(status: int | None) -> str:
    if status is None:
        return "it closed its connection"
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def _died(how: str, function: str | None) -> NoAnswerError:
    return NoAnswerError(f"{_who(function)} died: {how}", "died", function)


def _quietly(kill: Callable[[int, int], None], pid: int) -> None:
    try:
        kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # macOS says the latter of a group of zombies
        return
