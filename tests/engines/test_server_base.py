# SPDX-License-Identifier: Apache-2.0
"""`BaseModel.distance`: rounding is within the tolerance, and noise on the weights is not."""

import math

import pytest
import torch

from evoalign import tokens
from evoalign.config import from_dict
from evoalign.engines.base import Completion
from evoalign.engines.server.base_model import PROBE_TOKENS, PROBES, TOLERANCE, load_base
from evoalign.engines.transformers.engine import load_model
from evoalign.models import tiny

CONFIG = from_dict({"model": {"name": "tiny"}})
DTYPES = list(TOLERANCE)


def greedy(model, prompt):
    """Return the completion of a server that serves a model."""
    ids, logprobs = list(prompt), []
    for _ in range(PROBE_TOKENS):
        with torch.no_grad():
            row = model(input_ids=torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)
        ids.append(int(row.argmax()))
        logprobs.append(float(row.max()))
    return Completion(tuple(ids[len(prompt) :]), "length", tuple(logprobs))


def mean_distance(base, model):
    """Return the mean over all prompts."""
    prompts = [tokens.load(CONFIG.model).encode(prompt) for prompt in PROBES]
    return sum(base.distance(prompt, greedy(model, prompt)) for prompt in prompts) / len(prompts)


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def base(request):
    return load_base(CONFIG, request.param, dummy=False)


def test_distance_accepts_another_attention_and_not_noise_on_the_weights(base):
    """The noise is 6 % of each matrix's mean weight."""
    from transformers import AutoModelForCausalLM

    dtype = base.model.dtype
    eager = AutoModelForCausalLM.from_pretrained(tiny(), dtype=dtype, attn_implementation="eager").eval()
    assert base.model.config._attn_implementation != "eager"
    assert 2 * mean_distance(base, eager) <= TOLERANCE[dtype]
    for seed in (1, 2):
        moved = load_model(CONFIG.model, dtype)
        generator = torch.Generator().manual_seed(seed)
        for parameter in moved.parameters():
            if parameter.ndim == 2:
                noise = torch.randn(parameter.shape, generator=generator) * parameter.float().abs().mean()
                parameter.data.add_((0.06 * noise).to(dtype))
        assert mean_distance(base, moved) > TOLERANCE[dtype]


def test_distance_is_infinite_for_completions_the_model_cannot_generate(base):
    prompt, size = (5, 6), base.model.config.vocab_size
    assert base.distance(prompt, Completion((), "stop", ())) == math.inf
    assert base.distance(prompt, Completion((7, size), "length", (-0.5, -0.5))) == math.inf
    assert math.isfinite(base.distance(prompt, Completion((7, size - 1), "length", (-0.5, -0.5))))
