# SPDX-License-Identifier: Apache-2.0
"""KL from the base model: the estimators against numpy, the measurement against plain transformers, and in runs."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from families import make_config, next_logits
from numpy.typing import NDArray
from rich.console import Console

import evoalign
from evoalign import tasks
from evoalign.checks import divergence
from evoalign.checks.divergence import Divergence, Reference, Sample, draw, estimators, exact
from evoalign.config import Config
from evoalign.engines import weights_hash
from evoalign.errors import EvoalignError, ModelError
from evoalign.models import tiny
from evoalign.report import figures
from evoalign.setup import Served, serve
from evoalign.spaces import Adapter
from evoalign.types import MEAN, MEAN_PLAN, Request, Rollout, Sampling, Update, population

SPACES = ["lora", "lowrank", "full"]
WIDTHS = {"lora": 0.02, "lowrank": 0.02, "full": 0.01}
SAMPLES = [Sample((40, 50, 60), (70, 80, 2)), Sample((9, 33), (5, 6, 7, 8, 9)), Sample((300, 301, 302, 303), (12,))]
Floats = NDArray[np.float64]
NOTHING = Divergence(0, 0, 0, 0, 9, completion=0, prompts=3, completions=3)
"""Of `SAMPLES`, from equal weights."""


def config_of(space: str, **sections: Any) -> Config:
    es = {"sigma": WIDTHS[space], "learning_rate": WIDTHS[space], "population_size": 6}
    return make_config("tiny", space, **{"es": es, **sections})


def served(config: Config, *, move: bool = True) -> Served:
    """An engine whose mean has moved."""
    found = serve(config)
    if move:
        members = population(config.es.population_size)
        coefficients = (1.5, -0.3, 0.2, -2.0, 0.9, -0.1)
        width = config.es.width
        found.engine.apply(Update(0, 0, members, coefficients, width, config.es.eta * width))
    return found


def plain(dtype: torch.dtype = torch.float32) -> Any:
    """The base model as anybody loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny(), dtype=dtype).float().eval()


def merged(of: Served) -> Any:
    """The base model with the mean in its weights: for lora, W + (alpha / r) B A."""
    model, state = plain(), dict(of.engine.state())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            module = name.removesuffix(".weight")
            if name in state:
                weight.copy_(state[name])
            elif f"{module}.lora_A.weight" in state:
                a, b = state[f"{module}.lora_A.weight"], state[f"{module}.lora_B.weight"]
                weight.add_(of.config.lora.alpha / of.config.lora.rank * (b @ a))
    return model


def log_softmax(logits: torch.Tensor) -> Floats:
    values = logits.numpy().astype(np.float64)
    values = values - values.max(-1, keepdims=True)
    return values - np.log(np.exp(values).sum(-1, keepdims=True))


def by_token(policy: Any, base: Any, sample: Sample) -> Floats:
    """k1, k2, k3 and the exact KL of each token, [4, T], from two plain models."""
    p, q = (log_softmax(next_logits(m, sample.prompt_ids, sample.token_ids)) for m in (policy, base))
    rows = np.arange(len(sample.token_ids))
    ratio = np.exp(q - p)[rows, list(sample.token_ids)]
    return np.stack([-np.log(ratio), np.log(ratio) ** 2 / 2, ratio - 1 - np.log(ratio), (np.exp(p) * (p - q)).sum(-1)])


def expected(policy: Any, base: Any, samples: Sequence[Sample]) -> Floats:
    return np.concatenate([by_token(policy, base, s) for s in samples], axis=1).mean(1)


def values(found: Divergence) -> Floats:
    return np.array([found.k1, found.k2, found.k3, found.exact])


@pytest.fixture
def reference() -> Iterator[Reference]:
    with closing(Reference(config_of("lora"))) as made:
        yield made


# --- the estimators -------------------------------------------------------------------------------------------------


