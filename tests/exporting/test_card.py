# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from evoalign.config import from_dict
from evoalign.errors import DataError
from evoalign.exporting.card import DataFile, Facts, Sample, card
from evoalign.exporting.source import private_paths, public
from evoalign.placebos.estimates import Whole, split

EVALUATION = {
    "format_version": 1,
    "split": "test",
    "examples": 500,
    "settings": {"max_tokens": 40, "temperature": 0.0, "top_p": 1.0, "samples": 1, "seeds": [0]},
    "before": {"reward": -3.25, "accuracy": 0.25, "gone": 1.0},
    "after": {"reward": -1.25, "accuracy": 0.375},
    "change_mean_low_high": {"reward": [2.0, 1.5, 2.5], "accuracy": [0.125, -0.0625, 0.25]},
}
MANIFEST = {
    "versions": {"evoalign": "9.8.7", "torch": "2.99"},
    "hardware": {"cores": 16, "gpus": ["NVIDIA H200"]},
    "command": ["evoalign", "train", "/home/ann/x.yaml"],
}


def facts(tree: Mapping[str, Any] | None = None, **changes: Any) -> Facts:
    config = from_dict({"es": {"sigma": 0.01, "num_generations": 5}, **(tree or {})})
    plain: dict[str, Any] = {
        "name": "ann/model", "kind": "adapter", "base": "org/base-1b", "base_on_hub": True, "generation": 5,
        "dtype": "bfloat16", "model_hash": "a" * 64, "weights_hash": "b" * 64, "stop_ids": (2, 7), "chat": True,
        "evaluation": EVALUATION, "manifest": MANIFEST,
    }  # fmt: skip
    return Facts(config=public(config), **{**plain, **changes})


def metadata(text: str) -> dict[str, Any]:
    assert text.startswith("---\n")
    return yaml.safe_load(text.split("---\n")[1])


def test_metadata_as_the_hub_reads_it() -> None:
    tree = {"task": {"name": "custom", "train_data": "hub:org/rows:train", "test_data": "hub:org/rows:test"}}
    found = metadata(card(facts(tree)))
    assert found["base_model"] == "org/base-1b" and found["base_model_relation"] == "adapter"
    assert found["library_name"] == "peft" and found["pipeline_tag"] == "text-generation"
    assert found["datasets"] == ["org/rows"]
    assert {"evolution-strategies", "lora"} <= set(found["tags"])
    assert "license" not in found
    whole = metadata(card(facts(kind="model")))
    assert whole["library_name"] == "transformers" and whole["base_model_relation"] == "finetune"
    assert "lora" not in whole["tags"] and "datasets" not in whole


def test_the_hubs_listing_has_no_number_that_the_card_warns_of() -> None:
    (index,) = metadata(card(facts()))["model-index"]
    (result,) = index["results"]
    assert [(m["type"], m["value"], m["verified"]) for m in result["metrics"]] == [
        ("reward", -1.25, False), ("accuracy", 0.375, False)
    ]  # fmt: skip
    hub = {"task": {"name": "custom", "train_data": "hub:org/rows:train", "test_data": "hub:org/rows:test"}}
    (of_hub,) = metadata(card(facts(hub)))["model-index"][0]["results"]
    assert of_hub["dataset"] == {"name": "org/rows", "type": "org/rows", "split": "test"} and index["name"] == "model"
    two = {"task": {"name": "custom", "train_data": "hub:org/rows:train", "test_data": "hub:org/asked:test"}}
    (asked,) = metadata(card(facts(two)))["model-index"][0]["results"]
    assert asked["dataset"]["name"] == "org/asked", "the one that the numbers are of"
    own = {"test_data": "hub:org/asked:main:validation[:20]"}, {"train_data": "hub:org/rows"}
    splits = [{"task": {"name": "custom", "train_data": "hub:org/rows:train", **data}} for data in own]
    named = [metadata(card(facts(tree)))["model-index"][0]["results"][0]["dataset"] for tree in splits]
    assert named == [
        {"name": "org/asked", "type": "org/asked", "config": "main", "split": "validation[:20]"},
        {"name": "org/rows", "type": "org/rows", "split": "train"},
    ], "as the data set calls the rows that were asked, also where a run tests on a part of the training split"
    infinite = {**EVALUATION, "after": {"reward": float("nan"), "accuracy": 0.5}}
    (left,) = metadata(card(facts(evaluation=infinite)))["model-index"][0]["results"][0]["metrics"]
    assert left["type"] == "accuracy"
    alarmed = {**EVALUATION, "alarms": {"verdict": "hacked", "reasons": ["all empty"]}}
    for found in (None, {**EVALUATION, "verified": False}, alarmed):
        assert "model-index" not in metadata(card(facts(evaluation=found)))


