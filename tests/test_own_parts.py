# SPDX-License-Identifier: Apache-2.0
"""Every kind of part is added from one file outside the package, by its import path, and none of them unasked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from command_line import Done, caller

from evoalign import shaping
from evoalign.config import code_of, load
from evoalign.errors import shown
from evoalign.rundir import journal

HERE = Path(__file__).parent
CONFIG = """
output_dir: run
seed: 3
model: {{name: "{model}", dtype: float32}}
engine: {{name: "{file}:Engine", sharpness: 15}}
space: {{name: "{file}:Space", first: 3.0}}
task: {{name: "{file}:Outside", objective: {{name: "{file}:Balance", step: 0.25}}, batch_size: 2}}
tracking: {{backends: ["{file}:Lines"], completions_every: 0}}
es: {{shaping: "{file}:squashed", sigma: 0.02, learning_rate: 0.02, num_generations: 3, population_size: 4}}
evaluation: {{max_tokens: 8}}
grader: {{isolated: false}}
checkpoint: {{every: 1}}
"""


@pytest.fixture
def run(
    random_qwen2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """The command line, in a folder with the file and a config that names all that is in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(HERE / "support/own_parts.py", tmp_path / "elsewhere/parts.py")
    (tmp_path / "mine.yaml").write_text(CONFIG.format(file=tmp_path / "elsewhere/parts.py", model=random_qwen2))
    return caller(monkeypatch, capsys)


def test_all_kinds_from_one_file(run: Callable[..., Done], tmp_path: Path) -> None:
    assert len(code_of(load(["mine.yaml"]))) == 6
    doctor = run("doctor", "mine.yaml")
    assert "it forgets" in doctor.out and "back it up" in doctor.out and "toy serves float32" in doctor.out
    assert run("train", "mine.yaml").code == 0
    log = journal.read(Path("run/journal.jsonl"))
    assert [dict(g.objective) for g in log.generations] == [{"weight": 0.25 * i} for i in (1, 2, 3)]
    assert log.header.config["engine"]["sharpness"] == 15 and log.header.config["space"]["first"] == 3.0
    for g in log.generations:
        assert np.array_equal(g.update.coefficients, np.tanh(shaping.shape(np.array([g.fitness_M]).T, "zscore")))
    told = Path("run/logs/lines.txt").read_text().splitlines()
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [json.loads(line) for line in told[:-1]] == [row["mean"] for row in rows] and len(rows) == 3
    assert set(rows[0]["rewards"]) == {"reward", "words"}
    moves = run("analyze", "elsewhere/parts.py:Moves", "run", "--set", "times=2")
    assert moves.code == 0 and "run moved 6 times" in moves.out
    _resumed(run, log)


def _resumed(run: Callable[..., Done], log: journal.Log) -> None:
    """A run that was cut off ends as the whole one, and the tracker is told where it starts again."""
    lines = Path("run/journal.jsonl").read_bytes().splitlines(True)
    Path("run/journal.jsonl").write_bytes(b"".join(lines[:3]))
    assert run("train", "mine.yaml", "--resume").code == 0
    again = journal.read(Path("run/journal.jsonl"))
    assert [g.weights_hash for g in again.generations] == [g.weights_hash for g in log.generations]
    assert len(Path("run/logs/lines.txt").read_text().splitlines()) > 4


def test_none_of_them_is_imported_because_a_run_says_so(run: Callable[..., Done], tmp_path: Path) -> None:
    assert run("train", "mine.yaml", "--set", "es.num_generations=1").code == 0
    (tmp_path / "elsewhere/parts.py").write_text("from pathlib import Path\nPath('owned').touch()\n")
    settings = {"engine": "name", "space": "name", "task": "name", "tracking": "backends", "es": "shaping"}
    for kept, setting in settings.items():  # each alone is enough to be refused
        config = load(["mine.yaml"]).model_dump(mode="json")
        plain = {name: {} for name in settings if name not in (kept, "es")}
        plain |= {} if kept == "es" else {"es": config["es"] | {"shaping": "zscore"}}
        Path("run/config.yaml").write_text(json.dumps({**config, **plain}))
        refused = run(*(("train", "run", "--resume") if kept in ("tracking", "es") else ("eval", "run")))
        place, value = f"{kept}.{setting}", config[kept][setting]
        value = value[0] if isinstance(value, list) else value
        assert str(tmp_path) in value and refused.code == 2 and f"sets {place} to {shown(value)}" in refused.err
    assert not Path("owned").exists()


def test_what_is_no_tracker_is_refused_before_the_run(run: Callable[..., Done], tmp_path: Path) -> None:
    for name, said in (("json:JSONDecoder", "no class derived from evoalign.tracking.Tracker"),
                       ("nowhere:Lines", "no module named 'nowhere'"),
                       ("tensorbord", "unknown tracker 'tensorbord'; use tensorboard, trackio, wandb")):  # fmt: skip
        refused = run("train", "mine.yaml", "--set", f"tracking.backends=['{name}']")
        assert refused.code == 2 and said in refused.err
    assert not Path("run").exists()
