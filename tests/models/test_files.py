# SPDX-License-Identifier: Apache-2.0
"""Loading of model files: one at a time, and no more layers than the files have tensors."""

import json
import shutil
import threading
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from evoalign import tokens
from evoalign.config import ModelConfig
from evoalign.errors import ModelError
from evoalign.models import tiny
from evoalign.models.files import load_whole
from evoalign.models.origin import empty_model, model_config

MANY = 10_000_000


def test_models_load_one_at_a_time_in_threads(monkeypatch):
    """transformers replaces functions of torch while it loads: a second load would see them, and lack tensors."""
    inside, most = [0], [0]
    load, make = AutoModelForCausalLM.from_pretrained, AutoModelForCausalLM.from_config

    def counted(call):
        def loaded(*args, **options):
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0.05)
            try:
                return call(*args, **options)
            finally:
                inside[0] -= 1

        return loaded

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", counted(load))
    monkeypatch.setattr(AutoModelForCausalLM, "from_config", counted(make))
    found = []

    def work(i):
        one = load_whole(str(tiny()), None, torch.float32, "tiny") if i % 2 else empty_model(ModelConfig(name="tiny"))
        found.append(sum(p.numel() for p in one.parameters()))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] and len(found) == 6 and len({*found}) == 1


@pytest.mark.parametrize("name", ["num_hidden_layers", "n_layer", "num_layers", "decoder_layers", "text_config"])
def test_more_layers_than_tensors_are_refused_before_a_model_is_made(name, tmp_path):
    folder = shutil.copytree(tiny(), tmp_path / "model")
    tree = json.loads((folder / "config.json").read_text())
    tree |= {name: {"num_hidden_layers": MANY} if name == "text_config" else MANY}
    (folder / "config.json").write_text(json.dumps(tree))
    config = ModelConfig(name=str(folder))
    for load in (tokens.load, model_config, lambda c: load_whole(c.name, None, torch.float32, c.name)):
        with pytest.raises(ModelError, match=rf"layers? to {MANY}, and its files have \d+ tensors"):
            load(config)


def test_layers_within_the_tensors_of_the_files_are_not_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("evoalign.models.files.MOST_LAYERS", 1)
    assert load_whole(str(tiny()), None, torch.float32, "tiny") is not None
