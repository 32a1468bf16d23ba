# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of a whole population in one batch, against a loop over members and against the base model.

    python benchmarks/population.py                      30 members x 2 prompts of the tiny model on the CPU
    python benchmarks/population.py --model Qwen/Qwen2.5-0.5B-Instruct --device cuda --dtype bfloat16

All sides generate the same number of tokens: greedy, no stop token, the same prompts. In each of five rounds every
side runs once, one after the other, and the ratios are medians over rounds. The sides:

    population   one `engine.rollout` of all members
    loop         each member's weights merged into a plain model, `generate` of the prompts, the weights put back
    base         plain `generate` of the base model on members x prompts rows

Then, how often a text differs when the same population is cut into other chunks: a batch's shape may change the last
bit of a sum, and with it a token (`deterministic: true` fixes the chunks, not their independence of size).
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers

from baseline import check
from evoalign import engines, spaces, tasks, tokens
from evoalign.config import Config, from_dict
from evoalign.engines.transformers import TransformersEngine
from evoalign.models.origin import model_path
from evoalign.spaces import Space
from evoalign.tokens import Tokens
from evoalign.types import Layout, Plan, Request, Sampling, population

SPACES = ("lora", "lowrank")
SIGMA = {"lora": 0.02, "lowrank": 0.02}
QUESTIONS = 4
"""Prompts of the comparison between chunk sizes."""


def config_of(arguments: argparse.Namespace, space: str, **engine: Any) -> Config:
    return from_dict(
        {
            "space": space,
            "model": {"name": arguments.model, "dtype": engine.pop("dtype", arguments.dtype)},
            "deterministic": False,
            "es": {"sigma": SIGMA[space], "population_size": arguments.members},
            "engine": {"name": "transformers", "device": arguments.device, **engine},
        }
    )


def prompts_of(config: Config, loaded: Tokens, count: int) -> list[tuple[int, ...]]:
    """The questions that are shipped, round and round."""
    task = tasks.create(config.task)
    data = task.load_data(0)
    examples = [*data.train, *data.test]
    return [loaded.encode(task.prompt(examples[i % len(examples)])) for i in range(count)]


class Side:
    """An engine with a space, and its population."""

    def __init__(self, config: Config, loaded: Tokens) -> None:
        self.engine: TransformersEngine = engines.create(config, loaded)  # type: ignore[assignment]
        self.space: Space = spaces.create(config)
        self.layout: Layout = self.space.layout(self.engine.specs(), self.engine.dtype)
        self.engine.start(self.space, self.layout, None, False)
        self.plan = Plan(0, config.es.width, population(config.es.population_size))
        self.state = dict(self.engine.state())

    def rollout(self, prompts: Sequence[tuple[int, ...]], sampling: Sampling) -> dict[tuple[int, int], tuple[int, ...]]:
        requests = [Request(i, p, sampling, i) for i, p in enumerate(prompts)]
        return {(r.member.index, r.request): r.token_ids for r in self.engine.rollout(self.plan, requests)}


def plain(config: Config, device: torch.device) -> Any:
    """The model as transformers loads it, without a stop token."""
    path = model_path(config.model)
    dtype = getattr(torch, config.model.dtype)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return model


