# SPDX-License-Identifier: Apache-2.0
"""Run directories of release 0.1.0, half done: they are read, evaluated, exported, and resumed to their end.

Texts, and so scores, may differ from CPU to CPU; weights that follow from recorded scores may not.
"""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import Run, caller
from machine_dependent import skipped_elsewhere
from rich.console import Console

import evoalign
from evoalign.rundir import journal

RUNS = Path(__file__).parent / "half_done"
ES = ("full_bfloat16", "lora_adam", "lowrank")
SAVED = ("full_bfloat16", "grpo_lora", "lora_adam")
"""The folder of `lowrank` holds its journal and no saved mean."""


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(RUNS / request.param, tmp_path / request.param))


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return caller(monkeypatch, capsys, 200)


def resume(folder: Path, **sections: dict[str, Any]) -> evoalign.Result:
    """Resume a run where it lies; `sections` change its config."""
    tree = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")) | {"output_dir": str(folder)}
    for name, section in sections.items():
        tree[name] |= section
    train = evoalign.grpo if folder.name.startswith("grpo") else evoalign.train
    return train(tree, resume=True, console=Console(file=io.StringIO()))


def hashes(folder: Path) -> list[str | None]:
    return [g.weights_hash for g in journal.read(folder / "journal.jsonl").generations]


@pytest.mark.first("lora_adam")
@pytest.mark.parametrize("run", ES, indirect=True)
def test_a_run_is_resumed_to_its_end(run: Path) -> None:
    before, lines = hashes(run), (run / "journal.jsonl").read_bytes()
    result = resume(run)
    after = hashes(run)
    assert len(before) == 2 and len(after) == 4 and after[:2] == before
    assert (run / "journal.jsonl").read_bytes().startswith(lines)
    assert evoalign.replay(run) == after[-1]
    assert result.after.measures.keys() == result.before.measures.keys()


@pytest.mark.parametrize("run", ES, indirect=True)
def test_the_recorded_scores_give_the_recorded_weights(run: Path) -> None:
    """From the journal alone, and what is saved is what the journal says."""
    found = hashes(run)
    with skipped_elsewhere(run / "journal.jsonl"):
        assert [evoalign.replay(run / "journal.jsonl", generation=n) for n in (1, 2)] == found


@pytest.mark.parametrize("run", ["grpo_lora"], indirect=True)
def test_grpo_is_resumed_from_its_trainers_state(run: Path) -> None:
    rows = (run / "metrics.jsonl").read_bytes()
    resume(run, grpo={"max_steps": 3})
    assert (run / "metrics.jsonl").read_bytes().startswith(rows)
    assert (run / "metrics.jsonl").read_bytes().count(b"\n") == 3
    assert (run / "loras" / "generation_0003" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("run", ES, indirect=True)
def test_the_journal_is_shown(run: Path, call: Run) -> None:
    done = call("journal", run)
    assert done.code == 0 and not done.err
    assert all(str(h)[:12] in done.out for h in hashes(run))


@pytest.mark.parametrize("run", SAVED, indirect=True)
def test_what_was_saved_is_evaluated_and_exported(run: Path, call: Run) -> None:
    done = call("eval", run, "--set", "evaluation.max_tokens=4")
    assert done.code == 0, done.err
    assert "reward" in done.out
    done = call("export", run, "--to", run.parent / "export")
    assert done.code == 0, done.err
    (weights,) = (run.parent / "export").glob("*model.safetensors")
    (saved,) = run.glob("*/generation_0002/*model.safetensors")
    assert weights.read_bytes() == saved.read_bytes()
