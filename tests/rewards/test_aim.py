# SPDX-License-Identifier: Apache-2.0
"""The measure by which runs are compared: what they were trained for, if it is the same."""

import io
import json
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from copied_runs import rebind
from rich.console import Console
from small_runs import UNCHECKED
from task_runs import train

import evoalign
from evoalign.analysis.compare.comparison import compare
from evoalign.analysis.compare.pages import as_tree, markdown
from evoalign.analysis.compare.runs import read
from evoalign.analysis.compare.tables import end_grid
from evoalign.analysis.sweeping import results
from evoalign.analysis.sweeping.cells import Run, TrialConfig
from evoalign.analysis.sweeping.search import domain, search
from evoalign.analysis.sweeping.sweep import sweep
from evoalign.config import from_dict, load
from evoalign.errors import ConfigError
from evoalign.placebos import file as placebo_file
from evoalign.placebos import run as placebo_run
from evoalign.rewards.objective import SetObjective, measure_of, shared_aim

CODE = """
def letters(completions, examples):
    return float(len(set("".join(completions))))

def words(completions, examples):
    return float(len(" ".join(completions).split()))
"""
NAME = "fitness/letters"


def config(folder, fitness="letters"):
    code = folder / "own.py"
    code.write_text(CODE)
    tree = {
        "output_dir": str(folder / "run"), "seed": 3,
        "es": {"sigma": 0.05, "learning_rate": 0.05, "num_generations": 1, "population_size": 4},
        "task": {"name": "conciseness", "train_size": 1, "test_size": 4, "validation_size": 1},
        "evaluation": {"max_tokens": 6}, "checks": UNCHECKED | {"placebo": 1},
        "tracking": {"completions_every": 0}, "grader": {"isolated": False},
    }  # fmt: skip
    tree["task"] |= {} if fitness is None else {"fitness": f"{code}:{fitness}"}
    return tree


def in_this_process(source, *rest):
    """The runs of a sweep one after another: as many processes would take half a minute to begin."""
    while (run := source.next()) is not None:
        train(run.config)
        source.done(run)
    return []


