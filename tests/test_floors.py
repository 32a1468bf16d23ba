# SPDX-License-Identifier: Apache-2.0
"""The floors of benchmarks/floors.py, compared with counts token by token and with torch's own counter of FLOPs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from evoalign.models import tiny

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from floors import DATASHEET, Card, Floor, Model, Pass, mbu, measured_card, prefill, steps

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 64}  # fmt: skip
MODEL = Model.of(SMALL)
CARD = Card("a card", 10.0, 100.0, 5.0, 50.0)
BEGUN = (1, 2, 3, 4, 5)
ROWS = [(0, (*BEGUN, 6), 3), (0, (*BEGUN, 7, 8), 1), (1, (*BEGUN, 6), 2), (1, (*BEGUN, 6), 4), (-1, (*BEGUN, 9), 5)]


def counted(rows, shared):
    """Return (bytes, FLOPs) of the prefill and of each step, from the columns that each token attends to."""
    head = 2 * MODEL.output

    def of(tokens, heads, members):
        """`tokens` are (slot, attended columns)."""
        flops = sum(2 * MODEL.matrices + 4 * MODEL.layers * MODEL.queries * seen for _, seen in tokens) + heads * head
        flops += sum(2 * MODEL.factors for slot, _ in tokens if slot >= 0)
        return 2 * (MODEL.matrices + MODEL.output + len(members - {-1}) * MODEL.factors), flops

    texts = {row[:2] for row in rows}
    read = {(slot, prompt[: i + 1] if i < shared else prompt, i) for slot, prompt in texts for i in range(len(prompt))}
    weights, flops = of([(slot, i + 1) for slot, _, i in read], len(texts), {row[0] for row in rows})
    found = [(weights + len(read) * MODEL.column, flops)]
    for step in range(1, max(length for *_, length in rows)):
        active = [(slot, len(prompt) + step) for slot, prompt, length in rows if length > step]
        weights, flops = of(active, len(active), {slot for slot, _ in active})
        going = [row[:2] for row in rows if row[2] > step]
        kept = {(s, p[: i + 1] if i < shared else p, i) for s, p in going for i in range(len(p))}
        found.append((weights + (len(kept) + step * len(going)) * MODEL.column, flops))
    return found


@pytest.mark.parametrize("rows", [ROWS, ROWS[:2], ROWS[4:], [(0, p[:3] + p[4:], n) for _, p, n in ROWS]])
def test_passes_equal_a_count_token_by_token(rows):
    distinct = {prompt for _, prompt, _ in rows}
    shared = 0 if len(distinct) < 2 else 5 if rows[0][1][:5] == BEGUN else 4
    found = [prefill(MODEL, rows), *steps(MODEL, rows)]
    assert [(p.bytes, p.flops) for p in found] == counted(rows, shared)


def test_prompts_that_share_too_few_tokens_are_read_whole():
    """The static decoder does not read fewer than four tokens apart."""
    rows = [(slot, (1, 2, 3, last), 1) for slot in (0, 1) for last in (4, 5)]
    assert prefill(MODEL, rows).bytes == prefill(MODEL, [(s, (9 + p[3], *p[1:]), 1) for s, p, _ in rows]).bytes
    assert steps(MODEL, rows) == []


def test_flops_of_a_step_and_of_a_prompt_are_those_that_torch_counts():
    """Torch counts masked columns too, so the prompt has one token more than none."""
    config = Qwen2Config(**SMALL, tie_word_embeddings=False, attn_implementation="eager")
    model, prompt = Qwen2ForCausalLM(config).eval(), (1, 2, 3, 4, 5, 6, 7)
    with torch.no_grad():
        with FlopCounterMode(display=False) as of_one:
            model(torch.tensor([prompt[:1]]))
        past = model(torch.tensor([prompt]), use_cache=True).past_key_values
        with FlopCounterMode(display=False) as of_step:
            model(torch.tensor([[8]]), past_key_values=past)
    assert sum(p.numel() for n, p in model.named_parameters() if "proj.weight" in n) == MODEL.matrices
    assert model.lm_head.weight.numel() == MODEL.output
    (step,) = steps(MODEL, [(-1, prompt, 2)])
    read = prefill(MODEL, [(-1, prompt[:1], 1)])
    # Both have one matrix product for the angles of rotary embeddings, of as many FLOPs.
    assert of_step.get_total_flops() - step.flops == of_one.get_total_flops() - read.flops < 100


def test_factors_are_those_of_an_adapter_of_rank_1():
    config = Qwen2Config(**SMALL)
    linear = [m for n, m in Qwen2ForCausalLM(config).named_modules() if n.endswith("_proj")]
    assert sum(m.in_features + m.out_features for m in linear) == MODEL.factors
    wide = Model.of({**SMALL, "head_dim": 16}, 4)
    assert (wide.queries, wide.shared, wide.column) == (64, 32, 4 * 2 * 2 * 32)


def test_floor_adds_the_longer_of_bytes_and_flops_of_each_pass():
    found = Floor.of([Pass(100.0, 100.0), Pass(10.0, 500.0)], CARD)
    assert (found.bytes, found.flops, found.bound) == (110.0, 600.0, "bytes")
    assert found.seconds == 10.0 + 5.0
    assert found.serial == 110 / 5 + 600 / 50
    assert Floor.of([Pass(10.0, 500.0)], CARD).bound == "flops"
    assert mbu(found, 22.0, CARD) == 0.5


def test_floor_of_the_published_cases_is_what_was_computed_before():
    """Qwen2.5-0.5B, 128 x 12 and 30 x 32 with random prompts of 100 tokens and 128 new ones on an H200."""
    shape = {"num_hidden_layers": 24, "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
             "num_key_value_heads": 2, "vocab_size": 151936}  # fmt: skip
    card = Card("NVIDIA H200", *DATASHEET["NVIDIA H200"], 4.3e12, 790e12)
    for members, prompts, reading, step in ((128, 12, 0.111, 1.53e-3), (30, 32, 0.069, 0.96e-3)):
        rows = [(m, (m * prompts + p, *range(99)), 128) for m in range(members) for p in range(prompts)]
        decoding = Floor.of(steps(Model.of(shape), rows), card)
        assert Floor.of([prefill(Model.of(shape), rows)], card).seconds == pytest.approx(reading, rel=0.03)
        assert decoding.seconds / 127 == pytest.approx(step, rel=0.03)
        assert decoding.bound == "flops"


def test_card_of_a_cpu_has_the_measured_rates(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    card = measured_card()
    assert (card.name, card.bandwidth, card.flops) == ("CPU", card.copy, card.product)
    assert 1e8 < card.copy < 1e13
    assert 1e8 < card.product < 1e15


def test_a_step_takes_what_all_tokens_take_less_one(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import decoding

    bench = object.__new__(decoding.Bench)
    bench.model, bench.card, read = MODEL, CARD, prefill(MODEL, ROWS)
    took = {seconds: [decoding.Took(seconds, 0.0, [ROWS])] for seconds in (400.0, 1000.0)}
    found, passes = bench.figures(took[1000.0], took[400.0]), steps(MODEL, ROWS)
    moved = sum(p.bytes for p in passes)
    least = sum(max(p.bytes / CARD.bandwidth, p.flops / CARD.flops) for p in [read, *passes])
    assert found["step_ms"] == pytest.approx(600e3 / len(passes))
    assert found["mbu"] == pytest.approx(moved / 600 / CARD.bandwidth)
    assert found["share"] == pytest.approx(least / 1000)
    assert bench.figures(took[400.0], took[1000.0])["step_ms"] is None  # noise exceeds the steps


@pytest.mark.slow
def test_decoding_reports_both_sides_of_each_case_of_a_sweep_in_its_last_line(tmp_path):
    """The second form repeats the first, so the base's and the population's work are the same in both."""
    words = ["--model", str(tiny()), "--cases", "2x2", "--sweep", "--forms", "static", "library", "--dtype", "float32"]
    words += ["--tokens", "4", "--repeats", "1", "--warm", "0", "--real-prompts", "--endless"]
    command = [sys.executable, str(BENCHMARKS / "decoding.py"), *words, "--json", str(tmp_path / "rows.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout.splitlines()[-1])
    assert [(r["form"], r["members"], r["prompts"]) for r in rows] == [
        (form, 2, prompts) for form in ("static", "library") for prompts in (1, 2)
    ]
    for one, other in zip(rows[:2], rows[2:], strict=True):
        assert one["distinct"] == 2 * one["prompts"]
        for side in ("population", "base"):
            found = one["figures"][side]
            assert found["steps"] == 3
            assert found["prefill"]["bytes"] == other["figures"][side]["prefill"]["bytes"] > 0
            assert found["decode"]["flops"] == other["figures"][side]["decode"]["flops"] > 0
        assert one["figures"]["population"]["decode"]["bytes"] > one["figures"]["base"]["decode"]["bytes"]
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 4