def test_the_estimators_are_schulmans() -> None:
    p, q = np.log([0.5, 0.2, 0.9]), np.log([0.1, 0.4, 0.9])
    k1, k2, k3 = estimators(torch.tensor(p), torch.tensor(q))
    np.testing.assert_allclose(k1, [np.log(5), np.log(0.5), 0], atol=1e-15)
    np.testing.assert_allclose(k2, [np.log(5) ** 2 / 2, np.log(2) ** 2 / 2, 0], atol=1e-15)
    np.testing.assert_allclose(k3, [0.2 - 1 + np.log(5), 2 - 1 - np.log(2), 0], atol=1e-15)
    assert (k1[1] < 0) and (k3 >= 0).all()


def test_k1_and_k3_are_unbiased_and_k2_is_not() -> None:
    """The expectation over draws from p, in full: a sum over the vocabulary with weights p."""
    generator = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 50, generator=generator, dtype=torch.float64).log_softmax(-1)
    k1, k2, k3 = ((p.exp() * k).sum() for k in estimators(p, q))
    kl = exact(p, q)
    assert kl > 0.1
    torch.testing.assert_close(k1, kl)
    torch.testing.assert_close(k3, kl)
    assert abs(k2 - kl) > 0.05 * kl
    near = (p + 1e-4 * torch.randn(50, generator=generator, dtype=torch.float64)).log_softmax(-1)
    k2 = (p.exp() * estimators(p, near)[1]).sum()
    torch.testing.assert_close(k2, exact(p, near), rtol=1e-3, atol=0)


def test_the_exact_kl_is_that_of_numpy_and_never_asks_for_the_log_of_nothing() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 3, 20, generator=generator, dtype=torch.float64)
    p, q = (log_softmax(x) for x in logits)
    found = exact(torch.tensor(p), torch.tensor(q))
    np.testing.assert_allclose(found, (np.exp(p) * (p - q)).sum(-1), rtol=1e-12)
    never = torch.tensor([[0.0, -torch.inf]], dtype=torch.float64)
    assert exact(never, never).item() == 0
    assert exact(never, torch.tensor([[0.5, 0.5]]).double().log()).item() == pytest.approx(np.log(2))


# --- the measurement ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_start_is_at_zero_exactly(space: str, dtype: str) -> None:
    with closing(served(config_of(space, model={"name": "tiny", "dtype": dtype}), move=False)) as start:
        assert Reference.of(start).divergence(start, SAMPLES) == NOTHING


@pytest.mark.parametrize("space", SPACES)
def test_the_mean_of_a_space_is_as_far_as_a_plain_model_with_its_weights(space: str) -> None:
    with closing(served(config_of(space))) as mean:
        found = Reference.of(mean).divergence(mean, SAMPLES)
        assert found.tokens == 9 and found.exact > 1e-3
        np.testing.assert_allclose(values(found), expected(merged(mean), plain(), SAMPLES), rtol=2e-3, atol=1e-6)


