# SPDX-License-Identifier: Apache-2.0
"""Every config that ships loads, names its command, is known to the runner, and keeps the published settings."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from evoalign.baselines.settings import round_size
from evoalign.config import Config, load
from evoalign.engines.vllm.adapters import form, slots
from evoalign.engines.vllm.settings import VllmConfig

REPOSITORY = Path(__file__).parents[2]
EXPERIMENTS = sorted((REPOSITORY / "configs" / "experiments").glob("*.yaml"))
SHIPPED = [*sorted((REPOSITORY / "configs").glob("*.yaml")), *EXPERIMENTS]
RUNNER = REPOSITORY / "scripts" / "experiments" / "run.sh"
SIZES = ["0.5b", "1.5b", "3b", "7b"]

FIELD = """
output_dir: "data/es_conciseness_v1"
seed: 33
task: {name: "conciseness", train_data: "data/tasks/conciseness/conciseness_train.json",
       test_data: "data/tasks/conciseness/conciseness_test.json"}
model: {name: "Qwen/Qwen2.5-7B-Instruct"}
lora: {rank: 1, alpha: 2, target_layers: [0,1,2,3,4,5,6,7,8,9],
       target_modules: ["q_proj","k_proj","v_proj","o_proj","gate_proj","up_proj","down_proj"]}
es: {num_generations: 30, population_size: 30, learning_rate: 0.01, noise_multiplier: 0.1}
evaluation: {max_tokens: 100, temperature: 0.0}
"""


def is_grpo(path: Path) -> bool:
    return load([path]).es_ is None


def experiment(name: str) -> Config:
    return load([REPOSITORY / "configs" / "experiments" / f"{name}.yaml"])


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_it_loads_and_its_header_has_the_exact_command(path: Path) -> None:
    load([path])
    header = path.read_text(encoding="utf-8").split("\n\n")[0]
    assert header.startswith("# SPDX-License-Identifier: Apache-2.0\n")
    command = "grpo" if is_grpo(path) else "train"
    assert f"evoalign {command} {path.relative_to(REPOSITORY)}" in header


@pytest.mark.parametrize("path", [p for p in SHIPPED if not is_grpo(p)], ids=lambda p: p.stem)
def test_its_step_is_no_surprise(path: Path) -> None:
    """A step of 0.05 to 2 times the noise's width, but for the two files whose 0.01 is the field's own."""
    eta = load([path]).es.eta
    assert eta == 0.01 if "_lora_" in path.stem else 0.05 <= eta <= 2


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_its_data_ships_with_the_repository(path: Path) -> None:
    task = load([path]).task
    for name in filter(None, (task.train_data, task.test_data)):
        assert (REPOSITORY / name).is_file(), f"{path.name} names {name}"


def test_output_directories_differ() -> None:
    directories = [load([path]).output_dir for path in SHIPPED]
    assert len(set(directories)) == len(directories)


def run_experiment(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The runner from elsewhere, with an `evoalign` that says where it is and what it was asked."""
    fake = folder / "evoalign"
    fake.write_text('#!/bin/sh\npwd\nfor word in "$@"; do echo "$word"; done\n')
    fake.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [str(RUNNER), *words], env={**os.environ, "PATH": path}, cwd=folder, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda p: p.stem)
def test_the_runner_trains_each_experiment_and_passes_options_on(path: Path, tmp_path: Path) -> None:
    run = run_experiment(tmp_path, path.stem, "--set", "output_dir=a b")
    directory, *words = run.stdout.splitlines()
    assert run.returncode == 0 and Path(directory) == REPOSITORY.resolve()
    command = "grpo" if is_grpo(path) else "train"
    assert words == [command, f"configs/experiments/{path.stem}.yaml", "--set", "output_dir=a b"]


