# SPDX-License-Identifier: Apache-2.0
"""Checks that load the model: the engine, the canary, a small generation and how long a whole one takes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike

from evoalign import engines, evaluation, evolve, setup, shaping
from evoalign.baselines import settings
from evoalign.checks import canary
from evoalign.checks.rules import cut_off
from evoalign.cost import rounding
from evoalign.engines.specs import on_gpu
from evoalign.errors import EvoalignError
from evoalign.preflight.plan import Case, Finding, IdleError, need
from evoalign.rewards.objective import score
from evoalign.rollouts import Encoded, batch, collect, group_of, requests_of, rewards_of, rows_of, with_mean
from evoalign.tasks import Data, Task, takes_any_form
from evoalign.types import MEAN, MEAN_PLAN, Example, Member, Plan, Request, Rollout, Sampling, population

PROBE_FIX = "run `evoalign probe` to find a width at which scores differ"
PROMPT = "Solve: 3 + 5 ="
"""Prompt of the canary if there is no task."""
TRIED_PROMPTS, SAMPLED_PROMPTS = 2, 4
UPDATED_MEMBERS = 8
"""Most members of a timed update; the rest counts in proportion."""

STEPS = 16
"""Most tokens of the longer part."""
BUDGET = 20.0
"""Most seconds of both parts together, estimated from one pair of members, which always runs."""
MOST_PROMPTS = 64
"""Most prompts that are timed."""
AGAIN = 3.0
"""On a GPU, work that takes fewer seconds is timed twice: the first run compiles kernels for new shapes."""

PASS = 3
"""A forward and a backward pass take about three times as long as a forward pass."""

T = TypeVar("T")
Ask = Callable[[Sequence[Member], Sequence[Request]], Sequence[Rollout]]


@dataclass(frozen=True, slots=True)
class Duration:
    """Seconds of a rollout: `usual` if completions are as long as the sample, `most` if all have `max_tokens`."""

    usual: float
    most: float

    def __add__(self, other: Duration) -> Duration:
        return Duration(self.usual + other.usual, self.most + other.most)


def check_engine(case: Case) -> Finding:
    """Load the model and start the engine with the config's space; for GRPO the engine of its evaluations."""
    config, tokens_ = case.config, need(case.tokens, "tokenizer")
    need(case.specs if case.method == "grpo" else case.planned, "targets")
    need(case.fits or None, "memory")
    began = time.perf_counter()
    if case.method == "grpo":
        case.engine = engines.create(config.as_policy(adapter=False), tokens_)
        case.engine.check_mean()
        ready = seconds_text(time.perf_counter() - began)
        return Finding("engine", "ok", f"the model answers in {config.model.trained_dtype}, ready in {ready}")
    case.engine = engines.create(config, tokens_)
    case.served = _, layout, facts = setup.start(config, case.engine)
    promise = (
        "deterministic: scores repeat to the bit"
        if facts.deterministic
        else "not deterministic: completions may differ between runs, while replaying the journal is exact"
    )
    ready = seconds_text(time.perf_counter() - began)
    note = f"; {facts.note}" if facts.note else ""
    detail = f"{facts.engine} serves {facts.dtype} on {facts.device}, ready in {ready}; {promise}{note}"
    rounded = ""
    if config.es_ is not None:
        weights = rounding.weights_of_engine(case.engine, layout)
        rounded = "".join(rounding.rounding_lines(config, layout, case.engine.dtype, weights))
    if rounded.startswith("warning: "):
        problem, _, fix = rounded.removeprefix("warning: ").rpartition("; ")
        return Finding("engine", "warning", f"{detail}; {problem}", fix)
    return Finding("engine", "ok", "; ".join(filter(None, (detail, rounded))))


def check_canary(case: Case) -> Finding:
    """Check that members differ and the mean is unchanged by them; see `evoalign.checks.canary`."""
    if case.method == "grpo":
        raise IdleError("GRPO has no members")
    space, layout, facts = need(case.served, "engine")
    engine, tokens_ = need(case.engine, "engine"), need(case.tokens, "tokenizer")
    prompt = case.task.prompt(case.data.train[0]) if case.task and case.data and case.renders else PROMPT
    width = case.config.es.width if case.config.es_ is not None else canary.SMALL
    began = time.perf_counter()
    prompt_ids = tokens_.encode(prompt)
    for part in engine.parts():
        canary.check(part, space, layout, prompt_ids, generation=0, width=width, exact=facts.deterministic)
    took = seconds_text(time.perf_counter() - began)
    return Finding("canary", "ok", f"members differ, the mean is unchanged, a missing member is refused ({took})")


