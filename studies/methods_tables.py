# SPDX-License-Identifier: Apache-2.0
"""Tables of docs/results/methods.md, from the rows of methods.py; used by result_pages.py.

Intervals are for new seeds and new test rows at once. A method without rows has no line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from scipy.optimize import brentq

import joint
import thickets
from evoalign import statistics
from methods import METHODS, PROBE, ROWS, SETTINGS
from study_points import points

Rows = list[dict[str, Any]]
Gains = np.ndarray[Any, np.dtype[np.float64]]


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


def best(setting: str, method: str) -> tuple[str, Rows]:
    """Return the width of a method with the largest mean gain on validation rows, of those with three seeds."""
    measure = SETTINGS[setting].measure
    tried = {name: kept(setting, name) for name in METHODS if name in (method, f"{method}_x2", f"{method}_x4")}

    def gain(name: str) -> float:
        return float(
            np.mean([row["validation"]["after"][measure] - row["validation"]["before"][measure] for row in tried[name]])
        )

    name = max((name for name, rows in tried.items() if len(rows) >= 3), key=gain)
    return name, tried[name]


def gains(rows: Rows) -> Gains:
    """Return after less before, [seeds, test rows]."""
    return np.array([np.subtract(row["after"]["each"], row["before"]["each"]) for row in rows])


def _methods(setting: str) -> Iterator[str]:
    yield (
        "| method | seeds | base | after, by seed | gain, points (95 %) | mean placebo | cut off, base and after | "
        "completions | seconds |"
    )
    yield "|---|---:|---:|---|---|---:|---:|---:|---:|"
    for method in METHODS:
        rows = kept(setting, method)
        if not rows:
            continue
        base = float(np.mean([np.mean(row["before"]["each"]) for row in rows]))
        after = ", ".join(f"{100 * np.mean(row['after']['each']):.1f}" for row in rows)
        placebos = [value - float(np.mean(row["before"]["each"])) for row in rows for value in row["placebos"]]
        cut = (np.mean([row[when]["measures"]["truncated_share"] for row in rows]) for when in ("before", "after"))
        completions, seconds = (
            np.mean([row["cost"][name] for row in rows]) for name in ("completions", "wall_seconds")
        )
        yield (
            f"| {method} | {len(rows)} | {100 * base:.1f} | {after} | {points(statistics.crossed(gains(rows)))} | "
            f"{f'{100 * np.mean(placebos):+.1f} ({len(placebos)})' if placebos else '-'} | "
            f"{', '.join(f'{100 * share:.0f} %' for share in cut)} | {completions:,.0f} | {seconds:.0f} |"
        )


def _contrasts(one: str, other: str) -> Iterator[str]:
    yield (
        f"| setting | {one} | {other} | seeds | difference, points (95 %) | over test rows | "
        f"share of {other}'s gain (95 %) |"
    )
    yield "|---|---|---|---:|---|---|---|"
    for setting in SETTINGS:
        (name, ours), (name_of_other, theirs) = best(setting, one), best(setting, other)
        gap = statistics.crossed_difference(gains(ours), gains(theirs), paired=False)
        rows = statistics.mean(gains(ours).mean(axis=0) - gains(theirs).mean(axis=0))
        yield (
            f"| {setting} | {name} | {name_of_other} | {len(ours)} and {len(theirs)} | {points(gap)} | "
            f"{points(rows)} | {_share(gains(ours), gains(theirs))} |"
        )


def _share(top: Gains, bottom: Gains) -> str:
    """Format mean(top) / mean(bottom) with Fieller's interval: all r for which the interval of top - r bottom has 0."""
    if (below := statistics.crossed(bottom)).low is None or below.low <= 0:
        return "-"
    share = float(top.mean() / bottom.mean())

    def end(r: float, which: int) -> float:
        found = statistics.crossed_difference(top, r * bottom, paired=False)
        assert found.low is not None and found.high is not None
        return (found.low, found.high)[which]

    low, high = (brentq(end, share - 9, share + 9, args=(which,)) for which in (0, 1))
    return f"{share:.2f} ({low:.2f} to {high:.2f})"


def _widths() -> Iterator[str]:
    yield (
        "| setting | method | width: expected gain of a generation in points, or rate: gain of a short run | chosen | "
        "why |"
    )
    yield "|---|---|---|---:|---|"
    for setting in SETTINGS:
        for method in METHODS:
            file = ROWS / setting / method / f"{PROBE}.json"
            if file.is_file():
                found = json.loads(file.read_text(encoding="utf-8"))
                tried = [_tried(t) for t in found["tried"]]
                yield f"| {setting} | {method} | {', '.join(tried)} | {found['width']:g} | {_why(found['reason'])} |"


def _why(reason: str) -> str:
    known = {"recommended": "recommended", "undecided": "the trial it advises", "nothing": "best sound one"}
    return known.get(reason.split(":")[0].split()[0], reason)


def _tried(one: Mapping[str, Any]) -> str:
    gain = "-" if one["gain"] is None else f"{100 * one['gain']:+.2f}"
    return f"{one['width']:g}: {gain}"
