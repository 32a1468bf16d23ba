# SPDX-License-Identifier: Apache-2.0
"""The parts of the page, each of all runs: a heading, and what there is to say, a run beside the other."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from evoalign.analysis.page import charts
from evoalign.analysis.page.charts import Chart, Series
from evoalign.analysis.page.curves import OF_MEANS, curves, kept_chart, kept_names, moving, timings
from evoalign.analysis.page.markup import NOTHING, Markup, bullets, folded, joined, number, short, table, tag, text
from evoalign.analysis.page.view import Analysed, Measure, View
from evoalign.report.tables import NAMES, is_share

STATES = {
    "done": "done",
    "measuring": "trained; what is measured beside the results is still being measured, or was not",
    "unfinished": "not at its end",
}

AT_COST = "evoalign compare draws runs by the completions, tokens or seconds that they took."
MOST_SENTENCES = 8
"""Of an analysis before its figures; further ones are folded away."""


def of_each(views: Sequence[View], made: Callable[[int, View], Markup], none: Callable[[View], str]) -> Markup:
    """What is said of each run; with its name above where there are several, and why there is none beside others."""
    parts = [made(i, view) for i, view in enumerate(views)]
    if len(views) == 1:
        return parts[0]
    named = (
        tag("div", tag("h3", text(view.name)), part or tag("p", text(none(view)), class_="none"), class_="run")
        for view, part in zip(views, parts, strict=True)
    )
    return tag("div", *named, class_="runs") if any(parts) else NOTHING


def _not_yet(view: View) -> str:
    """Of a part that each run comes to have."""
    return "The run has none of this." if view.state == "done" else "Not yet: the run has not ended."


def _why_no_placebos(view: View) -> str:
    if view.method != "ES":
        return f"{view.method} keeps no journal that could be shuffled, so it has no placebos."
    if view.state != "done":
        return "No placebos yet: the run has not ended."
    return f"No placebo was measured: evoalign placebo {view.path}"


def _no_analysis(view: View) -> str:
    return f"No analysis of this run alone: evoalign analyze NAME {view.path} --to {view.path}/analysis"


# --- what comes first ---


def warnings(views: Sequence[View]) -> Markup:
    """Alarms and warnings, those first."""
    found = of_each(views, _warnings, lambda _: "Nothing alarms, and nothing warns.")
    return found or tag("p", text("Nothing alarms, and nothing warns."), class_="fine")


def _warnings(_: int, view: View) -> Markup:
    lines = [(kind, line) for kind, said in (("alarm", view.alarms), ("warning", view.warnings)) for line in said]
    items = (tag("li", tag("strong", text(f"{kind.capitalize()}: ")), text(line), class_=kind) for kind, line in lines)
    return tag("ul", *items, class_="warnings") if lines else NOTHING


def summary(views: Sequence[View]) -> Markup:
    """What became of each run, and beside each other."""
    return joined((of_each(views, _summary, _not_yet), _side_by_side(views) if len(views) > 1 else NOTHING))


def _summary(i: int, view: View) -> Markup:
    of = f" of {view.total:,}" if view.total is not None else ""
    state = f"{STATES[view.state]}; {view.words.unit} {view.steps:,}{of}"
    lines = [tag("p", text(line)) for line in view.beside]
    headline = tag("p", text(view.headline), class_="headline") if view.headline else NOTHING
    facts = _facts({"state": state, "method": view.method, **view.about})
    return joined((headline, *lines, facts, folded("How it was made", _facts(view.made), id_=f"made-{i}")))


def _facts(found: Mapping[str, str]) -> Markup:
    return tag("dl", *(joined((tag("dt", text(name)), tag("dd", text(value)))) for name, value in found.items()))


def _side_by_side(views: Sequence[View]) -> Markup:
    header = ("run", "method", "before", "after", "change", "95 % interval", "mean placebo", "seconds")
    rows: list[Sequence[str]] = []
    for view in views:
        aim = view.measures[0] if view.measures else Measure("reward", None, None)
        seconds = view.budget.get("training", {}).get("wall_seconds")
        rows.append((view.name, view.method, *_cells(aim), _value(aim.name, aim.placebo), number(seconds)))
    names = {view.measures[0].name for view in views if view.measures}
    name = names.pop() if len(names) == 1 else "what each was trained for"
    return table(f"{_called(name).capitalize()} on the test split, run by run", header, rows, words=2)


def diagnosis(views: Sequence[View]) -> Markup:
    """Whether it learns, in words."""
    return of_each(views, lambda _, view: bullets(view.diagnosis), _not_yet)


# --- curves, placebos, time ---


def over_the_run(views: Sequence[View]) -> Markup:
    """The charts of each run; of several, first their means in one."""
    return joined((_together(views) if len(views) > 1 else NOTHING, of_each(views, curves, _not_yet)))


def _together(views: Sequence[View]) -> Markup:
    """The means of all runs of a task in one chart, and what their objectives keep, each in one."""
    tasks: dict[str, list[View]] = {}
    for view in views:
        tasks.setdefault(view.about.get("task", ""), []).append(view)
    several = {task: found for task, found in tasks.items() if len(found) > 1}
    return joined(joined((_means(task, found), *_kept(task, found))) for task, found in several.items())


def _means(task: str, views: Sequence[View]) -> Markup:
    lines = [Series(v.name, moving([(r["generation"], r.get("mean")) for r in v.rows]), i) for i, v in enumerate(views)]
    across, aims = " or ".join(sorted({view.words.unit for view in views})), {view.words.aim for view in views}
    aim = aims.pop() if len(aims) == 1 else "what each was trained for"
    chart = Chart(f"{task}: mean {aim} while training, run by run", across, aim, lines)
    return charts.drawn(chart, f"{OF_MEANS}. A {across} of one run may take more completions than another's. {AT_COST}")


def _kept(task: str, views: Sequence[View]) -> Iterator[Markup]:
    """Of what two runs or more keep under one name; that of one alone is among its own charts."""
    for name, runs in Counter(name for view in views for name in kept_names(view)).items():
        if runs > 1:
            yield charts.drawn(kept_chart(name, f"run by run, of {task}" if task else "run by run", views))


def placebo(views: Sequence[View]) -> Markup:
    """The run beside what its noise alone brings; nothing where nobody measured it."""
    return of_each(views, _placebo, _why_no_placebos)


def _placebo(_: int, view: View) -> Markup:
    found = view.placebos
    if found is None:
        return NOTHING
    groups: list[tuple[str, Sequence[float], int]] = [
        ("start", [found.before], 7), ("placebos", found.placebos, 3), ("this run", [found.real], 2),
    ]  # fmt: skip
    groups += [] if found.flip is None else [("signs flipped", [found.flip], 5)]
    drawn = charts.strip(
        f"{_called(found.name).capitalize()} on the test split, of the run and of its noise alone", groups
    )
    return joined((drawn, bullets(found.lines)))


def time(views: Sequence[View]) -> Markup:
    """Where the seconds went."""
    return of_each(views, timings, _not_yet)


# --- results ---


def measures(views: Sequence[View]) -> Markup:
    """The test split before and after."""
    return of_each(views, _measures, _not_yet)


def _measures(_: int, view: View) -> Markup:
    if not view.measures:
        return NOTHING
    has_placebo = any(measure.placebo is not None for measure in view.measures)
    count = 0 if view.placebos is None else len(view.placebos.placebos)
    drift = [f"mean of {count} placebos" if count > 1 else "1 placebo"] if has_placebo else []
    header = ("measure", "before", "after", "change", "95 % interval", *drift)
    rows = [(_called(m.name), *_cells(m), *([_value(m.name, m.placebo)] if has_placebo else [])) for m in view.measures]
    caption = "Test split; the change of a share is in points, its interval over examples"
    return table(caption, header, rows)


def _cells(measure: Measure) -> tuple[str, str, str, str]:
    """Before, after, the change and its interval."""
    change = interval = ""
    if measure.change is not None:
        mean, low, high = measure.change
        change = _signed(measure.name, mean)
        interval = f"{_signed(measure.name, low)} to {_signed(measure.name, high)}" if low < high else "none"
    elif measure.before is not None and measure.after is not None:
        change = _signed(measure.name, measure.after - measure.before)
    return _value(measure.name, measure.before), _value(measure.name, measure.after), change, interval


def _called(name: str) -> str:
    return NAMES.get(name, name.removesuffix("_share").replace("_", " "))


def _value(name: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1%}" if is_share(name) else short(value)


def _signed(name: str, change: float) -> str:
    return f"{100 * change:+.1f}" if is_share(name) else short(change, "+")


def analyses(views: Sequence[View], shared: Sequence[Analysed] = ()) -> Markup:
    """What `evoalign analyze` wrote: of several runs together, then into each run's folder."""
    level = "h3" if len(views) == 1 else "h4"
    own = of_each(views, lambda i, view: _analyses(f"{i}", view.analyses, level), _no_analysis)
    return joined((_analyses("all", shared, "h3"), own))


