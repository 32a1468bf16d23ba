# SPDX-License-Identifier: Apache-2.0
"""Every error a user can meet. A message says what is wrong, which value, and how to mend it."""


class EvoalignError(Exception):
    """Base of all errors of this package; the command line prints its message alone and exits with 2."""


class ConfigError(EvoalignError):
    """A setting is missing, unknown or out of range."""


class DataError(EvoalignError):
    """A data file is missing or malformed; the message names the file and the line or row."""


class RewardError(EvoalignError):
    """A reward function returned something that is not one finite number (or None) for each completion."""


class ModelError(EvoalignError):
    """The model or its tokenizer cannot be loaded, or lacks what the run asks of it."""


class RunExistsError(EvoalignError):
    """The output directory already holds a run."""


class JournalError(EvoalignError):
    """A journal line is damaged or does not follow from the line before it."""
