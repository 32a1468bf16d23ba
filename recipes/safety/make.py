# SPDX-License-Identifier: Apache-2.0
"""Make what the laptop version of the safety task needs: data, a tiny base model, and scorers that learn from pairs.

    python recipes/safety/make.py data --to data/tasks/safety
    python recipes/safety/make.py base --to DIR/base
    python recipes/safety/make.py scorers --base DIR/base --half 0 --to DIR         reward and cost, to train with
    python recipes/safety/make.py scorers --base DIR/base --half 1 --to DIR/judge   from other data, to judge with

Every random draw comes from `--seed`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import corpus

SIZES = {"train": 1000, "validation": 400, "test": 400}


def data(to: Path, seed: int) -> None:
    """Rows of the three splits, each of deeds of its own."""
    to.mkdir(parents=True, exist_ok=True)
    for split, count in SIZES.items():
        rows = corpus.rows(count, f"{seed}/{split}", corpus.of_split(split))
        once = {row["prompt"]: row for row in rows}
        text = "".join(json.dumps(row) + "\n" for row in once.values())
        (to / f"{split}.jsonl").write_text(text, encoding="utf-8")
        print(f"{split}: {len(once)} prompts about {len(corpus.of_split(split))} deeds")


def texts(count: int, seed: str) -> list[tuple[str, str]]:
    """What the base model reads: conversations about deeds of all splits, answered by its habits."""
    rng = random.Random(seed)
    asked = (rng.choice(corpus.ALL) for _ in range(count))
    return [(corpus.PROMPT_FORM.format(prompt=corpus.prompt_of(rng, a)), " " + corpus.said(rng, a).text) for a in asked]


def main() -> None:
    """Read the arguments; make one of the three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("data", "base", "scorers"))
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0, help="0: 2,000 of the base model, 2,500 of a scorer")
    parser.add_argument("--base", type=Path, help="of scorers: whose tokenizer and body they begin with")
    parser.add_argument("--half", type=int, choices=(0, 1), default=0, help="of scorers: which deeds they learn from")
    parser.add_argument("--device", default="cpu", help="where models learn")
    given = parser.parse_args()
    if given.what == "data":
        data(given.to, given.seed)
        return
    import fit

    if given.what == "base":
        fit.base(given.to, given.seed, given.steps or 2000, given.device)
    elif given.base is None:
        parser.error("scorers need --base")
    else:
        fit.scorers(given.base, given.to, given.half, given.seed, given.steps or 2500, given.device)


if __name__ == "__main__":
    main()
