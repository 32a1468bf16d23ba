# SPDX-License-Identifier: Apache-2.0
"""How a sweep stands: a live table on a terminal, or a plain line for each run that starts and ends."""

from __future__ import annotations

import time
from datetime import timedelta

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from evoalign.analysis.sweeping.children import Child, Children, Ended, last_rows
from evoalign.report.tables import visible
from evoalign.report.terminal import print_line
from evoalign.rewards.objective import aim

SHOWN_ENDED = 6
"""Runs that have ended and are still in the live table."""


class Display:
    """A context manager. `total` counts the runs of this command, `before` those that were done already."""

    def __init__(self, children: Children, total: int, before: int, console: Console) -> None:
        self.children, self.total, self.before, self.console = children, total, before, console
        self.done = self.failed = self.pruned = 0
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
        """A run has started, or goes on."""
        if not self.console.is_terminal:
            self.tell(f"starts   {name}")

    def ended(self, end: Ended, state: str, reward: float | None) -> None:
        """A run has ended; `state` is done, failed, stopped or pruned."""
        self.done += state == "done"
        self.failed += state == "failed"
        self.pruned += state == "pruned"
        result = f"reward {reward:.4g}" if reward is not None else end.how if state == "failed" else ""
        self._ended.append((end.run.name, state, result))
        if state == "failed":
            self.tell("\n  ".join([f"failed   {end.run.name}: {end.how}; its output is in {end.log}", *end.tail]))
        elif not self.console.is_terminal:
            count = f"({self.before + self.done + self.failed + self.pruned} of {self.total})"
            self.tell(" ".join(filter(None, [f"{state:8} {end.run.name}", result, f"in {_clock(end.seconds)}", count])))

    def tell(self, line: str) -> None:
        """Plain lines; a log may hold anything."""
        line = "\n".join(
            visible(part, ascii_only=not self.console.encoding.startswith("utf")) for part in line.split("\n")
        )
        print_line(self.console, line)

    def _render(self) -> Group:
        running = list(self.children.running.values())
        shares = {child.run.name: _progress(child) for child in running}
        table = Table(box=None, pad_edge=False)
        for heading in ("run", "state", "step", "reward", "elapsed"):
            table.add_column(heading, justify="left" if heading in ("run", "state") else "right")
        for name, state, result in self._ended[-SHOWN_ENDED:]:
            table.add_row(Text(name), Text(state, "red" if state == "failed" else "green"), "", Text(result), "")
        for child in running:
            step, reward = shares[child.run.name]
            elapsed = _clock(time.monotonic() - child.started)
            shown = "" if reward is None else f"{reward:.4g}"
            table.add_row(Text(child.run.name), "running", f"{step}/{child.run.steps}", shown, elapsed)
        worked = self.done + self.failed + self.pruned
        left = self.total - self.before - worked - len(running)
        counts = f"{self.before + self.done} done, {len(running)} running, {self.failed} failed, {left} waiting"
        counts += f", {self.pruned} pruned" if self.pruned else ""
        worked += sum(step / child.run.steps for child, (step, _) in zip(running, shares.values(), strict=True))
        elapsed = time.monotonic() - self._start
        if worked > 0:
            counts += f"; about {_clock(elapsed * (self.total - self.before - worked) / worked)} left"
        return Group(Text(counts, "bold"), table)


def _progress(child: Child) -> tuple[int, float | None]:
    """Steps done, and the latest reward: of validation or test where evaluated, else the population's mean."""
    rows = last_rows(child.run.path / "metrics.jsonl")
    if not rows:
        return 0, None
    measured = (row.get("validation") or row.get("evaluation") for row in reversed(rows))
    evaluated = next((aim(measures) for measures in measured if measures), None)
    return int(rows[-1]["generation"]) + 1, rows[-1].get("mean") if evaluated is None else evaluated


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(max(0.0, seconds))))
