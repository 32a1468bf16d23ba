# SPDX-License-Identifier: Apache-2.0
"""Generate the site's reference of settings, commands and Python names from the code while mkdocs builds.

Replaces lines such as `<!-- settings: es -->`, `<!-- commands -->`, `<!-- python -->` and `<!-- bases -->`.
Nothing here imports torch: settings come from the JSON schema of `evoalign.config` and the docstrings under its fields,
commands from the command line's own tree, Python names from the source text.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer.main
import yaml

import evoalign
from evoalign import cli, config
from evoalign.config.schema import description, docstrings

SOURCE = Path(config.__file__).parent
MARKER = re.compile(r"^<!-- (settings|commands|python|bases)(?:: (\S+))? -->$", re.MULTILINE)
BASES = {
    "Space": ("evoalign.spaces.base:Space",),
    "Task": ("evoalign.tasks.base:Task",),
    "Objective": ("evoalign.rewards.objective:Objective",),
    "Analysis": ("evoalign.analysis.base:Analysis",),
    "Engine": tuple(f"evoalign.engines.base:{name}" for name in ("Engine", "Answering", "EngineDefaults")),
}
"""Base classes of user-defined parts; for each, the classes that define its methods."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs calls this with the text of each page."""
    return MARKER.sub(lambda match: written(match[1], match[2]), markdown)


def written(what: str, name: str | None) -> str:
    """Markdown in the place of one marker."""
    if what == "commands":
        return "\n".join(_command(path, command) for path, command in commands())
    if what == "python":
        return "\n".join(_python(public) for public in sorted(evoalign._HOMES, key=lambda n: (n[0].isupper(), n)))
    if what == "bases":
        return "\n".join(map(_base, BASES))
    section = "" if name == "run" else f"{name}."
    if not section:
        return "\n".join(map(_setting, _top_level()))
    chosen = [s for s in settings() if s["key"].startswith(section)]
    groups = itertools.groupby(chosen, key=lambda s: s["section"] if name == "engine" else "")
    return "\n\n".join(_group(list(group)) for _, group in groups)


def _group(chosen: list[dict[str, Any]]) -> str:
    """A section's own words and its settings."""
    return " ".join(docstrings()[chosen[0]["section"]].split()) + "\n\n" + "\n".join(map(_setting, chosen))


# Settings


@functools.cache
def settings() -> list[dict[str, Any]]:
    """Every setting that is not itself a section: its dotted key, JSON schema, section class and description."""
    schema = config.Config.model_json_schema()
    return list(_walk(schema, "Config", "", schema["$defs"]))


