# SPDX-License-Identifier: Apache-2.0
"""Read, merge, check and write configs."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, cast, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError

from evoalign.config import outside
from evoalign.config.base import named
from evoalign.config.decoding import SamplingConfig
from evoalign.config.engines import DEFAULT, ENGINES, EngineSettings, section_of
from evoalign.config.grpo import OF_TRL, in_place, place_of
from evoalign.config.outside import CODE, SCRIPT, TRACKER
from evoalign.config.reading import YAML_CHARACTERS, YAML_DEPTH, MissingError, parse_yaml, read_bytes
from evoalign.config.run import Config
from evoalign.config.secrets import GONE, is_secret, redacted_pairs, refuse_secrets
from evoalign.errors import ConfigError, DataError, cut, shown

MOST_ERRORS = 10
"""Most wrong values that one message lists."""
OLD_NAMES = {
    "evaluation.beside_members": "it was removed: delete it from the config",
    "evaluation.samples_per_generation": "here it is task.batch_size",
    "evaluation.test_samples": "here it is task.test_size",
    "engine.audit": "it was removed: weights are still compared, see engine.compare_every; take it out",
    "engine.catch_up": "it was removed, and a replica that joins replays the updates: take it out",
    "engine.graders": "it was removed, and completions are graded in the run's own process: take it out",
    "es.perturb_scale": "here it is es.noise_multiplier, a tenth of it: the width is that times mean |W|",
    "es.init_scale": "here it is lora.init_scale, with lora.evolve ab: init_scale / perturb_scale of that config",
}
"""Advice for settings that were removed, and for settings of the public LoRA-population code with another name or unit.
Its noise has the width 0.1 mean |W| x perturb_scale, and x init_scale in generation 0; `lora.init_scale` is a
factor."""


SHIPPED = (("data", "tasks"), ("configs",))
"""First parts of the paths of files that come with the package: in it in a wheel, next to `src` in a checkout."""


def locate(source: str | Path) -> Path:
    """Return the path, or for a `data/tasks/..` or `configs/..` missing in the working folder, the package's.

    So the quickstart runs from any folder, without a checkout.
    """
    path = Path(source)
    known = any(path.parts[: len(folder)] == folder for folder in SHIPPED)
    if not known or os.path.exists(path):  # noqa: PTH110 (which raises nothing)
        return path
    package = Path(__file__).resolve().parents[1]
    return next((place / path for place in (package, package.parents[1]) if (place / path).is_file()), path)


def load(files: str | Path | Sequence[str | Path], overrides: Sequence[str] = ()) -> Config:
    """Read YAML files, of which later ones win, and `a.b=c` overrides, and check them with `from_dict`.

    A `configs/..` that is missing in the working folder is read from the package. Raises ConfigError.
    """
    return from_dict(read(files, overrides))


def read(files: str | Path | Sequence[str | Path], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read the merged settings of all files and overrides, unchecked. Raises ConfigError."""
    tree: dict[str, Any] = {}
    for file in [files] if isinstance(files, str | Path) else files:
        tree = _merge(tree, _in_place(_read(locate(file))))
    return parse_overrides(tree, overrides)


def code_of(config: Config) -> list[str]:
    """Return the import paths and scripts that a config names: code that runs with it."""
    found = [(value, mark) for _, value, mark in outside.marked(config)]
    return [str(value) for value, mark in found if mark in (CODE, SCRIPT) or (mark is TRACKER and ":" in str(value))]


