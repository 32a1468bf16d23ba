# SPDX-License-Identifier: Apache-2.0
"""`examples/es_loop.py` computes what the library computes: rewards, coefficients and weights of two generations.

All of them are compared for equality, the weights by their hash. Rewards can be equal because both decode greedily in
float32: in this run the two best logits of a token differ by at least 0.005, far above the decoders' rounding. A change
of the example's seed or settings can bring that margin down to rounding (0.000001 for one of nine seeds).
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from small_runs import UNCHECKED

import evoalign
from evoalign.engines.hash import weights_hash
from evoalign.types import Generation

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "es_loop.py"
GENERATIONS = 2


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("es_loop", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def settings(example: ModuleType, folder: Path) -> dict[str, Any]:
    """Return the library's settings for the run of the example."""
    questions = folder / "questions.json"
    questions.write_text(json.dumps(example.QUESTIONS))
    es = {"num_generations": GENERATIONS, "population_size": example.POPULATION, "sigma": example.SIGMA,
          "learning_rate": example.ALPHA, "antithetic": False, "shaping": "zscore"}  # fmt: skip
    return {
        "output_dir": str(folder / "run"), "seed": example.SEED, "deterministic": True, "space": "full", "es": es,
        "model": {"name": "tiny", "dtype": "float32"},
        "task": {"name": "conciseness", "train_data": str(questions), "test_data": str(questions)},
        "sampling": {"temperature": 0.0, "max_tokens": example.MAX_TOKENS},
        "engine": {"device": "cpu", "threads": 1}, "evaluation": {"max_tokens": 4}, "checks": UNCHECKED,
        "checkpoint": {"every": 0}, "report": False,
    }  # fmt: skip


def test_example_fits_on_a_few_pages_and_imports_no_loop() -> None:
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) <= 120
    imports = re.findall(r"^(?:from|import) (evoalign.*)", text, re.MULTILINE)
    assert imports == ["evoalign import noise", "evoalign.models import tiny"]


@pytest.mark.slow
def test_evolve_equals_the_library(example: ModuleType, tmp_path: Path) -> None:
    generations: list[Generation] = []
    evoalign.train(settings(example, tmp_path), on_generation=generations.append)
    assert len(generations) == GENERATIONS
    for ours, (rewards, coefficients, theta) in zip(generations, example.evolve(GENERATIONS), strict=True):
        assert rewards.tolist() == [list(row) for row in ours.scores_MP]
        assert rewards.mean(axis=1).tolist() == list(ours.fitness_M)
        assert coefficients.tolist() == list(ours.update.coefficients)
        assert weights_hash(theta.items()) == ours.weights_hash
        assert np.ptp(coefficients) > 1, "the members differ, so that the weights move"


def test_main_prints_the_mean_reward_of_each_generation(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(example, "POPULATION", 2)
    monkeypatch.setattr(example, "MAX_TOKENS", 2)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--generations", "2"])
    example.main()
    lines = capsys.readouterr().out.splitlines()
    assert [re.sub(r"-?\d+\.\d\d$", "x", line) for line in lines] == [f"generation {i}: mean reward x" for i in (0, 1)]