def generate(model: Any, prompts: Sequence[tuple[int, ...]], length: int, pad: int) -> torch.Tensor:
    """`generate` of a left-padded batch."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=mask, max_new_tokens=length, do_sample=False)
    assert out.shape[1] == width + length, "a row stopped early"
    return out[:, width:]


def loop(side: Side, model: Any, prompts: Sequence[tuple[int, ...]], length: int, pad: int) -> None:
    """One member after the other: merge, generate, put back."""
    weights = dict(model.named_parameters())
    master = {name: tensor.to(model.device) for name, tensor in side.state.items()}
    for member in side.plan.members:
        kept = {}
        with torch.no_grad():
            for module in dict.fromkeys(t.module for t in side.layout.tensors):
                adapter = side.space.adapter(side.layout, module, master.__getitem__, side.plan, [member])
                assert adapter is not None
                kept[module] = weights[module].clone()
                weights[module].add_(adapter.b[0] @ adapter.a[0], alpha=adapter.scaling)
        generate(model, prompts, length, pad)
        with torch.no_grad():
            for module, weight in kept.items():
                weights[module].copy_(weight)


def seconds(work: Callable[[], Any], device: torch.device) -> float:
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def sides(
    side: Side, model: Any, prompts: Sequence[tuple[int, ...]], length: int, pad: int
) -> dict[str, Callable[[], Any]]:
    """The work of each side, by name."""
    rows = [*prompts] * len(side.plan.members)
    return {
        "population": lambda: side.rollout(prompts, Sampling(length)),
        "base": lambda: generate(model, rows, length, pad),
        "loop": lambda: loop(side, model, prompts, length, pad),
    }


def speed(arguments: argparse.Namespace) -> dict[str, float]:
    """Print tokens per second of each side; return the ratios by their names in baselines.json."""
    figures: dict[str, float] = {}
    name = f"population {arguments.model} {arguments.dtype} {torch.device(arguments.device).type}"
    loaded = tokens.load(config_of(arguments, "lora").model)
    silent = Tokens(loaded.tokenizer, [])
    for space in arguments.spaces:
        config = config_of(arguments, space)
        side = Side(config, silent)
        device = side.engine.device
        prompts = prompts_of(config, loaded, arguments.prompts)
        works = sides(side, plain(config, device), prompts, arguments.tokens, loaded.pad_id)
        for work in works.values():
            work()
        rounds = [{name: seconds(work, device) for name, work in works.items()} for _ in range(arguments.rounds)]
        total = arguments.members * arguments.prompts * arguments.tokens
        print(f"\n{space}: {arguments.members} members x {arguments.prompts} prompts x {arguments.tokens} tokens")
        for side_name in works:
            median = statistics.median(r[side_name] for r in rounds)
            print(f"  {side_name:<11}{total / median:12,.0f} tokens/s{median:9.2f} s")
        for other in ("loop", "base"):
            ratios = sorted(r[other] / r["population"] for r in rounds)
            print(f"  population is {statistics.median(ratios):.2f}x {other} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
            figures[f"{name}, {space} over {'a loop' if other == 'loop' else 'base'}"] = statistics.median(ratios)
        side.engine.close()
    return figures


def chunks(arguments: argparse.Namespace) -> None:
    """The shipped questions, greedily and by sampling, in one batch and in smaller ones."""
    loaded = tokens.load(config_of(arguments, "lora").model)
    rows = arguments.members * QUESTIONS
    print(f"\ntexts that differ from those of one batch of {rows} rows ({arguments.tokens} tokens at most)")
    for dtype in ("float32", "bfloat16"):
        for space in arguments.spaces:
            for temperature in (0.0, 1.0):
                sampling = Sampling(arguments.tokens, temperature)
                found: dict[int, dict[tuple[int, int], tuple[int, ...]]] = {}
                for max_rows in (rows, rows // 2, rows // 6, 1):
                    config = config_of(arguments, space, dtype=dtype, max_rows=max_rows)
                    side = Side(config, loaded)
                    found[max_rows] = side.rollout(prompts_of(config, loaded, QUESTIONS), sampling)
                    side.engine.close()
                whole = found.pop(rows)
                shares = {n: sum(whole[key] != texts[key] for key in whole) / rows for n, texts in found.items()}
                told = ", ".join(f"{share:.1%} in chunks of {n}" for n, share in shares.items())
                print(f"  {dtype:<9}{space:<8} temperature {temperature:.0f}: {told}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=None, help="CPU threads; torch's own choice if left out")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--members", type=int, default=30)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--spaces", nargs="+", choices=SPACES, default=list(SPACES))
    parser.add_argument("--only", choices=["speed", "chunks"])
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    gpu = f", {torch.cuda.get_device_name()}" if arguments.device.startswith("cuda") else ""
    print(
        f"{arguments.model}, {arguments.dtype}, {arguments.device}{gpu}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    )
    figures = speed(arguments) if arguments.only != "chunks" else {}
    if arguments.only != "speed":
        chunks(arguments)
    check(figures)


if __name__ == "__main__":
    main()
