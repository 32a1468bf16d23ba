# SPDX-License-Identifier: Apache-2.0
"""The report page: page.html.jinja with one style, one script, and a policy that allows these two only.

Completions are embedded as JSON, which the page's script shows as text. If they are too large for a browser, the
longest texts are cut first; rows are left out last, and never one of the first `LEAST` of a run.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from evoalign.analysis.compare.runs import Completion
from evoalign.analysis.page import charts, curves
from evoalign.analysis.page.view import Analysed, Measure, Pair, Placebos, Table, View
from evoalign.report.tables import NAMES, is_share, listed, visible
from evoalign.transcripts import readable

MARK = Markup('<meta name="generator" content="evoalign report">')
"""Element by which a report is recognised."""
PARTS = {
    "warnings": "Warnings",
    "summary": "Summary",
    "diagnosis": "Diagnosis",
    "results": "Test split",
    "curves": "Curves",
    "placebo": "Signal and drift",
    "analyses": "Analyses",
    "completions": "Completions",
    "time": "Time",
    "settings": "Settings",
    "budget": "Budget",
}
STATES = {
    "done": "done",
    "measuring": "trained; placebos and other measurements are not finished",
    "unfinished": "not finished",
}
MOST_SENTENCES = 8
"""Sentences of an analysis before its figures; further ones are folded."""
MOST_BYTES = 3_000_000
"""Largest JSON of the completions of all runs."""
LEAST = 200
"""Rows of each run that are always in the page."""
LENGTHS = (20_000, 4_000, 1_500, 600)
"""Characters of a text; the next value is used if not all rows fit."""
FILTERS: dict[str, tuple[str, dict[str, str]]] = {
    "right": (
        "Right by gold",
        {"": "any", "gained": "became right", "lost": "became wrong", "right": "right after", "wrong": "wrong after"},
    ),
    "changed": ("Text", {"": "any", "changed": "changed", "same": "the same"}),
    "reward": ("Reward", {"": "any", "rose": "rose", "fell": "fell", "equal": "did not change"}),
    "end": ("Ended", {"": "any", "length": "cut off after", "empty": "empty after"}),
    "order": (
        "Order",
        {
            "": "as asked",
            "worst": "lowest reward first",
            "best": "highest reward first",
            "gain": "largest gain first",
            "loss": "largest loss first",
            "long": "longest first",
        },
    ),
}
"""Filters that the script knows: label, and values with their labels."""
COSTS = {
    "prompts": "prompts",
    "completions": "completions",
    "prompt_tokens": "prompt tokens",
    "generated_tokens": "generated tokens",
    "forward_flops": "forward FLOPs",
    "backward_flops": "backward FLOPs",
    "wall_seconds": "seconds",
    "device_seconds": "device seconds",
    "peak_memory_bytes": "peak memory, bytes",
}


def lines_visible(text: object) -> str:
    """Return text with its line breaks kept and all other control characters written as escapes."""
    return "\n".join(map(visible, str(text).split("\n")))


def render(views: Sequence[View], live: str | None = None, shared: Sequence[Analysed] = ()) -> str:
    """Return the whole page. `live` is the tag of its state, with which the page polls its server for changes.

    `shared` are analyses of several runs.
    """
    data, notes = embedded(views)
    title = listed([view.name for view in views] if len(views) < 4 else [views[0].name, f"{len(views) - 1} more runs"])
    template = environment().get_template("page.html.jinja")
    return template.render(
        views=views,
        shared=shared,
        live=live,
        title=title,
        mark=MARK,
        policy=Markup(policy(live=live is not None)),
        style=Markup(_asset("style.css")),
        script=Markup(_asset("script.js")),
        data=data,
        notes=notes,
        has_completions=any(view.completions for view in views),
        filters=_filters(views),
        headings=PARTS,
        most_sentences=MOST_SENTENCES,
        settings=_settings(views),
        budget=_budget(views),
        states=STATES,
        measures_table=_measures_table,
        runs_table=_runs_table,
        placebo_chart=_placebo_chart,
        curves=curves.curves,
        curves_table=curves.numbers,
        together=curves.together,
        timings=curves.timings,
        missing={
            "placebos": [v.name for v in views if v.placebos is None and v.method == "ES"],
            "analyses": [v.name for v in views if not v.analyses],
        },
    )


@functools.cache
def environment() -> jinja2.Environment:
    """Return the templates of the page. Invisible characters are written out before a value is escaped."""
    env = jinja2.Environment(
        loader=jinja2.PackageLoader("evoalign.analysis", "page"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_shown,
        extensions=["jinja2.ext.do"],
    )
    env.filters |= {"digest": _digest, "base64": _base64, "listed": listed}
    return env


def _shown(value: object) -> object:
    return value if isinstance(value, Markup) else lines_visible(value)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def is_ours(file: Path) -> bool:
    """Whether a file is a report, which may be overwritten."""
    try:
        with file.open("rb") as found:
            return MARK.encode() in found.read(4096)
    except OSError:
        return False


def policy(*, live: bool) -> str:
    """Return the Content-Security-Policy: the page's own style and script, and embedded pictures only."""
    rules = {"default-src": "'none'"}
    for kind, name in (("style", "style.css"), ("script", "script.js")):
        digest = hashlib.sha256(_asset(name).encode()).digest()
        rules[f"{kind}-src"] = f"'sha256-{base64.b64encode(digest).decode()}'"
    rules |= {"img-src": "data:", "base-uri": "'none'", "form-action": "'none'"}
    rules |= {"connect-src": "'self'"} if live else {}
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]


