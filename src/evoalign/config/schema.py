# SPDX-License-Identifier: Apache-2.0
"""The settings as a JSON schema, with what each of them means: for editors, and for the page on configuration."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import yaml

from evoalign.config.engines import ENGINES, SINGLE
from evoalign.config.run import Config

HERE = Path(__file__).parent
OWN = {"type": "string", "pattern": ":"}
"""How code of one's own is named: `package.module:Class`, or `file.py:Class`."""


def schema() -> dict[str, Any]:
    """What a config file may hold, as JSON schema (draft 2020-12), each setting with its description.

    An editor checks with it what `load` checks value by value; what depends on two settings it does not see.
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
    tree["properties"]["engine"]["description"] = "Which engine answers the prompts, and its own settings."
    for section in (tree, *definitions.values(), *engines, *replicas):
        _described(section)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **tree, "title": "evoalign"}


def _described(section: dict[str, Any]) -> None:
    """Put in the descriptions of a section and of its settings."""
    name = section["title"]
    section["description"] = docstrings().get(name) or _line(section.get("description", ""))
    for field, value in section.get("properties", {}).items():
        value.pop("title", None)
        if text := description(name, field):
            value["description"] = text


def description(section: str, field: str) -> str:
    """What a setting means; empty where nobody says."""
    return docstrings().get(f"{section}.{field}") or more().get(f"{section}.{field}", "")


@functools.cache
def docstrings() -> dict[str, str]:
    """`Class` and `Class.field` to their docstrings; pydantic keeps those of fields only when a model asks it to."""
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
    """Descriptions of the fields that have no docstring, because their name says it to those who know the field."""
    return cast("dict[str, str]", yaml.safe_load((HERE / "settings.yaml").read_text(encoding="utf-8")))


def _line(text: str) -> str:
    return " ".join(text.split())
