# SPDX-License-Identifier: Apache-2.0
"""Seconds from `evoalign train` to the end of its first generation, and the parts of them.

    python benchmarks/start_up.py --shape tiny
    python benchmarks/start_up.py --shape 7b --engines transformers vllm --json runs/start_up.jsonl
    python benchmarks/start_up.py --model models/Qwen2.5-0.5B-Instruct --cold

Each round is a new process that runs the command on Countdown: `lowrank`, rank 1, `--members` x `--prompts` completions
of at most `--tokens` tokens, `--tests` test problems before the first generation. It is stopped after the second one.
Random weights of a shape (benchmarks/decoding.py) are written before the clock starts. The first `--warm` rounds do not
count: they fill the caches of files and compiled kernels. With `--cold` each process has empty caches of kernels.

The parts exclude each other and add up to `total`:

    python       until this script has its own imports in the new process, a few of the standard library
    imports      of all modules, wherever the command imports them
    config, tokenizer, data
    engine       made: weights loaded; for vLLM also its kernels compiled and its CUDA graphs captured
    space        the mean and members' factors allocated, each tensor's noise scale
    canary       members with large noise that must change the output: the first kernels are compiled here
    evaluation   of the test problems before training
    rollout      of the first generation
    update       the rest of the first generation
    other        between these

`second` is the rollout of the second generation: a first rollout that takes longer compiles and captures. `weights`,
`graphs` and `vllm` are the seconds that vLLM's log gives for parts of `engine`.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

ENTERED = time.perf_counter()
"""One clock for all processes."""
PARTS = {
    "config": "evoalign.cli.train:resolved",
    "tokenizer": "evoalign.tokens:load",
    "data": "evoalign.setup:task_and_data",
    "engine": "evoalign.engines:create",
    "space": "evoalign.setup:start",
    "canary": "evoalign.checks.gateway:check_all",
    "evaluation": "evoalign.training.session:Session.evaluate",
    "rollout": "evoalign.evolve:ask",
}
"""Function timed for each part. Nested calls count for the outermost."""
NAMES = ("total", "python", "imports", *PARTS, "update", "other", "second")
"""Figures of a process, in the order of the table."""
LOG = {
    "weights": r"Loading weights took ([\d.]+) sec",
    "graphs": r"Graph capturing finished in ([\d.]+) sec",
    "vllm": r"init engine .* took ([\d.]+) sec",
}
"""Lines of vLLM's log with seconds."""
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT", "CUDA_CACHE_PATH")


class SecondGenerationEnded(BaseException):
    """The second generation has ended."""


class Clock:
    """Seconds of each part: those of the outermost one that runs, without imports. Other threads do not count."""

    def __init__(self, began: float) -> None:
        self.seconds = defaultdict[str, float](float, python=ENTERED - began)
        self._part, self._last = "other", ENTERED

    def enter(self, part: str) -> str:
        """Give the time from now on to a part, and return the one that had it."""
        now, before = time.perf_counter(), self._part
        self.seconds[before] += now - self._last
        self._part, self._last = part, now
        return before

    def around(self, place: str, part: str) -> None:
        """Replace a function by one whose time is that of a part."""
        module, _, path = place.partition(":")
        *owners, name = path.split(".")
        where = functools.reduce(getattr, owners, importlib.import_module(module))
        function: Callable[..., Any] = getattr(where, name)

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            is_inner = self._part not in ("other", "update") and part != "imports"
            if is_inner or threading.current_thread() is not threading.main_thread():
                return function(*arguments, **named)
            before = self.enter(part)
            try:
                return function(*arguments, **named)
            finally:
                self.enter("update" if part == "rollout" else before)

        setattr(where, name, call)


def one(began: float, config: str, found: str) -> None:
    """Run the command in this process until its second generation has ended, and write the seconds of its first."""
    clock = Clock(began)
    clock.around("_frozen_importlib:_find_and_load", "imports")  # of modules that are not there yet
    import evoalign.cli

    for part, place in PARTS.items():
        clock.around(place, part)
    from evoalign.training import train

    row, whole = train.metrics_row, dict[str, float]()

    def ended(*arguments: Any) -> dict[str, Any]:
        made = row(*arguments)
        if whole:
            whole["second"] = made["seconds"]["rollout"]
            raise SecondGenerationEnded
        clock.enter("after")
        whole.update(clock.seconds, total=sum(clock.seconds.values()))
        return made

    train.metrics_row = ended
    sys.argv = ["evoalign", "train", config, "--overwrite"]
    try:
        evoalign.cli.main()
    except SecondGenerationEnded:
        Path(found).write_text(json.dumps(whole), encoding="utf-8")


