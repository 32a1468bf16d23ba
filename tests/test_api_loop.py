# SPDX-License-Identifier: Apache-2.0
"""The loop alone, with an engine that echoes: who is asked what, with which seeds, and whose reward goes where."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import JOURNAL_HEADER
from own_task import Vowels

from evoalign import evaluation, rollouts, tokens
from evoalign.config import Config, from_dict
from evoalign.engines.base import EngineDefaults
from evoalign.errors import EvoalignError, RewardError
from evoalign.evaluation import paired_interval
from evoalign.evolve import evolve
from evoalign.rundir.journal import Journal, read
from evoalign.types import MEAN_PLAN, Example, Generation, Plan, Prompt, Request, Rollout, Update


class Echo(EngineDefaults):
    """An engine whose completions are the prompts and the member's number, in any order."""

    def __init__(self, loaded: tokens.Tokens, drop: int = 0) -> None:
        self.tokens, self.drop = loaded, drop
        self.calls: list[tuple[Plan, list[Request]]] = []
        self.updates: list[Update] = []
        self.log: list[str] = []

    def rollout(self, plan: Plan, requests: Sequence[Request]) -> Iterator[Rollout]:
        self.calls.append((plan, list(requests)))
        self.log.append("rollout")
        cells = [
            Rollout(m, r.index, r.prompt_ids, f"{self.tokens.decode(r.prompt_ids)}|{m.index}", "stop")
            for m in plan.members
            for r in requests
        ]
        random.Random(0).shuffle(cells)
        yield from cells[self.drop :]

    def apply(self, update: Update) -> None:
        self.log.append("apply")
        self.updates.append(update)

    def fingerprint(self) -> str:
        self.log.append("fingerprint")
        return f"{len(self.updates):064x}"


class Numbers(Vowels):
    """Row n earns 10 n + the member's number, if the text is an answer to row n."""

    def prompt(self, example: Example) -> Prompt:
        return f"number {example['question']}"

    def compute_reward(self, text: str, example: Example) -> float:
        prompt, _, member = text.partition("|")
        return 10.0 * int(example["question"]) + int(member) if prompt == self.prompt(example) else float("nan")


def settings(**es: Any) -> Config:
    es = {"sigma": 0.1, "learning_rate": 0.05, "num_generations": 4, "population_size": 4, **es}
    return from_dict({"seed": 3, "es": es, "task": {"batch_size": 3}, "evaluation": {"every": 2}})


def go(config: Config, engine: Echo, path: Path, evaluate: Any = None) -> list[Generation]:
    task: Any = Numbers([str(n) for n in range(5)])
    data = task.load_data(0)
    log = Journal(path, JOURNAL_HEADER)
    anything: Any = engine
    try:
        run = rollouts.Run(config, task, data.train, anything, engine.tokens, log, task.objective())
        run = run if evaluate is None else replace(run, evaluate_mean=evaluate)
        return list(evolve(run))
    finally:
        log.close()


@pytest.fixture(scope="module")
def loaded() -> tokens.Tokens:
    return tokens.load(settings().model)


def test_every_score_belongs_to_its_member_and_prompt(loaded: tokens.Tokens, tmp_path: Path) -> None:
    columns = []
    for generation in go(settings(), Echo(loaded), tmp_path / "j"):
        scores = np.array(generation.scores_MP)
        rows = scores[0] / 10
        columns += rows.tolist()
        assert np.array_equal(scores, 10 * rows[None] + np.arange(4)[:, None])
        assert generation.fitness_M == tuple(10 * rows.mean() + np.arange(4))
    assert sorted(columns[:5]) == sorted(columns[5:10]) == [0, 1, 2, 3, 4]


def test_an_update_is_written_down_before_it_is_applied(loaded: tokens.Tokens, tmp_path: Path) -> None:
    class Watched(Echo):
        def apply(self, update: Update) -> None:
            written.append((tmp_path / "j").read_bytes().count(b"\n"))
            super().apply(update)

    engine, written = Watched(loaded), list[int]()
    generations = go(settings(), engine, tmp_path / "j")
    assert written == [2, 4, 6, 8] and engine.log == ["rollout", "apply", "fingerprint"] * 4
    log = read(tmp_path / "j")
    assert (log.sealed, log.damage) == (4, None)
    assert [g.weights_hash for g in log.generations] == [f"{n:064x}" for n in range(1, 5)]
    assert [g.update for g in generations] == engine.updates
    assert [(u.generation, u.sigma, u.members) for u in engine.updates] == [
        (plan.generation, plan.sigma, plan.members) for plan, _ in engine.calls
    ]