@functools.cache
def _asset(name: str) -> str:
    return resources.files(__package__ or "").joinpath(name).read_text(encoding="utf-8").replace("\r\n", "\n")


def _label(name: str) -> str:
    return NAMES.get(name, name.removesuffix("_share").replace("_", " "))


def _value(name: str, value: float | None) -> str:
    return "" if value is None else f"{value:.1%}" if is_share(name) else _short(value)


def _signed(name: str, change: float) -> str:
    return f"{100 * change:+.1f}" if is_share(name) else _short(change, "+")


def _short(value: float, sign: str = "") -> str:
    """Format with three significant digits; a whole number from 1,000."""
    return f"{value:{sign},.0f}" if 999.5 <= abs(value) < 1e15 else f"{value:{sign}.3g}"


def _cells(measure: Measure) -> tuple[str, str, str, str]:
    """Return before, after, the change and its interval."""
    change = interval = ""
    if measure.change is not None:
        mean, low, high = measure.change
        change = _signed(measure.name, mean)
        interval = f"{_signed(measure.name, low)} to {_signed(measure.name, high)}" if low < high else "none"
    elif measure.before is not None and measure.after is not None:
        change = _signed(measure.name, measure.after - measure.before)
    return _value(measure.name, measure.before), _value(measure.name, measure.after), change, interval


def _measures_table(view: View) -> Table:
    count = 0 if view.placebos is None else len(view.placebos.placebos)
    drift = [f"mean of {count} placebos" if count > 1 else "1 placebo"]
    drift = drift if any(measure.placebo is not None for measure in view.measures) else []
    header = ("measure", "before", "after", "change", "95 % interval", *drift)
    rows = [(_label(m.name), *_cells(m), *([_value(m.name, m.placebo)] if drift else [])) for m in view.measures]
    return Table("Test split; the change of a share is in points, its interval over examples", header, rows)


def _runs_table(views: Sequence[View]) -> Table:
    header = ("run", "method", "before", "after", "change", "95 % interval", "mean placebo", "seconds")
    rows: list[Sequence[str]] = []
    for view in views:
        aim = view.measures[0] if view.measures else Measure("reward", None, None)
        seconds = charts.number(view.budget.get("training", {}).get("wall_seconds"))
        rows.append((view.name, view.method, *_cells(aim), _value(aim.name, aim.placebo), seconds))
    names = {view.measures[0].name for view in views if view.measures}
    name = names.pop() if len(names) == 1 else "the trained measure"
    return Table(f"{_label(name).capitalize()} on the test split, run by run", header, rows, words=2)


def _placebo_chart(found: Placebos) -> charts.Drawn | None:
    groups: list[tuple[str, Sequence[float], int]] = [
        ("start", [found.before], 7),
        ("placebos", found.placebos, 3),
        ("this run", [found.real], 2),
    ]
    groups += [] if found.flip is None else [("signs flipped", [found.flip], 5)]
    return charts.strip(f"{_label(found.name).capitalize()} on the test split, of the run and its placebos", groups)


def _settings(views: Sequence[View]) -> dict[str, Table]:
    """Return tables by caption: what differs between the runs, what differs from the defaults, the others."""
    keys = list(dict.fromkeys(key for view in views for key in view.settings))
    apart = [key for key in keys if len({view.settings.get(key) for view in views}) > 1]
    changed = [k for k in keys if k not in apart and any(v.settings.get(k) != v.defaults.get(k) for v in views)]
    rest = [key for key in keys if key not in apart and key not in changed]
    captions = ("Settings that differ between the runs", "Settings that are not the default", "The others")
    groups = zip(captions, (apart, changed, rest), strict=True)
    return {caption: _settings_table(views, group, caption) for caption, group in groups} if keys else {}


