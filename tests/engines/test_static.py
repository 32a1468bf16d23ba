# SPDX-License-Identifier: Apache-2.0
"""The static decoder against the library decoder on the same members: tokens and log-probabilities."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from families import PREFIX, PROMPTS, VOCABULARY, Bench, ids, make_config, requests

from evoalign import engines, spaces
from evoalign.engines.transformers import blocks, static, static_memory
from evoalign.engines.transformers.settings import STATIC_TYPES, WRITTEN, Footprint, columns
from evoalign.engines.transformers.static import StaticDecoder
from evoalign.engines.transformers.static_memory import LEAST, Memory, Reader, size_for
from evoalign.errors import ConfigError, EvoalignError, NotFiniteError
from evoalign.kernels import compiled
from evoalign.types import MEAN, MEAN_PLAN, Request, Sampling

GREEDY, WARM = Sampling(13), Sampling(13, temperature=1.3, top_p=0.9)


def bench_of(folder, decoder="static", space="lowrank", stop_ids=(), **tree):
    engine = {"decoder": decoder, **tree.pop("engine", {})}
    return Bench(make_config(folder, space, es={"population_size": 6}, engine=engine, **tree), stop_ids)


def asked(prompts="apart", sampling=GREEDY, **fields):
    """Return two requests per prompt, each with its own seed, with log-probabilities."""
    return [
        Request(2 * i + k, prompt, sampling, 7 * i + k, logprobs=True, **fields)
        for i, prompt in enumerate(PROMPTS[prompts])
        for k in range(2)
    ]


@contextmanager
def two(folder, **more):
    """Make an engine with the library decoder and one with the static, with the same mean."""
    with bench_of(folder, "library", **more) as library, bench_of(folder, "static", **more) as static:
        library.move()
        static.move()
        yield library, static


@pytest.fixture(scope="module", params=["lora", "lowrank", "full"])
def pair(request, folder):
    """Two such engines in each space. Rows leave at different steps."""
    with two(folder, space=request.param, stop_ids=range(0, VOCABULARY, 20)) as benches:
        yield benches


def ask_all(benches, requests):
    """Return the completions of members and mean by each engine."""
    return [bench.ask(bench.plan(), requests) | bench.ask(MEAN_PLAN, requests) for bench in benches]


def tokens_of(cells):
    return {key: rollout.token_ids for key, rollout in cells.items()}


def check_equal(found, wanted):
    assert found.keys() == wanted.keys()
    for key, want in wanted.items():
        got = found[key]
        assert (got.token_ids, got.text, got.finish_reason) == (want.token_ids, want.text, want.finish_reason)
        assert got.logprobs == pytest.approx(want.logprobs, abs=1e-4)


@pytest.mark.first("lora-apart", "lowrank-shared", "full-apart-greedy", "full-shared-sampled")
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("prompts", PROMPTS)
def test_static_decoder_equals_the_library_decoder(pair, prompts, sampling):
    wanted, found = ask_all(pair, asked(prompts, sampling))
    assert len({len(r.token_ids) for r in wanted.values()}) > 3, "rows must leave at different steps"
    check_equal(found, wanted)
    alike = sum(found[member, i].token_ids == found[-1, i].token_ids for member, i in found if member >= 0)
    assert alike < len(found) / 4, "members must differ from the mean"


@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize("space", ["lora", "lowrank"])
def test_static_decoder_runs_layers_below_the_evolved_ones_once_per_prompt(space, prompts, folder, monkeypatch):
    read, own = [], blocks.Blocks.read

    def counted(self, tokens, *arguments, layers, **more):
        read.append((*layers.indices(2)[:2], tokens.numel()))
        return own(self, tokens, *arguments, layers=layers, **more)

    monkeypatch.setattr(blocks.Blocks, "read", counted)
    with two(folder, space=space, **{space: {"target_layers": [1]}}) as benches:
        wanted, found = ask_all(benches, asked(prompts))
    check_equal(found, wanted)
    assert len(set(tokens_of(found).values())) > len(found) / 3, "members must differ"
    below, above = (sum(n for first, end, n in read if (first, end) == of) for of in ((0, 1), (1, 2)))
    assert below and above == 6 * below, "once per prompt, and once per prompt and member"


def test_last_layer_makes_only_the_last_tokens_of_prompts(folder, monkeypatch):
    rows, own = [], blocks.population.gate
    monkeypatch.setattr(blocks.population, "gate", lambda made, *more: rows.append(len(made)) or own(made, *more))
    with bench_of(folder) as bench:
        bench.ask(bench.plan(), asked(sampling=Sampling(1)))
    *_, first, last = rows
    assert last == 6 * len(PROMPTS["apart"]) < first / 2


def test_rows_read_what_their_prompts_share_in_one_place(folder, monkeypatch):
    seen, own = [], blocks.attention.decode

    def noted(qkv, keys, values, slots, positions, begins, **more):
        seen.append(torch.stack((slots, *begins)))
        return own(qkv, keys, values, slots, positions, begins, **more)

    monkeypatch.setattr(blocks.attention, "decode", noted)
    with bench_of(folder) as bench:
        bench.ask(bench.plan(), asked("shared"))
    places, origins, begun = seen[-1][:, :36]  # two of each of three prompts, for six members
    assert len(set(places.tolist())) == 36
    whole, part = begun > len(PREFIX), begun == len(PREFIX)
    assert (sum(whole), sum(part)) == (18, 18)
    assert len(set(origins[part].tolist())) == 6 and len(set(origins[whole].tolist())) == 18


@pytest.fixture(params=[0, 1], ids=["late", "early"])
def looks(request, monkeypatch):
    """Look for rows that have ended after the last step, as on a CPU, or before it, as on a GPU."""
    monkeypatch.setitem(static.LOOKS, "cpu", (8, request.param))


@pytest.mark.usefixtures("looks")
def test_waiting_rows_enter_as_others_leave(folder, monkeypatch):
    live, own = [], StaticDecoder._step

    def counted(self, memory, size, draws):
        done, at = memory.state.done[:size].clone(), memory.state.position[:size].clone()
        live.append(int((~done).sum()))
        own(self, memory, size, draws)
        assert torch.equal(memory.state.position[:size], at + ~done), "rows that are done do not advance"

    some = asked(sampling=Sampling(30, temperature=1.3, top_p=0.999))
    many = [replace(r, index=r.index + 100 * k, prompt_ids=r.prompt_ids[k:]) for k in range(3) for r in some]
    stops = range(0, VOCABULARY, 30)
    with bench_of(folder, "library", stop_ids=stops) as bench:
        wanted = bench.ask(bench.plan(), many)
    monkeypatch.setattr(StaticDecoder, "_step", counted)
    with bench_of(folder, stop_ids=stops, engine={"max_rows": 12}) as bench:
        found = bench.ask(bench.plan(), many)
    assert tokens_of(found) == tokens_of(wanted)
    assert len(found) == 9 * max(live) == 9 * 12
    while_some_wait = live[: len(live) - 30]
    assert len(while_some_wait) > 30 and sum(while_some_wait) > 0.8 * 12 * len(while_some_wait)


@pytest.mark.usefixtures("looks")
def test_looks_do_not_change_completions_nor_the_number_of_steps(folder, monkeypatch):
    """Rows of one length need as many steps as they have tokens after the first."""
    sizes, own = [], StaticDecoder._step
    monkeypatch.setattr(StaticDecoder, "_step", lambda self, m, size, d: sizes.append(size) or own(self, m, size, d))
    with two(folder, stop_ids=range(0, VOCABULARY, 20)) as benches:
        check_equal(*ask_all(benches, asked(sampling=Sampling(30, temperature=1.3)))[::-1])
    sizes.clear()
    with bench_of(folder) as bench:
        sizes.clear()
        for tokens in (2, 9, 10, 13):
            bench.ask(MEAN_PLAN, asked(sampling=Sampling(tokens)))
    assert len(sizes) == 1 + 8 + 9 + 12


@pytest.mark.parametrize("deterministic", [False, True])
def test_fewer_rows_use_the_batch_sizes_of_more(folder, deterministic, monkeypatch):
    """An evaluation runs the graphs of training; if `deterministic`, its sizes do not depend on earlier rollouts."""
    sizes, own = set(), StaticDecoder._step
    monkeypatch.setattr(StaticDecoder, "_step", lambda self, m, size, d: sizes.add(size) or own(self, m, size, d))
    with bench_of(folder, deterministic=deterministic) as bench:
        sizes.clear()
        found = []
        for rows in (20, 17, 20):
            found.append(bench.ask(MEAN_PLAN, requests([ids(5, i) for i in range(rows)], Sampling(4))))
    assert sizes == ({20, 17} if deterministic else {20})
    assert tokens_of(found[0]) == tokens_of(found[2]) and tokens_of(found[1]).items() <= tokens_of(found[0]).items()


def test_members_are_served_in_turns_when_factors_do_not_fit(folder):
    found, members = [], []
    for limit in (1.0, 0.0012):
        with bench_of(folder, engine={"memory_gib": limit}) as bench:
            found.append(tokens_of(bench.ask(bench.plan(), asked())))
            members.append(bench.engine._static._memory.shape.slots)
    assert found[0] == found[1] and members[0] == 6 and members[1] < 6


def test_mean_and_members_generate_in_one_rollout(pair):
    """In one rollout with separate requests, the mean generates the same as alone."""
    said = []
    for bench in pair:
        plan = bench.plan()
        own = [r for m in plan.members for r in asked(member=m)]
        riding = [replace(r, index=r.index + 100) for r in asked(member=MEAN)]
        rollouts = list(bench.engine.rollout(replace(plan, members=(*plan.members, MEAN)), [*own, *riding]))
        mixed = {(r.member.index, r.request): r.token_ids for r in rollouts}
        alone = tokens_of(bench.ask(MEAN_PLAN, asked()))
        assert {(m, i): mixed[m, i + 100] for m, i in alone} == alone
        assert len(mixed) == len(rollouts) == 7 * len(alone)
        said.append(mixed)
    assert said[0] == said[1]


@pytest.mark.usefixtures("looks")
def test_stop_texts_end_completions_like_the_library_decoder(folder):
    with two(folder) as benches:
        text = next(r.text for r in ask_all(benches[:1], asked())[0].values() if len(r.text) > 6)
        wanted, found = ask_all(benches, asked(sampling=Sampling(13, stop=(text[3:5], text[1]))))
    assert {r.finish_reason for r in wanted.values()} == {"stop", "length"}
    check_equal(found, wanted)


def test_memory_is_reused_by_the_next_batch_and_grows(folder):
    cases = [(GREEDY, "shared"), (Sampling(3), "shared"), (Sampling(56), "apart"), (GREEDY, "apart")]
    with bench_of(folder) as bench, bench_of(folder, "library") as plain:
        shapes = []
        for sampling, prompts in cases:
            for plan in (bench.plan(), MEAN_PLAN):
                want, got = (tokens_of(b.ask(plan, requests(PROMPTS[prompts], sampling))) for b in (plain, bench))
                assert got == want
                shapes.append(bench.engine._static._memory.shape)
        assert shapes[0] == shapes[3] and shapes[4].room > shapes[3].room and shapes[4] == shapes[7]


def test_an_abandoned_rollout_is_refused_and_does_not_change_the_next(folder):
    with bench_of(folder, stop_ids=range(0, VOCABULARY, 9)) as bench:
        wanted = bench.ask(bench.plan(), asked())
        next(iter(bench.engine.rollout(bench.plan(), asked())))
        assert bench.ask(bench.plan(), asked()) == wanted
        first = iter(bench.engine.rollout(bench.plan(), asked()))
        next(first)
        assert bench.ask(bench.plan(), asked()) == wanted
        with pytest.raises(EvoalignError, match="after another had begun"):
            list(first)


def test_members_are_served_after_a_rollout_of_the_mean_before_start(folder):
    config = make_config(folder, "lowrank", engine={"decoder": "static", "max_rows": 1}, es={"population_size": 3})
    some = requests(PROMPTS["apart"], GREEDY)
    with Bench(config, ()) as other:
        wanted, plan = tokens_of(other.ask(other.plan(), some)), other.plan()
    engine, space = engines.create(config, other.tokens), spaces.create(config)
    list(engine.rollout(MEAN_PLAN, some))
    engine.start(space, space.layout(engine.specs(), engine.dtype), None, False)
    assert {(r.member.index, r.request): r.token_ids for r in engine.rollout(plan, some)} == wanted
    assert len(set(wanted.values())) > len(PROMPTS["apart"])


def test_padding_rows_have_members_like_the_other_rows(folder, monkeypatch):
    """Padding rows copy the member of the row before them, also with the mean among members."""
    seen, own, some = [], StaticDecoder._step, asked(sampling=WARM)

    def noted(self, memory, size, draws):
        members = memory.state.member[:size]
        seen.append((int(members.min()), int(members.max()), int(memory.state.done[:size].sum())))
        own(self, memory, size, draws)

    monkeypatch.setattr(StaticDecoder, "_step", noted)
    with bench_of(folder, stop_ids=range(0, VOCABULARY, 20)) as bench:
        seen.clear()  # of the check at the start
        bench.ask(bench.plan(), some)
        assert min(least for least, _, _ in seen) == 0 and max(done for _, _, done in seen) > 0
        seen.clear()
        bench.ask(replace(bench.plan(), members=(*bench.plan().members, MEAN)), some)
        assert min(least for least, _, _ in seen) == 0
        seen.clear()
        bench.ask(MEAN_PLAN, some)
        assert max(most for _, most, _ in seen) == -1


def test_only_members_with_requests_get_factors(folder, monkeypatch):
    written, own = [], Memory.__init__

    def counted(self, *arguments):
        own(self, *arguments)
        write = self.write
        self.write = lambda plan, members: written.append(len(members)) or write(plan, members)

    monkeypatch.setattr(Memory, "__init__", counted)
    with bench_of(folder) as bench:
        plan = replace(bench.plan(), members=(*bench.plan().members, MEAN))
        of_mean = [replace(r, index=r.index + 100) for r in asked(member=MEAN)]
        one = asked(sampling=WARM, member=plan.members[2])
        assert len(list(bench.engine.rollout(plan, [*of_mean, *one]))) == 2 * len(one)
    assert written == [1]


@pytest.fixture
def reads(monkeypatch):
    """Numbers of tokens of each forward over prompts: of whole prompts, and of what follows a known beginning."""
    found = {"read": [], "read_on": []}
    for name, counts in found.items():
        own = getattr(blocks.Blocks, name)

        def seen(self, tokens, *arguments, own=own, counts=counts, **named):
            counts.append(tokens.numel())
            return own(self, tokens, *arguments, **named)

        monkeypatch.setattr(blocks.Blocks, name, seen)
    return found


def later_turns(first, cells, **fields):
    """Return the next turn of every member's conversations: 3 to 8 tokens after what was said."""
    prompts = {request.index: request.prompt_ids for request in first}
    return [
        Request(i, (*prompts[i], *r.token_ids, *ids(3 + i % 6, i)), WARM, i, logprobs=True, member=r.member, **fields)
        for (_, i), r in cells.items()
    ]


