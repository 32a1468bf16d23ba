# SPDX-License-Identifier: Apache-2.0
"""Sampling of tokens: the distribution, the top_p of transformers, and random numbers common to all members."""

import numpy as np
import pytest
import torch
from families import PROMPTS, Bench, ids, make_config, next_logits, requests
from scipy.stats import chisquare

from evoalign import noise
from evoalign.engines.transformers.decode import BLOCK, draw
from evoalign.types import MEAN_PLAN, Plan, Request, Sampling

WARM = Sampling(12, temperature=0.8, top_p=0.9)


@pytest.fixture(scope="module")
def bench(folder):
    """A bench whose model keeps adapters on, so that a plain forward includes them."""
    with Bench(make_config(folder, es={"population_size": 6}, engine={"decoder": "library"}), stop_ids=[2]) as bench:
        bench.move()
        yield bench


def inverse_cdf(logits, uniform, sampling):
    """Draw in NumPy from the definition: with top_p likeliest first, the smallest set that reaches it."""
    z = np.asarray(logits, dtype=np.float64) / sampling.temperature
    p = np.exp(z - z.max())
    p /= p.sum()
    if sampling.top_p == 1:
        return int(np.searchsorted(np.cumsum(p) / p.sum(), uniform))
    order = np.argsort(-p, kind="stable")
    kept = []
    for token in order:
        if sum(p[kept]) >= sampling.top_p:
            break
        kept.append(int(token))
    edges = np.cumsum(p[kept])
    return kept[int(np.searchsorted(edges / edges[-1], uniform))]


@pytest.mark.parametrize("top_p", [0.2, 0.9, 1.0])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_draw_is_the_inverse_transform(temperature, top_p):
    generator = torch.Generator().manual_seed(0)
    logits, uniform = torch.randn(400, 23, generator=generator) * 2, torch.rand(400, generator=generator).double()
    sampling = Sampling(1, temperature, top_p)
    got = draw(logits, uniform, sampling).tolist()
    assert got == [inverse_cdf(row, u, sampling) for row, u in zip(logits.tolist(), uniform.tolist(), strict=True)]
    assert len(set(got)) > 5


@pytest.mark.parametrize("uniform", [2.0**-33, 1 - 2.0**-33])
def test_the_ends_of_the_unit_interval_draw_a_kept_token(uniform):
    logits = torch.tensor([[0.0, 3.0, -2.0, 1.0], [-1e4, -1e4, 0.0, -1e4]])
    got = draw(logits, torch.tensor([uniform, uniform], dtype=torch.float64), Sampling(1, 1.0, 0.95))
    assert got.tolist() == ([1, 2] if uniform < 0.5 else [3, 2])


@pytest.mark.parametrize("vocabulary", [BLOCK - 1, BLOCK, 3 * BLOCK + 7, 151_936])
def test_each_token_has_its_share_of_the_unit_interval(vocabulary):
    """Of uniforms on a grid, a token gets as many as lie in its interval; one of probability 0 none."""
    logits = 3 * torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(0))
    logits[0, ::3] = -torch.inf
    count = 2_000 if vocabulary < 10_000 else 500
    grid = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    drawn = draw(logits.expand(len(grid), -1), grid, Sampling(1, 1.3))
    wanted = (logits[0].double() / 1.3).softmax(-1) * len(grid)
    assert ((torch.bincount(drawn, minlength=vocabulary) - wanted).abs() < 1.01).all()
    assert torch.isfinite(logits[0, drawn]).all()


@pytest.mark.parametrize("uniform", [2.0**-33, 0.5, 1 - 2.0**-33])
def test_a_token_of_probability_1_is_drawn_wherever_it_is(uniform):
    tokens = torch.tensor([0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 3])
    logits = torch.full((len(tokens), 2 * BLOCK + 4), -torch.inf).scatter(1, tokens[:, None], 0.0)
    assert draw(logits, torch.full((len(tokens),), uniform).double(), Sampling(1, 1.0)).tolist() == tokens.tolist()


def test_the_end_of_a_block_draws_a_token_of_it_however_sums_are_rounded():
    """Half of the mass lies in each of two equal blocks, whose first tokens have none."""
    block = 10 * torch.randn(500, BLOCK, generator=torch.Generator().manual_seed(0))
    block[:, 0] = -torch.inf
    drawn = draw(torch.cat([block, block], 1), torch.full((500,), 0.5).double(), Sampling(1, 1.0))
    assert (drawn < BLOCK).all()


@pytest.mark.parametrize("temperature", [0.003, 0.1])
def test_low_temperatures_keep_the_distribution_of_large_logits(temperature):
    """At 30 and more the division of a float32 logit alone would lose digits."""
    logits = torch.tensor([[30.0, 30.0 + 0.5 * temperature, 29.9]])
    grid = (torch.arange(50_000, dtype=torch.float64) + 0.5) / 50_000
    drawn = draw(logits.expand(len(grid), -1), grid, Sampling(1, temperature))
    wanted = (logits[0].double() / temperature).softmax(-1) * len(grid)
    assert ((torch.bincount(drawn, minlength=3) - wanted).abs() < 1.1).all()


