# SPDX-License-Identifier: Apache-2.0
"""The prompts of a run: their form, and that they stay the same when it is resumed, evaluated or replayed."""

import datetime
import json
import logging
from pathlib import Path

import pytest
import yaml
from chat_templates import LLAMA, NO_SYSTEM, WHOLE, model
from pyarrow import parquet
from small_runs import UNCHECKED, told_by, write_rows
from transformers.utils import chat_template_utils

import evoalign
from evoalign.analysis.divergence import divergence_of
from evoalign.analysis.mixer import ModelMixer
from evoalign.analysis.targets import locate
from evoalign.config import from_dict
from evoalign.errors import ConfigError, ResumeError
from evoalign.preflight import doctor
from evoalign.tasks.joint import Settings
from evoalign.training import train
from evoalign.training.resolve import evaluate

LENGTH = "def length(completions, **columns):\n    return [float(-len(text)) for text in completions]\n"


def tree(folder: Path, template: object = WHOLE, generations: int = 1, **task) -> dict:
    """Return the config of a run on text prompts. A model with this template is written if it is not there yet."""
    if not (folder / "model").exists():
        model(folder / "model", template)
        (folder / "reward.py").write_text(LENGTH)
        write_rows(folder / "rows.jsonl", [{"prompt": f"{i} + {i} ="} for i in range(4)])
    rows = str(folder / "rows.jsonl")
    return {
        "output_dir": str(folder / "run"),
        "model": {"name": str(folder / "model")},
        "task": {"name": "custom", "train_data": rows, "test_data": rows, "rewards": [f"{folder}/reward.py:length"]}
        | task,
        "es": {"sigma": 0.02, "num_generations": generations, "population_size": 4},
        "sampling": {"max_tokens": 4},
        "evaluation": {"max_tokens": 4},
        "grader": {"isolated": False},
        "checks": UNCHECKED,
    }


def form(folder: Path) -> str | None:
    return yaml.safe_load((folder / "run/config.yaml").read_text())["task"]["prompt"]


def read(folder: Path, name: str = "after") -> list[str | None]:
    """Return what the model read, as the table of completions has it."""
    return parquet.read_table(folder / f"run/results/completions/{name}.parquet").column("rendered").to_pylist()


@pytest.mark.parametrize(
    ("template", "task", "recorded", "first"),
    [
        (WHOLE, {}, "chat", "<|im_start|>user\n0 + 0 =<|im_end|>\n<|im_start|>assistant\n"),
        (WHOLE, {"prompt": "raw"}, "raw", None),
        (None, {}, None, None),
    ],
)
def test_text_prompts_use_the_chat_template_where_there_is_one(template, task, recorded, first, tmp_path):
    config = tree(tmp_path, template, **task)
    told = told_by(config)
    assert form(tmp_path) == recorded and read(tmp_path)[0] == first
    line = next(line for line in told.splitlines() if line.startswith("prompts are "))
    assert line in evoalign.dry_run(config | {"output_dir": str(tmp_path / "other")})
    assert ("messages" in line) == (recorded == "chat")
    found = {f.name: f for f in doctor.findings(config)}["chat template"]
    assert line in found.detail


def test_a_run_of_an_earlier_release_keeps_its_raw_prompts(tmp_path, monkeypatch):
    config = tree(tmp_path, generations=1)
    with monkeypatch.context() as earlier:
        earlier.setattr(train, "with_form", lambda config, run=None: config)
        told_by(config)
    assert form(tmp_path) is None and read(tmp_path)[0] is None
    evoalign.train(tree(tmp_path, generations=2), resume=True)
    assert form(tmp_path) is None and read(tmp_path)[0] is None
    for given in (None, tree(tmp_path)):
        if given is None:
            with pytest.raises(ConfigError):  # its reward is code
                evaluate(tmp_path / "run")
        else:
            assert evaluate(tmp_path / "run", config=given).completions[0].rendered is None


def test_a_finished_run_is_resumed_and_evaluated_with_its_form(tmp_path):
    config = tree(tmp_path)
    told_by(config)
    told_by(tree(tmp_path, generations=2), resume=True)
    assert read(tmp_path)[0] == evaluate(tmp_path / "run", config=config).completions[0].rendered
    assert evoalign.evaluate(str(tmp_path / "model"), config=config).completions[0].rendered == read(tmp_path)[0]
    placebo = evoalign.placebo(tmp_path / "run", config=config, shuffles=1)
    assert len(placebo.seeds) == 1


