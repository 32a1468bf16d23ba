# SPDX-License-Identifier: Apache-2.0
"""What others build upon, read off the code: names and signatures of Python, options of the command line.

    python tests/compatibility/freezing.py > tests/compatibility/interface.json

writes down what a release offers. Do so to add what is new, never to take away what a test misses.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

DOCS = Path(__file__).parents[2] / "docs"
MODULES = (
    "evoalign", "evoalign.config", "evoalign.engines", "evoalign.errors", "evoalign.spaces", "evoalign.tasks",
    "evoalign.testing.engines", "evoalign.testing.spaces", "evoalign.testing.tasks",
)  # fmt: skip
"""All that their `__all__` names; without one, all public names that they define."""

INNER = ("evoalign.analysis.compare",)
"""Shown in a page about the project's own results, and free to change."""


def names() -> list[str]:
    """`module:name` of all that is public or shown in the documentation."""
    found: set[str] = set()
    for module in map(importlib.import_module, MODULES):
        own = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__ and n[0] != "_"]
        found |= {f"{module.__name__}:{name}" for name in getattr(module, "__all__", own)}
    for page in DOCS.rglob("*.md"):
        for module, imported in re.findall(r"^ *from (evoalign[\w.]*) import ([\w, ]+)$", page.read_text(), re.M):
            if not module.startswith(INNER):
                found |= {f"{module}:{name.strip()}" for name in imported.split(",")}
    return sorted(name for name in found if not inspect.ismodule(look_up(name)))


def look_up(name: str) -> Any:
    """What stands behind `module:name`; a module that is no attribute is imported."""
    module, _, attribute = name.partition(":")
    home = importlib.import_module(module)
    return getattr(home, attribute) if hasattr(home, attribute) else importlib.import_module(f"{module}.{attribute}")


def describe(value: Any) -> dict[str, Any]:
    """How it is called and, of a class, what it has."""
    found: dict[str, Any] = {}
    if callable(value):
        found["parameters"] = parameters(value)
    if inspect.isclass(value):
        found["members"] = {name: describe_member(value, name) for name in members(value)}
    return found


def members(cls: type) -> list[str]:
    """Public names that the project defines on a class or its bases."""
    ours = [base for base in cls.__mro__ if base.__module__.startswith("evoalign")]
    return sorted(
        {n for base in ours for n in (*vars(base), *base.__annotations__) if not n.startswith(("_", "model_"))}
    )


def describe_member(cls: type, name: str) -> list[list[Any]] | None:
    """The parameters of a method; None for anything else."""
    value = getattr(cls, name, None)
    return parameters(value) if inspect.isroutine(value) else None


def parameters(value: Any) -> list[list[Any]]:
    """Name, kind and whether it has to be given, of each parameter; none where Python cannot say."""
    try:
        found = inspect.signature(value).parameters.values()
    except ValueError:
        return []
    return [[p.name, p.kind.name, p.default is p.empty and not p.kind.name.startswith("VAR_")] for p in found]


def commands() -> dict[str, list[str]]:
    """The words of each command: its options in all spellings, and its arguments by name."""
    from evoalign import cli

    return {
        name: sorted(set(spellings(command))) for name, command in _walk("evoalign", typer.main.get_command(cli.app))
    }


def spellings(command: Any) -> Iterator[str]:
    """An option as it is written, with a `=` behind it where it takes a value; an argument in capital letters."""
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            yield parameter.name.upper()
        else:
            takes = "" if parameter.is_flag else "="
            yield from (f"{word}{takes}" for word in (*parameter.opts, *parameter.secondary_opts))


def _walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    for below, inner in getattr(command, "commands", {}).items():
        yield from _walk(f"{name} {below}", inner)


def main() -> None:
    python = {name: describe(look_up(name)) for name in names()}
    text = json.dumps({"python": python, "commands": commands()}, indent=None, sort_keys=True)
    print(re.sub(r'(\}|\]|null), "', r'\1,\n"', text))


if __name__ == "__main__":
    main()
