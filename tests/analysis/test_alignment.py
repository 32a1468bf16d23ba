# SPDX-License-Identifier: Apache-2.0
"""Cosine of the step of ES with the gradient: planted linear rewards, plain autograd, real updates, and the command."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import Run
from families import make_config
from numpy.typing import NDArray
from small_runs import UNCHECKED, write_rows

import evoalign
from evoalign import shaping
from evoalign.analysis.alignment import (
    GENERATION,
    Population,
    Products,
    corrected,
    cosine,
    expected,
    gradients,
    placebo,
    products,
)
from evoalign.checks.divergence import Sample
from evoalign.models import tiny
from evoalign.setup import serve
from evoalign.statistics import Estimate
from evoalign.types import Update, population

Floats = NDArray[np.float64]


def planted(random: np.random.Generator, members: int, dimensions: int, noise: float = 0.0) -> tuple[Floats, ...]:
    """Z-scored coefficients of a linear reward along the first axis, projections on it, and all scalar products."""
    eps = random.standard_normal((members, dimensions))
    fitness = eps[:, 0] + noise * random.standard_normal(members)
    return shaping.zscore(fitness[:, None]), eps[:, 0], eps @ eps.T


@pytest.mark.parametrize(("members", "dimensions"), [(16, 40), (64, 40), (64, 600)])
def test_the_cosine_of_a_linear_reward_is_the_expected_one(members: int, dimensions: int) -> None:
    """In 200 draws: the mean within four standard errors, the interval as often as it should be at least."""
    random, wanted = np.random.default_rng(0), expected(members - 1, dimensions)
    found = [cosine(*planted(random, members, dimensions)) for _ in range(200)]
    means = np.array([one.mean for one in found])
    assert abs(means.mean() - wanted) < 4 * means.std() / np.sqrt(200)
    held = [one.low is not None and one.high is not None and one.low <= wanted <= one.high for one in found]
    assert np.mean(held) > 0.9
    assert wanted == pytest.approx(np.sqrt(members / (members + dimensions + 1)), rel=0.03)


def test_a_noisy_reward_has_a_lower_cosine_with_an_interval_for_new_members() -> None:
    random, noise = np.random.default_rng(1), 2.0
    found = [cosine(*planted(random, 64, 600, noise)) for _ in range(200)]
    mean = np.mean([one.mean for one in found])
    assert mean < 0.6 * expected(63, 600)
    assert np.mean([(one.low or 0) <= mean <= (one.high or 0) for one in found]) > 0.9


def test_antithetic_pairs_have_the_expected_cosine_of_their_number() -> None:
    random, means = np.random.default_rng(2), list[float]()
    for _ in range(200):
        eps = random.standard_normal((32, 100))
        means.append(cosine(2 * eps[:, 0], eps[:, 0], eps @ eps.T).mean)
    assert np.mean(means) == pytest.approx(expected(32, 100), rel=0.02)


def test_shuffled_coefficients_have_a_cosine_near_0_and_the_own_ones_a_small_p() -> None:
    weights, dots, gram = planted(np.random.default_rng(3), 128, 2000)
    found = placebo(weights, dots, gram, signs=False)
    assert abs(found["mean"]) < 0.005 and found["sd"] == pytest.approx(2000**-0.5, rel=0.3) and found["p"] == 1 / 200
    alone = placebo(np.random.default_rng(4).standard_normal(128), dots, gram, signs=True)
    assert alone["p"] > 0.05
    assert placebo(np.zeros(128), dots, gram, signs=False)["p"] == 1, "without a step there is no evidence"


def test_equal_scores_have_no_cosine() -> None:
    found = cosine(np.zeros(8), np.ones(8), np.eye(8))
    assert np.isnan(found.mean) and found.low is None and "no step" in f"{found}"


def test_the_correction_recovers_the_cosine_with_the_gradient_without_noise() -> None:
    """Halves are the gradient plus independent noise of three times its length."""
    random, raw, mended = np.random.default_rng(5), list[float](), list[float]()
    for _ in range(200):
        eps, gradient = random.standard_normal((64, 400)), np.eye(400)[0]
        halves = gradient + 3 / 20 * random.standard_normal((2, 400))
        found = Products(halves @ eps.T, eps @ eps.T, halves @ halves.T)
        at = cosine(shaping.zscore(eps[:, :1]), found.halves_2N.mean(0) / found.norm, found.gram_NN)
        better = corrected(at, found.reliability)
        if better is not None:
            raw.append(at.mean)
            mended.append(better.mean)
    assert np.mean(raw) < 0.5 * expected(63, 400)
    assert np.median(mended) == pytest.approx(expected(63, 400), rel=0.1)
    assert corrected(Estimate(0.1, 8, 0.0, 0.2), None) is None
    assert corrected(Estimate(0.1, 8, 0.0, 0.2), 0.25) == Estimate(0.2, 8, 0.0, 0.4)


def test_gradients_are_those_of_autograd() -> None:
    """Two prompts with four completions: the halves are the first and the last two of each."""
    from transformers import AutoModelForCausalLM

    samples = [Sample((9, 33 + i // 4), (5 + i, 70, 2)[: 1 + i % 3]) for i in range(8)]
    rewards = np.array([[0.0, 1.0, 5.0, 2.0], [3.0, 3.0, 1.0, 0.0]])
    config = make_config("tiny", "full")
    with closing(serve(config)) as served:
        halves = gradients(config, served.layout, samples, rewards, "cpu")
    model = AutoModelForCausalLM.from_pretrained(tiny(), dtype=torch.float32).eval()
    for half, chosen in zip(halves, ({0: -0.5, 1: 0.5}, {2: 1.5, 3: -1.5, 6: 0.5, 7: -0.5}), strict=True):
        model.zero_grad()
        for i, weight in chosen.items():
            ids = torch.tensor([[*samples[i].prompt_ids, *samples[i].token_ids]])
            logps = model(input_ids=ids).logits[0].log_softmax(-1)
            for place in range(1, ids.shape[1] - 1):
                (weight / 4 * logps[place, ids[0, place + 1]]).backward(retain_graph=True)
        wanted = {name: p.grad for name, p in model.named_parameters()}
        assert half.keys() == wanted.keys()
        for name, gradient in half.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("space", "es"), [("full", {"sigma": 0.01}), ("lowrank", {"noise_multiplier": 0.3, "antithetic": True})]
)
def test_the_cosine_is_that_of_the_step_that_an_engine_takes(
    space: str, es: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In units of the noise: the engine's step over each tensor's scale."""
    monkeypatch.setattr("evoalign.analysis.alignment.NUMBERS", 4096)  # blocks of a few rows
    config = make_config("tiny", space, es=es, lowrank={"rank": 2, "target_modules": ["v_proj", "down_proj"]})
    coefficients, members = (1.5, -0.3, 0.2, -2.0, 0.9, -0.1), population(6, antithetic=config.es.antithetic)
    with closing(serve(config)) as served:
        generator = torch.Generator().manual_seed(0)
        halves = [{t.name: torch.randn(t.shape, generator=generator) for t in served.layout.tensors} for _ in range(2)]
        before = {name: tensor.double().clone() for name, tensor in served.engine.state()}
        width = config.es.width
        served.engine.apply(Update(0, GENERATION, members, coefficients, width, width))
        step = {n: (t.double() - before[n]) / served.layout[n].scale for n, t in served.engine.state() if n in before}
        one = Population(served.space, served.layout, {})
    found = products(one, width, halves, 3 if config.es.antithetic else 6, "cpu")
    weights = np.array(coefficients)
    weights = weights[::2] - weights[1::2] if config.es.antithetic else weights
    at = cosine(weights, found.halves_2N.mean(0) / found.norm, found.gram_NN)
    g, u = (
        torch.cat([of[t.name].flatten().double() for t in one.layout.tensors])
        for of in ({t.name: (halves[0][t.name] + halves[1][t.name]) * t.scale for t in one.layout.tensors}, step)
    )
    assert at.mean == pytest.approx(float(g @ u / g.norm() / u.norm()), abs=1e-5)
    assert found.norm == pytest.approx(float(g.norm()) / 2, rel=1e-5)


