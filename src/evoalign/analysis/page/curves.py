# SPDX-License-Identifier: Apache-2.0
"""Charts and tables of runs over their generations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from evoalign.analysis.page.charts import Chart, Drawn, Point, Series, drawn, drawn_of, number
from evoalign.analysis.page.view import Row, Table, View
from evoalign.errors import cut
from evoalign.report.figures import Ends
from evoalign.rewards.objective import aim_of

MOST_ROWS = 400
"""Most rows of the table below a chart; of a longer run every second, third, ... is in it."""
MOST_LINES = 20
"""Most phases, rewards and numbers of an objective that are drawn."""
LONGEST = 30
"""Longest label of an axis."""
SMOOTHED = 20
"""Minimum number of rows for which a curve is drawn as a moving mean, over a tenth of the rows."""
AT_COST = "evoalign compare draws runs by their completions, tokens or seconds."
OF_MEANS = f"Lines of {SMOOTHED} points and more are moving means over a tenth of them"
PHASES = {"rollout": 0, "score": 4, "update": 1, "other": 7}
"""Colours of the known phases."""


def curves(view: View) -> list[Drawn | None]:
    """Draw the reward, several rewards, what selects, the state of the objective, and the KL, if there are any."""
    words, rows = view.words, view.rows
    rewards = [Series(name, _values(rows, "rewards", name), i) for i, name in enumerate(_names(rows, "rewards"))]
    axes = [{**row, "selects": ((row.get("diagnosis") or {}).get("axes") or {}).get("shares") or {}} for row in rows]
    selects = [
        Series(name, moving(_values(axes, "selects", name)), i) for i, name in enumerate(_names(axes, "selects"))
    ]
    exact = [(float(row["generation"] + 1), row["divergence"].get("exact")) for row in rows if row.get("divergence")]
    kl = [Series("exact", [(0.0, 0.0), *exact], 5)] if exact else []
    found = [
        Chart(f"{words.aim.capitalize()} by {words.unit}", words.unit, words.aim, list(_evolution(view))),
        Chart("Mean of each reward", words.unit, "mean reward", rewards),
        Chart("What selects", words.unit, "share of the coefficients", selects, from_zero=True),
        *(_kept(name, f"by {words.unit}", [view]) for name in _names(rows, "objective")),
        Chart("KL from the base model", f"{words.unit}s done", "nats per token", kl, from_zero=True),
    ]
    return [drawn(chart) for chart in found]


def together(views: Sequence[View]) -> Iterator[Drawn | None]:
    """Draw the means of all runs of a task in one chart, and each state that two or more objectives share."""
    tasks: dict[str, list[View]] = {}
    for view in views:
        tasks.setdefault(view.about.get("task", ""), []).append(view)
    for task, runs in tasks.items():
        if len(runs) < 2:
            continue
        lines = [
            Series(v.name, moving([(r["generation"], r.get("mean")) for r in v.rows]), i) for i, v in enumerate(runs)
        ]
        across, aims = " or ".join(sorted({view.words.unit for view in runs})), {view.words.aim for view in runs}
        aim = aims.pop() if len(aims) == 1 else "the trained measure"
        note = f"{OF_MEANS}. A {across} of one run may take more completions than another's. {AT_COST}"
        yield drawn(Chart(f"{task}: mean {aim} while training, run by run", across, aim, lines, note=note))
        for name, count in Counter(name for view in runs for name in _names(view.rows, "objective")).items():
            if count > 1:
                yield drawn(_kept(name, f"run by run, of {task}" if task else "run by run", runs))


def _evolution(view: View) -> Iterator[Series]:
    """Yield the series of the members, and of the mean on the other splits."""
    rows, words = view.rows, view.words
    at = [float(row["generation"]) for row in rows]
    mean, best, low, high = ([row.get(name) for row in rows] for name in ("mean", "best", "p20", "p80"))
    means = list(zip(at, mean, strict=True))
    smooth = moving(means)
    yield Series("20th to 80th percentile", means, 0, "band", low, high)
    yield Series(words.best, list(zip(at, best, strict=True)), 1, "faint")
    if smooth is not means:
        yield Series(words.mean, means, 0, "faint")
    yield Series(words.mean if smooth is means else f"the same, moving mean over {window(len(means))}", smooth, 0)
    validated = words.tested.replace("test", "validation", 1)
    yield _measured(rows, "validation", view.ends.get("validation", Ends()), validated, 4)
    yield _measured(rows, "evaluation", view.ends.get("test", Ends()), words.tested, 2)
    still = [(x, 0.0) for x, row in zip(at, rows, strict=True) if row.get("zero_variance")]
    if still:
        yield Series(f"{words.still} ({len(still)} of {len(rows)})", still, 3, "tick")


def window(count: int) -> int:
    """Return the width of the moving mean: a tenth of the points, odd."""
    return 2 * (count // 20) + 1


def moving(points: Sequence[Point]) -> Sequence[Point]:
    """Return centred moving means, at the ends over fewer points; the points themselves if they are few.

    They are computed at the points that a chart draws, so that the time is linear in the rows.
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
    """Return the series of an evaluation; each value is drawn after its update, the ends with their intervals."""
    last = float(rows[-1]["generation"] + 1)
    known = {x: end for x, end in ((0.0, ends.before), (last, ends.after)) if end is not None}
    inside = {float(row["generation"] + 1): _aim(row, name) for row in rows if row.get(name)}
    values = dict(sorted((inside | {x: end.mean for x, end in known.items()}).items()))
    low = [known[x].low if x in known else None for x in values]
    high = [known[x].high if x in known else None for x in values]
    label += ", 95 % interval over examples" if any(v is not None for v in low) else ""
    sign = "square" if colour == 4 else "diamond"
    return Series(label, list(values.items()), colour, "mark", low, high, sign)


