# SPDX-License-Identifier: Apache-2.0
"""Tables of docs/results/methods.md, from the rows of methods.py; used by result_pages.py.

Intervals are for new seeds and new test rows at once. A method without rows has no line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

import joint
import thickets
from evoalign import statistics
from methods import METHODS, PROBE, ROWS, SETTINGS
from study_points import points

Rows = list[dict[str, Any]]


def tables() -> Mapping[str, Iterator[str]]:
    """Return the tables of the page."""
    return {
        **{name: _methods(name) for name in SETTINGS},
        "norms": _contrasts("norms", "lowrank"),
        "thickets": thickets.table("tiny"),
        "joint": iter(joint.table().splitlines()),
        "widths": _widths(),
    }


def kept(setting: str, method: str) -> Rows:
    """Return the rows of a method's seeds, in their order."""
    files = sorted((ROWS / setting / method).glob("*.json"), key=lambda file: int(file.stem))
    found = [json.loads(file.read_text(encoding="utf-8")) for file in files if int(file.stem) < PROBE]
    return sorted(found, key=lambda row: int(row["job"].split("/")[2]))


def gains(rows: Rows) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return after less before, [seeds, test rows]."""
    return np.array([np.subtract(row["after"]["each"], row["before"]["each"]) for row in rows])


def _methods(setting: str) -> Iterator[str]:
    yield "| method | seeds | base | after, by seed | gain, points (95 %) | mean placebo | completions | seconds |"
    yield "|---|---:|---:|---|---|---:|---:|---:|"
    for method in METHODS:
        rows = kept(setting, method)
        if not rows:
            continue
        base = float(np.mean([np.mean(row["before"]["each"]) for row in rows]))
        after = ", ".join(f"{100 * np.mean(row['after']['each']):.1f}" for row in rows)
        placebos = [value - float(np.mean(row["before"]["each"])) for row in rows for value in row["placebos"]]
        completions, seconds = (
            np.mean([row["cost"][name] for row in rows]) for name in ("completions", "wall_seconds")
        )
        yield (
            f"| {method} | {len(rows)} | {100 * base:.1f} | {after} | {points(statistics.crossed(gains(rows)))} | "
            f"{f'{100 * np.mean(placebos):+.1f} ({len(placebos)})' if placebos else '-'} | "
            f"{completions:,.0f} | {seconds:.0f} |"
        )


def _contrasts(one: str, other: str) -> Iterator[str]:
    yield f"| setting | seeds | {one} less {other}, points (95 %) | over test rows | share of {other}'s gain (95 %) |"
    yield "|---|---:|---|---|---|"
    for setting in SETTINGS:
        ours, theirs = kept(setting, one), kept(setting, other)
        if len(ours) < 2 or len(theirs) < 2:
            continue
        gap = statistics.crossed_difference(gains(ours), gains(theirs), paired=False)
        rows = statistics.mean(gains(ours).mean(axis=0) - gains(theirs).mean(axis=0))
        share = statistics.ratio(gains(ours), gains(theirs)) if len(ours) == len(theirs) else None
        between = (
            "-" if share is None or share.low is None else f"{share.mean:.2f} ({share.low:.2f} to {share.high:.2f})"
        )
        yield f"| {setting} | {len(ours)} and {len(theirs)} | {points(gap)} | {points(rows)} | {between} |"


def _widths() -> Iterator[str]:
    yield "| setting | method | widths: expected gain of a generation, points | chosen |"
    yield "|---|---|---|---:|"
    for setting in SETTINGS:
        for method in METHODS:
            file = ROWS / setting / method / f"{PROBE}.json"
            if file.is_file():
                found = json.loads(file.read_text(encoding="utf-8"))
                tried = [_tried(t) for t in found["tried"]]
                yield f"| {setting} | {method} | {', '.join(tried)} | {found['width']:g} |"


def _tried(one: Mapping[str, Any]) -> str:
    gain = "-" if one["gain"] is None else f"{100 * one['gain']:+.2f}"
    return f"{one['width']:g}: {gain}"
