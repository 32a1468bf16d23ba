# SPDX-License-Identifier: Apache-2.0
"""Analyses of finished runs and of models. An analysis is a module here with one subclass of `Analysis`.

A module is found by being here, unless `OTHERS` names it; of a package its module `command` is read. An analysis module
imports torch, transformers and matplotlib inside functions, so that its settings are shown quickly. A user-defined
analysis is a class in any file, given by its import path.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import pkgutil
from pathlib import Path
from typing import Any

from evoalign.analysis.base import Analysis as Analysis
from evoalign.analysis.base import Finding as Finding
from evoalign.errors import ConfigError

OTHERS = frozenset(
    {
        "base",
        "evaluations",
        "grpo_runs",
        "judge",
        "mixer",
        "page",
        "runs",
        "selection",
        "sweeping",
        "targets",
        "weights",
    }
)
"""Modules here that are no analysis."""


def _modules() -> dict[str, str]:
    """Return the module of each shipped analysis by name, sorted."""
    found = {one.name: one.ispkg for one in pkgutil.iter_modules(__path__) if one.name not in OTHERS}
    return {name: f"{__name__}.{name}{'.command' * found[name]}" for name in sorted(found)}


def names() -> list[str]:
    """Return the names of the shipped analyses, sorted."""
    return list(_modules())


def summaries() -> dict[str, str]:
    """Return the help line of each shipped analysis from its source, since importing all of them takes seconds."""
    found: dict[str, str] = {}
    for name, module in _modules().items():
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None
        for node in ast.walk(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))):
            match node:
                case ast.Assign(targets=[ast.Name("help")], value=ast.Constant(str(text))):
                    found[name] = text
                case _:
                    pass
    return found


def find(name: str) -> Analysis[Any]:
    """Return a shipped analysis by name, or a user-defined one by `package.module:Class` or `file.py:Class`.

    Raises ConfigError.
    """
    known = _modules()
    if name in known:
        module = importlib.import_module(known[name])
        classes = [one for one in vars(module).values() if isinstance(one, type) and one.__module__ == known[name]]
        (found,) = (one for one in classes if issubclass(one, Analysis))
        return found()
    if ":" not in name:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}? Known" if near else "known"
        raise ConfigError(f"unknown analysis {name!r}; {hint}: {', '.join(known)}, or package.module:Class")
    from evoalign.plugins import load_object

    found = load_object(name, "analyze")
    if not (isinstance(found, type) and issubclass(found, Analysis)):
        raise ConfigError(f"analyze: {name} is not a subclass of evoalign.analysis.Analysis")
    return found()
