# SPDX-License-Identifier: Apache-2.0
"""Two GPUs against one: the same members, texts and weights, whatever the split.

    python benchmarks/vllm_tensor_parallel.py --json runs/vllm.jsonl                    two GPUs, about 260 s

A small model with four key-value heads and random weights in float32, 30 members of each space with four prompts each,
24 greedy tokens, before and after one update: tokens and `weights_hash` under `tensor_parallel_size` 2 against 1. Sums
over a split matrix are added in another order, so a text may differ where two tokens are as likely to within rounding:
the log-probabilities are compared as well. The noise, the update and the hash must not differ at all.

Then the 7B shape under two GPUs: start, a rollout of 30 members x 8 prompts with 128 tokens, an update and the hash.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import vllm_shapes as v

SPACES = ("lora", "lowrank", "full")
PROMPT = 32
SIGMA = {"lora": 0.02, "lowrank": 0.01, "full": 0.01}


def random_model(folder: str) -> None:
    """Weights of a usual size beside the configuration, in float32, for engines that load their part of them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.05)
    model.save_pretrained(folder)


def small(space: str, split: int, options: argparse.Namespace, folder: str) -> None:
    """One space under one split: rollout, update, rollout."""
    from evoalign.types import MEAN, Plan, Update, population

    members = population(options.members)
    rows = options.prompts * (options.members + 1)
    v.only_graphs({options.prompts, rows})
    config = v.config_of(
        folder, "heads", rows=rows, length=128, members=options.members, space=space, sigma=SIGMA[space],
        dtype="float32",
        engine={
            "tensor_parallel_size": split, "load_format": "safetensors", "enforce_eager": options.eager,
            "attention_backend": options.attention, "gpu_memory_utilization": 0.2,  # three engines share the GPUs
        },
    )  # fmt: skip
    served = v.Served(config)
    v.say(f"{space} over {split}: started in {served.start_seconds:.1f} s; {served.about()}")
    requests = v.requests_of(options.prompts, PROMPT, options.tokens, 5, logprobs=True)
    plan = Plan(1, config.es.sigma, (*members, MEAN))
    hashes = [served.engine.fingerprint()]
    texts = [answers(served, plan, requests)]
    coefficients = tuple((i % 7 - 3) / 2 for i in range(len(members)))
    served.engine.apply(Update(0, 1, members, coefficients, config.es.sigma, config.es.learning_rate))
    hashes.append(served.engine.fingerprint())
    texts.append(answers(served, plan, requests))
    v.emit(
        options.file, benchmark="split", space=space, split=split, form=served.about()["form"], hashes=hashes,
        texts=texts, members=options.members,
    )  # fmt: skip
    v.say(f"{space} over {split}: hashes {[h[:12] for h in hashes]}")
    served.engine.close()


def answers(served: v.Served, plan: Any, requests: Any) -> dict[str, Any]:
    """Token ids and log-probabilities by member and request."""
    rollouts = list(served.engine.rollout(plan, requests))
    return {f"{r.member.index}/{r.request}": [list(r.token_ids), list(r.logprobs)] for r in rollouts}


def large(options: argparse.Namespace, folder: Path) -> None:
    """The 7B shape (or another) over two GPUs."""
    from evoalign.types import Plan, Update, population

    members = population(options.members)
    rows = 8 * options.members
    v.only_graphs({rows})
    config = v.config_of(
        v.model_folder(options.shape, folder), options.shape, rows=rows, length=256, members=options.members,
        engine={"tensor_parallel_size": options.split, "attention_backend": options.attention},
    )  # fmt: skip
    served = v.Served(config)
    about = served.about()
    v.say(f"{options.shape} over {options.split}: started in {served.start_seconds:.1f} s; {about}")
    plan = Plan(1, config.es.sigma, members)
    served.members(plan, v.requests_of(8, 100, 8, 1))  # warm up
    base = served.base(v.requests_of(rows, 100, 128, 2))
    took = served.members(plan, v.requests_of(8, 100, 128, 3))
    update = Update(0, 1, members, tuple(float(i % 3 - 1) for i in range(len(members))), 1e-3, 5e-4)
    began = time.perf_counter()
    before = served.engine.fingerprint()
    hashing = time.perf_counter() - began
    moving = served.seconds(lambda: served.engine.apply(update))
    assert served.engine.fingerprint() != before, "the update moved nothing"
    v.emit(
        options.file, benchmark="split_large", shape=options.shape, split=options.split, form=about["form"],
        base=asdict(base), population=asdict(took), update=moving, fingerprint=hashing, start=served.start_seconds,
        memory=served.engine.rpc(v.memory),
    )  # fmt: skip
    served.engine.close()