def check_generation(case: Case) -> Finding:
    """Run two members on a few prompts and score them, with noise that no run uses; and time part of a generation.

    A few rows of the evaluated splits are scored as well: they may lack a column.
    """
    if case.method == "grpo":
        return _grpo_generation(case)
    need(case.served, "engine")
    engine, tokens_ = need(case.engine, "engine"), need(case.tokens, "tokenizer")
    task, data, config = need(case.task, "task"), need(case.data, "task"), case.config
    need(case.renders or None, "chat template")
    members = population(config.es.population_size, antithetic=config.es.antithetic)
    plan, objective = Plan(canary.address(0), evolve.sigma_at(config, 0), members), task.objective()

    def requests(examples: Sequence[Example]) -> list[Request]:
        return requests_of(config, range(len(examples)), Encoded(task, tokens_, examples), 0)

    def ask(some: Sequence[Member], asked: Sequence[Request]) -> list[Rollout]:
        return collect(engine, replace(plan, members=tuple(some)), asked)

    def ask_mean(_: Sequence[Member], asked: Sequence[Request]) -> list[Rollout]:
        return collect(engine, MEAN_PLAN, asked)

    def scored(examples: Sequence[Example]) -> tuple[list[Rollout], shaping.Scores, float]:
        asked = requests(examples)
        rollouts, mean = ask(members[:2], asked), ask_mean((MEAN,), asked) if objective.asks_mean else []
        began = time.perf_counter()
        group = group_of(task, examples, rollouts, 2)
        scores_MP = score(task.objective(), with_mean(task, group, mean) if mean else group)
        return rollouts, scores_MP, time.perf_counter() - began

    failed = try_splits(data, scored)
    if failed is not None:
        return failed
    began = time.perf_counter()
    rollouts, scores_MP, scoring = scored(data.train[:SAMPLED_PROMPTS])
    took = time.perf_counter() - began
    lengths = [len(r.token_ids) for r in rollouts]
    asked = requests([data.train[i] for i in rows_of(config, len(data.train), 0)])
    found = rollout_duration(ask, members, asked, lengths, on_gpu=on_gpu(config))
    if objective.asks_mean:
        found += rollout_duration(ask_mean, (MEAN,), asked, lengths, on_gpu=on_gpu(config))
    count = (len(members) + objective.asks_mean) * len(asked)
    rest = scoring * count / len(rollouts) + _moving(case, plan)
    longest = (
        f" if completions are as long as these (mean {sum(lengths) / len(lengths):.0f} tokens), and at most about "
        f"{seconds_text(found.most + rest)} if all have {config.sampling.max_tokens:,}"
    )
    detail = (
        f"{len(rollouts)} {task.scored} scored {scores_MP.min():g} to {scores_MP.max():g} in {seconds_text(took)}; "
        f"a generation of {count:,} takes about {seconds_text(found.usual + rest)}"
        f"{'' if task.player == 'given' else longest}; {config.es.num_generations:,} generations take about "
        f"{seconds_text(config.es.num_generations * (found.usual + rest))} in total, plus evaluations"
    )
    most, setting = config.sampling.max_tokens, "sampling.max_tokens"
    fix = same_scores_fix(task, data.train[0], rollouts)
    if short(rollouts, most, setting) is None:
        return generation_finding(detail, rollouts, scores_MP, None, fix)
    own = ask_mean((MEAN,), requests(data.train[:SAMPLED_PROMPTS]))  # wide noise also makes completions long
    return generation_finding(detail, rollouts, scores_MP, short(own, most, setting), fix)


