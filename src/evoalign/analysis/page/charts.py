# SPDX-License-Identifier: Apache-2.0
"""Charts as SVG, coloured by the page's style sheet, so that they follow its theme and are sharp in print.

Each is drawn wide and narrow; the style sheet shows one of them. Numbers come from files of anywhere: values that are
not finite, or too large for a chart, leave a gap.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from markupsafe import Markup

from evoalign.report.tables import visible

Point = tuple[float, float | None]
MOST_POINTS = 600
"""Most points of a line; of a longer one every second, third, ... is drawn."""
LARGEST = 1e300
COLOURS = 8
NARROW, WIDE = 380, 760
HEIGHT = 300
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 42


def lines_visible(text: str) -> str:
    """Return text with its lines, and every other invisible character written as an escape."""
    return "\n".join(map(visible, text.split("\n")))


def text(found: object) -> Markup:
    """Escape anything as text of the page."""
    return Markup(html.escape(lines_visible(str(found))))


def tag(name: str, *inside: Markup, **attributes: object) -> Markup:
    """Return an element. In the name of an attribute `_` becomes `-`, and a last one is dropped."""
    given = "".join(f' {key.rstrip("_").replace("_", "-")}="{text(value)}"' for key, value in attributes.items())
    return Markup(f"<{name}{given}>{''.join(inside)}</{name}>")


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


def drawn(chart: Chart, note: str = "") -> Markup:
    """Draw a chart with heading, legend and a note below; empty if no series has a point."""
    shown = [series for series in chart.series if any(_is_drawable(y) for _, y in series.points)]
    if not shown:
        return Markup("")
    chart = Chart(chart.title, chart.across, chart.up, [thinned(s) for s in shown], chart.from_zero, chart.whole)
    names = [s for s in chart.series if s.label]
    legend = tag("ul", *(tag("li", _swatch(s), text(s.label)) for s in names), class_="legend")
    heading = tag("figcaption", text(chart.title))
    below = (legend, tag("p", text(note), class_="notes")) if note else (legend,)
    return tag("figure", heading, _svg(chart, WIDE, "wide"), _svg(chart, NARROW, "narrow"), *below, class_="chart")


def thinned(series: Series) -> Series:
    """Return the series with at most `MOST_POINTS` points, the last included."""
    kept = drawn_of(len(series.points))
    if len(kept) == len(series.points):
        return series
    low, high = ([of[i] for i in kept] if of else () for of in (series.low, series.high))
    points = [series.points[i] for i in kept]
    return Series(series.label, points, series.colour, series.kind, low, high, series.shape)


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
    left: int = field(default=LEFT)

    def x(self, value: float) -> float:
        return self.left + (value - self.x0) / (self.x1 - self.x0) * (self.width - self.left - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)


def _is_drawable(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and abs(value) < LARGEST


def _frame(chart: Chart, width: int) -> _Frame:
    xs = [x for s in chart.series for x, y in s.points if _is_drawable(y)]
    heights = [y for s in chart.series for y in (*(y for _, y in s.points), *s.low, *s.high)]
    ys = [y for y in heights if y is not None and _is_drawable(y)] + ([0.0] if chart.from_zero else [])
    x0, x1, y0, y1 = min(xs), max(xs), min(ys), max(ys)
    if x1 - x0 < 1e-9 * max(1.0, abs(x0)):
        x0, x1 = x0 - 0.5 * max(1.0, 1e-6 * abs(x0)), x1 + 0.5 * max(1.0, 1e-6 * abs(x1))
    air = 0.06 * (y1 - y0) or 0.1 * abs(y0) or 1.0
    return _Frame(width, x0, x1, y0 if chart.from_zero and y0 == 0 else y0 - air, y1 + air)


def _svg(chart: Chart, width: int, kind: str) -> Markup:
    frame = _frame(chart, width)
    inside = [*_axes(chart, frame), *(part for s in chart.series for part in _PAINT[s.kind](s, frame))]
    return tag(
        "svg",
        *inside,
        viewBox=f"0 0 {width} {HEIGHT}",
        role="img",
        aria_label=chart.title,
        class_=kind,
        focusable="false",
    )


def _axes(chart: Chart, frame: _Frame) -> Iterator[Markup]:
    right, bottom = frame.width - RIGHT, HEIGHT - BOTTOM
    for value in ticks(frame.y0, frame.y1, 6):
        y = _at(frame.y(value))
        yield tag("path", d=f"M{frame.left} {y}H{right}", class_="grid")
        yield tag(
            "text", text(_tick(value, frame.y1 - frame.y0)), x=frame.left - 6, y=y, dy="0.32em", text_anchor="end"
        )
    for value in ticks(frame.x0, frame.x1, 8 if frame.width > 500 else 5, whole=chart.whole):
        label = _tick(value, frame.x1 - frame.x0)
        yield tag("text", text(label), x=_at(frame.x(value)), y=bottom + 17, text_anchor="middle")
    yield tag("path", d=f"M{frame.left} {bottom}H{right}", class_="axis")
    middle = (TOP + bottom) / 2
    yield tag("text", text(chart.across), x=(frame.left + right) / 2, y=HEIGHT - 6, text_anchor="middle", class_="name")
    yield tag(
        "text", text(chart.up), transform=f"translate(12 {middle:g}) rotate(-90)", text_anchor="middle", class_="name"
    )


def _tick(value: float, span: float) -> str:
    value = 0.0 if abs(value) < 1e-9 * span else value
    return number(value) if abs(value) < 1e6 else f"{value:.3g}"


def _at(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _colour(series: Series) -> str:
    return f"c{series.colour % COLOURS}"


def _runs(series: Series, frame: _Frame) -> Iterator[list[str]]:
    """Yield the parts of a line between its gaps, as coordinates."""
    stretch: list[str] = []
    for x, y in series.points:
        if y is not None and _is_drawable(y):
            stretch.append(f"{_at(frame.x(x))} {_at(frame.y(y))}")
        elif stretch:
            yield stretch
            stretch = []
    if stretch:
        yield stretch


def _line(series: Series, frame: _Frame) -> Iterator[Markup]:
    stretches = list(_runs(series, frame))
    path = "".join(f"M{'L'.join(stretch)}" for stretch in stretches if len(stretch) > 1)
    if path:
        yield tag("path", d=path, class_=f"{series.kind} {_colour(series)}")
    for stretch in stretches:
        if len(stretch) == 1:  # a line through one point is invisible
            x, y = stretch[0].split(" ")
            yield tag("circle", cx=x, cy=y, r=3, class_=f"mark {_colour(series)}")


def _edges(series: Series) -> list[tuple[float, float, float]]:
    """Return x, low and high of the points that have both."""
    sides = zip(series.points, series.low, series.high, strict=False)
    return [
        (x, low, high)
        for (x, _), low, high in sides
        if low is not None and high is not None and _is_drawable(low) and _is_drawable(high)
    ]


def _band(series: Series, frame: _Frame) -> Iterator[Markup]:
    edges = _edges(series)
    top = [f"{_at(frame.x(x))} {_at(frame.y(high))}" for x, _, high in edges]
    under = [f"{_at(frame.x(x))} {_at(frame.y(low))}" for x, low, _ in reversed(edges)]
    if edges:
        yield tag("path", d=f"M{'L'.join([*top, *under])}Z", class_=f"band {_colour(series)}")


def _stack(series: Series, frame: _Frame) -> Iterator[Markup]:
    """Draw steps of one x each, between low and high."""
    edges = _edges(series)
    if not edges:
        return
    reach = min((b[0] - a[0] for a, b in itertools.pairwise(edges)), default=1.0) / 2
    sides = [(max(frame.x0, x - reach), min(frame.x1, x + reach), low, high) for x, low, high in edges]
    top = [f"{_at(frame.x(x))} {_at(frame.y(high))}" for a, b, _, high in sides for x in (a, b)]
    under = [f"{_at(frame.x(x))} {_at(frame.y(low))}" for a, b, low, _ in reversed(sides) for x in (b, a)]
    yield tag("path", d=f"M{'L'.join([*top, *under])}Z", class_=f"stack {_colour(series)}")


def _ticks_below(series: Series, frame: _Frame) -> Iterator[Markup]:
    path = "".join(f"M{_at(frame.x(x))} {HEIGHT - BOTTOM}v-9" for x, _ in series.points)
    yield tag("path", d=path, class_=f"tick {_colour(series)}")


SHAPES = {
    "diamond": "m0-6 6 6-6 6-6-6z",
    "square": "m-4.5-4.5h9v9h-9z",
    "circle": "m-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0z",
}


def _marks(series: Series, frame: _Frame) -> Iterator[Markup]:
    """Draw signs with whiskers, connected by a dotted line."""
    ends = ((frame.x(x), _at(frame.y(low)), _at(frame.y(high))) for x, low, high in _edges(series))
    whiskers = "".join(f"M{_at(x)} {low}V{high}m-4 0h8M{_at(x - 4)} {low}h8" for x, low, high in ends)
    if whiskers:
        yield tag("path", d=whiskers, class_=f"whisker {_colour(series)}")
    places = [(x, y) for x, y in series.points if y is not None and _is_drawable(y)]
    if len(places) > 1:
        path = "L".join(f"{_at(frame.x(x))} {_at(frame.y(y))}" for x, y in places)
        yield tag("path", d=f"M{path}", class_=f"dotted {_colour(series)}")
    for x, y in places:
        label = tag("title", text(f"{series.label}: {number(y)} at {number(x)}"))
        d = f"M{_at(frame.x(x))} {_at(frame.y(y))}{SHAPES[series.shape]}"
        yield tag("path", label, d=d, class_=f"mark {_colour(series)}")


_PAINT: dict[str, Callable[[Series, _Frame], Iterator[Markup]]] = {
    "line": _line,
    "thin": _line,
    "faint": _line,
    "band": _band,
    "mark": _marks,
    "tick": _ticks_below,
    "stack": _stack,
}


def _swatch(series: Series) -> Markup:
    """Draw the sign of a series for the legend."""
    colour = _colour(series)
    inside = {
        "band": tag("path", d="M0 2h24v10H0z", class_=f"band {colour}"),
        "stack": tag("path", d="M4 1h12v12H4z", class_=f"stack {colour}"),
        "mark": tag("path", d=f"M12 7{SHAPES[series.shape]}", class_=f"mark {colour}"),
        "tick": tag("path", d="M12 2v10", class_=f"tick {colour}"),
    }.get(series.kind, tag("path", d="M0 7h24", class_=f"{series.kind} {colour}"))
    return tag("svg", inside, viewBox="0 0 24 14", width=24, height=14, aria_hidden="true", focusable="false")


def strip(title: str, groups: Sequence[tuple[str, Sequence[float], int]]) -> Markup:
    """Draw groups of values on one scale, a line each: name, values and colour."""
    values = [v for _, found, _ in groups for v in found if _is_drawable(v)]
    if not values:
        return Markup("")
    parts = [
        _strip(title, groups, min(values), max(values), width, kind)
        for width, kind in ((WIDE, "wide"), (NARROW, "narrow"))
    ]
    return tag("figure", tag("figcaption", text(title)), *parts, class_="chart")


def _strip(
    title: str, groups: Sequence[tuple[str, Sequence[float], int]], low: float, high: float, width: int, kind: str
) -> Markup:
    air = 0.05 * (high - low) or 0.1 * abs(low) or 1.0
    frame, step = _Frame(width, low - air, high + air, 0.0, 1.0, left=120 if width > 500 else 100), 34
    height = step * len(groups) + 34
    inside: list[Markup] = []
    for value in ticks(frame.x0, frame.x1, 7 if width > 500 else 4):
        x = _at(frame.x(value))
        inside.append(tag("path", d=f"M{x} 4V{height - 26}", class_="grid"))
        inside.append(tag("text", text(_tick(value, high - low)), x=x, y=height - 9, text_anchor="middle"))
    for i, (name, found, colour) in enumerate(groups):
        y = step * i + step / 2 + 4
        inside.append(tag("text", text(name), x=frame.left - 14, y=y, dy="0.32em", text_anchor="end", class_="name"))
        shape = SHAPES["circle" if len(found) > 1 else "diamond"]
        inside += [
            tag(
                "path",
                tag("title", text(f"{name}: {number(v)}")),
                d=f"M{_at(frame.x(v))} {_at(y)}{shape}",
                class_=f"mark c{colour}",
            )
            for v in found
            if _is_drawable(v)
        ]
    return tag(
        "svg",
        *inside,
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_label=title,
        class_=kind,
        focusable="false",
    )
