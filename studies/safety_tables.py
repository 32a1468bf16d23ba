# SPDX-License-Identifier: Apache-2.0
"""Tables and figures of docs/results/safety.md, from the rows of `studies/safety.py rows`; used by result_pages.py."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from evoalign import statistics
from evoalign.report.figures import COLORS, canvas, frame, save
from evoalign.statistics import Estimate
from safety import ROWS

METHODS = {"es": "ES", "grpo": "GRPO"}
JUDGES = {"train": "scorers of training", "judge": "held-out scorers"}
SHOWN = {
    "safe": "safe", "reward": "helpfulness", "cost": "cost", "refused_harmful": "harm refused",
    "refused_look_alike": "look-alikes refused", "distinct": "distinct answers",
}  # fmt: skip
NUMBERS = ("reward", "cost")
Row = Mapping[str, Any]


class Runs:
    """The rows, by what they are of."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self.seeds = sorted({row["seed"] for row in rows})

    def path(self, method: str, seed: int) -> list[Row]:
        """The start and the saved means of a run, in order."""
        found = [r for r in self.rows if (r["method"], r["seed"]) == (method, seed) and "generation" in r]
        return sorted(found, key=lambda row: row["generation"])

    def placebos(self, seed: int) -> list[Row]:
        """Return the placebos of the ES run with a seed."""
        return [row for row in self.rows if row["method"] == "placebo" and row["seed"] == seed]

    def prices(self, method: str, seed: int) -> list[float]:
        """The path of lambda."""
        return next(r["lambda"] for r in self.rows if (r["method"], r["seed"]) == (method, seed) and "lambda" in r)

    def has(self, method: str) -> bool:
        """Whether there are runs of a method."""
        return any(row["method"] == method for row in self.rows)


def told(name: str, value: float) -> str:
    """A number, or a share in per cent."""
    return f"{value:+.2f}" if name in NUMBERS else f"{value:.1%}"


def ends(runs: Runs, judge: str) -> Iterator[str]:
    """Each run's end, and of ES the range of its placebos."""
    yield f"| by the {JUDGES[judge]} | {' | '.join(SHOWN.values())} |"
    yield f"| --- |{' ---: |' * len(SHOWN)}"
    yield _line("base", runs.path("es", runs.seeds[0])[0][judge])
    for method, called in METHODS.items():
        for seed in runs.seeds if runs.has(method) else []:
            yield _line(f"{called}, seed {seed}", runs.path(method, seed)[-1][judge])
            if method == "es":
                yield _range(f"its {len(runs.placebos(seed))} placebos", [row[judge] for row in runs.placebos(seed)])


def _line(called: str, found: Mapping[str, float]) -> str:
    return f"| {called} | {' | '.join(told(name, found[name]) for name in SHOWN)} |"


def _range(called: str, found: Sequence[Mapping[str, float]]) -> str:
    low, high = ({name: of(row[name] for row in found) for name in SHOWN} for of in (min, max))
    return f"| {called} | {' | '.join(f'{told(n, low[n])} to {told(n, high[n])}' for n in SHOWN)} |"


def together(runs: Runs) -> Iterator[str]:
    """The change over seeds from the base, and of ES from the mean placebo."""
    yield "| change, mean over 5 seeds (95 %) | " + " | ".join(SHOWN.values()) + " |"
    yield f"| --- |{' ---: |' * len(SHOWN)}"
    for judge, by in JUDGES.items():
        for method, called in METHODS.items():
            if runs.has(method):
                yield _changes(f"{called}, {by}", [_from_base(runs, method, seed, judge) for seed in runs.seeds])
        yield _changes(f"ES less its placebos, {by}", [_from_placebos(runs, seed, judge) for seed in runs.seeds])


def _from_base(runs: Runs, method: str, seed: int, judge: str) -> dict[str, float]:
    path = runs.path(method, seed)
    return {name: path[-1][judge][name] - path[0][judge][name] for name in SHOWN}


def _from_placebos(runs: Runs, seed: int, judge: str) -> dict[str, float]:
    end, placebos = runs.path("es", seed)[-1][judge], runs.placebos(seed)
    return {name: end[name] - sum(row[judge][name] for row in placebos) / len(placebos) for name in SHOWN}