def _settings_table(views: Sequence[View], keys: Iterable[str], caption: str) -> Table:
    alike = all(len({view.settings.get(key, "") for view in views}) == 1 for key in keys)
    shown = views[:1] if alike else views
    header = ("setting", *(["value"] if alike else [view.name for view in shown]), "default")
    rows: list[Sequence[str]] = []
    for key in keys:
        default = next((v.defaults[key] for v in views if key in v.defaults), "")
        rows.append((key, *(view.settings.get(key, "") for view in shown), default))
    return Table(caption, header, rows, words=len(header))


def _budget(views: Sequence[View]) -> Table | None:
    kept = [view for view in views if view.budget]
    kinds = [(view, kind) for view in kept for kind in ("training", "evaluation")]
    header = ("", *(kind if len(kept) == 1 else f"{view.name}, {kind}" for view, kind in kinds))
    rows: list[Sequence[str]] = []
    for name, label in COSTS.items():
        cells: list[str] = []
        for view, kind in kinds:
            value = view.budget.get(kind, {}).get(name)
            large = value is not None and abs(value) >= 1e9
            cells.append(f"{value:.4g}" if large else charts.number(value) or "not known")
        rows.append((label, *cells))
    return Table("Cost", header, rows) if kept else None


def embedded(views: Sequence[View]) -> tuple[Markup, list[str]]:
    """Return a block of JSON for the script, and sentences about what was cut or left out."""
    room = MOST_BYTES // max(1, sum(bool(view.completions) for view in views))
    runs, notes = list[str](), list[str]()
    for view in views:
        rows, length = _fitting(view.completions, room)
        runs.append(f'{{"name":{_json(lines_visible(view.name))},"rows":[{",".join(rows)}]}}')
        notes += _notes(view, len(rows), length, named=len(views) > 1)
    return Markup(f'<script type="application/json" id="completions-data">[{",".join(runs)}]</script>'), notes


def _fitting(pairs: Sequence[Pair], room: int) -> tuple[list[str], int]:
    """Return the rows as JSON, and the number of characters to which texts are cut."""
    for length in LENGTHS:
        rows = [_json(_row(pair, length)) for pair in pairs]
        if sum(map(len, rows)) <= room:
            return rows, length
    kept, size = list[str](), 0
    for row in (_json(_row(pair, LENGTHS[-1])) for pair in pairs):
        size += len(row)
        if len(kept) >= LEAST and size > room:
            break
        kept.append(row)
    return kept, LENGTHS[-1]


def _notes(view: View, shown: int, length: int, *, named: bool) -> Iterator[str]:
    run = f"of {view.name} " if named else ""
    if shown < len(view.completions):
        count = f"{shown:,} of the {len(view.completions):,} completions"
        yield f"{count} {run}are in this page; results/completions has all"
    texts = [t for p in view.completions[:shown] for t in (p.prompt, *(a.text for a in (p.before, p.after) if a))]
    cut = sum(len(text) > length for text in texts)
    if cut:
        yield f"{cut:,} texts {run}are cut to {length:,} characters; results/completions has all of them"


def _row(pair: Pair, length: int) -> dict[str, Any]:
    """Return a row as the script reads it: k key, p prompt, g gold, b before, a after."""

    def cut(text: str) -> str:
        more = len(text) - length
        return lines_visible(text) if more <= 0 else f"{lines_visible(text[:length])} [... {more:,} more characters]"

    start = max(0, len(pair.prompt) - length)  # the question is at the end, after a system message
    skipped = f"[{start:,} characters ...] " if start else ""
    row: dict[str, Any] = {"k": pair.key, "p": skipped + lines_visible(pair.prompt[start:])}
    if pair.target is not None:
        row["g"] = cut(pair.target)
    sides: Mapping[str, Completion | None] = {"b": pair.before, "a": pair.after}
    for name, one in sides.items():
        if one is not None:
            right = {} if one.right is None else {"k": int(one.right)}
            end = lines_visible(one.finish_reason[:40])
            row[name] = {"t": cut(readable(one.text)), "r": one.reward, "f": end, "n": one.tokens, **right}
    return row


def _json(found: Any) -> str:
    """Return ASCII JSON without characters that open or end an HTML element."""
    text = json.dumps(found, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _filters(views: Sequence[View]) -> dict[str, tuple[str, dict[str, str]]]:
    known = [c.right for v in views for pair in v.completions for c in (pair.before, pair.after) if c is not None]
    runs = {"": "all", **{str(i): view.name for i, view in enumerate(views)}}
    unused = {*([] if len(views) > 1 else ["run"]), *(["right"] if all(right is None for right in known) else [])}
    return {name: found for name, found in {"run": ("Run", runs), **FILTERS}.items() if name not in unused}
