# SPDX-License-Identifier: Apache-2.0
"""Checks that a journal made on one machine reaches the same weights on another: another instruction set, a GPU.

    python benchmarks/same_bits.py make DIR                    # short runs of odd populations; see `runs`
    python benchmarks/same_bits.py replay DIR [--compiled 0]   # their journals again, here: on a GPU where there is one
    python benchmarks/same_bits.py table DIR                   # what each `replay` wrote down

`replay` is called again under other settings, such as ATEN_CPU_CAPABILITY=default or MKL_ENABLE_INSTRUCTIONS=AVX2, or
on another machine with the same DIR. It trains nothing: it takes base model and journal. The second model has the
shapes of SmolLM2-135M and weights from evoalign's noise, which are the same wherever they are made: journals travel.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import evoalign
from baseline import check
from evoalign import noise
from evoalign.errors import EvoalignError
from evoalign.rundir import journal
from evoalign.training.replay import replay

SPACES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("lora", {"rank": 1}),
    ("lora", {"rank": 3, "evolve": "ab"}),
    ("lowrank", {"rank": 1}),
    ("lowrank", {"rank": 3}),
    ("full", {}),
)
GENERATIONS, MEMBERS = 2, 5


def runs(models: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each run's name and the part of its config in which it differs."""
    forms = itertools.product(models, SPACES, ("float32", "bfloat16"), (1, 2), ("1", "0"))
    for model, (space, section), dtype, threads, library in forms:
        rank = section.get("rank", "")
        name = f"{Path(model).name}-{space}{rank}-{dtype}-{threads}threads-{'compiled' if library == '1' else 'torch'}"
        yield name, {"model": {"name": model, "dtype": dtype}, "space": space, **({space: section} if section else {}),
                     "engine": {"threads": threads, "device": "cpu"}}  # fmt: skip


def make_model(folder: Path) -> Path:
    """A model of the shapes of SmolLM2-135M whose weights are noise, with the tiny model's tokenizer."""
    from safetensors.torch import save_file
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from evoalign.models import tiny

    if (folder / "config.json").is_file():
        return folder
    config = LlamaConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2048, rms_norm_eps=1e-5, rope_theta=100_000.0,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in LlamaForCausalLM(config).named_parameters()}
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny()).save_pretrained(folder)
    weights = {
        name: torch.ones(shape) if len(shape) == 1
        else noise.scaled(noise.key(0, "model", name), shape, 0, [0], [0.02], device="cpu")[0]
        for name, shape in shapes.items()
    }  # fmt: skip
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make(folder: Path, models: list[str], only: str) -> None:
    """Train each run, short."""
    for name, differs in runs(models):
        if only not in name or (folder / name / "journal.jsonl").is_file():
            continue
        os.environ["EVOALIGN_COMPILED"] = "1" if name.endswith("compiled") else "0"
        started = time.perf_counter()
        evoalign.train(
            {
                "seed": 11, "output_dir": str(folder / name), "task": {"name": "conciseness", "batch_size": 1},
                "sampling": {"max_tokens": 3}, "evaluation": {"max_tokens": 1, "every": 0},
                "es": {"num_generations": GENERATIONS, "population_size": MEMBERS, "antithetic": False,
                       "sigma": 0.01, "learning_rate": 0.01, "decay": 0.01},
                "checks": {"canary_every": 0, "control_every": 0, "kl_every": 0},
                "checkpoint": {"every": 0}, **differs,
            },
            console=Console(quiet=True), overwrite=True,
        )  # fmt: skip
        for saved in ("loras", "checkpoints"):
            for file in (folder / name).glob(f"{saved}/*/*.safetensors"):
                file.unlink()  # the journal alone is to bring the weights back
        print(f"{name}: made in {time.perf_counter() - started:.0f} s", flush=True)


def again(folder: Path, models: dict[str, str]) -> None:
    """Every journal again: how many come to each generation's hash."""
    rows: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*/journal.jsonl")):
        log = journal.read(path)
        started = time.perf_counter()
        try:
            found = replay(path, model=models.get(path.parent.name.split("-")[0]))
            outcome = "same" if found == log.generations[-1].weights_hash else "other"
        except EvoalignError as error:
            outcome = str(error)
        seconds = time.perf_counter() - started
        rows.append({"run": path.parent.name, "outcome": outcome, "seconds": round(seconds, 1)})
        print(f"{path.parent.name}: {outcome} ({seconds:.1f} s)", flush=True)
    here = {
        "machine": platform.machine(), "capability": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", "torch": torch.__version__,
        "compiled": os.environ.get("EVOALIGN_COMPILED", "1"), "threads": torch.get_num_threads(),
        **{k: os.environ[k] for k in ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")
           if k in os.environ},
    }  # fmt: skip
    with (folder / "replays.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"here": here, "rows": rows}) + "\n")


def table(folder: Path) -> None:
    """Each replay's place and counts."""
    print("| replayed with | journals | same weights_hash | other |\n|---|---:|---:|---:|")
    shares: list[float] = []
    for line in (folder / "replays.jsonl").read_text(encoding="utf-8").splitlines():
        found = json.loads(line)
        same = sum(row["outcome"] == "same" for row in found["rows"])
        words = ", ".join(f"{k} {v}" for k, v in found["here"].items())
        print(f"| {words} | {len(found['rows'])} | {same} | {len(found['rows']) - same} |")
        shares.append(same / len(found["rows"]))
    check({"same_bits, share of journals with the same hash": min(shares)})


def main() -> None:
    """Make, replay or tabulate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["make", "replay", "table"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--compiled", choices=["0", "1"])
    parser.add_argument("--only", default="", help="make the runs with this in their name")
    options = parser.parse_args()
    if options.compiled is not None:
        os.environ["EVOALIGN_COMPILED"] = options.compiled
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.what == "table":
        table(options.folder)
        return
    shapes = make_model(options.folder / "models" / "smollm2_shapes")
    if options.what == "make":
        make(options.folder, ["tiny", str(shapes)], options.only)
    else:
        again(options.folder, {"smollm2_shapes": str(shapes)})


if __name__ == "__main__":
    main()
