# SPDX-License-Identifier: Apache-2.0
"""Whole runs of two or three generations on the tiny model, through the Python API, and what they leave."""

import gc
import io
import json
import weakref
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from families import Bench, next_logits
from own_task import Vowels
from pyarrow import parquet
from rich.console import Console
from safetensors.torch import save_file
from small_runs import UNCHECKED, read_rows, write_rows

import evoalign
from evoalign.config import load
from evoalign.errors import ConfigError, EvoalignError, RunExistsError
from evoalign.evolve import sigma_at, step_at
from evoalign.models import tiny
from evoalign.rollouts import batch
from evoalign.rundir import journal

SPACES = ["lora", "lowrank", "full"]
WIDTHS = {"lora": 0.02, "lowrank": 0.02, "full": 0.01}


def tree(output, space="lora", **sections):
    es = {"sigma": WIDTHS[space], "learning_rate": WIDTHS[space], "num_generations": 2, "population_size": 6}
    whole = {"output_dir": str(output), "seed": 1, "space": space, "es": es, "evaluation": {"max_tokens": 12},
             "checks": UNCHECKED}  # fmt: skip
    for name, section in sections.items():
        whole[name] = {**whole.get(name, {}), **section} if isinstance(section, Mapping) else section
    return whole


def train(config, **arguments):
    return evoalign.train(config, console=Console(file=io.StringIO(), width=100), **arguments)


@pytest.fixture(scope="module", params=SPACES)
def run(request, tmp_path_factory):
    space = request.param
    return space, train(tree(tmp_path_factory.mktemp(space) / "run", space))


def test_garbage_of_an_earlier_run_is_not_kept_in_the_loop(tmp_path):
    class Circle:
        def __init__(self):
            self.itself = self

    gc.unfreeze()
    gc.disable()
    try:
        garbage, told = weakref.ref(Circle()), []
        train(tree(tmp_path / "run"), on_generation=lambda _: told.append((garbage(), gc.get_freeze_count() > 0)))
        assert told == [(None, True)] * 2 and not gc.get_freeze_count()
    finally:
        gc.enable()
        gc.freeze()


@pytest.mark.first("lora")
def test_train_writes_the_files_of_a_run(run):
    space, result = run
    names = {str(p.relative_to(result.path)) for p in result.path.rglob("*") if p.is_file()}
    saved = "loras/generation_0002" if space == "lora" else "checkpoints/generation_0002"
    expected = {"config.yaml", "manifest.json", "journal.jsonl", "metrics.jsonl", "results/evaluation.json",
                "results/completions/before.parquet", "results/completions/after.parquet",
                "figures/evolution.png", "figures/time_breakdown.png"}  # fmt: skip
    weights = {"adapter_model.safetensors", "adapter_config.json"} if space == "lora" else {
        "model.safetensors", "config.json", "tokenizer.json"}  # fmt: skip
    assert names >= expected | {f"{saved}/{name}" for name in weights}
    assert result.saved == result.path / saved
    assert (result.path / "logs").is_dir()
    assert not [name for name in names if Path(name).name.startswith(".")], "temporary files are left"
    for figure in ("evolution", "time_breakdown"):
        assert (result.path / f"figures/{figure}.png").read_bytes().startswith(b"\x89PNG")
    again = load([result.path / "config.yaml"])
    assert (again.space.name, again.es.population_size, again.seed) == (space, 6, 1)
    assert yaml.safe_load((result.path / "config.yaml").read_text())["format_version"] == 1
    manifest = json.loads((result.path / "manifest.json").read_text())
    assert manifest["format_version"] == 1
    assert {"command", "started", "config_hash", "versions", "hardware", "git", "engine"} <= manifest.keys()
    assert manifest["versions"]["torch"] == torch.__version__
    assert (manifest["engine"]["master_bytes"] == 0) == (space == "lowrank")
    rows = read_rows(result.path / "metrics.jsonl")
    assert [row["generation"] for row in rows] == [0, 1]
    assert all(row["worst"] <= row["p20"] <= row["p80"] <= row["best"] and row["tokens"] > 0 for row in rows)
    written = json.loads((result.path / "results/evaluation.json").read_text())
    assert written["before"] == result.before.measures and written["after"] == result.after.measures
    assert written["examples"] == 8 == len(result.before.completions)
    mean, low, high = written["change_mean_low_high"]["reward"]
    assert low <= mean <= high
    assert mean == pytest.approx(result.after.measures["reward"] - result.before.measures["reward"])
    for name, evaluation in (("before", result.before), ("after", result.after)):
        rows = parquet.read_table(result.path / f"results/completions/{name}.parquet").to_pylist()
        assert [row["text"] for row in rows] == [c.text for c in evaluation.completions]
        for row in rows:
            assert row["reward"] == -abs(len(row["text"].strip()) - len(row["target"]))
        assert np.mean([row["reward"] for row in rows]) == pytest.approx(evaluation.measures["reward"])


