# SPDX-License-Identifier: Apache-2.0
"""Runs several `evoalign sweep` processes side by side; shared by es_vs_grpo and studies.

Nothing here needs the network, a GPU or an installed `evoalign` script.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
STEPS = {"es": "es.num_generations", "grpo": "grpo.max_steps"}


@dataclass(frozen=True)
class Task:
    """One `evoalign sweep`: a base config, its cells (one mapping of settings each) and overrides of all of them."""

    name: str
    config: Path
    method: str
    cells: Sequence[Mapping[str, Any]] = field(default_factory=list)
    sets: Mapping[str, Any] = field(default_factory=dict)
    share: float = 1.0
    """Share of the jobs, relative to the other sweeps."""
    gpu: bool = False
    """Whether its runs see the GPUs of the machine."""


def environment(*, gpu: bool = False) -> dict[str, str]:
    """One thread a process, no network, no GPU unless asked for; the package from this checkout."""
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        **({} if gpu else {"CUDA_VISIBLE_DEVICES": ""}),
        "HF_HUB_OFFLINE": "1",
    }


def command(task: Task, seeds: Sequence[int], jobs: int, to: Path) -> list[str]:
    """Return the `evoalign sweep` command of a task; writes its trials to a file next to `to`."""
    words = [sys.executable, "-m", "evoalign.cli", "sweep", str(task.config), "--method", task.method]
    words += ["--seeds", ",".join(map(str, seeds)), "--jobs", str(jobs), "--to", str(to)]
    if task.cells:
        file = to.with_name(f"{to.name}.cells.yaml")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump([dict(cell) for cell in task.cells], sort_keys=False), encoding="utf-8")
        words += ["--cells", str(file)]
    for key, value in task.sets.items():
        words += ["--set", f"{key}={json.dumps(value)}"]
    return words


def side_by_side(tasks: Sequence[Task], seeds: Sequence[int], jobs: int, to: Path, until: float | None = None) -> None:
    """Run all sweeps at once, the jobs split over them; print how each ended.

    A sweep that fails does not stop the others. At `until` (of time.monotonic) all are signalled to save and stop, and
    SystemExit is raised: the same command continues.
    """
    to.mkdir(parents=True, exist_ok=True)
    whole = sum(task.share for task in tasks)
    processes: dict[str, subprocess.Popen[bytes]] = {}
    began = time.monotonic()
    for task in tasks:
        words = command(task, seeds, max(1, int(jobs * task.share / whole)), to / task.name)
        with (to / f"{task.name}.log").open("ab") as log:
            log.write(f"$ {shlex.join(words)}\n".encode())
            log.flush()
            processes[task.name] = subprocess.Popen(
                words,
                cwd=ROOT,
                env=environment(gpu=task.gpu),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
    try:
        in_time = _wait(processes, until)
    finally:
        for process in processes.values():  # of an exception, such as Ctrl-C: a sweep's runs end with it
            if process.poll() is None:
                process.terminate()
    for name, process in processes.items():
        if process.returncode:
            tail = (to / f"{name}.log").read_text(encoding="utf-8", errors="replace").splitlines()[-6:]
            print(f"{name}: exit code {process.returncode}\n  " + "\n  ".join(tail), flush=True)
    print(f"{to}: {len(tasks)} sweeps in {time.monotonic() - began:.0f} s", flush=True)
    if not in_time:
        raise SystemExit("the limit expired before all runs were done; the same command continues")


def _wait(processes: Mapping[str, subprocess.Popen[bytes]], until: float | None) -> bool:
    """Return whether all ended in time."""
    asked = False
    while any(process.poll() is None for process in processes.values()):
        time.sleep(0.2)
        if until is not None and not asked and time.monotonic() > until:
            for process in processes.values():
                process.send_signal(signal.SIGTERM)
            asked = True
    return not asked


def calibrate(
    tasks: Sequence[Task], steps: Mapping[str, int], jobs: int, to: Path, until: float | None = None
) -> dict[str, float]:
    """Training seconds of a generation or step of each base config, with as many runs at once as in the real thing.

    The median over runs of the mean over rows, the first left out. Kept in calibration.json, so that the same command
    continues with runs of the same length.
    """
    file = to / "calibration.json"
    known: dict[str, float] = json.loads(file.read_text()) if file.is_file() else {}
    missing = [task for task in tasks if task.name not in known]
    if missing:
        short = [replace(t, cells=(), sets={**t.sets, STEPS[t.method]: steps[t.method]}, share=1.0) for t in missing]
        copies = max(1, jobs // len(tasks))
        side_by_side(short, range(copies), jobs, to / "calibration", until)
        for task in missing:
            seconds = [
                seconds_a_step(path) for path in (to / "calibration" / task.name).glob("base/seed_*/metrics.jsonl")
            ]
            found = [value for value in seconds if value is not None]
            if not found:
                print(f"{task.name}: no run of the calibration succeeded; it is left out", flush=True)
                continue
            known[task.name] = median(found)
        file.write_text(json.dumps(known, indent=2) + "\n")
    for task in tasks:
        if task.name in known:
            print(f"{task.name}: {known[task.name]:.3f} s a step", flush=True)
    return known


def seconds_a_step(metrics: Path) -> float | None:
    """Mean over the rows of a run, the first left out; None where it has no further one."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    seconds = [row["budget"]["wall_seconds"] for row in rows[1:] if row["budget"]]
    return mean(seconds) if seconds else None


def read_results(folder: Path) -> dict[str, Any] | None:
    """results.json of a sweep; None where it has come to nothing."""
    file = folder / "results.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def rounded(value: Any) -> Any:
    """The same tree with numbers of six digits, small enough to commit."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value


def integers(text: str) -> list[int]:
    """`0,1,2`."""
    return [int(part) for part in text.split(",")]


def names(text: str) -> list[str]:
    """`lora,grpo`."""
    return text.split(",")


def pairs(texts: Iterable[str]) -> dict[str, Any]:
    """`a.b=c` overrides."""
    return {key: yaml.safe_load(value) for key, _, value in (text.partition("=") for text in texts)}


def deadline(limit: float | None) -> float | None:
    """Return the time at which the limit expires."""
    return None if limit is None else time.monotonic() + limit
