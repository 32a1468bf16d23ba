# SPDX-License-Identifier: Apache-2.0
"""Checks that a GPU behaves like a CPU. Skipped without a GPU."""

import copy

import pytest
import torch

from evoalign import config, engines, optimizer, spaces, tokens
from evoalign.types import Plan, Request, Sampling, Update, population

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

PROMPTS = ("Use [44 19 35] to make 98. <think>", "Use [7 8 90 3] to make 75. <think>")
WIDTH = 0.02


def start(space: str, device: str, dtype: str = "float32", **sections: object):
    tree = {
        "seed": 5, "space": space, "model": {"name": "tiny", "dtype": dtype}, "engine": {"device": device},
        "es": {"sigma": WIDTH}, **sections,
    }  # fmt: skip
    settings = config.from_dict(tree)
    tk = tokens.load(settings.model)
    engine = engines.create(settings, tk)
    where = spaces.create(settings)
    layout = where.layout(engine.specs(), engine.dtype)
    engine.start(where, layout, optimizer.create(settings.es, layout), settings.decays)
    return engine, where, layout, tk


def update(generation: int = 2) -> Update:
    members = population(30)
    coefficients = tuple(((7 * i) % 11 - 5) / 5 for i in range(30))
    return Update(0, generation, members, coefficients, WIDTH, WIDTH / 2)


@pytest.mark.parametrize("space", ["lora", "full"])
def test_elementwise_updates_have_the_same_bits(space):
    prints = []
    for device in ("cpu", "cuda"):
        engine, *_ = start(space, device)
        engine.apply(update())
        prints.append(engine.fingerprint())
        engine.close()
    assert prints[0] == prints[1]


@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:0"])
def test_an_optimizer_that_decays_has_the_start_beside_the_mean(device):
    engine, *_ = start("lora", device, es={"sigma": WIDTH, "optimizer": "adam", "decay": 0.01})
    assert all(p.start.device == p.master.device for p in engine.mean.moving)
    before = engine.fingerprint()
    engine.apply(update())
    assert engine.fingerprint() != before


def test_lowrank_update_is_close():
    states = []
    for device in ("cpu", "cuda"):
        engine, *_ = start("lowrank", device)
        before = dict(engine.state())
        engine.apply(update())
        states.append({n: t - before[n] for n, t in engine.state()})
        engine.close()
    for name, change in states[0].items():
        assert torch.allclose(change, states[1][name], rtol=1e-3, atol=1e-3 * float(change.abs().max()))


@pytest.mark.parametrize("space", ["lora", "lowrank", "full"])
def test_greedy_tokens_equal_merged_weights(space):
    engine, where, layout, tk = start(space, "cuda", lora={"rank": 2, "alpha": 2}, lowrank={"rank": 2})
    requests = [Request(i, tk.encode(p), Sampling(24)) for i, p in enumerate(PROMPTS)]
    plan = Plan(1, WIDTH, population(30))
    rollouts = list(engine.rollout(plan, requests))
    model = copy.deepcopy(engine.model)  # hooks stay with the original's layers only if removed here
    for module in model.modules():
        module._forward_hooks.clear()
    served = dict(model.named_parameters())
    masters = {p.name: p.master for p in engine.mean.parts}
    differing = 0
    for member in plan.members:
        weights = {n: p.detach().clone() for n, p in served.items()}
        for tensor in layout.tensors:
            if space == "full":
                weights[tensor.name] = where.perturbed(layout, tensor.name, masters[tensor.name], plan, member)
            elif space == "lowrank" or tensor.name.endswith("lora_B.weight"):
                adapter = where.adapter(layout, tensor.module, masters.__getitem__, plan, [member])
                weights[tensor.module] = weights[tensor.module] + adapter.scaling * (adapter.b[0] @ adapter.a[0])
        for rollout in (r for r in rollouts if r.member == member):
            ids = torch.tensor([requests[rollout.request].prompt_ids + rollout.token_ids], device="cuda")
            with torch.no_grad():
                logits = torch.func.functional_call(model, weights, (ids,)).logits[0]
            first = len(requests[rollout.request].prompt_ids) - 1
            for position, token in enumerate(rollout.token_ids, first):
                if float(logits[position].max() - logits[position, token]) > 1e-4:
                    differing += 1
    assert differing == 0


@pytest.mark.parametrize("space", ["lora", "lowrank", "full"])
def test_bfloat16_serves_the_rounded_master(space):
    engine, _, layout, tk = start(space, "cuda", "bfloat16")
    requests = [Request(i, tk.encode(p), Sampling(8)) for i, p in enumerate(PROMPTS)]
    engine.apply(update())
    before = engine.fingerprint()
    rollouts = list(engine.rollout(Plan(3, WIDTH, population(4)), requests))
    assert len(rollouts) == 8 and engine.fingerprint() == before
    if space != "lora":
        for tensor in layout.tensors:
            assert torch.equal(engine._parameters[tensor.name], engine.mean[tensor.name].bfloat16())