def test_samples_end_nothing_of_the_page_and_paint_nothing() -> None:
    hostile = "```\n# A title\n<script>x</script>\x1b[31m\u202e ````"
    text = card(facts(samples=[Sample("What?", hostile, -1.0, "y" * 500, 0.5)], figure=True))
    block = text.split("*before, reward -1*\n\n")[1].split("\n\n*after, reward 0.5*")[0]
    lines = block.split("\n")
    assert lines[0] == "`````text" and lines[-1] == "`````" and "# A title" in lines
    assert "\x1b" not in text and "\u202e" not in text
    assert "y" * 396 + " ..." in text and "y" * 397 not in text
    assert "](evolution.png)" in text and "evolution.png" not in card(facts())


def test_a_start_that_was_merged_is_named() -> None:
    text = card(facts(base="mine", base_on_hub=False, over="org/base-1b", kind="merged"))
    assert "`mine`, a fine-tuned adapter, merged into `org/base-1b`" in text


def test_a_fitness_stands_beside_its_own_placebos() -> None:
    reward = split([-3.25, -3.0, -3.5], [-1.25, -1.0, -1.5], [[-3.0, -2.0, -3.0]], None)
    whole = Whole(0.25, 0.75, (0.5,), "fitness/f1")
    tree = {"reward": reward.as_dict(), "fitness": whole.as_dict()}
    measures = {
        "before": {"fitness/f1": 0.25, **EVALUATION["before"]}, "after": {"fitness/f1": 0.75, **EVALUATION["after"]},
        "intervals": "t",
    }  # fmt: skip
    text = card(facts(evaluation={**EVALUATION, **measures, "placebo": tree}))
    told = text.split("**Signal and drift.** ")[1]
    assert told.startswith("fitness/f1, the trained measure: ") and "the run reached 0.75" in told
    assert told.index("Reward: ") > told.index("the run reached 0.75")
    assert "0 or 1; of fitness/f1, one value of all completions, by resampling)" in text
    damaged = {**tree, "fitness": {"name": "fitness/f1"}}
    with pytest.raises(DataError, match=r"placebo\.fitness\.before"):
        card(facts(evaluation={**EVALUATION, **measures, "placebo": damaged}))


def test_intervals_are_called_what_they_are() -> None:
    assert "(95 %, BCa bootstrap)" in card(facts()), "results of before they said so"
    now = {**EVALUATION, "intervals": "t", "change_mean_low_high": {"reward": [2.0, 2.0, 2.0]}}
    text = card(facts(evaluation=now))
    assert "(95 %, t, or Bonett and Price where a measure is 0 or 1): they say nothing of other seeds." in text
    assert "| reward | -3.25 | -1.25 | +2 |  |" in text


def test_a_base_in_a_folder_is_named_in_the_text_alone() -> None:
    text = card(facts(base="base-1b", base_on_hub=False))
    assert not {"base_model", "base_model_relation"} & metadata(text).keys()
    assert "a local model in a folder named `base-1b`" in text
    assert "base = 'base-1b'  # the folder of the base model" in text
    assert "--model FOLDER_OF_THE_BASE" in text


def test_the_table_has_each_measure_and_its_interval() -> None:
    text = card(facts())
    assert "| reward | -3.25 | -1.25 | +2 | +1.5 to +2.5 |" in text
    assert "| accuracy | 0.25 | 0.375 | +0.125 | -0.0625 to +0.25 |" in text
    assert "gone" not in text
    assert "500 examples of the test split, greedy, at most 40 tokens" in text
    settings = {"max_tokens": 64, "temperature": 0.7, "top_p": 0.9, "samples": 4, "seeds": [1, 2]}
    sampled = card(facts(evaluation={**EVALUATION, "settings": settings}))
    assert "sampled at temperature 0.7, top_p 0.9, 4 completions for each of the seeds 1, 2, at most 64" in sampled


