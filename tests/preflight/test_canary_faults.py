# SPDX-License-Identifier: Apache-2.0
"""`evoalign canary` finds each planted fault, and no other, on a small server that applies adapters."""

import hashlib
import json
import math
import threading
from pathlib import Path

import pytest
import torch
from faulty_server import FAULTS, between
from json_server import serving
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from evoalign.engines.server import adapters
from evoalign.models import tiny
from evoalign.preflight.canary import examine

PROMPTS = ("The opposite of hot is", "Once upon a time there was a miller who had three sons, and")
"""Weak adapters have little effect on these, so that the examination starts below its threshold."""


class TinyServer:
    """Serves the tiny model with adapters in transformers, by the requests of vLLM's server."""

    def __init__(self):
        self.model = AutoModelForCausalLM.from_pretrained(tiny(), dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(tiny())
        self.weights = {n: p.data.clone() for n, p in self.model.named_parameters() if p.ndim == 2}
        self.adapters, self.made, self.lock = {}, {}, threading.Lock()

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
            file.removeprefix("base_model.model.").replace("lora_A.", ""):
                scale * factors[file.replace("lora_A", "lora_B")].float() @ a.float()
            for file, a in factors.items() if "lora_A" in file
        }  # fmt: skip
        return 200, {}

    def complete(self, body):
        """Each completion is made once: examinations of all faults load the same adapters."""
        moved = self.adapters.get(body["model"], {})
        digest = hashlib.sha256()
        for name in sorted(moved):
            digest.update(name.encode() + moved[name].numpy().tobytes())
        key = digest.hexdigest(), body["prompt"], body["max_tokens"]
        if key not in self.made:
            self.made[key] = self.decode(moved, body)
        return self.made[key]

    @torch.inference_mode()
    def decode(self, moved, body):
        for name, parameter in self.model.named_parameters():
            if name in self.weights:
                parameter.copy_(self.weights[name] + moved[name] if name in moved else self.weights[name])
        ids, tokens, logprobs, cache = self.tokenizer(body["prompt"])["input_ids"], [], [], None
        for _ in range(body["max_tokens"]):
            output = self.model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True)
            row, cache = output.logits[0, -1].log_softmax(-1), output.past_key_values
            ids = [int(row.argmax())]
            tokens.append(str(ids[0]))
            logprobs.append(min(0.0, float(row.max())))
        return {"choices": [{"text": "text", "logprobs": {"tokens": tokens, "token_logprobs": logprobs}}]}


@pytest.fixture(scope="module")
def server():
    return TinyServer()


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    monkeypatch.setattr(adapters, "IN_MEMORY", tmp_path)


def names(report, status):
    return {check.name for check in report.checks if check.status == status}


def test_examine_blames_nothing_of_a_sound_server(server, tmp_path):
    with serving(server.reply) as url:
        report = examine(url, prompts=PROMPTS)
    assert report.code == 0 and len(names(report, "ok")) == len(report.checks) == 16, report
    assert not server.adapters and not list(tmp_path.iterdir())


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.first("ignores", "stale", "mixed up", "no sign")
def test_examine_finds_a_planted_fault_and_no_other(server, fault):
    make, wanted = FAULTS[fault]
    server.adapters.clear()
    with serving(server.reply) as url, between(url, "no-key", make()) as address:
        report = examine(address, prompts=PROMPTS)
    assert names(report, "FAULT") == wanted and report.code == 1, report
