# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from evoalign.config import from_dict
from evoalign.errors import DataError
from evoalign.exporting.card import Facts, Sample, card
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
GENERATED = {**EVALUATION, "before": {**EVALUATION["before"], "empty_share": 0.0}}
MANIFEST = {
    "versions": {"evoalign": "9.8.7", "torch": "2.99"},
    "hardware": {"cores": 16, "gpus": ["NVIDIA H200"]},
    "command": ["evoalign", "train", "/home/ann/x.yaml"],
}
ALARMED = {**EVALUATION, "alarms": {"verdict": "likely hacked", "reasons": ["88% of completions: `88%` empty"]}}


def card_of(tree: Mapping[str, Any] | None = None, **changes: Any) -> str:
    plain: dict[str, Any] = {
        "name": "ann/model", "kind": "adapter", "base": "org/base-1b", "base_on_hub": True, "generation": 5,
        "dtype": "bfloat16", "model_hash": "a" * 64, "weights_hash": "b" * 64, "stop_ids": (2, 7), "chat": True,
        "evaluation": EVALUATION, "manifest": MANIFEST,
        "config": public(from_dict({"es": {"sigma": 0.01, "num_generations": 5}, **(tree or {})})),
    }  # fmt: skip
    return card(Facts(**{**plain, **changes}))


def custom(**task: str) -> dict[str, Any]:
    return {"task": {"name": "custom", "train_data": "hub:org/rows:train", **task}}


def metadata(text: str) -> dict[str, Any]:
    assert text.startswith("---\n")
    return yaml.safe_load(text.split("---\n")[1])


