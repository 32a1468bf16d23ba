# SPDX-License-Identifier: Apache-2.0
"""The runs of a sweep that are under way: a process each, so that a crash touches that run alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evoalign.analysis.sweeping.cells import Run
from evoalign.config import to_yaml
from evoalign.config.reading import check_regular, parse
from evoalign.errors import ConfigError, DataError, RunExistsError
from evoalign.rundir.directory import RunDir
from evoalign.rundir.files import links_in, write_text
from evoalign.rundir.method import COMMANDS

TAIL_LINES = 5
"""Lines of a failed run's log that are shown."""
TAIL_BYTES = 1 << 16
"""More than the last rows of metrics.jsonl and the last lines of a log take."""


@dataclass(slots=True)
class Child:
    """A run under way. `hold` is the end of the pipe whose closing ends it."""

    run: Run
    process: subprocess.Popen[bytes]
    hold: int
    slot: int
    log: Path
    started: float


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run's process ended; `code` is negative where a signal killed it."""

    run: Run
    code: int
    log: Path
    tail: tuple[str, ...]
    seconds: float

    @property
    def how(self) -> str:
        """In words."""
        return f"killed by {signal.Signals(-self.code).name}" if self.code < 0 else f"exit code {self.code}"


class Children:
    """At most `jobs` runs at once, on `gpus` in turn. `kill` them in the end, whatever happened."""

    def __init__(self, folder: Path, jobs: int, gpus: Sequence[str]) -> None:
        self.folder, self.jobs, self.gpus = folder, jobs, gpus
        self.running: dict[str, Child] = {}

    @property
    def has_room(self) -> bool:
        """Whether one more may start."""
        return len(self.running) < self.jobs

    def start(self, run: Run) -> None:
        """Start a run, or go on with it. Its output goes to logs/CELL/seed_K.log."""
        config = self.folder / "configs" / f"{run.name}.yaml"
        log = self.folder / "logs" / f"{run.name}.log"
        for file in (config, log):
            file.parent.mkdir(parents=True, exist_ok=True)
        write_text(config, to_yaml(run.config))
        slot = next(i for i in range(self.jobs) if all(child.slot != i for child in self.running.values()))
        theirs, hold = os.pipe()
        words = [str(theirs), "evoalign.cli", COMMANDS[run.method], str(config), "--resume"]
        try:
            with log.open("ab") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "evoalign.analysis.sweeping.child", *words],
                    pass_fds=[theirs],
                    env=self._environment(slot),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is for the sweep, which asks its runs to stop
                )
        except BaseException:
            os.close(hold)
            raise
        finally:
            os.close(theirs)
        self.running[run.name] = Child(run, process, hold, slot, log, time.monotonic())

    def ended(self) -> list[Ended]:
        """Those that have ended since they were last asked for."""
        return [self._end(child) for child in list(self.running.values()) if child.process.poll() is not None]

    def stop(self, name: str | None = None) -> None:
        """Ask a run, or all, to save and stop after this generation."""
        for child in self.running.values():
            if name in (None, child.run.name):
                with suppress(ProcessLookupError):
                    os.kill(child.process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End all that still run, at once, with what they have started."""
        for child in list(self.running.values()):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.process.pid, signal.SIGKILL)
            child.process.wait()
            self._end(child)

    def _end(self, child: Child) -> Ended:
        del self.running[child.run.name]
        os.close(child.hold)
        code = child.process.wait()
        tail = tuple(last_lines(child.log)[-TAIL_LINES:])
        return Ended(child.run, code, child.log, tail, time.monotonic() - child.started)

    def _environment(self, slot: int) -> dict[str, str]:
        ours = {"OMP_NUM_THREADS": str(max(1, cores() // self.jobs))} | os.environ  # one that is set is respected
        ours["PYTHONUNBUFFERED"] = "1"  # stdout and stderr in their order
        if self.gpus:
            ours["CUDA_VISIBLE_DEVICES"] = self.gpus[slot % len(self.gpus)]
        return ours


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def visible_gpus(given: Sequence[str] | None) -> list[str]:
    """GPUs by number or name: those that are given, or else all that are visible. Raises ConfigError."""
    if given is not None:
        if not all(given):
            raise ConfigError("--gpus: expected numbers or names between commas, such as 0,1")
        return list(given)
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip() not in ("", "-1")]
    import torch

    return [str(i) for i in range(torch.cuda.device_count())]


def is_busy(path: Path) -> bool:
    """Whether a process is in a run directory: one of a sweep that was killed may still be saving."""
    run = RunDir(path)
    if not path.is_dir():
        return False
    try:
        run.lock()
    except RunExistsError:
        return not any(links_in(path, whole=True))  # where it holds links, its own process reports them
    run.release()
    return False


def last_lines(path: Path) -> list[str]:
    """The whole lines at the end of a file, without empty ones; none where there is no file."""
    try:
        check_regular(path, 2**44)
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = max(0, size - TAIL_BYTES)
            file.seek(start)
            text = file.read().decode("utf-8", "replace")
    except (OSError, DataError):
        return []
    lines = text.splitlines()[1 if start else 0 :]
    return [line for line in lines if line.strip()]


def last_rows(path: Path) -> list[dict[str, Any]]:
    """The last rows of a metrics.jsonl."""
    rows: list[dict[str, Any]] = []
    for line in last_lines(path):
        with suppress(DataError):  # the line that is being written
            row = parse(line.encode(), str(path), finite=False)
            rows += [row] if isinstance(row, dict) else []
    return rows
