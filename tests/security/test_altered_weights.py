# SPDX-License-Identifier: Apache-2.0
"""Weights that were altered, with the record beside them made anew: no command takes them for those of the journal."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

import evoalign
from evoalign.analysis import targets
from evoalign.config import from_dict, load
from evoalign.engines import weights_hash
from evoalign.errors import CheckpointError, ModelError
from evoalign.models import tiny
from evoalign.models.files import load_whole
from evoalign.rundir import checkpoint
from evoalign.rundir.directory import saved_folders
from evoalign.training import weights

SPACES = {
    "lora": {"space": "lora"},
    "lowrank": {"space": "lowrank"},
    "lowrank, rounded": {"space": "lowrank", "model": {"name": "tiny", "dtype": "bfloat16"}},
}


def trained(output: Path, **sections: Any) -> Path:
    tree = {"output_dir": str(output), "seed": 1, "es": {"sigma": 0.02, "num_generations": 1, "population_size": 2},
            "evaluation": {"max_tokens": 2}, "task": {"name": "conciseness", "batch_size": 1}, **sections}  # fmt: skip
    return evoalign.train(tree, console=Console(quiet=True)).path


@pytest.fixture(scope="module", params=list(SPACES))
def whole(request, tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("whole") / "run", **SPACES[request.param])


@pytest.fixture
def run(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def alter(folder: Path, pattern: str, part: str) -> None:
    """Double the first tensor of that name, and make the record anew for the files as they are then."""
    mark = checkpoint.verify(folder)
    (file,) = folder.glob(pattern)
    tensors = load_file(file)
    name = next(n for n in sorted(tensors) if part in n)
    save_file(tensors | {name: tensors[name] * 2}, file, metadata={"format": "pt"})
    (folder / checkpoint.RECORD).unlink()
    checkpoint.seal(folder, mark)
    assert checkpoint.verify(folder) == mark


COMMANDS: dict[str, Callable[[Path, Path], object]] = {
    "eval": lambda run, to: evoalign.evaluate(run),
    "eval of the folder": lambda run, to: evoalign.evaluate(saved_folders(run)[-1], config=run / "config.yaml"),
    "export": lambda run, to: evoalign.export(run, to),
    "analysis": lambda run, to: targets.locate(str(run), None),
}


def test_altered_weights_with_a_record_made_anew_are_refused_by_name(run, tmp_path):
    (folder,) = saved_folders(run)
    mark, made = checkpoint.verify(folder), load([run / "config.yaml"])
    weights.check(folder, mark, made)
    targets.locate(str(run), None)
    part = "lora_B" if folder.parent.name == "loras" else "q_proj.weight"
    files = [p for p in ("adapter_model.safetensors", "model.safetensors", "mean-*.safetensors") if [*folder.glob(p)]]
    for pattern in files:
        kept = shutil.copytree(folder, tmp_path / "kept")
        alter(folder, pattern, part)
        for name, command in COMMANDS.items():
            with pytest.raises(CheckpointError, match=r"does not hold the (weights|mean) of") as error:
                command(run, tmp_path / "to")
            assert "generation_0001" in str(error.value) and "\n" not in str(error.value), name
            assert not (tmp_path / "to").exists()
        shutil.rmtree(folder)
        kept.rename(folder)


def test_a_saved_checkpoint_in_pickle_form_is_not_read(tmp_path, monkeypatch):
    """Its record is made anew for whatever is there, and its config may say that names are others."""
    folder = Path(shutil.copytree(tiny(), tmp_path / "generation_0001"))
    tensors = load_file(folder / "model.safetensors")
    torch.save(tensors, folder / "x.bin")
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "x.bin")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    monkeypatch.setattr(torch, "load", lambda *words, **named: pytest.fail("it was read"))
    with pytest.raises(ModelError, match=r"x\.bin.; convert it to safetensors"):
        load_whole(str(folder), None, "auto", str(folder))


def test_an_exported_adapter_is_held_against_its_journal(tmp_path):
    run = trained(tmp_path / "run")
    folder = evoalign.export(run, tmp_path / "to")
    weights.check_folder(folder)
    tensors = load_file(folder / checkpoint.ADAPTER)
    save_file({n: t + 1 for n, t in tensors.items()}, folder / checkpoint.ADAPTER, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="of any generation of"):
        evoalign.evaluate(folder, config=run / "config.yaml")


@pytest.mark.parametrize("tune", ["lora", "full"])
def test_a_policy_of_grpo_is_held_against_its_record(tune, tmp_path):
    """As PEFT and transformers save it; its hash is over the names that it has while it is trained."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny())
    if tune == "lora":
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        assert isinstance(model, PeftModel)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter.data, std=0.1)
    trained = ((name, p.data) for name, p in model.named_parameters() if p.requires_grad)
    mark = checkpoint.Mark(1, weights_hash(trained), checkpoint.NO_JOURNAL)
    model.save_pretrained(tmp_path / "saved")
    checkpoint.seal(tmp_path / "saved", mark)
    config = from_dict({"grpo": {"tune": tune}})
    weights.check(tmp_path / "saved", mark, config)
    with pytest.raises(CheckpointError, match="does not hold the weights of"):
        weights.check(tmp_path / "saved", dataclasses.replace(mark, weights_hash="0" * 64), config)
