# SPDX-License-Identifier: Apache-2.0
"""The library decoder's forwards: shared prefixes once, finished rows leave, batches are complete."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from families import PREFIX, PROMPTS, VOCABULARY, Bench, build, ids, make_config, next_logits, requests

from evoalign.engines.transformers.decode import COMPACT_EVERY, SIZES, size_for
from evoalign.types import MEAN, MEAN_PLAN, Plan, Request, Rollout, Sampling

SPACES = ["lora", "lowrank", "full"]
MANY_STOPS = range(0, VOCABULARY, 6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("qwen2", tmp_path_factory.mktemp("batches") / "qwen2")


@contextmanager
def forwards(bench: Bench) -> Iterator[list[tuple[int, int]]]:
    """Record the shape (rows, tokens) of every forward."""
    seen: list[tuple[int, int]] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(tuple(kwargs["input_ids"].shape))

    handle = bench.model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def small(folder: Path, space: str = "lora", **tree: Any) -> Any:
    engine = {"name": "transformers", "decoder": "library", **tree.pop("engine", {})}
    return make_config(folder, space, es={"population_size": 6}, engine=engine, **tree)


# --- the work done --------------------------------------------------------------------------------------------------


def test_prefill_reads_a_shared_prefix_once_per_member(folder: Path) -> None:
    with Bench(small(folder), stop_ids=[]) as bench, forwards(bench) as seen:
        bench.ask(bench.plan(), requests(PROMPTS["shared"], Sampling(3)))
        assert seen == [(6, len(PREFIX)), (18, 9), (18, 1), (18, 1)]


def test_prefill_pads_prompts_without_shared_prefix(folder: Path) -> None:
    with Bench(small(folder), stop_ids=[]) as bench, forwards(bench) as seen:
        bench.ask(bench.plan(), requests(PROMPTS["apart"], Sampling(3)))
        assert seen == [(18, 11), (18, 1), (18, 1)]


def test_samples_share_the_prefill_and_differ(folder: Path) -> None:
    warm = Sampling(3, temperature=1.5)
    asked = [Request(i, PROMPTS["apart"][i % 2], warm, i) for i in range(8)]
    with Bench(small(folder), stop_ids=[]) as bench, forwards(bench) as seen:
        cells = bench.ask(bench.plan(), asked)
        assert seen == [(12, 11), (48, 1), (48, 1)]
        alone = bench.ask(bench.plan(), asked[5:6])
    for member in bench.members:
        assert len({cells[member.index, i].token_ids for i in range(0, 8, 2)}) > 1
        assert cells[member.index, 5].token_ids == alone[member.index, 5].token_ids


@contextmanager
def rows_through(module: Any) -> Iterator[list[tuple[int, int]]]:
    """Record rows and tokens of every call of a module."""
    seen: list[tuple[int, int]] = []
    handle = module.register_forward_pre_hook(lambda _module, inputs: seen.append(tuple(inputs[0].shape[:2])))
    try:
        yield seen
    finally:
        handle.remove()


def test_prefill_computes_no_logits_for_a_shared_prefix(folder: Path) -> None:
    with Bench(small(folder), stop_ids=[]) as bench, rows_through(bench.model.lm_head) as seen:
        bench.ask(bench.plan(), requests(PROMPTS["shared"], Sampling(2)))
    assert seen == [(6, 0), (18, 1), (18, 1)]


def test_prefill_runs_layers_below_the_evolved_ones_once_per_prompt(folder: Path) -> None:
    config = small(folder, lora={"target_layers": [1]})
    with Bench(config, stop_ids=[]) as bench:
        below, above = (bench.model.model.layers[i].self_attn.q_proj for i in (0, 1))
        with rows_through(below) as once, rows_through(above) as each:
            bench.ask(bench.plan(), requests(PROMPTS["shared"], Sampling(2)))
            bench.ask(MEAN_PLAN, requests(PROMPTS["apart"][:1], Sampling(1)))
        assert once == [(1, len(PREFIX)), (3, 9), (18, 1), (1, 5)]
        assert each == [(6, len(PREFIX)), (18, 9), (18, 1), (1, 5)]
        assert not any("forward" in vars(block) for block in bench.model.model.layers)


@pytest.mark.first("qwen2-shared", "mpt-apart")
@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "mpt", "mistral"])
def test_shared_layers_give_the_log_probabilities_of_separate_ones(family: str, prompts: str, tmp_path: Path) -> None:
    """Compare log-probabilities with the first layer computed once per prompt and once per member."""
    found: list[torch.Tensor] = []
    for shares in (True, False):
        config = small(build(family, tmp_path), lora={"target_layers": [1]})
        with Bench(config, stop_ids=[]) as bench:
            forward = bench.engine._decoder.forward  # type: ignore[attr-defined]
            assert len(forward.trunk) == len(forward.crown) == 1
            forward.trunk = forward.trunk if shares else ()
            cells = bench.ask(bench.plan(), requests(PROMPTS[prompts], Sampling(4), logprobs=True))
        found.append(torch.tensor([cells[key].logprobs for key in sorted(cells)]))
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=0)


@contextmanager
def masks(bench: Bench) -> Iterator[list[torch.Tensor]]:
    """Record the mask of each forward."""
    seen: list[torch.Tensor] = []
    note = lambda _module, _args, kwargs: seen.append(kwargs["attention_mask"])  # noqa: E731
    handle = bench.model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


@pytest.mark.first("qwen2-True", "mistral-False")
@pytest.mark.parametrize(
    ("family", "once"),
    [("qwen2", True), ("opt", True), ("gpt_neox", True), ("mistral", False), ("qwen2_windows", False), ("mpt", False)],
)
def test_decoding_mask_is_made_once_if_it_only_covers_padding(family: str, once: bool, tmp_path: Path) -> None:
    """With a window or ALiBi transformers makes a mask in each step. Completions have the same bits."""
    said: list[list[Rollout]] = []
    for own in (once, False):
        with Bench(small(build(family, tmp_path)), stop_ids=[]) as bench, masks(bench) as seen:
            forward = bench.engine._decoder.forward  # type: ignore[attr-defined]
            assert forward._takes_masks == once
            forward._takes_masks = own
            asked = requests(PROMPTS["apart"], Sampling(4), logprobs=True)
            said.append(list(bench.engine.rollout(bench.plan(), asked)))
        assert [mask.dim() for mask in seen] == [2, *[4 if own else 2] * 3]
        assert len({mask.untyped_storage().data_ptr() for mask in seen[1:]}) == 1
    assert said[0] == said[1]


@pytest.mark.parametrize("space", SPACES)
def test_one_token_takes_one_forward(space: str, folder: Path) -> None:
    with Bench(small(folder, space), stop_ids=[]) as bench, forwards(bench) as seen:
        cells = bench.ask(bench.plan(), requests(PROMPTS["apart"][:1], Sampling(1)))
        assert seen == ([(6, 5)] if space != "full" else [(1, 5)] * 6)
        assert all(len(r.token_ids) == 1 for r in cells.values())


def test_finished_rows_leave_at_once(folder: Path) -> None:
    with Bench(small(folder, deterministic=False), stop_ids=MANY_STOPS) as bench, forwards(bench) as seen:
        cells = bench.ask(bench.plan(), requests(PROMPTS["apart"], Sampling(24)))
    lengths = [len(r.token_ids) for r in cells.values()]
    assert max(lengths) - min(lengths) > 6, "all rows end together: nothing is tested"
    for step, (rows, _) in enumerate(seen[1:], 1):
        assert rows == size_for(sum(length > step for length in lengths))
    assert len(seen) == max(lengths)


def test_forward_disables_cudnn_attention(folder: Path) -> None:
    """With a mask torch prefers cuDNN on recent GPUs. The process's setting is restored afterwards."""
    asked = torch.backends.cuda.cudnn_sdp_enabled
    found: list[bool] = []
    with Bench(small(folder)) as bench:
        handle = bench.model.register_forward_pre_hook(lambda *_: found.append(asked()))
        bench.ask(bench.plan(), requests(PROMPTS["apart"], Sampling(2)))
        handle.remove()
    assert found == [False, False] and asked()


