# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of whole generations by the in-process engine's two decoders, and by vLLM, on one device.

    python benchmarks/decoding.py --shape 0.5b --cases 128x12 30x32 --json runs/decoding.jsonl
    python benchmarks/decoding.py --shape 1.5b --cases 30x32 --forms static vllm
    python benchmarks/decoding.py --shape smollm2 --cases 8x4 --forms library static --dtype float32 --real-prompts
    python benchmarks/decoding.py --model qwen-1.5b --cases 256x16 --forms static vllm static --real-prompts --sweep

A case `128x12` is 128 members of `lowrank`, rank 1, with 12 prompts each. Prompts have 100 random tokens, completions
128, greedy; the few rows that draw the stop token end earlier, and their tokens are counted as they are. Weights are
random, bfloat16 on a GPU, the same file for all forms; `tiny` is the shipped model, and `smollm2` SmolLM2-135M-Instruct
as `make test-real` makes it. With `--real-prompts` the prompts are Countdown's own, of several lengths, which a model
of words may answer and end: `short` for `tiny`, `chat` for others. The clock is around `engine.rollout`: members'
factors, prompts, decoding and texts. `base` is the mean alone on as many rows of as many prompts. Forms:

    static, library   what `engine.decoder` says of the engine `transformers`
    vllm              with graphs of the cases' sizes, and slots for the most members

A form that is named twice runs in two processes; figures over another form join their rounds.

Each round also runs the case with one token, that is the members' factors, the prompts and one draw, so a step takes
(seconds - seconds with one token) / steps. `floors.py` says what a rollout must read and compute at least; its MBU is
that of the steps, its share that of the whole rollout. The clock of the card (datasheet, copy, product of matrices)
runs in the same process. The base gets as many distinct prompts as it has rows, since a text is read once per member:
with fewer (`--distinct`) the population reads more tokens than the base.

`--sweep` runs each case with 1, 2, 4, ... prompts per member up to its own. `--model` takes a folder with a real model
in place of a shape. The last line is JSON with all figures.

With `--space full` members are written over the weights one by one; base is the mean alone, as often, on one member's
rows.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import floors
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


def countdown(shape: str, loaded: Any, rows: int, distinct: int) -> list[tuple[int, ...]]:
    """Return the first training problems, repeated if fewer `distinct` ones are requested than rows."""
    from evoalign import tasks
    from evoalign.config import from_dict
    from evoalign.rollouts import Encoded
    from evoalign.tasks.countdown import write_countdown

    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "countdown.json"
        write_countdown(data, distinct + 1)
        settings = {"name": "countdown", "split": "first_last", "train_size": distinct, "test_size": 1}
        settings |= {"prompt": "short" if shape == "tiny" else "chat", "train_data": str(data)}
        task = tasks.create(from_dict({"model": {"name": "tiny"}, "es": {"sigma": 1.0}, "task": settings}).task)
        prompts = Encoded(task, loaded, task.load_data(0).train)
        return [prompts[row % distinct] for row in range(rows)]


@dataclass(frozen=True)
class Took:
    """A rollout: seconds, CPU seconds of this process, and its rows in groups that were served one after another."""

    seconds: float
    cpu: float
    groups: list[list[floors.Row]]

    @property
    def tokens(self) -> int:
        """Generated tokens."""
        return sum(count for rows in self.groups for *_, count in rows)

    @property
    def speed(self) -> float:
        """Generated tokens per second."""
        return self.tokens / self.seconds


