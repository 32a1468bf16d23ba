# SPDX-License-Identifier: Apache-2.0
"""Where, when and with what a run was made."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from evoalign.config import Config
from evoalign.config.secrets import redacted_command
from evoalign.kernels import compiled
from evoalign.rundir.identity import config_hash
from evoalign.rundir.method import Method
from evoalign.version import __version__

LIBRARIES = ("torch", "transformers", "peft", "safetensors", "numpy", "scipy")
MORE_LIBRARIES: dict[Method, tuple[str, ...]] = {"es": (), "grpo": ("trl",)}


def versions(method: Method = "es") -> dict[str, str]:
    """Versions of what a run's numbers depend on."""
    libraries = {name: importlib.metadata.version(name) for name in (*LIBRARIES, *MORE_LIBRARIES[method])}
    return {"python": platform.python_version(), "evoalign": __version__, **libraries}


def make_manifest(
    config: Config, facts: Mapping[str, Any], command: Sequence[str], method: Method = "es"
) -> dict[str, Any]:
    """Where, when and with what a run was made. Nothing here is needed to replay it."""
    return {
        "format_version": config.format_version,
        "method": method,
        "command": list(command),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "config_hash": config_hash(config, method),
        "versions": versions(method),
        "hardware": _hardware(),
        "git": _git(),
        **facts,
    }


def _hardware() -> dict[str, Any]:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": gpus,
        "compiled": compiled.available("cpu"),
    }


def _git() -> dict[str, Any] | None:
    """Commit and state of the working directory's repository, if it is one."""
    try:
        commit = _run_git("rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(_run_git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _run_git(*words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def command_line() -> list[str]:
    """The command as it was typed, but for what looks like a secret."""
    return redacted_command([Path(sys.argv[0]).name, *sys.argv[1:]])
