# SPDX-License-Identifier: Apache-2.0
"""What scoring takes of a generation: it begins after the last completion (off), or while others are decoded (on).

The tiny model, one thread, space `lora`, 32 members x 8 prompts in batches of 32; a reward takes 2 ms a completion.
Generations of one run take turns, off and on, so that both have the same load of the machine; the model hardly moves.
Arms:

- `computes`: the reward computes for 2 ms, in the grader's process (a second core).
- `waits`: it waits for 2 ms, as for a judge behind an address.
- `cheap`: it computes nothing: what the cutting itself costs.
- `here`: it computes for 2 ms in the run's own process, where evoalign starts no thread; here one is forced.
- `one batch`: `computes` with all 256 in one batch, of which hardly a piece is there before the end.

    OMP_NUM_THREADS=1 python benchmarks/grading.py --json benchmarks/results/grading.jsonl
    OMP_NUM_THREADS=1 python benchmarks/grading.py --engine vllm --arms computes waits --seqs 64 --batch 4
    python benchmarks/grading.py --device cuda --arms computes waits --members 256 --prompts 16 --batch 16

With `--engine vllm` a text is there at the step it ends in. Where all members answer at once and most texts are as long
as they may be, nearly all pieces are there at the end, and there is nothing to overlap; `--seqs` lets so many answer at
once, the next as others end. `--model`, `--members`, `--prompts` and `--tokens` make it another load.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from evoalign.config import from_dict
from evoalign.evolve import evolve
from evoalign.rundir.identity import versions
from evoalign.rundir.journal import Journal
from evoalign.setup import assemble
from evoalign.training import saving
from evoalign.types import Generation

HERE = Path(__file__).absolute()
DATA = HERE.parents[1] / "data" / "tasks" / "conciseness"
MILLISECONDS = float(os.environ.get("GRADING_MILLISECONDS", "2"))
"""Of one completion; the grader's process has it from its environment."""
ARMS = {"waits": "waits", "computes": "computes", "cheap": "cheap", "here": "computes", "one batch": "computes"}


def computes(completions: list[str]) -> list[float]:
    for _ in completions:
        end = time.perf_counter() + MILLISECONDS / 1000
        while time.perf_counter() < end:
            pass
    return cheap(completions)


def waits(completions: list[str]) -> list[float]:
    time.sleep(MILLISECONDS / 1000 * len(completions))
    return cheap(completions)


def cheap(completions: list[str]) -> list[float]:
    return [float(-len(c)) for c in completions]


def settings(arm: str, options: argparse.Namespace) -> dict[str, Any]:
    rows = options.members * options.prompts
    engine: dict[str, Any] = {"device": "cpu", "threads": 1, "max_rows": rows if arm == "one batch" else 32}
    if options.engine == "vllm":
        engine = {
            "name": "vllm",
            "max_num_seqs": options.seqs or rows,
            "max_model_len": 128 + options.tokens,
            "kv_cache_gib": 1.0,
        }
    elif options.device != "cpu":
        engine = {"device": options.device}
    return {
        "model": {"name": options.model}, "space": "lora", "report": False, "engine": engine,
        "task": {"name": "custom", "rewards": [f"{HERE}:{ARMS[arm]}"], "train_size": options.prompts, "test_size": 8,
                 "train_data": str(DATA / "questions_train.json"), "test_data": str(DATA / "questions_test.json")},
        "es": {"num_generations": 2 * options.pairs + 2, "population_size": options.members, "sigma": 0.02,
               "learning_rate": 1e-6},
        "sampling": {"max_tokens": options.tokens}, "grader": {"isolated": arm != "here", "batch": options.batch},
    }  # fmt: skip


def generations(arm: str, options: argparse.Namespace) -> Iterator[tuple[str, Generation]]:
    """Off and on in turn; the first of each is not counted, for processes start then."""
    with closing(assemble(from_dict(settings(arm, options)))) as parts, tempfile.TemporaryDirectory() as folder:
        task: Any = parts.task
        if arm == "here":
            task.scores_elsewhere = True
        with closing(Journal(Path(folder) / "journal.jsonl", saving.header(parts, None))) as journal:
            task.per_call = None
            made = evolve(parts.run(journal))
            for number, generation in enumerate(made):
                if number > 1:
                    yield ("off", "on")[number % 2], generation
                task.per_call = (options.batch, None)[number % 2]


def row(arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """Medians of seconds, and of what each pair comes to."""
    found: dict[str, list[dict[str, float]]] = {"off": [], "on": []}
    for way, generation in generations(arm, options):
        phases = {name: generation.seconds[name] for name in ("rollout", "score", "update")}
        found[way].append({**phases, "whole": sum(phases.values()), "tokens": float(generation.tokens)})
    shares = {w: statistics.median(g["score"] / g["whole"] for g in found[w]) for w in found}
    ratios = {
        name: sorted(on[name] / off[name] for off, on in zip(found["off"], found["on"], strict=True))
        for name in ("rollout", "whole", "tokens")
    }
    medians = {w: {name: round(statistics.median(g[name] for g in found[w]), 4) for name in found[w][0]} for w in found}
    quartiles = {name: [round(q, 3) for q in statistics.quantiles(values, n=4)] for name, values in ratios.items()}
    return {
        "arm": arm, "pairs": options.pairs, "share_off": round(shares["off"], 4), "share_on": round(shares["on"], 4),
        "on_to_off": quartiles, "medians": medians, "load": os.getloadavg()[1], "versions": versions(),
        **({} if options.engine == "transformers" and options.device == "cpu" else about(options)),
    }  # fmt: skip


def about(options: argparse.Namespace) -> dict[str, Any]:
    """What is not as in the rows of the engine `transformers` on a CPU."""
    import torch

    names = ("engine", "model", "members", "prompts", "tokens", "seqs", "batch")
    kept = {name: getattr(options, name) for name in names}
    if options.device == "cuda" or (options.engine == "vllm" and torch.cuda.is_available()):
        kept |= {"device": "cuda", "gpu": torch.cuda.get_device_name()}
    return {**kept, "milliseconds": MILLISECONDS}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--pairs", type=int, default=15)
    arguments.add_argument("--json", type=Path)
    arguments.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    arguments.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="vLLM has its own")
    arguments.add_argument("--model", default="tiny")
    arguments.add_argument("--members", type=int, default=32)
    arguments.add_argument("--prompts", type=int, default=8)
    arguments.add_argument("--tokens", type=int, default=48)
    arguments.add_argument("--seqs", type=int, help="of vLLM, at once; all if left out")
    arguments.add_argument("--batch", type=int, default=16)
    arguments.add_argument("--milliseconds", type=float, default=MILLISECONDS)
    options = arguments.parse_args()
    os.environ["GRADING_MILLISECONDS"] = str(options.milliseconds)
    globals()["MILLISECONDS"] = options.milliseconds
    rows: list[dict[str, Any]] = []
    for arm in options.arms:
        rows.append(found := row(arm, options))
        low, middle, high = found["on_to_off"]["whole"]
        print(
            f"{arm:>9}: scoring takes {found['share_off']:.1%} of a generation off and {found['share_on']:.1%} on; "
            f"a generation on takes {middle:.3f} ({low:.3f} to {high:.3f}) of one off, decoding "
            f"{found['on_to_off']['rollout'][1]:.3f}",
            flush=True,
        )
        if options.json is not None:
            with options.json.open("a" if len(rows) > 1 or options.engine == "vllm" else "w", encoding="utf-8") as file:
                file.write(f"{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
