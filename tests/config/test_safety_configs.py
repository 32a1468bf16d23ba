# SPDX-License-Identifier: Apache-2.0
"""The published settings of safety alignment: what the configs keep of them, and dry runs on rows of their form."""

import itertools
import json
import re
from pathlib import Path

import pytest

import evoalign
from evoalign.baselines import planning
from evoalign.baselines.settings import round_size
from evoalign.config import load
from evoalign.tasks import create
from evoalign.tasks.safety import Lagrangian, Safety

REPOSITORY = Path(__file__).parents[2]
CONFIGS = REPOSITORY / "configs"
ES = ("safety_full_alpaca_7b", "safety_full_alpaca_7b_50")
GRPO = {"safety_grpo_alpaca_7b_beta01": 0.01, "safety_grpo_alpaca_7b_beta1": 0.1}
ALPACA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32_001, "tie_word_embeddings": False,
}  # fmt: skip


def experiment(name, *words):
    return load([CONFIGS / "experiments" / f"{name}.yaml"], words)


def text_of(name):
    """A header, in one line."""
    return " ".join(line.lstrip("# ") for line in head(CONFIGS / "experiments" / f"{name}.yaml").splitlines())


def head(path):
    return path.read_text(encoding="utf-8").split("\n\n")[0]


@pytest.fixture
def here(tmp_path):
    """Settings that take rows and a model's shape from this machine; nothing answers at the scorer's address."""
    labels = itertools.cycle([(True, True), (False, False), (False, True), (True, False)])
    rows = [{"prompt": f"Question {i}?", "is_response_0_safe": first, "is_response_1_safe": second}
            for i, (first, second) in zip(range(480), labels, strict=False)]  # fmt: skip
    for name, part in (("train", rows), ("test", rows[:4])):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in part))
    (tmp_path / "config.json").write_text(json.dumps(ALPACA))
    data = [f"task.{name}_data={tmp_path / name}.jsonl" for name in ("train", "test")]
    return [*data, f"model.name={tmp_path}", f"output_dir={tmp_path / 'run'}"]


@pytest.mark.parametrize("name", [*ES, *GRPO])
def test_all_four_share_task_scorer_and_objective(name):
    config, first = experiment(name), experiment(ES[0])
    assert (config.scorer, config.model.name, config.evaluation) == (first.scorer, first.model.name, first.evaluation)
    task = create(config.task)
    assert isinstance(task, Safety) and (task.cut, task.config.strip, task.config.prompt) == ((), False, "conversation")
    found = task.objective()
    assert isinstance(found, Lagrangian)
    assert (found.state["lambda"], found.rate, found.maximum, found.margin) == (1.0, 0.005, 5.0, 0.0)
    assert (found.positive_only, found.safe_first, found.standardize) == (True, "none", False)
    assert (config.sampling.max_tokens, config.evaluation.temperature) == (512, 0.0)


@pytest.mark.parametrize("name", [*ES, *GRPO])
def test_the_settings_of_es_and_grpo_are_the_published_ones(name):
    config = experiment(name)
    if name in ES:
        es = config.es
        assert config.space.name == "full" and config.model.dtype == "float16"
        assert (es.population_size, es.sigma, es.learning_rate, es.num_generations) == (30, 1e-3, 5e-4, 500)
        assert (es.shaping, es.antithetic, es.decay, config.sampling.temperature) == ("zscore", False, 0.0, 0.0)
        return
    grpo = config.grpo
    assert (grpo.learning_rate, grpo.temperature, grpo.num_generations, grpo.max_steps) == (5e-6, 0.7, 30, 500)
    assert (grpo.beta, round_size(grpo)) == (GRPO[name], 60)
    assert (grpo.by_name["loss_type"], grpo.by_name["lr_scheduler_type"]) == ("grpo", "constant")


@pytest.mark.parametrize(("name", "rows", "asked"), [
    (ES[0], "100 TT, 116 FF, 19 FT, 15 TF", r"500 generations of 1,984 completions \(30 members and the mean x 64"),
    (ES[1], "20 TT, 23 FF, 4 FT, 3 TF", r"500 generations of 1,550 completions \(30 members and the mean x 50"),
    *((name, "100 TT, 116 FF, 19 FT, 15 TF", "500 steps of adamw_torch on .*, learning rate 5e-06") for name in GRPO),
])  # fmt: skip
def test_a_dry_run_selects_the_rows_and_counts_what_the_header_says(here, name, rows, asked):
    config = experiment(name, *here)
    told = "\n".join(evoalign.dry_run(config) if name in ES else planning.dry_run(config))
    assert f"training rows by their labels: {rows}" in told and re.search(asked, told)
    if name == ES[0]:
        assert "4 training rows are left out: their prompts are also those of another split" in told
        said = float(text_of(name).split("on top of its ")[1].split(" GiB")[0])
        parts = re.search(r"weights ([0-9.]+) GiB, float32 master ([0-9.]+) GiB", told)
        assert parts and float(parts[1]) + float(parts[2]) == pytest.approx(said, abs=0.06)


def test_the_memory_of_two_scorers_is_that_of_two_bodies_in_16_bits():
    width, inner, layers = ALPACA["hidden_size"], ALPACA["intermediate_size"], ALPACA["num_hidden_layers"]
    body = ALPACA["vocab_size"] * width + layers * (4 * width**2 + 3 * width * inner + 2 * width) + width
    assert f"two models of 7B in 16 bits hold {2 * 2 * (body + width) / 2**30:.1f} GiB" in text_of(ES[0])


def test_what_the_headers_offer_is_taken():
    cut, earlier = "task.cut=null", ("task.objective.safe_first=published", "task.objective.standardize=true")
    assert f"--set {cut}" in text_of(ES[0]) and "--set " + " --set ".join(earlier) in text_of(ES[0])
    config = experiment(ES[0], cut, *earlier)
    task = create(config.task)
    assert isinstance(task, Safety) and "USER:" in task.cut
    found = task.objective()
    assert isinstance(found, Lagrangian) and found.standardize and found.safe_first == "published"
    last = ("task.protocol=null", "grpo.max_steps=1000", "task.shares={TT: 20, FF: 23, FT: 4, TF: 3}")
    for name in GRPO:
        assert all(word in text_of(name) for word in last)
        assert experiment(name, *last).task.options["shares"] == experiment(ES[1]).task.options["shares"]


def test_the_header_of_the_one_for_a_cpu_starts_the_service_that_it_asks():
    file = CONFIGS / "smollm2_safety.yaml"
    config = load([file])
    assert config.scorer is not None and config.scorer.url is not None and config.task.prompt == "chat"
    assert f"make {config.model.name}\n" in head(file)
    assert f"--port {config.scorer.url.rpartition(':')[2]} " in head(file)
    for part in ("reward", "cost"):
        assert f"--{part} data/tasks/safety/models/{part}" in head(file)
        assert (REPOSITORY / "data/tasks/safety/models" / part / "model.safetensors").is_file()