def _kept(name: str, heading: str, views: Sequence[View]) -> Chart:
    """Return a chart of one state of the objective after each generation, a line per run."""
    unit = " or ".join(sorted({view.words.unit for view in views}))
    lines: list[Series] = []
    for i, view in enumerate(views):
        label = view.name if len(views) > 1 else f"{name}, after the {unit}"
        lines.append(Series(label, _values(view.rows, "objective", name), i))
    return Chart(f"Kept by the objective: {name}, {heading}", unit, cut(name, LONGEST), lines)


def _names(rows: Sequence[Row], field: str) -> list[str]:
    """Return the first `MOST_LINES` names in a field of the rows."""
    return list(dict.fromkeys(name for row in rows for name in row.get(field) or ()))[:MOST_LINES]


def _values(rows: Sequence[Row], field: str, name: str) -> list[Point]:
    """Return the values of a name by row; a row without it leaves a gap."""
    return [(float(row["generation"]), (row.get(field) or {}).get(name)) for row in rows]


def numbers(view: View) -> Table:
    """Return the table of the curves."""
    step = -(-len(view.rows) // MOST_ROWS)
    rows = [row for i, row in enumerate(view.rows) if i % step == 0 or i == len(view.rows) - 1]
    columns = ("mean", "best", "worst", "p20", "p80", "std")
    has_test = any(row.get("evaluation") for row in rows)
    header = (view.words.unit, *columns, *(["test"] if has_test else []))
    body: list[Sequence[str]] = []
    for row in rows:
        values = [*(row.get(name) for name in columns), *([_aim(row, "evaluation")] if has_test else [])]
        body.append((f"{row['generation']}", *(number(_finite(value)) for value in values)))
    return Table(f"Fitness of the population by {view.words.unit}", header, body)


def _aim(row: Row, name: str) -> float | None:
    """Return the trained measure of an evaluation in a row."""
    found = row.get(name) or {}
    return found.get(aim_of(found))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def timings(view: View) -> tuple[Drawn | None, Table] | None:
    """Draw the seconds of each generation by phase; return the chart and the table of their sums."""
    known = dict.fromkeys(phase for row in view.rows for phase in row.get("seconds") or ())
    names = [name for name in dict.fromkeys((*PHASES, *known)) if name in known][:MOST_LINES]
    if not names:
        return None
    spent = {name: [_seconds(row, name) for row in view.rows] for name in names}
    total = math.fsum(map(math.fsum, spent.values()))
    base, series = [0.0] * len(view.rows), list[Series]()
    for i, (name, seconds) in enumerate(spent.items()):
        top = [a + b for a, b in zip(base, seconds, strict=True)]
        points = [(float(row["generation"]), y) for row, y in zip(view.rows, top, strict=True)]
        series.append(Series(name, points, PHASES.get(name, 2 + i), "stack", base, top))
        base = top
    rows: list[Sequence[str]] = []
    for name, seconds in spent.items():
        own = math.fsum(seconds)
        rows.append((name, f"{own:,.1f}", f"{own / total:.0%}" if total else ""))
    rows.append(("all", f"{total:,.1f}", ""))
    unit = view.words.unit
    chart = Chart(f"Seconds of each {unit} by phase", unit, "seconds", series, from_zero=True)
    return drawn(chart), Table("Seconds by phase, all together", ("phase", "seconds", "share"), rows)


def _seconds(row: Row, name: str) -> float:
    value = (row.get("seconds") or {}).get(name, 0.0)
    return value if math.isfinite(value) and 0 <= value < 1e12 else 0.0
