# SPDX-License-Identifier: Apache-2.0
"""How a run stands, live on a terminal, or one plain line at a time into a file or a pipe."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

WINDOW = 20
"""Speed and time left are those of so many latest generations."""
PLAIN_SECONDS = 2.0
"""Without a terminal, no more than one line in so many seconds; the first, the last and each evaluation always."""


class Display:
    """Shows each generation, or another `unit`, as it ends; a context manager. `total` counts all of the run.

    `still` is what rows of zero variance are called.
    """

    def __init__(
        self,
        total: int,
        console: Console | None = None,
        *,
        unit: str = "generation",
        still: str = "generations without update",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total, self.unit, self.still = total, unit, still
        self.console = console or Console()
        self._clock = clock
        self._start = self._last = clock()
        self._seen = self._still = self._done = 0
        self._recent: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self._row: Mapping[str, Any] | None = None
        self._test: float | None = None
        self._validation: float | None = None
        self._printed = -PLAIN_SECONDS
        self._live = Live(console=self.console, get_renderable=self._render, refresh_per_second=2)

    def __enter__(self) -> Display:
        self._start = self._last = self._clock()
        self._printed = self._start - PLAIN_SECONDS
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._live.stop()

    def update(self, row: Mapping[str, Any]) -> None:
        """Takes in one generation: its line of metrics.jsonl."""
        now = self._clock()
        self._recent.append((now - self._last, int(row["tokens"])))
        self._last = now
        self._seen += 1
        self._still += bool(row["zero_variance"])
        self._done = int(row["generation"]) + 1
        self._row = row
        if row.get("evaluation"):
            self._test = float(row["evaluation"]["reward"])
        if row.get("validation"):
            self._validation = float(row["validation"]["reward"])
        if self.console.is_terminal:
            self._live.refresh()
        else:
            self._print_line(now, bool(row.get("evaluation")))

    def _print_line(self, now: float, always: bool) -> None:
        if always or self._done == self.total or now - self._printed >= PLAIN_SECONDS:
            self._printed = now
            words = (f"{name} {value}" for name, value in self._figures())
            line = f"{self.unit} {self._done}/{self.total}  " + "  ".join(words)
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _render(self) -> Group:
        head = Table.grid(padding=(0, 1), expand=False)
        bar = ProgressBar(total=self.total, completed=self._done, width=32)
        head.add_row(Text(f"{self.unit} {self._done}/{self.total}", style="bold"), bar)
        body = Table.grid(padding=(0, 2), expand=False)
        figures = self._figures()
        for start in range(0, len(figures), 3):
            body.add_row(*(Text.assemble((f"{name} ", "dim"), value) for name, value in figures[start : start + 3]))
        return Group(head, body)

    def _figures(self) -> list[tuple[str, str]]:
        """Names and values, in the order they are shown."""
        row = self._row
        elapsed = ("elapsed", _clock_face(self._clock() - self._start))
        if row is None:
            return [elapsed]
        figures = [("mean reward", _short(row["mean"])), ("best", _short(row["best"]))]
        figures += [("middle 60%", f"{_short(row['p20'])} to {_short(row['p80'])}")]
        figures += [(name, _short(mean)) for name, mean in row.get("rewards", {}).items() if mean is not None]
        figures += [(self.still, f"{self._still / self._seen:.0%}"), ("tokens/s", f"{self._speed():,.0f}"), elapsed]
        figures.append(("left", _clock_face(self._seconds_left())))
        known = (("validation reward", self._validation), ("test reward", self._test))
        return [*figures, *((name, _short(value)) for name, value in known if value is not None)]

    def _speed(self) -> float:
        seconds = sum(s for s, _ in self._recent)
        return sum(tokens for _, tokens in self._recent) / seconds if seconds > 0 else 0.0

    def _seconds_left(self) -> float:
        each = sum(s for s, _ in self._recent) / len(self._recent)
        return max(0.0, each * (self.total - self._done) - (self._clock() - self._last))


def _short(value: float) -> str:
    """Four significant digits, without an exponent for what a reward usually is."""
    value = 0.0 if abs(value) < 1e-12 else value  # what is left of a sum that should be 0
    return f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"


def _clock_face(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
