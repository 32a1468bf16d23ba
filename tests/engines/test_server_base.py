# SPDX-License-Identifier: Apache-2.0
"""Whether a server that runs already serves the weights of the files: what passes for rounding, and what does not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from evoalign import tokens
from evoalign.config import from_dict
from evoalign.engines.server.base import APART, PROBED, PROBES, Base, read_base
from evoalign.engines.server.dialect import Said
from evoalign.engines.transformers.engine import load_model
from evoalign.models import tiny

CONFIG = from_dict({"model": {"name": "tiny"}}, needs_es=False)
DTYPES = list(APART)


def greedy(model: Any, prompt: tuple[int, ...]) -> Said:
    """What a server says that serves a model, with the log-softmax of all that it has seen."""
    ids, logprobs = list(prompt), list[float]()
    for _ in range(PROBED):
        with torch.no_grad():
            row = model(input_ids=torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)
        ids.append(int(row.argmax()))
        logprobs.append(float(row.max()))
    return Said(tuple(ids[len(prompt) :]), "length", tuple(logprobs))


def mean_apart(base: Base, model: Any) -> float:
    """Over all prompts."""
    prompts = [tokens.load(CONFIG.model).encode(prompt) for prompt in PROBES]
    return sum(base.apart(prompt, greedy(model, prompt)) for prompt in prompts) / len(prompts)


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def base(request: pytest.FixtureRequest) -> Base:
    return read_base(CONFIG, request.param, dummy=False)


def test_another_attention_is_rounding_and_noise_on_the_weights_is_not(base: Base) -> None:
    """Noise of 6 % of each matrix's mean weight."""
    from transformers import AutoModelForCausalLM

    dtype = base.model.dtype
    eager: Any = AutoModelForCausalLM.from_pretrained(tiny(), dtype=dtype, attn_implementation="eager").eval()
    assert base.model.config._attn_implementation != "eager"
    assert 2 * mean_apart(base, eager) <= APART[dtype]
    for seed in (1, 2):
        moved = load_model(CONFIG.model, dtype)
        generator = torch.Generator().manual_seed(seed)
        for parameter in moved.parameters():
            if parameter.ndim == 2:
                noise = torch.randn(parameter.shape, generator=generator) * parameter.float().abs().mean()
                parameter.data.add_((0.06 * noise).to(dtype))
        assert mean_apart(base, moved) > APART[dtype]


def test_what_no_such_model_says_is_infinitely_far(base: Base) -> None:
    prompt, size = (5, 6), base.model.config.vocab_size
    assert base.apart(prompt, Said((), "stop", ())) == math.inf
    assert base.apart(prompt, Said((7, size), "length", (-0.5, -0.5))) == math.inf
    assert math.isfinite(base.apart(prompt, Said((7, size - 1), "length", (-0.5, -0.5))))
