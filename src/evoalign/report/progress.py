# SPDX-License-Identifier: Apache-2.0
"""Progress of a run: live on a terminal or in a notebook, or plain lines into a file or a pipe."""

from __future__ import annotations

import io
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from evoalign.report.rows import WEIGHTS
from evoalign.report.tables import percent, visible, weighed
from evoalign.report.terminal import print_line
from evoalign.report.watching import Watch, watched
from evoalign.rewards.objective import aim as aim_in

WINDOW = 20
"""Latest generations over which speed and time left are averaged."""
PLAIN_SECONDS = 2.0
"""Without a terminal, seconds between lines; the first, the last and evaluations are always printed."""
MOST_STATE = 4
"""Most numbers of the objective's state, such as the lambda of `lagrangian`, in the line of a generation."""
MOST_AXES = 3
"""Most columns in the line of a generation of those that select."""
LOG_SECONDS = 60.0
"""Without a terminal, seconds between lines within a generation."""


NOTEBOOK_SECONDS = 1.0
"""Seconds between two updates in a notebook."""
PRE = '<pre style="line-height: normal; font-family: monospace; background: none">{code}</pre>'


def in_notebook() -> bool:
    """Whether this process is a notebook kernel; IPython in a terminal is none."""
    ipython = sys.modules.get("IPython")
    shell: Any = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


class NotebookLive:
    """Live display in a notebook, as rich's `Live` on a terminal (which needs ipywidgets here). A context manager.

    It is updated every second; `transient` removes it at the end.
    """

    def __init__(self, get_renderable: Callable[[], RenderableType], *, transient: bool = False) -> None:
        self._get_renderable, self._transient = get_renderable, transient
        self._handle: Any = None
        self._updates = _every(NOTEBOOK_SECONDS, self.refresh)

    def refresh(self) -> None:
        """Draw now."""
        if self._handle is not None:
            self._handle.update(_page(as_html(self._get_renderable())))

    def __enter__(self) -> NotebookLive:
        from IPython import display  # installed, as `in_notebook` is true

        self._handle = display.display(_page(as_html(self._get_renderable())), display_id=True)
        self._updates.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._updates.__exit__(None, None, None)
        if self._transient:
            self._handle.update(_page(""))
        else:
            self.refresh()


def as_html(drawn: RenderableType) -> str:
    """Return what rich draws as HTML, with all text escaped."""
    console = Console(record=True, file=io.StringIO(), width=100, force_jupyter=False, color_system="truecolor")
    console.print(drawn)
    return console.export_html(inline_styles=True, code_format=PRE)


def _page(text: str) -> Any:
    from IPython import display

    return display.HTML(text)