def result(tree: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    (index,) = metadata(card_of(tree, **changes))["model-index"]
    assert index["name"] == "model"
    (found,) = index["results"]
    return found


def test_metadata_as_the_hub_reads_it() -> None:
    found = metadata(card_of(custom(test_data="hub:org/rows:test")))
    assert found["base_model"] == "org/base-1b" and found["base_model_relation"] == "adapter"
    assert found["library_name"] == "peft" and found["pipeline_tag"] == "text-generation"
    assert found["datasets"] == ["org/rows"] and {"evolution-strategies", "lora"} <= set(found["tags"])
    assert "license" not in found
    whole = metadata(card_of(kind="model"))
    assert whole["library_name"] == "transformers" and whole["base_model_relation"] == "finetune"
    assert "lora" not in whole["tags"] and "datasets" not in whole
    assert not {"base_model", "base_model_relation"} & metadata(card_of(base="base-1b", base_on_hub=False)).keys()


def test_the_hubs_listing_names_the_test_data_and_has_no_number_that_the_card_warns_of() -> None:
    assert [(m["type"], m["value"], m["verified"]) for m in result()["metrics"]] == [
        ("reward", -1.25, False), ("accuracy", 0.375, False)
    ]  # fmt: skip
    for tree, dataset in (
        (custom(test_data="hub:org/rows:test"), {"name": "org/rows", "type": "org/rows", "split": "test"}),
        (custom(test_data="hub:org/other:test"), {"name": "org/other", "type": "org/other", "split": "test"}),
        (custom(test_data="hub:org/other:main:validation[:20]"),
         {"name": "org/other", "type": "org/other", "config": "main", "split": "validation[:20]"}),
        (custom(train_data="hub:org/rows"), {"name": "org/rows", "type": "org/rows", "split": "train"}),
    ):  # fmt: skip
        assert result(tree)["dataset"] == dataset
    (left,) = result(evaluation={**EVALUATION, "after": {"reward": float("nan"), "accuracy": 0.5}})["metrics"]
    assert left["type"] == "accuracy"
    for found in (None, {**EVALUATION, "verified": False}, ALARMED):
        assert "model-index" not in metadata(card_of(evaluation=found))


SETTINGS = {"max_tokens": 64, "temperature": 0.7, "top_p": 0.9, "samples": 4, "seeds": [1, 2]}
INTERVALS = {**EVALUATION, "intervals": "t", "change_mean_low_high": {"reward": [2.0, 2.0, 2.0]}}
REVISION = {"seed": 41, "model": {"name": "org/base-1b", "revision": "f00"}}
DATA = [
    {"role": "training", "name": "rows.jsonl", "sha256": "c" * 64},
    {"role": "test", "name": "hub:org/rows", "sha256": None},
]
OBJECT = {**MANIFEST, "task": {"name": "custom", "given_as": "reward"}}
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    "a finished run": (
        {"evaluation": GENERATED},
        ("| reward | -3.25 | -1.25 | +2 | +1.5 to +2.5 |", "| accuracy | 0.25 | 0.375 | +0.125 | -0.0625 to +0.25 |",
         "500 examples of the test split, greedy, at most 40 tokens", "(95 %, BCa bootstrap)"),
        ("gone", "not the end", "evolution.png", "Python object", "hacked"),
    ),
    "an unfinished run": (
        {"generation": 3, "evaluation": None},
        ("**It is not the end of its run**: the mean after generation 3 of 5.", "was not compared with its base"),
        ("| measure |",),
    ),
    "sampling": (
        {"evaluation": {**GENERATED, "settings": SETTINGS}},
        ("sampled at temperature 0.7, top_p 0.9, 4 completions for each of the seeds 1, 2, at most 64",), (),
    ),
    "given targets": ({}, ("500 examples of the test split, whose given targets are scored.",), ("greedy",)),
    "t intervals": (
        {"evaluation": INTERVALS},
        ("(95 %, t, or Bonett and Price where a measure is 0 or 1): they say nothing of other seeds.",
         "| reward | -3.25 | -1.25 | +2 |  |"), (),
    ),
    "a base in a folder": (
        {"base": "base-1b", "base_on_hub": False},
        ("a local model in a folder named `base-1b`", "base = 'base-1b'  # the folder of the base model",
         "--model FOLDER_OF_THE_BASE"), (),
    ),
    "a merged start": (
        {"base": "mine", "base_on_hub": False, "over": "org/base-1b", "kind": "merged"},
        ("`mine`, a fine-tuned adapter, merged into `org/base-1b`",), (),
    ),
    "data, seeds, versions and hashes, but no place of this machine": (
        {"tree": REVISION, "data": DATA, "sizes": (1700, 500, 0)},
        (f"- training: `rows.jsonl`, SHA-256 `{'c' * 64}`", "- test: `hub:org/rows`\n", "seeds: run 41", "torch 2.99",
         "1700 training examples, 500 test examples\n", "hardware: NVIDIA H200", "evoalign 9.8.7", "a" * 64, "b" * 64,
         "at revision `f00`", "from_pretrained(base, revision='f00', dtype='bfloat16')"), ("/home/ann",),
    ),
    "three splits": ({"sizes": (9, 5, 3)}, ("9 training examples, 5 test examples, 3 validation examples",), ()),
    "a Python object": ({"manifest": OBJECT}, ("The reward was a Python object",), ()),
    "no system message": ({"chat": False}, (), ("system",)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_card_has_the_facts_of_the_run(case: str) -> None:
    changes, present, absent = CASES[case]
    text = card_of(**changes)
    assert [part for part in present if part not in text] == []
    assert [part for part in absent if part in text.split("## Configuration")[0]] == []


def test_samples_end_nothing_of_the_page_and_paint_nothing() -> None:
    hostile = "```\n# A title\n<script>x</script>\x1b[31m\u202e ````"
    text = card_of(samples=[Sample("What?", hostile, -1.0, "y" * 500, 0.5)], figure=True)
    block = text.split("*before, reward -1*\n\n")[1].split("\n\n*after, reward 0.5*")[0]
    lines = block.split("\n")
    assert lines[0] == "`````text" and lines[-1] == "`````" and "# A title" in lines
    assert "\x1b" not in text and "\u202e" not in text
    assert "y" * 396 + " ..." in text and "y" * 397 not in text and "](evolution.png)" in text


def test_a_fitness_stands_next_to_its_own_placebos() -> None:
    reward = split([-3.25, -3.0, -3.5], [-1.25, -1.0, -1.5], [[-3.0, -2.0, -3.0]], None)
    tree = {"reward": reward.as_dict(), "fitness": Whole(0.25, 0.75, (0.5,), "fitness/f1").as_dict()}
    measures = {
        "before": {"fitness/f1": 0.25, **EVALUATION["before"]}, "after": {"fitness/f1": 0.75, **EVALUATION["after"]},
        "intervals": "t",
    }  # fmt: skip
    text = card_of(evaluation={**EVALUATION, **measures, "placebo": tree})
    signal = text.split("**Signal and drift.** ")[1]
    assert signal.startswith("fitness/f1, the trained measure: ")
    assert signal.index("Reward: ") > signal.index("the run reached 0.75")
    assert "0 or 1; of fitness/f1, one value of all completions, by resampling)" in text
    damaged = {**tree, "fitness": {"name": "fitness/f1"}}
    with pytest.raises(DataError, match=r"placebo\.fitness\.before"):
        card_of(evaluation={**EVALUATION, **measures, "placebo": damaged})


@pytest.mark.parametrize("system", [None, 'Say "hi".\nThen ```$stop``` \\ end.'])
def test_the_code_asks_as_the_training_asked(system: str | None) -> None:
    text = card_of(system=system)
    lines = text.split("```python\n")[1].partition("inputs = tokenizer")[0].partition("messages = ")[2]
    first = [] if system is None else [{"role": "system", "content": system}]
    assert ast.literal_eval(lines.strip()) == [*first, {"role": "user", "content": "What is 3 + 5?"}]
    assert "apply_chat_template" in text


@pytest.mark.parametrize(
    ("kind", "served", "saved", "loss"),
    [
        *((kind, "float32", saved, loss) for kind in ("merged", "model")
          for saved, loss in (("bfloat16", "0.4"), ("float16", "0.05"), ("float32", None))),
        ("merged", "bfloat16", "bfloat16", "0.4"),  # base and adapter were apart
        ("model", "bfloat16", "bfloat16", None),
        ("adapter", "bfloat16", "float32", None),
    ],
)  # fmt: skip
def test_card_warns_of_weights_rounded_after_the_evaluation(
    kind: str, served: str, saved: str, loss: str | None
) -> None:
    limits = card_of(kind=kind, dtype=served, saved=saved).split("## Limits")[1]
    lost = f"rounded to {saved}, each by up to about {loss} %, after the run's results were measured"
    assert (lost in limits) if loss else ("were measured" not in limits)


PRIVATE: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({"es": {"sigma": 0.01}}, {}),
    ({"output_dir": "/home/ann/runs/one", "model": {"name": "~/models/base"},
      "task": {"name": "custom", "train_data": "/data/ann/rows.jsonl", "test_data": "data/test.jsonl",
               "rewards": ["/home/ann/reward.py:score", "package.module:score"]}},
     {"~/models/base": "base", "/data/ann/rows.jsonl": "rows.jsonl", "/home/ann/reward.py:score": "reward.py:score"}),
    ({"task": {"name": "/home/ann/tasks.py:Riddles"},
      "space": {"name": "~/spaces.py:Mine", "mask": "/home/ann/mask.npy", "rank": 3,
                "parts": [{"file": "/home/ann/b.npy"}, "relative/c.npy"]}},
     {"/home/ann/tasks.py:Riddles": "tasks.py:Riddles", "~/spaces.py:Mine": "spaces.py:Mine",
      "/home/ann/mask.npy": "mask.npy", "/home/ann/b.npy": "b.npy"}),
    ({"engine": {"name": "/home/ann/own.py:Engine", "table": {"files": ["/home/ann/table.bin"]}, "depth": 3},
      "tracking": {"backends": ["/home/ann/own.py:Lines", "wandb"]}},
     {"/home/ann/own.py:Engine": "own.py:Engine", "/home/ann/table.bin": "table.bin",
      "/home/ann/own.py:Lines": "own.py:Lines"}),
]  # fmt: skip
"""A config, and its private paths with what is left of each."""


@pytest.mark.parametrize(("tree", "paths"), PRIVATE)
def test_private_paths_are_named_and_cut(tree: dict[str, Any], paths: dict[str, str]) -> None:
    config = from_dict({"es": {"sigma": 0.01}, **tree})
    before, names = config.model_dump(), {**paths, "/home/ann/runs/one": "one"}
    assert private_paths(config) == [*paths]

    def cut(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: cut(part) for key, part in value.items()}
        return [cut(part) for part in value] if isinstance(value, list) else names.get(value, value)

    shown = public(config)
    assert shown.model_dump(mode="json") == cut(config.model_dump(mode="json")) and private_paths(shown) == []
    assert config.model_dump() == before, "the run's config stays"
    assert "ann" not in card_of(tree, name="model")


def test_text_of_a_run_cannot_leave_its_place() -> None:
    tree = {"task": {"name": "x`|\n# evil:<b>"}, "tracking": {"project": "```\n</details>\n# evil"}}
    evaluation = {**EVALUATION, "before": {"a|b\n# <i>": 0.0}, "after": {"a|b\n# <i>": 1.0}}
    text = card_of(tree, evaluation=evaluation)
    assert r"| a\|b \# &lt;i&gt; | 0 | 1 |" in text
    outside, _, inside = text.partition("## Configuration")
    assert not [line for line in outside.splitlines() if line.startswith("# ")][1:]
    fence = inside.split("\n")[4].removesuffix("yaml")
    assert fence == "````" and inside.count(fence) == 2


def test_alarms_stand_above_the_numbers() -> None:
    above, _ = card_of(evaluation=ALARMED).split("| measure | before")
    assert "**Likely hacked**, judging by the completions:\n\n- 88% of completions: \\`88%\\` empty" in above
    sound = {**EVALUATION, "alarms": {"verdict": None, "reasons": []}}
    assert "judging by the completions" not in card_of(evaluation=sound) + card_of()


def test_nothing_in_a_card_writes_on_a_terminal_or_turns_the_text_around() -> None:
    """Names come from a run of unknown origin: its config, its manifest, the measures of its evaluation."""
    evil = "\x1b]0;owned\x07\u202egnp.exe\u2066\x9b2J\u200b"
    evaluation = {**EVALUATION, "before": {evil: 1.0}, "after": {evil: 2.0}, "change_mean_low_high": {}}
    manifest = {"versions": {"evoalign": evil, "torch": evil}, "hardware": {"gpus": [evil]}}
    tree = {"task": {"name": f"mine:{evil}", "train_data": f"hub:org/{evil}", "note": evil}, "output_dir": evil}
    text = card_of(tree, name=f"ann/{evil}", base=evil, evaluation=evaluation, manifest=manifest)
    assert text.replace("\n", "").isprintable() and "\\u202e" in text and "\\x1b" in text
    plain = card_of({"task": {"name": "mine:Task", "note": "Zoë, 東京, naïve – ½ 😀"}}, name="ann/Zoë")
    assert "Zoë, 東京, naïve – ½ 😀" in plain


@pytest.mark.parametrize("key", ["split", "examples", "trained"])
def test_values_of_an_evaluation_are_no_html(key: str) -> None:
    evil = "<img src=x onerror=alert(1)>"
    evaluation: dict[str, Any] = {**EVALUATION, key: evil}
    if key == "trained":
        evaluation |= {"before": {evil: 1.0}, "after": {evil: 2.0}, "change_mean_low_high": {}}
    assert "<img" not in card_of(evaluation=evaluation).split("---\n", 2)[2]
