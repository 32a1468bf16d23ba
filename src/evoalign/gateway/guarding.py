# SPDX-License-Identifier: Apache-2.0
"""Process that cleans up after a trainer that is gone: kills its harnesses, and removes the folders of their episodes.

Its stdin is a pipe from the trainer, with lines `+GROUP` and `-GROUP` of the process groups that started and ended. At
the end of the pipe, which the death of the trainer brings too, it kills the groups that are left, and all processes
with the trainer's mark.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from evoalign.marked import MARK, kill_marked

FOLDER = "evoalign-episode-{mark}-"
"""Start of the name of an episode's temporary folder."""
ROUNDS = 10
"""A process may write a file, or start another, while it is being killed: at most this many times all is done again."""


def main() -> None:
    """Wait for the end of the trainer."""
    groups, mark = set[int](), os.environ[MARK]
    for line in sys.stdin:
        with suppress(ValueError):
            (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    for _ in range(ROUNDS):
        kill_marked(mark)
        left = list(Path(tempfile.gettempdir()).glob(FOLDER.format(mark=mark) + "*"))
        if not left:
            return
        for folder in left:
            shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.1)
