# SPDX-License-Identifier: Apache-2.0
"""States of GRPO's trainer: a damaged one is refused, and an older one is used if it is intact."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from evoalign.baselines import trainer_state
from evoalign.errors import ResumeError
from evoalign.rundir.directory import RunDir

FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "zero/a.pt")


def state(run: RunDir, step: int) -> Path:
    folder = trainer_state.states(run) / f"checkpoint-{step}"
    (folder / "zero").mkdir(parents=True)
    for name in FILES:
        (folder / name).write_text(f'{name}, "global_step": {step}')
    return folder


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run killed before the older state was removed: it has states of step 2 and step 4."""
    run = RunDir(tmp_path / "run")
    state(run, 2)
    trainer_state.mark(run, 2)
    aside = shutil.move(trainer_state.states(run) / "checkpoint-2", tmp_path / "aside")
    state(run, 4)
    trainer_state.mark(run, 4)
    shutil.move(aside, trainer_state.states(run) / "checkpoint-2")
    return run


def flip(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 0x40
    file.write_bytes(raw)


DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "no random state": ("rng_state.pth", Path.unlink, "is missing"),
    "no optimizer": ("optimizer.pt", Path.unlink, "is missing"),
    "no schedule": ("scheduler.pt", Path.unlink, "is missing"),
    "a file in a folder": ("zero/a.pt", Path.unlink, "is missing"),
    "a bit of a weight": ("model.safetensors", flip, "was altered"),
    "a bit of the optimizer": ("optimizer.pt", flip, "was altered"),
    "another step": ("trainer_state.json", lambda f: f.write_text(f.read_text().replace("4", "2")), "was altered"),
    "one more": ("scaler.pt", lambda f: f.write_text("x"), "does not belong there"),
    "a pipe": ("optimizer.pt", lambda f: (f.unlink(), os.mkfifo(f)), "is not a file"),
    "a marker that is deep": ("whole.json", lambda f: f.write_text("[" * 600 + "]" * 600), "is damaged"),
    "a marker of another": ("whole.json", lambda f: f.write_text('{"step": 2}'), "is of step 2"),
    "a marker of no type": ("whole.json", lambda f: f.write_text('{"step": "4"}'), "is damaged"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_sound_state_falls_back_to_an_older_state(name: str, run: RunDir) -> None:
    file, damage, why = DAMAGES[name]
    folder, told = trainer_state.states(run), list[str]()
    assert trainer_state.sound_state(run, told.append) == (folder / "checkpoint-4", 4) and not told
    damage(folder / "checkpoint-4" / file)
    assert trainer_state.sound_state(run, told.append) == (folder / "checkpoint-2", 2)
    assert len(told) == 1 and f"checkpoint-4/{file} {why}" in told[0]
    (folder / "checkpoint-2/optimizer.pt").unlink()
    with pytest.raises(ResumeError, match=f"checkpoint-4/{file} {why}.*no older state.*--overwrite") as error:
        trainer_state.sound_state(run, told.append)
    assert "\n" not in str(error.value)


def test_sound_state_accepts_a_marker_without_digests(run: RunDir) -> None:
    marker, told = trainer_state.states(run) / "checkpoint-4/whole.json", list[str]()
    files = json.loads(marker.read_text())["files"]
    assert set(files) == set(FILES)
    marker.write_text('{"step": 4}\n')
    assert trainer_state.sound_state(run, told.append) == (marker.parent, 4)
    (line,) = told
    assert "was not verified" in line
    assert trainer_state.sound_state(RunDir(run.path / "none"), told.append) is None
