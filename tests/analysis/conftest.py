# SPDX-License-Identifier: Apache-2.0
"""Runs that several modules analyse: one real run, copies of it, and runs of several seeds and spaces."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import interpreted  # noqa: F401  before anything that imports Triton
import pytest
from command_line import Run, caller
from copied_runs import STEPS, Copy, copy_run, real_run
from small_runs import UNCHECKED

import evoalign


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command line in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return caller(monkeypatch, capsys, 400)


@pytest.fixture
def analyze(run: Run) -> Callable[..., tuple[str, Any]]:
    """Run an analysis that succeeds into `out`, and return what it prints and its numbers."""

    def go(name: str, *words: object) -> tuple[str, Any]:
        done = run("analyze", name, *words, "--to", "out")
        assert (done.code, done.err) == (0, "")
        return done.out, json.loads(Path("out", f"{name}.json").read_text())["numbers"]

    return go


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return real_run(tmp_path_factory.mktemp("real") / "run", steps=STEPS, every=2)


@pytest.fixture
def copy(source: Path, tmp_path: Path) -> Copy:
    def make(name: str, **changes: Any) -> Path:
        return copy_run(source, tmp_path / "runs" / name, **changes)

    return make


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs `lora` and `lora2`, of two seeds, and `full`; both saved means of each; points of reward and cost."""
    root = tmp_path_factory.mktemp("trained")
    es = {"sigma": 0.05, "learning_rate": 0.05, "num_generations": 2, "population_size": 4}
    model, checks = {"name": "tiny", "dtype": "float32"}, {"kl_every": 1, "kl_prompts": 4, "kl_tokens": 1}
    for name, space, seed in (("lora", "lora", 1), ("lora2", "lora", 2), ("full", "full", 1)):
        width = {"sigma": 0.02, "learning_rate": 0.02} if space == "full" else {}
        own = {"output_dir": str(root / name), "seed": seed, "space": space, "es": {**es, **width}, "model": model}
        more = {"evaluation": {"max_tokens": 8}, "checks": {**UNCHECKED, **checks}}
        evoalign.train({**own, **more, "checkpoint": {"every": 1, "keep_last": 3}})
    points = [{"prompt": f"Q{i}", "response": "x", "reward": i - 2.0, "cost": 1.0 - i} for i in range(5)]
    (root / "points.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))
    return root
