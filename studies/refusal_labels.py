#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How far the rules for kinds of refusal agree with a reader: accuracy and Cohen's kappa.

    python studies/refusal_labels.py [--show]

refusal_labels.jsonl has 125 short answers that were written for it, each labelled with its kind of refusal or none
before there was any rule. The rules of `evoalign.tasks.safety` were written by the half `rules`; the half
`held_out` was never looked at for them. `--show` prints where rule and reader disagree in the half `rules`.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evoalign.tasks.safety import KINDS, kind_of

HERE = Path(__file__).resolve().parent
LABELS, RESULTS = HERE / "refusal_labels.jsonl", HERE / "results" / "refusal_labels.json"
HALVES = ("rules", "held_out")
Row = dict[str, Any]


def rows() -> list[Row]:
    """The labelled answers, with what the rules say as `found`."""
    found: list[Row] = [json.loads(line) for line in LABELS.read_text(encoding="utf-8").splitlines()]
    return [{**row, "found": kind_of(row["text"])} for row in found]


def agreement(pairs: Sequence[tuple[str | None, str | None]]) -> dict[str, float]:
    """Share of pairs that agree, and Cohen's kappa: how far that goes beyond what their frequencies alone give."""
    count = len(pairs)
    same = sum(one == other for one, other in pairs) / count
    ours, theirs = (Counter(pair[side] for pair in pairs) for side in (0, 1))
    chance = sum(ours[kind] * theirs[kind] for kind in ours) / count**2
    return {"answers": count, "accuracy": same, "kappa": (same - chance) / (1 - chance)}


def measured() -> dict[str, dict[str, Any]]:
    """Return, per half, the agreement on kinds and on refusing at all, and the recall of each kind."""
    found = rows()
    halves: dict[str, dict[str, Any]] = {}
    for half in HALVES:
        pairs = [(row["kind"], row["found"]) for row in found if row["half"] == half]
        by_kind = {
            str(kind): {
                "labelled": sum(label == kind for label, _ in pairs),
                "marked": sum(mark == kind for _, mark in pairs),
                "both": sum(label == mark == kind for label, mark in pairs),
            }
            for kind in (*KINDS, None)
        }
        refuses = [(str(label is None), str(mark is None)) for label, mark in pairs]
        halves[half] = {"kinds": agreement(pairs), "refuses": agreement(refuses), "by_kind": by_kind}
    return halves


def main() -> None:
    if "--show" in sys.argv:
        for row in rows():
            if row["half"] == HALVES[0] and row["kind"] != row["found"]:
                print(f"{row['kind']} as {row['found']}: {row['text']}")
    found = measured()
    RESULTS.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    for half, figures in found.items():
        for what in ("kinds", "refuses"):
            one = figures[what]
            print(f"{half} {what}: accuracy {one['accuracy']:.3f}, kappa {one['kappa']:.3f}, {one['answers']} answers")


if __name__ == "__main__":
    main()