def parse_overrides(tree: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a nested mapping with `a.b=c` overrides applied. Raises ConfigError."""
    merged = _in_place(tree)
    for override in overrides:
        merged = _merge(merged, _in_place(_parse_override(override)))
    return merged


def from_dict(tree: Mapping[str, Any]) -> Config:
    """Check a nested mapping. Raises ConfigError naming each wrong value, and for secrets (`evoalign.config.secrets`).

    Neither a section es nor grpo is needed, as for an evaluation; `Config.es` raises where it is missing.
    """
    refuse_secrets(tree)
    try:
        config = Config.model_validate(dict(tree))
    except ValidationError as error:
        shared = ("sampling", "evaluation")
        errors = [e for e in error.errors() if not e["loc"] or e["loc"][0] not in shared or _at(tree, e["loc"])]
        raise _refused(errors, _section(tree)) from None
    return config


def from_record(tree: Mapping[str, Any]) -> Config:
    """Check a config that a run recorded, as `from_dict` does, without engine settings that were removed since."""
    engine = tree.get("engine")
    if isinstance(engine, Mapping) and "name" in engine:
        removed = _section(tree).removed
        kept = {name: value for name, value in cast(Mapping[str, Any], engine).items() if name not in removed}
        tree = {**tree, "engine": kept}
    return from_dict(tree)


def with_engine(config: Config, section: type[EngineSettings]) -> Config:
    """Return the config with its engine's settings checked by another section class. Raises ConfigError."""
    try:
        engine = section.model_validate(config.engine.model_dump())
    except ValidationError as error:
        raise _refused(error.errors(), section, ("engine",)) from None
    return config.model_copy(update={"engine": engine})


def _at(tree: object, place: Sequence[str | int]) -> bool:
    """Return whether a tree has a place, so that a value copied to a second section is reported only once."""
    for part in place:
        if not isinstance(tree, Mapping):
            return True  # inside a value, such as an item of a list
        if part not in tree:
            return False
        tree = cast(Mapping[Any, Any], tree)[part]
    return True


def to_yaml(config: Config, without: Iterable[str] = (), *, changed: bool = False) -> str:
    """Return the resolved config as YAML, without some sections: with all defaults, or only what is `changed` from
    them.

    Both load to the same config. The names of space, task, model and engine are always included.
    """
    left_out = {*without}
    tree = {name: section for name, section in config.model_dump(mode="json").items() if name not in left_out}
    tree = _changed(config, tree) if changed else tree
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def _changed(config: Config, whole: Mapping[str, Any]) -> dict[str, Any]:
    found = config.model_dump(mode="json", exclude_defaults=True)
    for name in ("space", "task", "model", "engine"):
        found[name] = {"name": getattr(config, name).name, **found.get(name, {})}
    drawn = {name: found.get(name, {}) for name in ("sampling", "evaluation")}
    # A setting written in only one of the two would apply to the other as well.
    both = {key for section in drawn.values() for key in section} & SamplingConfig.model_fields.keys()
    for name, section in drawn.items():
        found[name] = {key: value for key, value in whole[name].items() if key in both or key in section}
    return {name: found[name] for name in whole if found.get(name)}


def _read(path: Path) -> dict[str, Any]:
    if "\0" in str(path):
        raise ConfigError(f"no config file {shown(str(path))}")
    if os.path.isdir(path):  # noqa: PTH112 (which raises nothing)
        raise ConfigError(f"{path} is a folder; give the YAML file in it")
    try:
        # A pipe from the shell, such as `<(envsubst < config.yaml)`, is trusted.
        piped = str(path.parent) in ("/dev/fd", "/proc/self/fd") or path == Path("/dev/stdin")
        raw = path.read_bytes() if piped else read_bytes(path, 4 * YAML_CHARACTERS, "give a YAML file")
        text = raw.decode("utf-8")
    except MissingError:
        raise ConfigError(f"no config file {path}; `evoalign init DIR` writes one to start from") from None
    except DataError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:  # of a pipe
        raise ConfigError(f"{path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    tree: object = parse_yaml(text, str(path))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds no settings; expected keys such as model: and es:")
    return cast(dict[str, Any], tree)


def _in_place(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Move settings to their present places, so that the later of two wins in whichever place each is."""
    section = tree.get("grpo")
    return {**tree, "grpo": in_place(cast(Mapping[str, Any], section))} if isinstance(section, Mapping) else dict(tree)


def _parse_override(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    given = cut(f"{key}={GONE}" if is_secret(key, value) else redacted_pairs(text), 100)
    if not equals or not all(key.split(".")) or key.count(".") > YAML_DEPTH:
        raise ConfigError(f"--set {given!r}: expected key=value, such as es.sigma=0.003")
    try:
        leaf: object = parse_yaml(value, "it")
    except ConfigError as error:
        raise ConfigError(f"--set {given!r}: {error}; quote it if it is a text") from None
    if isinstance(leaf, str) and value.strip()[0] not in "'\"":  # YAML 1.1 reads 1e-3 (no dot) as a string
        leaf = _number(leaf)
    for part in reversed(key.split(".")):
        leaf = {part: leaf}
    return cast(dict[str, Any], leaf)


def _number(text: str) -> object:
    try:
        return float(text)
    except ValueError:
        return text


def _merge(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(low)
    for key, value in high.items():
        old = merged.get(key)
        if isinstance(value, Mapping):  # `optimizer: adam`, then `optimizer.beta1`: the name is kept
            old = named(old)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = _merge(cast(Mapping[str, Any], old), cast(Mapping[str, Any], value)) if both else value
    if "sigma" in high and "noise_multiplier" not in high:  # the later width replaces the earlier one
        merged.pop("noise_multiplier", None)
    if "noise_multiplier" in high and "sigma" not in high:
        merged.pop("sigma", None)
    return merged


def _section(tree: Mapping[str, Any]) -> type[EngineSettings]:
    """Return the section class of the configured engine; the default one where the name is unknown."""
    try:
        return section_of(tree.get("engine"))
    except PydanticCustomError:
        return ENGINES[DEFAULT]


def _refused(errors: Sequence[Any], engine: type[EngineSettings], prefix: tuple[str | int, ...] = ()) -> ConfigError:
    """Make an error with one line per wrong value."""
    lines = [cut(_explain(error, engine, prefix), 600) for error in errors[:MOST_ERRORS]]
    more = len(errors) - len(lines)
    return ConfigError("\n".join([*lines, *([f"and {more:,} more settings are wrong"] if more else [])]))


def _explain(error: Mapping[str, Any], engine: type[EngineSettings], prefix: tuple[str | int, ...]) -> str:
    where = (*prefix, *error["loc"])
    location = ".".join(cut(str(part), 60) for part in where)
    if error["type"] == "extra_forbidden":
        return f"unknown setting {location}{_nearest(where, engine)}"
    if error["type"] == "missing":
        return f"missing setting {location}"
    if error["type"] == "unknown_engine":
        return f"{location}.name: {error['msg']}"
    message = error["msg"].removeprefix("Value error, ")
    given = error["input"]
    bound = next((b for b in error.get("ctx", {}).values() if isinstance(b, float) and 0 < b < 1e-9), None)
    if bound is not None:  # pydantic writes all its zeros
        message = f"Input should be greater than or equal to {bound:g}"
    said = "" if isinstance(given, dict | BaseModel) else f" (given: {shown(given)})"
    if error["type"] == "list_type" and isinstance(given, str) and given.isprintable():
        said += f"; write [{cut(given, 200)}]"
    if given is None and ":" in str(where[-1] if where else ""):
        said += "; YAML wants a space after a colon"
    if isinstance(given, date):  # as YAML reads 2026-01-31
        said += "; put it in quotes"
    if error["type"] == "string_type" and isinstance(given, Mapping) and given:  # a text with a colon and a space
        key = cut(str(next(iter(cast("Mapping[Any, Any]", given)))), 40)
        said += (
            f"; YAML reads {shown(key + ': ..')} as a mapping: quote the text, as in --set '{location}=\"{key}: ..\"'"
        )
    return f"{location}: {message}{said}" if location else message


def _nearest(location: tuple[str | int, ...], engine: type[EngineSettings]) -> str:
    names = [*_names(Config, "", engine), *(f"grpo.{name}" for name in OF_TRL)]
    wanted = ".".join(str(part) for part in location)
    if wanted in OLD_NAMES:
        return f"; {OLD_NAMES[wanted]}"
    leaf = cut(str(location[-1]), 200)
    siblings = {n.rsplit(".", 1)[-1]: n for n in names if n.rpartition(".")[0] == wanted.rpartition(".")[0]}
    parts = {part: name for name in siblings for part in name.split("_")}
    near = difflib.get_close_matches(leaf, siblings, n=1)
    near = near or [parts[part] for part in difflib.get_close_matches(leaf, parts, n=1, cutoff=0.8)]
    if near:
        return f"; did you mean {place_of(siblings[near[0]])}?"
    others = [other for other, section in ENGINES.items() if leaf in section.model_fields]
    if others and wanted == f"engine.{leaf}" and "replica" in engine.model_fields:
        return f"; it belongs to the engine in each replica: take it out and set engine.replica.{leaf}"
    if location[0] == "engine" and others:
        own = next((name for name, section in ENGINES.items() if section is engine), "another")
        return f"; it belongs to engine {others[0]}, and engine.name is {own}"
    elsewhere = [n for n in names if n.rsplit(".", 1)[-1] == leaf]
    if elsewhere:
        return f"; did you mean {place_of(elsewhere[0])}?"
    return f"; known here: {', '.join(sorted(siblings)) or 'nothing'}"


def _names(section: type[BaseModel], prefix: str, engine: type[EngineSettings]) -> list[str]:
    found: list[str] = []
    for name, info in section.model_fields.items():
        name = info.alias or name
        found.append(prefix + name)
        parts = (engine,) if prefix + name == "engine" else (info.annotation, *get_args(info.annotation))
        for below in parts:  # for an optional section
            if isinstance(below, type) and issubclass(below, BaseModel):
                found += _names(below, f"{prefix}{name}.", engine)
    return found
