# SPDX-License-Identifier: Apache-2.0
"""Every config that ships loads, names its command, is known to the runner, and keeps the published settings."""

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from command_line import caller

import evoalign
from evoalign.baselines import planning
from evoalign.baselines.settings import round_size
from evoalign.config import from_dict, to_yaml
from evoalign.config import load as read_config
from evoalign.engines.ray.settings import RayConfig
from evoalign.engines.specs import specs_of_config
from evoalign.engines.vllm.settings import VllmConfig
from evoalign.models import tiny
from evoalign.tasks import TASKS, create

load = functools.cache(lambda path, *words: read_config([path], words))
REPOSITORY = Path(__file__).parents[2]
CONFIGS = REPOSITORY / "configs"
EXPERIMENTS = sorted(CONFIGS.glob("experiments/*.yaml"))
SHIPPED = [*sorted(CONFIGS.glob("*.yaml")), *EXPERIMENTS]
QUICKSTARTS = [path for path in SHIPPED if path.stem.startswith("quickstart")]
UNTRAINED = [p for p in [*SHIPPED, *sorted(CONFIGS.glob("comparison/*.yaml"))] if p not in QUICKSTARTS]
"""Configs that no test trains: their models are too large, or their settings are those of a quickstart."""
each_shipped = pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
SIZES = ["0.5b", "1.5b", "3b", "7b"]
LLAMAS = ["llama_1b", "llama_3b"]
STUDIES = ("conciseness_lora_7b", "conciseness_lora_7b_rank8", "countdown_lora_7b")
"""Of the original LoRA populations."""
SHAPES = {
    "0.5b": ("qwen2", 896, 4864, 24, 14, 2, 151_936),
    "1.5b": ("qwen2", 1536, 8960, 28, 12, 2, 151_936),
    "3b": ("qwen2", 2048, 11_008, 36, 16, 2, 151_936),
    "7b": ("qwen2", 3584, 18_944, 28, 28, 4, 152_064),
    "llama_1b": ("llama", 2048, 8192, 16, 32, 8, 128_256),
    "llama_3b": ("llama", 3072, 8192, 28, 24, 8, 128_256),
    "0.6b": ("qwen3", 1024, 3072, 28, 16, 8, 151_936),
    "smollm2": ("llama", 576, 1536, 30, 9, 3, 49_152),
    "alpaca_7b": ("llama", 4096, 11_008, 32, 32, 32, 32_001),
}
"""Of the published models: kind, width, inner width, layers, heads, heads of keys and values, vocabulary."""

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


def head(path):
    return path.read_text(encoding="utf-8").split("\n\n")[0]


def header(path):
    """The comments that a file begins with, in one line."""
    return " ".join(line.lstrip("# ") for line in head(path).splitlines()) + " "


def command(path):
    return "grpo" if load(path).es_ is None else "train"


def experiment(name):
    return load(CONFIGS / "experiments" / f"{name}.yaml")


def shipped(name):
    return load(CONFIGS / f"{name}.yaml")