def _analyses(whose: str, found: Sequence[Analysed], level: str) -> Markup:
    """Files may call themselves alike, ids must not be."""
    return joined(_analysis(f"{whose}-{i}", one, level) for i, one in enumerate(found))


def _analysis(whose: str, found: Analysed, level: str) -> Markup:
    pictures = (
        tag("figure", _picture(found.name, picture.name, picture.kind, picture.data)) for picture in found.pictures
    )
    missing = tag("p", text(f"Too large for this page: {', '.join(found.left_out)}"), class_="notes")
    numbers = folded("Numbers", tag("pre", text(found.numbers)), id_=f"numbers-{whose}")
    first, more = found.sentences[:MOST_SENTENCES], found.sentences[MOST_SENTENCES:]
    rest = folded(f"{len(more)} more sentences", bullets(more), id_=f"sentences-{whose}")
    said = joined((bullets(first), rest if more else NOTHING))
    inside = (tag(level, text(found.name)), said, *pictures, missing if found.left_out else NOTHING)
    return tag("div", *inside, numbers, class_="analysis")


def _picture(of: str, name: str, kind: str, data: bytes) -> Markup:
    """An image runs no script and loads nothing, of an SVG too."""
    source = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return tag("img", src=source, alt=f"Figure {name} of the analysis {of}; the sentences say what it shows")


