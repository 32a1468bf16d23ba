# SPDX-License-Identifier: Apache-2.0
"""GRPO with an objective that has a state, the Lagrangian's lambda: reused rounds, killed runs, two processes."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from grpo_runs import CLOCKS, completions, killed_when, launched
from grpo_runs import grpo as run
from grpo_runs import rows as rows_of
from small_runs import UNCHECKED

from evoalign.baselines import planning, trainer_state
from evoalign.config import from_dict
from evoalign.errors import ConfigError, ResumeError
from evoalign.preflight import doctor
from evoalign.rundir.checkpoint import verify

pytest.importorskip("trl")

RATE = 2.0
REWARDS = """
def reward(text, example):
    return float(sum(c in "aeiou" for c in text))

def cost(text, example):
    return text.count(" ") / 5 - 0.1
"""


def cost(text: str) -> float:
    """Return the cost of a saved completion; reward functions get it stripped."""
    return text.strip().count(" ") / 5 - 0.1


def config(folder: Path, name: str = "run", **grpo: Any) -> dict[str, Any]:
    rows, rewards = folder / "rows.jsonl", folder / "rewards.py"
    words = ("sea", "sky", "sun", "sand")
    rows.write_text("".join(json.dumps({"prompt": f"Tell me about the {w}:"}) + "\n" for w in words))
    rewards.write_text(REWARDS)
    return {
        "output_dir": str(folder / name), "seed": 5,
        "task": {"name": "custom", "train_data": str(rows), "test_data": str(rows),
                 "rewards": [f"{rewards}:reward", f"{rewards}:cost"], "reward_weights": [1.0, -1.0],
                 "objective": {"name": "lagrangian", "rate": RATE}},
        "evaluation": {"max_tokens": 8}, "checkpoint": {"every": 1}, "checks": UNCHECKED,
        "tracking": {"completions_every": 1}, "grader": {"isolated": False}, "sampling": {"max_tokens": 8},
        "grpo": {"max_steps": 4, "num_generations": 4, "per_device_train_batch_size": 8, "learning_rate": 1e-3,
                 "lr_scheduler_type": "constant", "rollouts": "engine", **grpo},
    }  # fmt: skip


def rows(path: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in CLOCKS} for row in rows_of(path)]


def by_hand(rounds: Sequence[Sequence[str]]) -> list[float]:
    """Return lambda at the start and after each round of texts."""
    log, average, path = 0.0, 0.0, [1.0]
    for texts in rounds:
        average = 0.9 * average + 0.1 * math.fsum(map(cost, texts)) / len(texts)
        log = min(max(log + RATE * average, math.log(1e-4)), math.log(5.0))
        path.append(math.exp(log))
    return path


def states(path: Path) -> list[dict[str, float]]:
    return [row["objective"] for row in rows(path)]


def state_file(path: Path, step: int = 4) -> Path:
    return path / f"trainer/checkpoint-{step}/objective.json"


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(config(tmp_path_factory.mktemp("straight"))).path


def assert_follows(path: Path, steps: int = 4) -> None:
    """Assert that lambda equals the reference, and that scores use lambda from before the update of their step."""
    said = [completions(path, step) for step in range(steps)]
    wanted = by_hand([[c["text"] for c in found] for found in said])
    found = states(path)
    assert [state["lambda"] for state in found] == pytest.approx(wanted[1:], rel=1e-9)
    assert len({state["lambda"] for state in found}) == steps
    for price, scored in zip([1.0, *(state["lambda"] for state in found)], said, strict=False):
        assert len(scored) == 8
        for c in scored:
            vowels = sum(letter in "aeiou" for letter in c["text"])
            assert c["score"] == pytest.approx(vowels - price * cost(c["text"]), rel=1e-12)


def test_lambda_follows_the_policys_own_cost_after_the_scores_of_each_step(straight: Path) -> None:
    assert_follows(straight)
    assert json.loads(state_file(straight).read_text()) == states(straight)[-1]
    assert (straight / "figures/objective.png").is_file()
    for name in ("lambda", "cost_average"):
        assert f"<figcaption>Kept by the objective: {name}, by step<" in (straight / "report.html").read_text()


def test_the_evaluation_stays_the_weighted_sum_whatever_lambda_is(straight: Path) -> None:
    told = json.loads((straight / "results/evaluation.json").read_text())["after"]
    assert told["reward"] == pytest.approx(told["reward/reward"] - told["reward/cost"])
    assert states(straight)[-1]["lambda"] != pytest.approx(1.0)


def test_distributions_have_the_rewards_of_every_completion(straight: Path) -> None:
    for step, row in enumerate(rows(straight)):
        texts = [c["text"].strip() for c in completions(straight, step)]
        wanted = [{"reward": float(sum(c in "aeiou" for c in text)), "cost": cost(text)} for text in texts]
        found = completions(straight, f"rewards_{step:04d}")
        assert len(found) == 8 and found == wanted
        for name, mean in row["rewards"].items():
            assert math.fsum(values[name] for values in found) / 8 == pytest.approx(mean)
    assert {f.name for f in (straight / "results/completions").glob("rewards_*")} == {
        f"rewards_{step:04d}.parquet" for step in range(4)
    }
    assert (straight / "figures/distribution.png").is_file()
    assert "Histograms of the rewards" in (straight / "report.html").read_text()
    assert all(c["rendered"].endswith("assistant\n") for c in completions(straight, 0))


@pytest.mark.parametrize("rollouts", ["engine", "trl"])
@pytest.mark.first("engine")
def test_lambda_resumes_to_the_same_bits(rollouts: str, straight: Path, tmp_path: Path) -> None:
    shorter, longer = (config(tmp_path, max_steps=steps, rollouts=rollouts) for steps in (2, 4))
    run(shorter)
    path = run(longer, resume=True).path
    if rollouts == "trl":
        straight = run(config(tmp_path, "whole", rollouts="trl")).path
    assert states(path) == states(straight)
    assert state_file(path).read_bytes() == state_file(straight).read_bytes()
    assert verify(path / "checkpoints/generation_0004") == verify(straight / "checkpoints/generation_0004")


@pytest.mark.slow
def test_lambda_of_a_killed_run_resumes_to_the_same_bits(straight: Path, tmp_path: Path) -> None:
    tree = config(tmp_path)
    killed_when(state_file(tmp_path / "run", 2).is_file, tree)
    assert not (tmp_path / "run/results/evaluation.json").exists()
    run(tree, resume=True)
    assert rows(tmp_path / "run") == rows(straight)
    assert state_file(tmp_path / "run").read_bytes() == state_file(straight).read_bytes()


UNCHECKED_MARKER = '{"step": 4}'
DAMAGES: dict[str, tuple[Callable[[Path], object], bool, str]] = {
    "missing": (Path.unlink, True, r"objective.json is missing; no older state"),
    "altered": (lambda f: f.write_text(f.read_text().replace("0.", "0.1")), True, r"objective.json was altered"),
    "a pipe": (lambda f: (f.unlink(), os.mkfifo(f)), True, r"objective.json is not a file"),
    "missing and unchecked": (Path.unlink, False, r"state lambda, cost_average, .*recorded none"),
    "of another": (lambda f: f.write_text('{"price": 1.0}'), False, r"recorded price"),
    "cut off": (lambda f: f.write_text(f.read_text()[:9]), False, r"objective.json is damaged"),
    "no number": (lambda f: f.write_text('{"lambda": "1"}'), False, r"objective.json is damaged"),
    "not finite": (lambda f: f.write_text('{"lambda": 1e999}'), False, r"objective.json is damaged"),
}
"""Damage to the file, whether its digest is known, and the pattern of the error."""


@pytest.mark.parametrize("name", DAMAGES)
def test_resume_raises_when_the_objective_state_is_damaged(name: str, straight: Path, tmp_path: Path) -> None:
    damage, is_checked, told = DAMAGES[name]
    path = Path(shutil.copytree(straight, tmp_path / "run"))
    damage(state_file(path))
    if not is_checked:
        (state_file(path).parent / "whole.json").write_text(UNCHECKED_MARKER)
    tree = config(straight.parent, max_steps=5) | {"output_dir": str(path)}
    with pytest.raises(ResumeError, match=told) as refused:
        run(tree, resume=True)
    assert "\n" not in str(refused.value)
    assert len(rows(path)) == 4


def test_without_a_state_of_the_objective_no_file_is_left(tmp_path: Path) -> None:
    tree = config(tmp_path, max_steps=1)
    tree["task"]["objective"]["rate"] = 0.0
    path = run(tree).path
    assert (path / "trainer/checkpoint-1/whole.json").is_file() and not state_file(path, 1).exists()
    assert trainer_state.objective_of(path / "trainer/checkpoint-1") == {}
    assert "objective" not in rows(path)[0]


@pytest.mark.parametrize("reuse", ["steps_per_generation", "num_iterations"])
def test_lambda_is_unchanged_when_a_step_reuses_completions(reuse: str, tmp_path: Path) -> None:
    several: dict[str, Any] = {reuse: 2}
    path = run(config(tmp_path, gradient_accumulation_steps=1, per_device_train_batch_size=4, **several)).path
    found = [state["lambda"] for state in states(path)]
    wanted = by_hand([[c["text"] for c in completions(path, step)] for step in (0, 2)])
    assert found == pytest.approx([wanted[1], wanted[1], wanted[2], wanted[2]], rel=1e-9)
    assert len(set(found)) == 2
    assert not (path / "results/completions/generation_0001.parquet").exists()


def test_lambda_is_updated_once_in_a_step_of_several_rounds(tmp_path: Path) -> None:
    """The update uses the completions of both rounds, which are scored with the same lambda."""
    several: dict[str, Any] = {"gradient_accumulation_steps": 2, "steps_per_generation": 1}
    several["per_device_train_batch_size"] = 4
    assert_follows(run(config(tmp_path, max_steps=2, **several)).path, steps=2)


def test_objective_of_the_mean_is_refused_with_rollouts_es(tmp_path: Path) -> None:
    tree = config(tmp_path, rollouts="es")
    tree |= {"es": {"sigma": 0.02, "learning_rate": 0.02, "num_generations": 4, "population_size": 4}}
    tree |= {"space": {"name": "lora"}}
    with pytest.raises(ConfigError, match=r"objective lagrangian .*grpo\.rollouts") as raised:
        run(tree)
    assert not (tmp_path / "run").exists()
    assert any(line == f"would be refused: {raised.value}" for line in planning.dry_run(tree))
    tree["task"]["objective"]["rate"] = 0.0
    assert not [line for line in planning.dry_run(tree) if "refused" in line]


def test_dry_run_and_doctor_accept_a_lagrangian(tmp_path: Path) -> None:
    assert not [line for line in planning.dry_run(config(tmp_path)) if "refused" in line]
    tree = config(tmp_path)
    assert {f.name: f.status for f in doctor.doctor(from_dict(tree))}["round"] == "ok"
    tree["task"]["objective"]["standardize"] = True
    (found,) = [f for f in doctor.doctor(from_dict(tree)) if f.name == "round"]
    assert found.status == "failed" and "lagrangian scores a whole population at once" in found.detail


@pytest.mark.long
def test_two_processes_reach_the_same_lambda_and_resume_with_it(tmp_path: Path) -> None:
    """Each process scores one of two prompts with its own copy of lambda; the copies must stay equal."""
    for name, steps in (("straight", 3), ("run", 2), ("run", 3)):
        launched(config(tmp_path, name, per_device_train_batch_size=4, max_steps=steps))
    assert_follows(tmp_path / "straight", steps=3)
    assert_follows(tmp_path / "run", steps=3)
    assert states(tmp_path / "run") == states(tmp_path / "straight")
