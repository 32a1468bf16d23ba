# SPDX-License-Identifier: Apache-2.0
"""How wide the noise should be, measured before training: a ladder of sigmas, each tried on the same prompts.

A generation moves the mean by eta * sigma * (1/N) sum_i c_i eps_i with c_i the fitness f_i over its spread s, so the
mean's fitness is expected to rise by eta * E[l_i f_i] / s, where l_i = sigma * (slope of the fitness along eps_i) is
what member i's noise is worth to a mean that moves a small part of the way. l_i is read off the same noise at the next
smaller sigma, (f_i(sigma') - f_-i(sigma')) / 2 * sigma / sigma'. While the fitness is linear in the noise this gain
grows with sigma; once members win for reasons that do not hold nearer to the mean it falls. That, and not how the
members' spread grows, predicts the best sigma of a sweep (benchmarks/probe.py): a broken population can spread most.

Members come in antithetic pairs, whatever the config trains with, because the difference of a pair has no curvature
in it; only `lora.evolve: ab` has no such pairs.

Gains are those of plain SGD. Momentum takes the mean 1 / (1 - momentum) times as far at the same eta, and Adam, whose
first steps have the norm of one member's noise, sqrt(N) times (`optimizer.reach`); the learning rate that is
recommended is smaller by that. (Quickstart, N = 30, eta 0.5: after one generation SGD is 0.11 times one member's noise
away from the start, Adam 0.50 times.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from rich.table import Table

from evoalign import evolve, shaping
from evoalign.checks import hacking
from evoalign.checks.control import Control, control_of, redrawn, rewarded
from evoalign.checks.rules import RISEN, SIGNAL_TO_NOISE
from evoalign.config import NO_ES, Config
from evoalign.errors import ConfigError
from evoalign.optimizer import reach
from evoalign.rewards.objective import judge, refuse_whole_groups
from evoalign.rollouts import collect, group_of
from evoalign.setup import ConfigLike, Parts, Rewards, as_config, assemble
from evoalign.shaping import Scores
from evoalign.tasks import Task
from evoalign.types import MEAN_PLAN, Example, Member, Plan, Request, Rollout, population

LADDER = tuple(2.0**k for k in range(-4, 5))
"""The default ladder, in units of the config's own width: a factor of 16 to both sides."""
MEMBERS = 32
EXAMPLES = 64
ETA = 0.5
"""The step in units of the noise that is recommended for SGD, the paper's (arXiv 2509.24372: alpha = sigma / 2)."""
KEPT = 0.75
"""Least share of the start's fitness, above what broken answers earn, that members have to keep. On a smooth bump,
exp(-|x|^2 / 2 t^2), the gain of a step is largest where members keep exp(-1/2) = 0.61; beyond, they climb back to the
start. The rest is room for the error of the measurement."""

NEAR = 0.9
"""Of widths whose gains are as close as this the middle one is taken: it is safest from an error to either side."""


