# SPDX-License-Identifier: Apache-2.0
"""Runs of one release, made again and gone on with by another: scores, coefficients and weights, bit for bit.

The bits of a score depend on the machine, so the older release makes its runs where they are compared:

    git worktree add ../before COMMIT
    PYTHONPATH=../before/src python tests/support/frozen_runs.py make RUNS
    python tests/support/frozen_runs.py compare RUNS       # exit code 1, and a line for each difference

Every run is small and has all that has a state: schedules, an optimizer, decay, batches, sampled texts, checkpoints.
`done` was never stopped; `half` was, in its middle; `resumed` is `half`, resumed by who made it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

import evoalign
from evoalign.errors import StoppedError

GENERATIONS, HALF = 6, 3
SCHEDULES = {"sigma_schedule": "linear", "learning_rate_schedule": "cosine"}
ES: dict[str, dict[str, Any]] = {
    "lora": {},
    "lora_antithetic": {"es": {"antithetic": True, "shaping": "centered"}},
    "lora_ab": {"lora": {"rank": 2, "evolve": "ab", "init_scale": 2.0}},
    "lora_adam": {"es": {"optimizer": "adam"}, "lora": {"rank": 2}},
    "lora_greedy": {"evaluation": {"max_tokens": 8, "temperature": 0.0, "every": 2}},
    "lowrank": {"space": "lowrank", "es": {"antithetic": True}},
    "lowrank_half": {"space": "lowrank", "lowrank": {"rank": 2}, "model": {"dtype": "bfloat16"}},
    "full": {"space": "full", "es": {"shaping": "ranks"}},
    "full_layers": {"space": "full", "es": {"sigma": None, "noise_multiplier": 0.05, "learning_rate": 0.5}},
    "countdown": {"task": {"name": "countdown", "batch_size": 4, "train_data": "data/tasks/countdown/countdown.json",
                           "split": "first_last", "train_size": 24, "test_size": 8, "prompt": "short"}},
}  # fmt: skip
GRPO: dict[str, dict[str, Any]] = {
    "grpo": {"rollouts": "engine"},
    "grpo_lora": {"rollouts": "engine", "tune": "lora"},
    "grpo_members": {"rollouts": "es", "num_generations": 4},
}


def es_config(name: str, output: Path) -> dict[str, Any]:
    """A run of ES."""
    own = ES[name]
    es = {"sigma": 0.01, "learning_rate": 0.01, "num_generations": GENERATIONS, "population_size": 4, "decay": 0.01}
    es = {key: value for key, value in {**es, **SCHEDULES, **own.get("es", {})}.items() if value is not None}
    base: dict[str, Any] = {
        "seed": 5, "deterministic": True, "space": "lora", "task": {"name": "conciseness", "batch_size": 2},
        "checkpoint": {"every": 2}, "evaluation": {"max_tokens": 8, "temperature": 0.8, "every": 2},
        "checks": {"control_every": 2, "canary_every": 3, "kl_every": 3, "kl_prompts": 4, "kl_tokens": 1},
    }  # fmt: skip
    return {**base, **own, "es": es, "output_dir": str(output)}


def grpo_config(name: str, output: Path, steps: int) -> dict[str, Any]:
    """A run of GRPO; a longer one begins as a shorter one does."""
    own = {"max_steps": steps, "num_generations": 4, "per_device_train_batch_size": 8, "learning_rate": 3e-4,
           "lr_scheduler_type": "constant", **GRPO[name]}  # fmt: skip
    return {
        "seed": 5, "task": {**ES["countdown"]["task"], "batch_size": None}, "grpo": own, "checkpoint": {"every": 2},
        "es": {"sigma": 0.005, "learning_rate": 0.0025}, "space": "lowrank",
        "evaluation": {"max_tokens": 8, "every": 2}, "output_dir": str(output),
    }  # fmt: skip


def make(folder: Path) -> None:
    """All runs: finished, half done, and resumed."""
    for name in (*ES, *GRPO):
        finish(name, folder / name / "done")
        half = folder / name / "half"
        if name in ES:
            with contextlib.suppress(StoppedError):
                evoalign.train(es_config(name, half), on_generation=_stop, console=_silent())
        else:
            evoalign.grpo(grpo_config(name, half, 2), console=_silent())
        shutil.copytree(half, folder / name / "resumed")
        resume(folder / name / "resumed")


def finish(name: str, output: Path) -> None:
    """A run without a stop."""
    if name in ES:
        evoalign.train(es_config(name, output), console=_silent())
    else:
        evoalign.grpo(grpo_config(name, output, 4), console=_silent())


def resume(run: Path) -> None:
    """Go on with a run where it lies now."""
    tree = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")) | {"output_dir": str(run)}
    if run.parent.name in GRPO:
        tree["grpo"]["max_steps"] = 4
        evoalign.grpo(tree, resume=True, console=_silent())
    else:
        evoalign.train(tree, resume=True, console=_silent())


def compare(folder: Path) -> list[str]:
    """What this release makes otherwise, in lines."""
    found: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in (*ES, *GRPO):
            again, resumed = Path(scratch) / name / "done", Path(scratch) / name / "half"
            finish(name, again)
            shutil.copytree(folder / name / "half", resumed)
            resume(resumed)
            for wanted, got in ((folder / name / "done", again), (folder / name / "resumed", resumed)):
                theirs, ours = facts(wanted), facts(got)
                odd = sorted(key for key in {*theirs, *ours} if theirs.get(key) != ours.get(key))
                found += [f"{name}, {wanted.name}: {key} differs" for key in odd]
                print(f"{name:16} {wanted.name:8} {len(theirs)} facts, {len(odd)} differ", flush=True)
    return found


def facts(run: Path) -> dict[str, Any]:
    """All of a run that is not time, memory or the place it lies at."""
    found: dict[str, Any] = {}
    journal = run / "journal.jsonl"
    for line in map(json.loads, journal.read_text().splitlines()[1:] if journal.is_file() else ()):
        kept = {k: v for k, v in line.items() if k not in ("hash", "previous")}
        found[f"journal {line['type']} {line['index']}"] = kept
    for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        for name in ("mean", "std", "rms_c", "tokens", "evaluation", "diagnosis", "divergence", "grpo"):
            found[f"row {row['generation']} {name}"] = row.get(name)
    evaluation = json.loads((run / "results" / "evaluation.json").read_text())
    found |= {f"evaluation {name}": evaluation[name] for name in ("before", "after", "weights_hash", "distance")}
    for file in sorted(run.glob("results/completions/*.parquet")):
        if file.stem in ("before", "after"):
            found[f"completions {file.stem}"] = _rows(file)
    for file in sorted(run.glob("*/generation_*/*.safetensors")):
        found[f"saved {file.relative_to(run)}"] = file.read_bytes()
    return found


def _rows(file: Path) -> Any:
    import pyarrow.parquet

    return pyarrow.parquet.read_table(file).to_pylist()


def _stop(generation: Any) -> None:
    if generation.index + 1 == HALF:
        signal.raise_signal(signal.SIGINT)


def _silent() -> Console:
    return Console(file=io.StringIO())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["make", "compare"])
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    if given.action == "make":
        make(given.folder)
        return
    lines = compare(given.folder)
    print("\n".join(lines) or "no difference")
    raise SystemExit(1 if lines else 0)


if __name__ == "__main__":
    main()
