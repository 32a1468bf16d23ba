# SPDX-License-Identifier: Apache-2.0
"""A proxy of an SGLang or vLLM server with planted faults in its handling of adapters."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeAlias

from safetensors.torch import load_file, save_file

Body: TypeAlias = dict[str, Any]
Answer: TypeAlias = tuple[int, bytes]
Forward: TypeAlias = Callable[[str, Body | None], Answer]
Handle: TypeAlias = Callable[[str, Body, Forward], Answer]
DONE: Answer = (200, json.dumps({"success": True}).encode())


def is_load(path: str) -> bool:
    return path.endswith("/load_lora_adapter")


def is_unload(path: str) -> bool:
    return path.endswith("/unload_lora_adapter")


def named(body: Body) -> str | None:
    """Return the adapter that a completion request names, in SGLang's field or vLLM's."""
    name = body.get("lora_path") or body.get("model")
    return name if "lora_name" not in body and isinstance(name, str) and "evoalign" in name else None


def renamed(body: Body, name: str | None) -> Body:
    """Return the request with another adapter, or the base model."""
    if "lora_path" in body:
        return {n: v for n, v in body.items() if n != "lora_path"} | ({"lora_path": name} if name else {})
    return {**body, "model": name or BASE[0]}


BASE = [""]
"""The name of vLLM's model."""


def sound() -> Handle:
    return lambda path, body, forward: forward(path, body)


def ignores() -> Handle:
    return lambda path, body, forward: forward(path, renamed(body, None) if named(body) else body)


def one_for_all() -> Handle:
    """Use the first loaded adapter for every adapter."""
    first: list[str] = []

    def handle(path: str, body: Body, forward: Forward) -> Answer:
        if is_load(path):
            first.append(body["lora_name"])
            return forward(path, body) if len(first) == 1 else DONE
        if is_unload(path):
            return DONE
        return forward(path, renamed(body, first[0]) if named(body) in first else body)

    return handle


def mixed_up() -> Handle:
    """While several adapters are loaded, use the first for all."""
    there: list[str] = []

    def handle(path: str, body: Body, forward: Forward) -> Answer:
        if is_load(path):
            there.append(body["lora_name"])
        if is_unload(path) and body["lora_name"] in there:
            there.remove(body["lora_name"])
        return forward(path, renamed(body, there[0]) if named(body) in there else body)

    return handle


def stale() -> Handle:
    """Keep the first adapter that was loaded under a name."""
    seen: set[str] = set()

    def handle(path: str, body: Body, forward: Forward) -> Answer:
        if is_unload(path) or (is_load(path) and body["lora_name"] in seen):
            return DONE
        if is_load(path):
            seen.add(body["lora_name"])
        return forward(path, body)

    return handle


def _with_config(change: Callable[[Body], Body]) -> Handle:
    def handle(path: str, body: Body, forward: Forward) -> Answer:
        if is_load(path):
            file = Path(body["lora_path"]) / "adapter_config.json"
            file.write_text(json.dumps(change(json.loads(file.read_text()))))
        return forward(path, body)

    return handle


def no_scaling() -> Handle:
    """Ignore lora_alpha."""
    return _with_config(lambda config: {**config, "lora_alpha": config["r"], "use_rslora": False})


def no_rslora() -> Handle:
    """Ignore use_rslora, as SGLang does."""
    return _with_config(lambda config: {**config, "use_rslora": False})


def no_sign() -> Handle:
    """Use the absolute values of B."""
    return _with_tensors(lambda name, tensor: tensor.abs() if "lora_B" in name else tensor)


def drops(module: str) -> Callable[[], Handle]:
    """Drop one projection of each adapter."""

    def make() -> Handle:
        return _with_tensors(lambda name, tensor: tensor * 0 if module in name else tensor)

    make.__name__ = f"drops_{module}"
    return make


def _with_tensors(change: Callable[[str, Any], Any]) -> Handle:
    def handle(path: str, body: Body, forward: Forward) -> Answer:
        if is_load(path):
            file = Path(body["lora_path"]) / "adapter_model.safetensors"
            save_file({name: change(name, tensor) for name, tensor in load_file(file).items()}, file)
        return forward(path, body)

    return handle


def base_for_unknown() -> Handle:
    """Use the base model for unknown names."""

    def handle(path: str, body: Body, forward: Forward) -> Answer:
        status, said = forward(path, body)
        return forward(path, renamed(body, None)) if status >= 400 and named(body) else (status, said)

    return handle


FAULTS: Mapping[str, tuple[Callable[[], Handle], frozenset[str]]] = {
    "ignores": (ignores, frozenset({"applied", "unknown name"})),
    "one for all": (one_for_all, frozenset({"applied"})),
    "mixed up": (mixed_up, frozenset({"at once"})),
    "stale": (stale, frozenset({"reload"})),
    "no scaling": (no_scaling, frozenset({"lora_alpha"})),
    "no sign": (no_sign, frozenset({"sign"})),
    "drops up_proj": (drops("up_proj"), frozenset({"module up_proj"})),
    "drops q_proj": (drops("q_proj"), frozenset({"module q_proj"})),
    "base for unknown": (base_for_unknown, frozenset({"unknown name"})),
}
"""Faults by name, with the checks that have to find them."""


@contextmanager
def between(real: str, key: str, handle: Handle) -> Generator[str]:
    """Run a proxy that replies by `handle`, which forwards to the real server, and yield its address."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def forward(path: str, body: Body | None) -> Answer:
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(real + path, data, headers)) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(*forward(self.path, None))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._answer(*handle(self.path, body, forward))

        def _answer(self, status: int, said: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # all connections arrive at once

    BASE[0] = json.loads(forward("/v1/models", None)[1])["data"][0]["id"]
    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