@dataclass(frozen=True, slots=True)
class Rung:
    """One width of the ladder, `es.sigma` or `es.noise_multiplier`. Fitness is the mean reward over the prompts.

    `changed_share` completions differ from the unperturbed model's; `spread` is the standard deviation of the members'
    fitness; `drop` how far their mean lies below the unperturbed model's; `kept` the share of that model's fitness,
    above the lowest seen, that they keep; `broken_share` completions are empty, looping, cut off or role-marked.
    `gain` is the fitness that one generation at eta 0.5 is expected to bring.
    """

    width: float
    changed_share: float
    spread: float
    drop: float
    kept: float
    broken_share: float
    gain: float


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a probe measured. `width` and `learning_rate` are None where no width gives a signal; `reason` says why.

    `setting` is sigma or noise_multiplier; `fitness` and `broken_share` are the unperturbed model's, `noise_floor` the
    standard deviation of its fitness when it is scored again; `completions` counts all that were asked for.
    """

    setting: str
    fitness: float
    broken_share: float
    noise_floor: float
    rungs: tuple[Rung, ...]
    width: float | None
    learning_rate: float | None
    reason: str
    warnings: tuple[str, ...]
    completions: int

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


def probe(
    config: ConfigLike,
    *,
    task: Task | None = None,
    reward: Rewards | None = None,
    sigmas: Sequence[float] | None = None,
    members: int = MEMBERS,
    examples: int = EXAMPLES,
    tell: Callable[[str], None] | None = None,
) -> ProbeResult:
    """Try a ladder of widths on training examples and recommend one. Loads the model once, writes nothing.

    `sigmas` are values of the config's own setting, `es.sigma` or `es.noise_multiplier`; None is the config's value
    times 1/16 to 16. `tell` is given the cost before anything is generated. Raises a subclass of EvoalignError.
    """
    config = as_config(config)
    if config.es_ is None:
        raise ConfigError(f"{NO_ES}; probe measures the noise of ES and is for ES alone, not for GRPO")
    widths = _ladder(config, sigmas)
    if members < 4 or members % 2:
        raise ConfigError(f"members {members}: a probe needs an even number, at least 4")
    if examples < 1:
        raise ConfigError(f"examples {examples}: a probe needs at least 1")
    parts = assemble(config, task, reward)
    try:
        refuse_whole_groups(parts.objective, "the probe")
        rows = evolve.batch(len(parts.data.train), examples, config.seed, 0)
        if tell is not None:
            tell(_cost(config, len(parts.data.train), len(widths), members, len(rows)))
        return _measure(parts, rows, widths, members)
    finally:
        parts.close()


def table(result: ProbeResult) -> Table:
    """One row a width, the recommended one marked."""
    shown = Table("", result.setting, "changed", "broken", "spread", "drop", "kept", "gain a generation")
    for column in shown.columns[1:]:
        column.justify = "right"
    for r in result.rungs:
        mark = "*" if r.width == result.width else ""
        shown.add_row(mark, f"{r.width:.4g}", f"{r.changed_share:.1%}", f"{r.broken_share:.1%}", f"{r.spread:.4g}",
                      f"{r.drop:+.4g}", f"{r.kept:.0%}", f"{r.gain:+.4g}")  # fmt: skip
    return shown


def lines(result: ProbeResult) -> list[str]:
    """The start, the recommendation and the warnings, in words."""
    start = f"unperturbed: fitness {result.fitness:.4g}, noise floor {result.noise_floor:.2g}"
    return [
        f"{start}, broken {result.broken_share:.1%}",
        result.reason,
        *(f"warning: {line}" for line in result.warnings),
    ]


def _ladder(config: Config, sigmas: Sequence[float] | None) -> tuple[float, ...]:
    widths = tuple(config.es.width * k for k in LADDER) if sigmas is None else tuple(sorted(set(sigmas)))
    if len(widths) < 2 or widths[0] <= 0 or not np.isfinite(widths).all():
        raise ConfigError(f"sigmas {', '.join(map(str, sigmas or ()))}: give two or more positive numbers")
    return widths


def _cost(config: Config, total: int, widths: int, members: int, prompts: int) -> str:
    count = (widths * members + 2) * prompts
    own = config.es.population_size * min(config.task.batch_size or total, total)
    return (
        f"probe: {widths} widths x {members} members x {prompts} prompts: {count:,} completions of at most "
        f"{config.sampling.max_tokens} tokens, as many as {count / own:.1f} generations of this config"
    )


def _measure(parts: Parts, rows: Sequence[int], widths: Sequence[float], members: int) -> ProbeResult:
    """All rungs on the same prompts with the same noise, told against the unperturbed model."""
    config, examples = parts.config, [parts.data.train[row] for row in rows]
    prompts = [parts.tokens.encode(parts.task.prompt(example)) for example in examples]
    requests = evolve.requests_of(config, range(len(prompts)), prompts, 0)
    paired = parts.space.has_pairs
    everyone = population(members, antithetic=paired)
    own, redrawn_ = (collect(parts.engine, MEAN_PLAN, asked) for asked in (requests, redrawn(config, requests, 0)))
    start = control_of(*(rewarded(parts.objective, parts.task, rs, examples) for rs in (own, redrawn_)))
    climbs = [_climb(parts, width, everyone, requests, examples, own) for width in widths]
    lowest_P = np.min([c.scores_MP.min(axis=0) for c in climbs], axis=0)
    floor = min(float(lowest_P.mean()), start.first)
    rungs = tuple(
        _rung(climb, climbs[max(0, k - 1)], start.first, floor, paired=paired) for k, climb in enumerate(climbs)
    )
    eta = ETA / reach(config.es)
    width, reason, warnings = recommend(rungs, _setting(config), start, parts.max_score, eta, _broken(own))
    by_sigma = config.es.sigma is not None
    return ProbeResult(
        setting=_setting(config),
        fitness=start.first,
        broken_share=_broken(own),
        noise_floor=start.floor,
        rungs=rungs,
        width=width,
        learning_rate=None if width is None else eta * width if by_sigma else eta,
        reason=reason,
        warnings=warnings,
        completions=(len(widths) * members + 2) * len(rows),
    )


@dataclass(frozen=True, slots=True)
class _Climb:
    """What one width's members came to, before it is told against the others."""

    width: float
    scores_MP: Scores
    changed_share: float
    broken_share: float


def _climb(
    parts: Parts,
    width: float,
    members: Sequence[Member],
    requests: Sequence[Request],
    examples: Sequence[Example],
    own: Sequence[Rollout],
) -> _Climb:
    rollouts = collect(parts.engine, Plan(0, width, tuple(members)), requests)
    scores_MP = judge(parts.objective, group_of(parts.task, examples, rollouts, len(members)))
    changed = float(np.mean([r.token_ids != own[r.request].token_ids for r in rollouts]))
    return _Climb(width, scores_MP, changed, _broken(rollouts))