@each_shipped
def test_it_loads_names_its_command_and_data_and_what_it_changes_is_the_config(path):
    """A step of 0.05 to 2 times the noise's width, but for the studies of the field's own 0.01, which say so, and for
    one whose decay takes its steps back, which says so too. A dry run shows no default, and that loads to the same."""
    config, task, shown = load(path), load(path).task, to_yaml(load(path), changed=True)
    assert head(path).startswith("# SPDX-License-Identifier: Apache-2.0\n")
    assert f"evoalign {command(path)} {path.relative_to(REPOSITORY)}" in head(path)
    if path.stem in STUDIES:
        assert config.es.eta == 0.01 and "not expected to learn" in header(path).lower()
    elif path.stem == "quickstart_safety":
        assert config.es.eta == pytest.approx(3) and config.es.decay and "eta 3" in path.read_text(encoding="utf-8")
    elif command(path) == "train":
        assert 0.05 <= config.es.eta <= 2
    for name in filter(None, (task.train_data, task.test_data)):  # but 27,393 rows that are not ours to hand on
        of_hub = task.name == "safety" and name.startswith("hub:PKU-Alignment/PKU-SafeRLHF:")
        assert of_hub or (REPOSITORY / name).is_file(), f"{path.name} names {name}"
    assert from_dict(yaml.safe_load(shown)) == config
    whole = to_yaml(config, without=config.unused(grpo=command(path) == "grpo"))
    assert len(shown.splitlines()) < 0.7 * len(whole.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("path", QUICKSTARTS, ids=lambda p: p.stem)
def test_quickstart_trains_for_two_generations(path, tmp_path, monkeypatch):
    """With fewer members, completions and test examples than a quickstart has."""
    monkeypatch.chdir(REPOSITORY)
    run, is_grpo = tmp_path / "run", command(path) == "grpo"
    less = ["es.num_generations=2", "es.population_size=4"]
    if is_grpo:
        less = ["grpo.max_steps=2", f"grpo.per_device_train_batch_size={2 * load(path).grpo.num_generations}"]
    less += ["task.test_size=8", "sampling.max_tokens=16", "evaluation.max_tokens=16"]
    config = load(path, *less, f"output_dir={run}")
    evoalign.grpo(config) if is_grpo else evoalign.train(config)
    rows = [json.loads(line)["generation"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = json.loads((run / "results" / "evaluation.json").read_text())
    assert rows == [0, 1] and found["generation"] == 2
    assert found["examples"] > 0 and "reward" in found["before"].keys() & found["after"].keys()


def hub_row(split, number):
    """A row of GSM8K, MATH and PKU-SafeRLHF, with each pair of labels in turn."""
    question, labels = f"Question {number} of {split}?", divmod(number % 4, 2)
    return {
        "question": question, "answer": f"It is {number}.\n#### {number}", "prompt": question, "problem": question,
        "is_response_0_safe": bool(labels[0]), "is_response_1_safe": bool(labels[1]),
    }  # fmt: skip


@pytest.mark.parametrize("path", UNTRAINED, ids=lambda p: p.stem)
@pytest.mark.first("countdown_lowrank_1.5b", "vllm_countdown", "gsm8k", others="slow")  # each runs in CI
def test_dry_run_accepts_config_with_empty_model(path, tmp_path, monkeypatch, capsys):
    """Without a hub: the model has the shape that the config names and no weights; rows of a hub are made up, and of
    many rows that are generated or on disk the first ones are enough."""
    config, sets = load(path), ["output_dir=run"]
    if config.model.name != "tiny":
        name = config.model.name.lower()
        size = max((key for key in SHAPES if all(part in name for part in key.split("_"))), key=len)
        folder = shape(tmp_path, size)
        sets.append(f"model.name={folder}")
        if config.task.name == "sums":  # its model has to know tools
            template = (REPOSITORY / "studies" / "episodes_chat_template.jinja").read_text()
            (Path(folder) / "chat_template.jinja").write_text(template)
    is_generated = hasattr(TASKS[config.task.name], "rows")
    rows = max(64 if is_generated else 480, config.task.batch_size or 0)
    if is_generated or config.task.name == "countdown":
        sets += [f"task.train_size={min(config.task.train_size or rows, rows)}", "task.test_size=64"]
    if not is_generated and (config.task.train_data is None or config.task.train_data.startswith("hub:")):
        for split, count in (("train", rows), ("test", 8)):
            lines = "".join(f"{json.dumps(hub_row(split, i))}\n" for i in range(count))
            (tmp_path / f"{split}.jsonl").write_text(lines)
            sets.append(f"task.{split}_data={tmp_path / split}.jsonl")
    monkeypatch.chdir(tmp_path)
    named = {name for name in ("train", "grpo") if f"evoalign {name} {path.relative_to(REPOSITORY)}" in head(path)}
    for name in {command(path), *named}:
        done = caller(monkeypatch, capsys)(name, path, "--dry-run", *(word for one in sets for word in ("--set", one)))
        assert done.code == 0 and not (tmp_path / "run").exists(), done.err


def test_output_directories_differ():
    assert len({load(path).output_dir for path in SHIPPED}) == len(SHIPPED)


def run_experiments(folder, *calls):
    """The runner from elsewhere, with an `evoalign` that says where it is and what it was asked; and its exit codes."""
    fake = folder / "evoalign"
    fake.write_text('#!/bin/sh\npwd\nfor word in "$@"; do echo "$word"; done\n')
    fake.chmod(0o755)
    runner = REPOSITORY / "scripts" / "experiments" / "run.sh"
    script = "\n".join(f"{shlex.join([str(runner), *words])}; echo code $?; echo next >&2" for words in calls)
    env = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(["sh", "-c", script], env=env, cwd=folder, capture_output=True, text=True, timeout=60)


def test_the_runner_trains_each_experiment_and_passes_options_on(tmp_path):
    run = run_experiments(tmp_path, *([path.stem, "--set", "output_dir=a b"] for path in EXPERIMENTS))
    expected = [[str(REPOSITORY.resolve()), command(path), f"configs/experiments/{path.stem}.yaml", "--set",
                 "output_dir=a b", "code 0"] for path in EXPERIMENTS]  # fmt: skip
    assert run.stdout.splitlines() == [word for words in expected for word in words]


def test_the_runner_lists_the_experiments_where_it_knows_none_of_that_name(tmp_path):
    calls = [(), ("",), ("conciseness_full_8b", "--resume"), ("../quickstart2",)]
    run = run_experiments(tmp_path, *calls)
    assert run.stdout.splitlines() == ["code 2"] * len(calls)
    for words, part in zip(calls, run.stderr.split("next\n"), strict=False):
        head, *names = part.splitlines()
        assert names == [f"  {e.stem}" for e in EXPERIMENTS]
        assert not words or not words[0] or f'no experiment "{words[0]}"' in head


def test_the_field_form_is_unchanged():
    path = CONFIGS / "experiments" / "conciseness_lora_7b.yaml"
    assert yaml.safe_load(path.read_text(encoding="utf-8")) == yaml.safe_load(FIELD)


def test_countdown_of_the_field_form_has_the_same_population():
    ours, theirs = experiment("countdown_lora_7b"), experiment("conciseness_lora_7b")
    assert (ours.lora, ours.es, ours.model) == (theirs.lora, theirs.es, theirs.model)
    assert ours.task.train_data == "data/tasks/countdown/countdown.json"
    assert ours.evaluation.max_tokens == 1024


@pytest.mark.parametrize(
    ("task", "size"), [*(("conciseness", size) for size in SIZES), *(("countdown", size) for size in [*SIZES, *LLAMAS])]
)
def test_full_parameter_settings_are_the_papers(task, size):
    config = experiment(f"{task}_full_{size}")
    es, qwen, llama = config.es, rf"Qwen/Qwen2\.5-{size}-Instruct", rf"meta-llama/Llama-3\.2-{size[6:]}-Instruct"
    assert config.space.name == "full"
    assert re.fullmatch(llama if size in LLAMAS else qwen, config.model.name, re.IGNORECASE)
    assert (es.population_size, es.sigma, es.learning_rate, es.num_generations) == (30, 1e-3, 5e-4, 1000)
    assert (es.shaping, es.antithetic, es.decay, es.optimizer.name) == ("zscore", False, 0.0, "sgd")
    assert (es.sigma_schedule.name, es.learning_rate_schedule.name) == ("constant", "constant")
    assert (config.task.batch_size, config.sampling.temperature) == (None, 0.0)
    if task == "countdown":
        assert (config.task.prompt, config.evaluation.temperature) == ("raw", 0.0)
        assert (config.task.split, config.task.train_size, config.task.test_size) == ("first_last", 200, 2000)
        assert config.evaluation.max_tokens == 1024


CONCISENESS = [p for p in EXPERIMENTS if p.stem.startswith("conciseness_") and p.stem not in STUDIES]


@pytest.mark.parametrize("path", CONCISENESS, ids=lambda p: p.stem)
def test_conciseness_is_trained_and_judged_as_published(path):
    """Greedy training, 128 tokens, chat; 160 completions of each of several trained models."""
    config, sampling, evaluation = load(path), load(path).sampling, load(path).evaluation
    assert config.task.prompt == "chat" and sampling.max_tokens == evaluation.max_tokens == 128
    assert config.es_ is None or sampling.temperature == 0.0
    assert (evaluation.temperature, evaluation.top_p, evaluation.samples, evaluation.seeds) == (0.7, 1.0, 20, [44])
    assert "--seeds 0,1,2,3 " in header(path) and "eval runs" not in header(path).split("--seeds")[0]
    assert f"evoalign eval {config.output_dir}_sweep" in header(path)


@pytest.mark.parametrize(("names", "dtype"), [
    ("conciseness_full_*", "bfloat16"), ("countdown_full_*", "float16"), ("countdown_full_1.5b_at_scale", "bfloat16"),
    ("math_full_*", "bfloat16"), ("safety_full_*", "float16"),
])  # fmt: skip
def test_full_parameter_experiments_have_the_published_dtype(names, dtype):
    found = {p.stem: load(p).model.dtype for p in CONFIGS.glob(f"experiments/{names}.yaml")}
    others = {name for name in found if name.endswith("_at_scale") and "*" in names}
    assert found and {found[name] for name in found.keys() - others} == {dtype}


def test_settings_of_es_at_scale():
    own, math = experiment("countdown_full_1.5b_at_scale"), experiment("math_full_7b")
    assert (own.es.num_generations, own.task.batch_size, own.evaluation.max_tokens, own.seed) == (500, 200, 512, 42)
    assert (math.model.name, math.task.batch_size, math.evaluation.max_tokens) == ("Qwen/Qwen2.5-Math-7B", 1024, 3000)
    for es in (own.es, math.es):
        assert (es.population_size, es.sigma, es.learning_rate, es.shaping) == (30, 1e-3, 5e-4, "zscore")
    small, large = experiment("countdown_full_0.5b_chat"), experiment("countdown_full_1.5b_chat")
    own = ("model", "output_dir")
    assert small.model_copy(update={name: getattr(large, name) for name in own}) == large


def test_the_other_published_settings():
    wide = experiment("conciseness_full_7b_wide").es
    assert (wide.sigma, wide.learning_rate, wide.eta) == (0.0015, 0.00075, 0.5)
    ours, paper = experiment("countdown_full_1.5b_chat"), experiment("countdown_full_1.5b")
    assert (ours.task.prompt, ours.es.num_generations) == ("chat_opened", 500)
    assert ours.es.model_copy(update={"num_generations": 1000}) == paper.es
    rank8 = experiment("conciseness_lora_7b_rank8")
    assert (rank8.lora.rank, rank8.lora.alpha, rank8.lora.evolve) == (8, 16, "ab")
    width = rank8.es.noise_multiplier  # of mean |W|; there 0.1 x perturb_scale 0.2, in generation 0 x init_scale 4
    assert width == pytest.approx(0.1 * 0.2) and rank8.lora.init_scale * width == pytest.approx(0.1 * 4)
    learns = experiment("conciseness_lora_7b_b")
    assert (learns.lora.evolve, learns.es.eta, learns.lora.target_layers) == ("b", 0.5, None)
    assert 0.001 <= learns.lora.alpha / learns.lora.rank**0.5 * learns.es.width <= 0.0015, "as wide as dense noise"


def shape(folder, size):
    names = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "vocab_size")  # fmt: skip
    tree = {**dict(zip(names, SHAPES[size], strict=True)), "tie_word_embeddings": not size.endswith("7b")}
    (folder / "config.json").write_text(json.dumps(tree))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tiny() / name, folder / name)
    return folder


@pytest.mark.parametrize("path", [p for p in EXPERIMENTS if "_grpo_" in p.stem], ids=lambda p: p.stem)
def test_the_header_of_a_baseline_says_the_memory_of_its_dry_run(path, tmp_path):
    size = re.sub(r"_beta\d+$", "", path.stem.split("_grpo_")[1])
    model, said = f"model.name={shape(tmp_path, size)}", header(path)
    specs = specs_of_config(load(path, model))

    def need(*words):
        return planning.memory(load(path, model, *words), specs).kept / 2**30

    whole = need()
    assert f"Memory, without activations: {whole:.1f} GiB" in said
    assert (whole > 131) == ("a GPU of 141 GB (131 GiB) does not hold" in said)
    if whole > 80:
        adapter = re.search(r"([0-9.]+) GiB with ((--set \S+ )+)", said)
        assert adapter and adapter[1] == f"{need(*adapter[2].replace('--set ', '').split()):.1f}"


def test_countdown_correct_rewards_the_answer_alone():
    config = experiment("countdown_correct")
    task = create(config.task)
    row = {"numbers": [1, 2, 4], "target": "7", "context": "<think>"}
    texts = ["</think>\n<answer>1 + 2 + 4</answer>", "<answer>4 + 2 + 1</answer>.", "</think>\n<answer>9</answer>", ""]
    assert task.rewards(texts, [row] * 4) == [1.0, 1.0, 0.0, 0.0] and task.max_reward == 1.0
    assert [task.measures(text, row)["format"] for text in texts[:3]] == [1.0, 0.5, 1.0]
    assert config.sampling.max_tokens == config.evaluation.max_tokens == 1024


@pytest.mark.parametrize("size", ["1.5b", "7b"])
def test_lowrank_settings(size):
    config = experiment(f"countdown_lowrank_{size}")
    assert (config.space.name, config.lowrank.rank) == ("lowrank", 1)
    assert (config.es.shaping, config.es.antithetic) == ("centered", True)
    assert (config.task.split, config.task.train_size, config.task.test_size) == ("first_last", 200, 2000)


def test_the_quickstarts_need_no_download_and_that_with_ray_is_the_plain_one():
    for name in ("quickstart", "quickstart_countdown", "quickstart_grpo", "quickstart_ray"):
        assert shipped(name).model.name == "tiny"
    ray, plain = shipped("quickstart_ray"), shipped("quickstart")
    assert isinstance(ray.engine, RayConfig) and ray.deterministic
    own = ("engine", "deterministic", "output_dir")
    assert ray.model_copy(update={name: getattr(plain, name) for name in own}) == plain
    assert ray.engine.replica == plain.engine


def test_quickstart_countdown_never_trains_on_its_test_rows_and_that_of_grpo_does_its_work():
    theirs, ours = shipped("quickstart_countdown"), shipped("quickstart_grpo")
    task = theirs.task
    assert (task.prompt, task.split, task.train_size, task.test_size) == ("short", "first_last", 1700, 500)
    assert ours.task.model_copy(update={"batch_size": task.batch_size}) == task
    assert (ours.model, ours.evaluation) == (theirs.model, theirs.evaluation)


def test_the_config_for_vllm_gets_the_deep_kernels_and_the_settings_of_its_experiment():
    config, source = shipped("vllm_countdown"), experiment("countdown_lowrank_1.5b")
    assert isinstance(config.engine, VllmConfig)
    assert config.engine.form(config) == "deep"
    assert config.engine.slots(config) == config.es.population_size
    shorter = {"num_generations": source.es.num_generations}
    assert config.es.model_copy(update=shorter) == source.es
    assert (config.model, config.lowrank, config.evaluation) == (source.model, source.lowrank, source.evaluation)
    assert config.engine.max_model_len is not None
    assert config.evaluation.max_tokens < config.engine.max_model_len


@pytest.mark.parametrize("size", [*SIZES, *LLAMAS])
def test_grpo_on_countdown_has_the_published_settings_and_the_work_of_es(size):
    beside = "1.5b_chat" if size == "1.5b" else size  # at 1.5B the replication ran both
    ours, theirs = experiment(f"countdown_grpo_{size}"), experiment(f"countdown_full_{beside}")
    assert (ours.task, ours.model.name) == (theirs.task, theirs.model.name)
    assert ours.evaluation == theirs.evaluation
    grpo = ours.grpo
    assert (grpo.learning_rate, grpo.beta, grpo.temperature, grpo.num_generations) == (1e-6, 5e-3, 0.7, 30)
    assert (grpo.max_steps, grpo.loss_type, grpo.lr_scheduler_type) == (500, "grpo", "constant")
    assert round_size(grpo) == 60


def test_grpo_on_conciseness_has_the_published_settings():
    config = experiment("conciseness_grpo_7b")
    grpo = config.grpo
    assert (grpo.learning_rate, grpo.temperature, grpo.num_generations, grpo.max_steps) == (5e-6, 0.7, 30, 1000)
    assert (grpo.loss_type, grpo.lr_scheduler_type, round_size(grpo)) == ("grpo", "constant", 60)
    assert (config.evaluation.max_tokens, config.task.prompt) == (128, "chat")


def test_what_sampling_and_evaluation_share_stays_apart_where_it_is_shown():
    drawn = {"es": {"sigma": 0.1}, "sampling": {"top_p": 1.0, "max_tokens": 128}}
    config = from_dict({**drawn, "evaluation": {"top_p": 0.9, "temperature": 0.5, "max_tokens": 7}})
    assert from_dict(yaml.safe_load(to_yaml(config, changed=True))) == config


def test_no_comment_names_a_package_that_only_an_index_would_have():
    """From a clone, `pip install 'evoalign[math]'` finds nothing, or something else."""
    for path in [*SHIPPED, *(REPOSITORY / "src/evoalign/cli/templates").iterdir()]:
        assert "evoalign[" not in path.read_text(encoding="utf-8"), path
