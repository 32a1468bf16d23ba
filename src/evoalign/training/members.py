# SPDX-License-Identifier: Apache-2.0
"""A member of any generation of a run, from the base model and the journal alone: the mean, and the member's noise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from evoalign.engines import weights_hash
from evoalign.errors import ConfigError
from evoalign.rundir.checkpoint import Mark
from evoalign.rundir.journal import Log, Recorded
from evoalign.setup import Served
from evoalign.training import saving
from evoalign.training.replay import rebuilt
from evoalign.types import Member, Plan


def recorded_of(log: Log, generation: int, member: int) -> Recorded:
    """The generation, counted from 0, whose population has a member. Raises ConfigError where there is none."""
    count = len(log.generations)
    if not 0 <= generation < count:
        known = f"its generations are 0 to {count - 1}" if count else "it has no generation yet"
        raise ConfigError(f"{log.path} has no members of generation {generation}: {known}")
    found = log.generations[generation]
    if not 0 <= member < len(found.update.members):
        raise ConfigError(
            f"{log.path} has no member {member} in generation {generation}: its members are 0 to "
            f"{len(found.update.members) - 1}"
        )
    return found


def state_of(served: Served, recorded: Recorded, member: Member) -> Iterator[tuple[str, torch.Tensor]]:
    """The member's float32 tensors by the names of the mean, on the CPU, one at a time.

    The engine's mean has to be that around which the generation was drawn.
    """
    update, layout = recorded.update, served.layout
    plan = Plan(update.generation, update.sigma, update.members)
    moving = {t.name for t in layout.tensors}
    for name, mean in served.engine.state():
        yield name, served.space.perturbed(layout, name, mean, plan, member) if name in moving else mean


def save(log: Log, folder: Path, generation: int, member: int, model: str | None = None) -> Mark:
    """Rebuild a member and save it as a mean is saved, and say where it stands: `weights_hash` is its own.

    `model` is where the base model is, if that has moved. Raises ConfigError for a member that does not exist,
    JournalError and ResumeError where the mean does not come out again.
    """
    found = recorded_of(log, generation, member)
    with rebuilt(log, generation=generation, model=model) as (served, place):
        chosen = found.update.members[member]
        own = Mark(generation, weights_hash(state_of(served, found, chosen)), place.journal)
        saving.save(served, folder, own, state=lambda: state_of(served, found, chosen))
        return own
