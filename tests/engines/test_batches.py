# SPDX-License-Identifier: Apache-2.0
"""The library decoder's forwards: shared prefixes once, finished rows leave, batches are complete."""

import json
import shutil
from contextlib import contextmanager

import pytest
import torch
from families import PREFIX, PROMPTS, VOCABULARY, Bench, ids, make_config, next_logits, requests
from transformers import AutoModelForCausalLM

from evoalign import engines, tokens
from evoalign.engines.transformers.decode import COMPACT_EVERY, SIZES, size_for
from evoalign.errors import EvoalignError
from evoalign.types import MEAN, MEAN_PLAN, Plan, Request, Sampling

in_every_space = pytest.mark.parametrize("space", ["lora", "lowrank", "full"])
MANY_STOPS = range(0, VOCABULARY, 6)
SHARED, APART = PROMPTS["shared"], PROMPTS["apart"]


def small(folder, space="lora", **tree):
    engine = {"name": "transformers", "decoder": "library", **tree.pop("engine", {})}
    return make_config(folder, space, es={"population_size": 6}, engine=engine, **tree)


@contextmanager
def recorded(module, note):
    """Record a value of the inputs of every call of a module."""
    seen = []
    handle = module.register_forward_pre_hook(lambda _, args, kwargs: seen.append(note(args, kwargs)), with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def forwards(bench):
    """Record the shape (rows, tokens) of every forward."""
    return recorded(bench.model, lambda args, kwargs: tuple(kwargs["input_ids"].shape))


def rows_through(module):
    """Record rows and tokens of every call of a layer."""
    return recorded(module, lambda args, kwargs: tuple(args[0].shape[:2]))


# --- the work done --------------------------------------------------------------------------------------------------


def test_prefill_reads_shared_prefixes_once_per_member_and_pads_other_prompts(folder):
    with Bench(small(folder), stop_ids=[]) as bench:
        with forwards(bench) as seen, rows_through(bench.model.lm_head) as scored:
            bench.ask(bench.plan(), requests(SHARED, Sampling(3)))
        assert seen == [(6, len(PREFIX)), (18, 9), (18, 1), (18, 1)]
        assert scored == [(6, 0), (18, 1), (18, 1), (18, 1)], "a shared prefix needs no logits"
        with forwards(bench) as seen:
            bench.ask(bench.plan(), requests(APART, Sampling(3)))
        assert seen == [(18, 11), (18, 1), (18, 1)]


def test_samples_share_the_prefill_and_differ(folder):
    asked = [Request(i, APART[i % 2], Sampling(3, temperature=1.5), i) for i in range(8)]
    with Bench(small(folder), stop_ids=[]) as bench, forwards(bench) as seen:
        cells = bench.ask(bench.plan(), asked)
        assert seen == [(12, 11), (48, 1), (48, 1)]
        alone = bench.ask(bench.plan(), asked[5:6])
    for member in bench.members:
        assert len({cells[member.index, i].token_ids for i in range(0, 8, 2)}) > 1
        assert cells[member.index, 5].token_ids == alone[member.index, 5].token_ids


def test_prefill_runs_layers_below_the_evolved_ones_once_per_prompt(folder):
    with Bench(small(folder, lora={"target_layers": [1]}), stop_ids=[]) as bench:
        below, above = (bench.model.model.layers[i].self_attn.q_proj for i in (0, 1))
        with rows_through(below) as once, rows_through(above) as each:
            bench.ask(bench.plan(), requests(SHARED, Sampling(2)))
            bench.ask(MEAN_PLAN, requests(APART[:1], Sampling(1)))
        assert once == [(1, len(PREFIX)), (3, 9), (18, 1), (1, 5)]
        assert each == [(6, len(PREFIX)), (18, 9), (18, 1), (1, 5)]
        assert not any("forward" in vars(block) for block in bench.model.model.layers)


def test_prefill_shares_no_layer_where_layers_read_the_keys_of_others(folder, tmp_path):
    path = shutil.copytree(folder, tmp_path / "model")
    values = json.loads((path / "config.json").read_text()) | {"num_kv_shared_layers": 1}
    (path / "config.json").write_text(json.dumps(values))
    with Bench(small(path, lora={"target_layers": [1]}), stop_ids=[]) as bench:
        assert bench.engine._decoder.forward.trunk == ()


@pytest.mark.first("qwen2-shared", "mpt-apart")
@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "mpt", "mistral"])
def test_shared_layers_give_the_log_probabilities_of_separate_ones(family, prompts, folders):
    """Compare log-probabilities with the first layer computed once per prompt and once per member."""
    with Bench(small(folders[family], lora={"target_layers": [1]}), stop_ids=[]) as bench:
        forward, found = bench.engine._decoder.forward, []
        assert len(forward.trunk) == len(forward.crown) == 1
        for trunk in (forward.trunk, ()):
            forward.trunk = trunk
            cells = bench.ask(bench.plan(), requests(PROMPTS[prompts], Sampling(4), logprobs=True))
            found.append(torch.tensor([cells[key].logprobs for key in sorted(cells)]))
    torch.testing.assert_close(*found, atol=1e-4, rtol=0)