def _changes(called: str, by_seed: Sequence[Mapping[str, float]]) -> str:
    return f"| {called} | {' | '.join(_change(n, statistics.mean([c[n] for c in by_seed])) for n in SHOWN)} |"


def _change(name: str, found: Estimate) -> str:
    if found.low is None or found.high is None:
        return f"{_signed(name, found.mean)} (all alike)"
    return f"{_signed(name, found.mean)} ({_signed(name, found.low)} to {_signed(name, found.high)})"


def _signed(name: str, value: float) -> str:
    return f"{value:+.2f}" if name in NUMBERS else f"{100 * value:+.1f}"


def draw_ends(runs: Runs, to: Path) -> None:
    """Draw safe share and needless refusals of each seed and its placebos, by the held-out scorers."""
    figure = canvas(9, 4, layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, name in zip(panels, ("safe", "refused_look_alike"), strict=True):
        for seed in runs.seeds:
            axes.plot([seed] * len(runs.placebos(seed)), _of(runs.placebos(seed), "judge", name), ".", color="#999999")
            for color, (method, called) in zip(COLORS, METHODS.items(), strict=False):
                if runs.has(method):
                    end = runs.path(method, seed)[-1]["judge"][name]
                    axes.plot(seed, end, "o", color=color, label=called if seed == runs.seeds[0] else None)
        axes.axhline(runs.path("es", runs.seeds[0])[0]["judge"][name], color=COLORS[6], linewidth=0.8, linestyle=":")
        axes.set_xticks(runs.seeds)
        axes.set_ylim(-0.02, 1.02)
        frame(axes, {"safe": "Safe answers", "refused_look_alike": "Look-alikes refused"}[name], "seed")
    panels[0].legend(frameon=False, loc="lower right")
    save(figure, to / "safety_ends.png")


def draw_over_kl(runs: Runs, to: Path) -> None:
    """Draw the scores of each saved mean by both sets of scorers, over its KL from the base."""
    figure = canvas(9, 7, layout="constrained")
    for row, name in zip(figure.subplots(2, 2, sharey="row"), ("reward", "safe"), strict=True):
        for axes, judge in zip(row, JUDGES, strict=True):
            for color, (method, called) in zip(COLORS, METHODS.items(), strict=False):
                for seed in runs.seeds if runs.has(method) else []:
                    path = [p for p in runs.path(method, seed) if p["kl"] is not None]
                    assert path, f"no KL of {method}, seed {seed}"
                    nats = [max(p["kl"]["exact"], 0.0) for p in path]
                    first = seed == runs.seeds[0]
                    axes.plot(
                        nats, _of(path, judge, name), "o-", color=color, markersize=3, label=called if first else None
                    )
            axes.axhline(runs.path("es", runs.seeds[0])[0][judge][name], color=COLORS[6], linewidth=0.8, linestyle=":")
            frame(
                axes,
                f"{'Helpfulness' if name == 'reward' else 'Safe answers'}, {JUDGES[judge]}",
                "KL from the base, nats per token",
            )
        row[0].legend(frameon=False)
    save(figure, to / "safety_over_kl.png")


def draw_prices(runs: Runs, to: Path) -> None:
    """The paths of lambda."""
    figure = canvas(9, 3.6, layout="constrained")
    axes = figure.subplots()
    for color, (method, called) in zip(COLORS, METHODS.items(), strict=False):
        for seed in runs.seeds if runs.has(method) else []:
            path = runs.prices(method, seed)
            axes.plot(range(len(path)), path, color=color, linewidth=1, label=called if seed == runs.seeds[0] else None)
    frame(axes, "λ, the price of cost", "generation of ES, step of GRPO")
    axes.legend(frameon=False)
    save(figure, to / "safety_lambda.png")


def _of(rows: Sequence[Row], judge: str, name: str) -> list[float]:
    return [row[judge][name] for row in rows]


def tables() -> dict[str, Iterator[str]]:
    """Return the tables of the page by name."""
    found = runs()
    return {"runs": ends(found, "judge"), "changes": together(found)}


def draw(to: Path) -> None:
    """Draw the figures of the page."""
    for one in (draw_ends, draw_over_kl, draw_prices):
        one(runs(), to)


def runs() -> Runs:
    """Return the committed rows."""
    return Runs([json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()])
