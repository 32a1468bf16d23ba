# SPDX-License-Identifier: Apache-2.0
"""Questions asked of finished runs and of models. Each folder here is one analysis, found by being there.

A folder `<name>/` has `command.py` with a class `Command(Analysis)`; it imports nothing heavy, since the command line
reads it at its start. An analysis of your own is a class in a file of your own, named by its import path.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from typing import Any

from evoalign.analysis.base import Analysis as Analysis
from evoalign.analysis.base import Finding as Finding
from evoalign.errors import ConfigError


def names() -> list[str]:
    """Of the analyses that come with evoalign."""
    found = (module.name for module in pkgutil.iter_modules(__path__) if module.ispkg)
    return sorted(name for name in found if name not in ("judge", "page", "sweeping"))


def shipped() -> dict[str, Analysis[Any]]:
    """Those analyses by name."""
    return {name: importlib.import_module(f"{__name__}.{name}.command").Command() for name in names()}


def find(name: str) -> Analysis[Any]:
    """The analysis of this name, or your own as `package.module:Class` or `file.py:Class`. Raises ConfigError."""
    known = shipped()
    if name in known:
        return known[name]
    if ":" not in name:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}? Known" if near else "known"
        raise ConfigError(f"unknown analysis {name!r}; {hint}: {', '.join(known)}, or package.module:Class")
    from evoalign.plugins import load_object

    found = load_object(name, "analyze")
    if not (isinstance(found, type) and issubclass(found, Analysis)):
        raise ConfigError(f"analyze: {name} is not a subclass of evoalign.analysis.Analysis")
    return found()
