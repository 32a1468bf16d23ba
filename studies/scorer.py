# SPDX-License-Identifier: Apache-2.0
"""Speed of a scorer's service: requests per second with batches, against one pair at a time.

    python studies/scorer.py                                   two cores, about three minutes
    python studies/scorer.py --device cuda --dtype bfloat16 --hidden 2048 --layers 22 --requests 2000

Two services of one model, with random weights and the form of Safe RLHF's, run side by side, one with `--batch-size 16`
and one with 1. They take turns: each is sent the same requests of one pair, 64 at once, in `--rounds` rounds. The row
has the requests a second of both in each round, and the median, the least and the largest of the rounds' ratios; a
round in which other work slows this machine slows both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaModel

from evoalign.models import tiny

AT_ONCE = 64
WORDS = ("one", "river", "because", "never", "stone", "quickly", "and", "a", "green", "answer")


def model(folder: Path, hidden: int, layers: int) -> int:
    """Random weights of Safe RLHF's form with the tiny model's tokenizer; how many."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=hidden, intermediate_size=(hidden * 11 // 4 + 7) // 8 * 8,
        num_hidden_layers=layers, num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64,
        max_position_embeddings=2048, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    body = LlamaModel(config)
    tensors = {f"model.{name}": tensor for name, tensor in body.state_dict().items()}
    tensors["score_head.weight"] = torch.randn(1, hidden)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tree = config.to_dict() | {"architectures": ["LlamaForScore"], "score_dim": 1, "score_bias": False}
    (folder / "config.json").write_text(json.dumps(tree))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny() / name, folder)
    return sum(tensor.numel() for tensor in tensors.values())


def requests(count: int) -> list[dict[str, str]]:
    """Pairs of 5 to 30 words and 1 to 60."""
    draw = torch.Generator().manual_seed(1)

    def text(least: int, most: int) -> str:
        length = int(torch.randint(least, most + 1, (), generator=draw))
        return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (length,), generator=draw).tolist())

    return [{"prompt": text(5, 30), "response": text(1, 60)} for _ in range(count)]


@contextmanager
def served(folder: Path, batch_size: int, args: argparse.Namespace) -> Iterator[str]:
    """A service; its address."""
    command = [
        sys.executable, "-m", "evoalign.cli", "score", "serve", "--reward", str(folder), "--port", "0",
        "--batch-size", str(batch_size), "--queue", "4096", "--device", args.device, "--dtype", args.dtype,
        "--threads", str(args.threads),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line.endswith(" is ready\n"):
            raise SystemExit(f"no service: {line}")
        yield line.split()[0]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


async def rate(url: str, items: Sequence[dict[str, str]]) -> tuple[float, list[float]]:
    """Requests a second, and their scores."""
    room = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:

        async def one(item: dict[str, str]) -> float:
            async with room:
                answer = await http.post("/score", json={"items": [item]})
            return float(answer.raise_for_status().json()["reward"][0])

        begun = time.perf_counter()
        scores = await asyncio.gather(*map(one, items))
        return len(items) / (time.perf_counter() - begun), scores


def measured(args: argparse.Namespace, weights: int, rounds: Sequence[tuple[float, float, float]]) -> dict[str, Any]:
    """The row: of each round the requests a second of both services, and how far their scores were apart."""
    ratios = [fast / slow for fast, slow, _ in rounds]
    return {
        "weights": weights, "hidden": args.hidden, "layers": args.layers,
        "device": torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.machine(),
        "cores": os.cpu_count(), "threads": args.threads, "dtype": args.dtype, "python": platform.python_version(),
        "torch": torch.__version__, **{name: version(name) for name in ("transformers", "fastapi", "uvicorn")},
        "requests": args.requests, "at_once": AT_ONCE, "batch_size": args.batch_size,
        "batched_per_s": [round(fast, 1) for fast, _, _ in rounds],
        "single_per_s": [round(slow, 1) for _, slow, _ in rounds],
        "batched_per_s_median": round(statistics.median(fast for fast, _, _ in rounds), 1),
        "single_per_s_median": round(statistics.median(slow for _, slow, _ in rounds), 1),
        "ratio": round(statistics.median(ratios), 2), "ratio_min": round(min(ratios), 2),
        "ratio_max": round(max(ratios), 2), "largest_difference_of_scores": max(far for _, _, far in rounds),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--json", type=Path, default=Path("studies/results/scorer.jsonl"))
    args = parser.parse_args()
    items = requests(args.requests)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as services:
        weights = model(Path(folder), args.hidden, args.layers)
        batched, single = (services.enter_context(served(Path(folder), size, args)) for size in (args.batch_size, 1))
        for url in (batched, single):
            asyncio.run(rate(url, items[:AT_ONCE]))
        rounds = []
        for _ in range(args.rounds):
            (fast, ours), (slow, theirs) = (asyncio.run(rate(url, items)) for url in (batched, single))
            rounds.append((fast, slow, max(abs(a - b) for a, b in zip(ours, theirs, strict=True))))
    row = measured(args, weights, rounds)
    print(json.dumps(row))
    with args.json.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
