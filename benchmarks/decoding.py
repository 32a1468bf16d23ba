# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of whole generations by the in-process engine's two decoders, and by vLLM, on one device.

    python benchmarks/decoding.py --shape 0.5b --cases 128x12 30x32 --json runs/decoding.jsonl
    python benchmarks/decoding.py --shape 1.5b --cases 30x32 --forms static vllm
    python benchmarks/decoding.py --shape smollm2 --cases 8x4 --forms library static --dtype float32 --real-prompts

A case `128x12` is 128 members of `lowrank`, rank 1, with 12 prompts each. Prompts have 100 random tokens, completions
128, greedy; the few rows that draw the stop token end earlier, and their tokens are counted as they are. Weights are
random, bfloat16 on a GPU, the same file for all forms; `tiny` is the shipped model, and `smollm2` SmolLM2-135M-Instruct
as `make test-real` makes it. With `--real-prompts` the prompts are Countdown's own, of several lengths, which a model
of words may answer and end: `short` for `tiny`, `chat` for others. The clock is around `engine.rollout`: members'
factors, prompts, decoding and texts. `base` is the mean alone on as many rows of as many prompts. Forms:

    static, library   what `engine.decoder` says of the engine `transformers`
    vllm              with graphs of the cases' sizes, and slots for the most members

The floor is what the device's memory and matrix units allow (`--bandwidth` in TB/s, `--flops` in TFLOP/s): a step
reads all weights, the members' factors once and each row's keys and values, and does two operations a weight and row;
reading the prompts does two operations a weight and token. The longer of both counts, step by step. The other floor has
one after the other, as kernels of a step come, and products at what the device sustains (`--sustained`).

With `--space full` members are written over the weights one by one; base is the mean alone, as often, on one member's
rows.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import vllm_shapes as v
from baseline import check
from evoalign.models import tiny

PROMPT, TOKENS = 100, 128
FORMS = ("static", "library", "vllm")
ROOT = Path(__file__).resolve().parents[1]
REAL = {"tiny": tiny, "smollm2": lambda: ROOT / ".cache" / "smollm2"}
"""Folder of each model with trained weights."""
v.SHAPES["smollm2"] = v.SHAPES["135m"]