def replay(path):
    """Apply a journal's updates to a fresh engine and return the hash after each; they are the sealed ones."""
    hashes = []
    with Bench(load([path / "config.yaml"])) as bench:
        log = journal.read(path / "journal.jsonl")
        assert log.header.weights_hash == bench.engine.fingerprint()
        for recorded in log.generations:
            bench.engine.apply(recorded.update)
            hashes.append(bench.engine.fingerprint())
            assert recorded.weights_hash == hashes[-1]
    assert hashes
    return hashes


@pytest.mark.first("lora", "full")
def test_the_journal_replays_and_evaluate_repeats_the_run(run):
    """A run and what it saved have the completions of its end, the base model those of its start."""
    space, result = run
    assert len(set(replay(result.path))) == 2, "the run did not move"
    own = result.path / "config.yaml"
    assert evoalign.evaluate(result.path) == result.after
    config = own if space == "lora" else tree(Path("unused"))
    assert evoalign.evaluate(result.saved, config=config) == result.after
    assert evoalign.evaluate(tiny(), config=own) == result.before


@pytest.mark.first("lora")
@pytest.mark.last("full")
def test_the_same_seed_gives_the_same_journal(run, tmp_path):
    space, result = run
    first = (result.path / "journal.jsonl").read_bytes()
    again = train(tree(tmp_path / "again", space))
    assert (again.path / "journal.jsonl").read_bytes() == first
    other = train(tree(tmp_path / "other", space, seed=2))
    assert [line["scores"] for line in read_rows(other.path / "journal.jsonl") if line["type"] == "update"] != [
        line["scores"] for line in read_rows(result.path / "journal.jsonl") if line["type"] == "update"
    ]


VARIANTS = {
    "momentum": {"es": {"optimizer": "momentum", "num_generations": 3}},
    "adam": {"es": {"optimizer": {"name": "adam", "beta1": 0.5}, "num_generations": 3}},
    "ranks, antithetic": {"es": {"shaping": "ranks", "antithetic": True}},
    "centered": {"es": {"shaping": "centered"}},
    "identity": {"es": {"shaping": "identity", "learning_rate": 0.001}},
    "decay, linear": {"es": {"decay": 0.1, "learning_rate_schedule": "linear", "num_generations": 3}},
    "cosine width": {"es": {"sigma_schedule": {"name": "cosine", "floor": 0.5}, "num_generations": 3}},
    "ab, init_scale": {"lora": {"evolve": "ab", "init_scale": 2.0}, "es": {"sigma": 0.2, "learning_rate": 0.2}},
    "noise_multiplier": {"es": {"sigma": None, "noise_multiplier": 0.3, "learning_rate": 0.5}},
    "sampling": {"evaluation": {"temperature": 0.7, "top_p": 0.9, "samples": 2, "seeds": [0, 1]}},
    "one prompt a generation": {"task": {"batch_size": 1}},
    "eager": {"deterministic": False},
    "raw prompts": {"task": {"prompt": "raw", "strip": False}},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
}


@pytest.mark.first("adam", "sampling", others="slow")
@pytest.mark.last("momentum", "centered", "identity", "cosine", "eager", "raw prompts")
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_run_and_replay(name, tmp_path):
    result = train(tree(tmp_path / "run", **VARIANTS[name]))
    assert len(set(replay(result.path))) == load([result.path / "config.yaml"]).es.num_generations
    evaluated = evoalign.evaluate(result.path)
    assert evaluated.measures == result.after.measures


@pytest.mark.slow
@pytest.mark.parametrize("space", ["lowrank", "full"])
def test_decay_and_half_precision_of_the_whole_model_replay(space, tmp_path):
    result = train(tree(tmp_path / "run", space, es={"decay": 0.2}, model={"dtype": "bfloat16"}))
    replay(result.path)
    # The master is finer than the checkpoint, but both serve the same weights.
    assert evoalign.evaluate(result.path).measures == result.after.measures