def test_seeds_belong_to_prompt_and_generation(loaded: tokens.Tokens, tmp_path: Path) -> None:
    first, again = Echo(loaded), Echo(loaded)
    for name, engine in (("first", first), ("again", again)):
        go(settings(), engine, tmp_path / name)
    assert first.calls == again.calls
    seeds = [r.seed for _, requests in first.calls for r in requests]
    assert len(set(seeds)) == len(seeds) == 12 and all(0 <= seed < 2**63 for seed in seeds)


def test_the_mean_is_evaluated_when_due(loaded: tokens.Tokens, tmp_path: Path) -> None:
    """Every second generation, and not the last one: that is evaluated at the end anyway."""
    engine = Echo(loaded)
    evaluate = lambda: {"reward": float(len(engine.updates))}  # noqa: E731
    generations = go(settings(num_generations=6), engine, tmp_path / "j", evaluate)
    measured = {g.index: g.evaluation for g in generations if g.evaluation is not None}
    assert measured == {1: {"reward": 2.0}, 3: {"reward": 4.0}}


def test_a_lost_completion_is_an_error_and_nothing_moves(loaded: tokens.Tokens, tmp_path: Path) -> None:
    engine = Echo(loaded, drop=1)
    with pytest.raises(EvoalignError, match="no completion for"):
        go(settings(), engine, tmp_path / "j")
    assert engine.updates == [] and read(tmp_path / "j").generations == ()


def test_a_zero_variance_generation_has_zero_coefficients(loaded: tokens.Tokens, tmp_path: Path) -> None:
    engine = Echo(loaded)
    generations = go(settings(shaping="zscore"), engine, tmp_path / "a")
    assert not any(g.zero_variance for g in generations)
    for call in engine.updates:
        assert np.mean(call.coefficients) == pytest.approx(0)
        assert np.argsort(call.coefficients).tolist() == [0, 1, 2, 3]


def test_evaluation_asks_each_example_under_each_seed(loaded: tokens.Tokens) -> None:
    engine, task = Echo(loaded), Numbers(["1"], ["7", "8", "9"])
    config = from_dict({"es": {"sigma": 1}, "evaluation": {"temperature": 1, "samples": 4, "seeds": [5, 6]}})
    anything: Any = engine
    result = evaluation.evaluate(anything, loaded, task, task.load_data(0).test, config.evaluation)
    ((plan, requests),) = engine.calls
    assert plan == MEAN_PLAN
    assert len({r.seed for r in requests}) == len(requests) == 3 * 2 * 4
    assert result.measures_E["reward"] == (69.0, 79.0, 89.0)
    assert [(c.example, c.seed, c.sample) for c in result.completions] == [
        (e, s, k) for e in range(3) for s in (5, 6) for k in range(4)
    ]
    greedy = config.evaluation.model_copy(update={"temperature": 0.0})
    assert len(evaluation.evaluate(anything, loaded, task, task.load_data(0).test, greedy).completions) == 3


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (KeyError("answer"), "task vowels failed to score: KeyError: 'answer'"),
        ([1.0, 2.0, 3.0], "3 rewards for 2"),
        (RewardError("as it is"), "^as it is$"),
    ],
)
def test_a_task_that_fails_is_named(result: Any, message: str) -> None:
    class Broken(Vowels):
        def rewards(self, texts: Sequence[str], examples: Sequence[Example]) -> list[float]:
            if isinstance(result, Exception):
                raise result
            return result

    with pytest.raises(RewardError, match=message):
        rollouts.rewards_of(Broken(), ["a", "b"], [{}, {}])


def test_paired_interval() -> None:
    generator = np.random.default_rng(0)
    before = generator.normal(size=8)
    after = before + 0.5 + generator.normal(scale=0.3, size=8)
    mean, low, high = paired_interval(before.tolist(), after.tolist())
    assert mean == pytest.approx((after - before).mean())
    half = 2.364624 * (after - before).std(ddof=1) / 8**0.5
    assert (low, high) == (pytest.approx(mean - half), pytest.approx(mean + half))
    assert paired_interval([1.0, 2.0], [2.0, 3.0]) == (1.0, 1.0, 1.0)
    assert paired_interval([1.0], [3.0]) == (2.0, 2.0, 2.0)
    assert paired_interval([1.0, math.nan, 2.0], [2.0, 5.0, 3.0]) == (1.0, 1.0, 1.0)
    assert math.isnan(paired_interval([math.nan], [1.0])[0])
    mean, low, high = paired_interval([0.0] * 12, [0.0] * 12, shares=True)
    assert low < mean == 0 < high, "of twelve problems that were not solved, more may be among others"
