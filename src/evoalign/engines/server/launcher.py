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

LOOK = 0.5
"""Seconds between looks at whether the server is there."""
PIECE = 2**16


def main() -> None:
    """As above."""
    order = json.loads(sys.stdin.readline())
    _leave_a_guard([word.encode() for word in order["hidden"]])
    os.environ.update(order["environment"])
    sys.path[0] = ""  # as `python -m` has it, and not the folder of this file
    sys.argv = [order["module"], *order["arguments"]]
    runpy.run_module(order["module"], run_name="__main__", alter_sys=True)


def _leave_a_guard(hidden: list[bytes]) -> None:
    """A process beside the server's group, so that what stops the one does not stop the other.

    It passes on what the server and its children print, without the keys: servers print their settings. No signal at
    the parent's death: that would come where the thread ends that started this.
    """
    server, (read, write) = os.getpid(), os.pipe()
    if os.fork():
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(write, 1)
        os.dup2(write, 2)
        os.close(write)
        os.close(read)
        return
    os.close(write)
    os.setsid()
    _guard(server, read, hidden)
    os._exit(0)


def _guard(server: int, read: int, hidden: list[bytes]) -> None:
    """Until the input or the server ends; then the whole group does, and what it said last is passed on."""
    held, watched = b"", [0, read]
    while os.getppid() == server:
        ready = select.select(watched, [], [], LOOK)[0]
        if read in ready:
            piece = os.read(read, PIECE)
            watched = watched if piece else [0]
            *lines, held = (held + piece).split(b"\n")
            _print(b"".join(line + b"\n" for line in lines), hidden)
        elif not ready:
            _print(held, hidden)
            held = b""
        if 0 in ready and not os.read(0, 1):
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server, signal.SIGKILL)
    while read in watched and select.select([read], [], [], LOOK)[0] and (piece := os.read(read, PIECE)):
        held += piece
    _print(held, hidden)


def _print(text: bytes, hidden: list[bytes]) -> None:
    for word in hidden:
        text = text.replace(word, b"[key]")
    with contextlib.suppress(OSError):  # a full disk costs the log, and no server
        os.write(1, text)


if __name__ == "__main__":
    main()
