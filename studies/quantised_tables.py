# SPDX-License-Identifier: Apache-2.0
"""Tables of docs/results/quantised.md, from rows of methods.py on two bases; used by result_pages.py."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from evoalign import statistics
from methods import SETTINGS
from methods_tables import Gains, Rows, gains
from study_points import points

ROWS = Path(__file__).resolve().parent / "results" / "quantised"
BASES = {"bf16": "bfloat16", "w4a16": "W4A16"}
MARGIN = 1 / 3
"""Share of the mean gain in bfloat16."""


def tables() -> Mapping[str, Iterator[str]]:
    """Return the tables of the page."""
    return {"gains": _gains(), "differences": _differences(), "courses": _courses()}


def kept(setting: str, base: str) -> Rows:
    """Return the rows of a base, by seed."""
    files = sorted((ROWS / base / setting / "lora").glob("*.json"), key=lambda file: int(file.stem))
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def _by_seed(rows: Rows) -> Gains:
    """Return the mean gain over test rows, [seeds]."""
    return gains(rows).mean(axis=1)


def _gains() -> Iterator[str]:
    yield "| setting | base | seeds | before | after, by seed | gain, points (95 %) | placebos: mean and best gain |"
    yield "|---|---|---:|---:|---|---|---|"
    for setting in SETTINGS:
        for base, name in BASES.items():
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
    yield "| setting | seeds | gain on W4A16 less gain in bfloat16, points (95 %) | margin | by the plan |"
    yield "|---|---:|---|---:|---|"
    for setting in SETTINGS:
        pairs = {base: {row["job"]: row for row in kept(setting, base)} for base in BASES}
        jobs = [job for job in pairs["bf16"] if job in pairs["w4a16"]]
        if len(jobs) < statistics.FEWEST:
            continue
        whole, packed = (_by_seed([pairs[base][job] for job in jobs]) for base in BASES)
        found, margin = statistics.mean(packed - whole), MARGIN * float(whole.mean())
        assert found.low is not None and found.high is not None
        verdict = "worse" if found.high < 0 else "no worse by the margin" if found.low > -margin else "not shown"
        yield f"| {setting} | {len(jobs)} | {points(found)} | {100 * margin:.1f} | {verdict} |"


def _courses() -> Iterator[str]:
    yield "| setting | base | mean reward of the members, by fifths of the run | | | | |"
    yield "|---|---|---:|---:|---:|---:|---:|"
    for setting in SETTINGS:
        for base, name in BASES.items():
            if rows := kept(setting, base):
                means = np.array([[point["mean"] for point in row["course"]] for row in rows]).mean(axis=0)
                fifths = [part.mean() for part in np.array_split(means, 5)]
                yield f"| {setting} | {name} | {' | '.join(f'{part:.3f}' for part in fifths)} |"
