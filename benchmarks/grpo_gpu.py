# SPDX-License-Identifier: Apache-2.0
"""A few steps of GRPO beside as many generations of ES: the same prompts, completions and tokens; seconds and memory.

The model has the shape of Qwen2.5-0.5B, random weights and the tokenizer of the shipped tiny model, so completions run
to their limit. ES serves bfloat16 (space lowrank); GRPO trains float32 weights with bfloat16 arithmetic, as TRL does.
Each run is a separate process. The first step is left out of the medians.

    python benchmarks/grpo_gpu.py                              # one GPU
    python benchmarks/grpo_gpu.py --shape tiny --tokens 8      # a look on a CPU
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from baseline import check

SHAPES = {
    "0.5b": {
        "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 4096,
    },
    "tiny": {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "intermediate_size": 128, "vocab_size": 1024, "tie_word_embeddings": True, "max_position_embeddings": 4096,
    },
}  # fmt: skip
REWARD = """
def near_forty(prompts, completions, **columns):
    return [-abs(len(text) - 40.0) for text in completions]
"""
WORDS = "the number of members in each population is forty two and the answer to the question was given before it "


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        model = _model(options.shape, where / "model")
        (where / "reward.py").write_text(REWARD, encoding="utf-8")
        prompts = [{"prompt": f"{i} {WORDS * 3}"} for i in range(options.prompts)]
        (where / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts), encoding="utf-8")
        found: dict[str, dict[str, Any]] = {}
        for name, method, tree in _runs(options, model, where):
            if options.only not in name:
                continue
            found[name] = _run(name, method, tree, where, options.limit)
            if options.json:
                Path(options.json).write_text(json.dumps({"options": vars(options), "runs": found}, indent=2) + "\n")
            _table({name: found[name]})
    print(f"\n{options.prompts} prompts x {options.group} completions x {options.tokens} tokens, {options.steps} steps")
    _table(found)
    peaks = {name: peak for name, run in found.items() if (peak := _peak(run["rows"]))}
    grpo = peaks.get("GRPO, completions by TRL")
    spaces = [name for name in peaks if name.startswith("ES ")] if grpo else []
    check({f"grpo_gpu {options.shape}, peak memory of GRPO over {name}": grpo / peaks[name] for name in spaces})


def _peak(rows: list[dict[str, Any]]) -> float:
    """Return the most memory of all rows, in GiB."""
    return max((row["budget"]["peak_memory_bytes"] or 0 for row in rows), default=0) / 2**30


def _runs(options: argparse.Namespace, model: Path, where: Path) -> list[tuple[str, str, dict[str, Any]]]:
    """Names, methods and configs. A step and a generation have as many completions."""
    group, prompts = options.group, options.prompts
    file, reward = str(where / "prompts.jsonl"), str(where / "reward.py")
    common = {
        "task": {
            "name": "custom",
            "train_data": file,
            "test_data": file,
            "rewards": [f"{reward}:near_forty"],
            "prompt": "raw",
        },
        "model": {"name": str(model)},
        "evaluation": {"max_tokens": options.tokens},
        "checks": {"canary_every": 0, "control_every": 0},
        "checkpoint": {"every": 0},
        "tracking": {"completions_every": 0},
        "grader": {"isolated": False},
    }
    es = {"num_generations": options.steps, "population_size": group, "sigma": 1e-3, "learning_rate": 5e-4}
    grpo = {
        "max_steps": options.steps, "num_generations": group, "learning_rate": 1e-6,
        "per_device_train_batch_size": options.micro, "gradient_accumulation_steps": group * prompts // options.micro,
    }  # fmt: skip
    return [
        ("ES lowrank", "train", {**common, "space": "lowrank", "es": es}),
        ("ES lora", "train", {**common, "space": "lora", "es": es}),
        ("GRPO, completions by the engine", "grpo", {**common, "grpo": {**grpo, "rollouts": "engine"}}),
        ("GRPO, beta 0.005", "grpo", {**common, "grpo": {**grpo, "rollouts": "engine", "beta": 0.005}}),
        ("GRPO, LoRA of rank 1", "grpo", {**common, "grpo": {**grpo, "rollouts": "engine", "tune": "lora"}}),
        ("GRPO on completions of ES members", "grpo",
         {**common, "space": "lowrank", "es": es, "grpo": {**grpo, "rollouts": "es"}}),
        ("GRPO, completions by TRL", "grpo", {**common, "grpo": {**grpo, "rollouts": "trl"}}),
    ]  # fmt: skip


def _run(name: str, method: str, tree: dict[str, Any], where: Path, limit: float) -> dict[str, Any]:
    """Rows of metrics.jsonl, or what the run said when it failed."""
    output = where / name.replace(" ", "_").replace(",", "")
    file = where / "config.yaml"
    file.write_text(yaml.safe_dump({**tree, "output_dir": str(output)}), encoding="utf-8")
    command = [sys.executable, "-m", "evoalign.cli", method, str(file)]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=limit)
        code, said = done.returncode, done.stderr
    except subprocess.TimeoutExpired as error:
        code, said = -1, f"stopped after {limit:.0f} s\n{(error.stderr or b'').decode(errors='replace')}"
    metrics = output / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
    shutil.rmtree(output, ignore_errors=True)
    print(f"{name}: exit {code}, {len(rows)} rows", flush=True)
    if code:
        print(said[-1500:], flush=True)
    kept = ("mean", "tokens", "seconds", "budget", "grpo")
    return {"exit": code, "rows": [{key: row.get(key) for key in kept} for row in rows]}


def _model(shape: str, folder: Path) -> Path:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from evoalign.models import tiny

    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**SHAPES[shape])).to(torch.bfloat16).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(tiny() / file, folder)
    return folder


def _table(found: dict[str, dict[str, Any]]) -> None:
    head = ("run", "seconds", "rollout", "update", "tokens", "forward PFLOP", "backward PFLOP", "peak GiB")
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for name, run in found.items():
        rows = run["rows"][1:] or run["rows"]
        if not rows:
            print(f"| {name} | failed |")
            continue

        def median(phase: str, rows: list[dict[str, Any]] = rows) -> float:
            return statistics.median(row["seconds"][phase] for row in rows)

        spent = [row["budget"] for row in rows]
        forward, backward = (statistics.median(b[k] or 0.0 for b in spent) for k in ("forward_flops", "backward_flops"))
        wall = statistics.median(b["wall_seconds"] for b in spent)
        peak = _peak(rows)
        print(
            f"| {name} | {wall:.2f} | {median('rollout'):.2f} | {median('update'):.3f} | {rows[-1]['tokens']:,} | "
            f"{forward / 1e15:.3g} | {backward / 1e15:.3g} | {peak:.2f} |"
        )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--micro", type=int, default=32, help="completions in one forward and backward pass")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which a run is stopped")
    parser.add_argument("--only", default="", help="runs whose name has this in it")
    parser.add_argument("--json", help="write rows here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
