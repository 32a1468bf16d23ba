# SPDX-License-Identifier: Apache-2.0
"""`evoalign analyze axes`: what selected the members of a run of ES, from the rows of its metrics.jsonl.

The shares are those of `evoalign.checks.axes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evoalign.analysis.base import Analysis, Finding, below, check_unique, short_names
from evoalign.errors import ConfigError
from evoalign.report.tables import percent, visible

if TYPE_CHECKING:
    from evoalign.checks.axes import Axes
    from evoalign.config import Config

UNKNOWN = "what selected is not known: metrics.jsonl has no `axes`, as of runs of earlier releases"
EQUAL = "all members earned the same in every generation, so nothing selected"


@dataclass(frozen=True)
class Settings:
    """`window`: generations that are pooled."""

    window: int = 10


@dataclass(frozen=True, slots=True)
class Window:
    """Pooled generations from `first` to `last`."""

    first: int
    last: int
    axes: Axes

    def tree(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        found = {
            name: getattr(self.axes, name) for name in ("correctness", "means", "shares", "lasting_share", "lasting")
        }
        return {"first": self.first, "last": self.last, **found}

    def line(self, name: str) -> str:
        """Return the figures as text."""
        place, shares = f"{name}, generations {self.first} to {self.last}", self.axes.shares
        if shares is None:
            return f"{place}: what the coefficients follow is not known with too few members; {self._lasting()}"
        return f"{place}: the coefficients follow these columns: {percent(shares)}; {self._lasting()}"

    def _lasting(self) -> str:
        """Return what of the reward's columns holds on other prompts, or why that is not known."""
        from evoalign.checks.axes import FEWEST

        share, lasting, rows = self.axes.lasting_share, self.axes.lasting, self.axes.rows
        if share is not None and lasting is not None:
            return f"{share:.0%} of what the reward's columns explain generalises to other prompts: {percent(lasting)}"
        what = "what generalises to other prompts is"
        if not self.axes.rewarded or any(row["lasting_covariance"] is None for row in rows):
            return f"{what} not known: this needs columns of the reward, and two prompts per generation"
        if len(rows) < FEWEST:
            return f"{what} not known: this needs {FEWEST} generations in which scores differ, not {len(rows)}"
        return f"{what} not shown to be more than chance"


class AxisReport(Analysis[Settings]):
    """Shares of the coefficients of a run of ES that each column of the reward, length and truncation explain.

    Targets are runs of ES, which may be unfinished. Only files are read.
    """

    name = "axes"
    help = "What selected the members of a run of ES: each column of the reward, length, or truncation."
    settings = Settings

    def run(self, targets: Sequence[str], settings: Settings, config: Config | None = None) -> Finding:
        """Raises EvoalignError for a target that is no run of ES."""
        check_unique(targets)
        if settings.window < 1:
            raise ConfigError(f"window: {settings.window} pools nothing; set 1 or more")
        found = {name: windows_of(Path(name), settings.window) for name in targets}
        lines: list[str] = []
        for name, windows in found.items():
            middle = len(windows) // 2
            chosen = dict.fromkeys([0, middle, len(windows) - 1] if windows else [])
            lines += [windows[i].line(name) for i in chosen] or [f"{name}: {_why_empty(Path(name))}"]
        numbers = [{"target": name, "windows": [one.tree() for one in windows]} for name, windows in found.items()]
        return Finding({**asdict(settings), "runs": numbers}, lines, figures=partial(draw, found))


def windows_of(run: Path, window: int) -> list[Window]:
    """Return the axis report of each `window` generations of a run; empty where its rows have none. Raises
    EvoalignError."""
    from evoalign.checks.axes import Axes
    from evoalign.rundir.method import method_of
    from evoalign.rundir.own import read_own

    if not run.is_dir():
        raise ConfigError(f"there is no folder {run}; name the folder of a run of ES")
    if method_of(run) != "es":
        raise ConfigError(f"{run} is no run of ES, so it has no coefficients; name the folder of one")
    members, rows = read_own(run).es.population_size, _rows(run)
    found: list[Window] = []
    for start in range(0, len(rows), window):
        part = rows[start : start + window]
        axes = Axes.of([(one.get("diagnosis") or {}).get("axes") for one in part], members)
        found += [] if axes is None else [Window(part[0]["generation"], part[-1]["generation"], axes)]
    return found


def _rows(run: Path) -> list[Mapping[str, Any]]:
    """Return the rows of a run's metrics.jsonl in order."""
    from evoalign.rundir.directory import RunDir

    by_row = RunDir(run).read_metrics()
    return [by_row[at] for at in sorted(by_row)]


def _why_empty(run: Path) -> str:
    """Return why a run has no axis report."""
    rows = _rows(run)
    return EQUAL if rows and all(one.get("zero_variance") for one in rows) else UNKNOWN


def draw(found: Mapping[str, Sequence[Window]], folder: Path) -> list[Path]:
    """Draw the shares of the coefficients and the lasting shares by generation, a file per run."""
    from evoalign.report.figures import canvas, frame, save_both, series

    drawn, names = list[Path](), short_names(list(found))
    for number, (target, windows) in enumerate(found.items(), 1):
        if not windows:
            continue
        figure = canvas(9.0, 4.0, layout="constrained")
        at = [one.last for one in windows]
        columns = list(dict.fromkeys(name for one in windows for name in one.axes.shares or ()))
        sides = {"share of the coefficients": "shares", "share of what generalises": "lasting"}
        for axes, (label, field) in zip(figure.subplots(1, 2, sharey=True), sides.items(), strict=True):
            frame(axes, names[target], "generation")
            axes.set_ylabel(label)
            for i, name in enumerate(columns):
                shares: list[Mapping[str, float]] = [getattr(one.axes, field) or {} for one in windows]
                axes.plot(at, [share.get(name, float("nan")) for share in shares], label=visible(name), **series(i))
        below(figure, figure.axes[0], 4)
        drawn += save_both(figure, folder / f"axes_{number}.png")
    return drawn