CONFIG = """
seed: 0
space: {space}
model: {{name: tiny, dtype: float32}}
task: {{name: custom, samples: 4, train_data: rows.jsonl, test_data: rows.jsonl, rewards: ["rewards.py:{reward}"]}}
lowrank: {{target_layers: [3], target_modules: [v_proj]}}
es: {{sigma: 0.1, learning_rate: 0.01}}
sampling: {{max_tokens: 8, temperature: 1.0}}
engine: {{name: {engine}}}
"""
PROMPTS = ("The sea is", "What is a tree?", "Name three colours.", "Who was Darwin?", "Where is Rome?")
REWARDS = """
def letters(completions, **_):
    return [sum(c in "aeiou" for c in text) / max(1, len(text)) for text in completions]

def nothing(completions, **_):
    return [0.0 for _ in completions]
"""


@pytest.fixture
def write(run: Run) -> Callable[..., None]:
    def config(space: str = "lowrank", reward: str = "letters", engine: str = "transformers", more: str = "") -> None:
        write_rows(Path("rows.jsonl"), [{"prompt": p} for p in PROMPTS])
        Path("rewards.py").write_text(REWARDS)
        Path("c.yaml").write_text(CONFIG.format(space=space, reward=reward, engine=engine) + more)

    return config


def test_the_command_finds_the_gradient_in_the_step_of_members(write: Any, analyze: Any) -> None:
    write()
    sets = [f"--set={one}" for one in ("members=128", "samples=64", "sigma=[1]", "ranks=[1,2]")]
    out, numbers = analyze("alignment", "base", "-c", "c.yaml", *sets)
    (found,) = numbers["targets"]
    assert (found["space"], found["prompts"], found["dimensions"]) == ("lowrank", 5, 32 * 96)
    assert 0.5 < found["reliability"] < 1 and found["reliability"] == pytest.approx(
        2 * found["agreement"] / (1 + found["agreement"])
    )
    sizes = [8, 16, 32, 64, 128]
    assert [(one["rank"], one["members"]) for one in found["rows"]] == [(r, n) for r in (1, 2) for n in sizes]
    for one in found["rows"]:
        assert one["expected"] == pytest.approx(expected(one["members"] - 1, 3072)) and one["sigma"] == 0.1
        assert abs(one["placebo"]["mean"]) < 3 * one["random"] / 199**0.5
        assert one["corrected"]["mean"] == pytest.approx(one["cosine"]["mean"] / found["reliability"] ** 0.5)
        if one["members"] == 128:
            assert one["cosine"]["low"] > 0 and one["placebo"]["p"] < 0.02 and one["cosine"]["mean"] < one["expected"]
    assert out.count("base, rank 2, sigma 0.1, ") == 5 and "reliability of the gradient" in out


