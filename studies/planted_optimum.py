# SPDX-License-Identifier: Apache-2.0
"""Do CMA-ES and sep-CMA-ES find an optimum that was planted in the tiny model? SGD and Adam are the controls.

A known vector in space `subspace` gives greedy completions of rows of Conciseness. Each optimizer maximises their
log-probability (task `likelihood`) from the unchanged model. An optimum counts as recovered if the reward gets 95 % of
the way from the unchanged model's to that of the planted one. Each row also has the distance from the planted vector.

    python studies/planted_optimum.py --seeds 0 1 2 3
    python studies/planted_optimum.py --table
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import evoalign
from evoalign.config import from_dict
from evoalign.rundir import checkpoint
from evoalign.setup import serve
from evoalign.types import MEAN_PLAN, Request, Sampling

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "studies" / "results" / "planted_optimum.jsonl"
QUESTIONS = ROOT / "data" / "tasks" / "conciseness" / "questions_train.json"
COUNT, TOKENS, RECOVERED = 16, 8, 0.95
SIZE, SIGMA = 0.03, 0.01
"""Standard deviation of the planted numbers, and of the noise at the start."""
RATES = {"cma": [None], "sep_cma": [None], "sgd": [0.003, 0.01, 0.03], "adam": [0.001, 0.003, 0.01]}


class Planted:
    """The tiny model with a planted vector: its completions are the rows in `folder`, which `train` learns."""

    def __init__(self, folder: Path, seed: int, dimension: int) -> None:
        self.folder = folder
        self.tree: dict[str, Any] = {
            "seed": seed, "model": {"name": "tiny", "dtype": "float32"}, "lora": {"rank": 4},
            "space": {"name": "subspace", "dimension": dimension}, "task": {"name": "likelihood", "batch_size": COUNT},
            "engine": {"device": "cpu", "decoder": "library", "threads": 1}, "report": False,
            "checks": {"control_every": 0, "canary_every": 0, "perplexity": False, "placebo": 0},
        }  # fmt: skip
        self.served = serve(from_dict(self.tree | {"es": {"sigma": SIGMA}}))
        self._start = dict(self.served.engine.state())
        self.vector = SIZE * torch.randn(dimension, generator=torch.Generator().manual_seed(seed))
        questions = [row["prompt"] for row in json.loads(QUESTIONS.read_text(encoding="utf-8"))]
        chats = [self.served.tokens.encode([{"role": "user", "content": text}]) for text in questions]
        asked = [Request(i, ids, Sampling(TOKENS), logprobs=True) for i, ids in enumerate(chats)]
        found = [r for r in self._rollouts(self.vector, asked) if r.finish_reason == "stop" and r.text.strip()]
        assert len(found) >= COUNT + 2, "too few completions end: plant another vector"
        rows = [{"prompt": questions[r.request], "target": r.text} for r in found[: COUNT + 2]]
        for name, part in (("train", rows[:COUNT]), ("test", rows[COUNT:])):
            (folder / f"{name}.json").write_text(json.dumps(part))
            self.tree["task"][f"{name}_data"] = str(folder / f"{name}.json")
        self._given = [
            Request(i, chats[r.request], Sampling(TOKENS), 0, True, r.token_ids) for i, r in enumerate(found[:COUNT])
        ]
        self.before, self.best = self.reward(0 * self.vector), self.reward(self.vector)

    def _rollouts(self, vector: torch.Tensor, requests: list[Request]) -> list[Any]:
        self.served.engine.load(self._start | {"subspace": vector})
        return sorted(self.served.engine.rollout(MEAN_PLAN, requests), key=lambda r: r.request)

    def reward(self, vector: torch.Tensor) -> float:
        """Return the mean over rows of the mean log-probability of the completion's tokens."""
        means = [math.fsum(r.logprobs) / len(r.logprobs) for r in self._rollouts(vector, self._given)]
        return sum(means) / len(means)

    def train(self, generations: int, members: int, **es: Any) -> dict[str, Any]:
        """Train from the unchanged model; return the share of the planted gain, and the mean's place."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            own = {"num_generations": generations, "population_size": members, "sigma": SIGMA, **es}
            tree = self.tree | {"output_dir": f"{folder}/run", "es": own}
            run = evoalign.train(tree, console=Console(quiet=True))
            state, slots = checkpoint.load(run.saved, self.served.layout)
        found, gain = state["subspace"], self.best - self.before
        return {
            "share": (self.reward(found) - self.before) / gain,
            "cosine": float(torch.nn.functional.cosine_similarity(found, self.vector, 0)),
            "distance": float((found - self.vector).norm() / self.vector.norm()),
            "width": SIGMA * float(slots.get("sigma:cma", 1.0)),
        }


def table(rows: list[dict[str, Any]]) -> str:
    """Return a row of Markdown per optimizer and learning rate."""
    lines = [
        "| optimizer | learning rate | recovered | share of the planted gain | relative distance |",
        "|---|---|---|---|---|",
    ]
    for name, rates in RATES.items():
        for rate in rates:
            of = [r for r in rows if (r["optimizer"], r["learning_rate"]) == (name, rate)]
            shares, distances = (", ".join(f"{r[k]:.2f}" for r in of) for k in ("share", "distance"))
            reached = sum(r["share"] >= RECOVERED for r in of)
            lines.append(f"| {name} | {rate or '-'} | {reached} of {len(of)} | {shares} | {distances} |")
    return "\n".join(lines)


def rows() -> list[dict[str, Any]]:
    """Return the rows that are there."""
    return [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3])
    parser.add_argument("--dimension", type=int, default=16)
    parser.add_argument("--generations", type=int, default=50)
    parser.add_argument("--members", type=int, default=12)
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if args.table:
        print(table(rows()))
        return
    done = [(row["seed"], row["optimizer"], row["learning_rate"]) for row in rows()] if ROWS.is_file() else []
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as folder:
            planted = Planted(Path(folder), seed, args.dimension)
            for name, rate in [(name, rate) for name, rates in RATES.items() for rate in rates]:
                if (seed, name, rate) in done:
                    continue
                es = {"optimizer": name} | ({} if rate is None else {"learning_rate": rate})
                found = planted.train(args.generations, args.members, **es)
                row = {"seed": seed, "dimension": args.dimension, "optimizer": name, "learning_rate": rate}
                row |= {
                    "evaluations": args.generations * args.members,
                    "before": planted.before,
                    "planted": planted.best,
                }
                with ROWS.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row | found) + "\n")
            planted.served.engine.close()


if __name__ == "__main__":
    main()
