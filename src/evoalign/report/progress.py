# SPDX-License-Identifier: Apache-2.0
"""How a run stands, live on a terminal or in a notebook, or one plain line at a time into a file or a pipe."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from evoalign.report import notebook
from evoalign.report.rows import WEIGHTS
from evoalign.report.tables import visible, weighed
from evoalign.report.terminal import print_line
from evoalign.report.watching import Watch, watched
from evoalign.rewards.objective import aim as aim_in

WINDOW = 20
"""Speed and time left are those of so many latest generations."""
PLAIN_SECONDS = 2.0
"""Without a terminal, no more than one line in so many seconds; the first, the last and each evaluation always."""
MOST_STATE = 4
"""Numbers of an objective's state, such as the lambda of `lagrangian`, that fit the line of a generation."""
LOG_SECONDS = 60.0
"""Without a terminal, one line in so many seconds that no generation ends, nothing else."""


class _Minutes:
    """Calls `tell` every `LOG_SECONDS`, from a thread of its own, for what works is not to be asked to."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell, self._ended = tell, threading.Event()
        self._thread = threading.Thread(target=self._run, name="evoalign-progress", daemon=True)

    def __enter__(self) -> _Minutes:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(LOG_SECONDS):
            self._tell()


class Bar:
    """How far an evaluation, a probe or a set of placebos is, while this context manager lasts; `title` names it.

    On a terminal a line that goes away at its end; elsewhere a line a minute. Inside another one, or a `Display`, it
    shows nothing: that one does.
    """

    def __init__(
        self, title: str, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.title, self.console, self.watch = title, console or Console(), Watch(clock)
        self._start = clock()
        self._stack = ExitStack()
        self._live = _live(self.console, self._render, transient=True)

    def refresh(self) -> None:
        """Draw now, where there is something to draw on; it is drawn every second in any case."""
        if self._live is not None:
            self._live.refresh()

    def __enter__(self) -> Bar:
        self._start = self.watch.clock()
        if not self._stack.enter_context(watched(self.watch)):
            return self
        self._stack.enter_context(self._live or _Minutes(self._print_line))
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def _print_line(self) -> None:
        _print(self.console, f"{self._name()}: {_words(self._figures())}")

    def _render(self) -> Table:
        line = Table.grid(padding=(0, 1), expand=False)
        line.add_row(
            Text(self._name(), style="bold"),
            ProgressBar(total=1.0, completed=self._share() or 0.0, width=24),
            _styled(self._figures()),
        )
        return line

    def _name(self) -> str:
        watch = self.watch
        count = f" {watch.number}/{watch.of}" if watch.of else ""
        return visible(": ".join(filter(None, (self.title, f"{watch.stage}{count}"))))

    def _share(self) -> float | None:
        """Of all of it, by the completions of its stage; None where nothing tells."""
        watch, work = self.watch, self.watch.work
        inside = work.done / work.total if work is not None and work.total else 0.0
        return (max(0, watch.number - 1) + inside) / watch.of if watch.of else inside or None

    def _figures(self) -> list[tuple[str, str]]:
        now, share = self.watch.clock(), self._share()
        spent = now - self._start
        left = None if share is None else spent / share * (1 - share) if share else None
        found = [*_working(self.watch, now, with_left=left is None), ("elapsed", _clock_face(spent))]
        return found if left is None else [*found, ("left", _clock_face(left))]


class Display:
    """Shows each generation, or another `unit`, as it ends, and how far the next one is; a context manager.

    `total` counts all of the run; `still` is what rows of zero variance are called, `aim` what is to rise.
    """

    def __init__(
        self,
        total: int,
        console: Console | None = None,
        *,
        unit: str = "generation",
        still: str = "generations without update",
        aim: str = "reward",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total, self.unit, self.still, self.aim = total, unit, still, aim
        self.console = console or Console()
        self._clock = clock
        self._start = self._last = clock()
        self._seen = self._still = self._done = 0
        self._recent: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self._row: Mapping[str, Any] | None = None
        self._evaluated: dict[str, tuple[float, int]] = {}
        """By split the latest value, and after how many units it was measured."""
        self._printed = -PLAIN_SECONDS
        self._watch, self._stack = Watch(clock), ExitStack()
        self._live = _live(self.console, self._render)

    def __enter__(self) -> Display:
        self._start = self._last = self._clock()
        self._printed = self._start - PLAIN_SECONDS
        self._stack.enter_context(watched(self._watch))
        self._stack.enter_context(self._live or _Minutes(self._print_inside))
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def refresh(self) -> None:
        """Draw now, where there is something to draw on; it is drawn every second in any case."""
        if self._live is not None:
            self._live.refresh()

    def update(self, row: Mapping[str, Any]) -> None:
        """Takes in one generation: its line of metrics.jsonl."""
        now = self._clock()
        self._recent.append((now - self._last, int(row["tokens"])))
        self._last = now
        self._seen += 1
        self._still += bool(row["zero_variance"])
        self._done = int(row["generation"]) + 1
        self._row = row
        for split, found in (("validation", row.get("validation")), ("test", row.get("evaluation"))):
            if found:
                self._evaluated[split] = float(aim_in(found)), self._done
        if self._live is not None:
            self.refresh()
        else:
            self._print_line(now, bool(row.get("evaluation")))

    def _print_line(self, now: float, always: bool) -> None:
        if always or self._done == self.total or now - self._printed >= PLAIN_SECONDS:
            self._printed = now
            _print(
                self.console, f"{self.unit} {self._done}/{self.total}  {_words([*self._figures(), *self._measured()])}"
            )

    def _print_inside(self) -> None:
        """Where nothing was printed for long: how far the generation of now is."""
        now = self._clock()
        if now - max(self._printed, self._start) >= LOG_SECONDS:
            inside = [*_working(self._watch, now), ("elapsed", _clock_face(now - self._start))]
            _print(self.console, f"{self.unit} {self._done + 1}/{self.total}  {_words(inside)}")

    def _render(self) -> Group:
        head = Table.grid(padding=(0, 1), expand=False)
        bar = ProgressBar(total=self.total, completed=self._done, width=32)
        inside = _styled(_working(self._watch, self._clock()))
        head.add_row(Text(f"{self.unit} {self._done}/{self.total}", style="bold"), bar, inside)
        body = Table.grid(padding=(0, 2), expand=False)
        figures = self._figures()
        for start in range(0, len(figures), 3):
            body.add_row(*(Text.assemble((f"{name} ", "dim"), value) for name, value in figures[start : start + 3]))
        measured = self._measured()
        return Group(head, body, _styled(measured)) if measured else Group(head, body)

    def _figures(self) -> list[tuple[str, str]]:
        """Names and values, in the order they are shown."""
        row = self._row
        elapsed = ("elapsed", _clock_face(self._clock() - self._start))
        if row is None:
            return [elapsed]
        figures = [(f"mean {self.aim}", _short(row["mean"])), ("best", _short(row["best"]))]
        figures += [("middle 60%", f"{_short(row['p20'])} to {_short(row['p80'])}")]
        weights: Mapping[str, float] = row.get(WEIGHTS) or {}
        means: Mapping[str, float | None] = row.get("rewards", {})
        figures += [(weighed(n, weights.get(n, 1.0)), _short(mean)) for n, mean in means.items() if mean is not None]
        state: Mapping[str, float] = row.get("objective") or {}
        figures += [(name, _short(value)) for name, value in [*state.items()][:MOST_STATE]]
        figures += [(self.still, f"{self._still / self._seen:.0%}"), ("tokens/s", f"{self._speed():,.0f}"), elapsed]
        figures.append(("left", _clock_face(self._seconds_left())))
        return figures

    def _measured(self) -> list[tuple[str, str]]:
        """The latest evaluations, which may be older than the rest."""
        return [
            (f"{split} {self.aim}", f"{_short(value)} ({self.unit} {after})")
            for split, (value, after) in sorted(self._evaluated.items(), reverse=True)
        ]

    def _speed(self) -> float:
        seconds = sum(s for s, _ in self._recent)
        return sum(tokens for _, tokens in self._recent) / seconds if seconds > 0 else 0.0

    def _seconds_left(self) -> float:
        each = sum(s for s, _ in self._recent) / len(self._recent)
        return max(0.0, each * (self.total - self._done) - (self._clock() - self._last))


def _live(
    console: Console, draw: Callable[[], RenderableType], *, transient: bool = False
) -> Live | notebook.Live | None:
    """Where it is drawn: on a terminal, or in a notebook; None where lines are printed."""
    if console.is_terminal:
        return Live(console=console, get_renderable=draw, refresh_per_second=2, transient=transient)
    return notebook.Live(draw, transient=transient) if notebook.here() else None


def _working(watch: Watch, now: float, *, with_left: bool = True) -> list[tuple[str, str]]:
    """The phase of now and how far it is; nothing between phases."""
    work = watch.work
    if work is None:
        return []
    spent, left = now - work.began, work.left(now) if with_left else None
    found = [(work.phase, f"{work.done:,}/{work.total:,}" if work.total else "")]
    found += [("tokens/s", f"{work.tokens / spent:,.0f}")] if work.tokens and spent > 0 else []
    return found if left is None else [*found, ("about", f"{_clock_face(left)} more")]


def _words(figures: Iterable[tuple[str, str]]) -> str:
    return "  ".join(f"{name} {value}".strip() for name, value in figures)


def _styled(figures: Iterable[tuple[str, str]]) -> Text:
    return Text.assemble(*(part for name, value in figures for part in ((f"{name} ", "dim"), f"{value}  ")))


def _print(console: Console, line: str) -> None:
    print_line(console, line)


def _short(value: float) -> str:
    """Four significant digits, without an exponent for what a reward usually is."""
    value = 0.0 if abs(value) < 1e-12 else value  # what is left of a sum that should be 0
    return f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"


def _clock_face(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
