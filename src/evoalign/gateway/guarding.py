# SPDX-License-Identifier: Apache-2.0
"""Process that kills the harnesses of a trainer that is gone.

Its stdin is a pipe from the trainer, with lines `+GROUP` and `-GROUP` of the process groups that started and ended. At
the end of the pipe, which the death of the trainer brings too, it kills the groups that are left, and all processes
with the trainer's mark.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress

from evoalign.tasks.isolated.worker import MARK, kill_marked


def main() -> None:
    """Wait for the end of the trainer."""
    groups = set[int]()
    for line in sys.stdin:
        with suppress(ValueError):
            (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    kill_marked(os.environ[MARK])
