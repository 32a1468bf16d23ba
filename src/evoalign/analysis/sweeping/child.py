# SPDX-License-Identifier: Apache-2.0
"""One run of a sweep: `python -m evoalign.analysis.sweeping.child FD evoalign.cli train CONFIG --resume` is
`python -m evoalign.cli train CONFIG --resume` in a process that ends when the sweep is gone.

FD is the reading end of a pipe that the sweep holds open. A guard process beside the run waits for its hang-up, however
the sweep ended (as `tasks/worker.py` does for rewards); then it asks the run to save and stop, and kills what is left.
"""

from __future__ import annotations

import os
import runpy
import select
import signal
import sys
import time

GUARD_SECONDS = 1.0
"""How often the guard looks whether the run itself is still there."""
GRACE_SECONDS = 60.0
"""For a run without its sweep to end a generation and save; the journal is whole in any case."""


def main() -> None:
    """Fork the guard, then be the module that is named, with the words that follow."""
    _, descriptor, module, *words = sys.argv
    _guard(int(descriptor))
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _guard(descriptor: int) -> None:
    """Before anything heavy is imported: the guard stays small."""
    run = os.getpid()
    if os.fork():
        os.close(descriptor)
        return
    try:
        hangup = select.poll()
        hangup.register(descriptor, 0)  # only the hang-up: nothing is ever written
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
