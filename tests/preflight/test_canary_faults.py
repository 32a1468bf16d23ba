# SPDX-License-Identifier: Apache-2.0
"""`evoalign canary` finds each planted fault, and no other, on a small server that applies adapters."""

import json
import math
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_server import FAULTS, between
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from evoalign.engines.server import adapters
from evoalign.models import tiny
from evoalign.preflight.canary import examine

PROMPTS = ("The opposite of hot is", "Once upon a time there was a miller who had three sons, and")
"""Weak adapters have little effect on these, so that the examination starts below its threshold."""
Reply = tuple[int, Any]


class TinyServer:
    """Serves the tiny model with adapters in transformers, by the requests of vLLM's server."""

    def __init__(self):
        self.model = AutoModelForCausalLM.from_pretrained(tiny(), dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(tiny())
        self.weights = {n: p.data.clone() for n, p in self.model.named_parameters() if p.ndim == 2}
        self.adapters = {}
        self.applied, self.lock = "tiny", threading.Lock()

    def reply(self, path, body):
        with self.lock:
            if path == "/v1/models":
                rows = [{"id": "tiny", "root": str(tiny()), "owned_by": "vllm", "parent": None}]
                return 200, {"data": rows + [{"id": name, "parent": "tiny"} for name in self.adapters]}
            if path == "/v1/load_lora_adapter":
                return self.load(body["lora_name"], Path(body["lora_path"]))
            if path == "/v1/unload_lora_adapter":
                return (200, {}) if self.adapters.pop(body["lora_name"], None) else (404, {})
            if path == "/v1/completions":
                is_known = body["model"] == "tiny" or body["model"] in self.adapters
                return (200, self.complete(body)) if is_known else (404, {"message": "no such model"})
            return 200, {"version": "1"}

    def load(self, name, folder):
        if name in self.adapters:
            return 400, {"message": "it is loaded already"}
        config = json.loads((folder / "adapter_config.json").read_text())
        scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config["use_rslora"] else config["r"])
        factors = load_file(folder / "adapter_model.safetensors")
        self.adapters[name] = {
            file.removeprefix("base_model.model.").replace("lora_A.", ""): scale
            * factors[file.replace("lora_A", "lora_B")].float()
            @ a.float()
            for file, a in factors.items()
            if "lora_A" in file
        }
        return 200, {}

    @torch.inference_mode()
    def complete(self, body):
        for name, parameter in self.model.named_parameters():
            if name in self.weights:
                moved = self.adapters.get(body["model"], {}).get(name)
                parameter.copy_(self.weights[name] if moved is None else self.weights[name] + moved)
        ids, tokens, logprobs, cache = self.tokenizer(body["prompt"])["input_ids"], [], [], None
        for _ in range(body["max_tokens"]):
            output = self.model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True)
            row, cache = output.logits[0, -1].log_softmax(-1), output.past_key_values
            ids = [int(row.argmax())]
            tokens.append(str(ids[0]))
            logprobs.append(min(0.0, float(row.max())))
        return {"choices": [{"text": "text", "logprobs": {"tokens": tokens, "token_logprobs": logprobs}}]}


@contextmanager
def serving(server):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, tree = server.reply(self.path, json.loads(raw or b"{}"))
            self.send_response(status)
            self.send_header("Content-Length", str(len(json.dumps(tree))))
            self.end_headers()
            self.wfile.write(json.dumps(tree).encode())

        do_POST = do_GET

        def log_message(self, format, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        listening.daemon_threads = True
        threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_address[1]}"
        listening.shutdown()


@pytest.fixture(scope="module")
def server():
    return TinyServer()


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    monkeypatch.setattr(adapters, "IN_MEMORY", tmp_path)


def names(report, status):
    return {check.name for check in report.checks if check.status == status}


def test_examine_blames_nothing_of_a_sound_server(server, tmp_path):
    with serving(server) as url:
        report = examine(url, prompts=PROMPTS)
    assert report.code == 0 and len(names(report, "ok")) == len(report.checks) == 16, report
    assert not server.adapters and not list(tmp_path.iterdir())


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.first("ignores", "stale", others="slow")
def test_examine_finds_a_planted_fault_and_no_other(server, fault):
    make, wanted = FAULTS[fault]
    server.adapters.clear()
    with serving(server) as url, between(url, "no-key", make()) as address:
        report = examine(address, prompts=PROMPTS)
    assert names(report, "FAULT") == wanted and report.code == 1, report
