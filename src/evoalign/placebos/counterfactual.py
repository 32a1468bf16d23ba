# SPDX-License-Identifier: Apache-2.0
"""A run with other coefficients: the updates of its journal with the same noise and other numbers.

The first step of a counterfactual is exact: the same members were evaluated around that mean, with the same scores.
Later steps are conditional on the recorded path: scores were measured around the run's own means. A placebo (`shuffle`)
needs no scores: it is what the noise alone does, with steps of exactly the same expected length.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import numpy as np

from evoalign import shaping
from evoalign.checks.distance import moved, start_of
from evoalign.cost.budget import Cost, Meter
from evoalign.cost.estimate import placebos_in_a_tenth
from evoalign.errors import ConfigError, ModelError, StoppedError, shown
from evoalign.evaluation import Evaluation
from evoalign.placebos.estimates import Distances, Ends, Placebos, Split, Whole, expected_distance, split
from evoalign.report import watching
from evoalign.rewards.objective import aim_of
from evoalign.rollouts import lengths_of
from evoalign.rundir.journal import Log, Recorded
from evoalign.setup import Parts, Served
from evoalign.types import Member, Update

Kind: TypeAlias = Literal["shuffle", "flip", "half", "member", "shaping"]
FORMS = "shuffle, flip, half, member K or shaping NAME"
CONDITIONAL = (
    "the first step is exact (the same members were evaluated there); later ones are conditional on the recorded path: "
    "scores were measured around the run's own means"
)


@dataclass(frozen=True, slots=True)
class Counterfactual:
    """Other coefficients for the generations of a run of shaping `own`.

    - `shuffle`: permuted over the noises, see `shuffled`
    - `flip`: with all signs turned
    - `half`: as if only the first half of the noises had been drawn: their fitness is shaped again, with N halved
    - `member`: zero except for member number `member` (from 0); N is unchanged, so that first steps add up
    - `shaping`: the recorded fitness shaped by `shaping`

    `centered` needs scores by prompt, which a journal does not have, so it is refused unless it is the run's own
    shaping. Half of a centred run has the recorded coefficients minus their mean over the half.
    """

    kind: Kind
    own: str
    seed: int = 0
    member: int = 0
    shaping: str = ""

    def __str__(self) -> str:
        details = {"shuffle": f", seed {self.seed}", "member": f" {self.member}", "shaping": f" {self.shaping}"}
        return self.kind + details.get(self.kind, "")

    def update(self, recorded: Recorded) -> Update:
        """Return a generation's update with these coefficients; only `half` has fewer members."""
        update = recorded.update
        members, c = update.members, list(update.coefficients)
        if self.kind == "shuffle":
            c = shuffled(update, self.seed)
        elif self.kind == "flip":
            c = [-x for x in c]
        elif self.kind == "member":
            c = [x if i == self.member else 0.0 for i, x in enumerate(c)]
        elif self.kind == "shaping" and self.shaping not in shaping.BY_PROMPT:
            c = _shaped(recorded.fitness_M, self.shaping)
        elif self.kind == "half":
            kept = first_half(members)
            members = tuple(members[i] for i in kept)
            own_C = np.array([c[i] for i in kept])
            by_prompt = self.own in shaping.BY_PROMPT
            c = list(own_C - own_C.mean()) if by_prompt else _shaped([recorded.fitness_M[i] for i in kept], self.own)
        return replace(update, members=members, coefficients=tuple(map(float, c)))


def parse(text: str, log: Log, seed: int = 0) -> Counterfactual:
    """Parse a counterfactual: `shuffle`, `flip`, `half`, `member K`, `shaping NAME`.

    Raises ConfigError if it is unknown, or not possible for this journal.
    """
    name, _, rest = " ".join(text.split()).partition(" ")
    own = str(log.header.config["es"]["shaping"])
    kind = next((kind for kind in get_args(Kind) if kind == name), None)
    if kind is None or bool(rest) != (kind in ("member", "shaping")):
        raise ConfigError(f"there is no counterfactual {shown(text)}; use {FORMS}")
    if not 0 <= seed < 2**63:
        raise ConfigError(f"the seed of a counterfactual is a whole number from 0 to 2^63 - 1, not {seed}")
    members = log.generations[0].update.members if log.generations else ()
    ties = kind == "shaping" and rest == "truncation"
    if (kind in ("half", "member") or ties) and log.header.config["es"]["optimizer"]["name"] in ("cma", "sep_cma"):
        raise ConfigError(
            f"counterfactual {kind}: CMA-ES ranks whole generations, and parts or ties of one give no step; "
            "use shuffle, flip or another shaping"
        )
    if kind == "member":
        if not (rest.isdecimal() and rest.isascii() and len(rest) < 10 and int(rest) < len(members)):
            raise ConfigError(f"counterfactual member {shown(rest)}: use one of the members 0 to {len(members) - 1}")
        return Counterfactual(kind, own, member=int(rest))
    if kind == "shaping":
        if rest not in shaping.SHAPINGS:
            raise ConfigError(f"there is no shaping {shown(rest)}; use {', '.join(shaping.SHAPINGS)}")
        if rest in shaping.BY_PROMPT and rest != own:
            others = ", ".join(name for name in shaping.SHAPINGS if name not in shaping.BY_PROMPT)
            raise ConfigError(
                f"shaping {rest} needs scores by prompt, and a journal has each member's mean over prompts (the run's "
                f"own shaping is {own}); use {others}"
            )
        return Counterfactual(kind, own, shaping=rest)
    if kind == "half" and own not in shaping.SHAPINGS:  # code named by a journal is never run
        raise ConfigError(
            f"half needs the shaping of the run again, and {shown(own)} is no built-in one; use another counterfactual"
        )
    if kind == "half" and members and len(first_half(members)) < 2:
        raise ConfigError(
            f"half of a population of {len(members)} has fewer than two members, which cannot be ranked; use another "
            "counterfactual"
        )
    return Counterfactual(kind, own, seed)


