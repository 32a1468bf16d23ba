# SPDX-License-Identifier: Apache-2.0
"""Geometry of the charts, which charts.html.jinja writes as SVG, coloured by the page's style sheet.

Each is drawn wide and narrow; the style sheet shows one of them. Numbers come from untrusted files: values that are not
finite, or too large for a chart, leave a gap.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Point = tuple[float, float | None]
MOST_POINTS = 600
"""Most points of a line; of a longer one every second, third, ... is drawn."""
LARGEST = 1e300
COLOURS = 8
WIDTHS = {"wide": 760, "narrow": 380}
HEIGHT, STRIP = 300, 34
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 42
SHAPES = {
    "diamond": "m0-6 6 6-6 6-6-6z",
    "square": "m-4.5-4.5h9v9h-9z",
    "circle": "m-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0z",
}


def number(value: float | None) -> str:
    """Format with four significant digits; empty for None."""
    if value is None:
        return ""
    return f"{value:.4g}" if abs(value) < 10_000 or value != int(value) else f"{int(value):,}"


@dataclass(frozen=True, slots=True)
class Series:
    """A series with `points` in the order of x; `low` and `high` are the band or the whiskers of its points.

    `colour` is an index of the style sheet's colours; kind `mark` draws a sign at each point.
    """

    label: str
    points: Sequence[Point]
    colour: int = 0
    kind: Literal["line", "thin", "faint", "band", "mark", "tick", "stack"] = "line"
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    shape: Literal["diamond", "square", "circle"] = "diamond"


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart; `title` is also its label for screen readers, `across` and `up` are the labels of the axes."""

    title: str
    across: str
    up: str
    series: Sequence[Series]
    from_zero: bool = False
    whole: bool = True
    """Whether x is a whole number."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Shape:
    """A path, its class of the style sheet, and the label that a browser shows for it."""

    d: str
    style: str
    label: str = ""


@dataclass(frozen=True, slots=True)
class Label:
    """A text of a drawing; `turned` reads upwards."""

    x: float
    y: float
    text: str
    anchor: Literal["middle", "end"] = "middle"
    style: str = ""
    turned: bool = False


@dataclass(frozen=True, slots=True)
class Drawing:
    """An SVG of kind wide or narrow."""

    kind: str
    height: int
    shapes: Sequence[Shape]
    labels: Sequence[Label]

    @property
    def width(self) -> int:
        """Width in units of the drawing."""
        return WIDTHS[self.kind]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A chart as drawings, with the signs and names of its legend, and a note."""

    title: str
    drawings: Sequence[Drawing]
    legend: Sequence[tuple[Shape, str]] = ()
    note: str = ""


def drawn(chart: Chart) -> Drawn | None:
    """Draw a chart with its legend; None if no series has a point."""
    shown = [thinned(series) for series in chart.series if any(_is_drawable(y) for _, y in series.points)]
    if not shown:
        return None
    chart = replace(chart, series=shown)
    legend = [(_sign(series), series.label) for series in shown if series.label]
    return Drawn(chart.title, [_drawing(chart, kind) for kind in WIDTHS], legend, chart.note)


def thinned(series: Series) -> Series:
    """Return the series with at most `MOST_POINTS` points, the last included."""
    kept = drawn_of(len(series.points))
    low, high = ([of[i] for i in kept] if of else () for of in (series.low, series.high))
    return replace(series, points=[series.points[i] for i in kept], low=low, high=high)