def test_an_unfinished_run_says_so() -> None:
    text = card(facts(generation=3, evaluation=None))
    assert "**It is not the end of its run**: the mean after generation 3 of 5." in text
    assert "was not compared with its base" in text and "| measure |" not in text
    assert "not the end" not in card(facts())


def test_data_seeds_versions_and_hashes() -> None:
    data = [DataFile("training", "rows.jsonl", "c" * 64), DataFile("test", "hub:org/rows")]
    text = card(
        facts({"seed": 41, "model": {"name": "org/base-1b", "revision": "f00"}}, data=data, sizes=(1700, 500, 0))
    )
    assert f"- training: `rows.jsonl`, SHA-256 `{'c' * 64}`" in text and "- test: `hub:org/rows`\n" in text
    assert "1700 training examples, 500 test examples\n" in text
    assert "9 training examples, 5 test examples, 3 validation examples" in card(facts(sizes=(9, 5, 3)))
    assert "seeds: run 41" in text and "torch 2.99" in text and "hardware: NVIDIA H200" in text
    assert "evoalign 9.8.7" in text and "a" * 64 in text and "b" * 64 in text
    assert "at revision `f00`" in text and "from_pretrained(base, revision='f00', dtype='bfloat16')" in text
    assert "/home/ann" not in text, "the command of the manifest names a place of this machine"


def test_the_code_asks_as_the_training_asked() -> None:
    """A system message is part of it, whatever stands in it."""
    system = 'Say "hi".\nThen ```$stop``` \\ end.'
    asked = {"role": "user", "content": "What is 3 + 5?"}
    for told, wanted in ((None, [asked]), (system, [{"role": "system", "content": system}, asked])):
        text = card(facts(system=told))
        lines = text.split("```python\n")[1].partition("inputs = tokenizer")[0].partition("messages = ")[2]
        assert ast.literal_eval(lines.strip()) == wanted
        assert "apply_chat_template" in text
    assert "system" not in card(facts(system=None, chat=False)).split("## Data")[0]


def test_weights_that_were_rounded_after_the_measuring_say_so() -> None:
    def said(kind: str, served: str, saved: str) -> str:
        return card(facts(kind=kind, dtype=served, saved=saved)).split("## Limits")[1]

    lost = "rounded to {}, each by up to about {} %, after the run's results were measured"
    for kind in ("merged", "model"):
        assert lost.format("bfloat16", "0.4") in said(kind, "float32", "bfloat16")
        assert lost.format("float16", "0.05") in said(kind, "float32", "float16")
        assert "were measured" not in said(kind, "float32", "float32")
    assert lost.format("bfloat16", "0.4") in said("merged", "bfloat16", "bfloat16")  # base and adapter were apart
    assert "were measured" not in said("model", "bfloat16", "bfloat16")
    assert "were measured" not in said("adapter", "bfloat16", "float32")


def test_a_python_object_is_told() -> None:
    manifest = {**MANIFEST, "task": {"name": "custom", "given_as": "reward"}}
    assert "The reward was a Python object" in card(facts(manifest=manifest))
    assert "Python object" not in card(facts(manifest={**MANIFEST, "task": {"name": "custom", "given_as": None}}))


def test_private_paths_are_cut_and_named() -> None:
    tree = {
        "output_dir": "/home/ann/runs/one",
        "task": {"name": "custom", "train_data": "/data/ann/rows.jsonl", "test_data": "data/test.jsonl",
                 "rewards": ["/home/ann/reward.py:score", "package.module:score"]},
        "model": {"name": "~/models/base"},
    }  # fmt: skip
    config = from_dict({"es": {"sigma": 0.01}, **tree})
    assert private_paths(config) == ["~/models/base", "/data/ann/rows.jsonl", "/home/ann/reward.py:score"]
    cut = public(config)
    assert (cut.output_dir, cut.model.name) == ("one", "base")
    assert (cut.task.train_data, cut.task.test_data) == ("rows.jsonl", "data/test.jsonl")
    assert cut.task.rewards == ["reward.py:score", "package.module:score"]
    assert "ann" not in card(facts(tree, name="model")) and private_paths(cut) == []
    assert private_paths(from_dict({"es": {"sigma": 0.01}})) == []


