# SPDX-License-Identifier: Apache-2.0
"""Where a run goes, and who else is kept out of it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from evoalign.config import Config
from evoalign.errors import RewardError
from evoalign.rundir.directory import RunDir
from evoalign.rundir.method import Method, refuse_other


def place(config: Config, method: Method, *, resume: bool) -> RunDir:
    """Where a run of this method goes. Raises ResumeError where another method's is to be resumed."""
    run = RunDir(Path(config.output_dir))
    if resume:
        refuse_other(run.path, method)
    return run


@contextmanager
def locked(run: RunDir, *, overwrite: bool, resume: bool) -> Generator[None]:
    """Other processes are kept out of a run directory; it keeps what a reward failed on. Raises RunExistsError."""
    if not resume:
        run.refuse(overwrite=overwrite)
    try:
        run.lock()
        yield
    except RewardError as error:
        if error.failed is not None:
            error.args = (f"{error}; what it was asked is in {run.keep_failure(error.failed)}",)
        raise
    finally:
        run.release()


def object_given(task: object, reward: object) -> str | None:
    """Which of them was handed over as a Python object."""
    return "task" if task is not None else "reward" if reward is not None else None
