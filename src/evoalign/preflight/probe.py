# SPDX-License-Identifier: Apache-2.0
"""`evoalign probe`: measure before training how wide the noise should be, on a ladder of widths and the same prompts.

A generation moves the mean by eta * sigma * (1/N) sum_i c_i eps_i, where c_i is the fitness f_i over its spread s. The
mean's fitness is expected to rise by eta * E[l_i f_i] / s, where l_i = sigma * (slope of the fitness along eps_i) is
the first-order effect of member i's noise. l_i is measured with the same noise at the next smaller sigma' of the
ladder: l_i = (f_i(sigma') - f_-i(sigma')) / 2 * sigma / sigma'. While the fitness is linear in the noise, this gain
grows with sigma; it falls once members win for reasons that do not hold nearer to the mean. That predicts the best
sigma of a sweep, and the members' spread does not (studies/probe.py): a broken population can spread most. The
smallest sigma has no smaller one to compare with, so that it has no gain and is never recommended.

Members are antithetic pairs, whatever the config trains with, because curvature cancels in the difference of a pair.
Only `lora.evolve: ab` has no such pairs.

The probe has two passes of about equal cost. The first measures all widths with half of the members. The second
measures the width that may gain most, and the next smaller one, with new members, and only these are tested: choosing
the width then costs no significance. Three widths or fewer are measured once, with all members.

A step has the length of eta 0.5 with plain SGD, z-scores and members without pairs (`optimizer.reach`). At the same
eta, momentum moves the mean 1 / (1 - momentum) times as far, pairs sqrt(2) times, Adam, whose first steps have the
norm of one member's noise, sqrt(N) times, and other shapings as far as their coefficients are large. The recommended
learning rate is smaller by that factor. The random part of the steps costs drop * eta^2 / N a generation, the drop
being half the curvature times the squared noise; the gain is what remains.

`gains.py` tests gains for significance, `advice.py` recommends a width.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from evoalign import shaping
from evoalign.checks import hacking
from evoalign.checks.control import control_of, redrawn, rewarded
from evoalign.checks.rules import cut_off
from evoalign.checks.signs import is_foreign, scripts
from evoalign.config import Config, EsConfig
from evoalign.errors import ConfigError, RewardError, StoppedError
from evoalign.optimizer import reach
from evoalign.preflight.advice import (
    ETA,
    SHOWN,
    Baseline,
    ProbeResult,
    Width,
    fault,
    is_sure,
    nothing,
    promising,
    recommend,
)
from evoalign.preflight.gains import advantages, both_rise, direction, rise, worths
from evoalign.preflight.work import seconds_text
from evoalign.report import watching
from evoalign.report.tables import questions
from evoalign.rewards.objective import judge, refuse_whole_groups
from evoalign.rollouts import Encoded, batch, collect, group_of, requests_of, typical
from evoalign.setup import ConfigLike, Parts, Rewards, as_config, assemble, task_and_data, with_form
from evoalign.shaping import Scores
from evoalign.tasks import Task
from evoalign.training.stopping import interruptible
from evoalign.types import MEAN_PLAN, Example, Member, Plan, Request, Rollout, population, text_of

LADDER = tuple(2.0**k for k in range(-4, 5))
"""The default widths, as multiples of the config's own."""
MEMBERS = 32
EXAMPLES = 64
MOST_MEMBERS = 128
"""Most members per width, where fewer training examples than requested are made up for by more members."""


PASSES_FROM = 4
"""Fewest widths for two passes."""
LEAST_SPLIT = 16
"""Fewest members for two passes."""
LONG = 10
"""A probe of this many times the completions of the run is warned about."""


class Step(NamedTuple):
    """A width that was measured, the `done`-th of `total`. Fitness is the mean reward over the prompts."""

    done: int
    total: int
    width: float
    fitness: float
    start: float
    changed_share: float


class ProbeStoppedError(StoppedError):
    """A probe was interrupted. `result` has the widths measured before, without a recommendation."""

    def __init__(self, result: ProbeResult, signal: int) -> None:
        super().__init__(f"{result.reason}; the widths measured before are shown", signal)
        self.result = result


