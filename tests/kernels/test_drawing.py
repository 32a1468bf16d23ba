# SPDX-License-Identifier: Apache-2.0
"""Draws in Triton against those in torch: in the interpreter, and on a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from evoalign import kernels, noise
from evoalign.engines.transformers.decode import draw
from evoalign.engines.transformers.static import StaticDecoder
from evoalign.engines.transformers.static_memory import Begun, Draws, State
from evoalign.types import Sampling

KEY, PLACES, TOKENS = noise.key(1, "sampling", ""), 9, 6
STEPS, SEEDS = [0, 3, 4, 0, 1], [5, 2**62 + 8, 2**32 - 1, 2**31, 7]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
FIELDS = ("token", "position", "step", "done", "ids", "length", "place", "stream", "member")
WIDTHS = [1, 1000, 1024, 3 * 1024 + 8, 9 * 1024 + 5]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])])
def device(request):
    return request.param


def state_of(device, rows=5, steps=STEPS, seeds=SEEDS):
    """Return a state whose rows from the second on are `rows` active ones at places in no order."""
    state = State(max(rows + 3, PLACES - 1), TOKENS, torch.device(device))
    state.begin(TOKENS)
    state.token.fill_(-3)
    state.ids.fill_(-5)
    state.enter(
        1, [7, 0, 3, 6, 1, *range(8, rows + 3)][:rows], range(11, 11 + rows), [0] * rows, seeds, [Begun(0, 0)] * rows
    )
    state.step[1 : rows + 1] = torch.tensor(steps, device=device)
    state.done[0] = True
    return state


def drawn(logits, draws, state, form, monkeypatch, stop=()):
    """Draw the next token of all rows but the first, in place."""
    monkeypatch.setattr(kernels, "available", lambda device: form == "triton")
    stops = torch.tensor(stop, dtype=torch.int64, device=logits.device)
    own = SimpleNamespace(_plain=SimpleNamespace(stop=stops, key=KEY))
    StaticDecoder._draw(own, logits, state, slice(1, 1 + len(logits)), draws)
    return state


def check_equal(got, wanted, logprobs=True):
    for name in FIELDS:
        assert torch.equal(getattr(got, name), getattr(wanted, name)), name
    if logprobs:
        assert torch.isfinite(got.logprobs).all()
        assert (got.logprobs - wanted.logprobs).abs().max() < 2e-5
    else:
        assert not got.logprobs.any()


def random_logits(rows, width, dtype=torch.float32, scale=3.0, *, device):
    drawn = torch.randn(rows, width, generator=torch.Generator().manual_seed(width))
    return (scale * drawn).to(dtype).to(device)


DRAWS = [Draws(t, 1.0, logprobs) for t in (0.0, 1.0, 0.7) for logprobs in (False, True)]
NAMES = [f"{d.temperature}{'-scored' * d.logprobs}" for d in DRAWS]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("draws", DRAWS, ids=NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.first("float32-0.7-3080", "float32-0.0-scored-9221", "bfloat16-0.7-scored-9221", "cuda-", "-1.0-scored-1]")
def test_draw_and_record_equal_torch(dtype, draws, width, device, monkeypatch):
    logits = random_logits(5, width, getattr(torch, dtype), device=device)
    logits[:, 1::3] = -torch.inf
    if width > 4 * 1024:
        logits[0, 1024:2048] = -torch.inf  # a whole block
    if draws.temperature == 0:
        logits[range(5), logits.argmax(-1)] += 1  # equal ones are another test
    wanted, got = (drawn(logits, draws, state_of(device), form, monkeypatch) for form in ("torch", "triton"))
    check_equal(got, wanted, draws.logprobs)
    assert width == 1 or len(set(got.token[1:6].tolist())) > 2


def test_equal_highest_logits_give_the_first(device, monkeypatch):
    logits = random_logits(5, 5000, device=device)
    for row, columns in enumerate(([4999, 7], [1023, 1024], [2048, 4096, 3000], [0, 4999], [1500, 1501])):
        logits[row, columns] = 20.0
    got = drawn(logits, Draws(0.0, 1.0, False), state_of(device), "triton", monkeypatch)
    assert got.token[1:6].tolist() == [7, 1023, 2048, 0, 1500]
    got = drawn(
        torch.full((5, 3000), -7.0, device=device), Draws(0.0, 1.0, False), state_of(device), "triton", monkeypatch
    )
    assert got.token[1:6].tolist() == [0] * 5


def test_columns_beyond_the_vocabulary_are_not_read(device, monkeypatch):
    """The columns of the next row follow, and after the last row other memory."""
    memory = torch.full((6 * 1500,), 99.0, device=device)
    logits = memory[: 5 * 1500].view(5, 1500)
    logits[:] = random_logits(5, 1500, device=device)
    logits[:, 0] = 30.0
    for draws in DRAWS:
        assert drawn(logits, draws, state_of(device), "triton", monkeypatch).token[1:6].tolist() == [0] * 5


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("draws", DRAWS[1::2], ids=NAMES[1::2])
def test_logits_that_are_not_finite_end_the_row_and_no_other(value, draws, device, monkeypatch):
    logits = random_logits(5, 3000, device=device)
    logits[1] = logits[2] = logits[3, 2999] = value  # -inf in one column is not odd
    odd = {0} if value == -torch.inf else {0, 6}
    for form in ("torch", "triton"):
        state = state_of(device)
        state.done[3] = True  # the third row, whose logits do not count
        drawn(logits, draws, state, form, monkeypatch)
        assert {place for place, length in enumerate(state.length.tolist()) if length} == odd
        assert state.length[[*odd]].tolist() == [-1] * len(odd)
        assert state.done.tolist() == [True, False, True, True, len(odd) == 2, False, False, False]
        assert ((state.token[[2, 4]] >= 0) & (state.token[[2, 4]] < 3000)).all(), "of the vocabulary"


@pytest.mark.parametrize(
    ("stop", "most", "lengths"),
    [
        ((), 6, {}),
        ((), 5, {3: 5}),
        ((70,), 6, {3: 5}),
        ((1, 8, 2999), 6, {6: 1, 1: 2}),
        ((1, 8, 2999, 5, 0), 4, {7: 1, 0: 4, 3: 5, 6: 1, 1: 2}),
    ],
)
def test_stop_tokens_and_the_longest_length_end_rows(stop, most, lengths, device, monkeypatch):
    logits = torch.full((5, 3000), -9.0, device=device)
    logits[range(5), [5, 2500, 70, 1, 2999]] = 9.0
    for form in ("torch", "triton"):
        state = state_of(device)
        state.most.fill_(most)
        drawn(logits, Draws(0.0, 1.0, False), state, form, monkeypatch, stop)
        assert {place: n for place, n in enumerate(state.length.tolist()) if n} == lengths
        assert state.done[1:6].tolist() == [place in lengths for place in (7, 0, 3, 6, 1)]


def test_rows_that_are_done_and_other_rows_are_not_changed(device, monkeypatch):
    state, before = state_of(device), state_of(device)
    for each in (state, before):
        each.done[2] = each.done[5] = True
    drawn(random_logits(4, 2000, device=device), Draws(0.9, 1.0, True), state, "triton", monkeypatch, (7,))
    live, places = [1, 3, 4], [7, 3, 6]
    for name in ("token", "position", "step", "done", "stream", "place"):
        got, old = getattr(state, name), getattr(before, name)
        others = [i for i in range(len(old)) if i not in live]
        assert torch.equal(got[others], old[others]), name
    assert torch.equal(state.position[live], before.position[live] + 1)
    assert torch.equal(state.step[live], before.step[live] + 1)
    for name in ("ids", "logprobs"):
        got, old = getattr(state, name), getattr(before, name)
        changed = {tuple(at) for at in (got != old).nonzero().tolist()}
        assert changed == {(place, int(before.step[row])) for row, place in zip(live, places, strict=True)}, name


def both(logits, temperature, rows, monkeypatch):
    """Return tokens of `rows` streams from one row of logits: in Triton, and in torch."""
    logits, device = logits.expand(rows, -1).contiguous(), logits.device
    state = state_of(device, rows, steps=[2] * rows, seeds=range(rows))
    got = drawn(logits, Draws(temperature, 1.0, False), state, "triton", monkeypatch).token[1 : rows + 1]
    uniforms = noise.uniforms(KEY, torch.tensor(2, device=device), torch.arange(rows, device=device))
    return got, draw(logits, uniforms, Sampling(1, temperature))


@pytest.mark.parametrize("temperature", [0.003, 1.0, 1.5])
def test_draws_are_those_of_torch(temperature, device, monkeypatch):
    """A few likely tokens in several blocks and none between them."""
    logits = torch.full((1, 3000), -torch.inf, device=device)
    logits[0, ::300] = 30 + torch.tensor([0.002, 0, -1, 0.0015, 0.5, -torch.inf, 0.5, 0.497, -40, 0.1], device=device)
    got, wanted = both(logits, temperature, 30 if device == "cpu" else 4_000, monkeypatch)
    assert torch.equal(got, wanted) and len(got.unique()) > 1


@pytest.mark.parametrize("token", [0, 1023, 1024, 2999])
def test_a_token_of_probability_1_is_drawn_wherever_it_is(token, device, monkeypatch):
    logits = torch.full((1, 3000), -torch.inf, device=device)
    logits[0, token] = -5.0
    got, _ = both(logits, 1.0, 4 if device == "cpu" else 4_000, monkeypatch)
    assert (got == token).all()


def test_draws_over_flat_logits_differ_from_torch_at_few_boundaries(device, monkeypatch):
    """Each has a probability of 2e-5, and errors of exponentials of 1e-7 add up where blocks begin at other heights."""
    rows = 12 if device == "cpu" else 4_000
    got, wanted = both(random_logits(1, 50_003, scale=0.01, device=device), 1.0, rows, monkeypatch)
    assert (got != wanted).sum() <= rows // 200 and (got - wanted).abs().max() <= 1
    assert len(got.unique()) > rows / 2


@pytest.mark.parametrize(
    ("cumulative", "mass", "goal", "place"),
    [
        ([0, 0.25, 0.25, 0.5], [0, 0.25, 0, 0.25], 0.25, 1),
        ([0, 0.25, 0.25, 0.5], [0, 0.25, 0, 0.25], 0.26, 3),
        ([0, 0.25, 0.25, 0.5], [0, 0.25, 0, 0.25], -0.1, 1),
        ([0.5, 0.49, 0.51, 0.5], [0.5, 0, 0, 0], 0.505, 0),
        ([0.25, 0.5, 0.5, 0.5], [0.25, 0.25, 0, 0], 0.6, 1),
        ([torch.nan] * 4, [torch.nan] * 4, torch.nan, 0),
    ],
)
def test_choose_returns_a_place_with_mass_however_sums_are_rounded(cumulative, mass, goal, place, monkeypatch):
    import triton

    from evoalign.kernels import sampling

    @triton.jit
    def chosen(cumulative, mass, goal, out):
        i = tl.arange(0, 4)  # noqa: F821
        tl.store(out, choose(tl.load(cumulative + i), tl.load(mass + i), tl.load(goal), i, 4))  # noqa: F821

    for name, value in (("tl", triton.language), ("choose", sampling._choose)):  # kernels see globals alone
        monkeypatch.setitem(globals(), name, value)

    out, given = torch.tensor([-1]), (torch.tensor(t, dtype=torch.float64) for t in (cumulative, mass, [goal]))
    chosen[(1,)](*given, out)
    assert int(out) == place


def test_a_row_has_the_same_bits_in_any_batch(device, monkeypatch):
    logits = random_logits(5, 5000, device=device)
    whole = drawn(logits, Draws(0.8, 1.0, True), state_of(device), "triton", monkeypatch)
    alone = drawn(logits[:1], Draws(0.8, 1.0, True), state_of(device), "triton", monkeypatch)
    assert alone.token[1] == whole.token[1] and torch.equal(alone.logprobs[7], whole.logprobs[7])


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("draws", DRAWS, ids=NAMES)
def test_replays_of_a_graph_equal_steps_in_torch(draws, monkeypatch):
    logits = random_logits(64, 151_936, torch.bfloat16, device="cuda")
    logits[:, 70_001] = 20.0 if draws.temperature == 0 else 0.0
    wanted, got = (state_of("cuda", 64, [0] * 64, range(64)) for _ in range(2))
    drawn(logits, draws, got, "triton", monkeypatch)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn(logits, draws, got, "triton", monkeypatch)
    for _ in range(TOKENS - 1):
        graph.replay()
    for _ in range(TOKENS):
        drawn(logits, draws, wanted, "torch", monkeypatch)
    assert (wanted.length > 0).sum() == 64 and torch.equal(got.length, wanted.length)
    assert torch.equal(got.position, wanted.position) and torch.equal(got.done, wanted.done)
    same = got.ids == wanted.ids
    assert same.all() if draws.temperature == 0 else (~same).sum() <= 1
    assert (got.logprobs - wanted.logprobs)[same].abs().max() < 2e-5