def saved(shape: str, parent: Path, dtype: str) -> str:
    """A folder with a shape's configuration, tokenizer and random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if shape in REAL:
        if not (found := Path(REAL[shape]())).is_dir():
            raise SystemExit(f"{found} is not there: make test-real makes it (recipes/smollm2)")
        return str(found)
    folder = v.model_folder(shape, parent)
    if not list(Path(folder).glob("*.safetensors")):
        torch.manual_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model: Any = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(folder), dtype=getattr(torch, dtype)
            )
        model.save_pretrained(folder)
    return folder


def floor(shape: str, members: int, rows: int, options: argparse.Namespace) -> tuple[float, float, float]:
    """Seconds that prompts and steps take at the least, and both where memory and products take turns."""
    c = v.shape_of(shape)
    hidden, inner, layers = c["hidden_size"], c["intermediate_size"], c["num_hidden_layers"]
    head = hidden // c["num_attention_heads"]
    shared = head * c["num_key_value_heads"]
    matrices = layers * (2 * hidden * hidden + 2 * hidden * shared + 3 * hidden * inner)
    output = hidden * c["vocab_size"]
    factors = members * layers * (4 * hidden + 2 * (hidden + shared) + 3 * (hidden + inner))
    flops, bandwidth = options.flops * 1e12, options.bandwidth * 1e12
    if options.space == "full":  # one by one, without factors, and each is written over the weights
        one = floor(shape, 0, rows // members, argparse.Namespace(**{**vars(options), "space": "lowrank"}))
        return tuple(members * seconds for seconds in one)  # type: ignore[return-value]
    prompts = 2 * matrices * rows * options.prompt / flops
    steps = 0.0
    turns = 2 * matrices * rows * options.prompt / (options.sustained * 1e12)
    for step in range(options.tokens):
        past = rows * layers * 2 * shared * (options.prompt + step)
        read = 2 * (matrices + output + factors + past) / bandwidth
        steps += max(read, 2 * (matrices + output) * rows / flops)
        turns += read + 2 * (matrices + output) * rows / (options.sustained * 1e12)
    return prompts, steps, turns


def countdown(shape: str, loaded: Any, count: int) -> list[tuple[int, ...]]:
    """Return the first training problems, repeated if more are requested."""
    from evoalign import tasks
    from evoalign.config import from_dict
    from evoalign.rollouts import Encoded

    most = min(count, 2000)
    settings = {"name": "countdown", "split": "first_last", "train_size": most, "test_size": 1}
    settings |= {
        "prompt": "short" if shape == "tiny" else "chat",
        "train_data": str(ROOT / "data/tasks/countdown/countdown.json"),
    }
    task = tasks.create(from_dict({"model": {"name": "tiny"}, "es": {"sigma": 1.0}, "task": settings}).task)
    prompts = Encoded(task, loaded, task.load_data(0).train)
    return [prompts[row % most] for row in range(count)]


class Bench:
    """One engine of a form, with the members and prompts of its cases."""

    def __init__(self, form: str, folder: str, options: argparse.Namespace) -> None:
        from evoalign import engines, spaces, tokens
        from evoalign.config import from_dict

        self.form, self.options = form, options
        most = max(m for m, _ in options.cases)
        rows = max(m * p for m, p in options.cases)
        if form == "vllm":
            config = v.config_of(
                folder, options.shape, rows=rows, length=options.prompt + options.tokens, members=most,
                engine={"load_format": "safetensors"}, dtype=options.dtype,
            )  # fmt: skip
            v.only_graphs({m * p for m, p in options.cases})
        else:
            config = from_dict({
                "space": options.space, "model": {"name": folder, "dtype": options.dtype},
                **({"lowrank": {"rank": 1}} if options.space == "lowrank" else {}),
                "es": {"sigma": 1e-3, "population_size": most}, "deterministic": False,
                "engine": {"name": "transformers", "decoder": form, "memory_gib": options.memory},
            })  # fmt: skip
        began = time.perf_counter()
        loaded = tokens.load(config.model)
        if options.endless:
            loaded.stop_ids = ()
        self.engine: Any = engines.create(config, loaded)
        space = spaces.create(config)
        self.facts = self.engine.start(space, space.layout(self.engine.specs(), self.engine.dtype), None, False)
        v.say(f"{form}: started in {time.perf_counter() - began:.1f} s; {self.facts.note}")
        draw = random.Random(0)
        if options.real_prompts:
            self.prompts = countdown(options.shape, loaded, rows)
        else:
            self.prompts = [tuple(draw.randrange(*v.VOCABULARY) for _ in range(options.prompt)) for _ in range(rows)]

    def rollout(self, members: int, prompts: int, *, base: bool) -> tuple[float, int, float]:
        """Seconds, tokens that came, and seconds of this process on all its cores."""
        if base and self.options.space == "full":
            rounds = [self._rollout(1, prompts, base=True) for _ in range(members)]
            return tuple(map(sum, zip(*rounds, strict=True)))  # type: ignore[return-value]
        return self._rollout(members, prompts, base=base)

    def _rollout(self, members: int, prompts: int, *, base: bool) -> tuple[float, int, float]:
        from evoalign.types import MEAN_PLAN, Plan, Request, Sampling, population

        count = members * prompts if base else prompts
        requests = [Request(i, self.prompts[i], Sampling(self.options.tokens), i) for i in range(count)]
        plan = MEAN_PLAN if base else Plan(1, 1e-3, population(members))
        began, used = time.perf_counter(), time.process_time()
        found = list(self.engine.rollout(plan, requests))
        assert len(found) == members * prompts
        return time.perf_counter() - began, sum(len(r.token_ids) for r in found), time.process_time() - used

    def case(self, members: int, prompts: int) -> None:
        """Rounds of population and base, after two to warm up; written down."""
        rounds: dict[str, list[float]] = {"population": [], "base": []}
        tokens: dict[str, list[float]] = {"population": [], "base": []}
        cpu: dict[str, list[float]] = {"population": [], "base": []}
        for round_ in range(self.options.warm + self.options.repeats):
            for side in rounds:
                seconds, count, used = self.rollout(members, prompts, base=side == "base")
                if round_ >= self.options.warm:
                    rounds[side].append(seconds)
                    tokens[side].append(count / seconds)
                    cpu[side].append(used)
        length = round(sum(map(len, self.prompts)) / len(self.prompts))
        asked = argparse.Namespace(**{**vars(self.options), "prompt": length})
        reading, steps, turns = floor(self.options.shape, members, members * prompts, asked)
        shares = [seconds / v.median(rounds["population"]) for seconds in (reading + steps, turns)]
        ratio = v.median([b / p for p, b in zip(rounds["population"], rounds["base"], strict=True)])
        v.emit(
            self.options.file, benchmark="decoding", form=self.form, shape=self.options.shape, members=members,
            prompts=prompts, prompt="countdown" if self.options.real_prompts else self.options.prompt,
            tokens=self.options.tokens, endless=self.options.endless, seconds=rounds, speeds=tokens,
            floor={"prompts": reading, "steps": steps, "turns": turns}, space=self.options.space,
            cpu_seconds=cpu, gpu=v.machine(), note=self.facts.note,
        )  # fmt: skip
        used = " and ".join(f"{v.median(cpu[side]):.2f}" for side in cpu)
        v.say(
            f"{self.form}, {self.options.shape} {members}x{prompts}: {v.spread(tokens['population'])} tokens/s, "
            f"base {v.spread(tokens['base'])}, population / base {ratio:.3f}, {shares[0]:.2f} of the floor, "
            f"{shares[1]:.2f} where memory and products take turns; "
            f"CPU seconds {used}"
        )

    def profile(self, members: int, prompts: int) -> None:
        """Where a step's time goes, by kernel."""
        import torch

        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds[: 1 + torch.cuda.is_available()]) as taken:
            self.rollout(members, prompts, base=False)
        by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        print(taken.key_averages().table(sort_by=by, row_limit=24, max_name_column_width=60), flush=True)


