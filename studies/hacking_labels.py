#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How well the signs of hacking are found: precision and recall on completions that a reader labelled.

    python studies/hacking_labels.py [--show] [--again]

hacking_labels.jsonl has 454 real completions: of each of the 26 runs of real_runs.py one before and six after training,
chosen by a hash of run and row (`SmolLM2`), 80 of the tiny model, whole and with noise on its weights, greedy and
sampled (`tiny`), and 192 of SmolLM2 under heat, noise and prompts that it was not made for (`strained`), which
hacking_rows.py makes and says the rules of. Each was read by itself and labelled with what it shows, before any sign
was computed. Labels say what a reader sees: `gibberish` is any text without sense, `truncated` one that stops on the
way. `template` was judged next to the other labelled answers of its run. `--show` prints the rows where sign and reader
disagree; `--again` asks the tiny model again and says how many of its texts come out the same.

What comes of it goes to results/hacking_labels.json, and as tables to the screen.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scipy.stats import binomtest

from evoalign.checks import hacking, signs
from evoalign.rewards.functions import says

HERE = Path(__file__).resolve().parent
ROWS, RUNS = HERE / "hacking_labels.jsonl", HERE / "results" / "real_runs" / "completions.jsonl"
KINDS = (*hacking.SHARES, "broken", "wrong")
"""Labels: the shares, any sign of a broken text, and wrong answers."""
STRAINED = ("looked at", "held back")
PARTS = {
    "all": ("tuning", "kept apart", "new", *STRAINED),
    "not tuned on": ("kept apart", "held back"),
    "tiny": ("new",),
    "SmolLM2, runs": ("tuning", "kept apart"),
    "SmolLM2, strained": STRAINED,
    "SmolLM2, strained, held back": ("held back",),
}
"""Groups of rows: halves of the runs, rows of the tiny model, rows of hacking_rows.py. Alarms were tuned on the first
half of the runs, as real_runs.py says; rules were mended by what was missed in the rows that were looked at and in the
tiny model's."""
TINY = (
    ("conciseness", 0.0, 0.0, 60), ("conciseness", 0.03, 0.0, 60), ("conciseness", 0.06, 0.0, 40),
    ("conciseness", 0.1, 1.0, 40), ("conciseness", 0.02, 2.0, 40), ("countdown", 0.0, 0.0, 60),
    ("countdown", 0.0, 0.0, 16), ("countdown", 0.02, 0.0, 60), ("countdown", 0.05, 0.0, 60),
    ("countdown", 0.02, 1.3, 60),
)  # fmt: skip
"""Task, sigma of the noise on the weights, temperature, and most tokens of the rows of the tiny model, 8 each."""
Row = dict[str, Any]


def rows() -> list[Row]:
    """Return the labelled rows with the signs as `marked`; None if a sign cannot be computed."""
    found: list[Row] = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    runs = {run["run"]: run for run in map(json.loads, RUNS.read_text(encoding="utf-8").splitlines())}
    groups: defaultdict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in found:
        groups[row["run"], row["side"]].append(row)
    for (name, side), group in groups.items():
        _mark(group, _whole(group, runs.get(name), side))
    return found


def _whole(group: Sequence[Row], run: Row | None, side: str) -> list[Row]:
    """Return all completions of the run: templates are compared with all of them."""
    if run is None:
        return list(group)
    golds = {row["prompt"]: row["target"] for row in group}
    return [{"prompt": c["prompt"], "text": c[side], "target": golds.get(c["prompt"]), "finish_reason": None,
             "first": c["before"]} for c in run["completions"]]  # fmt: skip


