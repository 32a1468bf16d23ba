# SPDX-License-Identifier: Apache-2.0
"""Checks that load the model: the engine, the canary, a small generation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from evoalign import engines, evolve, setup, shaping
from evoalign.checks import canary
from evoalign.cost import rounding
from evoalign.engines import Engine
from evoalign.engines.specs import on_gpu
from evoalign.errors import EvoalignError
from evoalign.preflight import pace
from evoalign.preflight.case import Case, Finding, need
from evoalign.rewards.objective import score
from evoalign.rollouts import collect, group_of, rows_of, with_mean
from evoalign.tasks import Data
from evoalign.types import MEAN, MEAN_PLAN, Example, Layout, Member, Plan, Request, Rollout, population

PROMPT = "Solve: 3 + 5 ="
"""What the canary asks where there is no task."""
TRIED_PROMPTS, SAMPLED_PROMPTS = 2, 4
UPDATED_MEMBERS = 8
"""Whose noise an update is timed with; the others' counts in proportion."""


def check_engine(case: Case) -> Finding:
    """Load the model, and the population at its start."""
    tokens_ = need(case.tokens, "tokenizer")
    need(case.planned, "targets")
    need(case.fits or None, "memory")
    began = time.perf_counter()
    case.engine = engines.create(case.config, tokens_)
    case.served = setup.start(case.config, case.engine)
    facts = case.served[2]
    promise = (
        "deterministic: scores can be repeated to the bit"
        if facts.deterministic
        else "not deterministic: a replay from the journal is exact, texts may differ"
    )
    ready = seconds_text(time.perf_counter() - began)
    note = f"; {facts.note}" if facts.note else ""
    detail = f"{facts.engine} serves {facts.dtype} on {facts.device}, ready in {ready}; {promise}{note}"
    rounded = _rounding(case, case.engine, case.served[1])
    if rounded.startswith("warning: "):
        told, _, fix = rounded.removeprefix("warning: ").rpartition("; ")
        return Finding("engine", "warning", f"{detail}; {told}", fix)
    return Finding("engine", "ok", "; ".join(filter(None, (detail, rounded))))


def _rounding(case: Case, engine: Engine, layout: Layout) -> str:
    """What rounding leaves of the noise, as a training says it; empty where nothing is rounded."""
    if case.config.es_ is None:
        return ""
    weights = rounding.weights_of_engine(engine, layout)
    return "".join(rounding.rounding_lines(case.config, layout, engine.dtype, weights))


def check_canary(case: Case) -> Finding:
    """Whether members answer as themselves: see evoalign.checks.canary."""
    space, layout, facts = need(case.served, "engine")
    engine, tokens_ = need(case.engine, "engine"), need(case.tokens, "tokenizer")
    prompt = case.task.prompt(case.data.train[0]) if case.task and case.data else PROMPT
    width = case.config.es.width if case.config.es_ is not None else canary.SMALL
    began = time.perf_counter()
    asked = tokens_.encode(prompt)
    for part in engine.parts():
        canary.check(part, space, layout, asked, generation=0, width=width, exact=facts.deterministic)
    took = seconds_text(time.perf_counter() - began)
    return Finding("canary", "ok", f"members differ, the mean stays, what does not exist is refused ({took})")


def check_generation(case: Case) -> Finding:
    """Two members on a few prompts, scored by the task: a small generation end to end, with noise no run uses; and how
    long one of the run's own takes, by a timed piece of it.

    What is evaluated is scored too, as a run does before its first generation: its rows may lack a column.
    """
    need(case.served, "engine")
    engine, tokens_ = need(case.engine, "engine"), need(case.tokens, "tokenizer")
    task, data, config = need(case.task, "task"), need(case.data, "task"), case.config
    members = population(config.es.population_size, antithetic=config.es.antithetic)
    plan, objective = Plan(canary.address(0), evolve.sigma_at(config, 0), members), task.objective()

    def requests(examples: Sequence[Example]) -> list[Request]:
        prompts = [tokens_.encode(task.prompt(e)) for e in examples]
        return evolve.requests_of(config, range(len(prompts)), prompts, 0)

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

    failed = tried(data, scored)
    if failed is not None:
        return failed
    began = time.perf_counter()
    rollouts, scores_MP, scoring = scored(data.train[:SAMPLED_PROMPTS])
    took = time.perf_counter() - began
    lengths = [len(r.token_ids) for r in rollouts]
    asked = requests([data.train[i] for i in rows_of(config, len(data.train), 0)])
    found = pace.answering(ask, members, asked, lengths, on_gpu=on_gpu(config))
    if objective.asks_mean:
        found += pace.answering(ask_mean, (MEAN,), asked, lengths, on_gpu=on_gpu(config))
    count = (len(members) + objective.asks_mean) * len(asked)
    rest = scoring * count / len(rollouts) + _moving(case, plan)
    detail = (
        f"{len(rollouts)} completions scored {scores_MP.min():g} to {scores_MP.max():g} in {seconds_text(took)}; "
        f"a generation of {count:,} takes about {seconds_text(found.usual + rest)} where answers get as long as these "
        f"({sum(lengths) / len(lengths):.0f} tokens in the mean), and at most about {seconds_text(found.most + rest)} "
        f"where all have {config.sampling.max_tokens:,}; "
        f"{whole(config.es.num_generations, 'generations', found.usual + rest)}"
    )
    return generated(detail, rollouts, scores_MP)


def _moving(case: Case, plan: Plan) -> float:
    """Seconds of a generation's update and its hash. The mean of the engine is another one after it."""
    engine, members = need(case.engine, "engine"), plan.members[:UPDATED_MEMBERS]
    shares = [1.0 if member.sign > 0 else -1.0 for member in members]
    update = evolve.update_of(case.config, replace(plan, generation=0, members=members), shares)
    moved, _ = pace.timed(lambda: engine.apply(update), on_gpu(case.config))
    hashed, _ = pace.timed(engine.fingerprint, on_gpu(case.config))
    return moved * len(plan.members) / len(members) + hashed


def tried(data: Data, score: Callable[[Sequence[Example]], object]) -> Finding | None:
    """What came of scoring a few rows of the splits that a run evaluates; None where nothing failed."""
    for split, examples in (("test", data.test), ("validation", data.validation)):
        try:
            if examples:
                score(examples[:TRIED_PROMPTS])
        except EvoalignError as error:
            return Finding("generation", "failed", f"the {split} split: {error}")
    return None


def whole(count: int, what: str, each: float) -> str:
    """How long a run takes."""
    return f"there are {count:,} {what}, about {seconds_text(count * each)} in all, and evaluations"


def generated(detail: str, rollouts: Sequence[Rollout], scores: ArrayLike) -> Finding:
    """What came of a generation; a warning where all texts are empty, or all scores the same."""
    if all(not r.text.strip() for r in rollouts):
        fix = "does the model fit the form of the prompts, task.prompt?"
        return Finding("generation", "warning", f"{detail}; all texts are empty", fix)
    if np.ptp(scores) == 0:
        fix = "`evoalign probe` tells whether members of this width do"
        return Finding("generation", "warning", f"{detail}; they all scored the same, which teaches nothing", fix)
    return Finding("generation", "ok", detail)


def seconds_text(seconds: float) -> str:
    """`1.23 s`, `12 s`, `34 min`, `5.6 h`."""
    if seconds >= 7200:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2f} s"