TURNS = pytest.mark.parametrize("space", ["lora", "lowrank", "full"])
STOPS = range(0, VOCABULARY, 20)


@pytest.fixture
def unset(monkeypatch):
    """Fill memory that nothing has written with NaN."""
    own = blocks.Blocks.store

    def store(self, rows, room, before=None, places=()):
        copied = before.keys[0].shape[2] if before else 0
        made = own(self, rows, room, before, places)
        for tensor in (*made.keys, *made.values):
            tensor[len(places) :] = torch.nan
            tensor[:, :, copied:] = torch.nan
        return made

    monkeypatch.setattr(blocks.Blocks, "store", store)


@pytest.mark.usefixtures("unset")
@TURNS
def test_later_turn_reads_only_what_follows_the_earlier(folder, reads, space):
    with bench_of(folder, space=space, stop_ids=STOPS, deterministic=False) as bench:
        bench.move()
        first = asked(session=1)
        cells = bench.ask(bench.plan(), first)
        later = later_turns(first, cells)
        for lengths in reads.values():
            lengths.clear()
        wanted = bench.ask(bench.plan(), later)
        assert sum(reads["read"]) > sum(len(r.prompt_ids) for r in later) / 2 and not reads["read_on"]
        cells = bench.ask(bench.plan(), first)
        for lengths in reads.values():
            lengths.clear()
        found = bench.ask(bench.plan(), later_turns(first, cells, session=1))
        check_equal(found, wanted)
        if space != "full":  # dense members take the same places one after the other
            assert not reads["read"] and 0 < sum(reads["read_on"]) <= 10 * len(later)