def _grpo_generation(case: Case) -> Finding:
    """Score a group of completions of one prompt and a few rows of the evaluated splits; estimate a step's duration.

    A step's completions are timed as a generation of ES is, its training passes by a forward pass times `PASS`.
    """
    engine, tokens_ = need(case.engine, "engine"), need(case.tokens, "tokenizer")
    task, data, config = need(case.task, "task"), need(case.data, "task"), case.config
    need(case.renders or None, "chat template")
    failed = try_splits(data, lambda rows: evaluation.evaluate(engine, tokens_, task, rows, config.evaluation))
    if failed is not None:
        return failed
    grpo, prompt = config.grpo, tokens_.encode(task.prompt(data.train[0]), task.tools)
    sampling = Sampling(settings.longest(config), grpo.temperature, grpo.top_p)
    began = time.perf_counter()
    rollouts = collect(engine, MEAN_PLAN, [Request(i, prompt, sampling, i) for i in range(grpo.num_generations)])
    answered = time.perf_counter()
    rewards = rewards_of(task, [r.text for r in rollouts], [data.train[0]] * len(rollouts))
    took, scoring = time.perf_counter() - began, time.perf_counter() - answered
    size = settings.round_size(grpo) * settings.rounds(grpo)
    rows = batch(len(data.train), size // grpo.num_generations, config.seed, 0)
    prompts = [tokens_.encode(task.prompt(data.train[row]), task.tools) for row in rows]
    asked = [Request(i, prompts[i // grpo.num_generations % len(prompts)], sampling, i) for i in range(size)]
    lengths = [len(r.token_ids) for r in rollouts]

    def ask(members: Sequence[Member], some: Sequence[Request]) -> list[Rollout]:
        return collect(engine, MEAN_PLAN, some)

    gpu, steps = on_gpu(config), settings.cycle(grpo)
    found = rollout_duration(ask, MEAN_PLAN.members, asked, lengths, on_gpu=gpu)
    said = [(*prompts[i % len(prompts)], *r.token_ids) for i, r in enumerate(rollouts)]
    # Vary the first token by row: an engine computes a common prefix only once, and training does not.
    micro = [(i % 64, *said[i % len(said)][1:]) for i in range(grpo.per_device_train_batch_size)]
    reads = [Request(i, ids, Sampling(1), i) for i, ids in enumerate(micro)]
    passed, _ = timed(lambda: collect(engine, MEAN_PLAN, reads), gpu)
    rest = PASS * passed * grpo.gradient_accumulation_steps
    rest += scoring * size / len(rewards) / steps
    detail = (
        f"a group of {len(rewards)} completions scored {min(rewards):g} to {max(rewards):g} in {seconds_text(took)}; a "
        f"step takes about {seconds_text(found.usual / steps + rest)} if completions are as long as these (mean "
        f"{sum(lengths) / len(lengths):.0f} tokens), and at most about {seconds_text(found.most / steps + rest)} if "
        f"all have {sampling.max_tokens:,}, where a training pass takes {PASS} times as long as a forward pass; "
        f"{grpo.max_steps:,} steps take about {seconds_text(grpo.max_steps * (found.usual / steps + rest))} in total, "
        "plus evaluations"
    )
    setting = "grpo.max_completion_length" if grpo.max_completion_length else "sampling.max_tokens"
    fix = same_scores_fix(task, data.train[0], rollouts)
    return generation_finding(detail, rollouts, rewards, short(rollouts, sampling.max_tokens, setting), fix)


def _moving(case: Case, plan: Plan) -> float:
    """Return the seconds of an update and its hash. This moves the engine's mean."""
    engine, members = need(case.engine, "engine"), plan.members[:UPDATED_MEMBERS]
    shares = [1.0 if member.sign > 0 else -1.0 for member in members]
    update = evolve.update_of(case.config, replace(plan, generation=0, members=members), shares)
    moved, _ = timed(lambda: engine.apply(update), on_gpu(case.config))
    hashed, _ = timed(engine.fingerprint, on_gpu(case.config))
    return moved * len(plan.members) / len(members) + hashed


def try_splits(data: Data, score: Callable[[Sequence[Example]], object]) -> Finding | None:
    """Score a few rows of the splits that a run evaluates; return a finding if that fails."""
    for split, examples in (("test", data.test), ("validation", data.validation)):
        try:
            if examples:
                score(examples[:TRIED_PROMPTS])
        except EvoalignError as error:
            return Finding("generation", "failed", f"the {split} split: {error}")
    return None


def short(rollouts: Sequence[Rollout], most: int, setting: str) -> str | None:
    """Return a warning if most completions of the unperturbed model are cut off at `most` tokens, else None."""
    share = float(np.mean([r.finish_reason == "length" for r in rollouts]))
    return cut_off(share, most, "the unperturbed model's completions", setting)


def same_scores_fix(task: Task, example: Example, rollouts: Sequence[Rollout]) -> str:
    """Return what to do if completions all score the same: a reward may take a list of one message for the text."""
    differ = len({rollout.text for rollout in rollouts}) > 1
    if not takes_any_form(task.config) or not isinstance(example.get("prompt"), list) or not differ:
        return PROBE_FIX
    return (
        "the prompts are messages, so each completion is a list of one message: check that the reward reads its text, "
        f"completion[0]['content']; if it does, {PROBE_FIX}"
    )


def generation_finding(
    detail: str, rollouts: Sequence[Rollout], scores: ArrayLike, cut: str | None, same: str = PROBE_FIX
) -> Finding:
    """Return the finding of a generation, with the warning `cut` if completions are cut off.

    It is a warning too if all texts are empty or all scores are equal; `same` then says what to do.
    """
    problems = list[tuple[str, str]]()
    if all(not r.text.strip() for r in rollouts):
        problems.append(("all texts are empty", "check that task.prompt fits the model"))
    elif np.ptp(scores) == 0:
        problems.append(("all scored the same, so nothing can be learned", same))
    if cut is not None:
        problem, _, fix = cut.rpartition("; ")
        problems.append((problem, fix))
    if not problems:
        return Finding("generation", "ok", detail)
    texts, fixes = zip(*problems, strict=True)
    return Finding("generation", "warning", "; ".join([detail, *texts]), "; ".join(fixes))


def seconds_text(seconds: float) -> str:
    """Return `1.23 s`, `12 s`, `34 min` or `5.6 h`."""
    if seconds >= 7200:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2f} s"


def rollout_duration(
    ask: Ask, members: Sequence[Member], requests: Sequence[Request], lengths: Sequence[int], *, on_gpu: bool
) -> Duration:
    """Estimate the duration of a rollout from a short part of it. `lengths` are tokens of complete completions.

    The part has the rollout's own shape, all members and prompts, since on a GPU 2,048 rows take hardly longer than
    four. It has few tokens: one, which processes the prompts, and then up to `STEPS`. The rest is extrapolated by
    length: time in proportion to rows (CPU) follows the mean length, and time in proportion to steps (GPU) the longest.
    The estimate is their geometric mean, so it is wrong by at most the root of their ratio. If the part would take
    longer than `BUDGET`, fewer members run, and the rest counts in proportion. `ask` must have run before, since the
    first call of an engine may be slow.
    """
    limit = requests[0].sampling.max_tokens
    part = requests[:MOST_PROMPTS]
    first = _time(ask, members[:2], part, 1, on_gpu)[0]
    count = min(len(members), max(2, int(BUDGET / (2 * max(first, 1e-9))) * 2))  # pairs; decoding takes as long again
    asked = members[:count]
    reading, _ = _time(ask, asked, part, 1, on_gpu)
    share = len(members) * len(requests) / (count * len(part))
    if limit == 1:
        return Duration(reading * share, reading * share)
    seconds, said = _time(ask, asked, part, min(STEPS, limit), on_gpu)
    if limit <= STEPS:
        return Duration(seconds * share, seconds * share)
    rest = max(0.0, seconds - reading)
    mean = max(_steps([len(r.token_ids) for r in said]), 1.0)
    longest = max(max(len(r.token_ids) for r in said) - 1, 1)
    by_rows, by_steps = _steps(lengths) / mean, (max(lengths) - 1) / longest
    usual = max(1.0, (by_rows * by_steps) ** 0.5)  # completions are never shorter than in the part
    return Duration((reading + rest * usual) * share, (reading + rest * (limit - 1) / mean) * share)


def timed(work: Callable[[], T], on_gpu: bool) -> tuple[float, T]:
    """Return the seconds and the result of some work; on a GPU, of the faster of two runs unless the first is long."""
    best = math.inf
    while True:
        start = time.perf_counter()
        done = work()
        took = time.perf_counter() - start
        if not on_gpu or took >= AGAIN or best < math.inf:
            return min(best, took), done
        best = took


def _steps(lengths: Sequence[int]) -> float:
    """Return the mean number of tokens after the first, which comes with the prompt."""
    return sum(lengths) / len(lengths) - 1


def _time(
    ask: Ask, members: Sequence[Member], requests: Sequence[Request], tokens: int, on_gpu: bool
) -> tuple[float, Sequence[Rollout]]:
    short = [replace(r, sampling=replace(r.sampling, max_tokens=tokens)) for r in requests]
    return timed(lambda: ask(members, short), on_gpu)
