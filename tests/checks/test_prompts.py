# SPDX-License-Identifier: Apache-2.0
"""Prompts, stop tokens and padding that the model has no embedding or no room for."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from small_runs import UNCHECKED

import evoalign
from evoalign import tokens
from evoalign.config import ModelConfig, from_dict
from evoalign.errors import ConfigError, ModelError
from evoalign.models import tiny
from evoalign.preflight.doctor import findings


def edited(folder: Path, file: str, **changes: Any) -> None:
    """Change keys of a JSON file; `...` removes one."""
    path = folder / file
    tree = {**(json.loads(path.read_text()) if path.exists() else {}), **changes}
    path.write_text(json.dumps({k: v for k, v in tree.items() if v is not ...}))


@pytest.fixture
def model(tmp_path) -> Path:
    return Path(shutil.copytree(tiny(), tmp_path / "model"))


def with_more_tokens(model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(model)


STOPS: dict[str, tuple[object, object, dict[str, Any], str, tuple[int, ...]]] = {
    "config alone": ([2, 1], ..., {}, "<|endoftext|>", (0, 1, 2)),
    "an ordinary token in config alone": (40, ..., {}, "<|endoftext|>", (0, 40)),
    "an ordinary token left over in config": (40, 2, {}, "<|endoftext|>", (0, 2)),
    "a special token in config besides": (1, 2, {}, "<|endoftext|>", (0, 1, 2)),
    "text_config": (..., ..., {"text_config": {"eos_token_id": 2}}, "<|endoftext|>", (0, 2)),
    "beyond the embedding": (99999, ..., {}, "<|im_end|>", (2,)),
    "none": (None, ..., {}, "", ()),
}
"""eos_token_id of config.json and generation_config.json, more of config.json, the tokenizer's, and the stop tokens."""


@pytest.mark.parametrize("case", STOPS)
def test_load_reads_stop_tokens_from_every_file(case, model):
    of_config, generation, more, own, stops = STOPS[case]
    edited(model, "config.json", eos_token_id=of_config)
    edited(model, "generation_config.json", eos_token_id=generation)
    edited(model, "tokenizer_config.json", eos_token=own or None)
    if more:
        whole = json.loads((model / "config.json").read_text())
        edited(model, "config.json", **{"text_config": {**more["text_config"]}, "vocab_size": whole["vocab_size"]})
    loaded = tokens.load(ModelConfig(name=str(model)))
    assert loaded.stop_ids == stops and loaded.pad_id < 1024


def test_load_refuses_an_eos_that_is_no_token(model):
    edited(model, "config.json", eos_token_id="</s>")
    with pytest.raises(ModelError, match="eos_token_id"):
        tokens.load(ModelConfig(name=str(model)))


def config(model: Path, folder: Path, prompts: list[str], **tree: Any) -> dict[str, Any]:
    for name, rows in (("train", prompts), ("test", ["Name a colour."])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in rows))
    (folder / "r.py").write_text("def r(completions, **kwargs):\n    return [float(len(c)) for c in completions]\n")
    task = {"name": "custom", "prompt": "raw", "train_data": str(folder / "train.jsonl"), "batch_size": 1,
            "test_data": str(folder / "test.jsonl"), "rewards": [f"{folder / 'r.py'}:r"]}  # fmt: skip
    es = {"num_generations": 3, "population_size": 2, "sigma": 0.05, "learning_rate": 0.02}
    base = {"task": task, "es": es, "grader": {"isolated": False}, "model": {"name": str(model)},
            "output_dir": str(folder / "run"), "space": "lora", "sampling": {"max_tokens": 4},
            "evaluation": {"max_tokens": 4}, "checks": UNCHECKED}  # fmt: skip
    return {name: {**base.get(name, {}), **tree[name]} if name in tree else base[name] for name in {*base, *tree}}


TOOL = ["Say one.", "Use <tool> now.", "Say two."]
LONG = ["Say one.", "word " * 3000]


