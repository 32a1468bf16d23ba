# SPDX-License-Identifier: Apache-2.0
"""Analyses are found by the command line, shipped or from one file outside, and answer as training measures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import evoalign
from calling import Run, caller
from compared import copy_run, real_run
from evoalign import analysis
from evoalign.errors import ConfigError

OWN = """
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
    def draw(self, folder):
        (folder / "{lower}.svg").write_text("<svg/>")
        return [folder / "{lower}.svg"]
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)
    return caller(monkeypatch, capsys, 200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each kind of saved mean, whose divergence and distance are in its results."""
    root = tmp_path_factory.mktemp("analysed")
    for space in ("lora", "full"):
        evoalign.train({
            "output_dir": str(root / space), "seed": 1, "space": space, "evaluation": {"max_tokens": 8},
            "es": {"sigma": 0.02, "learning_rate": 0.02, "num_generations": 2, "population_size": 6},
            "checks": {"kl_every": 1, "kl_prompts": 4, "kl_tokens": 1}, "checkpoint": {"every": 1},
        })  # fmt: skip
    return root


def test_shipped_ones_are_listed_and_tell_their_settings(run: Run) -> None:
    assert {"compare", "distance", "divergence"} <= set(analysis.names())
    assert [line.split()[0] for line in run("analyze").out.splitlines()] == analysis.names()
    assert run("analyze", "divergence").out.splitlines()[1:5] == [
        "  --set prompts=32", "  --set tokens=2000", "  --set reference=base", "",
    ]  # fmt: skip
    for name, found in analysis.shipped().items():
        assert (found.name, bool(found.help)) == (name, True)


@pytest.mark.parametrize("name", analysis.names())
def test_every_setting_is_explained_below_the_list(name: str, run: Run) -> None:
    listed, _, explained = run("analyze", name).out.partition("\n\n")
    settings = re.findall(r"^  --set (\w+)=", listed, re.MULTILINE)
    assert settings and [s for s in settings if not re.search(rf"`{s}`", explained)] == []
    assert max(map(len, explained.splitlines())) <= 100


def test_settings_without_a_docstring_are_listed_alone(tmp_path: Path, run: Run) -> None:
    (tmp_path / "own.py").write_text(OWN.format(name="Count", lower="count"))
    assert run("analyze", "own.py:Count").out.splitlines()[1:] == ["  --set times=1"]


@pytest.mark.parametrize("space", ["lora", "full"])
def test_divergence_and_distance_are_those_that_the_run_measured(space: str, folder: Path, run: Run) -> None:
    kept = json.loads((folder / space / "results/evaluation.json").read_text())
    done = run("analyze", "divergence", folder / space, "--set", "prompts=4", "--set", "tokens=1", "--to", "out")
    assert (done.code, done.err) == (0, "")
    tree = json.loads(Path("out/divergence.json").read_text())
    (found,) = tree["numbers"]["targets"]
    assert {key: found[key] for key in kept["divergence"]} == pytest.approx(kept["divergence"], rel=1e-5)
    assert "no placebo is among the targets" in done.out, "any coefficients would have moved it"
    assert found["exact"] > 0 and f"{found['exact']:.4g} nats a token" in done.out and tree["analysis"] == "divergence"
    far = run("analyze", "distance", folder / space, "--to", "out")
    assert far.code == 0 and "no placebo is among the targets" in far.out
    (moved,) = json.loads(Path("out/distance.json").read_text())["numbers"]["targets"]
    assert {key: moved[key] for key in ("l2", "relative")} == pytest.approx(kept["distance"])


def test_a_divergence_of_nothing_is_refused(folder: Path, run: Run) -> None:
    for words, said in (([folder / "lora", "--set", "prompts=-1"], "prompts, tokens: -1"),
                        ([folder / "lora", "--set", "tokens=0"], "give 1 or more"),
                        (["base"], "not divergent from itself")):  # fmt: skip
        done = run("analyze", "divergence", *words)
        assert done.code == 2 and said in done.err and not done.out


@pytest.mark.parametrize("space", ["lora", "full"])
def test_a_saved_mean_knows_its_run(space: str, folder: Path, run: Run) -> None:
    first, last = sorted((folder / space).glob("*/generation_*"))
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


def test_an_adapter_of_no_run_needs_a_config(folder: Path, tmp_path: Path, run: Run) -> None:
    adapter = sorted((folder / "lora").glob("loras/generation_*"))[-1]
    moved = adapter.rename(tmp_path / "adapter")
    try:
        refused = run("analyze", "distance", moved)
        assert refused.code == 2 and "--config" in refused.err
        done = run(
            "analyze", "divergence", moved, "-c", folder / "lora/config.yaml", "--set", "prompts=2", "--set", "tokens=1"
        )
        assert (done.code, done.err) == (0, "") and "nats a token" in done.out
    finally:
        moved.rename(adapter)


def test_one_of_your_own_is_one_file_outside(tmp_path: Path, run: Run) -> None:
    (tmp_path / "own.py").write_text(OWN.format(name="Count", lower="count"))
    done = run("analyze", "own.py:Count", "a", "\x1b[31mb", "--set", "times=3", "--to", "out")
    assert (done.code, done.err) == (0, "") and "a: 2 in all" in done.out
    assert json.loads(Path("out/count.json").read_text())["numbers"] == {"count": 6}
    assert Path("out/count.svg").is_file()


def test_a_shipped_one_is_one_folder(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but its folder is touched."""
    (tmp_path / "rooms/mine").mkdir(parents=True)
    (tmp_path / "rooms/mine/__init__.py").touch()
    (tmp_path / "rooms/mine/command.py").write_text(OWN.format(name="Command", lower="mine"))
    monkeypatch.setattr(analysis, "__path__", [*analysis.__path__, str(tmp_path / "rooms")])
    assert "mine" in run("analyze").out
    assert "x: 1 in all" in run("analyze", "mine", "x").out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("divergenc", "x"), "did you mean divergence?"),
        (("nothing", "x"), ", or package.module:Class"),
        (("json:loads", "x"), "json:loads is not a subclass of evoalign.analysis.Analysis"),
        (("divergence", "x", "--set", "prompt=1"), "has no setting prompt; it has prompts"),
        (("divergence", "x", "--set", "prompts=many"), "prompts: "),
        (("distance", "runs/nothing"), "error: runs/nothing does not exist; give a run"),
        (("distance", "."), ". is of no run; say its base model and task with --config"),
        (("compare", "x", "--set", "match=luck"), "use wall, completions, tokens, flops"),
    ],
)
def test_what_is_wrong_is_one_line(words: tuple[str, ...], said: str, run: Run) -> None:
    done = run("analyze", *words)
    assert done.code == 2 and done.err.startswith("error: ") and said in done.err


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return real_run(tmp_path_factory.mktemp("source") / "run", steps=2, every=1)