def test_schedules_and_init_scale_as_documented(tmp_path):
    es = {"sigma": 0.2, "learning_rate": 0.1, "num_generations": 5, "sigma_schedule": {"name": "linear", "floor": 0.2},
          "learning_rate_schedule": {"name": "cosine", "floor": 0.5}}  # fmt: skip
    config = evoalign.Config.model_validate(tree(tmp_path, es=es, lora={"evolve": "ab", "init_scale": 3.0}))
    assert [sigma_at(config, g) for g in range(5)] == pytest.approx([0.6, 0.16, 0.12, 0.08, 0.04])
    assert [step_at(config, g) for g in (0, 2, 4)] == pytest.approx([0.3, 0.075, 0.05])


def test_batches_are_shuffled_epochs():
    rows = [i for generation in range(10) for i in batch(7, 3, seed=4, generation=generation)]
    for epoch in range(4):
        assert sorted(rows[7 * epoch : 7 * epoch + 7]) == list(range(7))
    assert rows[:7] != rows[7:14] and rows[:7] != sorted(rows[:7])
    assert batch(7, 3, seed=4, generation=2) != batch(7, 3, seed=5, generation=2)
    assert batch(7, None, 0, 3) == batch(7, 9, 0, 3) == list(range(7))


def plain_model(space, saved):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    if space != "lora":
        return AutoModelForCausalLM.from_pretrained(str(saved), dtype=torch.float32).eval()
    base = AutoModelForCausalLM.from_pretrained(str(tiny()), dtype=torch.float32)
    return PeftModel.from_pretrained(base, str(saved)).eval()


@pytest.mark.first("lora", "full")
def test_the_saved_weights_answer_as_the_run_did(run):
    """PEFT for an adapter, transformers for a whole model: the same greedy texts on the test questions."""
    from transformers import AutoTokenizer

    space, result = run
    model = plain_model(space, result.saved)
    tokenizer = AutoTokenizer.from_pretrained(str(tiny() if space == "lora" else result.saved))
    changed = 0
    for before, after in zip(result.before.completions, result.after.completions, strict=True):
        asked = [{"role": "user", "content": after.prompt}]
        text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        out = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
        if tokenizer.decode(out, skip_special_tokens=True) != after.text:
            best = next_logits(model, ids["input_ids"][0].tolist(), out.tolist()).topk(2).values
            assert (best[:, 0] - best[:, 1]).min() < 1e-4
        changed += before.text != after.text
    assert changed, "training changed no text: the test could not fail"


@pytest.mark.first("lora")
def test_evaluate_with_other_settings(run):
    _, result = run
    warm = {"temperature": 0.7, "samples": 3, "seeds": [0, 1]}
    evaluated = evoalign.evaluate(result.path, split="train", overrides=warm)
    assert len(evaluated.completions) == 2 * 3 * 2
    assert {(c.seed, c.sample) for c in evaluated.completions} == {(s, k) for s in (0, 1) for k in range(3)}
    assert len({c.text for c in evaluated.completions}) > 2
    assert evoalign.evaluate(result.path, split="train", overrides=warm) == evaluated
    for name, values in evaluated.measures_E.items():
        assert len(values) == 2 and evaluated.measures[name] == pytest.approx(np.mean(values))
    for e in range(2):
        own = [c.reward for c in evaluated.completions if c.example == e]
        assert evaluated.measures_E["reward"][e] == pytest.approx(np.mean(own))
    with pytest.raises(ConfigError, match=r"evaluation\.samples"):
        evoalign.evaluate(result.path, overrides={"samples": 0})


@pytest.mark.parametrize(
    ("change", "message"),
    [({"use_rslora": True}, "has no .*q_proj"), ({"alpha_pattern": {"q_proj": 4}}, "does not fit .*no .*q_proj"),
     ({"target_modules": "all-linear"}, "does not fit .*no .*_proj"), ({"r": None}, "does not fit .*no .*q_proj"),
     ({"peft_type": "IA3"}, "peft_type 'IA3'"), (None, "not an adapter's config")],
)  # fmt: skip
def test_an_adapter_that_is_not_what_it_says_is_refused(change, message, tmp_path, monkeypatch):
    """It is merged by PEFT, and has no factors here."""
    monkeypatch.setenv("EVOALIGN_CACHE", str(tmp_path / "cache"))
    save_file({}, tmp_path / "adapter_model.safetensors")
    plain = {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "target_modules": ["q_proj"],
             "base_model_name_or_path": str(tiny())}  # fmt: skip
    text = "{" if change is None else json.dumps({**plain, **change})
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(EvoalignError, match=message):
        evoalign.evaluate(tmp_path, config=tree(tmp_path))


