# SPDX-License-Identifier: Apache-2.0
"""Trainer's end of a worker process: start or fork it, send requests over a socket, and kill it if it does not answer.

`worker.py` is the other end. A task that its config alone recreates gets a fresh interpreter. A task or function that
was passed as a Python object cannot be sent, so its worker is a fork, which has the object already. Messages are JSON:
unpickling data from a process that runs user code would execute it in the trainer.
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
from collections.abc import Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any, cast

from evoalign import errors
from evoalign.errors import EvoalignError, RewardError
from evoalign.marked import MARK, kill_marked
from evoalign.plugins import described
from evoalign.tasks.base import Data, Task
from evoalign.tasks.data.spool import decode, encode
from evoalign.tasks.isolated import worker

START_LIMIT = 600.0
"""Seconds for a worker to start (import the user's modules, load the data), and for a task's own `self_check`."""
CLOSE_LIMIT = 2.0
"""Seconds for an idle worker to exit by itself."""
READ = 1 << 20
"""Bytes to read from the socket at once."""
LINE_LIMIT = 256 << 20
"""Maximum bytes of one answer, far more than the rewards of any batch."""
TICK = 0.05
"""Seconds between checks that the worker lives. A closed socket does not show it: child processes share the socket."""
PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from evoalign import tasks; from evoalign.tasks.isolated import worker; "
    "worker.main(int(sys.argv[2]), tasks.create)"
)


class NoAnswerError(Exception):
    """A call hung, died or raised. `function` is None if the worker failed to start."""

    def __init__(self, message: str, reason: str, function: str | None, trace: str | None = None) -> None:
        super().__init__(message)
        self.reason, self.function, self.trace = reason, function, trace


class _Forked:
    """A forked child with the interface of Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self, options: int = os.WNOHANG) -> int | None:
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # the exit status is lost if SIGCHLD is ignored
                self._status = -signal.SIGKILL
            else:
                self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def wait(self) -> int:
        status = self.poll(0)
        return -signal.SIGKILL if status is None else status