def test_size_for_returns_few_sizes_close_to_the_rows() -> None:
    """A GPU selects kernels for each new size; padding is at most an eighth of the rows."""
    sizes = {rows: size_for(rows) for rows in range(1, 4097)}
    assert all(rows <= size <= rows * 9 / 8 for rows, size in sizes.items())
    assert len(set(sizes.values())) == 16 + SIZES * 8 and set(range(1, 17)) < set(sizes.values())


def test_finished_rows_leave_in_fixed_steps_when_deterministic(folder: Path) -> None:
    with Bench(small(folder, deterministic=True), stop_ids=MANY_STOPS) as bench, forwards(bench) as seen:
        cells = bench.ask(bench.plan(), requests(PROMPTS["apart"], Sampling(24)))
    lengths = [len(r.token_ids) for r in cells.values()]
    for step, (rows, _) in enumerate(seen[1:], 1):
        last = step // COMPACT_EVERY * COMPACT_EVERY
        assert rows == sum(length > last for length in lengths)
    assert len(seen) == max(lengths)


# --- what comes back ------------------------------------------------------------------------------------------------


def test_stop_tokens_and_finish_reasons(folder: Path) -> None:
    with Bench(small(folder), stop_ids=MANY_STOPS) as bench:
        rollouts = bench.ask(bench.plan(), requests(PROMPTS["apart"], Sampling(6))).values()
        reasons = {r.finish_reason for r in rollouts}
        assert reasons == {"stop", "length"}
        for r in rollouts:
            stopped = r.token_ids[-1] in MANY_STOPS
            assert r.finish_reason == ("stop" if stopped else "length")
            assert len(r.token_ids) == 6 or stopped
            assert not set(r.token_ids[:-1]) & set(MANY_STOPS)
            said = r.token_ids[:-1] if stopped else r.token_ids
            assert r.text == bench.tokens.tokenizer.decode(list(said), skip_special_tokens=True)


