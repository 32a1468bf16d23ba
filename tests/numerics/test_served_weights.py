# SPDX-License-Identifier: Apache-2.0
"""The weights that the engine serves: always the rounded master, and never changed by perturbing and restoring."""

import hashlib

import numpy as np
import numpy_reference as reference
import pytest
import torch

from evoalign import spaces, tokens
from evoalign.config import from_dict
from evoalign.engines.master import Master, whole
from evoalign.engines.transformers import TransformersEngine
from evoalign.types import Plan, Request, Sampling, Update, population


def started(folder, space, dtype, **more):
    tree = {
        "seed": 3, "model": {"name": str(folder), "dtype": dtype}, "space": space, "engine": {"device": "cpu"},
        "es": {"sigma": 0.01, "learning_rate": 0.005, "population_size": 6, **more},
    }  # fmt: skip
    config = from_dict(tree)
    engine = TransformersEngine(config, tokens.load(config.model))
    made = spaces.create(config)
    layout = made.layout(engine.specs(), engine.dtype)
    engine.start(made, layout, None, keep_start=False)
    return engine, layout


def test_the_start_lies_where_the_mean_does(random_qwen2):
    """Whatever number the device is named with: `cuda` beside a tensor's `cuda:0`, and here `cpu:0` beside `cpu`."""
    engine, layout = started(random_qwen2, "lora", "float32")
    shards, device = whole(parameters(engine)), torch.device("cpu:0")
    mean = Master(engine.mean.space, layout, None, True, shards, device)
    assert [p.start.device for p in mean.moving] == [p.master.device for p in mean.moving]


def parameters(engine):
    return {n: p.detach() for n, p in engine.model.named_parameters()}


def digest(engine):
    sha = hashlib.sha256()
    for name, tensor in sorted(parameters(engine).items()):
        sha.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def update(index, size=6):
    coefficients = np.random.default_rng(index).normal(size=size)
    return Update(index, index, population(size), tuple(map(float, coefficients)), 0.01, 0.005)


def request(count=1):
    return [Request(i, (5, 6, 7 + i), Sampling(max_tokens=1)) for i in range(count)]


@pytest.mark.parametrize("space", ["full", "lowrank"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_served_weights_are_the_rounded_master_bit_for_bit(random_qwen2, space, dtype):
    engine, layout = started(random_qwen2, space, dtype)
    rounded = reference.bfloat16 if dtype == "bfloat16" else np.float32
    before = {n: p.float().numpy().copy() for n, p in parameters(engine).items()}
    for index in range(12):
        list(engine.rollout(Plan(index, 0.01, population(3)), request()))
        engine.apply(update(index))
        master = dict(engine.state())
        assert set(master) == {t.name for t in layout.tensors}
        for name, served in parameters(engine).items():
            want = rounded(master[name].numpy()) if name in master else before[name]
            assert (served.float().numpy().view(np.uint32) == want.view(np.uint32)).all(), name
    off_grid = [n for n, t in master.items() if (reference.bfloat16(t.numpy()) != t.numpy()).any()]
    assert off_grid == list(master), "the master keeps what bfloat16 cannot"


@pytest.mark.slow
def test_steps_below_what_bfloat16_can_hold_arrive_in_the_end(random_qwen2):
    """One step changes few of the served weights; two hundred of them point where the master went."""
    engine, _ = started(random_qwen2, "lowrank", "bfloat16")
    start = {n: t.clone() for n, t in engine.state()}
    coefficients = update(0).coefficients
    for index in range(200):
        engine.apply(Update(index, 0, population(6), coefficients, 0.01, 5e-5))
        if index == 0:
            changed = [(parameters(engine)[n].float() != t).float().mean().item() for n, t in start.items()]
            assert sum(changed) / len(changed) < 0.1
    for name, master in engine.state():
        intended = (master - start[name]).double().numpy()
        served = parameters(engine)[name].double().numpy() - start[name].double().numpy()
        assert reference.cosine(served, intended) > 0.95, name


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_thousand_perturb_restore_cycles_change_no_bit(random_qwen2, dtype):
    engine, _ = started(random_qwen2, "full", dtype)
    engine.apply(update(0))
    before, fingerprint = digest(engine), engine.fingerprint()
    seen = set()
    for cycle in range(4):
        for rollout in engine.rollout(Plan(cycle, 0.01, population(250)), request()):
            if rollout.member.index == 0:
                seen.add(digest(engine))
    assert digest(engine) == before
    assert engine.fingerprint() == fingerprint
    assert len(seen) == 4, "while a member answers, the weights are its own"
    assert before not in seen


@pytest.mark.parametrize("space", ["full", "lowrank", "lora"])
def test_the_start_is_what_was_loaded_and_comes_back(random_qwen2, space):
    engine, _ = started(random_qwen2, space, "bfloat16")
    start, before = dict(engine.state()), digest(engine)
    fingerprint = engine.fingerprint()
    engine.apply(update(0))
    assert engine.fingerprint() != fingerprint
    assert (digest(engine) == before) == (space == "lora")
    engine.load(start)
    assert engine.fingerprint() == fingerprint
    assert digest(engine) == before
