# SPDX-License-Identifier: Apache-2.0
"""Files that decide scores besides weights, data and settings: a resumed run has the ones it began with."""

import io
import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console
from small_runs import UNCHECKED, told_by, write_rows

import evoalign
from evoalign import tokens, tracking
from evoalign.config import from_dict
from evoalign.errors import ResumeError
from evoalign.models import tiny
from evoalign.rundir import journal
from evoalign.training.inputs import check_inputs, inputs_of

REWARD = "def reward(prompts, completions, **columns):\n    return [-float(len(text)) for text in completions]\n"
SAME, STOPS, MODEL, REWARDS = None, "stop_ids", "model_config", "rewards"
CHANGES = {
    "rope theta": ("config.json", {"rope_parameters": {"rope_theta": 123.0, "rope_type": "default"}}, MODEL),
    "epsilon": ("config.json", {"rms_norm_eps": 0.125}, MODEL),
    "a setting that is not there yet": ("config.json", {"attention_bias": True}, MODEL),
    "who saved it": ("config.json", {"transformers_version": "0.0", "_name_or_path": "x", "use_cache": False}, SAME),
    "how it was saved": ("config.json", {"dtype": "float16", "torch_dtype": "float16"}, SAME),
    "stop tokens": ("generation_config.json", {"eos_token_id": [5, 7]}, STOPS),
    "sampling": ("generation_config.json", {"temperature": 0.25}, SAME),
    "reward": ("own.py", REWARD.replace("-", ""), REWARDS),
}


def config(folder: Path, generations: int = 1) -> dict:
    return {
        "output_dir": str(folder / "run"), "model": {"name": str(folder / "model")}, "report": False,
        "task": {"name": "custom", "train_data": str(folder / "rows.jsonl"), "test_size": 2, "batch_size": 2,
                 "rewards": [f"{folder / 'own.py'}:reward"]},
        "lora": {"rank": 1, "target_layers": [0], "target_modules": ["down_proj"]},
        "es": {"sigma": 0.05, "learning_rate": 0.02, "population_size": 2, "num_generations": generations},
        "evaluation": {"max_tokens": 2}, "checks": UNCHECKED,
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(tiny(), tmp_path / "model")
    (tmp_path / "own.py").write_text(REWARD)
    write_rows(tmp_path / "rows.jsonl", ({"prompt": f"question {i}"} for i in range(12)))
    return tmp_path


def change(folder: Path, name: str) -> str | None:
    file, found, kind = CHANGES[name]
    path = folder / file if file == "own.py" else folder / "model" / file
    if isinstance(found, str):
        path.write_text(found)
    else:
        known = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps(known | found))
    return kind


@pytest.mark.parametrize("name", CHANGES)
def test_inputs_differ_where_a_file_that_decides_scores_does(name, folder):
    given = from_dict(config(folder))
    before = inputs_of(given, tokens.load(given.model))
    kind = change(folder, name)
    after = inputs_of(given, tokens.load(given.model))
    assert [key for key in after if before[key] != after[key]] == ([] if kind is None else [kind])
    if kind in (STOPS, MODEL):
        with pytest.raises(ResumeError, match="was trained with"):
            check_inputs(folder, before, after)
    else:
        assert len(check_inputs(folder, before, after)) == (kind == REWARDS)
    for earlier in (None, {}, {"other": "x"}, "damaged"):
        assert check_inputs(folder, earlier, after) == []


@pytest.mark.parametrize(("task", "is_refused"), [
    ({"name": "countdown", "reward_weights": [0.0, 1.0]}, True), ({"name": "countdown"}, False),
    ({"name": "countdown", "reward_weights": [0.1, 1.0]}, False),  # as without them
    ({"name": "custom", "train_data": "rows.jsonl", "rewards": ["own.py:reward"], "reward_weights": [2.0]}, False),
])  # fmt: skip
def test_a_run_of_a_release_that_ignored_weights_of_countdown_is_not_resumed_with_them(task, is_refused, tmp_path):
    given = from_dict({"es": {"sigma": 0.01}, "model": {"name": str(tiny())}, "task": task})
    found = inputs_of(given, tokens.load(given.model))
    assert check_inputs(tmp_path, found, found) == []
    for earlier in (None, {STOPS: found[STOPS], MODEL: found[MODEL]}):
        if is_refused:
            with pytest.raises(ResumeError, match=r"reward_weights.*\[0\.0, 1\.0\]"):
                check_inputs(tmp_path, earlier, found)
        else:
            assert check_inputs(tmp_path, earlier, found) == []


