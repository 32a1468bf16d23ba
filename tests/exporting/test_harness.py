# SPDX-License-Identifier: Apache-2.0
"""A merged export in lm-evaluation-harness: the same model, so the same score as evoalign's own."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import evoalign
from evoalign.exporting.export import export
from evoalign.training.resolve import evaluate

HERE = Path(__file__).parent / "harness"
TOKENS = 6

pytestmark = pytest.mark.real


def is_answer(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [
        float("".join(said.split()) == "".join(right.split())) for said, right in zip(completions, answer, strict=True)
    ]


def brevity(completions: list[str], **_: Any) -> list[float]:
    """What is trained: no two members answer with as many letters."""
    return [-float(len(said)) for said in completions]


def of_harness(model: Path, folder: Path) -> tuple[float, list[str]]:
    """The score, and what was said."""
    shutil.copytree(HERE, folder)
    words = ["run", "--model", "hf", "--model_args", f"pretrained={model},dtype=float32", "--tasks", "capitals"]
    words += ["--include_path", str(folder), "--device", "cpu", "--batch_size", "1", "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", *words, "--output_path", str(folder / "results")],
        cwd=folder, env={**os.environ, **offline}, capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    (results,) = folder.glob("results/**/results_*.json")
    (samples,) = folder.glob("results/**/samples_capitals_*.jsonl")
    rows = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda row: row["doc_id"])
    return json.loads(results.read_text())["results"]["capitals"]["exact_match,none"], [r["resps"][0][0] for r in rows]


@pytest.mark.timeout(3600)
def test_the_harness_scores_a_merged_export_as_evoalign_does(smollm2: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip("lm-eval is not installed: make test-real does it (the group harness)")
    data = str(HERE / "capitals.jsonl")
    decoding = {"max_tokens": TOKENS, "stop": ["\n"]}
    tree: dict[str, Any] = {
        "output_dir": str(tmp_path / "run"), "seed": 3, "space": "lora",
        "model": {"name": str(smollm2), "dtype": "float32"}, "evaluation": decoding, "sampling": decoding,
        "task": {"name": "custom", "prompt": "raw", "train_data": data, "test_data": data},
        "lora": {"rank": 8, "alpha": 16},
        "es": {"sigma": 0.003, "learning_rate": 0.003, "num_generations": 2, "population_size": 4},
        "checks": {"control_every": 0, "placebo": 0},
    }  # fmt: skip
    run = evoalign.train(tree, reward=brevity, console=Console(file=io.StringIO())).path
    folder = export(run, tmp_path / "merged", merge=True)
    score, said = of_harness(folder, tmp_path / "harness")
    ours = evaluate(folder, config=tree, reward=is_answer)
    assert score == ours.measures["reward"]
    assert 0.2 < score < 1, "a score that any model would have"
    assert [text.strip() for text in said] == [scored.text.strip() for scored in ours.completions]
    base = evaluate(smollm2, config=tree, reward=is_answer)
    assert [s.text for s in base.completions] != [s.text for s in ours.completions], "the run moved nothing"