REFUSED = [
    ({"space": "lora"}, (), "space lora evolves an adapter; set space: full or lowrank with --config"),
    ({"engine": "vllm"}, (), "engine vllm: alignment needs engine: transformers; set it with --config"),
    ({"space": "full"}, ("ranks=[1]",), "ranks: [1] do not apply to space full"),
    ({}, ("ranks=[0]",), "ranks above 0"),
    ({}, ("ranks=[64]",), "lowrank.rank: 64 exceeds"),
    ({}, ("members=4",), "members: 4 is too few; set 8 or more"),
    ({}, ("samples=5",), "samples, ranks: 5"),
    ({}, ("sigma=[1, 1]",), "sigma: [1.0, 1.0]"),
    ({}, ("sigma=[0]",), "sigma: [0.0]"),
    ({}, ("sigma=[.nan]",), "sigma: [nan]"),
    ({"reward": "nothing"}, ("members=8", "samples=4", "sigma=[1]"), "all completions of each prompt have the same"),
]


@pytest.mark.parametrize(("changes", "sets", "expected"), REFUSED)
def test_an_error_is_one_line(
    changes: dict[str, str], sets: tuple[str, ...], expected: str, write: Any, run: Run
) -> None:
    write(**changes)
    done = run("analyze", "alignment", "base", "-c", "c.yaml", *(f"--set={one}" for one in sets))
    assert done.code != 0 and expected in done.err and done.err.startswith("error: ") and not done.out