def probe(
    config: ConfigLike,
    *,
    task: Task | None = None,
    reward: Rewards | None = None,
    sigmas: Sequence[float] | None = None,
    members: int | None = None,
    examples: int = EXAMPLES,
    tell: Callable[[str], None] | None = None,
    on_step: Callable[[Step], None] | None = None,
) -> ProbeResult:
    """Measure a ladder of widths on training examples and recommend one, or none. Loads the model once, writes nothing.

    `sigmas` are values of the config's own setting, `es.sigma` or `es.noise_multiplier`; by default the config's value
    times 1/16 to 16. `members` is the number at each width: by default 32, or up to 128 to make up for fewer training
    examples than `examples`. `tell` receives the cost before anything is generated, and then the seconds, `on_step`
    each width that is done.
    Raises a subclass of EvoalignError. Ctrl-C or SIGTERM, once the unperturbed model was evaluated, raises
    ProbeStoppedError, whose `result` has the widths that were done.
    """
    config = as_config(config) if task is not None else with_form(as_config(config))
    _ = config.es  # raises ConfigError if missing
    widths = _ladder(config, sigmas)
    _check(members, examples, config)
    parts = assemble(config, task, reward)
    try:
        refuse_whole_groups(parts.objective, "the probe")
        rows = batch(len(parts.data.train), examples, config.seed, 0)
        members, tell = members or _enough(len(rows), examples), tell or (lambda line: None)
        for line in (
            *parts.tokens.remarks(typical(parts.task, parts.data)),
            *_cost_lines(config, len(widths), members, len(rows), len(parts.data.train)),
        ):
            tell(line)
        return _measure(parts, rows, widths, members, on_step or (lambda step: None), tell)
    finally:
        parts.close()


def plan(
    config: ConfigLike, *, sigmas: Sequence[float] | None = None, members: int | None = None, examples: int = EXAMPLES
) -> list[str]:
    """Return the cost of a probe, as lines. Loads the task's data but no model."""
    config = as_config(config)
    _ = config.es  # raises ConfigError if missing
    widths = _ladder(config, sigmas)
    _check(members, examples, config)
    task, data = task_and_data(config, None, None)
    task.close()
    count = len(batch(len(data.train), examples, config.seed, 0))
    lines = _cost_lines(config, len(widths), members or _enough(count, examples), count, len(data.train))
    return [*lines, "time: the probe prints an estimate once the unperturbed model is evaluated"]


def _check(members: int | None, examples: int, config: Config) -> None:
    if config.es.optimizer.adapts_noise:
        raise ConfigError(
            f"a probe recommends a width and a learning rate, and es.optimizer {config.es.optimizer.name} has no "
            "learning rate; probe with es.optimizer=sgd and take its width"
        )
    if members is not None and (members < 4 or members % 2):
        raise ConfigError(f"members {members}: a probe needs an even number, at least 4")
    if examples < 1:
        raise ConfigError(f"examples {examples}: a probe needs at least 1")


def _cost_lines(config: Config, widths: int, members: int, prompts: int, train: int) -> list[str]:
    """Return the number of completions, with a warning if the run itself needs far fewer."""
    count, asked = _completions(widths, members, prompts), config.task.asked(train)
    generations = count / (config.es.population_size * asked)
    lines = [
        f"probe: {widths} widths x {members} members x {prompts} prompts: {count:,} completions of at most "
        f"{config.sampling.max_tokens} tokens, as many as {generations:.1f} generations of this config"
    ]
    own = config.es.num_generations
    if generations >= LONG * own:
        lines.append(
            f"warning: that is {generations / own:.0f} times the run's {own} generations; lower --members or "
            "--examples, or give fewer --sigmas"
        )
    return lines


def shares(widths: int, members: int) -> tuple[int, int]:
    """Return the members of each width in the first pass, and of each of two widths in the second."""
    if widths < PASSES_FROM or members < LEAST_SPLIT:
        return members, 0
    first = members // 4 * 2
    return first, (members - first) * widths // 4 * 2


