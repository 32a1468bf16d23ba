# SPDX-License-Identifier: Apache-2.0
"""JSON schema of a config, with a description of each setting, for editors and the documentation."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import yaml

from evoalign.config.base import OWN
from evoalign.config.engines import ENGINES, SINGLE
from evoalign.config.run import Config

HERE = Path(__file__).parent


def schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a config file, with descriptions.

    It covers what `load` checks for single values, not what depends on two settings.
    """
    tree = Config.model_json_schema()
    definitions: dict[str, Any] = tree["$defs"]
    listed: list[Any] = tree["properties"]["engine"].pop("oneOf")
    engines = [definitions.pop(one["$ref"].rpartition("/")[2]) if "$ref" in one else one for one in listed]
    replica = next(one["properties"]["replica"] for one in engines if "replica" in one["properties"])
    replicas: list[Any] = replica.pop("oneOf")
    replica["anyOf"] = [{"enum": list(SINGLE)}, *replicas]
    own = {"type": "object", "properties": {"name": OWN}, "required": ["name"]}
    tree["properties"]["engine"]["anyOf"] = [{"enum": list(ENGINES)}, OWN, *engines, own]
    tree["properties"]["engine"]["description"] = "The engine that generates completions, and its settings."
    for section in (tree, *definitions.values(), *engines, *replicas):
        _described(section)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **tree, "title": "evoalign"}


def _described(section: dict[str, Any]) -> None:
    """Add the descriptions of a section and its settings."""
    name = section["title"]
    section["description"] = docstrings().get(name) or _line(section.get("description", ""))
    for field, value in section.get("properties", {}).items():
        value.pop("title", None)
        if text := description(name, field):
            value["description"] = text


def description(section: str, field: str) -> str:
    """Return the description of a setting; empty where there is none."""
    return docstrings().get(f"{section}.{field}") or more().get(f"{section}.{field}", "")


@functools.cache
def docstrings() -> dict[str, str]:
    """Return the docstrings by `Class` and `Class.field`, read from the source: pydantic does not keep those of
    fields."""
    return dict(_docstrings())


def _docstrings() -> Iterator[tuple[str, str]]:
    sources = [*HERE.glob("*.py"), *HERE.parent.glob("engines/*/settings.py")]
    for node in (node for file in sources for node in ast.parse(file.read_text(encoding="utf-8")).body):
        if not isinstance(node, ast.ClassDef):
            continue
        yield node.name, ast.get_docstring(node) or ""
        for field, text in zip(node.body, node.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                yield f"{node.name}.{ast.unparse(field.target)}", _line(str(text.value.value))


@functools.cache
def more() -> dict[str, str]:
    """Return the descriptions of fields without a docstring, such as inherited ones."""
    return cast("dict[str, str]", yaml.safe_load((HERE / "settings.yaml").read_text(encoding="utf-8")))


def _line(text: str) -> str:
    return " ".join(text.split())
