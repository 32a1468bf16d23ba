# SPDX-License-Identifier: Apache-2.0
"""Nats a token under the base model, against plain transformers on the tiny model."""

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from evoalign.checks import divergence
from evoalign.checks.divergence import Reference
from evoalign.config import from_dict
from evoalign.cost.estimate import second_copy_lines
from evoalign.errors import ModelError
from evoalign.evaluation import Scored
from evoalign.models import tiny
from evoalign.setup import assemble

CONFIG = {
    "task": {"name": "conciseness", "prompt": "raw"},
    "engine": {"device": "cpu"},
    "es": {"sigma": 0.1, "learning_rate": 0.1},
}


@pytest.fixture(scope="module")
def parts():
    found = assemble(from_dict(CONFIG))
    yield found
    found.close()


def said(texts):
    return [Scored(i, 0, 0, "", None, text, 0.0, "stop", 1) for i, text in enumerate(texts)]


def fluency(parts, before, after, reference=None):
    reference = reference or Reference.of(parts)
    return divergence.fluency(reference, parts.tokens, parts.task, (parts.data.test,) * 2, before, after)


def test_each_example_is_looked_at_before_one_of_them_again(parts, monkeypatch):
    """Eight questions of 20 samples lie one question after another: the first completions would be of two of them."""
    drawn = [Scored(e, 0, k, "", None, f"It is {e}{k}.", 0.0, "stop", 1) for e in range(8) for k in range(20)]
    monkeypatch.setattr(divergence, "MOST_COMPLETIONS", 16)
    found = fluency(parts, drawn, drawn)
    looked = [(s.example, s.sample) for s, nats in zip(drawn, found.each, strict=True) if nats is not None]
    assert looked == [(e, k) for e in range(8) for k in range(2)]


def test_nats_a_token_are_those_of_plain_transformers(parts):
    texts = ["It is Paris.", "", "x", "zq 7 7 zq"]
    model = AutoModelForCausalLM.from_pretrained(tiny(), dtype=torch.float32)
    tokenizer, expected = AutoTokenizer.from_pretrained(tiny()), []
    for example, text in zip(parts.data.test, texts, strict=False):
        prompt = tokenizer(parts.task.prompt(example))["input_ids"]
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) : -1].float()
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:], dtype=torch.long), reduction="none")
        expected.append(loss.detach().double())
    reference = Reference.of(parts)
    found = fluency(parts, said(texts[:1]), said(texts), reference)
    whole = torch.cat(expected)
    assert found.tokens_after == len(whole) > 5
    assert found.after == pytest.approx(float(whole.mean()), rel=1e-4)
    assert found.before == pytest.approx(float(expected[0].mean()), rel=1e-4)
    assert [value is None for value in found.each] == [len(part) == 0 for part in expected] and found.each[1] is None
    nothing = fluency(parts, said([""]), said(["", ""]), reference)
    assert (nothing.before, nothing.after, nothing.tokens_after) == (None, None, 0)


def test_it_costs_more_to_say_what_no_model_says(parts):
    own = [s.text for s in parts.evaluate().completions]
    letters = ["zq xj wv kq", "qqz vvj jjx"] * 4
    found = fluency(parts, said(own), said(letters))
    assert found.before is not None and found.after is not None
    assert found.after > found.before + 2


def test_a_copy_that_does_not_fit_is_a_model_error(parts, monkeypatch):
    def refuse(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    reference = Reference.of(parts)
    monkeypatch.setattr(reference, "nats", refuse)
    with pytest.raises(ModelError, match="does not fit the memory of cpu"):
        fluency(parts, said(["a"]), said(["b"]), reference)


@pytest.mark.parametrize(
    ("wanted", "here", "expected"),
    [(None, True, True), (None, False, False), (False, True, False), (True, False, True)],
)
def test_when_it_is_measured(wanted, here, expected, monkeypatch):
    config = from_dict({**CONFIG, "checks": {} if wanted is None else {"perplexity": wanted}})
    monkeypatch.setattr(type(config.engine), "serves_here", here)
    assert config.measures_nats is expected
    lines = second_copy_lines(config, 250_000_000, torch.bfloat16)
    assert lines == (["second copy of the model 0.93 GiB, on the CPU in float32: used at the end (checks.perplexity)"]
                     if expected else [])  # fmt: skip
    monkeypatch.setattr("evoalign.cost.estimate.on_gpu", lambda config: True)
    both = config.model_copy(update={"checks": config.checks.model_copy(update={"kl_every": 5})})
    size = "0.47 GiB" if here else "0.93 GiB, on the CPU in float32"
    asked = "every 5 (checks.kl_every)" + (" and at the end (checks.perplexity)" if expected else "")
    assert second_copy_lines(both, 250_000_000, torch.bfloat16) == [f"second copy of the model {size}: used {asked}"]
    assert dataclasses.asdict(divergence.Fluency(None, None, 0, 0))["each"] == ()
