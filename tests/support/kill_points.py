# SPDX-License-Identifier: Apache-2.0
"""Runs that end by SIGKILL at a chosen instant, are gone on with, and are held against one that never stopped.

OMP_NUM_THREADS=1 python tests/support/kill_points.py  # every point, generation and space; prints mismatches
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers.utils import logging

import evoalign
from evoalign import evolve
from evoalign.engines.transformers import TransformersEngine
from evoalign.rundir import checkpoint, files, journal
from evoalign.rundir import directory as rundir
from evoalign.rundir.journal import Journal
from evoalign.training.saver import Saver

SPACES = ("lora", "lowrank", "full")
GENERATIONS = 4
# Forks of a process that has imported what a run needs and run nothing: a fork of the tests' own could crash for its
# threads. pyarrow imports pandas, where it is, as it writes.
PROCESSES = multiprocessing.get_context("forkserver")
PRELOADED = ["evoalign.training.train", "evoalign.engines.transformers", "evoalign.cli.train", "matplotlib.figure",
             "matplotlib.backends.backend_agg", "pandas", "peft", "pyarrow.parquet", "scipy.stats",
             "transformers.models.qwen2.modeling_qwen2"]  # fmt: skip
PROCESSES.set_forkserver_preload(PRELOADED)
Patch = Callable[[int], None]


VALIDATION = {"validation_data": "data/tasks/conciseness/conciseness_test.json", "validation_size": 3}
"""A second split to be brought back, in less time than one of its own takes."""


def config(space: str, output: Path) -> dict[str, Any]:
    """Everything that has a state: an optimizer, schedules, decay, batches, sampled texts, checkpoints."""
    es: dict[str, Any] = {
        "sigma": 0.01, "learning_rate": 0.01, "num_generations": GENERATIONS, "population_size": 4,
        "sigma_schedule": "linear", "learning_rate_schedule": "cosine", "decay": 0.01,
    }  # fmt: skip
    if space == "lora":
        es |= {"optimizer": "adam"}
    return {
        "output_dir": str(output), "seed": 5, "deterministic": True, "space": space, "es": es,
        "task": {"name": "conciseness", "batch_size": 2, **VALIDATION}, "checkpoint": {"every": 1, "keep_last": 2},
        "evaluation": {"max_tokens": 8, "temperature": 0.8, "every": 2},
        "checks": {"control_every": 2, "canary_every": 3, "perplexity": False, "placebo": 0},
        "tracking": {"completions_every": 0},
    }  # fmt: skip


def train(space: str, output: Path, *, resume: bool = False) -> evoalign.Result:
    return evoalign.train(config(space, output), resume=resume, console=Console(file=io.StringIO()))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _at_call(owner: Any, name: str, number: int, before: Callable[..., None] | None = None) -> None:
    """Die at call `number` (from 0) of a function, after `before` has had its arguments."""
    inner, calls = getattr(owner, name), []

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == number + 1:
            if before is not None:
                before(*args, **kwargs)
            die()
        return inner(*args, **kwargs)

    setattr(owner, name, wrapped)


def _half_a_line(self: Journal, record: dict[str, Any]) -> None:
    text = journal._dump({**record, "previous": self._previous, "hash": "0" * 64})
    self._file.write(text[: len(text) // 2])
    self._file.flush()


def _half_a_row(self: rundir.RunDir, row: dict[str, Any]) -> None:
    with self.metrics.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row)[:50])


def _half_a_file(tensors: Any, file: Path) -> None:
    file.write_bytes(b"\x10" * 100)


def _between_delete_and_rename(temporary: Path, folder: Path, *, replace: bool) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def _mid_generation(g: int) -> None:
    """Die when the second training answer of generation g has been drawn."""
    inner = TransformersEngine.rollout
    calls: list[None] = []

    def rollout(self: Any, plan: Any, requests: Any) -> Any:
        training = len(plan.members) > 1
        if training and len(plan.members) == 4:
            calls.append(None)
        for count, answer in enumerate(inner(self, plan, requests)):
            if training and len(calls) == g + 1 and count == 1:
                die()
            yield answer

    TransformersEngine.rollout = rollout  # type: ignore[method-assign]


def _mid_save(g: int) -> None:
    """Die with weights half written, whichever form they have.

    The run waits for its thread: one that had gone on would not save that mean again.
    """
    save = Saver.save
    Saver.save = lambda self, *given: (save(self, *given), self.wait())[1]
    _at_call(checkpoint, "seal", g, lambda folder, mark: [_half_a_file({}, f) for f in folder.glob("*.safetensors")])


START: dict[str, Patch] = {
    "before the journal": lambda g: _at_call(Journal, "__init__", g),
    "mid-journal-line (header)": lambda g: _at_call(Journal, "_write", g, _half_a_line),
}
POINTS: dict[str, Patch] = {
    "mid-generation": _mid_generation,
    "after sampling": lambda g: _at_call(evolve, "score", g),
    "after scoring": lambda g: _at_call(Journal, "append", g),
    "after the update's line": lambda g: _at_call(TransformersEngine, "apply", g),
    "before the seal": lambda g: _at_call(Journal, "seal", g),
    "mid-journal-line (update)": lambda g: _at_call(Journal, "_write", 1 + 2 * g, _half_a_line),
    "mid-journal-line (seal)": lambda g: _at_call(Journal, "_write", 2 + 2 * g, _half_a_line),
    "mid-metrics-line": lambda g: _at_call(rundir.RunDir, "append_metrics", g, _half_a_row),
    "mid-save (weights)": _mid_save,
    "mid-save (rename)": lambda g: _at_call(files, "_put", g, _between_delete_and_rename),
}


def killed(space: str, point: str, generation: int, output: Path, *, resume: bool = False) -> None:
    """A run in a process of its own that dies at that point. Raises AssertionError where it did not get there."""
    child = PROCESSES.Process(target=_run_to, args=(space, point, generation, output, resume))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL, f"{point} {generation}: not killed, exit code {child.exitcode}"


def _run_to(space: str, point: str, generation: int, output: Path, resume: bool) -> None:
    {**START, **POINTS}[point](generation)
    train(space, output, resume=resume)


def traces(output: Path) -> dict[str, Any]:
    """What has to be the same, whatever happened in between."""
    found: dict[str, Any] = {"journal": (output / "journal.jsonl").read_bytes()}
    for file in sorted(output.glob("*/generation_*/*.safetensors")):
        found[str(file.relative_to(output))] = file.read_bytes()
    found["evaluation"] = json.loads((output / "results/evaluation.json").read_text())
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    found["rows"] = [(row["generation"], row["mean"], row["std"], row["rms_c"]) for row in rows]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spaces", nargs="*", default=list(SPACES))
    parser.add_argument("--points", nargs="*", default=list(POINTS))
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    mismatches = 0
    with tempfile.TemporaryDirectory() as folder:
        for space in arguments.spaces:
            train(space, Path(folder) / space)
            expected = traces(Path(folder) / space)
            for point in arguments.points:
                wrong = []
                for generation in range(GENERATIONS):
                    output = Path(folder) / f"{space}-{point}-{generation}".replace(" ", "-")
                    killed(space, point, generation, output)
                    train(space, output, resume=True)
                    found = traces(output)
                    odd = sorted(k for k in {*found, *expected} if found.get(k) != expected.get(k))
                    wrong += [(generation, odd)] if odd else []
                print(f"{space:8} {point:28} trials {GENERATIONS}  mismatches {len(wrong)} {wrong or ''}", flush=True)
                mismatches += len(wrong)
    raise SystemExit(mismatches > 0)


if __name__ == "__main__":
    main()
