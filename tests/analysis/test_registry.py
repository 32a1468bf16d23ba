# SPDX-License-Identifier: Apache-2.0
"""Every analysis through the command line: found, explained, run on the tiny model, drawn, and repeatable."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Run, caller
from copied_runs import Copy, copy_run

import evoalign
from evoalign import analysis
from evoalign.analysis.base import as_json, row, settings_of
from evoalign.errors import ConfigError
from evoalign.report import watching
from evoalign.statistics import Estimate

CUSTOM = """
from dataclasses import dataclass
from evoalign.analysis import Analysis, Finding


@dataclass(frozen=True)
class Settings:
    times: int = 1


class {name}(Analysis[Settings]):
    name = "{lower}"
    help = "How many targets there are."
    settings = Settings

    def run(self, targets, settings, config=None):
        return Drawn({{"count": len(targets) * settings.times}}, [f"{{targets[0]}}: {{len(targets)}} in all"])


class Drawn(Finding):
    def draw(self, trained):
        (trained / "{lower}.svg").write_text("<svg/>")
        return [trained / "{lower}.svg"]
"""
READ_ONLY = {"compare", "efficiency", "safety"}
"""Analyses that read what runs wrote, and report no progress."""
UNCOUNTED = {"similarity"}
"""Analyses that report stages without their number."""
SETTINGS = {
    "connectivity": ["points=3", "low=0", "high=1", "examples=3", "tokens=2", "sigma=0.01", "trials=3"],
    "coverage": ["temperature=[0.5]", "sigma=[0.01]", "samples=2", "examples=2", "tokens=2", "k=[1]"],
    "divergence": ["prompts=2", "tokens=1"],
    "efficiency": ["threshold=0"],
    "forgetting": ["pieces=2", "placebos=1"],
    "front": ["examples=2", "tokens=1"],
    "hacking": ["examples=2", "tokens=2"],
    "robustness": ["sigma=[0.01]", "parts=[all,mlp]", "trials=3", "examples=2", "tokens=2"],
    "similarity": ["placebos=1", "ranks=[1]"],
    "trajectory": ["placebos=3"],
}
WITHOUT_FIGURES = {"distance", "divergence"}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)
    return caller(monkeypatch, capsys, 200)


def targets_of(name: str, trained: Path) -> list[str]:
    if name == "safety":
        return [str(trained / "points.jsonl")]
    if name == "hacking":  # a saved mean is evaluated, a whole run is not
        return [str(sorted((trained / "lora").glob("*/generation_*"))[-1])]
    return [*(["base"] if name == "connectivity" else []), str(trained / "lora")]


def leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict | list):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves(value)
    else:
        yield tree


@pytest.mark.parametrize("name", analysis.names())
def test_every_analysis_reports_progress_writes_finite_json_and_figures_and_repeats(
    name: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int, int]] = []
    real = watching.stage

    def stage(name: str, number: int = 0, of: int = 0) -> None:
        seen.append((name, number, of))
        real(name, number, of)

    monkeypatch.setattr(watching, "stage", stage)
    found, targets = analysis.find(name), targets_of(name, trained)
    settings = settings_of(found, SETTINGS.get(name, []))
    with watching.watched(watching.Watch()):
        finding = found.run(targets, settings)
    if name in UNCOUNTED:
        assert len(seen) > 3 and {of for _, _, of in seen} == {0}
    elif name not in READ_ONLY:
        count = len(seen) - 1
        assert seen[0] == ("", 0, count) and count > 0, "the stages are counted before the first one begins"
        assert [(number, of) for _, number, of in seen[1:]] == [(i, count) for i in range(1, count + 1)]
        assert any(targets[-1] in named for named, _, _ in seen) and all(named for named, _, _ in seen[1:])
    written = finding.write(tmp_path, found.name)
    assert all(path.stat().st_size > 0 for path in written)
    if name == "compare":
        return
    tree = json.loads((tmp_path / f"{name}.json").read_text())
    assert (tree["analysis"], tree["sentences"]) == (name, list(finding.sentences)) and finding.sentences
    assert all(math.isfinite(leaf) for leaf in leaves(tree["numbers"]) if isinstance(leaf, float))
    kinds = {path.suffix for path in written}
    assert kinds == ({".json"} if name in WITHOUT_FIGURES else kinds | {".json", ".png", ".svg"})
    assert json.loads(json.dumps(found.run(targets, settings).numbers)) == tree["numbers"]


def test_every_analysis_is_listed_and_explains_each_setting(run: Run) -> None:
    listing, summaries = run("analyze").out.splitlines(), analysis.summaries()
    assert list(summaries) == analysis.names()
    for name, summary in summaries.items():
        found = analysis.find(name)
        assert (found.name, found.help) == (name, summary) and f"{name:12} {summary}" in listing
        listed, _, explained = run("analyze", name).out.partition("\n\n")
        settings = re.findall(r"^  --set (\w+)=", listed, re.MULTILINE)
        assert settings and [s for s in settings if not re.search(rf"`{s}`", explained)] == []
        assert max(map(len, explained.splitlines())) <= 100


def test_progress_is_shown_on_stderr_only_at_a_terminal(trained: Path, run: Run, monkeypatch: Any) -> None:
    target = trained / "lora"
    quiet = run("analyze", "distance", target)
    assert (quiet.code, quiet.err) == (0, "")
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    shown = run("analyze", "distance", target)
    assert shown.code == 0 and f"distance: {target} 1/1" in shown.err and "elapsed" in shown.err
    assert "elapsed" not in shown.out and shown.out.strip() == quiet.out.strip()


def test_a_new_analysis_is_one_file(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(CUSTOM.format(name="Mine", lower="mine"))
    monkeypatch.setattr(analysis, "__path__", [*analysis.__path__, str(tmp_path)])
    assert "mine         How many targets there are." in run("analyze").out.splitlines()
    assert "x: 1 in all" in run("analyze", "mine", "x").out


def test_a_custom_analysis_is_one_file_outside(tmp_path: Path, run: Run) -> None:
    (tmp_path / "own.py").write_text(CUSTOM.format(name="Count", lower="count"))
    assert run("analyze", "own.py:Count").out.splitlines()[1:] == ["  --set times=1"], "no docstring, no explanation"
    done = run("analyze", "own.py:Count", "a", "\x1b[31mb", "--set", "times=3", "--to", "out")
    assert (done.code, done.err) == (0, "") and "a: 2 in all" in done.out
    assert json.loads(Path("out/count.json").read_text())["numbers"] == {"count": 6}
    assert Path("out/count.svg").is_file()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("divergenc", "x"), "did you mean divergence?"),
        (("nothing", "x"), ", or package.module:Class"),
        (("json:loads", "x"), "json:loads is not a subclass of evoalign.analysis.Analysis"),
        (("divergence", "x", "--set", "prompt=1"), "has no setting prompt; it has prompts"),
        (("divergence", "x", "--set", "prompts=many"), "prompts: "),
        (("divergence", "base", "--set", "prompts=-1"), "prompts, tokens: -1"),
        (("divergence", "base", "--set", "tokens=0"), "prompts, tokens: 32, 0"),
        (("divergence", "base"), "base is not divergent from itself"),
        (("distance", "runs/nothing"), "error: runs/nothing does not exist"),
        (("distance", "."), ". is of no run"),
        (("connectivity", "base"), "base alone"),
        (("compare", "x", "--set", "match=luck"), "use wall, completions, tokens, flops"),
    ],
)
def test_an_error_is_one_line(words: tuple[str, ...], expected: str, run: Run) -> None:
    done = run("analyze", *words)
    assert done.code == 2 and done.err.startswith("error: ") and expected in done.err and not done.out


def test_row_shows_intervals_and_leaves_out_none() -> None:
    cells = {"reward": Estimate(0.5, 9, 0.25, 0.75), "kl": Estimate(2.0, 1, why="1 value"), "none": None, "count": 1000}
    assert row("a", cells) == "a: reward 0.5 (95 %: 0.25 to 0.75); kl 2 (1 value); count 1000"


def test_as_json_returns_fields_and_lists_and_no_nan() -> None:
    tree = {1: Estimate(math.nan, 2), "b": (np.arange(2.0), Path("x"), np.float64("nan")), "c": Nested(True, [0.5])}
    estimate = {"mean": None, "n": 2, "low": None, "high": None, "why": None, "items": None}
    assert as_json(tree) == {"1": estimate, "b": [[0.0, 1.0], "x", None], "c": {"flag": True, "values": [0.5]}}


@dataclass
class Nested:
    flag: bool
    values: list[float]


@pytest.mark.parametrize("space", ["lora", "full"])
def test_divergence_and_distance_are_those_that_the_run_measured(space: str, trained: Path, run: Run) -> None:
    kept = json.loads((trained / space / "results/evaluation.json").read_text())
    for name, words in (("divergence", ("--set", "prompts=4", "--set", "tokens=1")), ("distance", ())):
        done = run("analyze", name, trained / space, *words, "--to", "out")
        assert (done.code, done.err) == (0, "") and "no placebo is among the targets" in done.out
        (found,) = json.loads(Path(f"out/{name}.json").read_text())["numbers"]["targets"]
        assert {key: found[key] for key in kept[name]} == pytest.approx(kept[name], rel=1e-5)
    first, last = sorted((trained / space).glob("*/generation_*"))
    assert run("analyze", "distance", first, last, "--to", "out").code == 0
    a, b = json.loads(Path("out/distance.json").read_text())["numbers"]["targets"]
    assert 0 < a["l2"] < b["l2"] and a["base"] == b["base"] == "tiny"


@pytest.mark.slow
def test_a_run_of_grpo_is_analysed_in_the_dtype_it_trained_in(tmp_path: Path, run: Run) -> None:
    pytest.importorskip("trl")
    evoalign.grpo({
        "output_dir": str(tmp_path / "grpo"), "seed": 1, "evaluation": {"max_tokens": 8},
        "grpo": {"max_steps": 2, "learning_rate": 1e-3, "num_generations": 4},
        "checks": {"kl_every": 1, "kl_prompts": 4, "kl_tokens": 1},
    })  # fmt: skip
    kept = json.loads((tmp_path / "grpo/results/evaluation.json").read_text())
    for name, words in (("distance", ()), ("divergence", ("--set", "prompts=4", "--set", "tokens=1"))):
        assert run("analyze", name, tmp_path / "grpo", *words, "--to", "out").code == 0
        (found,) = json.loads(Path(f"out/{name}.json").read_text())["numbers"]["targets"]
        assert {key: found[key] for key in kept[name]} == pytest.approx(kept[name], rel=1e-5), name


def test_an_adapter_of_no_run_needs_a_config(trained: Path, tmp_path: Path, run: Run) -> None:
    adapter = sorted((trained / "lora").glob("loras/generation_*"))[-1]
    copied = shutil.copytree(adapter, tmp_path / "adapter")
    refused = run("analyze", "distance", copied)
    assert refused.code == 2 and "--config" in refused.err
    done = run("analyze", "distance", copied, "-c", trained / "lora/config.yaml")
    assert (done.code, done.err) == (0, "") and "L2 distance" in done.out


def test_a_run_made_with_a_python_object_is_refused(trained: Path, tmp_path: Path, run: Run) -> None:
    copied = copy_run(trained / "lora", tmp_path / "copied")
    manifest = json.loads((copied / "manifest.json").read_text())
    manifest["task"]["given_as"] = "task"
    (copied / "manifest.json").write_text(json.dumps(manifest))
    done = run("analyze", "divergence", copied)
    assert done.code == 2 and "was trained with a task object" in done.err


def test_compare_is_the_same_as_an_analysis(copy: Copy, run: Run) -> None:
    runs = [copy(str(seed), seed=seed) for seed in range(2)]
    first = run("compare", *runs, "--match", "tokens", "--to", "a")
    second = run("analyze", "compare", *runs, "--set", "match=tokens", "--to", "b")
    assert (first.code, first.out.replace(" into a", " into b")) == (0, second.out)
    for name in ("comparison.md", "comparison.json"):
        assert Path("a", name).read_bytes() == Path("b", name).read_bytes()


def test_distance_of_is_importable_from_the_analysis() -> None:
    from evoalign.analysis.distance import distance_of
    from evoalign.checks import distance

    assert distance_of is distance.distance_of
    with pytest.raises(ConfigError):
        analysis.find("reference")
