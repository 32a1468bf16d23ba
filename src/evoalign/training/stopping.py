# SPDX-License-Identifier: Apache-2.0
"""What follows from how a run goes: when it ends before its last generation, and its sigma where that is by plateaus.

All of it is a function of the rewards on the validation split that the journal has, and of the seconds in the rows, so
that a run which is resumed decides as one that never stopped. The test split has no say.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from evoalign.config import Config
from evoalign.rewards.objective import aim
from evoalign.rundir.journal import Ending, Journal, Log


def waited(rewards: Sequence[float], min_delta: float) -> int:
    """How many of the latest rewards are not better than the best one before them; the first one sets the mark."""
    return _waits(rewards, min_delta)[-1]


def plateaus(rewards: Sequence[float], patience: int, min_delta: float) -> int:
    """How often `patience` rewards in a row were not better than the best one; after each time they count anew."""
    return sum(wait // patience for wait in _waits(rewards, min_delta))


def _waits(rewards: Sequence[float], min_delta: float) -> list[int]:
    """How many rewards in a row were not better than the best one: before the first, and after each that was better."""
    best, waits = -math.inf, [0]
    for reward in rewards:
        if reward > best + min_delta:
            best = reward
            waits.append(0)
        else:
            waits[-1] += 1
    return waits


class Course:
    """The rewards, or the fitness, of a run on the validation split so far, and what they decide.

    `log` is the journal to resume.
    """

    def __init__(self, config: Config, log: Log | None) -> None:
        self.config = config
        self.rewards: list[float] = [] if log is None else log.validated
        self._before = None if log is None else log.ending

    def plateaus(self) -> int:
        """How often the sigma was lowered so far."""
        schedule = self.config.es.sigma_schedule
        return 0 if schedule.patience is None else plateaus(self.rewards, schedule.patience, schedule.min_delta)

    def note(self, journal: Journal, index: int, row: Mapping[str, Any]) -> None:
        """Write down the reward on the validation split after a generation, where the row has one that decides."""
        measures = row.get("validation")
        if measures is not None and self.config.follows_validation is not None:
            self.rewards.append(float(aim(measures)))
            journal.validated(index, self.rewards[-1])

    def ending(self, rows: Iterable[Mapping[str, Any]]) -> Ending | None:
        """Why the run ends after these rows, if it does."""
        stopping = self.config.stopping
        if stopping is None:
            return None
        if stopping.patience is not None and waited(self.rewards, stopping.min_delta) >= stopping.patience:
            return Ending("plateau", stopping.patience)
        if stopping.max_hours is None:
            return None
        limit = stopping.max_hours * 3600
        return Ending("time", limit) if self._timed_out(limit) or seconds(rows) >= limit else None

    def unrecorded(self, log: Log, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """What a run that is resumed tells of evaluations on the way that do not count, as the journal lacks them.

        A reward is written down from the day on that a setting asks for it: `stopping.patience` may be set later.
        """
        wanted, pairs = self.config.follows_validation, zip(log.generations[:-1], rows, strict=False)
        count = sum(bool(row.get("validation")) and recorded.validation is None for recorded, row in pairs)
        if wanted is None or not count:
            return []
        since = "" if log.validated else f", so that they count from generation {len(log.generations)} on"
        return [
            f"{wanted} goes by the journal: no setting asked for the rewards of {count} earlier evaluations of the "
            f"validation split, which are not in it{since}"
        ]

    def is_written(self, ending: Ending) -> bool:
        """Whether the journal that is resumed says that it ended so already, at its last generation."""
        return self._before is not None and self._before.reason == ending.reason

    def _timed_out(self, limit: float) -> bool:
        """Whether the journal that is resumed ended by a time that was no shorter: its rows may have been lost."""
        before = self._before
        return before is not None and before.reason == "time" and before.limit >= limit

    def gone_on(self) -> None:
        """There is another generation: the journal is not at its end any more."""
        self._before = None


def seconds(rows: Iterable[Mapping[str, Any]]) -> float:
    """What the generations of these rows took; of a row that was made again from the journal nobody knows."""
    return sum(sum(row["seconds"].values()) for row in rows)


def words(ending: Ending) -> str:
    """Why a run ended, for people."""
    if ending.reason == "plateau":
        return f"{ending.limit:.0f} evaluations of the validation split without a better reward (stopping.patience)"
    return f"its generations took {ending.limit / 3600:.4g} hours (stopping.max_hours)"


def lines(config: Config) -> list[str]:
    """What a run tells as it begins, where it may end earlier than its last generation."""
    stopping = config.stopping
    if stopping is None:
        return []
    limits: list[str] = []
    if stopping.patience is not None:
        limits.append(f"{stopping.patience} evaluations of the validation split in a row gain nothing")
    if stopping.max_hours is not None:
        limits.append(f"its generations have taken {stopping.max_hours:g} hours")
    return [f"ends before generation {config.es.num_generations} once {', or '.join(limits)}"]
