# SPDX-License-Identifier: Apache-2.0
"""Greedy tokens of exported means in plain transformers and PEFT, against the engine of the run itself.

Trains a short Countdown run in each space, exports it as adapter, merged, lowrank and full checkpoint, loads each as
its model card says (`PeftModel.from_pretrained`, `AutoModelForCausalLM.from_pretrained`), and counts the prompts whose
tokens differ from those of the engine with the saved mean. The prompts are 100 problems of the test split. In half
precision the engine rounds A and B to the served dtype, PEFT keeps them in float32, and a merged weight is rounded
once more: there, tokens may differ. `diverge` is the median place of the first token that does; `untrained` counts
the prompts that the base model answers differently, which a comparison has to be able to see.

    python benchmarks/export_parity.py                             (about three minutes on two CPU cores)
    python benchmarks/export_parity.py --device cuda --dtypes float32 bfloat16
"""

from __future__ import annotations

import argparse
import io
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from rich.console import Console
from transformers import AutoModelForCausalLM, GenerationConfig

from baseline import check
from evoalign import setup as parts
from evoalign.config import Config, from_dict
from evoalign.exporting.export import export
from evoalign.models.origin import model_path
from evoalign.rundir import checkpoint
from evoalign.rundir.directory import saved_folders
from evoalign.rundir.identity import versions
from evoalign.training.train import train
from evoalign.types import MEAN_PLAN, Request, Sampling

FORMS = {"adapter": "lora", "merged": "lora", "lowrank": "lowrank", "full": "full"}
WIDTHS = {"lora": 0.05, "lowrank": 0.02, "full": 0.005}
Ids = list[int]


def config_of(space: str, dtype: str, arguments: argparse.Namespace, output: Path) -> Config:
    width = WIDTHS[space]
    es = {"sigma": width, "learning_rate": width, "num_generations": 3, "population_size": 8, "antithetic": True}
    task = {"name": "countdown", "prompt": "short", "batch_size": 8, "test_size": arguments.prompts}
    model = {"name": arguments.model, "dtype": dtype}
    return from_dict(
        {"output_dir": str(output / f"{space}_{dtype}"), "seed": 1, "space": space, "es": es, "task": task,
         "model": model, "engine": {"device": arguments.device}, "evaluation": {"max_tokens": arguments.tokens}}
    )  # fmt: skip


def of_engine(config: Config, run: Path) -> tuple[list[Ids], list[Ids]]:
    """Prompts, and what the run's engine makes of them with its saved mean."""
    task, data = parts.task_and_data(config, None, None)
    served = parts.serve(config)
    try:
        served.engine.load(checkpoint.load(saved_folders(run)[-1], served.layout)[0])
        prompts = [list(served.tokens.encode(task.prompt(example))) for example in data.test]
        sampling = Sampling(config.evaluation.max_tokens)
        requests = [Request(i, tuple(ids), sampling) for i, ids in enumerate(prompts)]
        found = {r.request: list(r.token_ids) for r in served.engine.rollout(MEAN_PLAN, requests)}
        return prompts, [found[i] for i in range(len(prompts))]
    finally:
        served.close()


@torch.inference_mode()
def of_plain(model: Any, settings: GenerationConfig, prompts: Sequence[Ids]) -> list[Ids]:
    """Greedy tokens by `generate`, prompts one by one: nothing is padded."""
    texts: list[Ids] = []
    for ids in prompts:
        given = torch.tensor([ids], device=model.device)
        output = model.generate(input_ids=given, attention_mask=torch.ones_like(given), generation_config=settings)
        texts.append(output[0, len(ids) :].tolist())
    return texts


def compare(form: str, config: Config, run: Path, output: Path) -> int:
    """Print one row of the table; return the number of prompts whose tokens differ."""
    merge = {"merge": True, "dtype": config.model.dtype} if form == "merged" else {}
    folder = export(run, output / f"export_{form}_{config.model.dtype}", **merge)
    prompts, wanted = of_engine(config, run)
    settings = GenerationConfig.from_pretrained(folder, max_new_tokens=config.evaluation.max_tokens)
    dtype, base = getattr(torch, config.model.dtype), model_path(config.model)
    start: Any = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    device = "cuda" if config.engine.device.startswith("cuda") else "cpu"
    untrained = of_plain(start.to(device), settings, prompts)
    model: Any = PeftModel.from_pretrained(start, folder) if form == "adapter" else (
        AutoModelForCausalLM.from_pretrained(folder, dtype="auto"))  # fmt: skip
    assert form == "adapter" or model.dtype == dtype
    found = of_plain(model.to(device), settings, prompts)
    pairs = list(zip(found, wanted, strict=True))
    places = [next(i for i, (a, b) in enumerate(zip([*f, -1], [*w, -1], strict=False)) if a != b)
              for f, w in pairs if f != w]  # fmt: skip
    other = sum(u != w for u, w in zip(untrained, wanted, strict=True))
    diverge = f"{statistics.median(places):g}" if places else ""
    tokens = sum(map(len, wanted))
    print(
        f"| {form} | {config.model.dtype} | {len(pairs)} | {tokens} | {len(places)} | {diverge} | {other} |", flush=True
    )
    return len(places)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=40)
    arguments = parser.parse_args()
    print(f"{arguments.model} on {arguments.device}; {versions()}\n")
    print("| form | served in | prompts | tokens | mismatches | diverge | untrained |\n|---|---|---|---|---|---|---|")
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for dtype in arguments.dtypes:
            runs: dict[str, tuple[Config, Path]] = {}
            for form, space in FORMS.items():
                if space not in runs:
                    config = config_of(space, dtype, arguments, Path(folder))
                    runs[space] = config, train(config, console=Console(file=io.StringIO())).path
                differ = compare(form, *runs[space], Path(folder))
                figures[f"export_parity {form} {dtype}, prompts that differ"] = differ
    check(figures)


if __name__ == "__main__":
    main()