def test_settings_that_do_not_fit_the_config_are_refused(write: Any, run: Run) -> None:
    write()
    text = Path("c.yaml").read_text()
    for old, new, sets, wanted in (
        ("es: {sigma", "es: {antithetic: true, sigma", ["--set=members=9"], "members: 9 is odd"),
        ("es: {sigma: 0.1, learning_rate: 0.01}", "", [], "base has no section es"),
        ('letters"]', 'letters"], fitness: "rewards.py:whole"', [], "one score for all"),
    ):
        Path("c.yaml").write_text(text.replace(old, new))
        Path("rewards.py").write_text(REWARDS + "\ndef whole(completions, examples):\n    return 1.0\n")
        done = run("analyze", "alignment", "base", "-c", "c.yaml", *sets)
        assert done.code != 0 and wanted in done.err, done.err


def test_an_adapter_and_a_base_without_a_config_are_refused(trained: Path, run: Run) -> None:
    for target, wanted in ((trained / "lora", "is an adapter; `evoalign export"), ("base", "with --config")):
        done = run("analyze", "alignment", target)
        assert done.code == 2 and wanted in done.err


def test_a_run_is_measured_in_another_space_with_a_config(trained: Path, write: Any, analyze: Any) -> None:
    """The weights are those of the run; task, space and es are those of the config."""
    write()
    sets = [f"--set={one}" for one in ("members=8", "samples=8", "sigma=[1]")]
    (moved,) = analyze("alignment", trained / "full", "-c", "c.yaml", *sets)[1]["targets"]
    (base,) = analyze("alignment", "base", "-c", "c.yaml", *sets)[1]["targets"]
    assert moved["weights"].startswith(str(trained)) and moved["rows"][0]["sigma"] == 0.1
    assert moved["dimensions"] == base["dimensions"] and moved["agreement"] != base["agreement"]


def test_the_shaping_of_a_run_is_called_only_if_the_user_gives_it(run: Run, analyze: Any, tmp_path: Path) -> None:
    """Code that a run names is not run; other analyses skip the setting, which only training reads."""
    code, called = tmp_path / "own.py", tmp_path / "called"
    body = f"    open({str(called)!r}, 'w').close()\n    return scores_MP.mean(1) - scores_MP.mean()\n"
    code.write_text(f"def own(scores_MP):\n{body}")
    es = {"sigma": 0.01, "learning_rate": 0.01, "num_generations": 1, "population_size": 4, "shaping": f"{code}:own"}
    tree = {"output_dir": str(tmp_path / "run"), "space": "full", "es": es, "model": {"name": "tiny"}}
    small = {"report": False, "evaluation": {"max_tokens": 4}, "checks": UNCHECKED, "checkpoint": {"every": 1}}
    path = evoalign.train({**tree, **small}).path
    called.unlink()
    done = run("analyze", "alignment", path)
    assert done.code == 2 and "es.shaping to " in done.err and not called.exists()
    sets = [f"--set={one}" for one in ("members=8", "samples=8", "prompts=4", "sigma=[1]")]
    (found,) = analyze("alignment", path, "-c", path / "config.yaml", *sets)[1]["targets"]
    assert called.exists() and found["space"] == "full"
