# SPDX-License-Identifier: Apache-2.0
"""Estimated memory compared with that of a process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import UNCHECKED

from evoalign.baselines import planning
from evoalign.cost.budget import resident
from evoalign.cost.estimate import memory_by_name
from evoalign.training.train import dry_run

UNITS = {"GiB": 2**30, "MiB": 2**20}
ROOT = Path(__file__).resolve().parents[2]
RUN = """
import io, json, sys
from pathlib import Path
from rich.console import Console
import evoalign
tree = json.loads(sys.argv[1])
said = evoalign.dry_run(tree)
evoalign.train(tree, console=Console(file=io.StringIO()))
most = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(json.dumps([1024 * int(most.split()[1]), said]))
"""


def tree(folder: Path, members: int, **sections: Any) -> dict[str, Any]:
    data = {split: str(ROOT / f"data/tasks/conciseness/questions_{split}.json") for split in ("train", "test")}
    return {
        "output_dir": str(folder / "run"), "engine": {"threads": 1, "device": "cpu"},
        "task": {"name": "conciseness", "train_data": data["train"], "test_data": data["test"], "batch_size": 16,
                 "test_size": 16},
        "lora": {"rank": 8, "target_layers": [3], "target_modules": ["down_proj"]},
        "es": {"sigma": 0.025, "learning_rate": 0.0125, "population_size": members, "num_generations": 1},
        "evaluation": {"max_tokens": 100}, "checks": UNCHECKED, **sections,
    }  # fmt: skip


def stated(lines: list[str]) -> tuple[float, str]:
    """Return the total bytes, and the line with them."""
    (line,) = [line for line in lines if line.startswith("memory ")]
    found = re.match(r"memory (?:about|up to|at least) ([\d.]+) (\wiB): ", line)
    assert found, line
    return float(found[1]) * UNITS[found[2]], line


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "13.04 GiB, if 7B "),
        ("SmolLM2-135M", "0.25 GiB, if 135M "),
        ("google/gemma-2-2b-it", "3.73 GiB, if 2b "),
        ("Qwen3-30B-A3B", "55.88 GiB, if 30B "),
        ("Llama-3.2-1.5B", "2.79 GiB, if 1.5B "),
        ("Mixtral-8x7B-v0.1", None),
        ("some-4bit", None),
        ("Qwen/Qwen2.5-32B-Instruct-AWQ", None),
        ("some-7B-GPTQ-Int4", None),
        ("some/8B-FP8", None),
        ("some-7B-w4a16", None),
        ("of7b/phi-3.5-mini", None),
    ],
)
def test_a_model_that_is_not_here_is_estimated_by_the_size_in_its_name(name: str, told: str | None) -> None:
    line = memory_by_name(name, torch.bfloat16)
    assert (line == "memory: not estimated") if told is None else (f"its weights alone take about {told}" in line)


def test_dry_runs_of_a_model_that_is_not_here_give_its_weights(tmp_path: Path) -> None:
    given = tree(tmp_path, 4, model={"name": "nobody/there-7B", "dtype": "bfloat16"}, grpo={"max_steps": 2})
    for lines in (dry_run(given), planning.dry_run(given)):
        assert any("take about 13.04 GiB" in line for line in lines)
        assert any(line.startswith("time: run `evoalign doctor") for line in lines)
        assert any(line.startswith("would be refused: ") for line in lines)


def test_memory_of_a_small_model_is_below_its_limit(tmp_path: Path) -> None:
    """`engine.memory_gib` limits a batch to 2 GiB; 512 short completions of a 2 MB model take far less."""
    whole, line = stated(dry_run(tree(tmp_path, 32)))
    own = resident() or 0
    assert 50 * 2**20 < whole - own < 400 * 2**20, line
    assert "this process so far (Python and its libraries)" in line and "for 512 completions" in line
    assert "starting weights" not in line, "nothing decays"
    more, _ = stated(dry_run(tree(tmp_path, 256)))
    assert 6 < (more - own) / (whole - own) < 9
    most, line = stated(dry_run(tree(tmp_path, 256, engine={"device": "cpu", "memory_gib": 0.125})))
    assert most - own < 140 * 2**20 and "limited by engine.memory_gib" in line
    few, _ = stated(dry_run(tree(tmp_path, 256, engine={"device": "cpu", "max_rows": 16})))
    assert few - own < 20 * 2**20


def test_a_tokenizer_that_is_not_there_leaves_the_limit(tmp_path: Path) -> None:
    from evoalign.models import tiny

    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_bytes((tiny() / "config.json").read_bytes())
    whole, line = stated(dry_run(tree(tmp_path, 32, model={"name": str(tmp_path / "model")})))
    assert line.startswith("memory up to ") and "cache up to 2.00 GiB (engine.memory_gib" in line and whole > 2**31


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Linux says what a process took")
def test_memory_estimate_is_that_of_a_process(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", RUN, json.dumps(tree(tmp_path, 128))]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    took, lines = json.loads(done.stdout.splitlines()[-1])
    said, line = stated(lines)
    assert said / 1.6 < took < 1.6 * said, f"{took / 2**30:.2f} GiB, and {line}"