class Worker:
    """A worker process that is started when needed, killed with all its descendants, and then started again."""

    def __init__(self, task: Task, memory_gib: float | None = None) -> None:
        self._task, self._memory_gib = task, memory_gib
        self._data: Data | None = None
        self._seed: int | None = None
        self._folder, self._owner, self._mark = Path.cwd(), os.getpid(), uuid.uuid4().hex
        self._child: subprocess.Popen[bytes] | _Forked | None = None
        self._end: socket.socket | None = None
        self._is_ready, self._unread, self._requests = False, bytearray(), 0
        self._stopping: Event | None = None

    def load(self, data: Data, seed: int | None) -> None:
        """Start with the data: a fork has them; a fresh process loads them itself if `seed` is not None."""
        self.close()
        self._data, self._seed = data, seed
        try:
            self._start()
        except NoAnswerError:  # the first call tries again, and reports the error
            self.kill()

    def ask(
        self, request: Mapping[str, Any], limit: float, who: str | None = None, stopping: Event | None = None
    ) -> Any:
        """Return the value of one call, of the function `who`, or of the task.

        Raises NoAnswerError, the EvoalignError that the task raised, or CancelledError soon after `stopping` is set.
        """
        self._stopping = stopping
        self._requests += 1  # never reset, so that ids are unique
        message = encode({**request, "id": self._requests})
        if self._is_ready and self._child is not None and self._child.poll() is not None:
            self.kill()  # it died between two calls: no call has failed
        try:
            if not self._is_ready:
                self._start()
                self._exchange(b"", 0, START_LIMIT, None)
                self._is_ready = True
            return self._exchange(message, self._requests, limit, who or f"task {self._task.name}")
        except BaseException as error:  # also Ctrl-C: the pending answer must not be taken for the next one
            # After an exception of the task, the worker and its state live on.
            raised = isinstance(error, NoAnswerError) and error.reason == "raised"
            if not self._is_ready or not (raised or isinstance(error, EvoalignError)):
                self.kill()
            raise

    def kill(self) -> None:
        """Kill the worker and its process group. Does nothing without a worker, or in a fork of this process."""
        child, end = self._child, self._end
        self._child, self._end, self._is_ready, self._unread = None, None, False, bytearray()
        if end is not None:
            end.close()
        if child is None or self._owner != os.getpid():
            return
        with suppress(ProcessLookupError, PermissionError):  # macOS raises the latter for a group of zombies
            os.killpg(child.pid, signal.SIGKILL)
        if child.poll() is None:  # a fork that has no group yet
            with suppress(ProcessLookupError, PermissionError):
                os.kill(child.pid, signal.SIGKILL)
        child.wait()
        kill_marked(self._mark)

    def close(self) -> None:
        """Let an idle worker exit with its exit handlers, then kill what is left."""
        if self._is_ready and self._child is not None and self._end is not None and self._owner == os.getpid():
            try:
                self._end.settimeout(CLOSE_LIMIT)
                self._end.sendall(encode({"op": "close"}))
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
            self._end.sendall(encode({"id": 0, **start}))
        except OSError as error:  # no more processes, the folder is gone, or the worker ended already
            raise _died(described(error), None) from error

    def _fresh(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        path = json.dumps([entry for entry in cast("list[object]", sys.path) if isinstance(entry, str)])
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, path, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=self._folder,
            # The order of a set must not change a score from one worker to the next.
            env={"PYTHONHASHSEED": "0"} | os.environ | {MARK: self._mark},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _fork(self, theirs: socket.socket) -> _Forked:
        pid = os.fork()
        if pid:
            return _Forked(pid)
        status = 1
        try:
            os.setsid()
            os.environ[MARK] = self._mark
            for number in (signal.SIGINT, signal.SIGTERM):  # remove the trainer's handlers
                signal.signal(number, signal.SIG_DFL)
            if self._end is not None:  # an open copy of the trainer's end would prevent the hang-up
                self._end.close()
            import torch

            torch.set_num_threads(1)  # a fork has no threads: waiting for the parent's pool would never end
            worker.run(theirs, lambda start: (self._task, self._data))
            status = 0
        except SystemExit as leaving:
            status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def _exchange(self, message: bytes, request: int, limit: float, function: str | None) -> Any:
        """Send one request and return its value within `limit` seconds. Raises NoAnswerError, EvoalignError."""
        assert self._end is not None and self._child is not None
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
                if self._child.poll() is not None:
                    raise _died(_exit_reason(self._child), function) from None
            except (OSError, EOFError):
                raise _died(_exit_reason(self._child), function) from None
            if line is not None:
                answer = _answer(line, request, function)
                if "calling" not in answer:
                    return _value(answer, function)
                function = answer["calling"]
            if len(self._unread) > LINE_LIMIT:
                raise _died(f"an answer of more than {LINE_LIMIT >> 20} MiB", function)
            if time.monotonic() > deadline:  # also if bytes keep arriving
                raise NoAnswerError(f"{_who(function)} hung: no answer within {limit:g} s", "hung", function)

    def _line(self, end: socket.socket) -> bytes | None:
        """Return the next line, or None if it is incomplete after one more read. Raises EOFError, OSError."""
        if self._unread.find(b"\n", -READ) < 0:
            part = end.recv(READ)
            if not part:
                raise EOFError
            self._unread += part
            if b"\n" not in part:
                return None
        line, _, self._unread = self._unread.partition(b"\n")
        return bytes(line)


def _answer(line: bytes, request: int, function: str | None) -> dict[str, Any]:
    """Parse the answer to this request. Raises NoAnswerError for anything else.

    User code and its child processes can write to the socket too.
    """
    with suppress(ValueError, RecursionError):
        answer: Any = decode(line)
        if isinstance(answer, dict):
            answer = cast("dict[str, Any]", answer)
            keys = answer.keys() - {"id"}
            if answer.get("id") == request and keys in ({"value"}, {"calling"}, {"error", "kind", "failed"}):
                return answer
    received = reprlib.repr(line.decode("utf-8", "replace"))
    raise _died(f"its connection carried {received}, which is no answer to this call", function)


def _value(answer: dict[str, Any], function: str | None) -> Any:
    if "error" not in answer:
        return answer["value"]
    message, failed = answer["error"], answer["failed"]
    if failed is not None and failed["reason"] == "raised":
        function = None if function is None else failed["function"]
        raise NoAnswerError(message.removesuffix("; fix it"), "raised", function, failed["traceback"])
    kind = getattr(errors, answer["kind"], RewardError)
    raise RewardError(message, failed) if kind is RewardError else kind(message)


def _exit_reason(child: subprocess.Popen[bytes] | _Forked) -> str:
    for _ in range(20):  # a worker closes its socket before it has an exit status
        if (status := child.poll()) is not None:
            return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        time.sleep(TICK)
    return "it closed its connection"


def _who(function: str | None) -> str:
    if function is None:
        return "the worker of the reward functions, during its start,"
    return function if function.startswith(("task ", "task.")) else f"reward function {function}"


def _died(how: str, function: str | None) -> NoAnswerError:
    return NoAnswerError(f"{_who(function)} died: {how}", "died", function)
