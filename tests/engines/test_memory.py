# SPDX-License-Identifier: Apache-2.0
"""A rollout stays within `engine.memory_gib`: cache, logits, and activations of a prefill."""

from contextlib import contextmanager

import pytest
import torch
from families import FAMILIES, Bench, ids, make_config, requests
from live_memory import LiveMemory
from transformers import AutoModelForCausalLM

from evoalign.engines.transformers.decode import draw
from evoalign.engines.transformers.prefill import RoomCache
from evoalign.engines.transformers.settings import Footprint
from evoalign.types import MEAN_PLAN, Sampling

LONG = 200


@contextmanager
def skipped_where_torch_has_no_kernel():
    """On a CPU with AMX and ATEN_CPU_CAPABILITY without AVX-512, torch packs bfloat16 for AMX and raises.

    A CPU that has neither is asked for no such packing.
    """
    try:
        yield
    except RuntimeError as error:
        if "pack_vnni" not in str(error):
            raise
        pytest.skip(f"torch's attention in bfloat16: {error}")


@pytest.mark.first("qwen2-True-float32", "gemma2-True-bfloat16", "gpt_neox-False-float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_footprint_bounds_the_memory_of_a_prefill(family, padded, dtype, folders):
    model = AutoModelForCausalLM.from_pretrained(str(folders[family]), dtype=getattr(torch, dtype)).eval()
    rows, width, cache = 4, 120, RoomCache(2, 120)
    mask = torch.ones(rows, width, dtype=torch.int64)
    mask[0, : 9 * padded] = 0
    positions = torch.arange(width).expand(rows, -1)
    with torch.inference_mode(), LiveMemory() as live, skipped_where_torch_has_no_kernel():
        model(
            input_ids=torch.full((rows, width), 31), attention_mask=mask if padded else None, position_ids=positions,
            past_key_values=cache, use_cache=True, logits_to_keep=1,
        )  # fmt: skip
    footprint = Footprint.of(model)
    kept = sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))
    assert kept == rows * width * footprint.cache
    lived, told = (live.peak - kept) / rows, footprint.prefill(width, width)
    assert told / 5 < lived < told


def peak(folder, space, limit, temperature, target, decoder):
    """Return the peak bytes of a rollout of members on long prompts of several lengths."""
    section = {} if space == "full" else {space: {"target_layers": target}}
    engine = {"memory_gib": limit, "decoder": decoder}
    with Bench(make_config(folder, space, es={"population_size": 2}, engine=engine, **section), stop_ids=[]) as bench:
        asked = requests([ids(LONG - i % 3, i) for i in range(12)], Sampling(2, temperature))
        noise = sum(2 * p.numel() * p.element_size() for p in bench.model.parameters()) if space == "full" else 0
        with LiveMemory() as live:
            bench.ask(bench.plan(), asked)
    return live.peak - noise


@pytest.mark.first("lora-None-0.0-library", "full-None-0.0-library", "lora-None-1.0-static")
@pytest.mark.parametrize("decoder", ["library", "static"])
@pytest.mark.parametrize(
    ("space", "target", "temperature"),
    [("lora", None, 0.0), ("lora", None, 1.0), ("lora", [1], 0.0), ("full", None, 0.0)],
)
def test_rollout_stays_within_memory_gib(space, target, temperature, decoder, folder):
    limit = peak(folder, space, 1.0, temperature, target, decoder) / 2
    assert peak(folder, space, limit / 2**30, temperature, target, decoder) < limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_footprint_bounds_the_memory_of_a_draw(top_p, dtype):
    vocabulary, rows, sampling = 50_000, 4, Sampling(1, 1.0, top_p)
    uniform = torch.rand(rows, dtype=torch.float64)
    with LiveMemory() as live:
        draw(torch.zeros(rows, vocabulary, dtype=dtype), uniform, sampling)
    told = rows * Footprint(0, 0, 0, vocabulary).logits(sampling)
    assert told / 2 < live.peak < told


LIMIT = 4 * 2**20


@pytest.fixture
def limited(folder):
    """A static decoder with little memory."""
    config = make_config(folder, engine={"memory_gib": LIMIT / 2**30, "decoder": "static"})
    with Bench(config, stop_ids=[]) as bench:
        yield bench


@pytest.mark.slow
def test_static_decoder_memory_stays_within_the_limit_across_rollouts(limited):
    """Memory for many short rows and for few long ones together would exceed what either needs."""
    with LiveMemory() as live:
        for length, count, temperature in ((8, 60, 0.0), (LONG, 8, 0.0), (8, 60, 1.0), (40, 20, 0.5)):
            limited.ask(limited.plan(), requests([ids(length, i) for i in range(count)], Sampling(4, temperature)))
    assert live.peak < LIMIT


def test_static_decoder_reallocates_when_logits_need_more_memory(limited):
    """Sampling needs more memory than greedy decoding, on top of rows allocated for longer texts."""
    limited.ask(MEAN_PLAN, requests([ids(8, i) for i in range(60)], Sampling(LONG)))
    static = limited.engine._static
    rows = static._memory.shape.rows
    limited.ask(MEAN_PLAN, requests([ids(8, i) for i in range(rows)], Sampling(4, 1.0)))
    footprint = Footprint.of(limited.model)
    taken = static._bytes_of(static._memory.shape) + rows * footprint.logits(Sampling(4, 1.0)) + footprint.least(8)
    assert rows < 60 and taken <= LIMIT


@pytest.mark.parametrize("space", ["lora", "norms", "steering"])
def test_static_decoder_counts_all_memory_of_a_member(space, folder):
    config = make_config(folder, space, es={"population_size": 6, "sigma": 0.1}, engine={"decoder": "static"})
    with Bench(config, stop_ids=[]) as bench:
        bench.ask(bench.plan(), requests([ids(8, 1)], Sampling(2)))
        static, factors = bench.engine._static, bench.engine._static._memory.factors
    own = [each for s in factors.slots() for each in (s.a, s.b, s.bias) if each is not None]
    own += [rows[1:] for rows in factors.vectors._rows.values()]
    assert sum(each.nbytes for each in own) == 6 * static._member_bytes


@pytest.mark.first("qwen2")
@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_completions_do_not_depend_on_prefill_pieces(family, folders):
    """Prompts are read in one piece, in a few, and one by one, with a shared prefix and padding."""
    start, firsts = ids(20, 1), []
    asked = requests([start + ids(3 + i % 3, 2 + i) for i in range(5)], Sampling(3), logprobs=True)
    for limit in (1.0, 2.5e-3, 1e-5):
        engine = {"name": "transformers", "memory_gib": limit}
        with Bench(make_config(folders[family], es={"population_size": 6}, engine=engine)) as bench:
            cells = bench.ask(bench.plan(), asked)
        firsts.append(torch.tensor([cells[key].logprobs[:1] for key in sorted(cells)]))
    for other in firsts[1:]:
        torch.testing.assert_close(other, firsts[0], atol=1e-4, rtol=0)
