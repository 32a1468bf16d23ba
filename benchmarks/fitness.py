# SPDX-License-Identifier: Apache-2.0
"""Is a fitness of all answers together worth it, where it is what counts? Against ES on the mean of a reward.

The shipped model is shown made-up words, one of eight of which stands in the form "the W of W", and says whether it
does. It knows neither yes nor no: an answer with a digit in it counts as yes, any other as no.

- `f1`: ES on accuracy (the mean reward), and on macro-F1 (`task.fitness`).
- `calibration`: the first digit, d, is taken as a probability of d / 9 that it does, and none as 0. ES on accuracy (of
  p > 1/2), and on accuracy less the expected calibration error (ECE, five bins).

Both are measured on 400 other words, as unbalanced as those of training. Five seeds each; a seed has its own words, and
both ways the same. The form and sigma were chosen on seed 1000. A line of JSON for each run is added to --output as it
is done, and a second call goes on; `--table` shows the means and the differences with their 95 % intervals over seeds
(Student's t of the paired differences).

    OMP_NUM_THREADS=1 python benchmarks/fitness.py
    python benchmarks/fitness.py --table
"""

from __future__ import annotations

import argparse
import io
import json
import random
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from evoalign import statistics
from evoalign.rundir.identity import versions
from evoalign.training.train import train
from evoalign.types import Example

HERE = Path(__file__).absolute()
ROWS = HERE.parent / "results" / "fitness.jsonl"
SEEDS = range(5)
RARE, TRAIN, TEST, BATCH = 8, 256, 400, 64
ENDS = ("ed", "er", "le", "ow", "y", "en", "it", "ing")
ARMS = {
    "f1": {"accuracy": ("said_right", None), "macro-F1": ("said_right", "macro_f1")},
    "calibration": {"accuracy": ("digit_right", None), "accuracy - ECE": ("digit_right", "accuracy_less_ece")},
}
MEASURES = {"f1": ("accuracy", "macro_f1"), "calibration": ("accuracy", "brier", "ece")}


# --- what is asked and what counts ------------------------------------------------------------------------------------


def words(seed: int, count: int, known: set[str]) -> list[dict[str, str]]:
    """Rows of words that are not `known`, each `RARE`-th of them in the rare form."""
    draw, rows = random.Random(seed), list[dict[str, str]]()
    while len(rows) < count:
        stem = draw.choice("bcdfghlmnprst") + draw.choice("aeiou") + draw.choice("bdgklmnprst")
        word, is_rare = stem + draw.choice(ENDS), len(rows) % RARE == 0
        if word not in known:
            known.add(word)
            rows.append(
                {"prompt": f" the {word} of {stem}:" if is_rare else f" {word}:", "label": "yes" if is_rare else "no"}
            )
    draw.shuffle(rows)
    return rows


def said(text: str) -> str:
    """Yes where a digit is there."""
    return "yes" if re.search(r"[0-9]", text) else "no"


def probability(text: str) -> float:
    """Of the rare form, by the first digit."""
    found = re.search(r"[0-9]", text)
    return int(found[0]) / 9 if found else 0.0


def said_right(text: str, example: Example) -> float:
    return float(said(text) == example["label"])


def digit_right(text: str, example: Example) -> float:
    return float((probability(text) > 0.5) == (example["label"] == "yes"))


def macro_f1(completions: Sequence[str], examples: Sequence[Example]) -> float:
    """The mean of both classes' F1."""
    pairs = [(said(text), example["label"]) for text, example in zip(completions, examples, strict=True)]

    def f1(label: str) -> float:
        named = sum((one == label) + (wanted == label) for one, wanted in pairs)
        return 2 * sum(one == wanted == label for one, wanted in pairs) / named if named else 0.0

    return (f1("yes") + f1("no")) / 2


def brier(completions: Sequence[str], examples: Sequence[Example]) -> float:
    """Mean square of probability less truth."""
    pairs = [(probability(t), float(e["label"] == "yes")) for t, e in zip(completions, examples, strict=True)]
    return float(np.mean([(p - truth) ** 2 for p, truth in pairs]))


def ece(completions: Sequence[str], examples: Sequence[Example]) -> float:
    """Expected calibration error over five bins (Naeini et al. 2015)."""
    known = [(probability(t), float(e["label"] == "yes")) for t, e in zip(completions, examples, strict=True)]
    bins: dict[int, list[tuple[float, float]]] = {}
    for p, truth in known:
        bins.setdefault(min(4, int(5 * p)), []).append((p, truth))
    off = sum(abs(sum(p for p, _ in pairs) - sum(truth for _, truth in pairs)) for pairs in bins.values())
    return off / len(known)