def _walk(
    schema: Mapping[str, Any], section: str, prefix: str, definitions: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    for name, field in schema["properties"].items():
        key = prefix + name
        for below, inner in _below(field, definitions):
            yield from _walk(inner, below, f"{key}.", definitions)
        if _below(field, definitions):
            continue
        yield {"key": key, "schema": field, "section": section, "text": description(section, name)}


def _below(field: Mapping[str, Any], definitions: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The section classes that a field holds and their schemas: one, one of several engines', or one or null."""
    parts = field.get("oneOf") or field.get("anyOf") or [field]
    named = [part["$ref"].rsplit("/", 1)[-1] for part in parts if "$ref" in part]
    return [(name, definitions[name]) for name in named] + [(p["title"], p) for p in parts if "properties" in p]


def _top_level() -> list[dict[str, Any]]:
    return [s for s in settings() if "." not in s["key"]]


def _setting(setting: Mapping[str, Any]) -> str:
    schema, key = setting["schema"], setting["key"]
    engine = engine_of(setting["section"])
    told = default(key, engine)
    if told == "null" and schema.get("default") is not None:  # of a section that is left out
        told = _yaml(schema["default"])
    anchor = key if engine == "transformers" else key.replace("engine.", f"engine.{engine}.")
    return f"`{key}`{{#{anchor}}}\n\n:   {allowed(schema)} · default `{told}`\n\n    {setting['text']}\n"


def engine_of(section: str) -> str:
    """The engine whose settings a section class has; for sections of other settings the default one."""
    return next((name for name, kind in config.ENGINES.items() if kind.__name__ == section), "transformers")


def default(key: str, engine: str = "transformers") -> str:
    """The default of a setting as YAML writes it; of `engine`, those of the engine of that name."""
    value: Any = config.from_dict({"es": {"sigma": 1}, "engine": engine}).model_dump(mode="json")
    for part in key.split("."):
        value = (value or {}).get(part)  # a section that is left out has none
    return _yaml(None if key == "es.sigma" else value)


def _yaml(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()


def allowed(schema: Mapping[str, Any]) -> str:
    """Type and bounds of a value in words."""
    if "anyOf" in schema:
        return " or ".join(allowed(part) for part in schema["anyOf"])
    if "const" in schema:
        return f"`{_yaml(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = schema["type"]
    if kind == "array":
        least = ", at least one" if schema.get("minItems") else ""
        return f"list of {allowed(schema['items'])}{least}"
    words = {
        "integer": "whole number",
        "number": "number",
        "string": "text",
        "boolean": "`true`, `false`",
        "object": "mapping",
        "null": "`null`",
    }
    bounds = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    limits = [f"{word} {_number(schema[bound])}" for bound, word in bounds.items() if bound in schema]
    return " ".join([words.get(kind, kind), " and ".join(limits)]).strip()


def _number(value: float) -> str:
    return "2^63" if value == 2**63 else f"{value:g}"


# Commands


def commands() -> list[tuple[str, Any]]:
    """Every command of the command line with its full name, in the order of `--help`."""
    return list(_leaves("evoalign", typer.main.get_command(cli.app)))


def _leaves(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    below = getattr(command, "commands", None)
    if below is None:
        yield path, command
        return
    for name, inner in below.items():
        yield from _leaves(f"{path} {name}", inner)


def _command(path: str, command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    shown = " ".join([path, *map(_argument, arguments), "[OPTIONS]"])
    anchor = path.replace(" ", "-")
    lines = [
        f"### `{path}` {{#{anchor}}}",
        "",
        " ".join((command.help or "").split()),
        "",
        f"```text\n{shown}\n```",
        "",
    ]
    lines += [f"`{_argument(p)}`\n\n:   {p.help or ''}\n" for p in arguments]
    lines += [f"`{_option(p)}`\n\n:   {p.help or ''}{_option_default(p)}\n" for p in options]
    return "\n".join(lines)


def _argument(parameter: Any) -> str:
    name = (parameter.metavar or parameter.name.upper()) + ("..." if parameter.nargs == -1 else "")
    return name if parameter.required else f"[{name}]"


def _option(parameter: Any) -> str:
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    value = parameter.metavar or parameter.opts[0].rsplit("-", 1)[-1].upper()
    return names if parameter.is_flag else f"{names} {value}"


def _option_default(parameter: Any) -> str:
    if parameter.multiple:
        return " May be given several times."
    default = parameter.default
    return "" if default in (None, False, "") or callable(default) else f" Default `{default}`."


# Python


def _python(name: str) -> str:
    """A public name: its signature or fields, and its docstring, as they stand in the source."""
    home = evoalign._HOMES[name]
    node = _find(*home.split(":"))
    heading = f"### `evoalign.{name}` {{#{name}}}"
    text = "\n\n".join(" ".join(p.split()) for p in (ast.get_docstring(node) or "").split("\n\n"))
    return f"{heading}\n\n```python\n{_signature(node)}\n```\n\n{text}\n"


def _base(name: str) -> str:
    """Return the public attributes and methods of a base class, with the first paragraph of each docstring."""
    parts = [f"### `{name}` {{#base-{name}}}", ""]
    for home in BASES[name]:
        body = _find(*home.split(":")).body
        for node, following in itertools.zip_longest(body, body[1:]):
            match node, following:
                case ast.FunctionDef(name=member), _ if not member.startswith("_"):
                    is_property = any(ast.unparse(d) == "property" for d in node.decorator_list)
                    arguments = ", ".join(a.arg for a in [*node.args.args, *node.args.kwonlyargs][1:])
                    shown, text = member if is_property else f"{member}({arguments})", ast.get_docstring(node) or ""
                case ast.AnnAssign(target=ast.Name(shown)), ast.Expr(ast.Constant(str(text))):
                    pass
                case _:
                    continue
            parts.append(f"`{shown}`\n\n:   {' '.join(text.split(chr(10) * 2)[0].split())}\n")
    return "\n".join(parts)


def _find(module: str, name: str) -> ast.ClassDef | ast.FunctionDef:
    """Return the definition of a name, followed through imports and through wrappers of one function."""
    path = SOURCE.parent.joinpath(*module.removeprefix("evoalign.").split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and node.module:
            for brought in (a for a in node.names if (a.asname or a.name) == name):
                return _find(node.module, brought.name)
        match node:  # name = wrapper(function)
            case ast.Assign(targets=[ast.Name(target)], value=ast.Call(args=[ast.Name(wrapped)])) if target == name:
                return _find(module, wrapped)
            case _:
                pass
    raise KeyError(f"{module} has no {name}")


def _signature(node: ast.ClassDef | ast.FunctionDef) -> str:
    if isinstance(node, ast.FunctionDef):
        return _def(node)
    bases = ", ".join(map(ast.unparse, node.bases))
    head = f"class {node.name}({bases}):" if bases else f"class {node.name}:"
    body = [f"    {ast.unparse(n)}" for n in node.body if isinstance(n, ast.AnnAssign)]
    if node.name == "Config":
        body = []  # the page on configuration has them
    body += [_method(n) for n in node.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]
    return "\n".join([head, *(body or ["    ..."])])


def _method(node: ast.FunctionDef) -> str:
    shown = "".join(f"    @{ast.unparse(d)}\n" for d in node.decorator_list)
    return shown + "\n".join(f"    {line}" for line in _def(node).splitlines())


def _def(node: ast.FunctionDef) -> str:
    """One line, or one line an argument where that is too long."""
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"def {node.name}({ast.unparse(node.args)}){returns}: ..."
    if len(line) <= 88:
        return line
    a = node.args
    shown: list[str] = []
    positional = [*a.posonlyargs, *a.args]
    defaults = [None] * (len(positional) - len(a.defaults)) + list(a.defaults)
    shown += [_parameter(p, d) for p, d in zip(positional, defaults, strict=True)]
    if a.kwonlyargs:
        shown += ["*", *(_parameter(p, d) for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True))]
    return f"def {node.name}(\n" + "".join(f"    {p},\n" for p in shown) + f"){returns}: ..."


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(argument) + (f" = {ast.unparse(default)}" if default is not None else "")