def test_no_stop_token_means_full_length(folder: Path) -> None:
    with Bench(small(folder), stop_ids=[]) as bench:
        rollouts = bench.ask(bench.plan(), requests(PROMPTS["apart"], Sampling(9))).values()
    assert {(len(r.token_ids), r.finish_reason) for r in rollouts} == {(9, "length")}


@pytest.mark.parametrize("max_rows", [1, 2, 7, 18, 1000])
@pytest.mark.parametrize("space", SPACES)
def test_rollout_returns_one_completion_per_member_and_request(space: str, max_rows: int, folder: Path) -> None:
    config = small(folder, space, engine={"max_rows": max_rows})
    with Bench(config, stop_ids=MANY_STOPS) as bench, forwards(bench) as seen:
        cells = bench.ask(bench.plan(), requests(PROMPTS["apart"], Sampling(5)))
        assert set(cells) == {(m, p) for m in range(6) for p in range(3)}
        assert max(rows for rows, _ in seen) <= max_rows
        for (m, p), rollout in cells.items():
            assert (rollout.member, rollout.request) == (bench.members[m], p)


@pytest.mark.parametrize("space", SPACES)
def test_low_memory_makes_small_batches(space: str, folder: Path) -> None:
    config = small(folder, space, engine={"memory_gib": 5e-5})
    with Bench(config) as bench, forwards(bench) as seen:
        bench.ask(bench.plan(), requests(PROMPTS["apart"], Sampling(5)))
        assert 1 <= max(rows for rows, _ in seen) < 6


