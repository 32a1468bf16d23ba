# SPDX-License-Identifier: Apache-2.0
"""Runs a server's module in a process that does not outlive the one that started it. Imports nothing of evoalign.

Its first line of input is JSON: the `module` to run, its `arguments`, which may hold keys and so are not on a command
line that other users see, variables of its environment, and what no log is to have. The input stays open: where it
ends, whoever started this is gone, and the whole process group is killed.
"""

import contextlib
import json
import os
import runpy
import select
import signal
import sys
import threading

LOOK = 0.5
"""Seconds between looks at whether the server is there."""


def main() -> None:
    """As above."""
    order = json.loads(sys.stdin.readline())
    _guard()
    _relay([word.encode() for word in order["hidden"]])
    os.environ.update(order["environment"])
    sys.path[0] = ""  # as `python -m` has it, and not the folder of this file
    sys.argv = [order["module"], *order["arguments"]]
    runpy.run_module(order["module"], run_name="__main__", alter_sys=True)


def _guard() -> None:
    """A process beside the server's group, so that what stops the one does not stop the other.

    No signal at the parent's death: that would come where the thread ends that started this.
    """
    server = os.getpid()
    if os.fork():
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        return
    os.setsid()
    for output in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    while os.getppid() == server:
        if select.select([0], [], [], LOOK)[0] and not os.read(0, 1):
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server, signal.SIGKILL)
    os._exit(0)


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


if __name__ == "__main__":
    main()
