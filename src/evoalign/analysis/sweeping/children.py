# SPDX-License-Identifier: Apache-2.0
"""The running processes of a sweep, one per run, and their live display."""

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

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from evoalign.analysis.sweeping.cells import Run
from evoalign.config import to_yaml
from evoalign.config.reading import check_regular, parse
from evoalign.errors import ConfigError, DataError, RunExistsError
from evoalign.report.progress import clock_face
from evoalign.report.tables import tell
from evoalign.rewards.objective import aim
from evoalign.rundir.directory import RunDir
from evoalign.rundir.files import links_in, write_text
from evoalign.rundir.method import COMMANDS

SHOWN_ENDED = 6
"""Number of ended runs that stay in the live table."""
TAIL_LINES = 5
"""Number of lines of a failed run's log that are shown."""
TAIL_BYTES = 1 << 16
"""Bytes read from the end of metrics.jsonl and of logs."""


@dataclass(slots=True)
class Child:
    """A running run. Closing `hold`, the write end of its pipe, ends it."""

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
        """The signal or the exit code."""
        return f"killed by {signal.Signals(-self.code).name}" if self.code < 0 else f"exit code {self.code}"


class Children:
    """At most `jobs` processes, on `gpus` in turn. Call `kill` at the end in any case."""

    def __init__(self, folder: Path, jobs: int, gpus: Sequence[str]) -> None:
        self.folder, self.jobs, self.gpus = folder, jobs, gpus
        self.running: dict[str, Child] = {}

    @property
    def has_room(self) -> bool:
        """Whether another run may start."""
        return len(self.running) < self.jobs

    def start(self, run: Run) -> None:
        """Start or resume a run. Its output goes to logs/CELL/seed_K.log."""
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
                    start_new_session=True,  # Ctrl-C reaches only the sweep, which then stops its runs
                )
        except BaseException:
            os.close(hold)
            raise
        finally:
            os.close(theirs)
        self.running[run.name] = Child(run, process, hold, slot, log, time.monotonic())

    def ended(self) -> list[Ended]:
        """Return and forget the processes that have ended."""
        return [self._end(child) for child in list(self.running.values()) if child.process.poll() is not None]

    def stop(self, name: str | None = None) -> None:
        """Signal a run, or all, to save and stop after this generation."""
        for child in self.running.values():
            if name in (None, child.run.name):
                with suppress(ProcessLookupError):
                    os.kill(child.process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill all process groups that still run."""
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
        ours = {"OMP_NUM_THREADS": str(max(1, cores() // self.jobs))} | os.environ  # a value in the environment wins
        ours["PYTHONUNBUFFERED"] = "1"  # keep stdout and stderr in order
        if self.gpus:
            ours["CUDA_VISIBLE_DEVICES"] = self.gpus[slot % len(self.gpus)]
        return ours


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def visible_gpus(given: Sequence[str] | None) -> list[str]:
    """Return the given GPUs, or else all visible ones, by number or name. Raises ConfigError."""
    if given is not None:
        if not all(given):
            raise ConfigError("--gpus: expected comma-separated numbers or names, such as 0,1")
        return list(given)
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip() not in ("", "-1")]
    import torch

    return [str(i) for i in range(torch.cuda.device_count())]


def is_busy(path: Path) -> bool:
    """Return whether another process uses a run directory, such as a killed sweep's run that still saves."""
    run = RunDir(path)
    if not path.is_dir():
        return False
    try:
        run.lock()
    except RunExistsError:
        return not any(links_in(path, whole=True))  # for links, its own process reports the error
    run.release()
    return False


def last_lines(path: Path) -> list[str]:
    """Return the complete, non-empty lines at the end of a file; none if it is missing."""
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
    """Return the last rows of a metrics.jsonl."""
    rows: list[Any] = []
    for line in last_lines(path):
        with suppress(DataError):  # an incomplete last line
            rows.append(parse(line.encode(), str(path), finite=False))
    return [row for row in rows if isinstance(row, dict)]


# --- display ----------------------------------------------------------------------------------------------------------


class Display:
    """A live table on a terminal, else a line per run that starts or ends.

    `total` counts the runs of this command, `before` those that were finished already.
    """

    def __init__(self, children: Children, total: int, before: int, console: Console) -> None:
        self.children, self.total, self.before, self.console = children, total, before, console
        self.counts = {"done": 0, "failed": 0, "pruned": 0, "stopped": 0}
        self._start = time.monotonic()
        self._ended: list[tuple[str, str, str]] = []
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=1)

    def __enter__(self) -> Display:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._live.stop()

    def started(self, name: str) -> None:
        """Report the start of a run."""
        if not self.console.is_terminal:
            self.print(f"starts   {name}")

    def ended(self, end: Ended, state: str, reward: float | None) -> None:
        """Report the end of a run; `state` is done, failed, stopped or pruned."""
        self.counts[state] += 1
        result = f"reward {reward:.4g}" if reward is not None else end.how if state == "failed" else ""
        self._ended.append((end.run.name, state, result))
        if state == "failed":
            self.print("\n  ".join([f"failed   {end.run.name}: {end.how}; log: {end.log}", *end.tail]))
        elif not self.console.is_terminal:
            parts = [f"{state:8} {end.run.name}", result, f"in {clock_face(end.seconds)}"]
            self.print(" ".join(filter(None, [*parts, f"({self._finished()} of {self.total})"])))

    def _finished(self) -> int:
        return self.before + sum(self.counts.values()) - self.counts["stopped"]

    def print(self, text: str) -> None:
        """Print lines with control characters escaped, since logs are untrusted."""
        tell(self.console, *text.split("\n"))

    def _render(self) -> Group:
        table = Table(box=None, pad_edge=False)
        for heading in ("run", "state", "step", "reward", "elapsed"):
            table.add_column(heading, justify="left" if heading in ("run", "state") else "right")
        for name, state, result in self._ended[-SHOWN_ENDED:]:
            table.add_row(Text(name), Text(state, "red" if state == "failed" else "green"), "", Text(result), "")
        running, now, begun = list(self.children.running.values()), time.monotonic(), 0.0
        for child in running:
            step, reward = _progress(child)
            begun += step / child.run.steps
            shown, elapsed = "" if reward is None else f"{reward:.4g}", clock_face(now - child.started)
            table.add_row(Text(child.run.name), "running", f"{step}/{child.run.steps}", shown, elapsed)
        left, worked = self.total - self._finished(), self._finished() - self.before + begun
        done, failed, pruned, _ = self.counts.values()
        counts = f"{self.before + done} done, {len(running)} running, {failed} failed, {left - len(running)} waiting"
        counts += f", {pruned} pruned" if pruned else ""
        if worked > 0:
            counts += f"; about {clock_face((now - self._start) * (left - begun) / worked)} left"
        return Group(Text(counts, "bold"), table)


def _progress(child: Child) -> tuple[int, float | None]:
    """Return steps done and the latest reward: on validation or test if evaluated, else the population mean."""
    rows = last_rows(child.run.path / "metrics.jsonl")
    if not rows:
        return 0, None
    measured = (row.get("validation") or row.get("evaluation") for row in reversed(rows))
    evaluated = next((aim(measures) for measures in measured if measures), None)
    return int(rows[-1]["generation"]) + 1, rows[-1].get("mean") if evaluated is None else evaluated
