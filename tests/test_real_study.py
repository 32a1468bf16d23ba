# SPDX-License-Identifier: Apache-2.0
"""studies/real.py: its runs have the settings of real_plan.md, and its jobs run on the tiny model."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from evoalign.config import Config, TaskConfig
from evoalign.errors import NotFiniteError
from evoalign.tasks import create
from evoalign.tasks.word_problems import WordProblems

sys.path.append(str(Path(__file__).parents[1] / "studies"))
import real
import real_base
import real_rows
import real_tables

SMALL = (
    "task.test_size=2", "task.validation_size=2", "task.batch_size=2", "sampling.max_tokens=2", "es.population_size=2",
    "grpo.num_generations=2", "grpo.per_device_train_batch_size=2", "grpo.gradient_accumulation_steps=2",
)  # fmt: skip


def study(tmp_path: Path, *sets: str) -> real.Study:
    options = argparse.Namespace(
        model="tiny", to=tmp_path / "runs", rows=tmp_path / "rows", seconds=None, sets=[*sets], wait=0.0
    )
    found = real.Study(options)
    for space in ("lora", "lowrank"):
        found.keep(f"probe/{space}/tool_calls/100", {"width": 0.001})
        found.keep(f"probe/{space}/countdown/100", {"width": 0.001})
    found.keep("probe/lowrank/word_problems/100", {"width": 0.002})
    sampled = (f"mix/grpo/engine/{task}/100" for task in ("tool_calls", "word_problems"))
    timed = "time/p/tool_calls", "time/r/tool_calls", *sampled
    same = "mix/es/1/tool_calls/100", "mix/grpo/es/tool_calls/100", "r/es/0.5/tool_calls/100"
    rows: dict[str, Any] = {"generations": [{"seconds": {"rollout": 2.0, "update": 1.0, "other": 5.0}}]}
    for job in (*timed, *same, "p/lowrank/tool_calls/0", "r/es/0.5/word_problems/100"):
        found.keep(job, rows)
    for method, best in {"es": "0.25", "grpo": "5e-6"}.items():
        for value in real_base.CHOICES["r", method]:
            right = {"validation": {"after": {"right": 0.6 if value == best else 0.5}}}
            found.keep(f"r/{method}/{value}/tool_calls/100", rows | right)
    found.keep("step/0.5/tool_calls/1", {"generations": [{"budget": {"completions": 1024}}] * 80})
    return found


def planned(job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Return the config with which a job would train."""
    configs: list[Config] = []

    def noted(method: Any, config: Config, study: Any) -> Any:
        configs.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(real, "trained", noted)
    with pytest.raises(KeyboardInterrupt):
        real.do(study(tmp_path), job)
    return configs[0]


