# SPDX-License-Identifier: Apache-2.0
"""The identity of a run: the settings that define it, their hash and differences; and its manifest."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from evoalign.config import Config
from evoalign.config.secrets import redacted_command
from evoalign.kernels import compiled
from evoalign.rundir.method import Method
from evoalign.version import __version__

REPORTING = {"output_dir", "grader", "checkpoint", "tracking", "checks", "stopping", "report"}
"""Sections that only say what is kept, shown or checked."""
LIBRARIES = ("torch", "transformers", "peft", "safetensors", "numpy", "scipy")
MORE_LIBRARIES: dict[Method, tuple[str, ...]] = {"es": (), "grpo": ("trl",)}


def identity(config: Config, method: Method = "es") -> dict[str, Any]:
    """Return the settings that define a run, without those of the other method.

    The number of generations, or steps, is one of these only where a schedule depends on it: otherwise a longer run
    begins as the shorter one does.
    """
    if method == "grpo":
        unused = {"full"}
        if not config.grpo.samples_members:
            unused |= {"es_", "space", "lowrank"}
            unused |= {"lora"} if config.grpo.tune == "full" else set()
        unsampled = {"temperature", "top_p", "stop", "keep_stop"}
        unsampled |= {"max_tokens"} if config.grpo.max_completion_length else set()
        tree = {**_tree(config, {*REPORTING, *unused}, unsampled), "grpo": config.grpo.by_name}
        if tree["grpo"]["lr_scheduler_type"] == "constant":
            del tree["grpo"]["max_steps"]
        return tree
    tree = _tree(config, {*REPORTING, "grpo"})
    schedules = {config.es.sigma_schedule.name, config.es.learning_rate_schedule.name}
    if schedules <= {"constant", "plateau"}:
        del tree["es"]["num_generations"]
    if "plateau" in schedules:  # sigma depends on when the validation split is evaluated
        tree["evaluation"]["every"] = config.evaluation.every
    return tree


def _tree(config: Config, without: Collection[str], unsampled: Collection[str] = ()) -> dict[str, Any]:
    """Return the other sections in the form that format version 1 hashes, without the `unsampled` of `sampling`."""
    tree = config.model_dump(mode="json", exclude={**dict.fromkeys(without, True), "sampling": {*unsampled}})
    del tree["evaluation"]["every"]
    if config.grader.batch is not None:  # the completions that a reward function gets together
        tree["grader"] = {"batch": config.grader.batch}
    both = (tree["sampling"], tree["evaluation"])
    if not any(section.get("stop") for section in both):  # otherwise a missing one would be read as the other's
        for section in both:
            section.pop("stop", None)
    if both[0].items() <= both[1].items():  # as in the first release, which had only `evaluation`
        del tree["sampling"]
    tree["model"]["trust_remote_code"] = False
    for name in config.engine.unsaid:
        del tree["engine"][name]
    return tree


def config_hash(config: Config, method: Method = "es") -> str:
    """Return the SHA-256 of the settings that define a run."""
    return hashlib.sha256(json.dumps(identity(config, method), sort_keys=True).encode()).hexdigest()


def differences(
    ours: Config, theirs: Config, method: Method = "es", repeats: bool = False
) -> tuple[list[str], list[str]]:
    """Describe what makes two configs different runs, and what may only change the last bits of a score.

    The second are the `resources` of engine and scorer, without the engine's `steady` ones where it `repeats` its
    completions to the bit.
    """
    steady = {f"engine.{name}" for name in ours.engine.steady} if repeats else set[str]()
    free = {f"engine.{name}" for name in ours.engine.resources}
    free |= {f"scorer.{name}" for name in ours.scorer.resources} if ours.scorer is not None else set[str]()
    found = _differ({"grader": {}} | identity(ours, method), {"grader": {}} | identity(theirs, method), "")
    # A setting that only one of them counts, such as the steps of a schedule, is shown with its value in both configs,
    # and left out where that is equal: another setting, which is listed, is then why it counts.
    here, there = ours.model_dump(mode="json"), theirs.model_dump(mode="json")
    raw = {
        key: (_at(here, key, _default(mine, ours, key)), _at(there, key, _default(other, theirs, key)))
        for key, (mine, other) in found.items()
    }
    odd = {key: pair for key, pair in raw.items() if pair[0] != pair[1]} or found
    words = {key: f"{key} is {there!r} in the run and {here!r} now" for key, (here, there) in sorted(odd.items())}
    return (
        [line for key, line in words.items() if key not in free],
        [line for key, line in words.items() if key in free - steady],
    )


def _at(tree: Any, key: str, otherwise: Any) -> Any:
    """Return the value of a dotted key, or `otherwise`."""
    for part in key.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return otherwise
        tree = tree[part]
    return tree


def _default(value: Any, config: Config, key: str) -> Any:
    """Return the value of a setting that is not written at its default."""
    found: Any = config
    for part in key.split("."):
        if value is not None or not isinstance(found, BaseModel) or part not in type(found).model_fields:
            return value
        found = getattr(found, part)
    return value if isinstance(found, BaseModel) else found


def _differ(ours: Any, theirs: Any, name: str) -> dict[str, tuple[Any, Any]]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        found: dict[str, tuple[Any, Any]] = {}
        for key in {*ours, *theirs}:
            found |= _differ(ours.get(key), theirs.get(key), f"{name}.{key}" if name else str(key))
        return found
    return {} if ours == theirs else {name: (ours, theirs)}


def versions(method: Method = "es") -> dict[str, str]:
    """Return the versions of the libraries that a run's numbers depend on."""
    libraries = {name: _installed(name) for name in (*LIBRARIES, *MORE_LIBRARIES[method])}
    return {"python": platform.python_version(), "evoalign": __version__, **libraries}


@cache
def _installed(library: str) -> str:
    return importlib.metadata.version(library)


def make_manifest(
    config: Config, facts: Mapping[str, Any], command: Sequence[str], method: Method = "es"
) -> dict[str, Any]:
    """Return where, when and with what a run was made. A replay needs none of it."""
    return {
        "format_version": config.format_version,
        "method": method,
        "command": list(command),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "config_hash": config_hash(config, method),
        "versions": versions(method),
        "hardware": {
            "system": platform.platform(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
            "compiled": compiled.available("cpu"),
        },
        "git": _git(),
        **facts,
    }


def _git() -> dict[str, Any] | None:
    """Return commit and state of the working directory's repository, if it is one."""
    found: list[str] = []
    for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no")):
        try:
            done = subprocess.run(["git", *words], capture_output=True, text=True, check=True, timeout=10)
        except (OSError, subprocess.SubprocessError):
            return None
        found.append(done.stdout.strip())
    return {"commit": found[0], "dirty": bool(found[1])}


def command_line() -> list[str]:
    """Return the command as it was typed, with secrets redacted."""
    return redacted_command([Path(sys.argv[0]).name, *sys.argv[1:]])