@pytest.mark.usefixtures("unset", "looks")
@pytest.mark.parametrize("limit", [{"max_rows": 20}, {"memory_gib": 0.0022}], ids=str)
def test_turns_that_wait_for_places_keep_their_own_text(folder, reads, limit):
    """More conversations than rows, the fewer the longer they are: those that are gone are read whole."""
    with bench_of(folder, stop_ids=STOPS, deterministic=False, engine=limit) as bench:
        bench.move()
        first = asked(session=1)
        cells = bench.ask(bench.plan(), first)
        later = later_turns(first, cells, session=1)
        other = Request(99, ids(40, 9), WARM, member=bench.plan().members[0])
        found = bench.ask(bench.plan(), [*later, other])
        assert len(cells) > 30 > len(bench.engine._static._memory.kept) >= 8
        assert reads["read"] and reads["read_on"]
        check_equal(bench.ask(bench.plan(), [replace(r, session=None) for r in later]), {k: found[k] for k in cells})


@pytest.mark.parametrize("change", ["session", "member", "text", "deterministic"])
def test_earlier_turns_of_others_are_not_used(folder, reads, change):
    with bench_of(folder, stop_ids=STOPS, deterministic=change == "deterministic") as bench:
        bench.move()
        first = asked(session=1)
        later = later_turns(first, bench.ask(bench.plan(), first), session=1)
        plan = bench.plan()
        if change == "session":
            later = [replace(r, session=2) for r in later]
        if change == "member":
            later = [replace(r, member=plan.members[r.member.index - 1]) for r in later]
        if change == "text":
            later = [replace(r, prompt_ids=(r.prompt_ids[0] + 1, *r.prompt_ids[1:])) for r in later]
        found = bench.ask(plan, later)
        if change != "member":  # members may have said the same
            assert not reads["read_on"]
        check_equal(found, bench.ask(plan, [replace(r, session=None) for r in later]))


