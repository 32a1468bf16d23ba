# SPDX-License-Identifier: Apache-2.0
"""Runs a server's module in a process that does not outlive its parent. Imports no module of evoalign.

The first line of input is JSON: the `module` to run, its `arguments` (which may hold keys, and are therefore not on a
command line that other users see), `environment` variables, and words `hidden` in the log. The input stays open: when
it ends, the parent is gone, and the whole process group is killed.
"""

import contextlib
import json
import os
import runpy
import select
import signal
import sys

LOOK = 0.5
"""Seconds between checks of the server."""
PIECE = 2**16
"""Bytes of output read at once."""


def main() -> None:
    """Run the module that the first line of input names."""
    order = json.loads(sys.stdin.readline())
    _leave_a_guard([word.encode() for word in order["hidden"]])
    os.environ.update(order["environment"])
    sys.path[0] = ""  # as with `python -m`, instead of the folder of this file
    sys.argv = [order["module"], *order["arguments"]]
    runpy.run_module(order["module"], run_name="__main__", alter_sys=True)


def _leave_a_guard(hidden: list[bytes]) -> None:
    """Fork a guard outside the server's process group, so that a signal that stops the server does not stop it.

    The guard forwards the output of the server and its children without the keys, since servers print their settings.
    A signal at the parent's death is no alternative: the kernel sends it when the parent's *thread* ends.
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
    """Forward output until the input or the server ends; then kill the group and forward its last output."""
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
    with contextlib.suppress(OSError):  # a full disk costs the log, not the server
        os.write(1, text)


if __name__ == "__main__":
    main()