def shuffled(update: Update, seed: int) -> list[float]:
    """Return coefficients permuted over the noises, by random numbers of `seed` and the generation alone.

    An antithetic pair keeps its two coefficients, swapped at random: the pair's weight c(+) - c(-) keeps its size and
    gets a random sign, so the sum of squared weights, which is the step's length, is the run's. A permutation over
    members would change it by the correlation within pairs. The p of placebos is exact if, without signal, noises are
    exchangeable and the weights of pairs symmetric around 0.
    """
    c, random = update.coefficients, np.random.Generator(np.random.Philox(key=[seed, update.generation]))
    groups: dict[int, list[int]] = {}
    for i, member in enumerate(update.members):
        groups.setdefault(member.noise, []).append(i)
    found = list(c)
    alone, pairs = ([group for group in groups.values() if len(group) == size] for size in (1, 2))
    for (to,), source in zip(alone, random.permutation(len(alone)), strict=True):
        found[to] = c[alone[source][0]]
    swaps = random.random(len(pairs)) < 0.5
    for to, source, swap in zip(pairs, random.permutation(len(pairs)), swaps, strict=True):
        first, second = pairs[source]
        found[to[0]], found[to[1]] = (c[second], c[first]) if swap else (c[first], c[second])
    return found


def first_half(members: Sequence[Member]) -> list[int]:
    """Return the indices of the members of the first half of the noises, rounded down, in whole pairs."""
    noises = list(dict.fromkeys(member.noise for member in members))
    kept = set(noises[: len(noises) // 2])
    return [i for i, member in enumerate(members) if member.noise in kept]


def _shaped(fitness_M: Sequence[float], name: str) -> list[float]:
    return [float(c) for c in shaping.shape(np.asarray(fitness_M, dtype=np.float64)[:, None], name)]


class Follower:
    """Moves an engine's mean from the start of a journal through its generations, with any coefficients.

    It overwrites the engine's mean. Raises ModelError if the start is not known.
    """

    def __init__(self, served: Served, log: Log, generations: int) -> None:
        self.served, self.log, self.generations = served, log, log.generations[:generations]
        self.start = start_of(served)

    def back(self) -> None:
        """Restore the starting mean and the optimizer's state. Raises ModelError if it is another mean."""
        self.served.engine.load(self.start)
        found, wanted = self.served.engine.fingerprint(), self.log.header.weights_hash
        if found != wanted:
            raise ModelError(
                f"the files of model {self.served.config.model.name} do not give the mean that the run started from "
                f"(weights_hash {found[:12]}, and {wanted[:12]} in the journal)"
            )

    def follow(self, other: Counterfactual) -> str:
        """Replay all generations with other coefficients; return the final weights_hash."""
        return self.replay(lambda recorded: self.served.engine.apply(other.update(recorded)))

    def replay(self, apply: Callable[[Recorded], object]) -> str:
        """Apply all generations from the start; return the final weights_hash."""
        self.back()
        with watching.phase("replaying", len(self.generations)) as work:
            for recorded in self.generations:
                apply(recorded)
                work.done += 1
        return self.served.engine.fingerprint()

    def distance(self) -> float:
        """Return the distance of the mean from the start."""
        return moved(self.served, self.start)

    def expected_distance(self) -> float | None:
        """Return the expected distance of a random walk with the run's step lengths."""
        return expected_distance([r.update for r in self.generations], self.served.layout, self.served.config.es)


def choice_of(parts: Served, log: Log, *, validates: bool) -> str | None:
    """Return a sentence on what a run chose by its own rewards, which placebos do not choose anew; None if nothing.

    `validates`: the run has a validation split.
    """
    config, ending, chosen, choices = parts.config, log.ending, list[str](), list[str]()
    if ending is not None and ending.reason == "plateau":
        chosen.append(f"its end after {log.sealed} of {config.es.num_generations} generations (stopping.patience)")
    if config.es.sigma_schedule.name == "plateau":
        chosen.append("its sigma (es.sigma_schedule plateau)")
    if chosen:
        choices.append(
            f"the run chose {' and '.join(chosen)} by its own validation rewards, where they looked good; placebos "
            "take the same steps and end there too, so p and interval favour the run"
        )
    if validates and config.checkpoint.keep_best and config.evaluation.every:
        choices.append(
            "run and placebos are compared at the last mean, not at the best one by the validation split "
            "(checkpoint.keep_best), whose gain would include the choice"
        )
    return "; ".join(choices) or None


def count_of(parts: Parts, log: Log) -> int:
    """Return how many placebos to measure at the end of training; none for a run that never moved."""
    wanted = parts.config.checks.placebo
    if not any(any(recorded.update.coefficients) for recorded in log.generations):
        return 0
    if wanted is not None:
        return wanted
    lengths = (lengths_of(parts.task, parts.tokens, examples) for examples in (parts.data.train, parts.data.test))
    return placebos_in_a_tenth(parts.config, parts.engine.specs(), parts.layout, *lengths)


def after_training(
    parts: Parts,
    log: Log,
    before: Evaluation,
    after: Evaluation,
    count: int,
    interrupted: Callable[[], int | None],
    evaluate: Callable[[], tuple[Evaluation, Cost]],
    meter: Meter,
    spend: Callable[[Cost], None],
) -> Placebos:
    """Measure placebos with the seeds 0, 1, ... of a run whose final mean is in the engine; overwrites that mean.

    `evaluate` runs the test split; `spend` receives all costs. `interrupted` returns the signal that asked to stop;
    raises StoppedError then, since fewer placebos than configured are not reported.
    """
    follower = Follower(parts, log, log.sealed)
    real, distances, found = follower.distance(), list[float](), list[Evaluation]()
    for seed in range(count):
        if (signal := interrupted()) is not None:
            raise StoppedError("stopped", signal)
        start = time.perf_counter()
        watching.stage("placebo", seed + 1, count)
        follower.follow(parse("shuffle", log, seed))
        distances.append(follower.distance())
        spend(meter.followed([recorded.update for recorded in follower.generations], time.perf_counter() - start))
        reached, cost = evaluate()
        spend(cost)
        found.append(reached)
    distance = Distances(real, follower.expected_distance(), tuple(distances))
    note = choice_of(parts, log, validates=bool(parts.data.validation))
    return of_evaluations(before, after, found, distance, len(follower.generations), note=note)


def of_evaluations(
    before: Evaluation,
    real: Evaluation,
    placebos: Sequence[Evaluation],
    distances: Distances,
    generation: int,
    flip: Evaluation | None = None,
    off_task: Sequence[Evaluation] = (),
    note: str | None = None,
) -> Placebos:
    """Combine evaluations; `off_task` is empty, or in the order before, real, placebos and, with `flip`, flip."""
    trained, count = aim_of(real.measures), len(placebos)
    whole = [e.measures[trained] for e in (before, real, *placebos)]
    columns = _columns([before, real, *placebos])
    return Placebos(
        generation=generation,
        seeds=tuple(range(count)),
        reward=_split(before, real, placebos, flip),
        distance=distances,
        measures={name: ends.mean for name, ends in columns.items()},
        off_task=_split(off_task[0], off_task[1], off_task[2 : 2 + count], flip and off_task[-1]) if off_task else None,
        fitness=None if trained == "reward" else Whole(whole[0], whole[1], tuple(whole[2:]), trained),
        columns=columns,
        off_columns=_columns(off_task[: 2 + count]) if off_task else {},
        note=note,
    )


def _split(before: Evaluation, real: Evaluation, placebos: Sequence[Evaluation], flip: Evaluation | None) -> Split:
    rewards = [e.measures_E["reward"] for e in (before, real, *placebos)]
    return split(rewards[0], rewards[1], rewards[2:], flip and flip.measures_E["reward"])


def _columns(found: Sequence[Evaluation]) -> dict[str, Ends]:
    """Return each measure that all evaluations have, of those before training, after it, and of the placebos."""
    known = [name for name in found[1].measures if all(name in e.measures for e in found)]
    values = {name: [e.measures[name] for e in found] for name in known}
    return {name: Ends(of[0], of[1], tuple(of[2:])) for name, of in values.items()}
