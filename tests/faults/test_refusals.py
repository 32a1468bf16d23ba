# SPDX-License-Identifier: Apache-2.0
"""Input that would mislead is refused in words, and nothing is left behind."""

import functools
import json

import pytest
import torch
import typer
from rich.console import Console

import evoalign
from evoalign.baselines import planning
from evoalign.cli.resolving import show_plan
from evoalign.config import from_dict
from evoalign.engines.transformers.decode import Decoder
from evoalign.errors import ConfigError, EvoalignError, RewardError
from evoalign.tasks.conciseness import Conciseness
from evoalign.types import Sampling

QUIET = Console(quiet=True)


def custom(tmp_path, prompt="Say a word:", **sections):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for _ in range(4)))
    return {
        "output_dir": str(tmp_path / "run"), "model": {"name": "tiny"},
        "task": {"name": "custom", "train_data": str(rows), "test_data": str(rows)},
        "es": {"sigma": 0.02, "num_generations": 2, "population_size": 4}, "evaluation": {"max_tokens": 4}, **sections,
    }  # fmt: skip


def length(prompts, completions, **columns):
    return [float(len(text)) for text in completions]


def test_a_prompt_beyond_the_positions(tmp_path):
    tree = custom(tmp_path, prompt="word " * 3000)
    with pytest.raises(ConfigError, match="exceed the model's 2048 positions"):
        evoalign.train(tree, reward=length, console=QUIET)
    assert not (tmp_path / "run").exists()


def test_an_interrupt_in_the_first_generation_leaves_nothing(tmp_path):
    calls = []

    def interrupted(prompts, completions, **columns):
        calls.append(1)
        if len(calls) > 1:  # the first call scores the start
            raise KeyboardInterrupt
        return length(prompts, completions)

    with pytest.raises(KeyboardInterrupt):
        evoalign.train(custom(tmp_path, grader={"isolated": False}), reward=interrupted, console=QUIET)
    assert not (tmp_path / "run").exists()


def test_a_dry_run_tells_of_a_taken_folder(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "journal.jsonl").write_text("")
    tree = custom(tmp_path) | {"task": {"name": "conciseness"}}
    assert any(line.startswith("would be refused: output_dir") for line in evoalign.dry_run(tree))
    assert not any("refused" in line for line in evoalign.dry_run(tree, overwrite=True))
    show = functools.partial(show_plan, from_dict(tree), "es", everything=False)
    with pytest.raises(typer.Exit) as refused:
        show(evoalign.dry_run(tree))
    assert refused.value.exit_code == 2
    show(evoalign.dry_run(tree, overwrite=True))


@pytest.mark.parametrize("name", ["./no-such-folder", "no/such-model-anywhere"])
@pytest.mark.parametrize("method", ["es", "grpo"])
def test_a_dry_run_tells_of_a_model_that_is_not_there(name, method, tmp_path):
    tree = {**custom(tmp_path), "task": {"name": "conciseness"}, "model": {"name": name}, "grpo": {}}
    told = evoalign.dry_run(tree) if method == "es" else planning.dry_run(tree)
    assert any(line.startswith("would be refused: model") and name in line for line in told)


def test_a_run_with_a_reward_object_asks_for_it_again(tmp_path):
    result = evoalign.train(custom(tmp_path), reward=length, console=QUIET)
    with pytest.raises(ConfigError, match="pass the same one as reward="):
        evoalign.evaluate(result.path)
    assert evoalign.evaluate(result.path, reward=length).measures["reward"] == result.after.measures["reward"]
    header = json.loads((result.path / "journal.jsonl").read_text().splitlines()[0])
    manifest = json.loads((result.path / "manifest.json").read_text())
    assert header["model_hash"] == manifest["engine"]["model_hash"] != header["weights_hash"]


@pytest.mark.parametrize(
    ("section", "words"),
    [({"samples": 20}, "greedy"), ({"seeds": [0, 1]}, "greedy"),
     ({"temperature": 0.7, "seeds": [1, 1]}, r"evaluation\.seeds \[1, 1\]")],
)  # fmt: skip
def test_draws_that_make_no_sense(section, words):
    with pytest.raises(ConfigError, match=words):
        from_dict({"es": {"sigma": 0.01}, "evaluation": section})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers(temperature):
    logits = torch.zeros(2, 5)
    logits[1, 3] = float("nan")
    with pytest.raises(EvoalignError, match="logits are"):
        Decoder._choose(None, logits, None, 0, Sampling(1, temperature))


def test_a_nan_of_a_tasks_own_rewards(tmp_path):
    class Careless(Conciseness):
        def rewards(self, texts, examples):
            return [float("nan")] * len(texts)

    tree = custom(tmp_path) | {"task": {"name": "conciseness"}}
    with pytest.raises(RewardError, match="returned nan as the reward"):
        evoalign.train(tree, task=Careless(from_dict(tree).task), console=QUIET)
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["failed_completion.json"]


@pytest.mark.slow
def test_a_run_may_not_choose_what_is_imported(tmp_path):
    marker = tmp_path / "imported"
    (tmp_path / "mine.py").write_text(
        f"open({str(marker)!r}, 'w').close()\n\n\ndef length(prompts, completions, **columns):\n"
        "    return [float(len(text)) for text in completions]\n"
    )
    tree = custom(tmp_path)
    tree["task"]["rewards"] = [f"{tmp_path / 'mine.py'}:length"]
    run = evoalign.train(tree, console=QUIET).path
    marker.unlink()
    with pytest.raises(ConfigError, match=r"task\.rewards"):
        evoalign.evaluate(run)
    assert not marker.exists()
    assert evoalign.evaluate(run, config=run / "config.yaml").measures["reward"] >= 0