class Clock(datetime.datetime):
    today = "2026-11-27"

    @classmethod
    def now(cls, tz=None):
        return cls.fromisoformat(cls.today)


def test_a_run_has_the_same_date_in_its_prompts_on_every_day(tmp_path, monkeypatch):
    """Its journal is that of a run within one day; another rendering is refused."""
    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    told = told_by(tree(tmp_path, LLAMA))
    assert "2024-07-26 on every day" in told
    monkeypatch.setattr(Clock, "today", "2026-11-28")
    told_by(tree(tmp_path, generations=2), resume=True)
    assert all("26 Jul 2024" in text for text in read(tmp_path) + read(tmp_path, "before"))
    file = tmp_path / "run/journal.jsonl"
    header = json.loads(file.read_text().splitlines()[0])
    assert len(header["prompts_hash"]) == 64
    monkeypatch.setattr("evoalign.models.templates.DATE", "2024-07-27")
    with pytest.raises(ResumeError, match="prompts_hash"):
        evoalign.train(tree(tmp_path, generations=3), resume=True)


def test_eval_refuses_other_prompts_of_a_run_that_chose_another_text_than_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr(Settings, "move", lambda self, update: self.logits.update(form=[-1.0, 0.0]))
    config = tree(tmp_path, LLAMA, settings={"form": {"text": ["{prompt}", "Sum: {prompt}"]}})
    told_by(config)
    assert "Sum: 0 + 0" in str(evaluate(tmp_path / "run", config=config).completions[0].rendered)
    monkeypatch.setattr("evoalign.models.templates.DATE", "2024-07-27")
    with pytest.raises(ResumeError, match="prompts_hash"):
        evaluate(tmp_path / "run", config=config)


COMMANDS = {
    "eval": lambda run, config: evaluate(run, config=config),
    "placebo": lambda run, config: evoalign.placebo(run, config=config, shuffles=1),
    "mixtures": lambda run, config: ModelMixer([str(run)], from_dict(config)).__exit__(),
    "divergence": lambda run, config: divergence_of(locate(str(run), from_dict(config)), 2, 2),
    "divergence of a whole model": lambda run, config: divergence_of(locate(str(run), from_dict(config)), 2, 2),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_on_a_run_refuse_prompts_that_are_rendered_otherwise(name, tmp_path, monkeypatch):
    space = {"space": "full"} if "whole" in name else {}
    config = tree(tmp_path, LLAMA) | space
    told_by(config)
    COMMANDS[name](tmp_path / "run", config)
    monkeypatch.setattr("evoalign.models.templates.DATE", "2024-07-27")
    with pytest.raises(ResumeError, match="prompts_hash"):
        COMMANDS[name](tmp_path / "run", config)
    if name != "placebo":  # which has the run's own settings
        other = tree(tmp_path, template_kwargs={"date_string": "1 Jan 2026"}) | space
        COMMANDS[name](tmp_path / "run", other)
    if name == "eval":  # as a model, it is evaluated on the present rendering
        rendered = evaluate(tmp_path / "run/loras/generation_0001", config=config).completions[0].rendered
        assert rendered is not None and "27 Jul 2024" in rendered


def test_training_dry_run_doctor_and_evaluation_warn_of_what_a_template_leaves_out(tmp_path, caplog):
    config = tree(tmp_path, NO_SYSTEM, system_prompt="Answer with a number.")
    dry = [line for line in evoalign.dry_run(config) if "leaves out the system message" in line]
    assert len(dry) == 1 and dry[0].startswith("warning: ")
    assert {f.name: f for f in doctor.findings(config)}["chat template"].status == "warning"
    assert told_by(config).count(dry[0]) == 1
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            evaluate(tmp_path / "run", config=config)
    assert [record.getMessage() for record in caplog.records].count(dry[0]) == 1


def test_a_run_warns_at_its_start_that_completions_are_cut_off(tmp_path):
    lines = told_by(tree(tmp_path)).splitlines()
    cut = [line for line in lines if "cut off at 4 tokens" in line and line.startswith("warning: ")]
    assert "evaluation.max_tokens 128" in cut[0] and any("sampling.max_tokens 128" in line for line in cut[1:])