def accuracy_less_ece(completions: Sequence[str], examples: Sequence[Example]) -> float:
    right = [digit_right(text, example) for text, example in zip(completions, examples, strict=True)]
    return float(np.mean(right)) - ece(completions, examples)


# --- runs -------------------------------------------------------------------------------------------------------------


def run(kind: str, arm: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train once, and measure the answers of the end."""
    reward, fitness = ARMS[kind][arm]
    known: set[str] = set()
    for name, count in (("train", TRAIN), ("test", TEST)):
        rows = words(10 * seed + (name == "test"), count, known)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"name": "custom", "train_data": str(folder / "train.jsonl"), "test_data": str(folder / "test.jsonl"),
            "batch_size": BATCH, "rewards": [f"{HERE}:{reward}"]}  # fmt: skip
    config = {
        "output_dir": str(folder / "run"), "seed": seed, "model": {"name": "tiny"},
        "lora": {"rank": 4, "alpha": 4},
        "es": {"num_generations": GENERATIONS, "population_size": 32, "sigma": SIGMA, "learning_rate": SIGMA / 2,
               "antithetic": True},
        "task": task | ({"fitness": f"{HERE}:{fitness}"} if fitness else {}),
        "evaluation": {"max_tokens": 3}, "engine": {"threads": 1}, "grader": {"isolated": False},
        "checks": {"placebo": 0, "perplexity": False, "control_every": 0}, "tracking": {"completions_every": 0},
    }  # fmt: skip
    began = time.perf_counter()
    done = train(config, console=Console(file=io.StringIO()), overwrite=True)
    test = [json.loads(line) for line in (folder / "test.jsonl").read_text().splitlines()]

    def measured(found: Any) -> dict[str, float]:
        texts = [c.text.strip() for c in found.completions]
        examples = [test[c.example] for c in found.completions]
        own = {name: globals()[name](texts, examples) for name in MEASURES[kind] if name != "accuracy"}
        return {"accuracy": found.measures["reward"], **own}

    return {
        "kind": kind, "arm": arm, "seed": seed, "before": measured(done.before), "after": measured(done.after),
        "seconds": round(time.perf_counter() - began, 1), "generations": GENERATIONS, "sigma": SIGMA,
        "command": "python benchmarks/fitness.py", "threads": torch.get_num_threads(), "versions": versions(),
    }  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> None:
    """Means over seeds, and the difference of the two arms of each kind."""
    print("| task | measure | start | ES on accuracy | ES on the fitness | difference (95 % interval over seeds) |")
    print("|---|---|---|---|---|---|")
    for kind, arms in ARMS.items():
        first, second = arms
        by = {(row["arm"], row["seed"]): row for row in rows if row["kind"] == kind}
        seeds = [s for s in SEEDS if (first, s) in by and (second, s) in by]
        for name in MEASURES[kind] if seeds else ():
            plain, own = (np.array([by[arm, s]["after"][name] for s in seeds]) for arm in (first, second))
            start = np.mean([by[first, s]["before"][name] for s in seeds])
            found = statistics.mean(own - plain)
            between = "no interval" if found.low is None else f"{found.low:+.3f} to {found.high:+.3f}"
            print(
                f"| {kind}, {len(seeds)} seeds, fitness {second} | {name} | {start:.3f} | {plain.mean():.3f} "
                f"| {own.mean():.3f} | {found.mean:+.3f} ({between}) |"
            )


GENERATIONS, SIGMA = 40, 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROWS)
    parser.add_argument("--table", action="store_true", help="show what is there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    there = arguments.output.read_text().splitlines() if arguments.output.is_file() else []
    rows = [json.loads(line) for line in there]
    done = {(row["kind"], row["arm"], row["seed"]) for row in rows}
    for kind, arm, seed in [(k, a, s) for s in SEEDS for k, arms in ARMS.items() for a in arms]:
        if arguments.table or (kind, arm, seed) in done:
            continue
        with tempfile.TemporaryDirectory() as folder:
            rows.append(run(kind, arm, seed, Path(folder)))
        with arguments.output.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
        print(json.dumps({name: rows[-1][name] for name in ("kind", "arm", "seed", "after", "seconds")}), flush=True)
    table(rows)


if __name__ == "__main__":
    main()
