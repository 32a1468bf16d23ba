# SPDX-License-Identifier: Apache-2.0
"""Estimated duration of rollouts on engines of known speed, from bound by steps to bound by rows."""

from types import SimpleNamespace

import pytest

from evoalign.preflight import work
from evoalign.types import Request, Rollout, Sampling, population


class Timed:
    """An engine with given completion lengths, seconds per step, and seconds per row and step."""

    def __init__(self, lengths, step, row, reading=0.0):
        self.lengths, self.step, self.row, self.reading = lengths, step, row, reading
        self.now = 0.0
        self.asked = []

    def __call__(self, members, requests):
        limit = requests[0].sampling.max_tokens
        self.asked.append((len(members), len(requests), limit))
        said = [min(self.lengths[r.index % len(self.lengths)], limit) for _ in members for r in requests]
        self.now += self.reading * len(said)
        self.now += sum(self.step + self.row * sum(n > done for n in said) for done in range(1, max(said)))
        members_of = [m for m in members for _ in requests]
        asked = [*requests] * len(members)
        return [Rollout(m, r.index, (1,) * n, "", "stop") for m, r, n in zip(members_of, asked, said, strict=True)]


def estimate(engine, monkeypatch, members=32, prompts=16, limit=200):
    """Return the estimate from the lengths of eight completions, and the duration of the whole rollout."""
    monkeypatch.setattr(work, "time", SimpleNamespace(perf_counter=lambda: engine.now))
    everyone, requests = population(members), [Request(i, (1, 2), Sampling(limit), i) for i in range(prompts)]
    sample = [len(r.token_ids) for r in engine(everyone[:2], requests[:4])]
    found = work.rollout_duration(engine, everyone, requests, sample, on_gpu=False)
    began = engine.now
    engine(everyone, requests)
    return found, engine.now - began


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("lengths", [(20, 30, 25, 40), (150, 180, 120, 200), (200,), (5, 60, 8, 20)], ids=str)
def test_rollout_duration_is_within_a_factor_of_two(share, lengths, monkeypatch):
    """`share` of a full batch's time is of its steps, as on a GPU, and the rest of its rows, as on a CPU."""
    engine = Timed(lengths, step=0.01 * share, row=0.01 * (1 - share) / 512, reading=1e-5)
    found, whole = estimate(engine, monkeypatch)
    assert whole / 2 < found.usual < 2 * whole
    assert found.most >= 0.99 * found.usual


@pytest.mark.parametrize(("length", "limit"), [(200, 200), (99, 1), (99, 2), (99, work.STEPS)])
def test_rollout_duration_is_exact_for_short_rollouts_and_completions_of_maximum_length(length, limit, monkeypatch):
    found, whole = estimate(Timed((length,), step=0.02, row=1e-5, reading=1e-4), monkeypatch, limit=limit)
    assert found.usual == pytest.approx(whole) and found.most == pytest.approx(whole)


def test_rollout_duration_uses_fewer_members_for_slow_engines(monkeypatch):
    engine = Timed((100,), step=0.0, row=1e-3, reading=0.02)  # a pair reads 64 prompts in 2.56 s
    found, whole = estimate(engine, monkeypatch, members=40, prompts=128)
    (_, _, _), first, *rest, _ = engine.asked
    assert first == (2, work.MOST_PROMPTS, 1) and rest == [(6, 64, 1), (6, 64, work.STEPS)]
    assert found.usual == pytest.approx(whole)


def test_rollout_duration_does_not_count_compilation(monkeypatch):
    """On a GPU kernels are compiled for a shape that is new: 1.5 s before 0.2 s of all answers."""
    engine, seen = Timed((12, 20, 30, 14), step=0.005, row=1e-6), set[tuple[int, int, int]]()

    def ask(members, requests):
        said = engine(members, requests)
        engine.now += 1.5 * (engine.asked[-1] not in seen)
        seen.add(engine.asked[-1])
        return said

    monkeypatch.setattr(work, "time", SimpleNamespace(perf_counter=lambda: engine.now))
    everyone, requests = population(32), [Request(i, (1, 2), Sampling(200), i) for i in range(16)]
    found = work.rollout_duration(ask, everyone, requests, [12, 20, 30, 14], on_gpu=True)
    began = engine.now
    engine(everyone, requests)
    assert (engine.now - began) / 2 < found.usual < 2 * (engine.now - began)
