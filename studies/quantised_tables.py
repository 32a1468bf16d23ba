# SPDX-License-Identifier: Apache-2.0
"""Tables of docs/results/quantised.md, from rows of methods.py on two bases; used by result_pages.py."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from evoalign import statistics
from methods import PROBE, SETTINGS
from methods import ROWS as METHODS
from methods_tables import Gains, Rows, gains
from study_points import points

ROWS = Path(__file__).resolve().parent / "results" / "quantised"
BASES: Mapping[str, tuple[Path, str]] = {
    "bf16": (ROWS / "bf16", "full precision"),
    "w4a16": (ROWS / "w4a16", "W4A16"),
    "bf16 dense": (METHODS, "full precision, in process"),
    "w4a16 dense": (ROWS / "w4a16_dense", "W4A16, in process"),
    "bf16 wide": (ROWS / "bf16_wide", "full precision, in process, twice the width"),
    "w4a16 wide": (ROWS / "w4a16_wide", "W4A16, in process, twice the width"),
    "nf4": (ROWS / "nf4", "nf4"),
}
"""Where the rows of a base are, and its name. `tiny` and `smollm2` are in process everywhere."""
PAIRS = (("w4a16", "bf16"), ("w4a16 dense", "bf16 dense"), ("w4a16 wide", "bf16 wide"), ("w4a16 wide", "bf16 dense"))
"""Bases that are compared. The plan has the first pair."""
MARGIN = 1 / 3
"""Share of the mean gain in full precision."""


def tables() -> Mapping[str, Iterator[str]]:
    """Return the tables of the page."""
    return {"gains": _gains(), "differences": _differences(), "courses": _courses()}


def kept(setting: str, base: str) -> Rows:
    """Return the rows of a base, by seed."""
    if base == "bf16 dense" and setting != "real":
        return []
    files = sorted((BASES[base][0] / setting / "lora").glob("*.json"), key=lambda file: int(file.stem))
    return [json.loads(file.read_text(encoding="utf-8")) for file in files if int(file.stem) != PROBE]


def _by_seed(rows: Rows) -> Gains:
    """Return the mean gain over test rows, [seeds]."""
    return gains(rows).mean(axis=1)


def _gains() -> Iterator[str]:
    yield "| setting | base | seeds | before | after, by seed | gain, points (95 %) | placebos: mean and best gain |"
    yield "|---|---|---:|---:|---|---|---|"
    for setting in SETTINGS:
        for base, (_, name) in BASES.items():
            rows = kept(setting, base)
            if not rows:
                continue
            before = float(np.mean([np.mean(row["before"]["each"]) for row in rows]))
            after = ", ".join(f"{100 * np.mean(row['after']['each']):.1f}" for row in rows)
            placebos = [100 * (p - float(np.mean(row["before"]["each"]))) for row in rows for p in row["placebos"]]
            yield (
                f"| {setting} | {name} | {len(rows)} | {100 * before:.1f} | {after} | "
                f"{points(statistics.mean(_by_seed(rows)))} | {np.mean(placebos):+.1f}, {max(placebos):+.1f} "
                f"({len(placebos)}) |"
            )


def _differences() -> Iterator[str]:
    yield "| setting | bases | seeds | difference of the gains, points (95 %) | margin | by the plan |"
    yield "|---|---|---:|---|---:|---|"
    for setting in SETTINGS:
        for first, second in PAIRS:
            pairs = {base: {row["job"]: row for row in kept(setting, base)} for base in (first, second)}
            jobs = [job for job in pairs[second] if job in pairs[first]]
            if len(jobs) < statistics.FEWEST:
                continue
            packed, whole = (_by_seed([pairs[base][job] for job in jobs]) for base in (first, second))
            found, margin = statistics.mean(packed - whole), MARGIN * float(whole.mean())
            assert found.low is not None and found.high is not None
            verdict = "worse" if found.high < 0 else "no worse by the margin" if found.low > -margin else "not shown"
            names = f"{BASES[first][1]} less {BASES[second][1]}"
            planned = verdict if (first, second) == PAIRS[0] else "(not in it)"
            yield f"| {setting} | {names} | {len(jobs)} | {points(found)} | {100 * margin:.1f} | {planned} |"


def _courses() -> Iterator[str]:
    yield "| setting | base | mean reward of the members, by fifths of the run | | | | |"
    yield "|---|---|---:|---:|---:|---:|---:|"
    for setting in SETTINGS:
        for base, (_, name) in BASES.items():
            if rows := kept(setting, base):
                means = np.array([[point["mean"] for point in row["course"]] for row in rows]).mean(axis=0)
                fifths = [part.mean() for part in np.array_split(means, 5)]
                yield f"| {setting} | {name} | {' | '.join(f'{part:.3f}' for part in fifths)} |"