def _completions(widths: int, members: int, prompts: int) -> int:
    first, second = shares(widths, members)
    return (widths * first + 2 * second + 2) * prompts


def _enough(prompts: int, examples: int) -> int:
    """Return an even number of members that make about as many completions as `MEMBERS` on all examples."""
    return min(MOST_MEMBERS, MEMBERS * examples // prompts // 2 * 2)


def _ladder(config: Config, sigmas: Sequence[float] | None) -> tuple[float, ...]:
    widths = tuple(config.es.width * k for k in LADDER) if sigmas is None else tuple(sorted(set(sigmas)))
    if len(widths) < 2 or widths[0] <= 0 or not np.isfinite(widths).all():
        raise ConfigError(f"sigmas {', '.join(map(str, sigmas or ()))}: give two or more positive numbers")
    return widths


def _measure(
    parts: Parts,
    rows: Sequence[int],
    widths: Sequence[float],
    members: int,
    on_step: Callable[[Step], None],
    tell: Callable[[str], None],
) -> ProbeResult:
    """Measure all widths on the same prompts with the same noise, next to the unperturbed model."""
    config, examples = parts.config, [parts.data.train[row] for row in rows]
    prompts = Encoded(parts.task, parts.tokens, examples)
    requests = requests_of(config, range(len(examples)), prompts, 0)
    watching.stage("the unperturbed model, twice")
    own = collect(parts.engine, MEAN_PLAN, requests)
    began = time.perf_counter()  # the first rollout may load kernels
    again = collect(parts.engine, MEAN_PLAN, redrawn(config, requests, 0))
    seconds = (time.perf_counter() - began) * members * len(widths)
    tell(f"about {seconds_text(seconds)}, if members' completions are as long as the unperturbed model's")
    own_P, again_P = (rewarded(parts.objective, parts.task, rollouts, examples) for rollouts in (own, again))
    texts = [text_of(parts.task.prompt(example)) for example in examples]
    golds = tuple(parts.task.gold(parts.task.handed(example)) for example in examples)
    known = scripts([*texts, *(r.text for r in own), *(gold or "" for gold in golds)])
    prompted = _Prompts(requests, examples, own, golds, known)
    start = control_of(own_P, again_P)
    found, question = prompted.shares(own), questions(texts, SHOWN)[0]
    base = Baseline(start.first, start.floor, *found, parts.max_score, len(own), texts[0], own[0].text, question)
    _check_shaping(config.es.shaping, np.asarray(own_P), shares(len(widths), members))
    scored, rungs, stopped = _passes(parts, prompted, base, np.asarray(own_P), widths, members, on_step)
    setting = "sigma" if config.es.sigma is not None else "noise_multiplier"
    advice = recommend(rungs, base, setting, planned=len(widths))
    if stopped is not None and len(rungs) == len(widths):
        advice = nothing("stopped in the second pass")
    short = cut_off(base.truncated_share, config.sampling.max_tokens, "the unperturbed model's completions")
    warnings = [*([] if short is None else [f"{short} and probe again"]), *advice.warnings]
    result = ProbeResult(
        **vars(base),
        **vars(replace(advice, warnings=tuple(warnings))),
        setting=setting,
        rungs=rungs,
        completions=(sum(len(one.scores_MP) for one in scored) + 2) * len(rows),
        members=members,
        planned=len(widths),
        own_width=config.es.width,
    )
    if stopped is not None:
        raise ProbeStoppedError(result, stopped)
    return result


def _check_shaping(name: str, own_P: Scores, counts: Sequence[int]) -> None:
    """Raise ConfigError, before members are paid for, if a custom shaping fails on the probe's numbers of members."""
    random = np.random.Generator(np.random.Philox(key=[0, 0]))
    for count in filter(None, counts):
        try:
            shaping.shape(random.choice(own_P, (count, len(own_P))), name)
        except RewardError as error:
            raise ConfigError(
                f"{error}; the probe shapes {count} members at a time: let it take any number, or set --members"
            ) from error


def _passes(
    parts: Parts,
    prompted: _Prompts,
    base: Baseline,
    own_P: Scores,
    widths: Sequence[float],
    members: int,
    on_step: Callable[[Step], None],
) -> tuple[list[WidthScores], tuple[Width, ...], int | None]:
    """Return the scores of both passes, the measurements of all widths, and the signal that interrupted them."""
    paired, scored, rungs = parts.space.has_pairs, list[WidthScores](), tuple[Width, ...]()
    first, second = shares(len(widths), members)
    everyone = population(first + second, antithetic=paired)
    run = Training(parts.config.es, parts.config.task.asked(len(parts.data.train)), paired)

    def score(width: float, some: Sequence[Member]) -> WidthScores:
        total = len(widths) + (2 if second else 0)
        watching.stage("width", len(scored) + 1, total)
        scored.append(_score(parts, width, some, prompted))
        fitness = float(scored[-1].scores_MP.mean())
        on_step(Step(len(scored), total, width, fitness, base.fitness, scored[-1].changed_share))
        return scored[-1]

    try:
        with interruptible():
            for width in widths:
                score(width, everyone[:first])
            rungs = widths_of(scored, own_P, run)
            if not second:
                return scored, tested(rungs, scored, base, paired=paired), None
            if (k := promising(rungs, base)) is not None:
                pair = [score(widths[j], everyone[first:]) for j in (k - 1, k)]
                again = tested(widths_of(pair, own_P, run, lowest(scored)), pair, base, paired=paired)
                first_pass, far = rungs[k - 1], again[1]
                near = replace(again[0], gain=first_pass.gain, gain_error=first_pass.gain_error, pairs=first_pass.pairs)
                if is_sure(far) and (far.gain or 0.0) > 0:  # the test was of both widths together
                    near = replace(near, chance=far.chance, z=far.z)
                rungs = (*rungs[: k - 1], near, far, *rungs[k + 1 :])
    except KeyboardInterrupt as interrupt:
        number = signal.SIGTERM if interrupt.args else signal.SIGINT
        return scored, rungs or widths_of(scored, own_P, run), number
    return scored, rungs, None


@dataclass(frozen=True, slots=True)
class _Prompts:
    """The requests of every width, with the unperturbed model's rollouts, `own`, and the `known` scripts."""

    requests: Sequence[Request]
    examples: Sequence[Example]
    own: Sequence[Rollout]
    golds: Sequence[str | None]
    known: frozenset[str]

    def shares(self, rollouts: Sequence[Rollout]) -> tuple[float, float]:
        """Return the shares of broken and of truncated completions. Gold answers never count as broken."""
        broken = [
            hacking.is_degenerate(r.text, self.golds[r.request]) or is_foreign(r.text, self.known) for r in rollouts
        ]
        return float(np.mean(broken)), float(np.mean([r.finish_reason == "length" for r in rollouts]))


@dataclass(frozen=True, slots=True)
class WidthScores:
    """Scores and shares of one width's members."""

    width: float
    scores_MP: Scores
    changed_share: float
    broken_share: float
    truncated_share: float
    texts_M: tuple[str, ...]
    """Completions of the first prompt."""


def _score(parts: Parts, width: float, members: Sequence[Member], prompted: _Prompts) -> WidthScores:
    rollouts = collect(parts.engine, Plan(0, width, tuple(members)), prompted.requests)
    scores_MP = judge(parts.objective, group_of(parts.task, prompted.examples, rollouts, len(members)))
    changed = float(np.mean([r.token_ids != prompted.own[r.request].token_ids for r in rollouts]))
    first = tuple(r.text for r in rollouts if r.request == prompted.requests[0].index)
    return WidthScores(width, scores_MP, changed, *prompted.shares(rollouts), first)


class Training(NamedTuple):
    """Settings of the run that decide how far its steps go: `es`, its prompts per generation, and probing in pairs."""

    es: EsConfig
    prompts: int
    paired: bool

    def step(self, scores_MP: Scores) -> tuple[float, float]:
        """Return the eta to recommend, and the eta of z-scores that has the same signal; see `optimizer.reach`."""
        es, ratio = self.es, 1.0
        known = shaping.scale(es.shaping, es.population_size, paired=es.antithetic)
        if known is None:
            known, spread = shaping.measured_scale(scores_MP, es.shaping, self.prompts, paired=es.antithetic)
            ratio = spread / known if known > 0 else 1.0
        pairs = _pair_factor(scores_MP) if es.antithetic and self.paired else math.sqrt(2)
        moved = reach(es, known or 1.0, pairs) or 1.0
        return ETA / moved, ETA * ratio / (pairs if es.antithetic else 1.0)


def _pair_factor(scores_MP: Scores) -> float:
    """Return how much longer pairs make a step (`optimizer.reach`), at least 1: shorter steps are not made up for."""
    fitness_M = shaping.fitness(scores_MP)
    fitness_M = fitness_M - fitness_M.mean()
    variance = float((fitness_M**2).mean())
    rho = float((fitness_M[::2] * fitness_M[1::2]).mean()) / variance if variance > 0 else 0.0
    return math.sqrt(1 - min(0.0, rho))


def lowest(scored: Sequence[WidthScores]) -> Scores:
    """Return the lowest score of each prompt."""
    return np.min([c.scores_MP.min(axis=0) for c in scored], axis=0)


def tested(rungs: Sequence[Width], scored: Sequence[WidthScores], base: Baseline, *, paired: bool) -> tuple[Width, ...]:
    """Return widths with the test for a common direction, made for those together that do not break the model."""
    whole = [fault(w, base) is None for w in rungs]
    found = direction([advantages(c.scores_MP, paired=paired) for c, ok in zip(scored, whole, strict=True) if ok])
    return tuple(
        replace(w, chance=found.chance, z=found.z) if ok and w.gain is not None else w
        for w, ok in zip(rungs, whole, strict=True)
    )


def widths_of(
    scored: Sequence[WidthScores], own_P: Scores, run: Training, lowest_P: Scores | None = None
) -> tuple[Width, ...]:
    """Return the measurements of widths in ascending order, without the test. `lowest_P`: lowest scores seen."""
    if not scored:
        return ()
    start, paired = float(own_P.mean()), run.paired
    floor = min(float((lowest(scored) if lowest_P is None else lowest_P).mean()), start)
    known = [None, *worths([advantages(c.scores_MP, paired=paired) for c in scored])]
    found: list[Width] = []
    for k, (one, worth) in enumerate(zip(scored, known, strict=True)):
        fitness_M = shaping.fitness(one.scores_MP)
        mean, spread = float(fitness_M.mean()), float(fitness_M.std())
        eta, signal_eta = run.step(one.scores_MP)
        # A product of advantages times eta, and the ratio of the two widths.
        scale = signal_eta * one.width / scored[k - 1].width / spread if spread > 0 and k else 0.0
        drift = max(0.0, start - mean) * ETA**2 / run.es.population_size
        order_M = np.argsort(-fitness_M, kind="stable")
        found.append(
            Width(
                width=one.width,
                changed_share=one.changed_share,
                spread=spread,
                drop=start - mean,
                drop_error=rise(one.scores_MP, own_P, paired=paired)[1],
                kept=(mean - floor) / (start - floor) if start > floor else None,
                both_rise=both_rise(one.scores_MP, own_P) if paired else None,
                broken_share=one.broken_share,
                truncated_share=one.truncated_share,
                gain=None if worth is None else float(worth.value * scale - drift),
                gain_error=None if worth is None else float(worth.error * scale),
                chance=None,
                drift=drift,
                eta=eta,
                pairs=len(fitness_M) // 2 if paired else len(fitness_M),
                best_text=one.texts_M[order_M[0]],
                median_text=one.texts_M[order_M[len(order_M) // 2]],
            )
        )
    return tuple(found)
