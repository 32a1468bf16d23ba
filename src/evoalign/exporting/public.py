# SPDX-License-Identifier: Apache-2.0
"""A config as others may read it: a path on this machine is named by its last part alone."""

from __future__ import annotations

from typing import Any, cast

from evoalign.config import Config
from evoalign.config.secrets import is_private, public_path


def private_paths(config: Config) -> list[str]:
    """The settings that name a place on this machine from its root."""
    task = config.task
    found = [config.model.name, config.model.base, task.name, *task.files, *task.rewards, task.fitness]
    found.append(config.space.name)
    objective = task.objective.model_dump() if task.objective else {}
    own = (task.options, config.space.options, config.grpo.trl, objective, config.engine.model_dump())
    found += [*_texts(list(own)), *config.tracking.backends]
    return [path for path in found if path is not None and is_private(path)]


def public(config: Config) -> Config:
    """The config with every path from the root of this machine cut to its last part."""
    task = config.task.model_copy(
        update={
            "name": public_path(config.task.name),
            "train_data": config.task.train_data and public_path(config.task.train_data),
            "test_data": config.task.test_data and public_path(config.task.test_data),
            "validation_data": config.task.validation_data and public_path(config.task.validation_data),
            "rewards": [public_path(reward) for reward in config.task.rewards],
            "fitness": config.task.fitness and public_path(config.task.fitness),
            **_cut(config.task.options),
            "objective": config.task.objective
            and config.task.objective.model_copy(update=_cut(config.task.objective.model_dump())),
        }
    )
    base = config.model.base and public_path(config.model.base)
    model = config.model.model_copy(update={"name": public_path(config.model.name), "base": base})
    space = config.space.model_copy(update={"name": public_path(config.space.name), **_cut(config.space.options)})
    grpo = config.grpo.model_copy(update={"trl": _cut(config.grpo.trl)})
    engine = config.engine.model_copy(update=_cut(config.engine.model_dump()))
    tracking = config.tracking.model_copy(update={"backends": _cut(config.tracking.backends)})
    own = {"space": space, "task": task, "model": model, "grpo": grpo, "engine": engine, "tracking": tracking}
    return config.model_copy(update={**own, "output_dir": public_path(config.output_dir)})


def _texts(tree: Any) -> list[str]:
    """All strings of nested settings."""
    if isinstance(tree, dict):
        return _texts(list(cast("dict[str, Any]", tree).values()))
    if isinstance(tree, list):
        return [text for value in cast("list[Any]", tree) for text in _texts(value)]
    return [tree] if isinstance(tree, str) else []


def _cut(tree: Any) -> Any:
    """Nested settings with their paths cut."""
    if isinstance(tree, dict):
        return {key: _cut(value) for key, value in cast("dict[str, Any]", tree).items()}
    if isinstance(tree, list):
        return [_cut(value) for value in cast("list[Any]", tree)]
    return public_path(tree) if isinstance(tree, str) else tree
