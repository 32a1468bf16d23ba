# SPDX-License-Identifier: Apache-2.0
"""`evoalign compare` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Run, caller
from copied_runs import copy_run, real_run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command line in this process, started in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return caller(monkeypatch, capsys, 200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs: two seeds of ES, two of what counts as GRPO, and one that is damaged."""
    root = tmp_path_factory.mktemp("compare")
    source = real_run(root / "source", steps=4, every=2)
    for seed in range(2):
        copy_run(source, root / f"runs/es_{seed}", seed=seed, reward=lambda step, seed=seed: float(step + seed))
        copy_run(source, root / f"runs/grpo_{seed}", seed=seed, method="grpo", reward=lambda step: 0.5 * step)
    (copy_run(source, root / "runs/\x1b[31mbad", seed=9) / "metrics.jsonl").write_text("no row\n")
    return root


@pytest.mark.slow
def test_a_folder_is_compared_and_written_up(folder: Path, tmp_path: Path, run: Run) -> None:
    done = run("compare", folder / "runs", "--to", tmp_path / "out")
    assert (done.code, done.err) == (0, "")
    for text in (
        "At equal wall time of training (2 s)",
        "At equal completions (48)",
        "At equal tokens",
        "At equal FLOPs",
        "At the end of each run, budgets not matched",
        "hacked share",
        "not significant: ES against GRPO",
        "metrics.jsonl, line 1, is damaged",
        "fewer than three seeds",
    ):
        assert text in done.out, text
    assert "\x1b" not in done.out
    tree = json.loads((tmp_path / "out/comparison.json").read_text())
    assert [group["label"] for group in tree["groups"]] == ["ES", "GRPO"]
    assert len(tree["left_out"]) == 1
    assert "\x1b" not in (tmp_path / "out/comparison.md").read_text()


@pytest.mark.slow
def test_one_budget_and_names(folder: Path, tmp_path: Path, run: Run) -> None:
    done = run("compare", folder / "runs/es_0", folder / "runs/es_1", folder / "runs/grpo_0", "--match", "tokens",
               "--measure", "exact", "--name", "ours=*/es_*")  # fmt: skip
    assert (done.code, done.err) == (0, "")
    assert "At equal tokens" in done.out and "At equal wall" not in done.out
    assert "ours" in done.out and "exact [95 %]" in done.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--match", "steps"], "--match steps: use wall, completions, tokens, flops"),
        (["--name", "nothing"], "--name 'nothing': expected LABEL=GLOB"),
        (["--name", "x=nowhere*"], "name x=nowhere* matches no run"),
        (["--measure", "beauty"], "has no measure 'beauty'"),
        (["--to", "{file}"], "is a file; give a folder"),
        (["{empty}"], "is not a run"),
    ],
)
def test_what_is_wrong_is_said_in_words(folder: Path, tmp_path: Path, run: Run, words: list[str], said: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    done = run("compare", folder / "runs", *(w.format(file=tmp_path / "file", empty=tmp_path / "empty") for w in words))
    assert done.code == 2
    assert done.err.startswith("error: ") and said in done.err
    assert "Traceback" not in done.err
