# SPDX-License-Identifier: Apache-2.0
"""Why a run stops: a signal, early stopping; and plateaus for the sigma schedule.

The first SIGINT or SIGTERM requests an orderly stop, a second one stops at once. Early stopping and plateaus follow
from the validation rewards in the journal and from the seconds in the rows, so that a resumed run decides as an
uninterrupted one. The test split is not used.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from evoalign.config import Config
from evoalign.rewards.objective import aim
from evoalign.rundir.journal import Ending, Journal, Log

TELL = b"\nstopping after this generation; once more to stop at once\n"
NOW = b"\nstopped at once; --resume continues after the last whole generation\n"
SAME_SECONDS = 0.02
"""A second SIGTERM within this time is ignored: `timeout` sends it to the process and to its group."""


_before: list[tuple[int, Any]] = []
"""Signals that `_handled` handles, each with its handler from before."""
_mask = threading.local()


def _hold() -> None:
    # Python drops a signal that reaches a new process before its own set-up after the fork.
    _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, {number for number, _ in _before})


def _release() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


def _release_child() -> None:
    while _before:
        number, before = _before.pop()
        # Ctrl-C at a terminal reaches this process too, and the run finishes its generation.
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else before)
    _release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_release_child)


@contextmanager
def _handled(numbers: Sequence[int], handler: Callable[[int, FrameType | None], None]) -> Generator[None]:
    """Handle signals in the main thread. A process that a reward forks, as multiprocessing.Pool does, has the handler
    of SIGTERM from before, which ends it, also at once, and ignores SIGINT."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    own = [(number, signal.signal(number, handler)) for number in numbers]
    _before.extend(own)
    try:
        yield
    finally:
        for number, before in own:
            signal.signal(number, before)
        del _before[-len(own) :]


class Stop:
    """Context manager in which a signal sets `asked` to its number. A second signal raises KeyboardInterrupt, or
    SystemExit for SIGTERM. Signals arrive in the main thread only."""

    def __init__(self) -> None:
        self.asked: int | None = None
        self._since = 0.0
        self._handling = _handled((signal.SIGINT, signal.SIGTERM), self._hear)

    def __enter__(self) -> Stop:
        self._handling.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._handling.__exit__(None, None, None)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None:
            if number == signal.SIGTERM and time.monotonic() - self._since < SAME_SECONDS:
                return
            os.write(2, NOW)
            if number == signal.SIGTERM:
                raise SystemExit(128 + number)
            raise KeyboardInterrupt
        self.asked, self._since = number, time.monotonic()
        os.write(2, TELL)  # a console may be in the middle of a line of its own


@contextmanager
def interruptible() -> Generator[None]:
    """Raise KeyboardInterrupt, with the signal's number, on SIGTERM too, in the main thread.

    For work of which nothing is half written, so that both may come at any time.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(number)

    with _handled((signal.SIGTERM,), interrupt):
        yield


def waited(rewards: Sequence[float], min_delta: float) -> int:
    """Return how many of the latest rewards are not better than the best one before them."""
    return _waits(rewards, min_delta)[-1]


def plateaus(rewards: Sequence[float], patience: int, min_delta: float) -> int:
    """Return how often `patience` rewards in a row were not better than the best one; the count then restarts."""
    return sum(wait // patience for wait in _waits(rewards, min_delta))


def _waits(rewards: Sequence[float], min_delta: float) -> list[int]:
    """Return the numbers of rewards in a row without a new best: before the first one, and after each new best."""
    best, waits = -math.inf, [0]
    for reward in rewards:
        if reward > best + min_delta:
            best = reward
            waits.append(0)
        else:
            waits[-1] += 1
    return waits


class Course:
    """Validation rewards of a run so far, and the decisions that follow. `log` is the journal to resume."""

    def __init__(self, config: Config, log: Log | None) -> None:
        self.config = config
        self.rewards: list[float] = [] if log is None else log.validated
        self._before = None if log is None else log.ending

    def plateaus(self) -> int:
        """Return how often the sigma was lowered so far."""
        schedule = self.config.es.sigma_schedule
        return 0 if schedule.patience is None else plateaus(self.rewards, schedule.patience, schedule.min_delta)

    def note(self, journal: Journal, index: int, row: Mapping[str, Any]) -> None:
        """Record the validation reward of a generation in the journal, if the row has one and a setting uses it."""
        measures = row.get("validation")
        if measures is not None and self.config.follows_validation is not None:
            self.rewards.append(float(aim(measures)))
            journal.validated(index, self.rewards[-1])

    def ending(self, rows: Iterable[Mapping[str, Any]]) -> Ending | None:
        """Return why the run ends after these rows, or None."""
        stopping = self.config.stopping
        if stopping is None:
            return None
        if stopping.patience is not None and waited(self.rewards, stopping.min_delta) >= stopping.patience:
            return Ending("plateau", stopping.patience)
        if stopping.max_hours is None:
            return None
        limit, before = stopping.max_hours * 3600, self._before
        # The rows of a resumed journal that ended at a time limit may be lost.
        timed_out = before is not None and before.reason == "time" and before.limit >= limit
        return Ending("time", limit) if timed_out or seconds(rows) >= limit else None

    def unrecorded(self, log: Log, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return a note on earlier evaluations that do not count because the journal lacks them.

        The journal has validation rewards from when a setting first needs them: `stopping.patience` may be set later.
        """
        wanted, pairs = self.config.follows_validation, zip(log.generations[:-1], rows, strict=False)
        count = sum(bool(row.get("validation")) and recorded.validation is None for recorded, row in pairs)
        if wanted is None or not count:
            return []
        since = "" if log.validated else f", so that they count from generation {len(log.generations)} on"
        return [
            f"{wanted} uses the validation rewards in the journal, which lacks those of {count} earlier evaluations"
            f"{since}"
        ]

    def is_written(self, ending: Ending) -> bool:
        """Return whether the resumed journal already records this ending at its last generation."""
        return self._before is not None and self._before.reason == ending.reason

    def gone_on(self) -> None:
        """Note that another generation followed, so that the journal is no longer at an ending."""
        self._before = None


def seconds(rows: Iterable[Mapping[str, Any]]) -> float:
    """Return the seconds of these rows. A row that was rebuilt from the journal has none."""
    return sum(sum(row["seconds"].values()) for row in rows)


def words(ending: Ending) -> str:
    """Return the reason of an ending in words."""
    if ending.reason == "plateau":
        return f"{ending.limit:.0f} evaluations of the validation split without a better reward (stopping.patience)"
    return f"its generations took {ending.limit / 3600:.4g} hours (stopping.max_hours)"


def lines(config: Config) -> list[str]:
    """Return the opening line on early stopping, if it is configured."""
    stopping = config.stopping
    if stopping is None:
        return []
    limits: list[str] = []
    if stopping.patience is not None:
        limits.append(f"{stopping.patience} evaluations in a row do not improve on the validation split")
    if stopping.max_hours is not None:
        limits.append(f"its generations have taken {stopping.max_hours:g} hours")
    return [f"ends before generation {config.es.num_generations} once {', or '.join(limits)}"]
