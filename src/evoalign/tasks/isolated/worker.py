# SPDX-License-Identifier: Apache-2.0
"""The process in which reward functions of the user's own run, so that it can be killed.

It answers one request at a time over a socket, one line of JSON each, under the number of the request; `connection.py`
is the other end. What the user's code prints goes to stderr. A guard process beside it kills the whole process group
once the trainer is gone, however it went and whatever the worker is doing. (Linux's parent-death signal would spare the
processes that a reward function has started, and comes when the *thread* that started the worker ends.)
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

from evoalign.config import TaskConfig
from evoalign.errors import DataError, EvoalignError, RewardError
from evoalign.plugins import FAILURES, raised
from evoalign.rewards.functions import failure, fresh
from evoalign.tasks.base import Data, Task
from evoalign.tasks.custom import Custom
from evoalign.tasks.exact import decode, encode
from evoalign.tasks.isolated import memory
from evoalign.types import Example

Build: TypeAlias = Callable[[Mapping[str, Any]], tuple[Task, Data | None]]
"""Makes the task, and its data where rows are sent by their place, from the first request."""

MARK = "EVOALIGN_WORKER"
"""The environment variable by which a worker's descendants are found, in whatever session they are."""
GUARD_SECONDS = 2
"""How often the guard looks for the trainer itself, in case another process holds the trainer's end of the socket."""


def main(fd: int, create: Callable[[TaskConfig], Task]) -> None:
    """Serve a task that is made again from its config."""

    def build(start: Mapping[str, Any]) -> tuple[Task, Data | None]:
        task = create(TaskConfig.model_validate(start["config"]))
        return task, None if start["seed"] is None else task.load_data(start["seed"])

    run(socket.socket(fileno=fd), build)
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    os._exit(0)  # taking torch down in order takes the interpreter a second


def run(end: socket.socket, build: Build) -> None:
    """Serve until the trainer closes its end or says so."""
    _guard(end)
    _redirect()
    faulthandler.enable(2)  # a segmentation fault says where
    answers = _Answers(end)
    started: list[tuple[Task, Data | None]] = []
    for line in end.makefile("rb"):
        request = decode(line)
        if request["op"] == "close":
            break
        answers.request = request["id"]
        if started:
            task, data = started[0]
            answer = _answered(partial(_work, task, data, request), f"task {task.name}")
        else:
            answer = _answered(partial(_start, started, build, request, answers), "the task")
        answers.send(answer)


class _Answers:
    """Sends what belongs to a request, under its number. Only the worker does."""

    def __init__(self, end: socket.socket) -> None:
        self.request = -1
        self._end = end
        self._pid = os.getpid()

    def send(self, answer: dict[str, Any]) -> None:
        """Ends this process where it is a copy: the user's code forked, and came back twice."""
        if os.getpid() != self._pid:
            os._exit(1)
        self._end.sendall(encode(answer | {"id": self.request}))


def _start(started: list[tuple[Task, Data | None]], build: Build, request: Mapping[str, Any], answers: _Answers) -> int:
    memory.bound(request["memory_gib"])
    task, data = build(request)
    if isinstance(task, Custom):
        task.calling = lambda name: answers.send({"calling": name})
    started.append((task, data))
    return os.getpid()


def _guard(end: socket.socket) -> None:
    """Fork the guard. It shares the worker's process group, and so ends with it."""
    trainer = os.getppid()
    if os.fork():
        return
    try:
        hangup = select.poll()
        hangup.register(end, 0)  # only the hang-up, which is always told: requests are the worker's to read
        while not hangup.poll(GUARD_SECONDS * 1000) and _is_alive(trainer):
            pass
    finally:
        with contextlib.suppress(OSError, KeyError):
            kill_marked(os.environ[MARK])
        os.killpg(0, signal.SIGKILL)


def kill_marked(mark: str) -> None:
    """Kill all other processes that were started with this mark: the end of the group spares other sessions.

    Reads /proc, so only on Linux. Spared: a process that was given another environment, or forked without an exec.
    """
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            if int(folder.name) != os.getpid() and wanted in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _redirect() -> None:
    """Nothing to read; what is printed goes to stderr."""
    with contextlib.suppress(OSError):  # a trainer without a stderr
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        # Not what a fork has here: a notebook's, or a test runner's.
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 (for good)
        sys.stdout = sys.stderr = open(  # noqa: SIM115
            2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
        )


def _work(task: Task, data: Data | None, request: Mapping[str, Any]) -> Any:
    rows = [_row(row, data) for row in request["rows"]]
    examples = [fresh(rows[i]) for i in request["row_of"]]
    if "sets" in request and task.set_objective is not None:
        return task.set_objective.compute(request["texts"], examples, request["sets"])
    if "rewards" in request:
        found = task.point(request["texts"][0], examples[0], request["rewards"])
        return None if found is None else dict(found)
    return OPERATIONS[request["op"]](task, request["texts"], examples)


def _answered(work: Callable[[], Any], who: str) -> dict[str, Any]:
    """What to send: the value, or what was raised."""
    try:
        value = work()
        encode(value)  # may raise too
        return {"value": value}
    except EvoalignError as error:
        failed = error.failed if isinstance(error, RewardError) else None
        return {"error": str(error), "kind": type(error).__name__, "failed": failed}
    except FAILURES as error:
        failed = failure("raised", who, trace=traceback.format_exc())
        return {"error": f"{who} failed: {raised(error)}; fix it", "kind": RewardError.__name__, "failed": failed}


def _row(sent: Mapping[str, Any], data: Data | None) -> Example:
    """An example that was sent whole, or the one at its place in the data, which must be the same there."""
    if "at" not in sent:
        return sent["columns"]
    split, index = sent["at"]
    rows = cast("Sequence[Example]", getattr(data, split))
    row = dict(rows[index]) if index < len(rows) else {}
    for name, value in sent["columns"].items():
        if name not in row or encode(row[name]) != encode(value):
            raise DataError(
                f"row {index} of the {split} split reads otherwise the second time, in {name!r}; "
                "load_data(seed) must give the same rows each time, and its files must stay as they are"
            )
    return row


OPERATIONS: dict[str, Callable[[Task, Sequence[str], Sequence[Example]], Any]] = {
    "rewards": lambda task, texts, examples: task.checked(task.rewards(texts, examples), texts, examples),
    "columns": lambda task, texts, examples: task.checked_columns(task.columns(texts, examples), texts, examples),
    "compute_reward": lambda task, texts, examples: task.checked(
        [task.compute_reward(texts[0], examples[0])], texts, examples
    )[0],
    "measures": lambda task, texts, examples: (
        {str(name): float(value) for name, value in task.measures(texts[0], examples[0]).items()}
    ),
    "gold": lambda task, texts, examples: task.gold(examples[0]),
    "is_right": lambda task, texts, examples: task.is_right(texts[0], examples[0]),
    "clean": lambda task, texts, examples: task.clean(texts[0]),
    "self_check": lambda task, texts, examples: task.self_check(examples),
}
"""What a worker does with the texts and examples of a request."""