@pytest.fixture(scope="module", autouse=True)
def here():
    with pytest.MonkeyPatch.context() as patch:
        for module in ("sweep", "search"):
            patch.setattr(f"evoalign.analysis.sweeping.{module}.drive", in_this_process)
        yield


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep of two runs that train for a fitness: its folder, config and what it said."""
    folder, out = tmp_path_factory.mktemp("swept"), io.StringIO()
    tree = config(folder)
    sweep(tree, grid={"es.sigma": [0.05, 0.1]}, to=folder / "sweep", jobs=2, console=Console(file=out, width=400))
    return folder / "sweep", tree, out.getvalue()


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """A run of the same task that trains for another fitness, or for the reward."""
    return cache(lambda fitness: train(config(tmp_path_factory.mktemp("other"), fitness))[0].path)


def test_measure_of_needs_no_import():
    assert measure_of(None) == "reward" and measure_of("no/such.py:letters") == NAME
    assert SetObjective("math:dist", str).measure == "fitness/dist"
    assert shared_aim([None, None], None) == ("reward", [])
    assert shared_aim(["a:letters"] * 2, "reward") == ("reward", [])
    assert shared_aim(["a:letters"] * 2, None) == (NAME, [f"goes by {NAME}, which is trained for (task.fitness)"])
    for ways in (["a:letters", None], ["a:letters", "b:letters"]):
        name, (said,) = shared_aim(ways, None)
        assert name == "reward" and said.startswith("goes by the reward, which all have, since task.fitness differs")
    assert shared_aim(["a:f", None, None], None)[1][0].endswith("trained for is fitness/f (1 of 3) or reward (2 of 3)")


def test_sweep_uses_the_fitness_measure(swept):
    folder, _, said = swept
    found = json.loads((folder / "results.json").read_text())
    assert found["measure"] == NAME and f"goes by {NAME}, which is trained for (task.fitness)" in said
    ranked = sorted(found["cells"], key=lambda cell: -cell["mean"][f"validation/{NAME}"])
    assert found["best"]["cell"] == ranked[0]["name"] and found["best"]["chosen_on"] == "validation"
    table = (folder / "table.md").read_text()
    assert table.startswith(f"| cell | seeds done | {NAME} | validation {NAME} |")
    start = np.mean([run["before"][NAME] for cell in found["cells"] for run in cell["runs"]])
    assert f"{NAME} before training is {start:.4g}." in table


def test_sweep_over_fitness_uses_the_reward(tmp_path, monkeypatch):
    monkeypatch.setattr("evoalign.analysis.sweeping.sweep.drive", lambda *given: [])
    out, ways = io.StringIO(), [f"{tmp_path}/own.py:letters", None]
    sweep(config(tmp_path), grid={"task.fitness": ways}, to=tmp_path / "sweep", console=Console(file=out, width=400))
    assert "since task.fitness differs: trained for is fitness/letters (1 of 2) or reward (1 of 2)" in out.getvalue()
    assert json.loads((tmp_path / "sweep/results.json").read_text())["measure"] == "reward"
    out = io.StringIO()
    sweep(config(tmp_path), to=tmp_path / "asked", measure="reward", console=Console(file=out, width=400))
    assert "goes by" not in out.getvalue()
    assert json.loads((tmp_path / "asked/results.json").read_text())["measure"] == "reward"


def test_search_maximises_fitness(tmp_path):
    pytest.importorskip("optuna")
    out = io.StringIO()
    space, told = dict([domain("es.sigma=0.05,0.1")]), Console(file=out, width=400)
    done = search(config(tmp_path), space, trials=1, to=tmp_path / "search", jobs=1, console=told)
    found = json.loads((tmp_path / "search/results.json").read_text())
    (cell,) = done.cells
    assert found["search"]["best"][NAME] == cell["mean"][f"validation/{NAME}"] and found["measure"] == NAME
    assert f"chooses by {NAME} on " in out.getvalue() and f"mean {NAME} " in (tmp_path / "search/best.yaml").read_text()
    tree = config(tmp_path) | {"stopping": {"max_hours": 1}}
    with pytest.raises(ConfigError, match="has a sweep of another config: stopping differs"):
        search(tree, space, trials=2, to=tmp_path / "search", jobs=1, console=told)


def test_compare_uses_the_shared_fitness(swept, others):
    found = compare(swept[0])
    assert found.measure == NAME and found.notes[0] == f"goes by {NAME}, which is trained for (task.fitness)"
    assert found.notes[0] in markdown(found) and as_tree(found)["measure"] == NAME
    ends = {run.path: run.points[-1].measures[NAME] for group in found.groups for run in group.runs}
    means = sorted(s.estimate.mean for s in found.end.standings if s.estimate)
    assert means == sorted(ends.values())
    for asked in ("reward", NAME):
        chosen = compare(swept[0], measure=asked)
        assert chosen.measure == asked and not any("goes by" in note for note in chosen.notes)
    assert compare([swept[0], others(None)], measure=NAME).left_out[0][0] == others(None)


@pytest.mark.parametrize("fitness", [None, "words"])
def test_compare_uses_the_reward_if_fitness_differs(fitness, swept, others):
    found = compare([swept[0], others(fitness)])
    assert found.measure == "reward" and len(found.groups) == 3 and not found.left_out
    other = "reward (1 of 3)" if fitness is None else "fitness/words (1 of 3)"
    assert f"trained for is {NAME} (2 of 3) or {other}" in found.notes[0]
    assert "since task.fitness differs" in found.notes[0]
    alone = compare(others(None))
    assert alone.measure == "reward" and not any("goes by" in note for note in alone.notes)


def test_functions_with_the_same_name_differ_by_path(swept, tmp_path):
    first = next(iter(sorted(swept[0].glob("*/seed_3"))))
    twin = Path(shutil.copytree(first, tmp_path / "twin"))
    text = (twin / "config.yaml").read_text()
    (twin / "config.yaml").write_text(text.replace("own.py:letters", "others.py:letters"))
    rebind(twin)
    assert compare([first, twin]).measure == "reward"
    with pytest.raises(ConfigError, match=r"cannot be compared, they differ in task\.fitness '"):
        compare([first, twin], measure=NAME)


def test_fitness_placebos_are_saved(swept, tmp_path):
    _, tree, _ = swept
    run = Path(shutil.copytree(sorted(swept[0].glob("*/seed_3"))[0], tmp_path / "run"))
    tree = json.loads(json.dumps(tree)) | {"output_dir": str(run)}
    tree["es"]["sigma"] = load([run / "config.yaml"]).es.sigma
    measured = placebo_run.placebo(run, shuffles=3, config=tree)
    assert measured.fitness is not None and len(measured.fitness.placebos) == 3
    assert placebo_run.keep(run, measured).startswith("saved in ")
    kept = placebo_file.read(run, read(run).config)
    assert kept is not None and (kept.reward, kept.fitness) == (measured.reward, measured.fitness)
    assert kept.aim is kept.fitness
    evoalign.export(run, tmp_path / "card")
    card = (tmp_path / "card/README.md").read_text()
    assert "fitness/letters, the trained measure: 3 placebos reached" in card and "Reward: 3 placebos" in card
    rows = {row[0]: row[1:] for row in end_grid(compare(run)).rows}
    whole, drift = measured.fitness, "share of the gain that would have come without signal, all runs pooled"
    assert rows["reward of the mean placebo"] == (f"{measured.reward.mean:.4g}",)
    assert rows[f"{NAME} of the mean placebo"] == (f"{np.mean(whole.placebos):.4g}",)
    gain, moved = whole.real - whole.before, float(np.mean(whole.placebos)) - whole.before
    assert rows[f"{NAME}: {drift}"] == (f"{moved / gain:.0%}" if gain > 0 else "-",) and drift in rows
    evaluation = json.loads((run / "results/evaluation.json").read_text())
    found = results.placebo_of(Run(TrialConfig("a", {}), 3, run, from_dict(tree), "es"), evaluation)
    assert found == {"placebos": 3, "measure": NAME, "drift": moved, "gain": gain}
    file = run / placebo_file.PLACEBO
    file.write_text(file.read_text().replace('"fitness/letters"', '"fitness/others"'))
    with pytest.raises(evoalign.EvoalignError, match=r"placebo\.json was altered"):
        compare(run)
