# SPDX-License-Identifier: Apache-2.0
"""Render untrusted chat templates in a separate process, with limits on time and memory.

transformers renders a template in Jinja's sandbox, which keeps it from code and files, but not from running forever or
using all memory. Neither can be stopped from within the process: `9 ** 9 ** 9` is one step of Python. The process is a
fork, which already has the tokenizer, and renders one prompt after another.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from evoalign.errors import ModelError, shown
from evoalign.types import Messages

CLOCK = "strftime_now"
"""The function by which templates print today's date."""
DATE = "2024-07-26"
"""The date that it prints: the one that Llama's templates print without a clock."""
SECONDS = 10.0
"""Time limit for one prompt. A usual template takes about a millisecond."""
ROOM = 1 << 30
"""Bytes of memory that a template may use."""
AT_ONCE = 1 << 16
"""Most bytes that are sent or received in one call."""
MOST_ADDED = 1 << 20
"""Bytes that a template may add to a prompt, which it may repeat once. The tokenizer needs seconds for this many."""


class RefusedError(Exception):
    """The message of an error that a template raised."""


def render(
    tokenizer: Any,
    messages: Messages,
    template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Return a prompt of messages as text. A last assistant message is the start of the completion.

    A template that prints the date gets `DATE`, or `template_kwargs.strftime_now`, so that a prompt is the same on
    every day.
    """
    given = {**template_kwargs, **_tools(tokenizer, tools)}
    day = datetime.fromisoformat(given.pop(CLOCK, DATE))
    if CLOCK in str(tokenizer.chat_template):
        given["chat_template"] = _dated(tokenizer.get_chat_template(tools=given.get("tools")), day)
    opened = messages[-1]["role"] == "assistant"
    return str(
        tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=not opened, continue_final_message=opened, **given
        )
    )


def _tools(tokenizer: Any, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the variables by which a template gets tools. SmolLM3's has another name for them."""
    names = ("tools", *["xml_tools"] * ("xml_tools" in str(tokenizer.chat_template)))
    return {name: list(tools) for name in names if tools}


def _dated(template: str, day: datetime) -> str:
    """Return a template whose clock always shows the same day.

    transformers passes only plain data to a template, so the clock is a macro of Jinja. The line break after it is
    dropped by `trim_blocks`.
    """
    codes = {f"%-{code}": str(int(day.strftime(f"%{code}"))) for code in "dmHIMSjy"}
    codes |= {f"%{code}": day.strftime(f"%{code}") for code in "aAbBcdfGHIjmMpSuUVwWxXyYZz"} | {"%%": "%"}
    return (
        f"{{% macro {CLOCK}(format) %}}{{% set found = namespace(text=format) %}}"
        f"{{% for code, text in {json.dumps(codes)}.items() %}}"
        "{% set found.text = found.text | replace(code, text) %}{% endfor %}{{ found.text }}{% endmacro %}\n" + template
    )


def without_system(messages: Messages) -> Messages | None:
    """Return messages in which the first user message begins with the text of the system message before it.

    None if there is no such pair. Templates such as Gemma's refuse a system message.
    """
    first, *rest = messages
    user = next((i for i, message in enumerate(rest) if message["role"] == "user"), None)
    if first["role"] not in ("system", "developer") or user is None:
        return None
    rest[user] = {**rest[user], "content": f"{first['content']}\n\n{rest[user]['content']}"}
    return rest


def dropped(messages: Messages, text: str) -> Messages:
    """Return the messages whose text a rendering does not contain, apart from white space.

    Templates of reasoning models leave out the thinking of earlier assistant messages.
    """
    flat = " ".join(text.split())
    shown = [m["content"].split("</think>")[-1] if m["role"] == "assistant" else m["content"] for m in messages]
    return [message for message, part in zip(messages, shown, strict=True) if " ".join(part.split()) not in flat]


def render_whole(
    tokenizer: Any,
    messages: Messages,
    template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Return a finished conversation as text."""
    given = {key: value for key, value in template_kwargs.items() if key != CLOCK}
    given |= _tools(tokenizer, tools)
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **given))


class Renderer:
    """Calls `how` in a process, which starts with the first prompt and ends with this object or its owner."""

    def __init__(self, tokenizer: Any, how: Callable[..., str] = render) -> None:
        self._tokenizer, self._how = tokenizer, how
        self._owner = 0
        self._end: socket.socket | None = None
        self._stop: weakref.finalize[[int, socket.socket], Renderer] | None = None

    def __call__(self, messages: Messages, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Render messages with tools. Raises RefusedError where the template raises, ModelError above a limit."""
        [found] = self.each([messages], tools)
        if isinstance(found, RefusedError):
            raise found
        return found

    def each(self, chats: Sequence[Messages], tools: Sequence[Mapping[str, Any]] = ()) -> Generator[str | RefusedError]:
        """Yield each conversation's text, or the error that the template raises. Raises ModelError above a limit.

        Conversations are sent ahead, so that neither process waits for the other. Not for several threads at once.
        """
        if not hasattr(os, "fork"):
            yield from (self._how(self._tokenizer, messages, **_named(tools)) for messages in chats)
            return
        if self._end is None or self._owner != os.getpid():  # a fork of the owner starts its own
            self._start()
        assert self._end is not None
        lines = [json.dumps([messages, list(tools)]).encode() + b"\n" for messages in chats]
        unsent, received, finished = bytearray(b"".join(lines)), bytearray(), False
        try:
            for messages, line in zip(chats, lines, strict=True):
                reply = b""
                with suppress(OSError):
                    reply = _line(self._end, unsent, received, 2 * len(line) + MOST_ADDED)
                if not reply:
                    raise ModelError(
                        f"the model's chat template takes more than {SECONDS:g} s or {ROOM >> 20} MiB, or adds more "
                        f"than {MOST_ADDED >> 20} MiB, for the prompt {shown(messages)}; set task.prompt: raw, or use "
                        "another model"
                    )
                kind, text = json.loads(reply)
                yield RefusedError(text) if kind == "refused" else text
            finished = True
        finally:
            if not finished:  # late replies would be taken for those of the next prompts
                self.close()

    def close(self) -> None:
        """End the process."""
        if self._stop is not None:
            self._stop()
        self._end = self._stop = None

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        owner, pid = os.getpid(), os.fork()
        if pid == 0:
            try:
                _close_all_but(theirs.fileno())
                _serve(theirs, self._tokenizer, self._how)
            finally:
                os._exit(0)
        theirs.close()
        self._owner, self._end = owner, ours
        self._stop = weakref.finalize(self, _end, owner, pid, ours)  # pyright: ignore[reportAttributeAccessIssue]


def _named(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the argument `tools`, which a function that renders plain messages need not have."""
    return {"tools": tools} if tools else {}


def _line(end: socket.socket, unsent: bytearray, received: bytearray, most: int) -> bytes:
    """Return the next reply, of at most `most` bytes; empty where it is longer, late, or the other side is gone.

    Meanwhile `unsent` is sent, as far as the other side takes it: waiting until it has taken all might last for ever,
    since it waits until its replies are taken. `received` keeps what follows the reply.
    """
    poll = select.poll()
    while (size := received.find(b"\n") + 1) == 0 and len(received) <= most:
        poll.register(end, select.POLLIN | (select.POLLOUT if unsent else 0))
        events = poll.poll(max(0.0, SECONDS) * 1000)
        if not events:
            return b""
        if events[0][1] & select.POLLOUT:
            del unsent[: end.send(unsent[:AT_ONCE], socket.MSG_DONTWAIT)]
        if events[0][1] & ~select.POLLOUT:
            part = end.recv(AT_ONCE)
            if not part:
                return b""
            received += part
    reply = bytes(received[:size])
    del received[:size]
    return reply if size <= most else b""


def _serve(end: socket.socket, tokenizer: Any, how: Callable[..., str]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal, `timeout` and Slurm send them to the whole group
        signal.signal(number, signal.SIG_IGN)  # the owner, which may still finish a generation, ends this process
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    threading.Thread(target=_leave_after, args=(os.getppid(),), daemon=True).start()
    _bound_memory()
    for line in end.makefile("rb"):
        signal.setitimer(signal.ITIMER_REAL, SECONDS + 1)  # in case the owner was killed
        try:
            messages, tools = json.loads(line)
            reply = json.dumps(["text", how(tokenizer, messages, **_named(tools))])
        except Exception as error:  # of jinja2, or whatever the template calls
            reply = json.dumps(["refused", str(error)[:1000] or type(error).__name__])
        signal.setitimer(signal.ITIMER_REAL, 0)
        end.sendall(reply.encode() + b"\n")


def _leave_after(owner: int) -> None:
    """End this process once its owner was killed: another fork of the owner may keep the socket open."""
    while os.getppid() == owner:
        time.sleep(1)
    os._exit(0)


def _close_all_but(kept: int) -> None:
    """Close files and sockets that the fork got: a connection ends only when all that have it open close it."""
    opened = [int(file.name) for file in Path("/dev/fd").iterdir()] if Path("/dev/fd").is_dir() else []
    for number in opened:
        if number not in (0, 1, 2, kept):
            with suppress(OSError):  # that of the folder itself
                os.close(number)


def _bound_memory() -> None:
    """Limit the memory to the fork's size plus ROOM, on Linux."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most = pages * resource.getpagesize() + ROOM
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _end(owner: int, pid: int, end: socket.socket) -> None:
    """Kill the process, which only the owner of it can do."""
    end.close()
    if os.getpid() == owner:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
