# SPDX-License-Identifier: Apache-2.0
"""The charts of one run over its generations, with the numbers that they are drawn of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from evoalign.analysis.page.charts import Chart, Point, Series, drawn, drawn_of
from evoalign.analysis.page.markup import NOTHING, Markup, folded, joined, number, table
from evoalign.analysis.page.view import Row, View
from evoalign.errors import cut
from evoalign.report.figures import Ends
from evoalign.rewards.objective import aim_of

MOST_ROWS = 400
"""Of the table below a chart; of a longer run each second, third, ... is in it."""
MOST_LINES = 20
"""Phases, rewards and what an objective keeps: those that come first are drawn. A run has a handful."""
LONGEST = 30
"""Signs of a name beside an axis."""
SMOOTHED = 20
"""Rows from which on means are drawn as moving means, over a tenth of them; of fewer, each is drawn."""
OF_MEANS = f"Lines of {SMOOTHED} points and more are moving means over a tenth of them"
PHASES = {"rollout": 0, "score": 4, "update": 1, "other": 7}
"""Colours of the phases that are known."""


def curves(index: int, view: View) -> Markup:
    """Reward, several rewards, what the objective keeps, and the divergence from the base model, as far as there."""
    if not view.rows:
        return NOTHING
    words = view.words
    parts = [
        drawn(Chart(f"{words.aim.capitalize()} by {words.unit}", words.unit, words.aim, list(_evolution(view)))),
        drawn(Chart("Mean of each reward", words.unit, "mean reward", list(_rewards(view.rows)))),
        *(drawn(kept_chart(name, f"by {words.unit}", [view])) for name in kept_names(view)),
        drawn(
            Chart("KL from the base model", f"{words.unit}s done", "nats a token", list(_divergence(view.rows)), True)
        ),
        folded("Numbers of the curves", _table(view), id_=f"curve-{index}"),
    ]
    return joined(parts)


def _evolution(view: View) -> Iterator[Series]:
    """Of the members by generation, and of the mean model on the other splits, where it was measured."""
    rows, words = view.rows, view.words
    at = [float(row["generation"]) for row in rows]

    def of(name: str) -> list[float | None]:
        return [row.get(name) for row in rows]

    means = list(zip(at, of("mean"), strict=True))
    smooth = moving(means)
    yield Series("20th to 80th percentile", means, 0, "band", of("p20"), of("p80"))
    yield Series(words.best, list(zip(at, of("best"), strict=True)), 1, "faint")
    if smooth is not means:
        yield Series(words.mean, means, 0, "faint")
    yield Series(words.mean if smooth is means else f"the same, moving mean over {window(len(means))}", smooth, 0)
    validated = words.tested.replace("test", "validation", 1)
    for name, split, label, colour in (
        ("validation", "validation", validated, 4),
        ("evaluation", "test", words.tested, 2),
    ):
        yield _measured(rows, name, view.ends.get(split, Ends()), label, colour)
    still = [(x, 0.0) for x, row in zip(at, rows, strict=True) if row.get("zero_variance")]
    if still:
        yield Series(f"{words.still} ({len(still)} of {len(rows)})", still, 3, "tick")


def window(count: int) -> int:
    """Points that a moving mean is over: an odd number, a tenth of them."""
    return 2 * (count // 20) + 1


def moving(points: Sequence[Point]) -> Sequence[Point]:
    """Centred moving means, at the ends over the points that are there; the points themselves where there are few.

    Of a long run at as many points as a chart draws, so that it takes no longer than its rows.
    """
    if len(points) < SMOOTHED:
        return points
    reach = window(len(points)) // 2
    kept = [_finite(y) for _, y in points]
    found: list[Point] = []
    for i in drawn_of(len(points)):
        values = [y for y in kept[max(0, i - reach) : i + reach + 1] if y is not None]
        found.append((points[i][0], math.fsum(y / len(values) for y in values) if values else None))
    return found


def _measured(rows: Sequence[Row], name: str, ends: Ends, label: str, colour: int) -> Series:
    """A mean belongs behind its update. Ends have intervals over examples; the last row may be of the same mean."""
    last = float(rows[-1]["generation"] + 1)
    known = {x: end for x, end in ((0.0, ends.before), (last, ends.after)) if end is not None}
    inside = {float(row["generation"] + 1): _aim(row, name) for row in rows if row.get(name)}
    values = dict(sorted((inside | {x: end.mean for x, end in known.items()}).items()))
    low = [known[x].low if x in known else None for x in values]
    high = [known[x].high if x in known else None for x in values]
    whiskers = ", 95 % interval over examples" if any(v is not None for v in low) else ""
    return Series(
        label + whiskers, list(values.items()), colour, "mark", low, high, "square" if colour == 4 else "diamond"
    )


def _rewards(rows: Sequence[Row]) -> Iterator[Series]:
    for i, name in enumerate(_names(rows, "rewards")):
        yield Series(name, _values(rows, "rewards", name), i)


def kept_names(view: View) -> list[str]:
    """What the run's objective keeps from one generation to the next."""
    return _names(view.rows, "objective")


