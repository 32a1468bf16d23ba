# SPDX-License-Identifier: Apache-2.0
"""Whole runs on weights that were published, and not made for tests."""

import hashlib
import io

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import evoalign
from evoalign.rundir import journal
from evoalign.training.replay import replay

pytestmark = pytest.mark.real
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def test_the_folder_is_a_plain_model_that_answers(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    assert model.dtype == torch.bfloat16 and model.num_parameters() == 134_515_008
    ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.float().generate(**ids, max_new_tokens=16, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert tokenizer.decode(out, skip_special_tokens=True) == "The capital of France is Paris."


def test_the_weights_are_the_same_whatever_made_them(smollm2):
    """Figures that were measured with this folder can be measured again."""
    state = load_file(smollm2 / "model.safetensors")
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode() + state[name].view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest() == "08587497151051bb64ba4ae8288856623bb8c6cd5dc22bb3bda06ebda07a1bcd"


def test_digits_are_tokens_of_their_own_and_blanks_before_them_stay_together(smollm2):
    """As in the published tokenizer, whose first step splits digits off."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert tokenizer.tokenize("x   12") == ["x", "ĠĠĠ", "1", "2"]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("space", "sigma"), [("lora", 0.01), ("lowrank", 0.01), ("full", 0.003)])
def test_a_run_trains_resumes_and_replays(space, sigma, smollm2, tmp_path):
    def train(name, generations, *, resume=False):
        tree = {
            "output_dir": str(tmp_path / name), "seed": 1, "space": space,
            "model": {"name": str(smollm2), "dtype": "float32"},
            "task": {"name": "conciseness", "train_size": 1, "test_size": 1}, "evaluation": {"max_tokens": 4},
            "checkpoint": {"keep_last": 1}, "checks": {"control_every": 0},
            "es": {"sigma": sigma, "learning_rate": sigma, "population_size": 2, "num_generations": generations},
        }  # fmt: skip
        evoalign.train(tree, resume=resume, console=Console(file=io.StringIO()))
        return journal.read(tmp_path / name / "journal.jsonl").generations[-1].weights_hash

    straight = train("straight", 2)
    first = train("stopped", 1)
    assert train("stopped", 2, resume=True) == straight != first
    assert replay(tmp_path / "straight") == straight
