# SPDX-License-Identifier: Apache-2.0
"""Run one run of a sweep in a process that ends when the sweep's process ends.

`python -m evoalign.analysis.sweeping.child FD evoalign.cli train CONFIG --resume` runs
`python -m evoalign.cli train CONFIG --resume`. FD is the read end of a pipe that the sweep keeps open. A forked guard
process waits until it is closed, however the sweep ended, then asks the run to save and stop, and kills it in the end.
"""

from __future__ import annotations

import os
import runpy
import select
import signal
import sys
import time

GUARD_SECONDS = 1.0
"""Interval at which the guard checks that the run is alive."""
GRACE_SECONDS = 60.0
"""Time for the run to finish a generation and save; the journal is complete in any case."""


def main() -> None:
    """Fork the guard, then run the named module with the remaining arguments."""
    _, descriptor, module, *words = sys.argv
    _guard(int(descriptor))
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _guard(descriptor: int) -> None:
    """Fork the guard, before heavy imports to keep it small."""
    run = os.getpid()
    if os.fork():
        os.close(descriptor)
        return
    try:
        hangup = select.poll()
        hangup.register(descriptor, 0)  # hang-up only: nothing is written
        while os.getppid() == run and not hangup.poll(GUARD_SECONDS * 1000):
            pass
        if os.getppid() == run:
            os.kill(run, signal.SIGTERM)
            deadline = time.monotonic() + GRACE_SECONDS
            while os.getppid() == run and time.monotonic() < deadline:
                time.sleep(GUARD_SECONDS / 10)
            if os.getppid() == run:
                os.killpg(0, signal.SIGKILL)
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
