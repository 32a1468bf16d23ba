# SPDX-License-Identifier: Apache-2.0
"""Every analysis through the command line: found, explained, run on the tiny model, drawn, and repeatable."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Run
from copied_runs import Copy, copy_run, edit

import evoalign
from evoalign import analysis
from evoalign.analysis.base import LABELS, as_json, labels_of, row, settings_of, short_names
from evoalign.analysis.targets import expanded
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
READ_ONLY = {"axes", "compare", "efficiency", "safety"}
"""Analyses that read what runs wrote, and report no progress."""
SETTINGS = {
    "alignment": ["members=8", "prompts=4", "samples=16", "sigma=[1, 2]"],
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


def targets_of(name: str, trained: Path) -> list[str]:
    if name == "safety":
        return [str(trained / "points.jsonl")]
    if name == "hacking":  # a saved mean is evaluated, a whole run is not
        return [str(sorted((trained / "lora").glob("*/generation_*"))[-1])]
    if name == "alignment":  # an adapter is refused
        return [str(trained / "full")]
    return [*(["base"] if name == "connectivity" else []), str(trained / "lora")]


def leaves(tree: Any) -> Iterator[Any]:
    for value in tree.values() if isinstance(tree, dict) else tree:
        yield from leaves(value) if isinstance(value, dict | list) else [value]


@pytest.mark.parametrize("name", [n for n in analysis.names() if n != "intrinsic"])  # of many runs: test_intrinsic
def test_every_analysis_reports_progress_writes_finite_json_and_figures_and_repeats(
    name: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int, int]] = []
    real = watching.stage
    monkeypatch.setattr(watching, "stage", lambda *given: (seen.append((*given, 0, 0)[:3]), real(*given)))
    found, targets = analysis.find(name), targets_of(name, trained)
    settings = settings_of(found, SETTINGS.get(name, []))
    with watching.watched(watching.Watch()):
        finding = found.run(targets, settings)
    if name == "similarity":  # it reports stages without their number
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
    assert kinds == {".json"} if name in ("alignment", "distance", "divergence") else kinds >= {".json", ".png", ".svg"}
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


def test_a_new_analysis_is_one_file_inside_or_outside_of_the_package(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(CUSTOM.format(name="Mine", lower="mine"))
    (tmp_path / "own.py").write_text(CUSTOM.format(name="Count", lower="count"))
    with monkeypatch.context() as patch:
        patch.setattr(analysis, "__path__", [*analysis.__path__, str(tmp_path)])
        assert "mine         How many targets there are." in run("analyze").out.splitlines()
        assert "x: 1 in all" in run("analyze", "mine", "x").out
    assert run("analyze", "own.py:Count").out.splitlines()[1:] == ["  --set times=1"], "no docstring, no explanation"
    done = run("analyze", "own.py:Count", "a", "\x1b[31mb", "--set", "times=3", "--to", "out")
    assert (done.code, done.err) == (0, "") and "a: 2 in all" in done.out and Path("out/count.svg").is_file()
    assert json.loads(Path("out/count.json").read_text())["numbers"] == {"count": 6}


def test_a_folder_of_runs_stands_for_its_runs(trained: Path, run: Run) -> None:
    shutil.copytree(trained, "sweep/cell", ignore=shutil.ignore_patterns("full"))
    lora, lora2 = (f"sweep/cell/{name}" for name in ("lora", "lora2"))
    model = str(trained / "full")
    assert expanded(["sweep", model, lora, f"{lora}/loras/generation_0002", "base"]) == [
        lora, lora2, model, lora, f"{lora}/loras/generation_0002", "base",
    ]  # fmt: skip
    done = run("analyze", "distance", "sweep")
    assert done == run("analyze", "distance", lora, lora2) and done.code == 0


ROBUST, CROSSED = ("robustness", "base"), ("coverage", "base")
REFUSED = [
    (("divergenc", "x"), "did you mean divergence?"),
    (("nothing", "x"), ", or package.module:Class"),
    (("reference", "x"), "reference"),
    (("json:loads", "x"), "json:loads is not a subclass of evoalign.analysis.Analysis"),
    (("divergence", "x", "prompt=1"), "has no setting prompt; it has prompts"),
    (("divergence", "x", "prompts=many"), "prompts: "),
    (("divergence", "base", "prompts=-1"), "prompts, tokens: -1"),
    (("divergence", "base", "tokens=0"), "prompts, tokens: 32, 0"),
    (("divergence", "base"), "base is not divergent from itself"),
    (("distance", "runs/nothing"), "error: runs/nothing does not exist"),
    (("distance", "."), ". is of no run"),
    (("connectivity", "base"), "base alone"),
    (("front", "base"), "name runs or models"),
    (("hacking", "base"), "base alone"),
    (("compare", "x", "match=luck"), "use wall, completions, tokens, flops"),
    ((*ROBUST, "sigma=[]"), "sigma: none"),
    ((*ROBUST, "sigma=[0.1, -0.1]"), "sigma: -0.1"),
    ((*ROBUST, "sigma=[0.1, 0.1]"), "twice"),
    ((*ROBUST, "trials=0"), "trials: 0"),
    ((*ROBUST, "parts=[nose]"), "no part 'nose'; it has all, embeddings"),
    ((*ROBUST, "parts=[unembedding]"), "leaves no part to perturb"),
    ((*CROSSED, "temperature=[0.0]"), "temperature: 0"),
    ((*CROSSED, "sigma=[0.1, 0.1]"), "twice"),
    ((*CROSSED, "temperature=[]", "sigma=[]"), "both empty"),
    ((*CROSSED, "samples=3"), "samples: 3"),
    ((*CROSSED, "k=[64]"), "k: [64] does not fit 32 samples"),
    ((*CROSSED, "k=[0, 1]"), "k: 0 does not fit"),
]


@pytest.mark.parametrize(("words", "expected"), REFUSED)
def test_an_error_is_one_line(words: tuple[str, ...], expected: str, run: Run) -> None:
    """Each is of an analysis, targets, and settings."""
    Path("c.yaml").write_text("model: {name: tiny}\ntask: {name: countdown}\n")
    own = ("-c", "c.yaml") if words[:2] in (ROBUST, CROSSED) else ()
    done = run("analyze", *(part for word in words for part in (("--set", word) if "=" in word else (word,))), *own)
    assert done.code == 2 and done.err.startswith("error: ") and expected in done.err and not done.out


@pytest.mark.parametrize(
    "name", ["alignment", "connectivity", "coverage", "forgetting", "hacking", "robustness", "trajectory"]
)
def test_a_target_given_twice_is_refused(name: str, trained: Path, run: Run) -> None:
    done = run("analyze", name, trained / "lora", trained / "lora")
    assert done.code == 2 and "twice" in done.err and not done.out


def test_row_shows_intervals_and_leaves_out_none() -> None:
    cells = {"reward": Estimate(0.5, 9, 0.25, 0.75), "kl": Estimate(2.0, 1, why="1 value"), "none": None, "count": 1000}
    assert row("a", cells) == "a: reward 0.5 (95 %: 0.25 to 0.75); kl 2 (1 value); count 1000"


CELL = "/a/sweep/space=lora,sigma={},learning_rate=0.0125"


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["runs/qcd"], ["qcd"]),
        (["runs/qcd", "base"], ["qcd", "base"]),
        (["sweep/beta=0.1/seed_0"], ["beta=0.1/seed_0"]),
        (["/a/x/run/loras/generation_0040"], ["loras/generation_0040"]),
        (["runs/one", "runs/two", "runs/two/loras/generation_0040"], ["one", "two", "two/loras/generation_0040"]),
        ([f"{CELL.format(s)}/seed_0" for s in (0.0125, 0.025)], ["sigma=0.0125", "sigma=0.025"]),
        ([f"{CELL.format(s)}/seed_{i}" for s in (1, 2) for i in (0, 1)],
         ["sigma=1/seed_0", "sigma=1/seed_1", "sigma=2/seed_0", "sigma=2/seed_1"]),
        (["x=1,y=2/a", "y=2,x=1/a"], ["x=1,y=2", "y=2,x=1"]),
        (["runs/a\nb", "runs/c"], ["a\\nb", "c"]),
    ],
)  # fmt: skip
def test_short_names_keep_what_differs(names: list[str], short: list[str]) -> None:
    assert list(short_names(names).items()) == list(zip(names, short, strict=True))


def test_short_names_cut_the_middle_and_take_given_labels() -> None:
    long = [f"runs/{'a' * 50}_{end}" for end in "xy"]
    assert list(short_names(long, 20).values()) == ["aaaaaaaa...aaaaaaa_x", "aaaaaaaa...aaaaaaa_y"]
    token = LABELS.set(labels_of(["First=*_x"], long))
    try:
        assert short_names(long, 20)[long[0]] == "First"
    finally:
        LABELS.reset(token)


@pytest.mark.parametrize("name", ["First", "=x", "A=*", "A=nothing"])
def test_names_that_do_not_match_one_target_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--name .*{re.escape(name)}"):
        labels_of([name], ["runs/a", "runs/b"])


def test_as_json_returns_fields_and_lists_and_no_nan() -> None:
    tree = {1: Estimate(math.nan, 2), "b": (np.arange(2.0), Path("x"), np.float64("nan"), True)}
    estimate = {"mean": None, "n": 2, "low": None, "high": None, "why": None, "items": None}
    assert as_json(tree) == {"1": estimate, "b": [[0.0, 1.0], "x", None, True]}


FEW = ("--set", "prompts=4", "--set", "tokens=1")


def check_as_measured(run_: Path, analyze: Any, *, hint: bool = False) -> None:
    kept = json.loads((run_ / "results/evaluation.json").read_text())
    for name, words in (("divergence", FEW), ("distance", ())):
        out, numbers = analyze(name, run_, *words)
        (found,) = numbers["targets"]
        assert {key: found[key] for key in kept[name]} == pytest.approx(kept[name], rel=1e-5), name
        assert ("No placebo is among the targets" in out) == hint


@pytest.mark.parametrize("space", ["lora", "full"])
def test_divergence_and_distance_are_those_that_the_run_measured(space: str, trained: Path, analyze: Any) -> None:
    check_as_measured(trained / space, analyze, hint=True)
    a, b = analyze("distance", *sorted((trained / space).glob("*/generation_*")))[1]["targets"]
    assert 0 < a["l2"] < b["l2"] and a["base"] == b["base"] == "tiny"


@pytest.mark.slow
def test_a_run_of_grpo_is_analysed_in_the_dtype_it_trained_in(tmp_path: Path, analyze: Any, capsys: Any) -> None:
    pytest.importorskip("trl")
    evoalign.grpo({
        "output_dir": str(tmp_path / "grpo"), "seed": 1, "evaluation": {"max_tokens": 8},
        "grpo": {"max_steps": 2, "learning_rate": 1e-3, "num_generations": 4},
        "checks": {"kl_every": 1, "kl_prompts": 4, "kl_tokens": 1},
    })  # fmt: skip
    capsys.readouterr()
    check_as_measured(tmp_path / "grpo", analyze)


def test_an_adapter_of_no_run_needs_a_config(trained: Path, run: Run, analyze: Any) -> None:
    shutil.copytree(sorted((trained / "lora").glob("loras/generation_*"))[-1], "adapter")
    refused = run("analyze", "distance", "adapter")
    assert refused.code == 2 and "--config" in refused.err
    assert "L2 distance" in analyze("distance", "adapter", "-c", trained / "lora/config.yaml")[0]


def test_a_run_made_with_a_python_object_is_refused(trained: Path, run: Run) -> None:
    copy_run(trained / "lora", Path("copied"))
    edit(Path("copied/manifest.json"), lambda tree: {**tree, "task": {**tree["task"], "given_as": "task"}})
    done = run("analyze", "divergence", "copied")
    assert done.code == 2 and "was trained with a task object" in done.err


def test_compare_is_the_same_as_an_analysis(copy: Copy, run: Run) -> None:
    runs = [copy(str(seed), seed=seed) for seed in range(2)]
    first = run("compare", *runs, "--match", "tokens", "--to", "a")
    second = run("analyze", "compare", *runs, "--set", "match=tokens", "--to", "b")
    assert (first.code, first.out.replace(" into a", " into b")) == (0, second.out)
    for name in ("comparison.md", "comparison.json"):
        assert Path("a", name).read_bytes() == Path("b", name).read_bytes()


def test_a_custom_analysis_of_a_missing_run_is_one_line(tmp_path: Path, run: Run) -> None:
    (tmp_path / "reads.py").write_text(
        "from pathlib import Path\nfrom evoalign.analysis import Analysis, Finding\n"
        "from evoalign.analysis.base import NoSettings\n"
        "class Reads(Analysis):\n    name, help, settings = 'reads', 'Reads.', NoSettings\n"
        "    def run(self, targets, settings, config=None):\n"
        "        return Finding({}, [(Path(targets[0]) / 'metrics.jsonl').read_text()])\n"
    )
    done = run("analyze", tmp_path / "reads.py:Reads", tmp_path / "nowhere")
    assert done.code == 2 and len(done.err.splitlines()) == 1 and "nowhere/metrics.jsonl" in done.err