@contextmanager
def _every(seconds: float, call: Callable[[], None]) -> Generator[None]:
    """Call a function from a thread, at this interval in seconds."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(seconds):
            call()

    thread = threading.Thread(target=run, name="evoalign-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class Bar:
    """Progress of an evaluation, a probe or a set of placebos, named by `title`; a context manager.

    On a terminal a line that is removed at the end; elsewhere a line per minute. Inside another `Bar` or a `Display` it
    shows nothing.
    """

    def __init__(
        self, title: str, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.title, self.console, self.watch = title, console or Console(), Watch(clock)
        self._start = clock()
        self._stack = ExitStack()
        self._live = _live(self.console, self._render, transient=True)

    def refresh(self) -> None:
        """Draw now on a terminal or in a notebook; drawn every second in any case."""
        if self._live is not None:
            self._live.refresh()

    def __enter__(self) -> Bar:
        self._start = self.watch.clock()
        if not self._stack.enter_context(watched(self.watch)):
            return self
        self._stack.enter_context(self._live or _every(LOG_SECONDS, self._print_line))
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def _print_line(self) -> None:
        print_line(self.console, f"{self._name()}: {_words(self._figures())}")

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
        """Return the share that is done; None if not known."""
        watch, work = self.watch, self.watch.work
        inside = work.done / work.total if work is not None and work.total else 0.0
        return (max(0, watch.number - 1) + inside) / watch.of if watch.of else inside or None

    def _figures(self) -> list[tuple[str, str]]:
        now, share = self.watch.clock(), self._share()
        spent = now - self._start
        left = None if share is None else spent / share * (1 - share) if share else None
        found = [*_working(self.watch, now, with_left=left is None), ("elapsed", clock_face(spent))]
        return found if left is None else [*found, ("left", clock_face(left))]


class Display:
    """Shows each finished generation (or another `unit`), and the progress of the next; a context manager.

    `total` is the number of units, `still` the label of rows of zero variance, `aim` the trained measure.
    """

    def __init__(
        self,
        total: int,
        console: Console | None = None,
        *,
        unit: str = "generation",
        still: str = "generations without update",
        aim: str = "reward",
        limit: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total, self.unit, self.still, self.aim, self.limit = total, unit, still, aim, limit
        self.spent = 0.0
        """Seconds of all generations, those before a resume included. The run ends once they reach `limit`."""
        self.console = console or Console()
        self._clock = clock
        self._start = self._last = clock()
        self._seen = self._still = self._done = 0
        self._recent: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self._row: Mapping[str, Any] | None = None
        self._evaluated: dict[str, tuple[float, int]] = {}
        """Latest value of each split, and the unit after which it was measured."""
        self._printed = -PLAIN_SECONDS
        self._watch, self._stack = Watch(clock), ExitStack()
        self._live = _live(self.console, self._render)

    def __enter__(self) -> Display:
        self._start = self._last = self._clock()
        self._printed = self._start - PLAIN_SECONDS
        self._stack.enter_context(watched(self._watch))
        self._stack.enter_context(self._live or _every(LOG_SECONDS, self._print_inside))
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def refresh(self) -> None:
        """Draw now on a terminal or in a notebook; drawn every second in any case."""
        if self._live is not None:
            self._live.refresh()

    def update(self, row: Mapping[str, Any]) -> None:
        """Show a generation from its row of metrics.jsonl."""
        now = self._clock()
        self._recent.append((now - self._last, int(row["tokens"])))
        self._last = now
        self._seen += 1
        self._still += bool(row["zero_variance"])
        self._done = int(row["generation"]) + 1
        self.spent += sum(row["seconds"].values())
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
            print_line(
                self.console, f"{self.unit} {self._done}/{self.total}  {_words([*self._figures(), *self._measured()])}"
            )

    def _print_inside(self) -> None:
        """Print the progress within the generation if nothing was printed for a minute."""
        now = self._clock()
        if now - max(self._printed, self._start) >= LOG_SECONDS:
            inside = [*_working(self._watch, now), ("elapsed", clock_face(now - self._start))]
            print_line(self.console, f"{self.unit} {self._done + 1}/{self.total}  {_words(inside)}")

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
        """Return names and values in the order shown."""
        row = self._row
        elapsed = ("elapsed", clock_face(self._clock() - self._start))
        if row is None:
            return [elapsed]
        figures = [(f"mean {self.aim}", _short(row["mean"])), ("best", _short(row["best"]))]
        figures += [("middle 60%", f"{_short(row['p20'])} to {_short(row['p80'])}")]
        weights: Mapping[str, float] = row.get(WEIGHTS) or {}
        means: Mapping[str, float | None] = row.get("rewards", {})
        figures += [(weighed(n, weights.get(n, 1.0)), _short(mean)) for n, mean in means.items() if mean is not None]
        state: Mapping[str, float] = row.get("objective") or {}
        figures += [(name, _short(value)) for name, value in [*state.items()][:MOST_STATE]]
        axes: Mapping[str, Any] = (row.get("diagnosis") or {}).get("axes") or {}
        shares: Mapping[str, float] = axes.get("lasting") or axes.get("shares") or {}
        figures += [("selects", percent(shares, MOST_AXES))] if shares else []
        seconds = sum(s for s, _ in self._recent)
        speed = sum(tokens for _, tokens in self._recent) / seconds if seconds > 0 else 0.0
        each, since = seconds / len(self._recent), self._clock() - self._last
        left = clock_face(max(0.0, min(each * (self.total - self._done), self.limit - self.spent) - since))
        figures += [(self.still, f"{self._still / self._seen:.0%}"), ("tokens/s", f"{speed:,.0f}"), elapsed]
        return [*figures, ("left", left)]

    def _measured(self) -> list[tuple[str, str]]:
        """Return the latest evaluations."""
        return [
            (f"{split} {self.aim}", f"{_short(value)} ({self.unit} {after})")
            for split, (value, after) in sorted(self._evaluated.items(), reverse=True)
        ]


def _live(
    console: Console, draw: Callable[[], RenderableType], *, transient: bool = False
) -> Live | NotebookLive | None:
    """Return a live display on a terminal or in a notebook; None if lines are printed."""
    if console.is_terminal:
        return Live(console=console, get_renderable=draw, refresh_per_second=2, transient=transient)
    return NotebookLive(draw, transient=transient) if in_notebook() else None


def _working(watch: Watch, now: float, *, with_left: bool = True) -> list[tuple[str, str]]:
    """Return the current phase and its progress; nothing between phases."""
    work = watch.work
    if work is None:
        return []
    spent, left = now - work.began, work.left(now) if with_left else None
    found = [(work.phase, f"{work.done:,}/{work.total:,}" if work.total else "")]
    found += [("tokens/s", f"{work.tokens / spent:,.0f}")] if work.tokens and spent > 0 else []
    return found if left is None else [*found, ("about", f"{clock_face(left)} more")]


def _words(figures: Iterable[tuple[str, str]]) -> str:
    return "  ".join(f"{name} {value}".strip() for name, value in figures)


def _styled(figures: Iterable[tuple[str, str]]) -> Text:
    return Text.assemble(*(part for name, value in figures for part in ((f"{name} ", "dim"), f"{value}  ")))


def _short(value: float) -> str:
    """Format with four significant digits, without an exponent below a million."""
    value = 0.0 if abs(value) < 1e-12 else value  # rounding of a sum that should be 0
    return f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"


def clock_face(seconds: float) -> str:
    """Format as 0:01:30; less than 0 is 0."""
    return str(timedelta(seconds=round(max(0.0, seconds))))
