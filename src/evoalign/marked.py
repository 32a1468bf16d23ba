# SPDX-License-Identifier: Apache-2.0
"""Processes that user code has started, identified by a mark in their environment.

Imports nothing else of the package: the guard of harnesses, a process of each generation, starts with it.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

MARK = "EVOALIGN_WORKER"
"""Environment variable that identifies a worker's descendants in any session."""


def kill_marked(mark: str, but: int | None = None) -> None:
    """Kill all other processes started with this mark, except `but`, also those in other sessions, which killpg misses.

    Reads /proc, so it needs Linux. It misses processes with another environment, and forks without exec.
    """
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended, or owned by another user
            if int(folder.name) not in (os.getpid(), but) and wanted in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
