# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of a population's rollout in one batch, against what one would do without it.

    a   a loop over the members: merge a member's adapter into the weights, `generate`, put the weights back
    b   plain `generate` of the base model on as many rows: no members at all

All three generate the same number of tokens for the same rows (no stop token), greedily. One run interleaves them and
reports the median of the ratios. Further down: how often a text differs between chunk sizes.

    python benchmarks/population.py [--model tiny] [--members 30] [--prompts 2] [--tokens 64] [--threads 2]
                                    [--device cpu] [--dtype float32] [--rank 1] [--repeats 5]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from evoalign import config, spaces, tasks, tokens
from evoalign.engines.transformers import TransformersEngine
from evoalign.rundir import versions
from evoalign.spaces import Space
from evoalign.tokens import Tokens, model_path
from evoalign.types import Layout, Plan, Request, Sampling, population

SIGMA = 0.01
CHUNKS = (60, 30, 16, 7, 1)


class Bench:
    """An engine that never stops early, with the plan and requests of one rollout."""

    def __init__(self, arguments: argparse.Namespace, space: str, *, stops: bool = False) -> None:
        self.arguments = arguments
        rank = {"rank": arguments.rank}
        self.config = config.from_dict({
            "space": space, "model": {"name": arguments.model, "dtype": arguments.dtype},
            "lora": rank, "lowrank": rank, "engine": {"device": arguments.device, "max_rows": arguments.max_rows},
            "es": {"sigma": SIGMA, "population_size": arguments.members},
        })  # fmt: skip
        loaded = tokens.load(self.config.model)
        self.tokens = loaded if stops else Tokens(loaded.tokenizer, ())
        self.engine = TransformersEngine(self.config, self.tokens)
        self.space: Space = spaces.create(self.config)
        self.layout: Layout = self.space.layout(self.engine.specs(), self.engine.dtype)
        self.engine.start(self.space, self.layout, None, False)
        self.plan = Plan(0, SIGMA, population(arguments.members))
        self.requests = self._requests(loaded)
        self.base: Any = AutoModelForCausalLM.from_pretrained(model_path(self.config.model), dtype=self.engine.dtype)
        self.base = self.base.to(self.engine.device).eval().requires_grad_(False)

    def rollout(self) -> list[tuple[int, ...]]:
        """All members in one batch."""
        return [r.token_ids for r in self.engine.rollout(self.plan, self.requests)]

    def loop(self) -> list[tuple[int, ...]]:
        """Member by member with merged weights."""
        parameters = dict(self.base.named_parameters())
        modules = list(dict.fromkeys(t.module for t in self.layout.tensors))
        kept = {m: parameters[m].detach().clone() for m in modules}
        masters = {n: t.to(self.engine.device) for n, t in self.engine.state()}
        out: list[tuple[int, ...]] = []
        for member in self.plan.members:
            for module in modules:
                adapter = self.space.adapter(self.layout, module, masters.__getitem__, self.plan, [member])
                assert adapter is not None
                parameters[module].data.add_((adapter.b[0] @ adapter.a[0]) * adapter.scaling)
            out += self._generate([r.prompt_ids for r in self.requests])
            for module in modules:
                parameters[module].data.copy_(kept[module])
        return out

    def plain(self) -> list[tuple[int, ...]]:
        """The base model on as many rows."""
        return self._generate([r.prompt_ids for r in self.requests] * len(self.plan.members))

    def _generate(self, prompts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Left-padded greedy `generate` of exactly `--tokens` tokens."""
        width = max(map(len, prompts))
        pad = self.tokens.pad_id
        ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=self.engine.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.engine.device)
        count = self.arguments.tokens
        with torch.inference_mode():
            out: Any = self.base.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=count, min_new_tokens=count, pad_token_id=pad
            )
        return [tuple(row[width:].tolist()) for row in out]

    def _requests(self, loaded: Tokens) -> list[Request]:
        task = tasks.create(config.TaskConfig(name="countdown", prompt=self.arguments.form))
        examples = task.load_data(0).train[: self.arguments.prompts]
        sampling = Sampling(self.arguments.tokens)
        return [Request(i, loaded.encode(task.prompt(e)), sampling) for i, e in enumerate(examples)]


def timed(work: Callable[[], list[tuple[int, ...]]], device: torch.device) -> float:
    """Tokens per second of one call."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    out = work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return sum(map(len, out)) / (time.perf_counter() - began)


def compare(arguments: argparse.Namespace, space: str) -> None:
    """One row of the table."""
    bench = Bench(arguments, space)
    works = (bench.rollout, bench.loop, bench.plain)
    for work in works:
        work()
    runs = [[timed(work, bench.engine.device) for work in works] for _ in range(arguments.repeats)]
    ours, loop, plain = (statistics.median(column) for column in zip(*runs, strict=True))
    a = statistics.median(r[0] / r[1] for r in runs)
    b = statistics.median(r[0] / r[2] for r in runs)
    print(f"| {space} | {ours:,.0f} | {loop:,.0f} | {plain:,.0f} | {a:.1f} x | {b:.2f} x |", flush=True)
    bench.engine.close()


def chunks(arguments: argparse.Namespace) -> None:
    """Share of texts that differ from those of the largest chunk."""
    print("\n| dtype | " + " | ".join(f"{rows} rows" for rows in CHUNKS[1:]) + " |")
    print("|---|" + "---|" * (len(CHUNKS) - 1))
    for dtype in ("float32", "bfloat16"):
        texts: list[list[tuple[int, ...]]] = []
        for rows in CHUNKS:
            settings = argparse.Namespace(**{**vars(arguments), "max_rows": rows, "dtype": dtype})
            bench = Bench(settings, "lowrank", stops=True)
            texts.append(bench.rollout())
            bench.engine.close()
        differing = [sum(x != y for x, y in zip(t, texts[0], strict=True)) / len(t) for t in texts[1:]]
        print(f"| {dtype} | " + " | ".join(f"{share:.1%}" for share in differing) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--members", type=int, default=30)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--form", default="short", help="raw, short or chat")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-rows", type=int, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    where = torch.cuda.get_device_name() if arguments.device.startswith("cuda") else f"{arguments.threads} CPU threads"
    print(f"{arguments.model}, {arguments.dtype}, {where}, {arguments.members} members x {arguments.prompts} prompts, "
          f"{arguments.tokens} tokens each, rank {arguments.rank}; {versions()}\n")  # fmt: skip
    print("| space | population tok/s | a: loop tok/s | b: plain tok/s | against a | against b |")
    print("|---|---|---|---|---|---|")
    for space in ("lora", "lowrank"):
        compare(arguments, space)
    if arguments.members * arguments.prompts == CHUNKS[0]:
        chunks(arguments)


if __name__ == "__main__":
    main()
