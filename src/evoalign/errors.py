# SPDX-License-Identifier: Apache-2.0
"""Every error a user can meet. A message says what is wrong, which value, and how to fix it."""

from __future__ import annotations

import reprlib
from typing import Any


class EvoalignError(Exception):
    """Base of all errors of this package; the command line prints its message alone and exits with 2."""


class ConfigError(EvoalignError):
    """A setting is missing, unknown or out of range."""


class DataError(EvoalignError):
    """A data file is missing or malformed; the message names the file and the line or row."""


class RewardError(EvoalignError):
    """A reward function hung, died, raised, or gave something that is not one finite number (or None) a completion.

    `failed`, where there is one, is what a person needs to see it happen again, as JSON has it: `reason` (hung, died,
    raised or value), `function`, `prompt`, `completion` and `example` (None where no single completion is to blame,
    then the first `completions` and their `count`), `traceback`, `attempts` and the `seconds` they took together.
    """

    def __init__(self, message: str, failed: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.failed = failed


class ScorerAwayError(RewardError):
    """A service of scores is not to be had; once it is, the same may be asked again."""


class JudgeError(EvoalignError):
    """A judge refuses, or gives nothing any more; the judgments that it gave are kept."""


class ModelError(EvoalignError):
    """The model or its tokenizer cannot be loaded, or lacks what the run asks of it."""


class EngineError(EvoalignError):
    """An engine's library is not what this package knows: it lacks a name, or takes other parameters."""


class RunExistsError(EvoalignError):
    """The output directory already holds a run."""


class RunGoneError(EvoalignError):
    """The run directory was removed, moved or replaced while the run was in it."""


class JournalError(EvoalignError):
    """A journal line is damaged or does not follow from the line before it."""


class CheckpointError(EvoalignError):
    """A saved mean is missing a file, or one of its files was altered."""


class ResumeError(EvoalignError):
    """A run cannot be resumed as asked: other settings, another base model, or weights that come out otherwise."""


class MachineError(ResumeError):
    """A journal's weights come out otherwise on this machine, and it was made in a way whose bits depend on that.

    `generations` is how many came out before it, and the one that did not.
    """

    def __init__(self, message: str, generations: int) -> None:
        super().__init__(message)
        self.generations = generations


class StoppedError(EvoalignError):
    """A run was asked to stop and did, after a whole generation. `signal` is the number of the signal."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal


class CanaryError(EvoalignError):
    """Members do not answer with their own weights, or the mean does not stay what it was."""


class NotFiniteError(EvoalignError):
    """A model's logits are not numbers: its weights, or the noise on them, leave nothing to answer with."""


class _Short(reprlib.Repr):
    """Values in messages: of any size and shape, a few words."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxstring, self.maxlong, self.maxother = 3, 4, 100, 60, 100

    def repr_int(self, x: int, level: int) -> str:
        """Python itself refuses to write out more than 4,300 digits."""
        return f"an integer of {x.bit_length():,} bits" if x.bit_length() > 2000 else super().repr_int(x, level)


shown = _Short().repr
"""A value as a message shows it: Python's repr, but short, whatever the value is."""


def cut(text: str, most: int) -> str:
    """A text, its end left out where it is longer than `most` characters."""
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def plain(text: str) -> str:
    """A text from elsewhere, such as a column's name, without what would write on a terminal."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)
