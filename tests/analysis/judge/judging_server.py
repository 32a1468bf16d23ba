# SPDX-License-Identifier: Apache-2.0
"""A judge behind HTTP, as good or as faulty as a test wants it; what it is asked is kept."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, bytes] | tuple[int, bytes, dict[str, str]]
Say = Callable[[str, int], Answer]
"""From the prompt, and how often it was asked before, to status, body and headers."""
PARTS = re.compile(
    r"=== question (?P<mark>\w+) ===\n(?P<question>.*)\n=== answer 1 (?P=mark) ===\n(?P<first>.*)\n"
    r"=== answer 2 (?P=mark) ===\n(?P<second>.*)\n=== end (?P=mark) ===",
    re.DOTALL,
)


@dataclass
class Server:
    url: str = ""
    prompts: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    most: int = 0
    """Requests under way at once, at most."""


def parts(prompt: str) -> dict[str, str]:
    found = PARTS.search(prompt)
    assert found, prompt
    return found.groupdict()


def completion(text: str, ended: str = "stop") -> bytes:
    message = {"role": "assistant", "content": text}
    return json.dumps({"choices": [{"message": message, "finish_reason": ended}]}).encode()


def by_length(prompt: str, _: int) -> Answer:
    """The longer an answer the better, to 10: what it is about, and the verdict."""
    said = parts(prompt)
    first, second = (min(10, 1 + len(said[name])) for name in ("first", "second"))
    return 200, completion(f"Both are short.\nverdict {said['mark']}: {first} {second}\n")


@contextmanager
def serving(say: Say) -> Generator[Server]:
    server, lock, here = Server(), threading.Lock(), [0]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompt = body["messages"][0]["content"]
            same = re.sub(re.escape(parts(prompt)["mark"]), "", prompt)
            with lock:
                before = sum(re.sub(re.escape(parts(p)["mark"]), "", p) == same for p in server.prompts)
                server.prompts.append(prompt)
                server.bodies.append(body)
                server.keys.append(self.headers.get("Authorization"))
                here[0] += 1
                server.most = max(server.most, here[0])
            try:
                answer = say(prompt, before) if self.path == "/v1/chat/completions" else (404, b"no such route")
            finally:
                with lock:
                    here[0] -= 1
            try:
                self.send_response(answer[0])
                for name, value in (answer[2] if len(answer) > 2 else {}).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer[1])))
                self.end_headers()
                self.wfile.write(answer[1])
            except OSError:  # who asked has gone
                self.close_connection = True

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        request_queue_size = 128
        daemon_threads = True

    http = Quiet(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def slow(seconds: float) -> Say:
    def say(prompt: str, before: int) -> Answer:
        time.sleep(seconds)
        return by_length(prompt, before)

    return say