@pytest.mark.parametrize(
    ("job", "space", "members", "prompts", "eta", "seconds", "generations"),
    [
        ("p/lora/tool_calls/0", "lora", 64, 16, 0.5, 300, None),
        ("p/lowrank/tool_calls/2", "lowrank", 64, 16, 0.5, 300, None),
        ("r/es/0.25/tool_calls/100", "lowrank", 64, 8, 0.25, 90, None),
        ("r/es/0.5/tool_calls/0", "lowrank", 64, 8, 0.5, None, 50),
        ("step/1.5/tool_calls/1", "lowrank", 64, 16, 1.5, None, 30),
        ("population/16/tool_calls/1", "lowrank", 16, 16, 0.125, None, 320),
        ("population/256/tool_calls/1", "lowrank", 256, 16, 2.0, None, 20),
        ("mix/es/1/tool_calls/100", "lowrank", 64, 8, 0.5, None, 10),
        ("mix/es/0/tool_calls/0", "lowrank", 64, 8, 0.5, None, 30),
        ("mix/es/1/tool_calls/0", "lowrank", 64, 8, 0.5, None, 30),
        ("long/512/0,1/0", "lowrank", 128, 16, 0.5, 480, None),
        ("hack/es/0", "lowrank", 64, 8, 0.5, None, 30),
    ],
)
def test_es_runs_have_the_settings_of_the_plan(
    job: str,
    space: str,
    members: int,
    prompts: int,
    eta: float,
    seconds: float | None,
    generations: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A generation takes 3 s of training, and 5 s more, which a limit in seconds counts too."""
    config = planned(job, tmp_path, monkeypatch)
    assert (config.space.name, config.es.population_size, config.task.batch_size) == (space, members, prompts)
    assert config.es.learning_rate == pytest.approx(eta * config.es.sigma)
    limit = None if config.stopping is None else config.stopping.max_hours
    assert limit == (None if seconds is None else pytest.approx(seconds / 3600))
    assert generations in (None, config.es.num_generations)
    schedule = config.es.learning_rate_schedule
    assert (schedule.name == "linear" and schedule.floor < 1e-9) == job.startswith("mix"), "GRPO decays to 0 as well"
    assert not config.es.antithetic and config.es.shaping == "zscore"


@pytest.mark.parametrize(
    ("job", "group", "rate", "tune", "steps"),
    [
        ("p/grpo/3e-5/tool_calls/0", 8, 3e-5, "lora", 100),
        ("p/grpo/3e-5/tool_calls/100", 8, 3e-5, "lora", 20),
        ("r/grpo/1e-6/tool_calls/0", 16, 1e-6, "full", 50),
        ("r/random/1e-6/tool_calls/0", 16, 1e-6, "full", 50),
        ("time/r/tool_calls", 16, 1e-6, "full", 4),
        ("mix/grpo/engine/tool_calls/0", 16, 1e-5, "full", 30),
        ("mix/grpo/es/tool_calls/100", 16, 1e-5, "full", 5),
        ("mix/grpo/engine/tool_calls/100", 16, 1e-5, "full", 5),
        ("hack/grpo/1e-6/0", 16, 1e-6, "full", 30),
    ],
)
def test_grpo_runs_have_the_settings_of_the_plan(
    job: str, group: int, rate: float, tune: str, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step took 3 s in earlier jobs; those of the choosing run of `mix` are of a guess of 4 s."""
    grpo = planned(job, tmp_path, monkeypatch).grpo
    assert (grpo.num_generations, grpo.learning_rate, grpo.tune, grpo.beta) == (group, rate, tune, 0)
    assert grpo.max_steps == steps
    assert grpo.per_device_train_batch_size * grpo.gradient_accumulation_steps == 128
    assert (grpo.reward == "random") == ("random" in job)


@pytest.mark.parametrize("job", ["hack/es/1", "hack/grpo/best/1"])
def test_hacking_runs_have_the_proxy_reward_and_a_kl_for_each_evaluation(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rate, right in {"1e-6": 0.4, "2e-6": 0.5, "5e-6": 0.1, "1e-5": 0.3}.items():
        study(tmp_path).keep(f"r/grpo/{rate}/word_problems/100", {"validation": {"after": {"right": right}}})
    monkeypatch.chdir(tmp_path)
    of_es = job.startswith("hack/es")
    config = planned(study(tmp_path).chosen(job), tmp_path, monkeypatch)
    assert isinstance(create(config.task), WordProblems) and config.task.name.endswith("real_proxy.py:BriefProblems")
    assert (config.evaluation.every, config.checks.kl_every) == ((6, 6) if of_es else (2, 2))
    assert (config.task.test_size, config.task.validation_size) == (200, 8)
    assert (config.sampling.max_tokens, config.evaluation.max_tokens) == (320, 320)
    assert config.es.sigma == 0.002 if of_es else config.grpo.learning_rate == 2e-6


def test_proxy_rewards_brevity_and_measures_exactness() -> None:
    task = create(TaskConfig(name=real.PROXY))
    row: dict[str, Any] = {"question": "How many?", "answer": "7"}
    texts = ["", "The answer is 8.", "The answer is 7.", "7" * 250, "It is 7 " + " " * 2000 + ".", "7" * 30_000]
    columns = task.columns(texts, [row] * len(texts))
    assert task.weighted.rewards(columns, texts, [row] * len(texts)) == columns["brief"]
    assert columns["brief"] == pytest.approx([1.0, 0.984, 0.984, 0.75, 0.0, 0.0])
    assert [task.is_right(text, row) for text in texts] == [False, False, True, False, True, False]
    assert [task.compute_reward(text, row) for text in texts] == columns["brief"]


def test_best_is_the_value_that_was_best_on_validation_rows(tmp_path: Path) -> None:
    found = study(tmp_path)
    for eta, right in {"0.25": 0.3, "0.5": 0.5, "1": 0.4}.items():
        found.keep(f"r/es/{eta}/tool_calls/100", {"validation": {"after": {"right": right}}})
    assert found.chosen("r/es/best/tool_calls/3") == "r/es/0.5/tool_calls/3"
    assert found.chosen("gate") == "gate"


def test_final_run_whose_timing_is_missing_stops_and_names_it(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"r/es/0\.25/word_problems/100"):
        real.do(study(tmp_path), "r/es/0.25/word_problems/0")


def test_steps_go_on_at_the_pace_of_the_last_ones(tmp_path: Path) -> None:
    found = study(tmp_path)
    rows = [{"seconds": {"rollout": seconds}} for seconds in (9.0, 5.0, 5.0, 1.0, 1.0)]
    found.keep("r/es/0.5/tool_calls/100", {"generations": rows})
    steps = [real.steps_of(found, "r/es/0.5/tool_calls/0", seconds) for seconds in (9.0, 19.0, 20.6, 30.0)]
    assert steps == [3, 3, 5, 14], "at least 3"


def test_steps_of_another_card_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = study(tmp_path)
    monkeypatch.setattr(real, "device", lambda: "another card")
    with pytest.raises(SystemExit, match="another card"):
        real.do(found, "r/es/0.5/tool_calls/0")


def test_job_that_was_cut_off_is_not_done(tmp_path: Path) -> None:
    found = study(tmp_path)
    found.keep("gate", {"tasks": {}}, whole=False)
    assert not found.file("gate").is_file() and not real_rows.Study.read(found.rows).rows.get("gate")
    found.keep("gate", {"tasks": {}})
    assert found.known("gate")["tasks"] == {} and not [*found.rows.glob("gate.cut")]


def test_rows_of_grpo_have_the_version_of_trl(tmp_path: Path) -> None:
    found = study(tmp_path)
    assert "trl" in found.known("r/grpo/1e-6/tool_calls/100")["versions"]
    assert "trl" not in found.known("r/es/0.5/tool_calls/100")["versions"]


def test_perturbations_are_as_many_as_the_budget_has() -> None:
    plans = real_base.perturbations(306.6)
    assert sum(len(plan.members) for plan in plans) == 306
    assert {plan.sigma for plan in plans} == {*real_base.WIDTHS} and max(len(plan.members) for plan in plans) == 64


@pytest.mark.parametrize(
    ("job", "called"), [("p/grpo/3e-5/tool_calls/0", "GRPO LoRA"), ("p/lowrank/tool_calls/0", "ES lowrank")]
)
def test_run_that_fails_twice_counts_as_the_base(
    job: str, called: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[Path] = []

    def failing(method: Any, config: Config, study: Any) -> Any:
        tries.append(Path(config.output_dir))
        tries[-1].mkdir(parents=True)
        raise NotFiniteError("the trained weights are not finite")

    monkeypatch.setattr(real, "trained", failing)
    found = study(tmp_path, *SMALL)
    real.do(found, job)
    row = json.loads(found.file(job).read_text())
    assert len(tries) == 2 and "not finite" in row["failed"]
    assert row["after"] == row["before"] and len(row["before"]["right"]) == 2
    (line,) = real_tables.arms(real_rows.Study([row]), "tool_calls")
    assert called in str(line[0]) and "failed" in str(line[0])


def test_choosing_run_that_failed_is_chosen_only_by_the_base_accuracy(tmp_path: Path) -> None:
    found = study(tmp_path)
    for rate, right in {"1e-5": 0.3, "3e-5": 0.4, "1e-4": 0.2}.items():
        row: dict[str, Any] = {"validation": {"after": {"right": right}}, "generations": []}
        found.keep(f"p/grpo/{rate}/tool_calls/100", row | ({"failed": "not finite"} if rate == "1e-4" else {}))
    assert found.chosen("p/grpo/best/tool_calls/0") == "p/grpo/3e-5/tool_calls/0"
    assert real.steps_of(found, "p/grpo/1e-4/tool_calls/0", 300) == 100, "by the timed steps"


@pytest.mark.long
def test_jobs_run_on_the_tiny_model(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    small = study(tmp_path, *SMALL)
    small.seconds = 0.1
    for job in (
        "gate", "prompting/tool_calls", "longer/tool_calls",
        "p/lora/tool_calls/0", "perturb/tool_calls", "r/es/0.5/tool_calls/0",
        "r/grpo/1e-6/tool_calls/3", "p/grpo/1e-5/tool_calls/0", "population/16/tool_calls/1",
    ):  # fmt: skip
        real.do(small, job)
        assert small.file(job).is_file()
    run = json.loads(small.file("r/es/0.5/tool_calls/0").read_text())
    assert {*run["reached"]} == {"base", "run", *(f"placebo {k}" for k in range(5))}
    assert run["cost"]["completions"] == sum(row["budget"]["completions"] for row in run["generations"])
    assert run["sampled"][0]["ways"] and not (Path(run["run"]) / "checkpoints").exists()
    covered = json.loads(small.file("r/grpo/1e-6/tool_calls/3").read_text())
    assert (Path(covered["run"]) / "checkpoints").exists()
    lora = json.loads(small.file("p/grpo/1e-5/tool_calls/0").read_text())
    assert all(len(lora["reached"][name]["other"]["right"]) == 2 for name in ("base", "run"))
    brief = study(tmp_path, *SMALL, "es.num_generations=7")
    brief.seconds = 12.0  # four steps of GRPO
    for job, count, at in (("hack/es/0", 7, 5), ("hack/grpo/1e-6/0", 4, 1)):
        real.do(brief, job)
        run = json.loads(brief.file(job).read_text())
        rows = run["generations"]
        assert len(rows) == count and "reached" not in run and run["divergence"]
        assert all(row["mean"] == pytest.approx(row["rewards"]["brief"]) for row in rows)
        assert [row["generation"] for row in rows if "evaluation" in row and "divergence" in row] == [at]
        assert rows[at]["evaluation"]["reward"] == pytest.approx(rows[at]["evaluation"]["reward/brief"])