@pytest.mark.first("qwen2-True", "mistral-False")
@pytest.mark.parametrize(
    ("family", "once"),
    [("qwen2", True), ("opt", True), ("gpt_neox", True), ("mistral", False), ("qwen2_windows", False), ("mpt", False)],
)
def test_decoding_mask_is_made_once_if_it_only_covers_padding(family, once, folders):
    """With a window or ALiBi transformers makes a mask in each step. Completions have the same bits."""
    said = []
    with Bench(small(folders[family]), stop_ids=[]) as bench:
        forward = bench.engine._decoder.forward
        assert forward._takes_masks == once
        for own in (once, False):
            forward._takes_masks = own
            with recorded(bench.model, lambda args, kwargs: kwargs["attention_mask"]) as seen:
                said.append(list(bench.engine.rollout(bench.plan(), requests(APART, Sampling(4), logprobs=True))))
            assert [mask.dim() for mask in seen] == [2, *[4 if own else 2] * 3]
            assert len({mask.untyped_storage().data_ptr() for mask in seen[1:]}) == 1
    assert said[0] == said[1]


@in_every_space
def test_one_token_takes_one_forward(space, folder):
    with Bench(small(folder, space), stop_ids=[]) as bench, forwards(bench) as seen:
        cells = bench.ask(bench.plan(), requests(APART[:1], Sampling(1)))
        assert seen == ([(6, 5)] if space != "full" else [(1, 5)] * 6)
        assert all(len(r.token_ids) == 1 for r in cells.values())


@pytest.mark.parametrize("deterministic", [False, True])
def test_finished_rows_leave_at_once_or_in_fixed_steps_when_deterministic(deterministic, folder):
    with Bench(small(folder, deterministic=deterministic), stop_ids=MANY_STOPS) as bench, forwards(bench) as seen:
        cells = bench.ask(bench.plan(), requests(APART, Sampling(24)))
    lengths = [len(r.token_ids) for r in cells.values()]
    assert max(lengths) - min(lengths) > 6, "all rows end together: nothing is tested"
    for step, (rows, _) in enumerate(seen[1:], 1):
        last = step // COMPACT_EVERY * COMPACT_EVERY if deterministic else step
        left = sum(length > last for length in lengths)
        assert rows == (left if deterministic else size_for(left))
    assert len(seen) == max(lengths)


def test_forward_disables_cudnn_attention(folder):
    """With a mask torch prefers cuDNN on recent GPUs. The process's setting is restored afterwards."""
    asked = torch.backends.cuda.cudnn_sdp_enabled
    with Bench(small(folder)) as bench, recorded(bench.model, lambda args, kwargs: asked()) as found:
        bench.ask(bench.plan(), requests(APART, Sampling(2)))
    assert found == [False, False] and asked()


def test_size_for_returns_few_sizes_close_to_the_rows():
    """A GPU selects kernels for each new size; padding is at most an eighth of the rows."""
    sizes = {rows: size_for(rows) for rows in range(1, 4097)}
    assert all(rows <= size <= rows * 9 / 8 for rows, size in sizes.items())
    assert len(set(sizes.values())) == 16 + SIZES * 8 and set(range(1, 17)) < set(sizes.values())


