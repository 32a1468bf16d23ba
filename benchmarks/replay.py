# SPDX-License-Identifier: Apache-2.0
"""A journal against saving every generation: bytes, and whether the base model and the journal rebuild the run.

    python benchmarks/replay.py        # 100 generations of 30 members in each space; about 3 minutes on one core

The saved mean is the form that a run keeps (`lora`: a PEFT adapter, else a full checkpoint), its tokenizer left out.
"""

from __future__ import annotations

import argparse
import io
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from transformers.utils import logging

import evoalign
from baseline import check
from evoalign.rundir import journal
from evoalign.rundir.directory import saved_folders
from evoalign.training import replay as replaying

SIGMAS = {"lora": 0.05, "lowrank": 0.02, "full": 0.01}


def config(space: str, output: Path, generations: int, members: int) -> dict[str, object]:
    return {
        "output_dir": str(output),
        "space": space,
        "es": {
            "sigma": SIGMAS[space],
            "learning_rate": SIGMAS[space] / 2,
            "num_generations": generations,
            "population_size": members,
        },
        "task": {"name": "conciseness", "batch_size": 2},
        "evaluation": {"max_tokens": 8},
        "tracking": {"completions_every": 0},
        "checkpoint": {"every": 0},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generations", type=int, default=100)
    parser.add_argument("--members", type=int, default=30)
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    table = Table(
        "space", "numbers that evolve", "journal B/generation", "saved mean, B", "ratio", "replayed", "seconds"
    )
    figures = {"replay, spaces that reach another hash": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        for space in SIGMAS:
            run = Path(folder) / space
            evoalign.train(
                config(space, run, arguments.generations, arguments.members), console=Console(file=io.StringIO())
            )
            log = journal.read(run / "journal.jsonl")
            each = log.size / log.sealed
            saved = sum(f.stat().st_size for f in saved_folders(run)[-1].glob("*.safetensors"))
            moved = sum(any(g.update.coefficients) for g in log.generations)
            start = time.perf_counter()
            found = replaying.replay(run / "journal.jsonl")
            seconds = time.perf_counter() - start
            figures[f"replay {space}, journal bytes per generation"] = each
            figures["replay, spaces that reach another hash"] += found != log.generations[-1].weights_hash
            reached = "the journal's hash" if found == log.generations[-1].weights_hash else "ANOTHER HASH"
            table.add_row(
                space, f"{log.header.evolved_parameters:,}", f"{each:,.0f}", f"{saved:,}", f"{saved / each:,.0f} x",
                f"{moved} of {log.sealed}", reached, f"{seconds:.1f}",
            )  # fmt: skip
    Console(width=140).print(table)
    check(figures)


if __name__ == "__main__":
    main()
