# SPDX-License-Identifier: Apache-2.0
"""What `evoalign doctor` says a generation, or a step of GRPO, takes, against what it then took.

Each config is examined, then trained for a few generations with a test split of a few rows, on a CPU twice unless it is
a model that is not shipped; the time of a generation is the median of the rows of metrics.jsonl, phases other than
`other`: the first ones on a GPU load its kernels. Other work on the machine moves both; `load` is the load
average as a trial began. A GPU is used where there is one, vLLM where it is installed beside a GPU.

    python benchmarks/estimates.py --to DIR                     rows to benchmarks/results/estimates.jsonl, the table
    python benchmarks/estimates.py --to DIR --only lowrank      a part of it
    python benchmarks/estimates.py --table                      the table again
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from rich.console import Console

from evoalign import preflight
from evoalign.baselines.train import grpo
from evoalign.config import Config, load
from evoalign.rundir.identity import versions
from evoalign.training.train import train

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / "benchmarks" / "results" / "estimates.jsonl"
SMOLLM2 = ROOT / ".cache" / "smollm2"
QUICKSTART, SMALL = ROOT / "configs" / "quickstart.yaml", ["task.test_size=8", "checks.placebo=0"]
GENERATIONS = 16 if torch.cuda.is_available() else 5
DEVICE = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
HAS_VLLM = torch.cuda.is_available() and find_spec("vllm") is not None
CASES: dict[str, tuple[Path, list[str]]] = {
    "conciseness, lora": (QUICKSTART, []),
    "countdown, lowrank": (ROOT / "configs" / "quickstart_countdown.yaml", []),
    "lowrank": (QUICKSTART, ["space=lowrank", "es.sigma=0.01", "es.learning_rate=0.005"]),
    "full": (QUICKSTART, ["space=full", "es.sigma=0.003", "es.learning_rate=0.0015"]),
    "SmolLM2-135M, lora": (
        QUICKSTART,
        ["task.prompt=chat", "task.batch_size=4", "es.population_size=12", "sampling.max_tokens=60", "engine.threads=2",
         "lora.target_layers=null", "es.sigma=0.006", "es.learning_rate=0.006"],
    ),
    "GRPO, countdown": (ROOT / "configs" / "quickstart_grpo.yaml", []),
    "SmolLM2-135M, countdown, lora, vLLM": (
        ROOT / "configs" / "vllm_countdown.yaml",
        ["space=lora", "es.population_size=64", "sampling.max_tokens=100", "evaluation.every=0",
         "es.sigma=0.006", "es.learning_rate=0.006"],
    ),
    "SmolLM2-135M, countdown, lowrank, vLLM": (
        ROOT / "configs" / "vllm_countdown.yaml", ["sampling.max_tokens=256", "evaluation.every=0"],
    ),
}  # fmt: skip


def config_of(name: str, output: Path) -> Config:
    """One of the configs, short; of the model that is not shipped, three generations."""
    file, sets = CASES[name]
    real = name.startswith("SmolLM2")
    count = 3 if real else GENERATIONS
    sets = [*sets, *SMALL, f"output_dir={output}", *([f"model.name={SMOLLM2}"] if real else [])]
    steps = f"grpo.max_steps={2 * count}" if name.startswith("GRPO") else f"es.num_generations={count}"
    return load([file], [*sets, steps])


def estimated(config: Config) -> tuple[float, float, str]:
    """Seconds that the doctor says: usual, and where all answers are as long as they may be; its words."""
    (found,) = (f for f in preflight.doctor(config) if f.name == "generation")
    usual, most = re.findall(r"about ([\d.]+) s where", found.detail)
    return float(usual), float(most), found.detail


def took(config: Config, run: Path) -> tuple[list[float], float]:
    """Seconds of each generation or step, and the tokens of a completion in the mean."""
    with run.with_suffix(".log").open("w") as log:
        make = train if config.es_ is not None else grpo
        make(config, overwrite=True, console=Console(file=log, width=160))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = [sum(value for phase, value in row["seconds"].items() if phase != "other") for row in rows]
    return seconds, mean(row["tokens"] for row in rows)


def trial(name: str, number: int, folder: Path) -> dict[str, Any]:
    """A row."""
    run = folder / f"{re.sub(r'[^a-z0-9]+', '_', name.lower())}_{number}"
    config, load_average = config_of(name, run), os.getloadavg()[0]
    if (
        config.engine.name == "vllm"
    ):  # of which a process has one, once: CUDA graphs of a second find the first's memory
        with ProcessPoolExecutor(1, get_context("spawn")) as apart:
            usual, most, words = apart.submit(estimated, config).result()
    else:
        usual, most, words = estimated(config)
    seconds, tokens = took(config, run)
    return {
        "config": name, "trial": number, "estimated": usual, "estimated_most": most, "took": round(median(seconds), 3),
        "ratio": round(usual / median(seconds), 3), "generations": [round(value, 3) for value in seconds],
        "tokens": round(tokens), "load": round(load_average, 2), "words": words, "device": DEVICE,
        "threads": config.engine.threads if config.engine.name == "transformers" and config.es_ is not None else 1,
        "versions": versions(),
    }  # fmt: skip


def table(rows: list[Mapping[str, Any]]) -> None:
    """Estimated and taken, and their ratio."""
    print("| device | config | trial | generations | estimated | at most | took | ratio | load |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        names = ("device", "config", "trial", "estimated", "estimated_most", "took", "ratio", "load")
        device, name, trial, *figures = (row[n] for n in names)
        form = "| {} | {} | {} | {} | {:.2f} s | {:.2f} s | {:.2f} s | {:.2f} | {} |"
        print(form.format(device, name, trial, len(row.get("generations", [])) or "-", *figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path)
    parser.add_argument("--only", help="configs with this in their name")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if not given.table:
        os.chdir(ROOT)  # data files are relative to it
        given.to.mkdir(parents=True, exist_ok=True)
        for name in (n for n in CASES if given.only is None or given.only in n):
            if (name.startswith("SmolLM2") and not SMOLLM2.is_dir()) or (name.endswith("vLLM") and not HAS_VLLM):
                continue
            for number in range(1 if name.startswith("SmolLM2") or torch.cuda.is_available() else 2):
                with ROWS.open("a") as file:
                    file.write(json.dumps(trial(name, number, given.to.resolve())) + "\n")
    table([json.loads(line) for line in ROWS.read_text().splitlines()])


if __name__ == "__main__":
    main()