# --- what comes back ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stop_ids", "reasons"), [(MANY_STOPS, {"stop", "length"}), ([], {"length"})])
def test_completions_end_at_stop_tokens_and_at_full_length(stop_ids, reasons, folder):
    with Bench(small(folder), stop_ids=stop_ids) as bench:
        rollouts = bench.ask(bench.plan(), requests(APART, Sampling(6))).values()
        assert {r.finish_reason for r in rollouts} == reasons
        for r in rollouts:
            stopped = r.token_ids[-1] in stop_ids
            assert r.finish_reason == ("stop" if stopped else "length")
            assert len(r.token_ids) == 6 or stopped
            assert not set(r.token_ids[:-1]) & set(stop_ids)
            said = r.token_ids[:-1] if stopped else r.token_ids
            assert r.text == bench.tokens.tokenizer.decode(list(said), skip_special_tokens=True)


@pytest.mark.parametrize(
    ("engine", "most"), [*(({"max_rows": n}, n) for n in (1, 2, 7, 18, 1000)), ({"memory_gib": 5e-5}, 5)]
)
@in_every_space
def test_rollout_returns_one_completion_per_member_and_request_in_any_batches(space, engine, most, folder):
    with Bench(small(folder, space, engine=engine), MANY_STOPS) as bench, forwards(bench) as seen:
        cells = bench.ask(bench.plan(), requests(APART, Sampling(5)))
        assert set(cells) == {(m, p) for m in range(6) for p in range(3)}
        assert 1 <= max(rows for rows, _ in seen) <= most
        for (m, p), rollout in cells.items():
            assert (rollout.member, rollout.request) == (bench.members[m], p)


