#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Agreement of the rules for kinds of refusal with labels: recall, precision and Cohen's kappa, with 95 % intervals.

    python studies/refusal_labels.py [--show] [FILE ...]

A FILE has a JSON object per line with `text` and `kind` (template, with_help, citing, or null for no refusal). Without
one, these are refusal_labels.jsonl (125 short answers; since the rules were extended, neither half is held out) and
tests/tasks/safety/refusals.jsonl (answers in the forms of base and chat models; the sets `first` and `second` were
labelled before the rules for these forms existed, each later set before the rules were extended to it). `--show` prints
the rows on which rules and labels differ.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evoalign.tasks.refusals import KINDS, kind_of

HERE = Path(__file__).resolve().parent
FILES = (HERE / "refusal_labels.jsonl", HERE.parent / "tests" / "tasks" / "safety" / "refusals.jsonl")
RESULTS = HERE / "results" / "refusal_labels.json"
DRAWS, SEED = 2000, 0
Pair = tuple[str | None, str | None]
"""The label and the kind that the rules find."""


def pairs_of(path: Path) -> dict[str, list[tuple[Pair, str]]]:
    """Return the pairs with their texts, by the value of `half` or `set`."""
    found: dict[str, list[tuple[Pair, str]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row: dict[str, Any] = json.loads(line)
        if row["kind"] not in (*KINDS, None):
            raise SystemExit(f"{path}: kind is {row['kind']!r}; give one of {', '.join(KINDS)}, or null")
        pair = (row["kind"], kind_of(row["text"]))
        found.setdefault(str(row.get("half") or row.get("set") or "all"), []).append((pair, row["text"]))
    return found


def kappa(pairs: Sequence[tuple[Any, Any]]) -> float:
    """Return Cohen's kappa: agreement beyond what the frequencies alone give."""
    count = len(pairs)
    same = sum(one == other for one, other in pairs) / count
    ours, theirs = (Counter(pair[side] for pair in pairs) for side in (0, 1))
    chance = sum(ours[kind] * theirs[kind] for kind in ours) / count**2
    return (same - chance) / (1 - chance) if chance < 1 else 1.0


def with_draws(pairs: Sequence[tuple[Any, Any]]) -> dict[str, float]:
    """Return kappa with its bootstrap interval over answers."""
    random = np.random.default_rng(SEED)
    drawn = [kappa([pairs[i] for i in random.integers(len(pairs), size=len(pairs))]) for _ in range(DRAWS)]
    low, high = np.quantile(drawn, [0.025, 0.975]).tolist()
    return {"kappa": kappa(pairs), "low": low, "high": high}


def wilson(hits: int, count: int) -> dict[str, float | int | None]:
    """Return a share with Wilson's interval."""
    if not count:
        return {"share": None, "n": 0, "low": None, "high": None}
    share, z = hits / count, 1.959964
    centre, side = share + z**2 / (2 * count), z * (share * (1 - share) / count + z**2 / (4 * count**2)) ** 0.5
    low, high = ((centre + sign * side) / (1 + z**2 / count) for sign in (-1, 1))
    return {"share": share, "n": count, "low": low, "high": high}


def measured(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return accuracy over kinds, recall and precision of refusing at all, and kappa of each kind against the rest."""

    def scored(hits: Sequence[tuple[bool, bool]]) -> dict[str, Any]:
        both = sum(label and mark for label, mark in hits)
        recall = wilson(both, sum(label for label, _ in hits))
        return {"recall": recall, "precision": wilson(both, sum(mark for _, mark in hits)), "kappa": with_draws(hits)}

    kinds = {kind: scored([(label == kind, mark == kind) for label, mark in pairs]) for kind in KINDS}
    return {
        "answers": len(pairs),
        "accuracy": wilson(sum(label == mark for label, mark in pairs), len(pairs)),
        "kappa": with_draws(pairs),
        "refuses": scored([(label is not None, mark is not None) for label, mark in pairs]),
        **kinds,
    }


def shown(found: dict[str, Any]) -> str:
    """Return a share or a kappa with its interval."""
    centre = found.get("share", found.get("kappa"))
    return "no answers" if centre is None else f"{centre:.2f} ({found['low']:.2f} to {found['high']:.2f})"


def main() -> None:
    files = [Path(one) for one in sys.argv[1:] if not one.startswith("--")]
    results: dict[str, Any] = {}
    for path in files or FILES:
        sets = pairs_of(path)
        everything = [one for rows in sets.values() for one in rows]
        for name, rows in (*sets.items(), *([("all", everything)] if len(sets) > 1 else [])):
            found = measured([pair for pair, _ in rows])
            results.setdefault(path.name, {})[name] = found
            print(f"{path.name} {name}: {found['answers']} answers, kinds right {shown(found['accuracy'])}")
            for what in ("refuses", *KINDS):
                print(f"  {what}: " + ", ".join(f"{one} {shown(value)}" for one, value in found[what].items()))
        for (label, mark), text in everything if "--show" in sys.argv else ():
            if label != mark:
                print(f"{label} as {mark}: {text}")
    if not files:
        RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
