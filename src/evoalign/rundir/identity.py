# SPDX-License-Identifier: Apache-2.0
"""What makes a run what it is: the settings that count, their hash, and how two configs differ in them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from typing import Any

from pydantic import BaseModel

from evoalign.config import Config
from evoalign.rundir.method import Method


def identity(config: Config, method: Method = "es") -> dict[str, Any]:
    """The settings that make a run what it is: those that only say what is kept, shown or told are left out.

    So are those of the other method. The number of generations, or steps, is one of these too, unless a schedule
    depends on it: a longer run of the same settings begins as the shorter one.
    """
    told = {"output_dir", "grader", "checkpoint", "tracking", "checks", "stopping", "report"}
    if method == "grpo":
        return _identity_of_grpo(config, told)
    tree = _tree(config, {*told, "grpo"})
    schedules = {config.es.sigma_schedule.name, config.es.learning_rate_schedule.name}
    if schedules <= {"constant", "plateau"}:
        del tree["es"]["num_generations"]
    if "plateau" in schedules:  # whose sigma follows from when the validation split is evaluated
        tree["evaluation"]["every"] = config.evaluation.every
    return tree


def _identity_of_grpo(config: Config, told: set[str]) -> dict[str, Any]:
    unused = {"full"}
    if config.grpo.rollouts != "es":
        unused |= {"es_", "space", "lowrank"}
        unused |= {"lora"} if config.grpo.tune == "full" else set()
    unsampled = {"temperature", "top_p", "stop", "keep_stop"} | (
        {"max_tokens"} if config.grpo.max_completion_length else set()
    )
    tree = {**_tree(config, {*told, *unused}, unsampled), "grpo": config.grpo.by_name}
    if tree["grpo"]["lr_scheduler_type"] == "constant":
        del tree["grpo"]["max_steps"]
    return tree


def _tree(config: Config, without: set[str], unsampled: Collection[str] = ()) -> dict[str, Any]:
    """All other sections but what of `sampling` is not used, in the form in which format version 1 hashes them."""
    tree = config.model_dump(mode="json", exclude={**dict.fromkeys(without, True), "sampling": {*unsampled}})
    del tree["evaluation"]["every"]
    if config.grader.batch is not None:  # what reward functions see together
        tree["grader"] = {"batch": config.grader.batch}
    both = (tree["sampling"], tree["evaluation"])
    if not any(section.get("stop") for section in both):  # else one that is left out would read as the other's
        for section in both:
            section.pop("stop", None)
    if both[0].items() <= both[1].items():  # which then says all, as it did in the first release
        del tree["sampling"]
    tree["model"]["trust_remote_code"] = False
    for name in config.engine.unsaid:
        del tree["engine"][name]
    return tree


def config_hash(config: Config, method: Method = "es") -> str:
    """SHA-256 of what makes a run what it is."""
    return hashlib.sha256(json.dumps(identity(config, method), sort_keys=True).encode()).hexdigest()


def differences(
    ours: Config, theirs: Config, method: Method = "es", repeats: bool = False
) -> tuple[list[str], list[str]]:
    """In words, what makes two configs different runs, and what may only move the last bits of a score.

    The second are what engine and scorer call their `resources`, less what is `steady` where the engine `repeats` its
    answers to the bit.
    """
    steady = {f"engine.{name}" for name in ours.engine.steady} if repeats else set[str]()
    free = {f"engine.{name}" for name in ours.engine.resources}
    free |= {f"scorer.{name}" for name in ours.scorer.resources} if ours.scorer is not None else set[str]()
    found = _differ({"grader": {}} | identity(ours, method), {"grader": {}} | identity(theirs, method), "")
    # What only one of them counts, as the steps of a schedule, is shown as it is, and not named where it is the same:
    # then another setting, which is named, is why it counts. Nothing that differs may be lost here.
    here, there = ours.model_dump(mode="json"), theirs.model_dump(mode="json")
    raw = {key: (_at(here, key, _default(mine, ours, key)), _at(there, key, _default(other, theirs, key)))
           for key, (mine, other) in found.items()}  # fmt: skip
    odd = {key: pair for key, pair in raw.items() if pair[0] != pair[1]} or found
    words = {key: f"{key} is {there!r} in the run and {here!r} now" for key, (here, there) in sorted(odd.items())}
    return (
        [line for key, line in words.items() if key not in free],
        [line for key, line in words.items() if key in free - steady],
    )


def _at(tree: Any, key: str, otherwise: Any) -> Any:
    """The value of a dotted key, where it is there."""
    for part in key.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return otherwise
        tree = tree[part]
    return tree


def _default(value: Any, config: Config, key: str) -> Any:
    """What a setting is that is written down only where it is another than its default."""
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