# --- settings and cost ---


def settings(views: Sequence[View]) -> Markup:
    """What differs first: between the runs, then from the defaults; the others folded away."""
    keys = list(dict.fromkeys(key for view in views for key in view.settings))
    if not keys:
        return NOTHING
    apart = [key for key in keys if len({view.settings.get(key) for view in views}) > 1]
    changed = [k for k in keys if k not in apart and any(v.settings.get(k) != v.defaults.get(k) for v in views)]
    others = [key for key in keys if key not in apart and key not in changed]
    parts = [
        _settings(views, apart, "Settings that differ between the runs") if apart else NOTHING,
        _settings(views, changed, "Settings that are not the default") if changed else NOTHING,
        folded(
            f"{len(others)} settings at their default", _settings(views, others, "The others"), id_="other-settings"
        ),
    ]
    return joined(parts)


def _settings(views: Sequence[View], keys: Iterable[str], caption: str) -> Markup:
    alike = all(len({view.settings.get(key, "") for view in views}) == 1 for key in keys)
    shown = views[:1] if alike else views
    header = ("setting", *(["value"] if alike else [view.name for view in shown]), "default")
    rows = [
        (
            key,
            *(view.settings.get(key, "") for view in shown),
            next((v.defaults[key] for v in views if key in v.defaults), ""),
        )
        for key in keys
    ]
    return table(caption, header, rows, words=len(header))


COSTS = {
    "prompts": "prompts", "completions": "completions", "prompt_tokens": "prompt tokens",
    "generated_tokens": "generated tokens", "forward_flops": "forward FLOPs", "backward_flops": "backward FLOPs",
    "wall_seconds": "seconds", "device_seconds": "device seconds", "peak_memory_bytes": "peak memory, bytes",
}  # fmt: skip


def _amount(value: float | None) -> str:
    return f"{value:.4g}" if value is not None and abs(value) >= 1e9 else number(value)


def budget(views: Sequence[View]) -> Markup:
    """What training and evaluation took."""
    kept = [view for view in views if view.budget]
    if not kept:
        return NOTHING
    kinds = [(view, kind) for view in kept for kind in ("training", "evaluation")]
    header = ("", *(kind if len(kept) == 1 else f"{view.name}, {kind}" for view, kind in kinds))
    rows = [
        (words, *(_amount(view.budget.get(kind, {}).get(name)) or "not known" for view, kind in kinds))
        for name, words in COSTS.items()
    ]
    return table("What it took", header, rows)
