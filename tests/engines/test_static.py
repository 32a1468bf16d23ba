# SPDX-License-Identifier: Apache-2.0
"""The static decoder against the library decoder on the same members: tokens and log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import PROMPTS, VOCABULARY, Bench, build, ids, make_config, requests

from evoalign import engines, spaces
from evoalign.engines.transformers import blocks
from evoalign.engines.transformers.settings import STATIC_TYPES, WRITTEN, Footprint, columns
from evoalign.engines.transformers.static import StaticDecoder
from evoalign.engines.transformers.static_memory import LEAST, Memory, Reader, size_for
from evoalign.errors import ConfigError, EvoalignError, NotFiniteError
from evoalign.kernels import compiled
from evoalign.types import MEAN, MEAN_PLAN, Request, Rollout, Sampling

GREEDY, WARM = Sampling(21), Sampling(21, temperature=1.3, top_p=0.9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("qwen2", tmp_path_factory.mktemp("static") / "qwen2")


def bench_of(folder: Path, decoder: str, space: str = "lowrank", stop_ids: Sequence[int] = (), **tree: Any) -> Bench:
    sections = {"es": {"population_size": 6}, "engine": {"decoder": decoder}, **tree}
    return Bench(make_config(folder, space, **sections), stop_ids)


def asked(prompts: str, sampling: Sampling, *, samples: int = 2) -> list[Request]:
    """Return `samples` requests per prompt, each with its own seed, with log-probabilities."""
    return [
        Request(samples * i + k, prompt, sampling, 7 * i + k, logprobs=True)
        for i, prompt in enumerate(PROMPTS[prompts])
        for k in range(samples)
    ]


def both(folder: Path, requests: Sequence[Request], **more: Any) -> list[dict[tuple[int, int], Rollout]]:
    found = []
    for decoder in ("library", "static"):
        with bench_of(folder, decoder, **more) as bench:
            bench.move()
            found.append(bench.ask(bench.plan(), requests) | bench.ask(MEAN_PLAN, requests))
    return found


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize("space", ["lora", "lowrank", "full"])
def test_static_decoder_equals_the_library_decoder(folder: Path, space: str, prompts: str, sampling: Sampling) -> None:
    wanted, found = both(folder, asked(prompts, sampling), space=space, stop_ids=range(0, VOCABULARY, 40))
    assert len({len(r.token_ids) for r in wanted.values()}) > 3, "rows must leave at different steps"
    for key, rollout in wanted.items():
        got = found[key]
        assert (got.token_ids, got.text, got.finish_reason) == (
            rollout.token_ids, rollout.text, rollout.finish_reason
        )  # fmt: skip
        assert got.logprobs is not None and rollout.logprobs is not None
        assert got.logprobs == pytest.approx(rollout.logprobs, abs=1e-4)
    alike = sum(found[member, i].token_ids == found[-1, i].token_ids for member, i in found if member >= 0)
    assert alike < len(found) / 4, "members must differ from the mean"


@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize("space", ["lora", "lowrank"])
def test_static_decoder_runs_layers_below_the_evolved_ones_once_per_prompt(
    space: str, prompts: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[int, int, int]] = []
    own = blocks.Blocks.read

    def counted(self: Any, tokens: torch.Tensor, *arguments: Any, layers: slice, **more: Any) -> Any:
        read.append((*layers.indices(2)[:2], tokens.numel()))
        return own(self, tokens, *arguments, layers=layers, **more)

    monkeypatch.setattr(blocks.Blocks, "read", counted)
    wanted, found = both(folder, asked(prompts, GREEDY), space=space, **{space: {"target_layers": [1]}})
    for key, rollout in wanted.items():
        assert found[key].token_ids == rollout.token_ids
        assert found[key].logprobs == pytest.approx(rollout.logprobs, abs=1e-4)
    assert len({found[key].token_ids for key in found}) > len(found) / 3, "members must differ"
    below, above = (sum(n for first, end, n in read if (first, end) == of) for of in ((0, 1), (1, 2)))
    assert below and above == 6 * below, "once per prompt, and once per prompt and member"


def test_waiting_rows_enter_as_others_leave(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live: list[int] = []
    own = StaticDecoder._step

    def counted(self: Any, memory: Any, size: int, draws: Any) -> None:
        done, at = memory.state.done[:size].clone(), memory.state.position[:size].clone()
        live.append(int((~done).sum()))
        own(self, memory, size, draws)
        assert torch.equal(memory.state.position[:size], at + ~done), "rows that are done do not advance"

    requests = asked("apart", Sampling(60, temperature=1.3))
    many = [replace(r, index=r.index + 100 * k, prompt_ids=r.prompt_ids[k:]) for k in range(3) for r in requests]
    stops = range(0, VOCABULARY, 30)
    with bench_of(folder, "library", stop_ids=stops) as bench:
        wanted = bench.ask(bench.plan(), many)
    monkeypatch.setattr(StaticDecoder, "_step", counted)
    with bench_of(folder, "static", stop_ids=stops, engine={"decoder": "static", "max_rows": 12}) as bench:
        found = bench.ask(bench.plan(), many)
    assert {k: r.token_ids for k, r in found.items()} == {k: r.token_ids for k, r in wanted.items()}
    assert len(found) == 9 * max(live) == 9 * 12
    while_some_wait = live[: len(live) - 60]
    assert len(while_some_wait) > 60 and sum(while_some_wait) > 0.8 * 12 * len(while_some_wait)


def test_members_are_served_in_turns_when_factors_do_not_fit(folder: Path) -> None:
    found, members = [], []
    for limit in (1.0, 0.0012):
        with bench_of(folder, "static", engine={"decoder": "static", "memory_gib": limit}) as bench:
            static: Any = bench.engine
            found.append(bench.ask(bench.plan(), asked("apart", GREEDY)))
            members.append(static._static._memory.shape.slots)
    assert {k: r.token_ids for k, r in found[0].items()} == {k: r.token_ids for k, r in found[1].items()}
    assert members[0] == 6 and members[1] < 6


@pytest.mark.parametrize("space", ["lora", "lowrank", "full"])
def test_mean_and_members_generate_in_one_rollout(space: str, folder: Path) -> None:
    """In one rollout with separate requests, the mean generates the same as alone."""
    said = []
    for decoder in ("library", "static"):
        with bench_of(folder, decoder, space) as bench:
            bench.move()
            plan = bench.plan()
            own = [replace(r, member=m) for m in plan.members for r in asked("apart", GREEDY)]
            riding = [replace(r, index=r.index + 100, member=MEAN) for r in asked("apart", GREEDY)]
            rollouts = list(bench.engine.rollout(replace(plan, members=(*plan.members, MEAN)), [*own, *riding]))
            mixed = {(r.member.index, r.request): r for r in rollouts}
            alone = bench.ask(MEAN_PLAN, asked("apart", GREEDY))
            assert {i: mixed[-1, i + 100].token_ids for _, i in alone} == {
                i: r.token_ids for (_, i), r in alone.items()
            }
            assert len(mixed) == len(rollouts) == 7 * len(alone)
            said.append({k: r.token_ids for k, r in mixed.items()})
    assert said[0] == said[1]


def test_stop_texts_end_completions_like_the_library_decoder(folder: Path) -> None:
    plain, _ = both(folder, asked("apart", GREEDY))
    text = next(r.text for r in plain.values() if len(r.text) > 6)
    stop = Sampling(21, stop=(text[3:5], text[1]))
    wanted, found = both(folder, asked("apart", stop))
    assert {r.finish_reason for r in wanted.values()} == {"stop", "length"}
    for key, rollout in wanted.items():
        got = found[key]
        assert (got.token_ids, got.text, got.finish_reason) == (
            rollout.token_ids, rollout.text, rollout.finish_reason
        )  # fmt: skip


def test_memory_is_reused_by_the_next_batch_and_grows(folder: Path) -> None:
    with bench_of(folder, "static") as bench, bench_of(folder, "library") as plain:
        static: Any = bench.engine
        shapes = []
        for sampling, prompts in (
            (GREEDY, "shared"),
            (Sampling(3), "shared"),
            (Sampling(80), "apart"),
            (GREEDY, "apart"),
        ):
            for plan in (bench.plan(), MEAN_PLAN):
                want, got = (b.ask(plan, requests(PROMPTS[prompts], sampling)) for b in (plain, bench))
                assert {k: r.token_ids for k, r in got.items()} == {k: r.token_ids for k, r in want.items()}
                shapes.append(static._static._memory.shape)
        assert shapes[0] == shapes[3] and shapes[4].room > shapes[3].room and shapes[4] == shapes[7]


def test_an_abandoned_rollout_does_not_change_the_next(folder: Path) -> None:
    with bench_of(folder, "static", stop_ids=range(0, VOCABULARY, 9)) as bench:
        whole = bench.ask(bench.plan(), asked("apart", GREEDY))
        next(iter(bench.engine.rollout(bench.plan(), asked("apart", GREEDY))))
        assert bench.ask(bench.plan(), asked("apart", GREEDY)) == whole


def test_a_rollout_is_refused_after_another_has_begun(folder: Path) -> None:
    with bench_of(folder, "static", stop_ids=range(0, VOCABULARY, 9)) as bench:
        wanted = bench.ask(bench.plan(), asked("apart", GREEDY))
        first = iter(bench.engine.rollout(bench.plan(), asked("apart", GREEDY)))
        next(first)
        assert bench.ask(bench.plan(), asked("apart", GREEDY)) == wanted
        with pytest.raises(EvoalignError, match="after another had begun"):
            list(first)


def test_members_are_served_after_a_rollout_of_the_mean_before_start(folder: Path) -> None:
    config = make_config(folder, "lowrank", engine={"decoder": "static", "max_rows": 1}, es={"population_size": 3})
    with Bench(config, ()) as other:
        wanted = other.ask(other.plan(), requests(PROMPTS["apart"], GREEDY))
        loaded = other.tokens
    engine = engines.create(config, loaded)
    list(engine.rollout(MEAN_PLAN, requests(PROMPTS["apart"], GREEDY)))
    space = spaces.create(config)
    engine.start(space, space.layout(engine.specs(), engine.dtype), None, False)
    found = list(engine.rollout(other.plan(), requests(PROMPTS["apart"], GREEDY)))
    assert {(r.member.index, r.request): r.token_ids for r in found} == {k: r.token_ids for k, r in wanted.items()}
    assert len({r.token_ids for r in found}) > len(PROMPTS["apart"])


def test_padding_rows_have_members_like_the_other_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding rows copy the member of the row before them, also with the mean among members."""
    found: list[tuple[int, int, int]] = []
    own = StaticDecoder._step

    def seen(self: Any, memory: Any, size: int, draws: Any) -> None:
        members, done = memory.state.member[:size], memory.state.done[:size]
        found.append((int(members.min()), int(members.max()), int(done.sum())))
        own(self, memory, size, draws)

    monkeypatch.setattr(StaticDecoder, "_step", seen)
    with bench_of(folder, "static", stop_ids=range(0, VOCABULARY, 20)) as bench:
        bench.ask(bench.plan(), asked("apart", WARM))
        assert min(least for least, _, _ in found) == 0 and max(done for _, _, done in found) > 0
        found.clear()
        bench.ask(replace(bench.plan(), members=(*bench.plan().members, MEAN)), asked("apart", WARM))
        assert min(least for least, _, _ in found) == 0
        found.clear()
        bench.ask(MEAN_PLAN, asked("apart", WARM))
        assert max(most for _, most, _ in found) == -1


