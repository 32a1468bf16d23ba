# SPDX-License-Identifier: Apache-2.0
"""Worker process that runs user reward functions, so that they can be killed.

The worker answers one request at a time over a socket, one line of JSON each, with the id of the request;
`connection.py` is the other end. Output of user code goes to stderr. A guard process kills the whole process group once
the trainer is gone, whatever the worker is doing. (Linux's parent-death signal would spare the processes that a reward
function has started, and is sent when the *thread* that started the worker ends.)
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import re
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

from evoalign.config import TaskConfig
from evoalign.errors import DataError, EvoalignError, RewardError
from evoalign.marked import MARK, kill_marked
from evoalign.plugins import FAILURES, raised
from evoalign.rewards.functions import failure, fresh
from evoalign.tasks.base import Data, Task
from evoalign.tasks.custom import Custom
from evoalign.tasks.data.spool import decode, encode
from evoalign.types import Example

Build: TypeAlias = Callable[[Mapping[str, Any]], tuple[Task, Data | None]]
"""Creates the task from the first request, and its data if rows are sent by index."""

GUARD_SECONDS = 2
"""Interval at which the guard checks the trainer itself, in case another process holds the trainer's socket."""
GIB = 1 << 30
GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
MEMORY_SUPPORTED = sys.platform == "linux"
"""Whether the system enforces a memory limit."""


def main(fd: int, create: Callable[[TaskConfig], Task]) -> None:
    """Serve a task recreated from its config."""

    def build(start: Mapping[str, Any]) -> tuple[Task, Data | None]:
        task = create(TaskConfig.model_validate(start["config"]))
        return task, None if start["seed"] is None else task.load_data(start["seed"])

    run(socket.socket(fileno=fd), build)
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    os._exit(0)  # an orderly exit of torch takes a second


def run(end: socket.socket, build: Build) -> None:
    """Serve until the trainer closes its end or sends `close`."""
    _guard(end)
    _redirect()
    faulthandler.enable(2)  # prints a traceback for a segmentation fault
    server = _Server(end, build)
    for line in end.makefile("rb"):
        request = decode(line)
        if request["op"] == "close":
            break
        server.serve(request)


class _Server:
    """Answers requests, each with its id."""

    def __init__(self, end: socket.socket, build: Build) -> None:
        self._end, self._build, self._pid = end, build, os.getpid()
        self._task: Task | None = None
        self._data: Data | None = None
        self._request: Mapping[str, Any] = {}

    def serve(self, request: Mapping[str, Any]) -> None:
        """Answer with the value, or with the exception."""
        self._request = request
        who = "the task" if self._task is None else f"task {self._task.name}"
        try:
            if self._task is None:
                value = self._start()
            else:
                rows = [_row(row, self._data) for row in request["rows"]]
                examples = [fresh(rows[i]) for i in request["row_of"]]
                value = work(self._task, request["op"], request["texts"], examples, request["more"])
            encode(value)  # raises for values that JSON cannot hold
            answer: dict[str, Any] = {"value": value}
        except EvoalignError as error:
            failed = error.failed if isinstance(error, RewardError) else None
            answer = {"error": str(error), "kind": type(error).__name__, "failed": failed}
        except FAILURES as error:
            failed = failure("raised", who, trace=traceback.format_exc())
            message = f"{who} failed: {raised(error)}; fix it"
            answer = {"error": message, "kind": RewardError.__name__, "failed": failed}
        self._send(answer)

    def _start(self) -> int:
        limit_memory(self._request["memory_gib"])
        task, self._data = self._build(self._request)
        if isinstance(task, Custom):
            task.calling = lambda name: self._send({"calling": name})
        self._task = task
        return self._pid

    def _send(self, answer: Mapping[str, Any]) -> None:
        if os.getpid() != self._pid:  # user code forked and returned in the child
            os._exit(1)
        self._end.sendall(encode({**answer, "id": self._request["id"]}))


def limit_memory(gib: float | None) -> None:
    """Let this process and its children allocate this much more memory; None: half of the machine's memory.

    RLIMIT_DATA counts private writable memory. The address space would be the wrong measure: torch and CUDA reserve far
    more than they use. The memory that a fork shares with its parent counts as already allocated.
    """
    if not MEMORY_SUPPORTED:
        return
    import resource  # not available on Windows

    used = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    more = half_of_memory() if gib is None else int(gib * GIB)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = min(more + (int(used[1]) << 10 if used else 0), sys.maxsize)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def half_of_memory() -> int:
    """Return half of the memory of the machine or its control group, in bytes."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no control group, or no limit, which is "max"
        total = min(total, int(GROUP_LIMIT.read_text(encoding="utf-8")))
    return total // 2


def _guard(end: socket.socket) -> None:
    """Fork the guard, which is in the worker's process group and ends with it."""
    trainer = os.getppid()
    if os.fork():
        return
    try:
        hangup = select.poll()
        hangup.register(end, 0)  # reports only hang-ups; requests are for the worker
        while not hangup.poll(GUARD_SECONDS * 1000):
            try:
                os.kill(trainer, 0)
            except ProcessLookupError:
                break
            except PermissionError:
                pass
    finally:
        with contextlib.suppress(OSError, KeyError):
            kill_marked(os.environ[MARK])
        os.killpg(0, signal.SIGKILL)


def _redirect() -> None:
    """Connect stdin to nothing and stdout to stderr."""
    with contextlib.suppress(OSError):  # the trainer may have no stderr
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        # Replaces the objects that a fork inherits from a notebook or a test runner.
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 (never closed)
        sys.stdout = sys.stderr = open(  # noqa: SIM115
            2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
        )


def _row(sent: Mapping[str, Any], data: Data | None) -> Example:
    """Return a row that was sent, or the row at this index, whose sent columns must be the same here."""
    if "at" not in sent:
        return sent["columns"]
    split, index = sent["at"]
    rows = cast("Sequence[Example]", getattr(data, split))
    row = dict(rows[index]) if index < len(rows) else {}
    for name, value in sent["columns"].items():
        if name not in row or encode(row[name]) != encode(value):
            raise DataError(
                f"row {index} of the {split} split differs in {name!r} when loaded a second time; load_data(seed) must "
                "return the same rows each time, and its files must not change"
            )
    return row


def work(task: Task, op: str, texts: Sequence[str], examples: Sequence[Example], more: Any) -> Any:
    """Call the task's method `op` and return its value as plain numbers, texts and dicts."""
    match op:
        case "rewards":
            return task.checked(task.rewards(texts, examples), texts, examples)
        case "columns":
            return task.checked_columns(task.columns(texts, examples), texts, examples)
        case "parts":
            parts = task.parts(texts, examples)
            return task.checked_columns(parts, texts, examples) if parts else {}
        case "replies":
            return task.replies(texts, examples)
        case "compute_reward":
            return task.checked([task.compute_reward(texts[0], examples[0])], texts, examples)[0]
        case "fitness":
            return task.set_objective and task.set_objective.compute(texts, examples, more)
        case "point":
            point = task.point(texts[0], examples[0], more)
            return None if point is None else dict(point)
        case "measures":
            measures = task.measures(texts[0], examples[0])
            return {str(name): None if value is None else float(value) for name, value in measures.items()}
        case "self_check":
            return task.self_check(examples)
        case "prompt" | "gold":
            return getattr(task, op)(examples[0])
        case "clean":
            return task.clean(texts[0])
        case _:
            return getattr(task, op)(texts[0], examples[0])  # is_right, final_answer