def test_logits_that_are_not_finite_draw_a_token_of_the_vocabulary():
    """The decoders refuse them afterwards, so that a graph needs no branch."""
    logits = torch.tensor([[torch.nan, 0.0], [torch.inf, 0.0], [-torch.inf, -torch.inf]])
    assert draw(logits, torch.full((3,), 0.9).double(), Sampling(1, 1.0)).max() < 2


@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.7, 0.95, 0.999, 1.0])
def test_the_kept_set_is_that_of_transformers(top_p):
    from transformers import TopPLogitsWarper

    count = 40_000 if top_p < 1 else 4_000  # at 1 no token is cut
    grid = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    for seed in range(10):
        logits = torch.randn(1, 16, generator=torch.Generator().manual_seed(seed))
        warped = TopPLogitsWarper(top_p)(torch.zeros(1, 1, dtype=torch.int64), logits.clone())
        drawn = draw(logits.expand(len(grid), -1), grid, Sampling(1, 1.0, top_p))
        assert set(drawn.tolist()) == set(torch.isfinite(warped[0]).nonzero()[:, 0].tolist())


def test_frequencies_are_the_probabilities():
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5])
    streams = torch.arange(20_000)
    uniform = noise.uniforms(noise.key(1, "sampling", ""), torch.zeros_like(streams), streams)
    drawn = draw(logits.expand(len(streams), -1), uniform, Sampling(1, 1.5))
    expected = (logits.double() / 1.5).softmax(-1).numpy() * len(streams)
    assert chisquare(np.bincount(drawn, minlength=5), expected).pvalue > 0.001


def test_the_engine_draws_with_the_stated_uniforms(bench):
    """Tokens of the mean are recomputed from a plain forward and NumPy."""
    key = noise.key(bench.config.seed, "sampling", "")
    asked = requests(PROMPTS["apart"], WARM)
    cells = bench.ask(Plan(1, 0.0, bench.members), asked)
    for request in asked:
        got = cells[0, request.index].token_ids
        steps = torch.arange(len(got))
        uniforms = noise.uniforms(key, steps, torch.full_like(steps, request.seed)).tolist()
        logits = _mean_logits(bench, request.prompt_ids, got)
        assert list(got) == [inverse_cdf(row, u, WARM) for row, u in zip(logits.tolist(), uniforms, strict=True)]


def _mean_logits(bench, prompt, completion):
    """Return logits of the mean, whose adapters the hooks hold during its rollout."""
    rollout = bench.engine.rollout(MEAN_PLAN, requests([tuple(prompt)], Sampling(1)))
    next(iter(rollout))
    logits = next_logits(bench.model, prompt, completion)
    rollout.close()
    return logits


def test_members_with_the_same_distribution_draw_the_same_tokens(bench):
    asked = requests(PROMPTS["apart"], WARM)
    cells = bench.ask(Plan(1, 0.0, bench.members), asked)
    for p in range(len(asked)):
        assert len({cells[m.index, p].token_ids for m in bench.members}) == 1
    apart = bench.ask(Plan(1, 0.1, bench.members), asked)
    assert len({apart[m.index, 0].token_ids for m in bench.members}) > 1


def test_draws_depend_on_the_seed_and_not_on_the_order(bench):
    prompt = PROMPTS["apart"][0]
    asked = [Request(i, prompt, WARM, seed) for i, seed in enumerate([8, 9, 8, 2**62 + 8])]
    cells = bench.ask(MEAN_PLAN, asked)
    texts = [cells[-1, i].token_ids for i in range(4)]
    assert texts[0] == texts[2]
    assert len(set(texts)) == 3
    alone = bench.ask(MEAN_PLAN, [Request(0, prompt, WARM, 9)])
    assert alone[-1, 0].token_ids == texts[1]


def test_another_run_seed_draws_other_tokens(folder, bench):
    asked = requests([ids(6, 1)], Sampling(12, 1.0))
    with Bench(make_config(folder, seed=6)) as other, Bench(make_config(folder)) as same:
        first, second = (b.ask(MEAN_PLAN, asked)[-1, 0].token_ids for b in (other, same))
    assert first != second


@pytest.mark.parametrize("sampling", [Sampling(12), WARM])
def test_logprobs_are_those_of_a_plain_forward(bench, sampling):
    """They are of the distribution at temperature 1, also if the draw used another temperature and top_p."""
    asked = requests(PROMPTS["shared"], sampling, logprobs=True)
    cells = bench.ask(MEAN_PLAN, [*asked, Request(3, (30, 31), sampling)])
    assert cells[-1, 3].logprobs is None, "they are returned only on request"
    for request in asked:
        rollout = cells[-1, request.index]
        logits = _mean_logits(bench, request.prompt_ids, rollout.token_ids)
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
        assert len(rollout.logprobs) == len(rollout.token_ids)
        torch.testing.assert_close(torch.tensor(rollout.logprobs), wanted, atol=2e-4, rtol=0)


def test_requests_with_other_sampling_give_the_same_completions_together(bench):
    asked = [Request(0, (30, 31), Sampling(4)), Request(1, (30, 31), Sampling(5)), Request(2, (30, 31), WARM, 7)]
    together = bench.ask(MEAN_PLAN, asked)
    assert all(len(together[-1, i].token_ids) <= n for i, n in enumerate((4, 5)))
    for request in asked:
        assert together[-1, request.index].token_ids == bench.ask(MEAN_PLAN, [request])[-1, request.index].token_ids