def test_only_members_with_requests_get_factors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    own = Memory.__init__

    def counted(self: Any, *arguments: Any) -> None:
        own(self, *arguments)
        write = self.write
        self.write = lambda plan, members: written.append(len(members)) or write(plan, members)

    monkeypatch.setattr(Memory, "__init__", counted)
    with bench_of(folder, "static") as bench:
        plan = replace(bench.plan(), members=(*bench.plan().members, MEAN))
        of_mean = [replace(r, index=r.index + 100, member=MEAN) for r in asked("apart", GREEDY)]
        one = [replace(r, member=plan.members[2]) for r in asked("apart", WARM)]
        assert len(list(bench.engine.rollout(plan, [*of_mean, *one]))) == 2 * len(one)
    assert written == [1]


def test_earlier_rollouts_do_not_change_prefill_pieces(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a deterministic run, whose memory is that of the largest batch so far."""
    pieces: list[tuple[int, ...]] = []
    own = Reader._pieces

    def seen(self: Any, *arguments: Any) -> list[torch.Tensor]:
        found = own(self, *arguments)
        pieces.append(tuple(part.shape[1] for part in found))
        return found

    monkeypatch.setattr(Reader, "_pieces", seen)
    long = requests([ids(150, 1) + ids(9 + i % 3, 2 + i) for i in range(12)], Sampling(2))
    read = []
    for before in ([], requests([ids(8, i) for i in range(80)], Sampling(2))):
        with bench_of(folder, "static", engine={"decoder": "static", "memory_gib": 0.008}) as bench:
            if before:
                bench.ask(MEAN_PLAN, before)
            pieces.clear()
            bench.ask(bench.plan(), long)
            read.append(list(pieces))
            static: Any = bench.engine
            assert static._static._memory.shape.rows == (80 if before else 72)
    assert read[0] == read[1] and max(map(len, read[0])) > 1


def test_max_rows_does_not_change_completions(folder: Path) -> None:
    answers = []
    for rows in (None, 5):
        with bench_of(folder, "static", engine={"decoder": "static", "max_rows": rows}) as bench:
            answers.append(bench.ask(bench.plan(), asked("apart", WARM)))
    assert {k: r.token_ids for k, r in answers[0].items()} == {k: r.token_ids for k, r in answers[1].items()}


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_nan_logits_raise_not_finite_error(folder: Path, sampling: Sampling) -> None:
    with bench_of(folder, "static") as bench:
        bench.model.model.layers[1].mlp.down_proj.weight.data[3, 3] = torch.nan
        with pytest.raises(NotFiniteError, match="not finite"):
            bench.ask(MEAN_PLAN, requests(PROMPTS["apart"], sampling))


def test_joined_weights_are_views_of_the_parameters(folder: Path) -> None:
    hashes, facts = [], []
    for decoder in ("library", "static"):
        with bench_of(folder, decoder, "full") as bench:
            bench.move()
            hashes.append(bench.engine.fingerprint())
            facts.append(bench.facts)
    assert hashes[0] == hashes[1] and facts[0].model_hash == facts[1].model_hash
    assert [f.note for f in facts] == [
        "decoder: library, set by engine.decoder",
        "decoder: static",
    ]
    assert [f.library for f in facts] == ["", "static decoder"], "the journal names the decoder"


def test_static_refuses_ranks_above_the_kernels_limit(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.decoder: static .* rank 20 is above 16"):
        bench_of(folder, "static", lowrank={"rank": 20})


def test_static_refuses_other_model_families(tmp_path: Path) -> None:
    other = build("gemma2", tmp_path / "gemma2")
    with pytest.raises(ConfigError, match="Gemma2ForCausalLM is not of the Llama, Qwen2 or Qwen3 family; set auto"):
        bench_of(other, "static")
    windows = build("qwen2_windows", tmp_path / "windows")
    with pytest.raises(ConfigError, match="a layer does not attend to its whole past"):
        bench_of(windows, "static")


def test_batch_bytes_counts_the_fixed_memory(folder: Path) -> None:
    """The configuration alone decides which models are supported."""
    assert set(STATIC_TYPES) == {cls.config_class.model_type for cls in blocks._MODELS}
    config = make_config(folder, "lowrank", engine={"memory_gib": 1, "device": "cpu"}, sampling={"max_tokens": 20})
    with Bench(config) as bench:
        specs, own = bench.engine.specs(), Footprint.of(bench.model)

    def said(decoder: str, dtype: torch.dtype) -> float:
        engine = config.engine.model_copy(update={"decoder": decoder})
        return engine.batch_bytes(config.model_copy(update={"engine": engine}), specs, dtype, 10, 30)

    most = max(config.sampling.max_tokens, config.evaluation.max_tokens)
    more = 10 * (own.cache * (columns(30 + most) - 30 - most) + WRITTEN * most - own.prefill(30, 30)) + own.least(30)
    assert said("static", torch.float32) - said("library", torch.float32) == more
    on_a_cpu = "static" if compiled.here() else "library"
    assert said("auto", torch.float32) == said(on_a_cpu, torch.float32) != said("auto", torch.bfloat16)
    assert said("auto", torch.bfloat16) == said("library", torch.bfloat16) != said("static", torch.bfloat16)


def test_static_size_for_returns_few_sizes() -> None:
    sizes = [size_for(rows, 1 << 20) for rows in range(1, 4097)]
    assert all(size >= rows for rows, size in enumerate(sizes, 1)) and sizes == sorted(sizes)
    assert sizes[0] == LEAST and len(set(sizes)) == 19 and size_for(1536, 1 << 20) == 1536 and size_for(950, 960) == 960


@pytest.mark.parametrize(
    ("dtype", "library", "says"),
    [
        ("float32", "1", "decoder: static"),
        ("float32", "0", "C library is missing"),
        ("bfloat16", "1", "dtype is torch.bfloat16"),
    ],
)
def test_auto_chooses_the_decoder_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, dtype: str, library: str, says: str
) -> None:
    monkeypatch.setenv("EVOALIGN_COMPILED", library)
    if library == "1" and not compiled.here():
        pytest.skip("no C compiler made the library")
    with Bench(make_config("tiny", model={"dtype": dtype}, engine={"device": "cpu"})) as bench:
        assert says in bench.facts.note and (bench.facts.library == "static decoder") == (says == "decoder: static")
