# SPDX-License-Identifier: Apache-2.0
"""One number for all that a member answered: what no mean over completions says, such as macro-F1 or calibration.

ES needs nothing but a number for each member, so that `task.fitness` may be any function of a whole set of answers. It
takes the place of the mean of the rewards, which are still counted, shown and evaluated. A member's scores are then a
single column, [members, 1], and not the same number for each prompt: the mean over prompts of one score is that score
to the bit, and the journal has what the function gave.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from evoalign.errors import ConfigError, RewardError
from evoalign.plugins import FAILURES, load_object, raised
from evoalign.rewards.functions import failure, finite, fresh, shown
from evoalign.rewards.objective import Group, Objective
from evoalign.shaping import Scores
from evoalign.types import Example

PREFIX = "fitness/"
"""Of the measure of an evaluation: what the function gives for the answers of the mean."""


class FitnessFunction:
    """`fitness(completions, examples) -> float` of the user's own. Raises ConfigError where it is none.

    Completions are texts, cleaned as for rewards; examples are the rows, one each, in the same order.
    """

    def __init__(self, path: str) -> None:
        self.function: Any = load_object(path, "task.fitness")
        self.name = path.rpartition(":")[2]
        self.measure = measure_of(path)
        wrong = self._wrong()
        if wrong:
            raise ConfigError(f"task.fitness: {path} {wrong}; write def {self.name}(completions, examples) -> float")

    def _wrong(self) -> str:
        if not callable(self.function):
            return "is not a function"
        if inspect.iscoroutinefunction(self.function):
            return "is async, and a fitness is called for one member after the other"
        try:
            inspect.signature(self.function).bind([], [])
        except TypeError:
            return "does not take completions and examples, and nothing else"
        except ValueError:  # of C, without a signature that can be read
            pass
        return ""

    def value(self, texts: Sequence[str], examples: Sequence[Example]) -> float:
        """That of one set of answers. Raises RewardError where it fails, or gives no finite number."""
        who = f"task.fitness {self.name}"
        try:
            found = self.function(list(texts), [fresh(example) for example in examples])
        except FAILURES as error:
            trace = "".join(traceback.format_exception(error))
            failed = failure("raised", who, trace=trace, texts=texts)
            raise RewardError(f"{who} failed: {raised(error)}; fix it", failed) from error
        number = finite(found)
        if number is None:
            raise RewardError(
                f"{who} gave {shown(found)} for {len(texts)} answers; a fitness is one finite number, float(x) of a "
                "truth value",
                failure("value", who, texts=texts),
            )
        return number


class SetFitness(Objective):
    """What `task.fitness` gives for each member, which is counted where completions are: in the grader's process."""

    per_member = True

    def __init__(self, name: str) -> None:
        self.name = f"task.fitness {name}"

    def scores(self, group: Group) -> Scores:
        """[members, 1]. Raises RewardError for a group that nobody has counted it of."""
        if group.fitness_M is None:
            raise RewardError(f"{self.name} was not counted for this group")
        return group.fitness_M[:, None]


def measure_of(fitness: str | None) -> str:
    """The measure of an evaluation that a run is after, by its `task.fitness`; nothing is imported for it."""
    return "reward" if fitness is None else PREFIX + fitness.rpartition(":")[2]


def shared_aim(fitnesses: Iterable[str | None], asked: str | None) -> tuple[str, list[str]]:
    """The measure that runs are held against each other by, whose `task.fitness` these are, and why, in a line.

    It is what was `asked` for; else that of all where it is one, and the reward, which each of them has, where it is
    not. No line where there is nothing to say.
    """
    if asked is not None:
        return asked, []
    ways = list(fitnesses)
    names = sorted({measure_of(way) for way in ways})
    if len(set(ways)) == 1:
        (name,) = names
        return name, [] if name == "reward" else [f"goes by {name}, which is trained for (task.fitness)"]
    trained = " or ".join(f"{name} ({sum(measure_of(way) == name for way in ways)} of {len(ways)})" for name in names)
    return "reward", [f"goes by the reward, which all have, since task.fitness differs: trained for is {trained}"]


def aim_of(measures: Mapping[str, Any]) -> str:
    """The measure of an evaluation that training is after: that of `task.fitness`, or the reward."""
    return next((name for name in measures if name.startswith(PREFIX)), "reward")


def aim(measures: Mapping[str, float]) -> float:
    """Its value."""
    return measures[aim_of(measures)]
