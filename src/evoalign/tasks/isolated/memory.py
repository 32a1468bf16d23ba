# SPDX-License-Identifier: Apache-2.0
"""How much memory a worker may take: a reward that allocates without end fails, and takes no machine with it."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path

GIB = 1 << 30
GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
SUPPORTED = sys.platform == "linux"
"""Elsewhere the limit does not exist, or the system does not hold to it."""


def bound(gib: float | None) -> None:
    """Let this process, and each that it starts, allocate so much more than it holds now; None: half of the machine.

    What counts is memory of its own that can be written (RLIMIT_DATA). The address space would be the wrong measure:
    torch and CUDA reserve far more of it than they ever use. What a fork has of its parent counts as held.
    """
    if not SUPPORTED:
        return
    import resource  # not on Windows

    held = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    more = half() if gib is None else int(gib * GIB)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = min(more + (int(held[1]) << 10 if held else 0), sys.maxsize)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def half() -> int:
    """Half of the machine's memory, or of what its control group allows, in bytes."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no limit, which is written "max", or no such group
        total = min(total, int(GROUP_LIMIT.read_text(encoding="utf-8")))
    return total // 2