def drawn_of(count: int) -> list[int]:
    """Return the indices of the points that are drawn."""
    step = max(1, -(-count // MOST_POINTS))
    return sorted({*range(0, count, step), *([count - 1] if count else [])})


def ticks(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """Return about `most` round numbers from low to high."""
    span = high - low
    if span <= 0:
        return [low]
    size = 10.0 ** math.floor(math.log10(span / most))
    step = next((m * size for m in (1, 2, 5, 10) if span / (m * size) <= most), 10 * size)
    step = max(1.0, step) if whole else step
    first = math.ceil(low / step - 1e-9)
    return [step * k for k in range(first, first + most + 2) if step * k <= high + 1e-9 * span]


@dataclass(frozen=True, slots=True)
class _Frame:
    """Coordinates of a drawing."""

    width: int
    x0: float
    x1: float
    y0: float
    y1: float
    left: int = LEFT

    def x(self, value: float) -> float:
        return self.left + (value - self.x0) / (self.x1 - self.x0) * (self.width - self.left - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)

    def at(self, x: float, y: float) -> str:
        return f"{_at(self.x(x))} {_at(self.y(y))}"


def _at(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _is_drawable(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and abs(value) < LARGEST


def _tick(value: float, span: float) -> str:
    value = 0.0 if abs(value) < 1e-9 * span else value
    return number(value) if abs(value) < 1e6 else f"{value:.3g}"


def _drawing(chart: Chart, kind: str) -> Drawing:
    """Draw axes and series."""
    xs = [x for s in chart.series for x, y in s.points if _is_drawable(y)]
    heights = [y for s in chart.series for y in (*(y for _, y in s.points), *s.low, *s.high)]
    ys = [y for y in heights if y is not None and _is_drawable(y)] + ([0.0] if chart.from_zero else [])
    x0, x1, y0, y1 = min(xs), max(xs), min(ys), max(ys)
    if x1 - x0 < 1e-9 * max(1.0, abs(x0)):
        x0, x1 = x0 - 0.5 * max(1.0, 1e-6 * abs(x0)), x1 + 0.5 * max(1.0, 1e-6 * abs(x1))
    air = 0.06 * (y1 - y0) or 0.1 * abs(y0) or 1.0
    frame = _Frame(WIDTHS[kind], x0, x1, y0 if chart.from_zero and y0 == 0 else y0 - air, y1 + air)
    right, bottom = frame.width - RIGHT, HEIGHT - BOTTOM
    across = {v: frame.x(v) for v in ticks(x0, x1, 8 if kind == "wide" else 5, whole=chart.whole)}
    up = {v: frame.y(v) for v in ticks(frame.y0, frame.y1, 6)}
    labels = [Label(LEFT - 6, y + 4, _tick(value, frame.y1 - frame.y0), "end") for value, y in up.items()]
    labels += [Label(x, bottom + 17, _tick(value, x1 - x0)) for value, x in across.items()]
    labels.append(Label((LEFT + right) / 2, HEIGHT - 6, chart.across, style="name"))
    labels.append(Label(12, (TOP + bottom) / 2, chart.up, style="name", turned=True))
    grid = [Shape(f"M{LEFT} {_at(y)}H{right}", "grid") for y in up.values()]
    axis = Shape(f"M{LEFT} {bottom}H{right}", "axis")
    return Drawing(kind, HEIGHT, [*grid, axis, *(p for s in chart.series for p in _shapes(s, frame))], labels)


def _shapes(series: Series, frame: _Frame) -> Iterator[Shape]:
    colour, kind = f"c{series.colour % COLOURS}", series.kind
    sides = zip(series.points, series.low, series.high, strict=False)
    edges = [
        (x, low, high)
        for (x, _), low, high in sides
        if low is not None and high is not None and _is_drawable(low) and _is_drawable(high)
    ]
    if kind in ("band", "stack"):
        # Each x of a stack is a step, which reaches half the way to the next.
        reach = min((b[0] - a[0] for a, b in itertools.pairwise(edges)), default=1.0) / 2 if kind == "stack" else 0.0
        steps = [({max(frame.x0, x - reach): 0, min(frame.x1, x + reach): 0}, *ends) for x, *ends in edges]
        top = [frame.at(x, high) for xs, _, high in steps for x in xs]
        under = [frame.at(x, low) for xs, low, _ in reversed(steps) for x in reversed(xs)]
        if edges:
            yield Shape(f"M{'L'.join([*top, *under])}Z", f"{kind} {colour}")
    elif kind == "tick":
        yield Shape("".join(f"M{_at(frame.x(x))} {HEIGHT - BOTTOM}v-9" for x, _ in series.points), f"tick {colour}")
    elif kind == "mark":
        ends = ((frame.x(x), _at(frame.y(low)), _at(frame.y(high))) for x, low, high in edges)
        whiskers = "".join(f"M{_at(x)} {low}V{high}m-4 0h8M{_at(x - 4)} {low}h8" for x, low, high in ends)
        if whiskers:
            yield Shape(whiskers, f"whisker {colour}")
        places = [(x, y) for x, y in series.points if y is not None and _is_drawable(y)]
        if len(places) > 1:
            yield Shape("M" + "L".join(frame.at(x, y) for x, y in places), f"dotted {colour}")
        for x, y in places:
            label = f"{series.label}: {number(y)} at {number(x)}"
            yield Shape(f"M{frame.at(x, y)}{SHAPES[series.shape]}", f"mark {colour}", label)
    else:
        gaps = itertools.groupby(series.points, lambda point: _is_drawable(point[1]))
        parts = [[frame.at(x, y or 0.0) for x, y in points] for is_known, points in gaps if is_known]
        if path := "".join(f"M{'L'.join(part)}" for part in parts if len(part) > 1):
            yield Shape(path, f"{kind} {colour}")
        for part in parts:
            if len(part) == 1:  # a line through one point is invisible
                yield Shape(f"M{part[0]}{SHAPES['circle']}", f"mark {colour}")


def _sign(series: Series) -> Shape:
    """Return the sign of a series for the legend."""
    signs = {"band": "M0 2h24v10H0z", "stack": "M4 1h12v12H4z", "tick": "M12 2v10"}
    signs["mark"] = f"M12 7{SHAPES[series.shape]}"
    return Shape(signs.get(series.kind, "M0 7h24"), f"{series.kind} c{series.colour % COLOURS}")


def strip(title: str, groups: Sequence[tuple[str, Sequence[float], int]]) -> Drawn | None:
    """Draw groups of values on one scale, a line each: name, values and colour."""
    values = [v for _, found, _ in groups for v in found if _is_drawable(v)]
    return Drawn(title, [_strip(groups, min(values), max(values), kind) for kind in WIDTHS]) if values else None


def _strip(groups: Sequence[tuple[str, Sequence[float], int]], low: float, high: float, kind: str) -> Drawing:
    air = 0.05 * (high - low) or 0.1 * abs(low) or 1.0
    frame = _Frame(WIDTHS[kind], low - air, high + air, 0.0, 1.0, left=120 if kind == "wide" else 100)
    height = STRIP * len(groups) + STRIP
    at = {value: frame.x(value) for value in ticks(frame.x0, frame.x1, 7 if kind == "wide" else 4)}
    shapes = [Shape(f"M{_at(x)} 4V{height - 26}", "grid") for x in at.values()]
    labels = [Label(x, height - 9, _tick(value, high - low)) for value, x in at.items()]
    for i, (name, found, colour) in enumerate(groups):
        y = STRIP * i + STRIP / 2 + 4
        labels.append(Label(frame.left - 14, y + 4, name, "end", "name"))
        sign = SHAPES["circle" if len(found) > 1 else "diamond"]
        shown = [v for v in found if _is_drawable(v)]
        shapes += [
            Shape(f"M{_at(frame.x(v))} {_at(y)}{sign}", f"mark c{colour}", f"{name}: {number(v)}") for v in shown
        ]
    return Drawing(kind, height, shapes, labels)
