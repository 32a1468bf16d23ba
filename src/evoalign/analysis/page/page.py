# SPDX-License-Identifier: Apache-2.0
"""The page itself: parts in their order, one style and one script, and the policy that allows these two alone."""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path

from evoalign.analysis.page import completions, sections
from evoalign.analysis.page.markup import NOTHING, Markup, joined, tag, text
from evoalign.analysis.page.view import Analysed, View
from evoalign.report.tables import listed

GENERATOR = "evoalign report"
MARK = f'<meta name="generator" content="{GENERATOR}">'
"""By which a page of ours is known."""

PARTS: dict[str, tuple[str, Callable[[Sequence[View]], Markup]]] = {
    "warnings": ("Warnings", sections.warnings),
    "summary": ("Summary", sections.summary),
    "diagnosis": ("Diagnosis", sections.diagnosis),
    "results": ("Test split", sections.measures),
    "curves": ("Curves", sections.over_the_run),
    "placebo": ("Signal beside drift", sections.placebo),
    "analyses": ("Analyses", sections.analyses),
    "completions": ("Completions", lambda views: NOTHING),
    "time": ("Time", sections.time),
    "settings": ("Settings", sections.settings),
    "budget": ("Budget", sections.budget),
}


def render(views: Sequence[View], live: str | None = None, shared: Sequence[Analysed] = ()) -> str:
    """The whole page. `live`: what stands for its state; then it asks its own server for the next one.

    `shared`: analyses of several runs together.
    """
    data, notes = completions.embedded(views)
    made = {name: (heading, part(views)) for name, (heading, part) in PARTS.items()}
    made["completions"] = ("Completions", completions.explorer(views, notes))
    made["analyses"] = ("Analyses", sections.analyses(views, shared))
    made = {name: found for name, found in made.items() if found[1]}
    title = listed([view.name for view in views] if len(views) < 4 else [views[0].name, f"{len(views) - 1} more runs"])
    style, script = _asset("style.css"), _asset("script.js")
    head = joined((
        Markup('<meta charset="utf-8">'),
        Markup(MARK),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{policy(live=live is not None)}">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup('<meta name="referrer" content="no-referrer">'),
        Markup('<link rel="icon" href="data:,">'),
        tag("title", text(f"{title}: evoalign report")),
        Markup(f"<style>{style}</style>"),
    ))  # fmt: skip
    body = joined((
        Markup('<a class="skip" href="#main">To the report</a>'),
        _header(title, made, live=live is not None),
        tag("main", *(_part(name, heading, inside) for name, (heading, inside) in made.items()), id="main"),
        _footer(views),
        data,
        Markup(f"<script>{script}</script>"),
    ))  # fmt: skip
    root = "" if live is None else f' data-tag="{text(live)}"'
    return f'<!DOCTYPE html>\n<html lang="en"{root}><head>{head}</head><body>{body}</body></html>\n'


def is_ours(file: Path) -> bool:
    """Whether a file is such a page, which may be written over."""
    try:
        with file.open("rb") as found:
            return MARK.encode() in found.read(4096)
    except OSError:
        return False


def policy(*, live: bool) -> str:
    """Nothing loads, but the page's own style and script, and pictures that lie in it."""
    own = {
        f"{kind}-src": f"'{_hash(_asset(name))}'" for kind, name in (("style", "style.css"), ("script", "script.js"))
    }
    rules = {"default-src": "'none'", **own, "img-src": "data:", "base-uri": "'none'", "form-action": "'none'"}
    rules |= {"connect-src": "'self'"} if live else {}
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _header(title: str, made: dict[str, tuple[str, Markup]], *, live: bool) -> Markup:
    links = (tag("li", tag("a", text(heading), href=f"#{name}")) for name, (heading, _) in made.items())
    return tag(
        "header",
        tag("h1", text(title)),
        tag("button", text("Theme"), type="button", id="theme", hidden=""),
        tag("p", text("Follows the run."), id="live", role="status") if live else NOTHING,
        tag("nav", tag("ul", *links), aria_label="Parts of the report", data_part="nav", data_hash=_short(*made)),
    )


def _footer(views: Sequence[View]) -> Markup:
    """When it was made, and what was not there then and may be now."""
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    gone = {
        "placebos": [v.name for v in views if v.placebos is None and v.method == "ES"],
        "analyses": [v.name for v in views if not v.analyses],
    }
    some = len(views) > 1
    lacks = " and ".join(f"no {k}{f' of {listed(names)}' if some else ''}" for k, names in gone.items() if names)
    said = f"Made by evoalign at {now} of what lay in the run director{'ies' if some else 'y'} then"
    said += f"; {lacks} had been made. " if lacks else ". "
    said += "What is added later is in the page that evoalign report writes anew."
    return tag("footer", tag("p", text(said)), data_part="footer", data_hash=_short(said))


def _part(name: str, heading: str, inside: Markup) -> Markup:
    title = tag("h2", text(heading), id=f"{name}-heading")
    attributes = {"aria_labelledby": f"{name}-heading", "data_part": name, "data_hash": _short(inside)}
    return tag("section", title, inside, id=name, **attributes)


def _short(*words: str) -> str:
    return hashlib.sha256("\0".join(words).encode("utf-8", "backslashreplace")).hexdigest()[:16]


def _hash(found: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(found.encode()).digest()).decode()}"


@functools.cache
def _asset(name: str) -> str:
    return resources.files(__package__ or "").joinpath(name).read_text(encoding="utf-8").replace("\r\n", "\n")
