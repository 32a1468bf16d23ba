# SPDX-License-Identifier: Apache-2.0
"""Reward over KL: points against what the mixer and `evaluate` say, and which of them are called better."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evoalign import statistics
from evoalign.analysis.base import BASE
from evoalign.analysis.front import Point, Settings, is_beaten, measure, not_beaten, sentences
from evoalign.analysis.mixer import EvalSettings, KlSums, ModelMixer
from evoalign.analysis.targets import Target
from evoalign.checks.divergence import Sample, standard_errors, summarise
from evoalign.config import from_dict


def point(name: str, rewards: list[float], nats_a_token: float, spread: float = 0.0) -> Point:
    tokens = np.full(len(rewards), 10.0)
    nats = KlSums(tokens * (nats_a_token + spread * np.linspace(-1, 1, len(rewards))), tokens, np.ones(len(rewards)))
    return Point(name, name, name, None, np.array(rewards), nats)


SETS = ("--set", "prompts=4", "--set", "tokens=1", "--set")
LOW = np.random.default_rng(0).normal(0, 1, 40)
ABOVE = LOW + np.random.default_rng(1).normal(1, 0.1, 40)
CHEAP, DEAR = point("cheap", list(ABOVE), 0.1, 0.02), point("dear", list(LOW), 0.5, 0.02)


def test_the_front_is_of_means_and_better_is_beyond_both_intervals() -> None:
    rich = point("rich", list(LOW + 2), 0.6, 0.02)
    assert not_beaten([CHEAP, DEAR, rich], -9.0) == {"cheap", "rich"}
    assert not_beaten([CHEAP, DEAR, rich], 1.5) == {"rich"}, "the base earns more at no KL"
    twin = point("twin", list(ABOVE), 0.1, 0.02)
    assert not_beaten([CHEAP, twin], -9.0) == {"cheap", "twin"}, "as good is not beaten"
    assert is_beaten(DEAR, CHEAP) and not is_beaten(CHEAP, DEAR) and not is_beaten(rich, CHEAP)
    vague = point("vague", list(LOW), 0.5, 0.9)
    assert not is_beaten(vague, point("also", list(ABOVE), 0.3, 0.9)), "their KL cannot be distinguished"
    noisy = point("noisy", list(LOW + np.random.default_rng(2).normal(0.05, 1, 40)), 0.1, 0.02)
    assert not is_beaten(DEAR, noisy), "its reward is not surely higher"


def test_sentences_count_the_tested_pairs() -> None:
    base, twin = statistics.mean(LOW), point("twin", list(LOW), 0.5, 0.02)
    *_, sure = sentences(base, [CHEAP, DEAR, twin], frozenset())
    assert "of 6 pairs" in sure and "cheap over dear, cheap over twin" in sure
    *_, sure = sentences(base, [DEAR, twin], frozenset())
    assert "of 2 pairs" in sure and sure.endswith("none")
    assert not any("pairs" in line for line in sentences(base, [DEAR], frozenset()))


def test_standard_errors_are_the_spread_over_draws_of_prompts() -> None:
    rng, found, errors = np.random.default_rng(1), list[list[float]](), list[list[float]]()
    for _ in range(400):
        samples, sums = list[Sample](), list[list[float]]()
        for prompt in range(30):
            of_prompt = rng.gamma(4.0)
            for _ in range(2):
                length = int(rng.integers(2, 30))
                samples.append(Sample((prompt,), tuple(range(length))))
                sums.append([length * (of_prompt + rng.normal(0, 0.2)) * scale for scale in (1.0, 0.5, 2.0, 1.0)])
        sums_N4 = torch.tensor(sums, dtype=torch.float64)
        whole = summarise(samples, sums_N4)
        found.append([whole.k1, whole.k2, whole.k3, whole.exact])
        errors.append([float(e) for e in standard_errors(samples, sums_N4).values() if e is not None])
    np.testing.assert_allclose(np.mean(errors, 0), np.std(found, 0), rtol=0.1)
    few = [Sample((prompt,), (1, 2)) for prompt in (0, 1)]
    assert set(standard_errors(few, torch.ones(2, 4)).values()) == {None}


def test_a_folder_named_base_is_not_the_base_model(tmp_path, monkeypatch):
    class RequestedError(Exception):
        """Has the names that a mixer is made of."""

    def request(names, *_):
        raise RequestedError(*names)

    monkeypatch.setattr("evoalign.analysis.mixer.ModelMixer", request)
    config = from_dict({"es": {"sigma": 0.1}})
    target = Target("./base", Path("base"), config, None)
    with pytest.raises(RequestedError) as found:
        measure({"./base": target}, Settings(), config)
    assert found.value.args == ("./base",)


@pytest.mark.slow
def test_every_saved_mean_is_a_point(trained: Path, analyze: Any) -> None:
    run = str(trained / "lora")
    out, numbers = analyze("front", run, BASE, "--set", "examples=4", "--set", "tokens=1")
    first, last = numbers["points"]
    assert numbers["pairs_tested"] == 2
    assert (first["generation"], last["generation"]) == (1, 2) and first["group"] == last["group"]
    with ModelMixer([last["weights"]], None, EvalSettings(examples=4)) as mixer:
        assert last["reward"]["mean"] == pytest.approx(mixer.rewards(mixer.evaluate({last["weights"]: 1.0})).mean())
        assert numbers["base"]["mean"] == pytest.approx(mixer.rewards(mixer.evaluate({BASE: 1.0})).mean())
        nats = mixer.divergence({BASE: 1.0}, {last["weights"]: 1.0})
    assert last["kl"]["mean"] == pytest.approx(nats.nats_P.sum() / nats.tokens_P.sum())
    assert last["kl"]["mean"] > 0 and "No placebo is among the targets" in out
    alone, _ = analyze("front", run, "--set", "examples=2", "--set", "tokens=1", "--set", "last=true")
    assert "generation_0002" in alone and "generation_0001" not in alone


@pytest.mark.parametrize("reference", ["lora/loras/generation_0001", BASE])
def test_a_divergence_is_that_of_the_mixer_from_any_model(reference: str, trained: Path, analyze: Any) -> None:
    first = reference if reference == BASE else str(trained / reference)
    full, last = (str(trained / f"{name}_0002") for name in ("full/checkpoints/generation", "lora/loras/generation"))
    targets = [full] if first == BASE else [last, BASE, first]
    out, numbers = analyze("divergence", *targets, *SETS, f"reference={first}")
    moved, *others = numbers["targets"]
    with ModelMixer([name for name in (first, targets[0]) if name != BASE], None, EvalSettings(examples=4)) as mixer:
        nats = mixer.divergence({first: 1.0}, {targets[0]: 1.0})
    assert moved["exact"] == pytest.approx(nats.nats_P.sum() / nats.tokens_P.sum(), rel=1e-6) and moved["exact"] > 0
    assert set(moved["standard_errors"]) == {"k1", "k2", "k3", "exact"} and moved["standard_errors"]["exact"] > 0
    if others:
        base, own = others
        assert base["exact"] > 0 == own["exact"] and base["target"] == BASE and f"KL from {first}" in out