def _rung(climb: _Climb, nearer: _Climb, start: float, floor: float, *, paired: bool) -> Rung:
    """`nearer` is the climb of the next smaller width; the lowest is told against itself."""
    fitness_M = shaping.fitness(climb.scores_MP)
    spread = float(fitness_M.std())
    advantage, slope = (_advantage(shaping.fitness(c.scores_MP), paired=paired) for c in (climb, nearer))
    worth = float(np.mean(advantage * slope)) * climb.width / nearer.width
    return Rung(
        width=climb.width,
        changed_share=climb.changed_share,
        spread=spread,
        drop=start - float(fitness_M.mean()),
        kept=(float(fitness_M.mean()) - floor) / (start - floor) if start > floor else 1.0,
        broken_share=climb.broken_share,
        gain=ETA * worth / spread if spread > 0 else 0.0,
    )


def _advantage(fitness_M: Scores, *, paired: bool) -> Scores:
    """Half the difference of each pair; against the population's mean where there are no pairs."""
    return (fitness_M[0::2] - fitness_M[1::2]) / 2 if paired else fitness_M - fitness_M.mean()


def _broken(rollouts: Sequence[Rollout]) -> float:
    return float(np.mean([hacking.is_broken(r.text, r.finish_reason) for r in rollouts]))


def _setting(config: Config) -> str:
    return "sigma" if config.es.sigma is not None else "noise_multiplier"


def recommend(
    rungs: Sequence[Rung], setting: str, start: Control, max_score: float, eta: float = ETA, broken: float = 0.0
) -> tuple[float | None, str, tuple[str, ...]]:
    """The width of the largest gain among those whose members are not broken, the reason, and warnings.

    `eta` is what takes the config's optimizer as far as `ETA` takes plain SGD; `broken` is the share of the
    unperturbed model's completions that are broken.
    """
    # A reward without a bottom makes any model look whole beside the widest noise: then the texts tell.
    whole = [r for r in rungs if r.kept >= KEPT and r.broken_share - broken <= RISEN]
    usable = [r for r in whole if r.gain > 0 and r.spread > SIGNAL_TO_NOISE * start.floor]
    if not usable:
        return None, f"no {setting} of the ladder gives a signal to learn from", (_no_signal(rungs, whole, start),)
    tied = [r for r in usable if r.gain >= NEAR * max(u.gain for u in usable)]
    best = tied[(len(tied) - 1) // 2]
    rate = f"{eta * best.width:.4g}" if setting == "sigma" else f"{eta:.4g}"
    same = "" if eta == ETA else f", with this optimizer as far as {ETA:g} with sgd"
    reason = (
        f"recommended: es.{setting} {best.width:.4g}, es.learning_rate {rate} (eta {eta:.3g}{same}): in the "
        f"middle of those within {NEAR:.0%} of the largest gain ({best.gain:.2g} a generation) among widths whose "
        f"members keep {KEPT:.0%} of the start's fitness and write few more broken completions; "
        f"{best.changed_share:.0%} of their completions change"
    )
    warnings: list[str] = []
    if best is rungs[0] or best is rungs[-1]:
        side = ("smallest", "smaller") if best is rungs[0] else ("largest", "larger")
        warnings.append(f"it is the {side[0]} of the ladder; try {side[1]} ones too with --sigmas")
    if start.first >= max_score:
        warnings.append("the unperturbed model earns the maximum already: there is nothing to learn; use harder data")
    return best.width, reason, tuple(warnings)


def _no_signal(rungs: Sequence[Rung], whole: Sequence[Rung], start: Control) -> str:
    low, high = rungs[0], rungs[-1]
    if not whole:
        return (
            f"the smallest width, {low.width:.4g}, already breaks the model (members keep {low.kept:.0%} of its "
            f"fitness, {low.broken_share:.0%} of their completions are broken); try smaller ones with --sigmas"
        )
    if all(r.spread == 0 for r in rungs):
        if high.changed_share == 0:
            return f"the largest width, {high.width:.4g}, changes no completion; try larger ones with --sigmas"
        return (
            f"completions change (up to {max(r.changed_share for r in rungs):.0%}) and all earn the same: the reward "
            "does not tell them apart; give partial credit, easier examples or more of them (--examples)"
        )
    coarse = _too_coarse(rungs, whole, start)
    if coarse is not None:
        return coarse
    if start.floor > 0 and all(r.spread <= SIGNAL_TO_NOISE * start.floor for r in whole):
        return (
            f"the spread of the members is at the noise floor of {start.floor:.2g}; use more examples (--examples), or "
            "lower sampling.temperature"
        )
    return (
        "what members gain at one width they do not gain at the next smaller one: chance; use more members (--members) "
        "and examples (--examples)"
    )


def _too_coarse(rungs: Sequence[Rung], whole: Sequence[Rung], start: Control) -> str | None:
    """Where the ladder steps over what is between no signal and the widest members that are not broken."""
    for near, far in pairwise(rungs):
        telling = far.spread > SIGNAL_TO_NOISE * start.floor
        if near.spread == 0 and telling and not any(r.width > far.width for r in whole):
            what = (
                f"keeps {far.kept:.0%} of the start's fitness"
                if far.kept < KEPT
                else "is the first that tells them apart"
            )
            return (
                f"members of width {near.width:.4g} all earn the same ({near.changed_share:.0%} of their completions "
                f"change), and {far.width:.4g}, the next, {what}; try widths between {near.width:.4g} and "
                f"{far.width:.4g} with --sigmas"
            )
    return None
