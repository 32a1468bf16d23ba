# SPDX-License-Identifier: Apache-2.0
"""The errors of this package. A message says what is wrong, the value, and what to set."""

from __future__ import annotations

import reprlib
from typing import Any


class EvoalignError(Exception):
    """Base of all errors of this package. The command line prints only its message and exits with 2."""


class ConfigError(EvoalignError):
    """A setting is missing, unknown or out of range."""


class DataError(EvoalignError):
    """A data file is missing or malformed; the message names the file and the line or row."""


class RewardError(EvoalignError):
    """A reward function hung, died, raised, or did not return one finite number (or None) per completion.

    `failed`, if given, has what is needed to reproduce it, as JSON: `reason` (hung, died, raised or value), `function`,
    `prompt`, `completion` and `example` (None where no single completion caused it, then the first `completions` and
    their `count`), `traceback`, `attempts` and their total `seconds`.
    """

    def __init__(self, message: str, failed: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.failed = failed


class ScorerAwayError(RewardError):
    """The scoring service cannot be reached; the request may be repeated later."""


class JudgeError(EvoalignError):
    """A judge model refuses or stops answering; its earlier judgments are kept."""


class ModelError(EvoalignError):
    """The model or its tokenizer cannot be loaded, or cannot do what the run needs."""


class EngineError(EvoalignError):
    """An engine's library is incompatible: a name is missing, or has other parameters."""


class RunExistsError(EvoalignError):
    """The output directory already holds a run."""


class RunGoneError(EvoalignError):
    """The run directory was removed, moved or replaced while the run was in it."""


class JournalError(EvoalignError):
    """A journal line is damaged or does not follow from the line before it."""


class CheckpointError(EvoalignError):
    """A saved mean is missing a file, or one of its files was altered."""


class ResumeError(EvoalignError):
    """A run cannot be resumed: its settings or base model differ, or its weights cannot be reproduced."""


class MachineError(ResumeError):
    """A journal cannot be reproduced on this machine, since its sums have bits that depend on the machine.

    `generations` is the number of the first generation with other weights.
    """

    def __init__(self, message: str, generations: int) -> None:
        super().__init__(message)
        self.generations = generations


class StoppedError(EvoalignError):
    """A run was stopped by a signal, after a whole generation. `signal` is its number."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal


class CanaryError(EvoalignError):
    """The engine does not apply the members' own weights, or changes the mean."""


class NotFiniteError(EvoalignError):
    """A model's logits are not finite, because of its weights or the noise on them."""


class RefusedError(EvoalignError):
    """A request that a server of this package refuses, with an HTTP status, a code, and the field at fault.

    Codes are those of OpenAI's API, where it has one.
    """

    def __init__(self, message: str, status: int, code: str = "invalid_request_error", field: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.field = status, code, field


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether Python or torch, of which the CPU's allocator raises a RuntimeError, could not get memory."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "allocate" in str(error))


class _Short(reprlib.Repr):
    """Shortens values of any size for messages."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxstring, self.maxlong, self.maxother = 3, 4, 100, 60, 100

    def repr_int(self, x: int, level: int) -> str:
        """Describe large integers: Python refuses to convert more than 4,300 digits."""
        return f"an integer of {x.bit_length():,} bits" if x.bit_length() > 2000 else super().repr_int(x, level)


shown = _Short().repr
"""Return a short repr of any value, for messages."""


def cut(text: str, most: int) -> str:
    """Cut a text to at most `most` characters."""
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def plain(text: str) -> str:
    """Replace unprintable characters of an untrusted text, such as control codes of a terminal."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)
