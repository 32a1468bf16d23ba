# SPDX-License-Identifier: Apache-2.0
"""What all kinds of fuzz share: a case is read within a time limit, and is accepted, or refused in plain words."""

import math
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol, TypeVar

from corruption import flip, reorder, truncate
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from evoalign.errors import EvoalignError

SECONDS = 10.0
"""Of one case; longer is a hang."""
ERRORS = (0, 0, 1)
"""How many of a case's changes are invalid is drawn from these."""
T = TypeVar("T")
REFUSED: Any = object()
VALUES: tuple[Any, ...] = (
    None, -1, 2**70, 1e308, float("nan"), float("inf"), "", "x" * 5000, "\x1b[2J", "a\nb", [], {}, [[]], {"a": [1]},
    True,
)  # fmt: skip
"""What may stand in the place of any value of JSON."""


class FaultError(AssertionError):
    """A fault of the product: `what` is a traceback, a hang, a silent difference, or a message that is none."""

    def __init__(self, what: str, told: str) -> None:
        super().__init__(f"{what}: {told}")
        self.what = what


class _HangError(BaseException):
    """Not an Exception: nothing that is read may keep it."""


class Bench(Protocol):
    """One kind of input. `aim`: each case is wrong, and in this way; empty for a case in three, in any way."""

    aim: str

    def attempt(self, draw: random.Random) -> bool:
        """Make a case and read it; whether it was accepted. Raises FaultError."""
        ...


@dataclass
class Tally:
    """What came of the cases of a kind, none of which showed a fault."""

    cases: int = 0
    accepted: int = 0

    @property
    def share(self) -> float:
        return self.accepted / self.cases


def sweep(bench: Bench, count: int, *, shrink: bool = True) -> Tally:
    """The same `count` cases of a kind each time. Raises FaultError for the first fault, made small with `shrink`."""
    tally = Tally()
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]

    @settings(
        derandomize=True, deadline=None, database=None, max_examples=count, phases=phases, report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.randoms(use_true_random=False))
    def cases(draw: random.Random) -> None:
        accepted = bench.attempt(draw)
        tally.cases, tally.accepted = tally.cases + 1, tally.accepted + accepted

    cases()
    return tally


def judged(read: Callable[[], T], *, lines: int = 1, valid: bool | None = None) -> T | Any:
    """What `read` gives, or REFUSED. `valid`: whether it has to be accepted; None where that is not known.

    Raises FaultError, also for an error of more than `lines` lines or one that writes on a terminal.
    """
    try:
        with _limit():
            found = read()
    except EvoalignError as error:
        told = str(error).split("\n")
        if not str(error).strip() or len(told) > lines or not all(t.isprintable() and len(t) < 1000 for t in told):
            raise FaultError("message", f"{type(error).__name__} of {len(told)} lines: {str(error)[:300]!r}") from error
        if valid:
            raise FaultError("refused", f"a valid input: {error}") from error
        return REFUSED
    except FaultError:
        raise
    except _HangError:
        raise FaultError("hang", f"no end in {SECONDS:g} s") from None
    except Exception as error:
        raise FaultError("traceback", f"{type(error).__name__}: {str(error)[:300]}") from error
    if valid is False:
        raise FaultError("silent", "an invalid input was accepted")
    return found


@contextmanager
def _limit() -> Iterator[None]:
    """End what is within after SECONDS; the timer of the test around it goes on."""

    def end(_: int, __: FrameType | None) -> None:
        raise _HangError

    handler, began = signal.signal(signal.SIGALRM, end), time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, left - (time.monotonic() - began)), interval)


def same(a: Any, b: Any) -> bool:
    """Equal, of the same types, and not-a-number as equal to itself."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    return type(a) is type(b) and a == b


def check(held: bool, told: str) -> None:
    if not held:
        raise FaultError("silent", told)


def wrong_in(draw: random.Random, aim: str, kinds: Sequence[str]) -> str:
    """In which way a case is wrong; empty where it is not."""
    return aim or (draw.choice(kinds) if draw.choice(ERRORS) else "")


# --- damage to bytes ------------------------------------------------------------------------------------------------


def zero(draw: random.Random, raw: bytes) -> bytes:
    at, size = draw.randrange(len(raw)), draw.choice([1, 8, 64, 512])
    return raw[:at] + bytes(len(raw[at : at + size])) + raw[at + size :]


DAMAGES: Sequence[Callable[[random.Random, bytes], bytes]] = (flip, truncate, zero, reorder)


def damage(draw: random.Random, raw: bytes) -> bytes:
    return draw.choice(DAMAGES)(draw, raw) if raw else b"\0"


# --- JSON -----------------------------------------------------------------------------------------------------------


def places(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    if not (isinstance(tree, dict | list) and tree):
        yield at
    for key, value in inner:
        yield from places(value, (*at, key))


def put(tree: Any, at: Sequence[Any], value: Any) -> Any:
    """A tree with another value in a place."""
    if not at:
        return value
    copied = dict(tree) if isinstance(tree, dict) else list(tree)
    copied[at[0]] = put(copied[at[0]], at[1:], value)
    return copied