class Bench:
    """One engine of a form, with the members and prompts of its cases."""

    def __init__(self, form: str, folder: str, options: argparse.Namespace) -> None:
        from evoalign import engines, spaces, tokens
        from evoalign.config import from_dict

        self.form, self.options = form, options
        most = max(m for m, _ in options.cases)
        rows = max(m * p for m, p in options.cases)
        began = time.perf_counter()
        model = {"name": folder, "dtype": options.dtype}
        loaded = tokens.load(from_dict({"model": model, "es": {"sigma": 1e-3}}).model)
        if options.endless:
            loaded.stop_ids = ()
        draw = random.Random(0)
        if options.real_prompts:
            self.prompts = countdown(options.shape, loaded, rows, min(rows, options.distinct or rows))
        else:
            begun = [draw.randrange(*v.VOCABULARY) for _ in range(options.shared)]
            rest = range(options.prompt - options.shared)
            self.prompts = [(*begun, *(draw.randrange(*v.VOCABULARY) for _ in rest)) for _ in range(rows)]
        if form == "vllm":
            config = v.config_of(
                folder, options.shape, rows=rows, length=max(map(len, self.prompts)) + options.tokens, members=most,
                engine={"load_format": "safetensors"}, dtype=options.dtype,
            )  # fmt: skip
            v.only_graphs({m * p for m, p in options.cases})
        else:
            config = from_dict({
                "space": options.space, "model": model, "deterministic": False,
                **({"lowrank": {"rank": 1}} if options.space == "lowrank" else {}),
                "es": {"sigma": 1e-3, "population_size": most},
                "engine": {"name": "transformers", "decoder": form, "memory_gib": options.memory},
            })  # fmt: skip
        self.engine: Any = engines.create(config, loaded)
        space = spaces.create(config)
        self.facts = self.engine.start(space, space.layout(self.engine.specs(), self.engine.dtype), None, False)
        gc.collect()  # as a run does: a full collection, which visits all objects of the libraries, takes 0.2 s
        gc.freeze()
        self.model = floors.Model.of(v.shape_of(options.shape), 4 if options.dtype == "float32" else 2)
        self.card = floors.measured_card()
        v.say(f"{form}: started in {time.perf_counter() - began:.1f} s; {self.facts.note}; {self.card}")

    def rollout(self, members: int, prompts: int, tokens: int, *, base: bool) -> Took:
        """Run one rollout; the base of `full` is the mean alone, once per member."""
        if base and self.options.space == "full":
            rounds = [self._rollout(1, prompts, tokens, base=True) for _ in range(members)]
            groups = [group for took in rounds for group in took.groups]
            return Took(sum(took.seconds for took in rounds), sum(took.cpu for took in rounds), groups)
        return self._rollout(members, prompts, tokens, base=base)

    def _rollout(self, members: int, prompts: int, tokens: int, *, base: bool) -> Took:
        from evoalign.types import MEAN_PLAN, Plan, Request, Sampling, population

        count = members * prompts if base else prompts
        requests = [Request(i, self.prompts[i], Sampling(tokens), i) for i in range(count)]
        plan = MEAN_PLAN if base else Plan(1, 1e-3, population(members))
        if base and self.form == "vllm":
            self.engine.llm.reset_prefix_cache()  # as members find it
        began, used = time.perf_counter(), time.process_time()
        found = list(self.engine.rollout(plan, requests))
        seconds, used = time.perf_counter() - began, time.process_time() - used
        assert len(found) == members * prompts
        rows = [(r.member.index, self.prompts[r.request], len(r.token_ids)) for r in found]
        if self.options.space == "full":  # one after another, without factors
            return Took(seconds, used, [[(-1, *row[1:]) for row in rows if row[0] == m.index] for m in plan.members])
        return Took(seconds, used, [rows])

    def case(self, members: int, prompts: int) -> None:
        """Run rounds of population and base, each with all tokens and with one, and write down a row."""
        sides, lengths = ("population", "base"), sorted({1, self.options.tokens})
        took: dict[tuple[str, int], list[Took]] = {(side, tokens): [] for side in sides for tokens in lengths}
        for round_ in range(self.options.warm + self.options.repeats):
            for side, tokens in took:
                one = self.rollout(members, prompts, tokens, base=side == "base")
                took[side, tokens] += [one] if round_ >= self.options.warm else []
        whole = {side: took[side, self.options.tokens] for side in sides}
        figures = {side: self.figures(whole[side], took[side, 1]) for side in sides}
        ratio = v.median([p.speed / b.speed for p, b in zip(*whole.values(), strict=True)])
        v.emit(
            self.options.file, benchmark="decoding", form=self.form, shape=self.options.shape, members=members,
            prompts=prompts, prompt="countdown" if self.options.real_prompts else self.options.prompt,
            shared=self.options.shared, distinct=len(set(self.prompts[: members * prompts])),
            tokens=self.options.tokens, endless=self.options.endless, space=self.options.space, ratio=ratio,
            figures=figures,
            seconds={side: [t.seconds for t in whole[side]] for side in sides},
            one_token={side: [t.seconds for t in took[side, 1]] for side in sides},
            speeds={side: [t.speed for t in whole[side]] for side in sides},
            cpu_seconds={side: [t.cpu for t in whole[side]] for side in sides},
            card=asdict(self.card), gpu=v.machine(), note=self.facts.note,
        )  # fmt: skip
        v.say(f"{self.form}, {self.options.shape} {members}x{prompts}: population / base {ratio:.3f}")
        for side, found in figures.items():
            parts = [f"{v.spread([t.speed for t in whole[side]])} tokens/s"]
            if found["step_ms"]:
                parts.append(f"{found['step_ms']:.2f} ms a step, MBU {found['mbu']:.3f}")
            parts.append(f"{found['share']:.2f} of the floor, {found['serial_share']:.2f} of the serial one")
            for name in ("prefill", "decode"):
                need = found[name]
                parts.append(f"{name} {need['bytes']:.3g} B, {need['flops']:.3g} FLOP, bound by {need['bound']}")
            parts.append(f"CPU {v.median([t.cpu for t in whole[side]]):.2f} s")
            v.say(f"  {side}: {'; '.join(parts)}")

    def figures(self, whole: list[Took], once: list[Took]) -> dict[str, Any]:
        """Return the figures of one side of a case, from its rounds with all tokens and with one."""
        speeds, groups = [t.speed for t in whole], whole[-1].groups
        read = floors.Floor.of([floors.prefill(self.model, rows) for rows in groups], self.card)
        passes = [one for rows in groups for one in floors.steps(self.model, rows)]
        decoded = floors.Floor.of(passes, self.card)
        seconds = v.median([t.seconds for t in whole])
        steps = seconds - v.median([t.seconds for t in once])
        return {
            "tokens_per_second": {"median": v.median(speeds), "min": min(speeds), "max": max(speeds)},
            "step_ms": 1e3 * steps / len(passes) if passes and steps > 0 else None,  # noise may exceed few steps
            "mbu": floors.mbu(decoded, steps, self.card) if passes and steps > 0 else None,
            "share": (read.seconds + decoded.seconds) / seconds,
            "serial_share": (read.serial + decoded.serial) / seconds,
            "prefill": asdict(read), "decode": asdict(decoded), "steps": len(passes),
        }  # fmt: skip

    def profile(self, members: int, prompts: int) -> None:
        """Where a step's time goes, by kernel."""
        import torch

        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds[: 1 + torch.cuda.is_available()]) as taken:
            self.rollout(members, prompts, self.options.tokens, base=False)
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
    parser.add_argument("--shared", type=int, default=0, help="first tokens of --prompt that all prompts share")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--real-prompts", action="store_true", help="Countdown's, in place of random tokens")
    parser.add_argument("--distinct", type=int, help="different real prompts; unset: as many as the base has rows")
    parser.add_argument("--model", type=Path, help="folder of a real Llama or Qwen model, in place of --shape")
    parser.add_argument("--sweep", action="store_true", help="each case also with 1, 2, 4, ... prompts per member")
    parser.add_argument("--endless", action="store_true", help="no token ends an answer: as many steps for all")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warm", type=int, default=2, help="rounds before those that count")
    parser.add_argument("--space", choices=("lowrank", "full"), default="lowrank")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--memory", type=float, help="GiB for rows of the engine `transformers`")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    cases = [tuple(map(int, case.split("x"))) for case in options.cases]
    below = [(m, 1 << i) for m, p in cases for i in range((p - 1).bit_length()) if options.sweep]
    options.cases = sorted({*cases, *below})
    if options.model:
        options.shape = options.model.name
        v.SHAPES[options.shape] = json.loads((options.model / "config.json").read_text(encoding="utf-8"))
        REAL[options.shape] = lambda: options.model
    with v.running(options) as folder:
        earlier = len(v.rows_of(options.file))
        for form in options.forms:
            one = argparse.Namespace(**{**vars(options), "forms": [form]})
            if not v.apart(run, one, folder, limit=options.limit):
                v.say(f"{form} did not end well: see above")
        rows = v.rows_of(options.file)[earlier:]
    try:
        check(ratios(rows))
    finally:
        kept = (
            "form",
            "shape",
            "space",
            "members",
            "prompts",
            "prompt",
            "distinct",
            "tokens",
            "ratio",
            "figures",
            "card",
        )
        print(json.dumps([{name: row[name] for name in kept} for row in rows]))


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the static decoder's median speed over that of each other form, by case."""
    speeds: dict[tuple[str, int, int], dict[str, list[float]]] = {}
    for row in rows:
        case = speeds.setdefault((row["shape"], row["members"], row["prompts"]), {})
        case.setdefault(row["form"], []).extend(row["speeds"]["population"])
    return {
        f"decoding {shape} {members}x{prompts}, static over {form}": v.median(case["static"]) / v.median(of_form)
        for (shape, members, prompts), case in speeds.items()
        for form, of_form in case.items()
        if "static" in case and form != "static"
    }


if __name__ == "__main__":
    main()