def test_resumed_run_has_the_files_it_began_with(folder):
    evoalign.train(config(folder))
    header = journal.read_header(folder / "run/journal.jsonl")
    assert header.inputs is not None and set(header.inputs) == {STOPS, MODEL, REWARDS}
    before = {file: file.read_bytes() for file in (folder / "model").iterdir()}
    for name in ("rope theta", "stop tokens"):
        change(folder, name)
        with pytest.raises(ResumeError, match="was trained with"):
            evoalign.train(config(folder, 2), resume=True)
        with pytest.raises(ResumeError, match="was trained with"):
            evoalign.placebo(folder / "run", shuffles=1, config=config(folder))
        shutil.rmtree(folder / "model")
        (folder / "model").mkdir()
        for file, raw in before.items():
            file.write_bytes(raw)
    change(folder, "reward")
    assert "the files of the custom rewards or task changed" in told_by(config(folder, 2), resume=True)


TEMPLATE = "{% for message in messages %}{{ message['content'] + '!' }}{% endfor %}"
RESUMED = {
    "data": ("rows.jsonl", lambda text: text.replace("question 3", "question 33"), "trained on other data"),
    "epsilon": ("model/config.json", lambda text: text.replace("1e-06", "0.125"), "was trained with other settings"),
    "stop tokens": ("model/generation_config.json", lambda _: '{"eos_token_id": 5}', "trained with the stop tokens"),
    "template": ("model/tokenizer_config.json", lambda text: json.dumps(json.loads(text) | {"chat_template": TEMPLATE}),
                 "chat template"),
    "reward": ("own.py", lambda text: text.replace("-", ""), None),
}  # fmt: skip
"""File, its other text, and the error of a resumed run; None: a warning."""


@pytest.mark.parametrize("method", ["es", "grpo"])
def test_both_methods_compare_what_decides_scores(method, folder):
    if method == "grpo" and not tracking.is_installed("trl"):
        pytest.skip("needs trl")
    begin = evoalign.train if method == "es" else evoalign.grpo

    def resumed(steps: int, *, resume: bool = True) -> str:
        own = {"max_steps": steps, "num_generations": 2, "per_device_train_batch_size": 2, "rollouts": "engine",
               "lr_scheduler_type": "constant", "tune": "lora"}  # fmt: skip
        told = io.StringIO()
        given = config(folder, steps) | {"grpo": own, "checkpoint": {"every": 1}}
        begin(given, resume=resume, console=Console(file=told, width=300))
        return told.getvalue()

    resumed(1, resume=False)
    for steps, names in ((1, tuple(RESUMED)), (2, ("stop tokens", "reward"))):  # finished, and unfinished
        for name in names:
            file, other, error = RESUMED[name]
            text = (folder / file).read_text()
            assert other(text) != text
            (folder / file).write_text(other(text))
            if error is None:
                assert resumed(steps).count("the files of the custom rewards or task changed") == 1
            else:
                with pytest.raises(ResumeError, match=error):
                    resumed(steps)
            if name == "template":
                with pytest.raises(ResumeError, match="prompts_hash"):
                    evoalign.evaluate(folder / "run", config=config(folder))
            (folder / file).write_text(text)


def test_resumed_run_names_a_table_that_it_was_killed_before_writing(folder):
    evoalign.train(config(folder))
    table = folder / "run/results/completions/generation_0000.parquet"
    assert table.is_file() and str(table) not in told_by(config(folder), resume=True)
    table.unlink()
    assert f"before it wrote {table}" in told_by(config(folder), resume=True)