def test_earlier_rollouts_do_not_change_prefill_pieces(folder, monkeypatch):
    """In a deterministic run, whose memory is that of the largest batch so far."""
    pieces, own = [], Reader._pieces

    def seen(self, *arguments):
        found = list(own(self, *arguments))
        pieces.append(tuple(len(slots) for _, slots, _ in found))
        return found

    monkeypatch.setattr(Reader, "_pieces", seen)
    long = requests([ids(150, 1) + ids(9 + i % 3, 2 + i) for i in range(12)], Sampling(2))
    read = []
    for before in (0, 80):
        with bench_of(folder, engine={"memory_gib": 0.008}) as bench:
            if before:
                bench.ask(MEAN_PLAN, requests([ids(8, i) for i in range(before)], Sampling(2)))
            pieces.clear()
            bench.ask(bench.plan(), long)
            read.append(list(pieces))
            assert bench.engine._static._memory.shape.rows == (before or 72)
    assert read[0] == read[1] and max(map(len, read[0])) > 1


@pytest.mark.parametrize("prompts", PROMPTS)
def test_prompts_have_the_same_bits_in_places_that_follow_each_other(folder, monkeypatch, prompts):
    monkeypatch.setattr(static_memory, "PREFILL_AT_ONCE", (48, 48))  # several pieces: not all begin at the first place
    kinds, own = set(), Reader._pieces

    def scattered(self, *arguments):
        for places, *rest in own(self, *arguments):
            kinds.add(type(places))
            if isinstance(places, slice):
                places = torch.arange(places.start, places.stop)
            yield places, *rest

    some = asked(prompts)[::2]  # with two of a prompt, which is read once, there are gaps
    with bench_of(folder) as bench:
        found = bench.ask(bench.plan(), some)
    monkeypatch.setattr(Reader, "_pieces", scattered)
    with bench_of(folder) as bench:
        assert bench.ask(bench.plan(), some) == found
        assert slice in kinds
        kinds.clear()
        bench.ask(bench.plan(), asked(prompts))
        assert torch.Tensor in kinds