def test_private_paths_of_a_task_and_a_space_of_ones_own() -> None:
    tree = {
        "task": {"name": "/home/ann/tasks.py:Riddles"},
        "space": {"name": "~/spaces.py:Mine", "mask": "/home/ann/mask.npy", "rank": 3,
                  "parts": [{"file": "/home/ann/b.npy"}, "relative/c.npy"]},
    }  # fmt: skip
    config = from_dict({"es": {"sigma": 0.01}, **tree})
    assert private_paths(config) == ["/home/ann/tasks.py:Riddles", "~/spaces.py:Mine", "/home/ann/mask.npy",
                                     "/home/ann/b.npy"]  # fmt: skip
    cut = public(config)
    assert (cut.task.name, cut.space.name) == ("tasks.py:Riddles", "spaces.py:Mine")
    assert cut.space.options == {"mask": "mask.npy", "rank": 3, "parts": [{"file": "b.npy"}, "relative/c.npy"]}
    assert "ann" not in card(facts(tree, name="model")) and private_paths(cut) == []
    assert config.space.options["mask"] == "/home/ann/mask.npy", "the run's own config stays"


def test_text_of_a_run_cannot_leave_its_place() -> None:
    tree = {"task": {"name": "x`|\n# evil:<b>"}, "tracking": {"project": "```\n</details>\n# evil"}}
    evaluation = {**EVALUATION, "before": {"a|b\n# <i>": 0.0}, "after": {"a|b\n# <i>": 1.0}}
    text = card(facts(tree, evaluation=evaluation))
    assert r"| a\|b \# &lt;i&gt; | 0 | 1 |" in text
    outside, _, inside = text.partition("## Configuration")
    assert not [line for line in outside.splitlines() if line.startswith("# ")][1:]
    fence = inside.split("\n")[4].removesuffix("yaml")
    assert fence == "````" and inside.count(fence) == 2


def test_parts_of_ones_own_are_named_without_their_place() -> None:
    engine = {"name": "/home/ann/own.py:Engine", "table": {"files": ["/home/ann/table.bin"]}, "depth": 3}
    tree = {"es": {"sigma": 0.01}, "engine": engine, "tracking": {"backends": ["/home/ann/own.py:Lines", "wandb"]}}
    config = from_dict(tree)
    assert private_paths(config) == ["/home/ann/own.py:Engine", "/home/ann/table.bin", "/home/ann/own.py:Lines"]
    shown = public(config)
    assert shown.engine.model_dump() == {"name": "own.py:Engine", "table": {"files": ["table.bin"]}, "depth": 3}
    assert shown.tracking.backends == ["own.py:Lines", "wandb"]
    assert private_paths(shown) == []


def test_what_alarms_stands_above_the_numbers() -> None:
    alarms = {"verdict": "likely hacked", "reasons": ["88% of the test completions are broken: `88%` empty"]}
    text = card(facts(evaluation={**EVALUATION, "alarms": alarms}))
    above, _ = text.split("| measure | before")
    assert "**Likely hacked**, judging by the completions:\n\n- 88% of the test completions are broken" in above
    assert "\\`88%\\`" in above
    sound = {**EVALUATION, "alarms": {"verdict": None, "reasons": []}}
    assert "by what the completions say" not in card(facts(evaluation=sound)) + card(facts())


def test_nothing_in_a_card_writes_on_a_terminal_or_turns_the_text_around() -> None:
    """Names come from a run that may be anybody's: its config, its manifest, the measures of its evaluation."""
    evil = "\x1b]0;owned\x07\u202egnp.exe\u2066\x9b2J\u200b"
    evaluation = {**EVALUATION, "before": {evil: 1.0}, "after": {evil: 2.0}, "change_mean_low_high": {}}
    manifest = {"versions": {"evoalign": evil, "torch": evil}, "hardware": {"gpus": [evil]}}
    tree = {"task": {"name": f"mine:{evil}", "train_data": f"hub:org/{evil}", "note": evil}, "output_dir": evil}
    text = card(facts(tree, name=f"ann/{evil}", base=evil, evaluation=evaluation, manifest=manifest))
    assert text.replace("\n", "").isprintable() and "\\u202e" in text and "\\x1b" in text
    plain = card(facts({"task": {"name": "mine:Task", "note": "Zoë, 東京, naïve – ½ 😀"}}, name="ann/Zoë"))
    assert "Zoë, 東京, naïve – ½ 😀" in plain
