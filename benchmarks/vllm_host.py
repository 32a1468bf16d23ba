# SPDX-License-Identifier: Apache-2.0
"""What the host takes of a rollout of the vLLM engine, and what its start takes.

    python benchmarks/vllm_host.py --parts requests --json runs/vllm.jsonl
    python benchmarks/vllm_host.py --parts start --shape 0.5b --json runs/vllm.jsonl        one GPU

requests  Requests a second of a population: the engine's own way (`asking.py`), against vLLM's `generate` with what the
          engine handed it before (a prompt, settings and an adapter for each row; texts made one by one, when all are
          there). They take turns. `--stub` puts zeros in place of the decoder's layers, so that the host's part is
          left; on a CPU, where the layers take most, that is the default.
start     Seconds until an engine of `--seqs` sequences answers, an engine each: with the graphs that evoalign chooses,
          with as many as it had before, and with one. What imports take comes before.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import vllm_shapes as v

PARTS = ("requests", "start")


def stub(worker: Any) -> None:
    """In a worker: a decoder that answers at once. Its graphs, where there are any, stay as they are."""
    import torch

    decoder = worker.model_runner.get_model().model
    parameter = next(decoder.parameters())
    hidden = torch.zeros(
        worker.vllm_config.scheduler_config.max_num_batched_tokens,
        worker.vllm_config.model_config.get_hidden_size(),
        dtype=parameter.dtype, device=parameter.device,
    )  # fmt: skip
    decoder.forward = lambda input_ids, *_, **__: hidden[: len(input_ids)]


def serve(options: argparse.Namespace, folder: Path, **engine: Any) -> v.Served:
    config = v.config_of(
        v.model_folder(options.shape, folder), options.shape,
        rows=options.members * options.prompts, length=options.prompt + options.tokens, members=options.members,
        engine={"attention_backend": options.attention, **engine},
    )  # fmt: skip
    return v.Served(config)


# Requests


def by_generate(served: v.Served, plan: Any, requests: Sequence[Any]) -> Iterator[str]:
    """vLLM's own way, as the engine went it before: all handed over, all waited for, texts one by one."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    engine = served.engine
    engine.rpc("es_put", plan, plan.members)
    salt = engine._salt()
    prompts = {r.index: {"prompt_token_ids": list(r.prompt_ids), "cache_salt": salt} for r in requests}
    sampling = {
        r.index: SamplingParams(max_tokens=r.sampling.max_tokens, temperature=0, ignore_eos=True, detokenize=False)
        for r in requests
    }
    adapters = {m: LoRARequest(f"member-{slot}", slot + 1, "in-memory") for slot, m in enumerate(plan.members)}
    asked = [(m, r) for m in plan.members for r in requests]
    outputs = engine.llm.generate(
        [prompts[r.index] for _, r in asked], [sampling[r.index] for _, r in asked],
        lora_request=[adapters[m] for m, _ in asked], use_tqdm=False,
    )  # fmt: skip
    for output in outputs:
        yield served.tokens.decode(output.outputs[0].token_ids)


def requests(options: argparse.Namespace, folder: Path) -> None:
    from evoalign.types import Plan, population

    v.only_graphs({options.members * options.prompts})
    served = serve(options, folder)
    if options.stub:
        served.engine.rpc(stub)
    plan, rows = Plan(0, served.config.es.sigma, population(options.members)), options.members * options.prompts
    ways: dict[str, Callable[[Sequence[Any]], Iterator[Any]]] = {
        "generate": lambda asked: by_generate(served, plan, asked),
        "engine": lambda asked: served.engine.rollout(plan, asked),
    }
    found: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(options.repeats + 1):
        asked = v.requests_of(options.prompts, options.prompt, options.tokens, number)
        for way in sorted(ways, reverse=bool(number % 2)):
            served.synchronize()
            began = time.perf_counter()
            count = sum(1 for _ in ways[way](asked))
            took = time.perf_counter() - began
            assert count == rows, count
            if number:
                found[way].append(rows / took)
    ratio = [e / g for g, e in zip(found["generate"], found["engine"], strict=True)]
    v.emit(
        options.file, benchmark="requests", shape=options.shape, rows=rows, prompt=options.prompt,
        tokens=options.tokens, stub=options.stub, ratio=ratio, **found,
    )  # fmt: skip
    v.say(
        f"{rows} rows of {options.prompt} + {options.tokens} tokens, requests a second: generate "
        f"{v.spread(found['generate'])}, engine {v.spread(found['engine'])}, {v.median(ratio):.2f} x"
    )


# Start


def before(most: int) -> list[int]:
    """The sizes that had a graph: 67 up to 1,024."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(544, 1025, 32), *range(1088, most + 64, 64)]
    return [*(n for n in sizes if n < most), most]


def start(options: argparse.Namespace, folder: Path) -> None:
    from evoalign.engines.vllm.start import graph_sizes

    ways = {"one": [options.seqs], "chosen": graph_sizes(options.seqs), "before": before(options.seqs)}
    for name in options.graphs:
        if not v.apart(started, name, ways[name], options, folder, limit=options.limit):
            v.say(f"start with the graphs {name} did not end well: see above")


def started(name: str, sizes: list[int], options: argparse.Namespace, folder: Path) -> None:
    """One engine, in a process of its own, and what of its start the graphs take."""
    from evoalign.engines.vllm import worker

    took: list[float] = []
    plain = worker.EvolvingWorker.compile_or_warm_up_model

    def timed(self: Any) -> Any:
        began = time.perf_counter()
        found = plain(self)
        took.append(time.perf_counter() - began)
        return found

    worker.EvolvingWorker.compile_or_warm_up_model = timed
    v.only_graphs(sizes)
    config = v.config_of(
        v.model_folder(options.shape, folder), options.shape, rows=options.seqs, length=options.prompt + options.tokens,
        members=options.members, engine={"attention_backend": options.attention},
    )  # fmt: skip
    seconds = v.Served(config).start_seconds
    row = {"graphs": name, "sizes": len(sizes), "seconds": seconds, "warm_up": took}
    v.emit(options.file, benchmark="start", shape=options.shape, seqs=options.seqs, **row)
    v.say(f"start: {row}")


def main() -> None:
    parser = v.parser(__doc__, "135m")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["requests"])
    parser.add_argument("--members", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=4 if not v.has_gpu() else 24)
    parser.add_argument("--seqs", type=int, default=1024)
    parser.add_argument("--graphs", nargs="+", choices=("one", "chosen", "before"), default=["chosen", "one", "before"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--stub", action=argparse.BooleanOptionalAction, default=not v.has_gpu())
    options = parser.parse_args()
    with v.running(options) as folder:
        v.preload()
        if "requests" in options.parts and not v.apart(requests, options, folder, limit=options.limit):
            v.say("requests did not end well: see above")
        if "start" in options.parts:
            start(options, folder)


if __name__ == "__main__":
    main()
