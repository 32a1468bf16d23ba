# SPDX-License-Identifier: Apache-2.0
"""Reward over KL: points against what the mixer and `evaluate` say, and which of them are called better."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import caller

from evoalign import statistics
from evoalign.analysis.base import BASE
from evoalign.analysis.front import Point, is_beaten, not_beaten, sentences
from evoalign.analysis.mixer import EvalSettings, KlSums, ModelMixer
from evoalign.checks.divergence import Sample, standard_errors, summarise


def point(name: str, rewards: list[float], nats_a_token: float, spread: float = 0.0) -> Point:
    tokens = np.full(len(rewards), 10.0)
    nats = KlSums(tokens * (nats_a_token + spread * np.linspace(-1, 1, len(rewards))), tokens, np.ones(len(rewards)))
    return Point(name, name, name, None, np.array(rewards), nats)


def test_the_front_is_of_means_and_better_is_beyond_both_intervals() -> None:
    rng = np.random.default_rng(0)
    low = rng.normal(0, 1, 40)
    above = low + rng.normal(1, 0.1, 40)
    cheap, dear = point("cheap", list(above), 0.1, 0.02), point("dear", list(low), 0.5, 0.02)
    rich = point("rich", list(low + 2), 0.6, 0.02)
    assert not_beaten([cheap, dear, rich], -9.0) == {"cheap", "rich"}
    assert not_beaten([cheap, dear, rich], 1.5) == {"rich"}, "the base earns more at no KL"
    assert not_beaten([cheap, point("twin", list(above), 0.1, 0.02)], -9.0) == {"cheap", "twin"}, (
        "as good is not beaten"
    )
    assert is_beaten(dear, cheap) and not is_beaten(cheap, dear) and not is_beaten(rich, cheap)
    vague = point("vague", list(low), 0.5, 0.9)
    assert not is_beaten(vague, point("also", list(above), 0.3, 0.9)), "their KL cannot be told apart"
    noisy = point("noisy", list(low + rng.normal(0.05, 1, 40)), 0.1, 0.02)
    assert not is_beaten(dear, noisy), "its reward is not surely higher"


def test_sentences_count_the_tested_pairs() -> None:
    rng = np.random.default_rng(0)
    low = rng.normal(0, 1, 40)
    cheap, dear = point("cheap", list(low + rng.normal(1, 0.1, 40)), 0.1, 0.02), point("dear", list(low), 0.5, 0.02)
    base = statistics.mean(low)
    twin = point("twin", list(low), 0.5, 0.02)
    *_, sure = sentences(base, [cheap, dear, twin], frozenset())
    assert "of 6 pairs" in sure and "cheap over dear, cheap over twin" in sure
    *_, sure = sentences(base, [dear, twin], frozenset())
    assert "of 2 pairs" in sure and sure.endswith("none")
    assert not any("pairs" in line for line in sentences(base, [dear], frozenset()))


def test_standard_errors_are_the_spread_over_draws_of_prompts() -> None:
    """Of 400 sets of 30 prompts with two answers each; lengths and nats go together."""
    rng = np.random.default_rng(1)
    found: list[list[float]] = []
    errors: list[list[float]] = []
    for _ in range(400):
        samples: list[Sample] = []
        sums: list[list[float]] = []
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


@pytest.mark.slow
def test_every_saved_mean_is_a_point(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call, run = caller(monkeypatch, capsys, columns=200), str(trained / "lora")
    done = call("analyze", "front", run, BASE, "--set", "examples=4", "--set", "tokens=1", "--to", tmp_path)
    assert done.code == 0, done.err
    assert {"front.json", "front.png", "front.svg"} <= {path.name for path in tmp_path.iterdir()}
    numbers = json.loads((tmp_path / "front.json").read_text())["numbers"]
    first, last = numbers["points"]
    assert numbers["pairs_tested"] == 2
    assert (first["generation"], last["generation"]) == (1, 2) and first["group"] == last["group"]
    with ModelMixer([last["weights"]], None, EvalSettings(examples=4)) as mixer:
        assert last["reward"]["mean"] == pytest.approx(mixer.rewards(mixer.evaluate({last["weights"]: 1.0})).mean())
        assert numbers["base"]["mean"] == pytest.approx(mixer.rewards(mixer.evaluate({BASE: 1.0})).mean())
        nats = mixer.divergence({BASE: 1.0}, {last["weights"]: 1.0})
    assert last["kl"]["mean"] == pytest.approx(nats.nats_P.sum() / nats.tokens_P.sum())
    assert last["kl"]["mean"] > 0 and "no placebo is among the targets" in done.out
    alone = call("analyze", "front", run, "--set", "examples=2", "--set", "tokens=1", "--set", "last=true")
    assert alone.code == 0 and "generation_0002" in alone.out and "generation_0001" not in alone.out
    assert "name runs or models" in call("analyze", "front", BASE).err


def test_a_divergence_is_taken_from_any_model(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call = caller(monkeypatch, capsys, columns=400)
    first, last = (str(trained / f"lora/loras/generation_000{g}") for g in (1, 2))
    few = ["--set", "prompts=4", "--set", "tokens=1", "--to", tmp_path]
    done = call("analyze", "divergence", last, BASE, "--set", f"reference={first}", *few)
    assert done.code == 0, done.err
    moved, base = json.loads((tmp_path / "divergence.json").read_text())["numbers"]["targets"]
    with ModelMixer([first, last], None, EvalSettings(examples=4)) as mixer:
        nats = mixer.divergence({first: 1.0}, {last: 1.0})
    assert moved["exact"] == pytest.approx(nats.nats_P.sum() / nats.tokens_P.sum())
    assert base["exact"] > 0 and base["target"] == BASE and f"KL from {first}" in done.out
    assert set(moved["standard_errors"]) == {"k1", "k2", "k3", "exact"} and moved["standard_errors"]["exact"] > 0
    assert call("analyze", "divergence", first, "--set", f"reference={first}", *few).code == 0
    (own,) = json.loads((tmp_path / "divergence.json").read_text())["numbers"]["targets"]
    assert own["exact"] == 0
