# SPDX-License-Identifier: Apache-2.0
"""Runs a server's module in a process that does not outlive the one that started it. Imports nothing of evoalign.

Its first line of input is JSON: the `module` to run, its `arguments`, which may hold keys and so are not on a command
line that other users see, variables of its environment, and what no log is to have. The input stays open: where it
ends, whoever started this is gone, and the whole process group goes.
"""

import ctypes
import json
import os
import runpy
import signal
import sys
import threading


def main() -> None:
    """As above."""
    order = json.loads(sys.stdin.readline())
    if sys.platform == "linux":  # also where a signal has stopped this process, so that it cannot watch
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    threading.Thread(target=_watch, daemon=True).start()
    _relay([word.encode() for word in order["hidden"]])
    os.environ.update(order["environment"])
    sys.path[0] = ""  # as `python -m` has it, and not the folder of this file
    sys.argv = [order["module"], *order["arguments"]]
    runpy.run_module(order["module"], run_name="__main__", alter_sys=True)


def _relay(hidden: list[bytes]) -> None:
    """What this process and its children print goes where it went, without the keys: servers print their settings."""
    there, (read, write) = os.dup(1), os.pipe()
    os.dup2(write, 1)
    os.dup2(write, 2)
    os.close(write)

    def pass_on() -> None:
        with os.fdopen(read, "rb") as lines:
            for line in lines:
                for word in hidden:
                    line = line.replace(word, b"[key]")
                os.write(there, line)

    threading.Thread(target=pass_on, daemon=True).start()


def _watch() -> None:
    os.read(0, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