def run(options: argparse.Namespace, folder: Path) -> None:
    """All cases of one form."""
    (form,) = options.forms
    bench = Bench(form, saved(options.shape, folder, options.dtype), options)
    for members, prompts in options.cases:
        bench.case(members, prompts)
        if options.profile and form != "vllm":
            bench.profile(members, prompts)
    bench.engine.close()


def main() -> None:
    parser = v.parser(__doc__, "0.5b")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--cases", nargs="+", default=["128x12"])
    parser.add_argument("--prompt", type=int, default=PROMPT)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--real-prompts", action="store_true", help="Countdown's, in place of random tokens")
    parser.add_argument("--endless", action="store_true", help="no token ends an answer: as many steps for all")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warm", type=int, default=2, help="rounds before those that count")
    parser.add_argument("--space", choices=("lowrank", "full"), default="lowrank")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--memory", type=float, help="GiB for rows of the engine `transformers`")
    parser.add_argument("--bandwidth", type=float, default=3.35, help="TB/s of the device's memory: an H100's")
    parser.add_argument("--flops", type=float, default=989.0, help="TFLOP/s of dense bfloat16: an H100's")
    parser.add_argument("--sustained", type=float, default=790.0, help="TFLOP/s that products reach: an H100's, H200's")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    options.cases = [tuple(map(int, case.split("x"))) for case in options.cases]
    with v.running(options) as folder:
        for form in options.forms:
            one = argparse.Namespace(**{**vars(options), "forms": [form]})
            if not v.apart(run, one, folder, limit=options.limit):
                v.say(f"{form} did not end well: see above")
        check(ratios(options))


def ratios(options: argparse.Namespace) -> dict[str, float]:
    """Return the static decoder's median speed over that of each other form, from the rows of the file."""
    figures: dict[str, float] = {}
    for members, prompts in options.cases:
        wanted = {"benchmark": "decoding", "shape": options.shape, "members": members, "prompts": prompts}
        rows = v.rows_of(options.file, **wanted, space=options.space)
        speeds = {row["form"]: v.median(row["speeds"]["population"]) for row in rows}
        for form in speeds.keys() - {"static"} if "static" in speeds else ():
            name = f"decoding {options.shape} {members}x{prompts}, static over {form}"
            figures[name] = speeds["static"] / speeds[form]
    return figures


if __name__ == "__main__":
    main()
