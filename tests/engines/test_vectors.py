# SPDX-License-Identifier: Apache-2.0
"""Dense members with their own gains and attention biases, in one batch of the static decoder and one at a time."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from families import PROMPTS, VOCABULARY, Bench, make_config

from evoalign.engines.transformers import blocks
from evoalign.engines.transformers.static import StaticDecoder
from evoalign.kernels import population
from evoalign.spaces.norms import Norms
from evoalign.types import MEAN, MEAN_PLAN, Request, Sampling

GREEDY, WARM = Sampling(13), Sampling(13, temperature=1.3, top_p=0.9)
STOPS = range(0, VOCABULARY, 20)
FAMILIES = ["llama", "qwen2", "qwen3"]


class Some(Norms):
    """A dense space of the gains of q or the biases of k and v in one layer, and of the last norm."""

    name = "some"

    def layout(self, specs, dtype):
        layout = super().layout(specs, dtype)
        ends = ("layers.1.self_attn.k_proj.bias", "layers.1.self_attn.v_proj.bias", "1.self_attn.q_norm.weight")
        return replace(
            layout, tensors=tuple(t for t in layout.tensors if t.name.endswith((*ends, "model.norm.weight")))
        )


class WithEmbedding(Norms):
    """Norms and the first tensor of the model, which the static decoder does not serve in one batch."""

    name = "with_embedding"

    def layout(self, specs, dtype):
        layout = super().layout(specs, dtype)
        first = replace(layout.tensors[0], name=specs[0].name, shape=specs[0].shape)
        return replace(layout, tensors=(first, *layout.tensors))


def bench_of(folder, space="norms", **tree):
    engine = {"decoder": "static", "threads": 1, **tree.pop("engine", {})}
    space = space if isinstance(space, str) else {"name": f"{space.__module__}:{space.__name__}"}
    es = {"population_size": 6, "sigma": 0.3, **tree.pop("es", {})}
    return Bench(make_config(folder, space, es=es, engine=engine, **tree), STOPS)


def asked(prompts="apart", sampling=GREEDY, **fields):
    return [
        Request(2 * i + k, prompt, sampling, 7 * i + k, logprobs=True, **fields)
        for i, prompt in enumerate(PROMPTS[prompts])
        for k in range(2)
    ]


@pytest.fixture
def slots(monkeypatch):
    """Numbers of members of each batch; 0 for the plain weights."""
    found, own = [], StaticDecoder.generate

    def counted(self, pairs, owners, serve, *arguments):
        found.append(0 if serve is None else len(serve[1]))
        return own(self, pairs, owners, serve, *arguments)

    monkeypatch.setattr(StaticDecoder, "generate", counted)
    return found


def alone(monkeypatch, folder, ask, *arguments, **tree):
    """Return what `ask` returns of an engine that serves one member at a time."""
    with monkeypatch.context() as patch:
        patch.setattr(blocks.Blocks, "vector_bytes", lambda self, names: None)
        with bench_of(folder, *arguments, **tree) as bench:
            assert "one at a time" in bench.facts.note
            return ask(bench)


def check_equal(found, wanted, exact=False):
    assert found.keys() == wanted.keys()
    for key, want in wanted.items():
        got = found[key]
        assert (got.token_ids, got.text, got.finish_reason) == (want.token_ids, want.text, want.finish_reason)
        assert got.logprobs == (want.logprobs if exact else pytest.approx(want.logprobs, abs=1e-4))


def generations(bench, sampling=GREEDY):
    """Return what members and the mean generate before and after an update."""
    found = {}
    for generation in (1, 2):
        for plan in (MEAN_PLAN, bench.plan(generation), MEAN_PLAN):
            found |= {(*key, generation): r for key, r in bench.ask(plan, asked("shared", sampling)).items()}
        bench.move()
    return found


@pytest.mark.parametrize(
    ("family", "sampling"), [("llama", GREEDY), ("qwen2", GREEDY), ("qwen2", WARM), ("qwen3", GREEDY)]
)
def test_members_in_one_batch_equal_members_one_at_a_time(family, sampling, folders, slots, monkeypatch):
    wanted = alone(monkeypatch, folders[family], partial(generations, sampling=sampling))
    assert max(slots) == 0
    slots.clear()
    with bench_of(folders[family]) as bench:
        assert bench.facts.note == "decoder: static"
        found = generations(bench, sampling)
    assert slots.count(6) == 2
    check_equal(found, wanted)
    differ = sum(r.token_ids != found[-1, i, generation].token_ids for (_, i, generation), r in found.items())
    assert differ > 0.7 * len(found) and len({r.token_ids for r in found.values()}) > len(found) / 3


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_log_probabilities_of_members_without_biases_are_exactly_those_of_served_weights(family, folders, monkeypatch):
    """With one member at a time the products have the same rows. A bias is added after one rounding more."""

    def ask(bench):
        bench.move()
        plan = bench.plan()
        return {k: v for m in plan.members[:3] for k, v in bench.ask(replace(plan, members=(m,)), asked()).items()}

    wanted = alone(monkeypatch, folders[family], ask)
    with bench_of(folders[family]) as bench:
        check_equal(ask(bench), wanted, exact=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_have_the_bits_of_served_weights(family, dtype, folders):
    with bench_of(folders[family], model={"dtype": dtype}) as bench:
        bench.move()
        plan, engine = bench.plan(), bench.engine
        bench.ask(replace(plan, members=(*plan.members[:2], MEAN)), asked(sampling=Sampling(2)))
        rows = engine._static._memory.factors.vectors._rows
        assert rows.keys() == {t.name for t in bench.layout.tensors}
        for row, member in enumerate((MEAN, *plan.members[:2], MEAN)):
            engine.mean.write(plan, None if member.is_mean else member)
            for name, parameter in bench.model.named_parameters():
                assert name not in rows or torch.equal(rows[name][row], parameter), (name, row)


def test_requests_of_members_and_of_the_mean_generate_in_one_batch(folder, slots, monkeypatch):
    """The batch is as ragged as can be: members have different prompts, and the mean rides along."""

    def ask(bench):
        bench.move()
        plan = bench.plan()
        some = asked("apart", WARM)
        of = [*plan.members, MEAN]
        each = [replace(r, index=10 * i + r.index, member=of[(i + r.index) % 7]) for i in range(7) for r in some]
        rollouts = list(bench.engine.rollout(replace(plan, members=tuple(of)), each))
        return {(r.member.index, r.request): r for r in rollouts}

    wanted = alone(monkeypatch, folder, ask)
    slots.clear()
    with bench_of(folder) as bench:
        slots.clear()
        found = ask(bench)
    assert slots == [7] and len(found) == 42
    check_equal(found, wanted)


def test_members_take_turns_when_their_vectors_do_not_fit(folder, slots):
    found = []
    for limit in (1.0, 0.0009):
        slots.clear()
        with bench_of(folder, engine={"memory_gib": limit}) as bench:
            slots.clear()
            found.append(bench.ask(bench.plan(), asked()))
    assert len(slots) > 1 and max(slots) < 6 and sum(slots) == 6
    check_equal(*found)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_user_defined_space_of_some_vectors_generates_in_one_batch(family, folders, slots, monkeypatch):
    wanted = alone(monkeypatch, folders[family], generations, Some)
    slots.clear()
    with bench_of(folders[family], Some) as bench:
        assert len(bench.layout.tensors) == {"qwen2": 3, "qwen3": 2}[family]
        found = generations(bench)
    assert slots.count(6) == 2
    check_equal(found, wanted)


@pytest.mark.parametrize("space", ["norms", "full", "lowrank"])
def test_members_without_factors_take_no_room_for_them_and_no_products(space, folder, monkeypatch):
    """So do the plain weights of a member that is served alone; only adapters have dots."""
    ranks, own = set(), population.norm

    def counted(hidden, residual, weight, eps, terms, *arguments):
        ranks.add(terms.rank)
        return own(hidden, residual, weight, eps, terms, *arguments)

    monkeypatch.setattr(population, "norm", counted)
    with bench_of(folder, space) as bench:
        bench.ask(bench.plan(), asked(sampling=Sampling(2)))
        factors = bench.engine._static._memory.factors
    sizes = {t.numel() for layer in factors.layers for pair in layer for t in pair.values()}
    assert (ranks == {0} and sizes == {0}) if space != "lowrank" else (ranks >= {1} and 0 not in sizes)


@pytest.mark.parametrize("space", [WithEmbedding, "full"])
def test_other_dense_spaces_generate_one_member_at_a_time(space, folder, slots):
    with bench_of(folder, space) as bench:
        assert bench.facts.note.startswith("decoder: static; members one at a time: ")
        assert bench.facts.library == "static decoder"
        bench.ask(bench.plan(), asked(sampling=Sampling(2)))
    assert slots.count(0) == len(slots) >= 6


def test_memory_released_between_generations_is_filled_again(folder):
    found = []
    for release in (False, True):
        with bench_of(folder) as bench:
            bench.ask(bench.plan(), asked())
            bench.move()
            if release:
                bench.engine.release()
            found.append(bench.ask(MEAN_PLAN, asked()) | bench.ask(bench.plan(2), asked()))
    check_equal(*found)