@pytest.mark.parametrize("decoder", ["static", "library"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_raise_an_error(folder, decoder, value):
    with bench_of(folder, decoder) as bench:
        bench.model.lm_head.weight.data[[3, 4], 0] = torch.tensor([value, -value])  # one of the two logits is inf
        for sampling in (GREEDY, WARM):
            with pytest.raises(NotFiniteError, match="not finite"):
                bench.ask(MEAN_PLAN, requests(PROMPTS["apart"], sampling))


def test_joined_weights_are_views_of_the_parameters(folder):
    found = []
    for decoder, note, library in (
        ("library", "decoder: library, set by engine.decoder", ""),
        (
            "static",
            "decoder: static; members one at a time: tensors evolve other than gains of norms and biases of q, k and v",
            "static decoder",
        ),
    ):
        with bench_of(folder, decoder, "full") as bench:
            bench.move()
            found.append((bench.engine.fingerprint(), bench.facts.model_hash))
            assert (bench.facts.note, bench.facts.library) == (note, library), "the journal names the decoder"
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("family", "tree", "message"),
    [
        ("qwen2", {"lowrank": {"rank": 20}}, r"engine\.decoder: static .* rank 20 is above 16"),
        ("gemma2", {}, "Gemma2ForCausalLM is not of the Llama, Qwen2 or Qwen3 family; set auto"),
        ("qwen2_windows", {}, "a layer does not attend to its whole past"),
    ],
)
def test_static_refuses_models_and_ranks_without_kernels(family, tree, message, folders):
    with pytest.raises(ConfigError, match=message):
        bench_of(folders[family], **tree)


def test_batch_bytes_counts_the_fixed_memory(folder):
    """The configuration alone decides which models are supported."""
    assert set(STATIC_TYPES) == {cls.config_class.model_type for cls in blocks._MODELS}
    config = make_config(folder, "lowrank", engine={"memory_gib": 1, "device": "cpu"}, sampling={"max_tokens": 20})
    with Bench(config) as bench:
        specs, own = bench.engine.specs(), Footprint.of(bench.model)

    def said(decoder, dtype):
        engine = config.engine.model_copy(update={"decoder": decoder})
        return engine.batch_bytes(config.model_copy(update={"engine": engine}), specs, dtype, 10, 30)

    most = max(config.sampling.max_tokens, config.evaluation.max_tokens)
    more = 10 * (own.cache * (columns(30 + most) - 30 - most) + WRITTEN * most - own.prefill(30, 30)) + own.least(30)
    assert said("static", torch.float32) - said("library", torch.float32) == more
    on_a_cpu = "static" if compiled.here() else "library"
    assert said("auto", torch.float32) == said(on_a_cpu, torch.float32) != said("auto", torch.bfloat16)
    assert said("auto", torch.bfloat16) == said("library", torch.bfloat16) != said("static", torch.bfloat16)


@pytest.mark.parametrize("section", ["sampling", "evaluation"])
def test_batch_bytes_are_those_of_the_draws_that_need_more(folder, section):
    trees = [{section: {"temperature": t, "top_p": p}} for t, p in ((0.0, 1.0), (1.0, 1.0), (1.0, 0.9))]
    with Bench(make_config(folder, "lowrank")) as bench:
        specs, own = bench.engine.specs(), Footprint.of(bench.model)
    found = []
    for tree in trees:
        config = make_config(folder, "lowrank", engine={"memory_gib": 1, "device": "cpu"}, **tree)
        found.append(config.engine.batch_bytes(config, specs, torch.float32, 10, 30))
    needs = [own.logits(Sampling(1, *tree[section].values())) for tree in trees]
    assert found == [found[0] + 10 * (need - needs[0]) for need in needs] and len({*needs}) == 3


def test_static_size_for_returns_few_sizes():
    sizes = [size_for(rows, 1 << 20) for rows in range(1, 4097)]
    assert all(size >= rows for rows, size in enumerate(sizes, 1)) and sizes == sorted(sizes)
    assert all(size - rows < max(LEAST, rows / 8) for rows, size in enumerate(sizes, 1))
    assert sizes[0] == LEAST and len(set(sizes)) == 56 and size_for(1536, 1 << 20) == 1536 and size_for(950, 955) == 955


@pytest.mark.parametrize(
    ("dtype", "library", "says"),
    [
        ("float32", "1", "decoder: static"),
        ("float32", "0", "C library is missing"),
        ("bfloat16", "1", "dtype is torch.bfloat16"),
    ],
)
def test_auto_chooses_the_decoder_on_a_cpu(monkeypatch, dtype, library, says):
    monkeypatch.setenv("EVOALIGN_COMPILED", library)
    if library == "1" and not compiled.here():
        pytest.skip("no C compiler made the library")
    with Bench(make_config("tiny", model={"dtype": dtype}, engine={"device": "cpu"})) as bench:
        assert says in bench.facts.note and (bench.facts.library == "static decoder") == (says == "decoder: static")