@in_every_space
def test_small_batches_give_the_log_probabilities_of_one_batch(space, folder):
    """Texts may depend on the batch shape; log-probabilities of a first token differ only by rounding."""
    firsts = []
    for max_rows in (1000, 7, 2):
        with Bench(small(folder, space, engine={"max_rows": max_rows}), stop_ids=[]) as bench:
            cells = bench.ask(bench.plan(), requests(SHARED, Sampling(1), logprobs=True))
            firsts.append(torch.tensor([cells[key].logprobs for key in sorted(cells)]))
    assert len(set(firsts[0].flatten().tolist())) > 6
    for other in firsts[1:]:
        torch.testing.assert_close(other, firsts[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("space", ["lowrank", "steering"])
def test_the_last_row_of_a_batch_keeps_its_member(space, folder):
    asked, found = requests(APART, Sampling(40, 1.0), logprobs=True), []
    for max_rows in (1000, 1):
        config = small(folder, space, deterministic=False, engine={"max_rows": max_rows})
        with Bench(config, MANY_STOPS) as bench, forwards(bench) as seen:
            found.append(bench.ask(bench.plan(), asked))
        assert 1 in [rows for rows, tokens in seen if tokens == 1]
    together, alone = found
    for key, rollout in alone.items():
        assert together[key].token_ids == rollout.token_ids
        assert together[key].logprobs == pytest.approx(rollout.logprobs, abs=1e-4)


@in_every_space
def test_a_deterministic_rollout_repeats_bit_for_bit(space, folder):
    answers, asked = [], requests(SHARED, Sampling(COMPACT_EVERY + 4, 1.0), logprobs=True)
    for _ in range(2):
        with Bench(small(folder, space, deterministic=True, engine={"max_rows": 8}), MANY_STOPS) as bench:
            bench.move()
            answers += [list(bench.engine.rollout(bench.plan(), asked)) for _ in range(2)]
            assert bench.facts.deterministic
    assert answers[0] == answers[1] == answers[2] == answers[3]


# --- the mean -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(folder):
    """Completions of the base model."""
    model, found = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval(), []
    for prompt in SHARED:
        whole = torch.tensor([prompt])
        out = model.generate(whole, attention_mask=torch.ones_like(whole), max_new_tokens=12, do_sample=False,
                             eos_token_id=[2], pad_token_id=0)  # fmt: skip
        found.append(out[0, len(prompt) :].tolist())
    return found


@in_every_space
def test_the_mean_is_the_base_model_at_first(space, folder, plain):
    with Bench(small(folder, space), stop_ids=[2]) as bench:
        asked = requests(SHARED, Sampling(12))
        bench.ask(bench.plan(), asked)  # members before it leave no trace
        for plan in (MEAN_PLAN, Plan(1, 0.05, (*bench.members[:2], MEAN))):
            cells = bench.ask(plan, asked)
            assert [list(cells[-1, i].token_ids) for i in range(3)] == plain


def test_rollout_of_the_mean_works_before_start(folder):
    config, asked = small(folder), requests(APART, Sampling(4))
    engine = engines.create(config, tokens.load(config.model))
    assert len(list(engine.rollout(MEAN_PLAN, asked))) == 3
    with pytest.raises(EvoalignError, match="no space yet"):
        list(engine.rollout(Plan(0, 0.1, (MEAN, MEAN)), asked))
    engine.close()


def bits(bench):
    return {n: p.detach().view(torch.uint8).numpy().tobytes() for n, p in bench.model.named_parameters()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@in_every_space
def test_a_rollout_changes_no_weight(space, dtype, folder, monkeypatch):
    """Whether it is whole, is abandoned or fails."""
    with Bench(small(folder, space, model={"dtype": dtype})) as bench:
        bench.move()
        before, asked = (bits(bench), bench.engine.fingerprint()), requests(APART, Sampling(4))
        bench.ask(bench.plan(), asked)
        assert (bits(bench), bench.engine.fingerprint()) == before
        half = bench.engine.rollout(bench.plan(), asked)
        next(half)
        half.close()
        assert (bits(bench), bench.engine.fingerprint()) == before
        monkeypatch.setattr(bench.tokens, "decode_all", lambda ids: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            list(bench.engine.rollout(bench.plan(), asked))
        assert (bits(bench), bench.engine.fingerprint()) == before


def test_hooks_add_nothing_after_a_rollout(folder):
    """Other callers get the plain model, also after an abandoned rollout."""
    asked = requests(APART, Sampling(2))
    with Bench(small(folder)) as bench:

        def logits():
            return next_logits(bench.model, APART[0], [30, 31])

        before = logits()
        bench.move()
        rollout = bench.engine.rollout(MEAN_PLAN, asked)
        next(iter(rollout))
        assert not torch.equal(logits(), before)
        rollout.close()
        assert torch.equal(logits(), before)
        bench.ask(MEAN_PLAN, asked)
        assert torch.equal(logits(), before)


# --- half precision -------------------------------------------------------------------------------------------------


@in_every_space
def test_bfloat16_serves_the_rounded_mean_and_distinct_members(space, folder):
    config = make_config(folder, space, model={"dtype": "bfloat16"}, es={"population_size": 10})
    with Bench(config, stop_ids=[2]) as bench:
        bench.move()
        assert bench.engine.dtype == torch.bfloat16
        cells = bench.ask(bench.plan(), requests(SHARED, Sampling(8), logprobs=True))
        assert len({cells[m.index, 0].logprobs for m in bench.members}) == 10
        served, moved = dict(bench.model.named_parameters()), 0
        for name, master in bench.engine.state():
            assert master.dtype == torch.float32
            if name in served:
                assert torch.equal(served[name], master.to(torch.bfloat16))
                moved += not torch.equal(master, master.to(torch.bfloat16).float())
        assert space == "lora" or moved > 10


def firsts(bench):
    """Return the log-probabilities of a forced first token under each member."""
    cells = bench.ask(bench.plan(), requests([ids(5, 2)], Sampling(1), logprobs=True))
    return torch.tensor([cells[m.index, 0].logprobs for m in bench.members])


def test_bfloat16_is_close_to_float32(folder):
    found = []
    for dtype in ("float32", "bfloat16"):
        with Bench(make_config(folder, model={"dtype": dtype}, es={"sigma": 0.01})) as bench:
            found.append(firsts(bench))
    assert (found[0] - found[1]).abs().median() < 0.15


def test_rollout_works_under_autocast(folder):
    """As in a mixed-precision trainer: float32 weights and adapters, bfloat16 arithmetic."""
    with Bench(small(folder)) as bench:
        plain = firsts(bench)
        with torch.autocast("cpu", torch.bfloat16):
            mixed = firsts(bench)
    assert not torch.equal(plain, mixed) and (plain - mixed).abs().median() < 0.15
