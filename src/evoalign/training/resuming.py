# SPDX-License-Identifier: Apache-2.0
"""Whether a run of ES that is there can be resumed with the settings that are given."""

from __future__ import annotations

from evoalign.config import Config, from_record
from evoalign.errors import JournalError, ResumeError
from evoalign.rundir import journal
from evoalign.rundir.directory import RunDir
from evoalign.rundir.identity import differences
from evoalign.rundir.journal import Log


def log_to_resume(run: RunDir, config: Config, given_as: str | None) -> Log | None:
    """The journal to resume; None where nothing was recorded yet. Raises JournalError, ResumeError."""
    if journal.is_blank(run.journal):
        if run.has_progress():
            raise JournalError(
                f"{run.journal} is missing or cut in its first line, though the run has generations; put it back, or "
                "move the run aside with --overwrite"
            )
        return None
    log = journal.read(run.journal).whole()
    odd, _ = differences(config, from_record(log.header.config))
    if odd:
        raise ResumeError(f"{run.path} cannot be resumed with other settings: {'; '.join(odd)}")
    if log.header.given_as != given_as:
        there = f"a {log.header.given_as} object" if log.header.given_as else "the task of its config"
        raise ResumeError(
            f"{run.path} was trained with {there}; resume in Python with the same task= or reward=, or without one"
        )
    done, wanted = len(log.generations), config.es.num_generations
    if done > wanted:
        raise ResumeError(f"{run.path} has {done} generations already, es.num_generations is {wanted}")
    return log
