# SPDX-License-Identifier: Apache-2.0
"""What a run would have done with other coefficients: its journal's updates with the same noise and other numbers.

The first step of a counterfactual is exact: the same members were really evaluated around that mean, so that their
scores are those that the other run would have had. Later steps are conditional on the recorded path: the scores were
measured around the real means and not around the counterfactual ones. A placebo (`shuffle`) needs no scores: it is
what the noise alone does, with steps of the size that the real ones had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import numpy as np

from evoalign import shaping
from evoalign.config.es import BY_PROMPT
from evoalign.errors import ConfigError, shown
from evoalign.rundir.journal import Log, Recorded
from evoalign.types import Member, Update

Kind: TypeAlias = Literal["shuffle", "flip", "half", "member", "shaping"]
FORMS = "shuffle, flip, half, member K or shaping NAME"
CONDITIONAL = (
    "the first step is exact (the same members were really evaluated there); later ones are conditional on the "
    "recorded path: scores were measured around the run's own means"
)


@dataclass(frozen=True, slots=True)
class Counterfactual:
    """Other coefficients for the generations of a run of shaping `own`.

    `shuffle`: those of each generation permuted over its members, by a permutation of `seed` and the generation alone.
    `flip`: all signs turned. `half`: as if only the first half of the members, in whole antithetic pairs, had been
    drawn: their recorded fitness shaped anew, N the half's size. `member`: only that of member number `member` (from 0)
    is kept and N is unchanged, so that the first steps of all members add up to the real first step. `shaping`: the
    recorded fitness shaped by `shaping`.

    A journal has no scores by prompt, which `centered` needs: that shaping is refused where it is not the run's own,
    whose coefficients are then the recorded ones. Half of a centred run takes the recorded coefficients less their mean
    over the half: the spread that divided them stays that of all members.
    """

    kind: Kind
    own: str
    seed: int = 0
    member: int = 0
    shaping: str = ""

    def __str__(self) -> str:
        said = {"shuffle": f", seed {self.seed}", "member": f" {self.member}", "shaping": f" {self.shaping}"}
        return self.kind + said.get(self.kind, "")

    def update(self, recorded: Recorded) -> Update:
        """The update of a generation with these coefficients. Its members are fewer with `half` alone."""
        update = recorded.update
        c, n = update.coefficients, len(update.members)
        if self.kind == "half":
            kept = first_half(update.members)
            members = tuple(update.members[i] for i in kept)
            return replace(update, members=members, coefficients=self._of_half(recorded, kept))
        coefficients = {
            "shuffle": lambda: [c[i] for i in permutation(self.seed, update.generation, n)],
            "flip": lambda: [-x for x in c],
            "member": lambda: [x if i == self.member else 0.0 for i, x in enumerate(c)],
            "shaping": lambda: c if self.shaping in BY_PROMPT else _shaped(recorded.fitness_M, self.shaping),
        }[self.kind]()
        return replace(update, coefficients=tuple(map(float, coefficients)))

    def _of_half(self, recorded: Recorded, kept: Sequence[int]) -> tuple[float, ...]:
        if self.own not in BY_PROMPT:
            return tuple(_shaped([recorded.fitness_M[i] for i in kept], self.own))
        c = np.array([recorded.update.coefficients[i] for i in kept])
        return tuple(map(float, c - c.mean()))


def parse(text: str, log: Log, seed: int = 0) -> Counterfactual:
    """A counterfactual of a journal from its name: `shuffle`, `flip`, `half`, `member K`, `shaping NAME`.

    Raises ConfigError for one that is not known, or that this run cannot have.
    """
    kind, _, rest = " ".join(text.split()).partition(" ")
    own = str(log.header.config["es"]["shaping"])
    if kind not in get_args(Kind) or bool(rest) != (kind in ("member", "shaping")):
        raise ConfigError(f"there is no counterfactual {shown(text)}; use {FORMS}")
    if not 0 <= seed < 2**63:
        raise ConfigError(f"a seed of a counterfactual is a whole number from 0 to 2^63 - 1, not {seed}")
    members = log.generations[0].update.members if log.generations else ()
    if kind == "member":
        _check_member(rest, len(members))
        return Counterfactual("member", own, member=int(rest))
    if kind == "shaping":
        _check_shaping(rest, own)
        return Counterfactual("shaping", own, shaping=rest)
    if kind == "half" and members and len(first_half(members)) < 2:
        raise ConfigError(
            f"half of a population of {len(members)} is one member or none, whose score compares with nothing; "
            "use another counterfactual"
        )
    return Counterfactual("flip" if kind == "flip" else "half" if kind == "half" else "shuffle", own, seed)


def permutation(seed: int, generation: int, members: int) -> list[int]:
    """Of a generation's members, a pure function of the seed and the generation: another one in each."""
    order = np.random.Generator(np.random.Philox(key=[seed, generation])).permutation(members)
    return [int(i) for i in order]


def first_half(members: Sequence[Member]) -> list[int]:
    """Places of the members of the first half of the noises, rounded down: the two of a pair share theirs."""
    noises = list(dict.fromkeys(member.noise for member in members))
    kept = set(noises[: len(noises) // 2])
    return [i for i, member in enumerate(members) if member.noise in kept]


def _shaped(fitness_M: Sequence[float], name: str) -> list[float]:
    return [float(c) for c in shaping.shape(np.asarray(fitness_M, dtype=np.float64)[:, None], name)]


def _check_member(text: str, members: int) -> None:
    if not (text.isdecimal() and text.isascii() and len(text) < 10 and int(text) < members):
        raise ConfigError(f"counterfactual member {shown(text)}: give one of the members 0 to {members - 1}")


def _check_shaping(name: str, own: str) -> None:
    if name not in shaping.SHAPINGS:
        raise ConfigError(f"there is no shaping {shown(name)}; use {', '.join(shaping.SHAPINGS)}")
    if name in BY_PROMPT and name != own:
        raise ConfigError(
            f"shaping {name} needs the scores by prompt, and a journal has each member's mean over prompts (the run's "
            f"own shaping is {own}); use {', '.join(s for s in shaping.SHAPINGS if s not in BY_PROMPT)}"
        )