def settings(engine: str, model: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the run's config."""
    import vllm_shapes as v

    rows, length = options.members * options.prompts, 256 + options.tokens
    served = {"name": engine}
    if engine == "vllm":
        wide = 4 if options.dtype == "float32" else 2
        served |= {"max_num_seqs": rows, "max_model_len": length}
        served |= {"kv_cache_gib": v.cache_gib(options.shape, rows, length, wide)}
    return {
        "output_dir": str(folder / "run"), "space": "lowrank", "lowrank": {"rank": 1}, "engine": served,
        "model": {"name": model, "dtype": options.dtype},
        "task": {"name": "countdown", "batch_size": options.prompts, "split": "first_last", "train_size": 400,
                 "test_size": options.tests},
        "es": {"num_generations": 3, "population_size": options.members, "sigma": 1e-3, "learning_rate": 5e-4},
        "sampling": {"max_tokens": options.tokens}, "evaluation": {"max_tokens": options.tokens},
    }  # fmt: skip


def measured(engine: str, model: str, options: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    """Return the seconds of each round that counts."""
    config, found, rounds = folder / f"{engine}.yaml", folder / "seconds.json", list[dict[str, float]]()
    config.write_text(json.dumps(settings(engine, model, options, folder)), encoding="utf-8")
    for index in range(options.warm + options.repeats):
        caches = {name: str(folder / f"{engine}_{index}" / name) for name in CACHES if options.cold}
        found.unlink(missing_ok=True)
        command = [sys.executable, __file__, "--one", repr(time.perf_counter()), str(config), str(found)]
        done = subprocess.run(
            command, env={**os.environ, "VLLM_LOGGING_LEVEL": "INFO", **caches}, capture_output=True, text=True,
            timeout=options.limit, check=False,
        )  # fmt: skip
        if not found.is_file():
            raise SystemExit(
                f"{engine}: the run ended with status {done.returncode}: {(done.stdout + done.stderr)[-2000:]}"
            )
        seconds = json.loads(found.read_text(encoding="utf-8"))
        logged = {name: re.search(line, done.stdout + done.stderr) for name, line in LOG.items()}
        rounds.append({**seconds, **{name: float(match[1]) for name, match in logged.items() if match}})
    return rounds[options.warm :]


def main() -> None:
    import vllm_shapes as v
    from decoding import saved

    parser = v.parser(__doc__, "0.5b")
    parser.add_argument("--model", type=Path, help="folder of a real Llama or Qwen model, in place of --shape")
    parser.add_argument("--engines", nargs="+", choices=("transformers", "vllm"), default=["transformers"])
    parser.add_argument("--members", type=int, default=30)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--tests", type=int, default=64, help="test problems, evaluated before the first generation")
    parser.add_argument("--dtype", default="bfloat16" if v.has_gpu() else "float32")
    parser.add_argument("--repeats", type=int, default=5, help="processes that count")
    parser.add_argument("--warm", type=int, default=1, help="processes before those")
    parser.add_argument("--cold", action="store_true", help="empty caches of compiled kernels for each process")
    options = parser.parse_args()
    if options.model:
        options.shape = options.model.name
        v.SHAPES[options.shape] = json.loads((options.model / "config.json").read_text(encoding="utf-8"))
    rows = list[dict[str, Any]]()
    with v.running(options) as folder:
        if not options.model:  # in another process, which gives the GPU's memory back
            v.apart(saved, options.shape, folder, options.dtype, limit=options.limit)
        model = str(options.model or saved(options.shape, folder, options.dtype))
        for engine in options.engines:
            rounds = measured(engine, model, options, folder)
            names = [*NAMES, *(name for name in LOG if name in rounds[0])]
            rows.append({
                "benchmark": "start_up", "engine": engine, "shape": options.shape, "members": options.members,
                "prompts": options.prompts, "tokens": options.tokens, "tests": options.tests, "dtype": options.dtype,
                "cold": options.cold, "seconds": {name: [one.get(name, 0.0) for one in rounds] for name in names},
                "gpu": v.machine(),
            })  # fmt: skip
            v.emit(options.file, **rows[-1])
        head = ("part", *(f"{row['engine']}, {row['shape']}: s" for row in rows))
        shown = dict.fromkeys(name for row in rows for name in row["seconds"])
        v.table(head, [(name, *(spread(row["seconds"].get(name)) for row in rows)) for name in shown])
    medians = [{name: v.median(values) for name, values in row["seconds"].items()} for row in rows]
    kept = ("engine", "shape", "members", "prompts", "tokens", "cold", "gpu")
    print(json.dumps([
        {**{name: row[name] for name in kept}, "median": median, "total": row["seconds"]["total"]}
        for row, median in zip(rows, medians, strict=True)
    ]))  # fmt: skip


def spread(values: list[float] | None) -> str:
    """Return the median with the smallest and the largest; an empty string without values."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})" if values else ""


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(float(sys.argv[2]), *sys.argv[3:])
    else:
        main()