def report(options: argparse.Namespace) -> None:
    """Tables of the latest results in the file."""
    found = {(r["space"], r["split"]): r for r in v.rows_of(options.file, benchmark="split")}
    lines = []
    for space in SPACES if found else ():
        one, two = found.get((space, 1)), found.get((space, options.split))
        if one is None or two is None:
            lines.append((space, "", "", "not measured", "", ""))
            continue
        for when, a, b, x, y in zip(
            ("start", "after one update"), one["texts"], two["texts"], one["hashes"], two["hashes"], strict=True
        ):
            same, apart = sum(a[k][0] == b[k][0] for k in a), 0.0
            for key in a:
                equal = a[key][0] == b[key][0]
                gaps = [abs(m - n) for m, n in zip(a[key][1], b[key][1], strict=True)] if equal else []
                apart = max([apart, *gaps])
            distinct = len({str(text[0]) for text in a.values()})
            lines.append((space, two["form"], when, f"{same} of {len(a)}", f"{apart:.1e}", x == y, distinct))
    v.table(
        ("space", "form", "when", "same tokens", "log-probabilities apart by", "same hash", "distinct texts"), lines
    )
    for r in v.rows_of(options.file, benchmark="split_large"):
        base, mine = (r[side]["tokens"] / r[side]["generate"] for side in ("base", "population"))
        device = max(m.get("device", 0) for m in r["memory"]) / 2**30
        print(f"{r['shape']} over {r['split']} ({r['form']}): start {r['start']:.0f} s, base {base:,.0f} tokens/s, "
              f"population {mine:,.0f} ({mine / base:.1%}), update {1000 * r['update']:.0f} ms, "
              f"fingerprint {1000 * r['fingerprint']:.0f} ms, {device:.1f} GiB a GPU")  # fmt: skip


def main() -> None:
    parser = v.parser(__doc__, "7b")
    parser.set_defaults(shape="7b" if v.has_gpu() else "heads")
    parser.add_argument("--parts", nargs="+", choices=["small", "large"], default=["small", "large"])
    parser.add_argument("--spaces", nargs="+", choices=SPACES, default=list(SPACES))
    parser.add_argument("--split", type=int, default=2)
    parser.add_argument("--members", type=int, default=30 if v.has_gpu() else 3)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs for the small model")
    parser.add_argument("--prompts", type=int, default=4 if v.has_gpu() else 2)
    parser.add_argument("--tokens", type=int, default=24 if v.has_gpu() else 4)
    options = parser.parse_args()
    with v.running(options) as folder:
        v.preload()
        if "small" in options.parts:
            model = v.model_folder("heads", folder)
            v.apart(random_model, model, limit=options.limit)
            ones = [(small, (space, 1, options, model)) for space in options.spaces]
            split = [(small, (space, options.split, options, model)) for space in options.spaces]
            # Engines of one GPU share it; those that wait for each other between GPUs would wait for all.
            for group in [ones, *([call] for call in split)]:
                if not v.together(group, limit=options.limit):
                    v.say("not all ended well, see above")
        if "large" in options.parts and not v.apart(large, options, folder, limit=options.limit):
            v.say(f"{options.shape} over {options.split} did not end well: see above")
        report(options)


if __name__ == "__main__":
    main()
