# SPDX-License-Identifier: Apache-2.0
"""What a run says first and last, and what its figure is told of its result."""

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from own_task import Vowels
from rich.console import Console

import evoalign
from evoalign.config import GraderConfig, from_dict, load
from evoalign.errors import ConfigError
from evoalign.report import figures
from evoalign.rundir.directory import RunDir
from evoalign.setup import task_and_data
from evoalign.tasks import Data, create
from evoalign.tasks.isolated.task import Isolated
from evoalign.training import heading
from evoalign.training.train import dry_run

ES = {"sigma": 0.02, "num_generations": 1, "population_size": 4}


def words(run, method="es", given=None, placebos=0, **sections):
    """The commands that a run ends with."""
    config = from_dict({"output_dir": str(run), "es": ES, **sections})
    task = Vowels() if ":" in config.task.name else create(config.task)
    return heading.commands(RunDir(run), config, task, method, given, placebos)


def named(commands):
    return [command.split()[1] for command in commands]


def test_the_commands_fit_the_run(tmp_path):
    run = tmp_path / "a run"
    es = words(run)
    assert named(es) == ["placebo", "eval", "export"] and f"evoalign placebo '{run}'" in es[0]
    assert "--samples 4 --temperature 0.7" in es[1] and "--to 'a run_export'" in es[2]
    assert "--split train" in words(run, evaluation={"temperature": 0.7})[1]
    given = words(run, task={"name": "likelihood"}, engine={"decoder": "library"})
    assert "--split train" in given[1] and "--samples" not in given[1], "it samples nothing"
    assert named(words(run, placebos=20)) == ["eval", "export", "journal"]
    assert named(words(run, "grpo")) == ["eval", "export", "analyze"]
    assert named(words(run, given="reward")) == ["export", "journal", "analyze"]
    code = words(run, task={"name": "mine:Task"})
    assert f"--config '{run / 'config.yaml'}'" in code[0] and "--config" in code[1] and "--config" not in code[2]


def test_a_task_has_commands_of_its_own(tmp_path):
    """After the others, and whoever handed over the scorer: they need nothing but the run."""
    run = tmp_path / "a run"
    assert len(words(run, task={"name": "safety"})) == 3, "its start was not evaluated"
    (run / "results").mkdir(parents=True)
    (run / "results/points_before.jsonl").touch()
    for given, method in ((None, "es"), ("task", "es"), (None, "grpo")):
        found = words(run, method, given, task={"name": "safety"})
        assert len(found) == 4
        assert found[-1].startswith(f"evoalign analyze safety '{run}'/results/points_before.jsonl '{run}' ")
    task = create(from_dict({"es": ES, "task": {"name": "safety"}}).task)
    assert Isolated(task, GraderConfig()).commands == task.commands


@pytest.mark.parametrize("odd", [["report {run}"], {"report {run}": None}, {1: "a page"}])
def test_commands_of_another_type_are_refused_at_the_start(odd):
    config = from_dict({"es": ES, "task": {"name": "own_task:Vowels"}})
    task = Vowels()
    task.commands = odd
    with pytest.raises(ConfigError, match=r"task vowels: its commands are .*mapping"):
        task_and_data(config, task, None)


def test_a_run_says_what_it_is_and_where_things_are(tmp_path, monkeypatch):
    drawn = []
    whole = figures.evolution
    monkeypatch.setattr(figures, "evolution", lambda *a, **named: (drawn.append(named), whole(*a, **named)))
    told = io.StringIO()
    tree = {"output_dir": str(tmp_path / "run"), "es": ES, "evaluation": {"max_tokens": 8}, "checks": {"placebo": 0},
            "task": {"validation_size": 1, "test_size": 5, "batch_size": 3},
            "tracking": {"backends": ["tensorboard"]}}  # fmt: skip
    result = evoalign.train(tree, console=Console(file=told, width=300))
    lines = told.getvalue().splitlines()
    assert lines[0].startswith("model tiny of 0.5 M parameters; task conciseness: 1 training, 1 validation and 5 test")
    assert lines[1].startswith("space lora: ") and lines[2].startswith("1 generations of 4 completions (4 members x 1 ")
    assert "note: task.batch_size 3 is more than there are training rows: each generation asks all 1" in lines
    assert any(line.startswith("prompts are messages for the model's chat template") for line in lines)
    last = lines[lines.index("next steps:") - 6 :]
    places = [SimpleNamespace(name=line.split()[0], path=Path(line.split()[1])) for line in [*last[:6], last[-1]]]
    kinds = ["results", "completions", "figures", "adapter", "tensorboard", "run", "report"]
    assert [place.name for place in places] == kinds
    assert all(place.path.exists() for place in places) and len(last) == 11
    ends = drawn[-1]["test"]
    assert ends.before.mean == result.before.measures["reward"] and ends.after.mean == result.after.measures["reward"]
    assert ends.before.low < ends.before.mean < ends.before.high
    assert drawn[-1]["validation"].after is not None and drawn[0]["test"].after is None


DRAWN = {"temperature": 0.7, "samples": 2, "seeds": [1, 2, 3]}


@pytest.mark.parametrize(
    ("sections", "validation", "start", "end"),
    [
        ({}, 0, "evaluations 2 of 10 completions, 20 in all; those of placebos", "checkpoints 2"),
        ({"checks": {"placebo": 0}}, 0, "evaluations 2 of 10 completions, 20 in all; checkpoints", "checkpoints 2"),
        ({"checks": {"placebo": 3}}, 0, "evaluations 2 of 10 completions, 20 in all; 3 placebos at the end, 30", "2"),
        ({"evaluation": {"every": 5}}, 0, "evaluations 5 of 10 completions, 50 in all", "checkpoints 2"),
        ({"evaluation": {"every": 5}}, 4, "evaluations 5 of 14 completions, 70 in all", "2, and the best ones"),
        ({"evaluation": {"every": 7}}, 0, "evaluations 4 of 10 completions, 40 in all", "checkpoints 2"),
        ({"evaluation": {"every": 30}}, 0, "evaluations 2 of ", "checkpoints 2"),
        ({"evaluation": DRAWN}, 0, "evaluations 2 of 60 completions, 120 in all", "checkpoints 2"),
        ({"checkpoint": {"every": 5}}, 0, "evaluations 2 of ", "checkpoints 4"),
    ],
)
def test_measuring_line_counts_evaluations_and_checkpoints(sections, validation, start, end):
    config = from_dict(
        {"es": {"sigma": 0.1, "learning_rate": 0.05, "num_generations": 20}, "space": "lora", **sections}
    )
    rows = [{"prompt": str(i)} for i in range(10)]
    line = heading.measuring_line(config, create(config.task), Data(rows, rows, validation=rows[:validation]))
    assert line.startswith(start) and line.endswith(end)


@pytest.mark.parametrize(("limits", "most"), [({}, 40), ({"turns": 3}, 15), ({"tokens": 7}, 11)])
def test_episodes_are_counted_with_all_their_turns(limits, most, tmp_path):
    """A turn begins below `task.episode.tokens`, and then has up to `sampling.max_tokens`."""
    sets = [f"output_dir={tmp_path / 'run'}", *(f"task.episode.{name}={value}" for name, value in limits.items())]
    told = "\n".join(dry_run(load("configs/quickstart_guess.yaml", sets)))
    turns = limits.get("turns", 8)
    assert f"768 episodes (32 members x 24 prompts) of at most {turns} turns and {most} tokens;" in told
    assert f"tokens at most {768 * most:,} a generation" in told and " of 120 episodes, " in told