def test_weights_count_as_they_are_served() -> None:
    """A mean in bfloat16: the weights are rounded, the arithmetic is not."""
    with closing(served(config_of("full", model={"name": "tiny", "dtype": "bfloat16"}))) as mean:
        rounded, state = plain(), dict(mean.engine.state())
        with torch.no_grad():
            for name, weight in rounded.named_parameters():
                weight.copy_(state.get(name, weight).bfloat16())
        found = Reference.of(mean).divergence(mean, SAMPLES)
        np.testing.assert_allclose(values(found), expected(rounded, plain(), SAMPLES), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("space", SPACES)
def test_the_copy_is_the_base_again_to_the_bit(space: str) -> None:
    with closing(served(config_of(space))) as mean:
        reference = Reference.of(mean)
        before = weights_hash(reference.model.named_parameters())
        first = reference.divergence(mean, SAMPLES)
        assert weights_hash(reference.model.named_parameters()) == before
        assert weights_hash(reference.model.named_parameters()) == weights_hash(plain().named_parameters())
        assert reference.divergence(plain(), SAMPLES) == NOTHING, "an adapter is left on it"
        assert reference.divergence(mean, SAMPLES) == first


def test_the_copy_is_the_base_again_where_the_measurement_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(served(config_of("full"))) as mean:
        reference, whole = Reference.of(mean), list(mean.engine.state())

        def half() -> Iterator[tuple[str, torch.Tensor]]:
            yield from whole[:20]
            raise EvoalignError("the engine died")

        monkeypatch.setattr(mean.engine, "state", half)
        with pytest.raises(EvoalignError, match="the engine died"):
            reference.divergence(mean, SAMPLES)
        assert weights_hash(reference.model.named_parameters()) == weights_hash(plain().named_parameters())


def test_pieces_of_any_size_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(served(config_of("lowrank"))) as mean:
        whole = Reference.of(mean).divergence(mean, SAMPLES)
        monkeypatch.setattr(divergence, "CHUNK_BYTES", 8 * 1024 * 2)
        monkeypatch.setattr(divergence, "KEPT_BYTES", 1)
        pieces = Reference.of(mean).divergence(mean, SAMPLES)
    assert pieces.tokens == whole.tokens
    np.testing.assert_allclose(values(pieces), values(whole), rtol=1e-12)


def test_a_live_model_is_measured_and_left_in_its_mode(reference: Reference) -> None:
    """As a trainer has it: in training mode, with dropout, and with PEFT around it."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    adapter = LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.5, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    model = get_peft_model(plain(), adapter)
    assert reference.divergence(model, SAMPLES) == NOTHING
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.05)
    model.train()
    found = reference.divergence(model, SAMPLES)
    assert model.training and found.exact > 1e-3
    np.testing.assert_allclose(values(found), expected(model.merge_and_unload().eval(), plain(), SAMPLES), rtol=2e-3)


def test_a_function_of_the_ids_will_do(reference: Reference) -> None:
    policy = plain()
    with torch.no_grad():
        policy.model.norm.weight.mul_(0.7)
    found = reference.divergence(lambda ids: policy(input_ids=ids).logits, SAMPLES)
    np.testing.assert_allclose(values(found), expected(policy, plain(), SAMPLES), rtol=1e-4)
    np.testing.assert_allclose(values(found), values(reference.divergence(policy, SAMPLES)), rtol=1e-4)


def test_it_leaves_the_random_numbers_of_others_alone(reference: Reference) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    reference.divergence(plain(), SAMPLES)
    assert torch.equal(torch.get_rng_state(), before)


# --- draws ----------------------------------------------------------------------------------------------------------


def many(mean: Served, temperature: float) -> list[Sample]:
    """A thousand completions of the conciseness prompts."""
    task = tasks.create(mean.config.task)
    examples = task.load_data(0).test
    prompts = [mean.tokens.encode(task.prompt(e)) for e in examples]
    sampling = Sampling(8, temperature, 1.0)
    requests = [Request(i, prompts[i % len(prompts)], sampling, 7000 + i) for i in range(1000)]
    return [Sample(requests[r.request].prompt_ids, r.token_ids) for r in mean.engine.rollout(MEAN_PLAN, requests)]


@pytest.mark.long
@pytest.mark.parametrize(("temperature", "agrees"), [(1.0, True), (0.7, False)])
def test_estimates_agree_with_the_exact_kl_at_temperature_1_alone(temperature: float, agrees: bool) -> None:
    """Within four standard errors, by completion, since tokens of one follow from each other; at 0.7 k3 is off."""
    with closing(served(config_of("full"))) as mean:
        policy, base = merged(mean), plain()
        differences = [d[[0, 2]] - d[3] for d in (by_token(policy, base, s) for s in many(mean, temperature))]
    sums = np.stack([d.sum(1) for d in differences])
    errors = np.abs(sums.mean(0)) / (sums.std(0, ddof=1) / np.sqrt(len(sums)))
    assert (errors < 4).all() if agrees else errors[1] > 8, errors


def test_draws_are_the_means_own_at_temperature_1_and_the_same_each_time() -> None:
    config = config_of(
        "lora", evaluation={"max_tokens": 9, "temperature": 0.0}, checks={"kl_prompts": 5, "kl_tokens": 1}
    )
    task = tasks.create(config.task)
    examples = task.load_data(config.seed).test
    with closing(served(config)) as mean:
        first, again = (draw(mean.engine, mean.tokens, task, examples, config) for _ in range(2))
        assert first == again and len(first) == 5
        greedy = Sampling(9)
        for sample, example in zip(first, examples, strict=False):
            assert sample.prompt_ids == mean.tokens.encode(task.prompt(example))
            assert 0 < len(sample.token_ids) <= 9
            assert not set(sample.token_ids[:-1]) & set(mean.tokens.stop_ids)
        requests = [Request(i, s.prompt_ids, greedy) for i, s in enumerate(first)]
        greedy_ids = {r.request: r.token_ids for r in mean.engine.rollout(MEAN_PLAN, requests)}
        assert [greedy_ids[i] for i in range(5)] != [s.token_ids for s in first]
        assert any(s.token_ids[-1] in mean.tokens.stop_ids for s in first), "the stop token counts"


def test_prompts_are_sampled_again_until_there_are_enough_tokens() -> None:
    config = config_of("lora", evaluation={"max_tokens": 9}, checks={"kl_prompts": 3, "kl_tokens": 150})
    task = tasks.create(config.task)
    examples = task.load_data(config.seed).test
    with closing(served(config)) as mean:
        found = draw(mean.engine, mean.tokens, task, examples, config)
        once = draw(mean.engine, mean.tokens, task, examples, small := config_of(
            "lora", evaluation={"max_tokens": 9}, checks={"kl_prompts": 3, "kl_tokens": 1}))  # fmt: skip
    assert small.seed == config.seed and found[:3] == once, "the first answers are those of before"
    prompts = {sample.prompt_ids: 0 for sample in found}
    for sample in found:
        prompts[sample.prompt_ids] += 1
    assert len(prompts) == 3 and len(set(prompts.values())) == 1, "all equally often"
    assert 150 <= sum(len(s.token_ids) for s in found) < 150 + 2 * 27
    assert len({s.token_ids for s in found}) > 3, "each time by another seed"


def test_sampling_of_empty_completions_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("lora", checks={"kl_prompts": 2, "kl_tokens": 1})
    task = tasks.create(config.task)
    asked: list[int] = []

    def nothing(_: Any, __: Any, requests: Sequence[Request]) -> list[Any]:
        asked.append(len(requests))
        return [Rollout(MEAN, r.index, (), "", "stop") for r in requests]

    monkeypatch.setattr(divergence, "collect", nothing)
    with closing(served(config)) as mean:
        found = draw(mean.engine, mean.tokens, task, task.load_data(0).test, config)
    assert asked == [2, 2 * 63] and len(found) == 2 * divergence.MOST_DRAWS


# --- a pair whose divergence is known -------------------------------------------------------------------------------

LONGEST, STOP = 6, 0


def chain(seed: int, change: float) -> Floats:
    """Logits [V, V] of a model that sees the last token alone: 0 ends. `change` moves it away from the base."""
    random = np.random.default_rng(seed)
    base, away = random.normal(size=(2, 7, 7))
    return base + change * away


def known(p: Floats, q: Floats) -> tuple[Floats, Floats]:
    """By recursion over what is left to generate: the expected KL and tokens of an answer, by its last token, [V]."""
    kl, tokens = np.zeros(7), np.zeros(7)
    at = (np.exp(p) * (p - q)).sum(-1)
    for _ in range(LONGEST):
        on = np.exp(p) * (np.arange(7) != STOP)
        kl, tokens = at + on @ kl, 1 + on @ tokens
    return kl, tokens


def answers(p: Floats, random: np.random.Generator, prompts: Sequence[int], each: int) -> list[Sample]:
    samples: list[Sample] = []
    for at, prompt in enumerate(prompts):
        for _ in range(each):
            ids = [prompt]
            while len(ids) <= LONGEST and (len(ids) == 1 or ids[-1] != STOP):
                ids.append(int(random.choice(7, p=np.exp(p[ids[-1]]))))
            samples.append(Sample((100 + at, prompt), tuple(ids[1:])))
    return samples


class Chain(torch.nn.Module):
    """A base model that is known whole, as `Reference` asks one."""

    def __init__(self, logits: Floats) -> None:
        super().__init__()
        self.logits, self.dtype = torch.tensor(logits), torch.float64
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=7))

    def forward(self, input_ids: torch.Tensor, logits_to_keep: int, **_: Any) -> Any:
        return SimpleNamespace(logits=self.logits[input_ids.clamp(max=6)][:, -logits_to_keep:])


def held(times: int, prompts: int = 24, each: int = 3) -> tuple[float, float]:
    """How often the intervals of both hold the known value, over new prompts: nats per token, nats per completion."""
    p, q = log_softmax(torch.tensor(chain(3, 0.5))), log_softmax(torch.tensor(chain(3, 0.0)))
    kl, tokens = known(p, q)
    a_token, a_completion = kl[1:].mean() / tokens[1:].mean(), kl[1:].mean()
    reference = Reference(config_of("lora"))
    reference._model = Chain(q)
    random = np.random.default_rng(0)
    counts = np.zeros(2)
    for _ in range(times):
        samples = answers(p, random, random.integers(1, 7, prompts).tolist(), each)
        found = reference.divergence(lambda ids: torch.tensor(p)[ids.clamp(max=6)], samples)
        assert found.low is not None and found.high is not None
        assert found.completion_low is not None and found.completion_high is not None
        counts += found.low <= a_token <= found.high, found.completion_low <= a_completion <= found.completion_high
    return counts[0] / times, counts[1] / times


def test_the_divergence_of_a_known_pair_is_within_its_interval() -> None:
    """25 samples: a share of 95 % is 84 % or more in 99 of 100 cases; one seed, so that it is always the same."""
    assert min(held(25, each=2)) >= 0.84


@pytest.mark.long
def test_intervals_of_a_known_pair_hold_95_of_100() -> None:
    """600 samples: a share of 95 % is 92.3 to 97.7 % in 998 of 1,000 cases."""
    shares = held(600)
    assert all(0.923 <= share <= 0.977 for share in shares), shares


def test_what_is_known_of_the_pair_is_true() -> None:
    """The recursion against the mean of many answers, and nats a completion against a token and its tokens."""
    p, q = log_softmax(torch.tensor(chain(3, 0.5))), log_softmax(torch.tensor(chain(3, 0.0)))
    kl, tokens = known(p, q)
    many = answers(p, np.random.default_rng(1), [2], 4000)
    nats = [sum(float((np.exp(p[i]) * (p[i] - q[i])).sum()) for i in (2, *s.token_ids[:-1])) for s in many]
    assert np.mean(nats) == pytest.approx(kl[2], abs=4 * np.std(nats) / 4000**0.5)
    assert np.mean([len(s.token_ids) for s in many]) == pytest.approx(tokens[2], rel=0.03)


def test_prompts_are_the_units_of_the_interval() -> None:
    """Completions of one prompt are alike: answered ten times as often, three prompts know no more."""
    samples = [s for s in SAMPLES for _ in range(10)]
    sums = torch.tensor([[0.0, 0.0, 0.0, float(i // 10 + 1)] for i in range(30)], dtype=torch.float64)
    often, once = divergence.summarise(samples, sums), divergence.summarise(SAMPLES, sums[::10])
    assert (often.low, often.high) == (pytest.approx(once.low), pytest.approx(once.high))
    assert often.completion == once.completion == 2.0 and (often.prompts, often.completions) == (3, 30)
    half = 4.302653 / 3**0.5
    assert (once.completion_low, once.completion_high) == (0, pytest.approx(2 + half)), "no divergence is below 0"
    assert divergence.summarise(SAMPLES[:2], sums[:20:10]).low is None
    assert str(once).startswith("0.6667 nats per token") and "2 nats per completion (95 %: 0 to 4.48)" in str(once)


# --- what cannot be measured ----------------------------------------------------------------------------------------


def test_an_adapter_that_is_not_there_is_no_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(served(config_of("lora"))) as mean:
        monkeypatch.setattr(mean.space, "adapter", lambda *_: None)
        with pytest.raises(ModelError, match="space lora cannot be measured"):
            Reference.of(mean).divergence(mean, SAMPLES)


def test_an_evolved_tensor_without_an_adapter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(served(config_of("full"))) as mean:
        monkeypatch.setattr(mean.engine, "state", lambda: iter([("soft_prompt", torch.zeros(3))]))
        with pytest.raises(ModelError, match=r"checks\.kl_every.*soft_prompt"):
            Reference.of(mean).divergence(mean, SAMPLES)


def test_a_space_of_ones_own_is_measured_by_its_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever `adapter` gives of the mean is what stands beside the weights."""
    with closing(served(config_of("lora"))) as mean:
        own = type(mean.space).adapter

        def doubled(*arguments: Any) -> Adapter:
            found = own(mean.space, *arguments)
            assert found is not None
            return Adapter(found.a, found.b, 2 * found.scaling)

        monkeypatch.setattr(mean.space, "adapter", doubled)
        config = mean.config.model_copy(
            update={"lora": mean.config.lora.model_copy(update={"alpha": 2 * mean.config.lora.alpha})}
        )
        twice = merged(Served(config, mean.tokens, mean.engine, mean.space, mean.layout, mean.facts))
        found = Reference.of(mean).divergence(mean, SAMPLES)
        np.testing.assert_allclose(values(found), expected(twice, plain(), SAMPLES), rtol=2e-3, atol=1e-6)


def test_no_tokens_and_nan_logits_are_refused(reference: Reference) -> None:
    with pytest.raises(EvoalignError, match="no token was generated"):
        reference.divergence(plain(), [])
    with pytest.raises(EvoalignError, match=r"divergence .*not finite"):
        reference.divergence(lambda ids: torch.full((1, ids.shape[1], 1024), torch.nan), SAMPLES)


def test_no_room_for_the_copy_says_which_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(divergence, "load_model", full)
    with pytest.raises(ModelError, match=r"set checks\.kl_every: 0"):
        Reference(config_of("lora")).divergence(plain(), SAMPLES)


# --- runs -----------------------------------------------------------------------------------------------------------


def tree(output: Path, space: str, **sections: Any) -> dict[str, Any]:
    es = {"sigma": WIDTHS[space], "learning_rate": WIDTHS[space], "num_generations": 4, "population_size": 6}
    whole: dict[str, Any] = {"output_dir": str(output), "seed": 1, "space": space, "es": es}
    return {**whole, "evaluation": {"max_tokens": 12, "every": 1}, **sections}


def train(config: dict[str, Any], **arguments: Any) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
    told = io.StringIO()
    run = evoalign.train(config, console=Console(file=told, width=200), **arguments).path
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return rows, json.loads((run / "results/evaluation.json").read_text()), told.getvalue()


@pytest.mark.slow
@pytest.mark.last("lowrank", "full")
@pytest.mark.parametrize("space", SPACES)
def test_runs_measure_and_train_as_if_they_did_not(space: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, report, told = train(tree(tmp_path / "with", space, checks={"kl_every": 3, "kl_prompts": 4, "kl_tokens": 1}))
    assert [row["divergence"] is None for row in rows] == [True, True, False, True]
    assert rows[2]["divergence"].keys() == {f.name for f in fields(Divergence)}
    found = rows[2]["divergence"]
    assert (found["prompts"], found["completions"]) == (4, 4)
    assert found["completion"] == pytest.approx(found["exact"] * found["tokens"] / 4)
    assert rows[2]["divergence"]["exact"] > 0 and rows[2]["divergence"]["tokens"] >= 4
    assert report["divergence"].keys() == rows[2]["divergence"].keys()
    assert report["divergence"] != rows[2]["divergence"], "of the last mean"
    assert "KL of the start from the base model: 0 nats per token" in told
    assert (tmp_path / "with/figures/divergence.png").is_file()

    monkeypatch.setattr(divergence, "load_model", lambda *_: pytest.fail("loaded"))
    rows, report, told = train(tree(tmp_path / "without", space, checks={"perplexity": False}))
    assert [row["divergence"] for row in rows] == [None] * 4 and report["divergence"] is None
    assert "KL" not in told and not (tmp_path / "without/figures/divergence.png").exists()
    first, second = ((tmp_path / name / "journal.jsonl").read_bytes() for name in ("with", "without"))
    assert first == second


@pytest.mark.slow
def test_a_run_that_goes_on_measures_what_was_due(tmp_path: Path) -> None:
    """Stopped after the journal was sealed, before the row was written: as if it had never stopped."""
    checks = {"kl_every": 2, "kl_prompts": 4, "kl_tokens": 1}
    rows, report, _ = train(tree(tmp_path / "whole", "lora", checks=checks))
    shorter = tree(tmp_path / "run", "lora", checks=checks)
    shorter["es"]["num_generations"] = 2
    train(shorter)
    metrics = tmp_path / "run/metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines(keepends=True)[0])
    again, after, _ = train(tree(tmp_path / "run", "lora", checks=checks), resume=True)
    assert [row["divergence"] for row in again] == [row["divergence"] for row in rows]
    assert again[1]["divergence"] is not None
    assert after["divergence"] == report["divergence"] == rows[3]["divergence"]


# --- the figure -----------------------------------------------------------------------------------------------------


def row(generation: int, kl: float | None, reward: float | None) -> dict[str, Any]:
    return {
        "generation": generation,
        "divergence": None if kl is None else {"exact": kl},
        "evaluation": None if reward is None else {"reward": reward},
    }


def drawn(path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]], **arguments: Any) -> Any:
    """The points of the figure and the names beside them; None where there is no figure."""
    from matplotlib.figure import Figure

    kept: list[Any] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (kept.append(self.axes[0]), save(self, *a, **k))[1])
    figures.divergence(rows, path, **arguments)
    assert path.is_file() == bool(kept)
    if not kept:
        return None
    names = {text.xy: text.get_text() for text in kept[0].texts}
    return list(zip(*kept[0].lines[0].get_data(), strict=True)), names


def test_the_figure_has_the_points_where_both_were_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(0, 0.1, None), row(1, 0.2, -9.0), row(2, None, -8.0), row(3, 0.4, -7.0), row(4, None, None)]
    points, names = drawn(tmp_path / "a.png", monkeypatch, rows, baseline=-10.0, final=(0.5, -6.0))
    assert points == [(0, -10), (0.2, -9), (0.4, -7), (0.5, -6)]
    assert names == {(0, -10): "0", (0.2, -9): "2", (0.4, -7): "4", (0.5, -6): "5"}


def test_names_that_would_lie_on_each_other_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(g, 0.001 * g, -10 + 0.001 * g) for g in range(50)] + [row(50, 1.0, 0.0)]
    _, names = drawn(tmp_path / "a.png", monkeypatch, rows, baseline=-10.0)
    assert len(names) < 4 and names[(1.0, 0.0)] == "51" and names[(0.0, -10.0)] == "0"


def test_there_is_no_figure_without_a_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert drawn(tmp_path / "a.png", monkeypatch, [], baseline=-10.0) is None
    assert drawn(tmp_path / "a.png", monkeypatch, [row(0, None, -3.0), row(1, 0.1, None)], baseline=-10.0) is None