def test_compare_is_the_same_as_an_analysis(source: Path, tmp_path: Path, run: Run) -> None:
    runs = [copy_run(source, tmp_path / f"runs/{seed}", seed=seed) for seed in range(2)]
    first = run("compare", *runs, "--match", "tokens", "--to", "a")
    second = run("analyze", "compare", *runs, "--set", "match=tokens", "--to", "b")
    assert (first.code, first.out.replace(" into a", " into b")) == (0, second.out)
    for name in ("comparison.md", "comparison.json"):
        assert Path("a", name).read_bytes() == Path("b", name).read_bytes()


def test_a_run_made_with_a_python_object_is_refused(folder: Path, tmp_path: Path, run: Run) -> None:
    copied = copy_run(folder / "lora", tmp_path / "copied")
    manifest = json.loads((copied / "manifest.json").read_text())
    manifest["task"]["given_as"] = "task"
    (copied / "manifest.json").write_text(json.dumps(manifest))
    done = run("analyze", "divergence", copied)
    assert done.code == 2 and "was trained with a task object" in done.err


def test_the_name_of_before_is_still_there() -> None:
    from evoalign.analysis.distance import distance_of
    from evoalign.checks import distance

    assert distance_of is distance.distance_of
    with pytest.raises(ConfigError):
        analysis.find("reference")