@pytest.mark.parametrize("space", SPACES)
def test_small_batches_give_the_log_probabilities_of_one_batch(space: str, folder: Path) -> None:
    """Texts may depend on the batch shape; log-probabilities of a first token differ only by rounding."""
    firsts = []
    for max_rows in (1000, 7, 2):
        config = small(folder, space, engine={"max_rows": max_rows})
        with Bench(config, stop_ids=[]) as bench:
            cells = bench.ask(bench.plan(), requests(PROMPTS["shared"], Sampling(1), logprobs=True))
            firsts.append(torch.tensor([cells[key].logprobs for key in sorted(cells)]))
    assert len(set(firsts[0].flatten().tolist())) > 6
    for other in firsts[1:]:
        torch.testing.assert_close(other, firsts[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("space", SPACES)
def test_a_deterministic_rollout_repeats_bit_for_bit(space: str, folder: Path) -> None:
    answers: list[list[Rollout]] = []
    for _ in range(2):
        config = small(folder, space, deterministic=True, engine={"max_rows": 8})
        with Bench(config, stop_ids=MANY_STOPS) as bench:
            bench.move()
            asked = requests(PROMPTS["shared"], Sampling(20, 1.0), logprobs=True)
            answers += [list(bench.engine.rollout(bench.plan(), asked)) for _ in range(2)]
            assert bench.facts.deterministic
    assert answers[0] == answers[1] == answers[2] == answers[3]


# --- the mean -------------------------------------------------------------------------------------------------------


def plain(model: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    whole = torch.tensor([prompt])
    out = model.generate(whole, attention_mask=torch.ones_like(whole), max_new_tokens=tokens, do_sample=False,
                         eos_token_id=[2], pad_token_id=0)  # fmt: skip
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("space", SPACES)
def test_the_mean_is_the_base_model_at_first(space: str, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    wanted = [plain(model, p, 12) for p in PROMPTS["shared"]]
    with Bench(small(folder, space), stop_ids=[2]) as bench:
        asked = requests(PROMPTS["shared"], Sampling(12))
        bench.ask(bench.plan(), asked)  # members before it leave no trace
        cells = bench.ask(MEAN_PLAN, asked)
        assert [list(cells[-1, i].token_ids) for i in range(3)] == wanted
        among = bench.ask(Plan(1, 0.05, (*bench.members[:2], MEAN)), asked)
        assert [list(among[-1, i].token_ids) for i in range(3)] == wanted


def test_rollout_of_the_mean_works_before_start(folder: Path) -> None:
    from evoalign import engines, tokens
    from evoalign.errors import EvoalignError

    config = small(folder)
    engine = engines.create(config, tokens.load(config.model))
    asked = requests(PROMPTS["apart"], Sampling(4))
    assert len(list(engine.rollout(MEAN_PLAN, asked))) == 3
    with pytest.raises(EvoalignError, match="no space yet"):
        list(engine.rollout(Plan(0, 0.1, (MEAN, MEAN)), asked))
    engine.close()


def bits(bench: Bench) -> dict[str, bytes]:
    return {n: p.detach().view(torch.uint8).numpy().tobytes() for n, p in bench.model.named_parameters()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("space", SPACES)
def test_a_rollout_changes_no_weight(space: str, dtype: str, folder: Path) -> None:
    with Bench(small(folder, space, model={"dtype": dtype})) as bench:
        bench.move()
        before, hashed = bits(bench), bench.engine.fingerprint()
        asked = requests(PROMPTS["apart"], Sampling(4))
        bench.ask(bench.plan(), asked)
        assert (bits(bench), bench.engine.fingerprint()) == (before, hashed)
        half = bench.engine.rollout(bench.plan(), asked)
        next(half)
        half.close()  # type: ignore[attr-defined]
        assert (bits(bench), bench.engine.fingerprint()) == (before, hashed)


@pytest.mark.parametrize("space", SPACES)
def test_a_rollout_that_fails_leaves_the_mean(space: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Bench(small(folder, space)) as bench:
        before = bits(bench)
        with monkeypatch.context() as patch:
            patch.setattr(bench.tokens, "decode_all", lambda ids: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                list(bench.engine.rollout(bench.plan(), requests(PROMPTS["apart"], Sampling(2))))
        assert bits(bench) == before


# --- half precision -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", SPACES)
def test_bfloat16_serves_the_rounded_mean_and_distinct_members(space: str, folder: Path) -> None:
    config = make_config(folder, space, model={"dtype": "bfloat16"}, es={"population_size": 10})
    with Bench(config, stop_ids=[2]) as bench:
        bench.move()
        assert bench.engine.dtype == torch.bfloat16
        cells = bench.ask(bench.plan(), requests(PROMPTS["shared"], Sampling(8), logprobs=True))
        firsts = {cells[m.index, 0].logprobs for m in bench.members}
        assert len(firsts) == 10
        served = dict(bench.model.named_parameters())
        moved = 0
        for name, master in bench.engine.state():
            assert master.dtype == torch.float32
            if name in served:
                assert torch.equal(served[name], master.to(torch.bfloat16))
                moved += not torch.equal(master, master.to(torch.bfloat16).float())
        assert space == "lora" or moved > 10


def test_bfloat16_is_close_to_float32(folder: Path) -> None:
    """Compare log-probabilities of a forced first token under each member in both dtypes."""
    logprobs = []
    for dtype in ("float32", "bfloat16"):
        with Bench(make_config(folder, model={"dtype": dtype}, es={"sigma": 0.01})) as bench:
            cells = bench.ask(bench.plan(), requests([ids(5, 2)], Sampling(1), logprobs=True))
            logprobs.append(torch.tensor([cells[m.index, 0].logprobs for m in bench.members]))
    assert (logprobs[0] - logprobs[1]).abs().median() < 0.15


def test_rollout_works_under_autocast(folder: Path) -> None:
    """As in a mixed-precision trainer: float32 weights and adapters, bfloat16 arithmetic."""
    with Bench(small(folder)) as bench:
        asked = requests([ids(5, 2)], Sampling(1), logprobs=True)
        plain = bench.ask(bench.plan(), asked)
        with torch.autocast("cpu", torch.bfloat16):
            mixed = bench.ask(bench.plan(), asked)
        ours, theirs = (torch.tensor([cells[m.index, 0].logprobs for m in bench.members]) for cells in (plain, mixed))
        assert not torch.equal(ours, theirs)
        assert (ours - theirs).abs().median() < 0.15


def test_hooks_add_nothing_after_a_rollout(folder: Path) -> None:
    """Other callers get the plain model, also after an abandoned rollout."""
    with Bench(small(folder)) as bench:
        before = next_logits(bench.model, PROMPTS["apart"][0], [30, 31])
        bench.move()
        rollout = bench.engine.rollout(MEAN_PLAN, requests(PROMPTS["apart"], Sampling(2)))
        next(iter(rollout))
        assert not torch.equal(next_logits(bench.model, PROMPTS["apart"][0], [30, 31]), before)
        rollout.close()
        assert torch.equal(next_logits(bench.model, PROMPTS["apart"][0], [30, 31]), before)
        bench.ask(MEAN_PLAN, requests(PROMPTS["apart"], Sampling(2)))
        assert torch.equal(next_logits(bench.model, PROMPTS["apart"][0], [30, 31]), before)