def kept_chart(name: str, heading: str, views: Sequence[View]) -> Chart:
    """What an objective keeps under a name, as it is after each generation: a line a run, each in its colour."""
    unit = " or ".join(sorted({view.words.unit for view in views}))
    labels = [view.name for view in views] if len(views) > 1 else [f"{name}, after the {unit}"]
    lines = [
        Series(label, _values(view.rows, "objective", name), i)
        for i, (label, view) in enumerate(zip(labels, views, strict=True))
    ]
    return Chart(f"Kept by the objective: {name}, {heading}", unit, cut(name, LONGEST), lines)


def _names(rows: Sequence[Row], field: str) -> list[str]:
    """Of the values in a field of the rows, the first ones."""
    return list(dict.fromkeys(name for row in rows for name in row.get(field) or ()))[:MOST_LINES]


def _values(rows: Sequence[Row], field: str, name: str) -> list[Point]:
    """One of them by row; a row without it leaves a gap."""
    return [(float(row["generation"]), (row.get(field) or {}).get(name)) for row in rows]


def _divergence(rows: Sequence[Row]) -> Iterator[Series]:
    points = [(float(row["generation"] + 1), row["divergence"].get("exact")) for row in rows if row.get("divergence")]
    if points:
        yield Series("exact", [(0.0, 0.0), *points], 5)


def _table(view: View) -> Markup:
    step = -(-len(view.rows) // MOST_ROWS)
    rows = [row for i, row in enumerate(view.rows) if i % step == 0 or i == len(view.rows) - 1]
    columns = ("mean", "best", "worst", "p20", "p80", "std")
    has_test = any(row.get("evaluation") for row in rows)
    header = (view.words.unit, *columns, *(["test"] if has_test else []))
    body = [
        (f"{row['generation']}", *(number(_finite(row.get(name))) for name in columns),
         *([number(_finite(_aim(row, "evaluation")))] if has_test else []))
        for row in rows
    ]  # fmt: skip
    return table(f"Fitness of the population by {view.words.unit}", header, body)


def _aim(row: Row, name: str) -> float | None:
    """What was trained for, of an evaluation in a row."""
    found = row.get(name) or {}
    return found.get(aim_of(found))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def timings(index: int, view: View) -> Markup:
    """Seconds by phase: of each generation, and of all together."""
    names = dict.fromkeys(phase for row in view.rows for phase in row.get("seconds") or ())
    names = [name for name in (*PHASES, *names) if name in names]
    names = list(dict.fromkeys(names))[:MOST_LINES]
    if not names:
        return NOTHING
    spent = {name: [_seconds(row, name) for row in view.rows] for name in names}
    total = math.fsum(map(math.fsum, spent.values()))
    base, series = [0.0] * len(view.rows), list[Series]()
    for i, (name, seconds) in enumerate(spent.items()):
        top = [a + b for a, b in zip(base, seconds, strict=True)]
        points = [(float(row["generation"]), y) for row, y in zip(view.rows, top, strict=True)]
        series.append(Series(name, points, PHASES.get(name, 2 + i), "stack", base, top))
        base = top
    rows = [(name, f"{math.fsum(s):,.1f}", f"{math.fsum(s) / total:.0%}" if total else "") for name, s in spent.items()]
    unit = view.words.unit
    return joined((
        drawn(Chart(f"Seconds of each {unit} by phase", unit, "seconds", series, from_zero=True)),
        table("Seconds by phase, all together", ("phase", "seconds", "share"), [*rows, ("all", f"{total:,.1f}", "")]),
    ))  # fmt: skip


def _seconds(row: Row, name: str) -> float:
    value = (row.get("seconds") or {}).get(name, 0.0)
    return value if math.isfinite(value) and 0 <= value < 1e12 else 0.0