@pytest.mark.parametrize(("prompts", "more", "kind", "words"), [
    (TOOL, True, ModelError, "train row 1: .*1024 '<tool>'.*1,024 rows"),
    (LONG, False, ConfigError, "sampling.max_tokens 4 exceed the model's 2048 positions"),
])  # fmt: skip
def test_train_dry_run_and_doctor_refuse_prompts_at_the_start(prompts, more, kind, words, model, tmp_path):
    if more:
        with_more_tokens(model)
    made = config(model, tmp_path, prompts)
    with pytest.raises(kind, match=words):
        evoalign.train(made)
    assert not (tmp_path / "run" / "journal.jsonl").exists()
    (refused,) = [line for line in evoalign.dry_run(made) if line.startswith("would be refused")]
    finding = next(f for f in findings(from_dict(made)) if f.name == "prompt length")
    for text in (refused, finding.detail):
        assert re.search(words, text)
    assert finding.status == "failed"


def test_a_row_that_is_never_drawn_may_be_too_long(model, tmp_path):
    drawn = {"num_generations": 1}
    rows = [*["Say one."] * 200, "word " * 3000]
    evoalign.train(config(model, tmp_path, rows, es=drawn))


def test_train_and_dry_run_warn_of_a_model_without_stop_token(model, tmp_path, capsys):
    edited(model, "config.json", eos_token_id=None)
    (model / "generation_config.json").unlink()
    edited(model, "tokenizer_config.json", eos_token=None)
    made = config(model, tmp_path, ["Say one."], es={"num_generations": 1})
    assert any("no stop token" in line for line in evoalign.dry_run(made))
    evoalign.train(made)
    assert "no stop token" in " ".join(capsys.readouterr().out.split())


MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] }}{% if m['role'] != 'assistant' %}"
    "{{ '<|im_end|>\\n' }}{% else %}END{% endif %}{% endfor %}"
)
"""A chat template whose assistant messages end with the text END."""
ENDS: dict[str, tuple[str | None, dict[str, Any], dict[str, Any], bool]] = {
    "another stop token": (None, {}, {}, True),
    "a stop text that the engine removes": (None, {}, {"sampling": {"max_tokens": 4, "stop": ["<|im_end|>"]}}, True),
    "a stop text after it": (None, {}, {"sampling": {"max_tokens": 4, "stop": ["\n"]}}, False),
    "raw prompts": (None, {}, {"task": {"prompt": "raw"}}, False),
    "a stop token": (None, {"eos_token_id": [0, 2]}, {}, False),
    "nothing": (MARKED.replace("END", ""), {}, {}, False),
    "white space": (MARKED.replace("END", "{{ '\\n\\n' }}"), {}, {}, False),
    "ordinary text": (MARKED.replace("END", "the end"), {}, {}, False),
    "no finished answer": (MARKED.replace("END", "{{ raise_exception('no') }}"), {}, {}, False),
}
"""The chat template (None: tiny's), generation_config.json, more of the config, and whether it is warned."""


@pytest.mark.parametrize("case", ENDS)
def test_dry_run_and_doctor_warn_of_an_end_of_turn_that_is_no_stop_token(case, model, tmp_path):
    template, generation, more, warned = ENDS[case]
    edited(model, "config.json", eos_token_id=0)
    edited(model, "generation_config.json", **{"eos_token_id": 0, **generation})
    edited(model, "tokenizer_config.json", eos_token="<|endoftext|>")
    if template is not None:
        edited(model, "tokenizer_config.json", chat_template=template)
    made = config(model, tmp_path, ["Say one."], **{"task": {"prompt": "chat"}, **more})
    lines = [line for line in evoalign.dry_run(made) if "<|im_end|>" in line and "eos_token_id" in line]
    finding = next(f for f in findings(from_dict(made)) if f.name == "chat template")
    assert (len(lines), finding.status) == ((1, "warning") if warned else (0, "ok"))
    assert ("eos_token_id" in finding.fix) == warned