@pytest.mark.parametrize("words", [(), ("",), ("conciseness_full_8b", "--resume"), ("../quickstart2",)])
def test_the_runner_lists_the_experiments_where_it_knows_none_of_that_name(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    run = run_experiment(tmp_path, *words)
    assert (run.returncode, run.stdout) == (2, "")
    head, *names = run.stderr.splitlines()
    assert names == [f"  {e.stem}" for e in EXPERIMENTS]
    assert not words or not words[0] or f'no experiment "{words[0]}"' in head


def test_the_field_form_is_unchanged() -> None:
    path = REPOSITORY / "configs" / "experiments" / "conciseness_lora_7b.yaml"
    assert yaml.safe_load(path.read_text(encoding="utf-8")) == yaml.safe_load(FIELD)


def test_countdown_of_the_field_form_has_the_same_population() -> None:
    ours, theirs = experiment("countdown_lora_7b"), experiment("conciseness_lora_7b")
    assert (ours.lora, ours.es, ours.model) == (theirs.lora, theirs.es, theirs.model)
    assert ours.task.train_data == "data/tasks/countdown/countdown.json"
    assert ours.evaluation.max_tokens == 1024


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("task", ["conciseness", "countdown"])
def test_full_parameter_settings_are_the_papers(task: str, size: str) -> None:
    config = experiment(f"{task}_full_{size}")
    es = config.es
    assert config.space.name == "full"
    assert re.fullmatch(rf"Qwen/Qwen2\.5-{size}-Instruct", config.model.name, re.IGNORECASE)
    assert (es.population_size, es.sigma, es.learning_rate, es.num_generations) == (30, 1e-3, 5e-4, 1000)
    assert (es.shaping, es.antithetic, es.decay, es.optimizer.name) == ("zscore", False, 0.0, "sgd")
    assert (es.sigma_schedule.name, es.learning_rate_schedule.name) == ("constant", "constant")
    assert (config.task.prompt, config.task.batch_size, config.evaluation.temperature) == ("raw", None, 0.0)
    if task == "countdown":
        assert (config.task.split, config.task.train_size, config.task.test_size) == ("first_last", 200, 2000)
        assert config.evaluation.max_tokens == 1024


@pytest.mark.parametrize("size", ["1.5b", "7b"])
def test_lowrank_settings(size: str) -> None:
    config = experiment(f"countdown_lowrank_{size}")
    assert (config.space.name, config.lowrank.rank) == ("lowrank", 1)
    assert (config.es.shaping, config.es.antithetic) == ("centered", True)
    assert (config.task.split, config.task.train_size, config.task.test_size) == ("first_last", 200, 2000)


def test_the_quickstarts_need_no_download() -> None:
    for name in ("quickstart", "quickstart_countdown", "quickstart_grpo"):
        assert load([REPOSITORY / "configs" / f"{name}.yaml"]).model.name == "tiny"


def test_quickstart_countdown_never_trains_on_its_test_rows() -> None:
    task = load([REPOSITORY / "configs" / "quickstart_countdown.yaml"]).task
    assert (task.prompt, task.split, task.train_size, task.test_size) == ("short", "first_last", 1700, 500)


def test_the_config_for_vllm_gets_the_deep_kernels_and_the_settings_of_its_experiment() -> None:
    config, source = load([REPOSITORY / "configs" / "vllm_countdown.yaml"]), experiment("countdown_lowrank_1.5b")
    assert isinstance(config.engine, VllmConfig)
    assert form(config) == "deep"
    assert slots(config) == config.es.population_size
    shorter = {"num_generations": source.es.num_generations}
    assert config.es.model_copy(update=shorter) == source.es
    assert (config.model, config.lowrank, config.evaluation) == (source.model, source.lowrank, source.evaluation)
    assert config.engine.max_model_len is not None
    assert config.evaluation.max_tokens < config.engine.max_model_len


@pytest.mark.parametrize("size", SIZES)
def test_grpo_on_countdown_has_the_published_settings_and_the_work_of_es(size: str) -> None:
    ours, theirs = experiment(f"countdown_grpo_{size}"), experiment(f"countdown_full_{size}")
    assert (ours.task, ours.model) == (theirs.task, theirs.model)
    assert ours.evaluation == theirs.evaluation
    grpo = ours.grpo
    assert (grpo.learning_rate, grpo.beta, grpo.temperature, grpo.num_generations) == (1e-6, 5e-3, 0.7, 30)
    assert (grpo.max_steps, grpo.loss_type, grpo.lr_scheduler_type) == (500, "grpo", "constant")
    assert round_size(grpo) == 60


def test_grpo_on_conciseness_has_the_published_settings() -> None:
    config = experiment("conciseness_grpo_7b")
    grpo = config.grpo
    assert (grpo.learning_rate, grpo.temperature, grpo.num_generations, grpo.max_steps) == (5e-6, 0.7, 30, 1000)
    assert (grpo.loss_type, grpo.lr_scheduler_type, round_size(grpo)) == ("grpo", "constant", 60)
    assert (config.evaluation.max_tokens, config.task.prompt) == (128, "chat")


def test_the_quickstart_of_grpo_does_the_work_of_the_one_of_es() -> None:
    ours, theirs = (load([REPOSITORY / "configs" / f"quickstart_{name}.yaml"]) for name in ("grpo", "countdown"))
    assert ours.task.model_copy(update={"batch_size": theirs.task.batch_size}) == theirs.task
    assert (ours.model, ours.evaluation) == (theirs.model, theirs.evaluation)