@pytest.mark.first("lora")
def test_an_adapter_without_its_weights_is_refused(run, tmp_path):
    space, result = run
    if space == "lora":
        (tmp_path / "adapter_config.json").write_bytes((result.saved / "adapter_config.json").read_bytes())
        with pytest.raises(EvoalignError, match=r"has no adapter_model\.safetensors"):
            evoalign.evaluate(tmp_path, config=tree(tmp_path))
    with pytest.raises(EvoalignError, match="--task or --config"):
        evoalign.evaluate(tiny())


@pytest.mark.slow
def test_an_existing_run_is_refused_and_moved_aside_on_request(tmp_path):
    config = tree(tmp_path / "run", es={"num_generations": 1})
    first = (train(config).path / "journal.jsonl").read_bytes()
    with pytest.raises(RunExistsError, match="--overwrite"):
        train({**config, "seed": 2})
    assert (tmp_path / "run/journal.jsonl").read_bytes() == first
    for seed in (2, 3):
        train({**config, "seed": seed}, overwrite=True)
    folders = sorted(p.name for p in tmp_path.iterdir())
    assert len(folders) == 3 and folders[0] == "run"
    kept = {(tmp_path / name / "journal.jsonl").read_bytes() for name in folders}
    assert len(kept) == 3 and first in kept


def test_a_task_object(tmp_path):
    seen = []
    config = tree(tmp_path / "run", task={"batch_size": 2}, es={"num_generations": 3}, evaluation={"every": 1})
    result = train(config, task=Vowels(), on_generation=seen.append)
    assert [g.index for g in seen] == [0, 1, 2]
    assert all(np.array(g.scores_MP).shape == (6, 2) and len(g.fitness_M) == 6 for g in seen)
    assert all(g.fitness_M[0] == pytest.approx(np.mean(g.scores_MP[0])) for g in seen)
    assert set(seen[0].seconds) == {"rollout", "score", "update", "other"}
    assert [g.evaluation is not None for g in seen] == [True, True, False]
    assert set(result.before.measures) >= {"reward", "length", "empty_share", "truncated_share"}
    rows = read_rows(result.path / "metrics.jsonl")
    assert [bool(row["evaluation"]) for row in rows] == [True, True, False]
    seals = [line["weights_hash"] for line in read_rows(result.path / "journal.jsonl") if line["type"] == "seal"]
    assert [g.weights_hash for g in seen] == seals
    assert evoalign.evaluate(result.path, task=Vowels()) == result.after


def brevity(prompts, completions, **columns):
    return [-float(len(c)) for c in completions]


def question_marks(text, example):
    return float(text.count("?") + len(example["note"]))


@pytest.fixture
def questions(tmp_path):
    rows = ({"prompt": f"What is {n} + {n}?", "note": "x" * n} for n in range(10))
    return write_rows(tmp_path / "questions.jsonl", rows)


@pytest.mark.slow
def test_reward_functions(questions, tmp_path):
    task = {"name": "custom", "train_data": questions, "reward_weights": [1.0, 0.5], "batch_size": 4}
    config = tree(tmp_path / "run", task=task, es={"num_generations": 1})
    result = train(config, reward=[brevity, question_marks])
    for c in result.before.completions:
        example = int(c.prompt.split()[2])
        assert c.reward == -len(c.text.strip()) + 0.5 * (c.text.count("?") + example)
    one = tree(tmp_path / "one", task={"name": "custom", "train_data": questions, "prompt": "chat"})
    assert train(one, reward=brevity).before.measures["reward"] < 0
    with pytest.raises(ConfigError, match="not both"):
        train(tree(tmp_path / "both"), task=Vowels(), reward=brevity)
    with pytest.raises(ConfigError, match=r"task\.name: custom"):
        train(tree(tmp_path / "both"), reward=brevity)
    assert not (tmp_path / "both").exists()


@pytest.mark.parametrize("what", ["space", "task"])
@pytest.mark.parametrize(
    ("name", "message"),
    [("no_such_module:Thing", "no module named 'no_such_module'"), ("own_parts:Thing", "has no 'Thing'"),
     ("own_parts:First", "is not a")],
)  # fmt: skip
def test_a_part_that_is_not_one_is_refused(what, name, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        train({**tree(tmp_path / "run"), what: {"name": name}})
    assert not (tmp_path / "run").exists()