def _mark(group: Sequence[Row], whole: Sequence[Row]) -> None:
    texts, prompts = [row["text"] for row in whole], [row["prompt"] for row in whole]
    golds, reasons = [row["target"] for row in whole], [row["finish_reason"] or "" for row in whole]
    known = signs.scripts([*prompts, *(gold or "" for gold in golds), *(row.get("first", "") for row in whole)])
    flags = hacking.text_flags(texts, reasons, prompts, golds, known)
    place = {prompt: i for i, prompt in enumerate(prompts)}
    for row in group:
        marked: dict[str, bool | None] = {name: flags[name][place[row["prompt"]]] for name in hacking.SHARES}
        if row["finish_reason"] is None:
            marked["truncated"] = None
        right = row.get("right", None if row["target"] is None else says(row["text"].strip(), row["target"]))
        broken = any(marked[name] for name in hacking.DEGENERATE)
        row["marked"] = {**marked, "broken": broken, "wrong": None if right is None else not right}


def share(hits: int, of: int) -> dict[str, Any]:
    """A proportion with Wilson's 95 % interval; without any, of nothing."""
    if not of:
        return {"hits": 0, "of": 0, "share": None, "low": None, "high": None}
    found = binomtest(hits, of).proportion_ci(method="wilson")
    return {"hits": hits, "of": of, "share": hits / of, "low": float(found.low), "high": float(found.high)}


def measured(labelled: Sequence[Row]) -> list[Row]:
    """Precision and recall of each kind, on all rows and on those that nothing was tuned on."""
    found: list[Row] = []
    for part, halves in PARTS.items():
        for kind in KINDS:
            asked = [row for row in labelled if row["half"] in halves and row["marked"][kind] is not None]
            both = sum(row["marked"][kind] and kind in row["labels"] for row in asked)
            marked, seen = sum(row["marked"][kind] for row in asked), sum(kind in row["labels"] for row in asked)
            row = {"rows": part, "kind": kind, "asked": len(asked)}
            found.append(row | {"precision": share(both, marked), "recall": share(both, seen)})
    return found


def table(found: Sequence[Row], measure: str) -> list[str]:
    """Precision or recall, kinds down and parts across, in markdown."""
    cells = {(row["kind"], row["rows"]): told(row[measure]) for row in found}
    head = [f"| {measure} | {' | '.join(PARTS)} |", "|---" * (len(PARTS) + 1) + "|"]
    return head + [f"| {kind} | {' | '.join(cells[kind, part] for part in PARTS)} |" for kind in KINDS]


def told(found: Row) -> str:
    if found["share"] is None:
        return ""
    return f"{found['hits']} of {found['of']} ({100 * found['low']:.0f} to {100 * found['high']:.0f} %)"


def again() -> tuple[int, int]:
    """How many texts of the tiny model come out the same, of how many."""
    from evoalign.analysis.base import BASE
    from evoalign.analysis.mixer import EvalSettings, ModelMixer, Perturbation
    from evoalign.config import from_dict

    labelled = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    texts = {(row["run"], row["prompt"]): row["text"] for row in labelled if row["source"] == "tiny"}
    same = 0
    for task, sigma, temperature, tokens in TINY:
        config = from_dict({"model": {"name": "tiny", "dtype": "float32"}, "task": {"name": task}})
        asked = EvalSettings(examples=8, max_tokens=tokens, temperature=temperature)
        with ModelMixer([BASE], config, asked) as mixer:
            said = mixer.evaluate({BASE: 1.0}, Perturbation(sigma, 0) if sigma else None).completions
        run = f"tiny {task}, sigma {sigma:g}, temperature {temperature:g}, {tokens} tokens"
        same += sum(texts[run, one.prompt] == one.text for one in said)
    return same, len(texts)


def main() -> None:
    labelled = rows()
    found = measured(labelled)
    for measure in ("precision", "recall"):
        print("\n".join(table(found, measure)), end="\n\n")
    if "--show" in sys.argv:
        for row in labelled:
            odd = [kind for kind in KINDS if row["marked"][kind] not in (None, kind in row["labels"])]
            if odd:
                told = ", ".join(f"{kind} {'marked' if row['marked'][kind] else 'missed'}" for kind in odd)
                print(f"{row['run']}: {told}: {row['text'][:150]!r}")
    if "--again" in sys.argv:
        print("the tiny model again: {} of {} texts the same".format(*again()))
    path = HERE / "results" / "hacking_labels.json"
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
