# SPDX-License-Identifier: Apache-2.0
"""Faults that are put in by hand, each of them small and of a kind that was, or might be, in a release."""

import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import fuzz_configs
import fuzz_models
import pytest
import torch
import yaml
from pydantic import BaseModel

from evoalign import tokens
from evoalign.analysis.compare import runs
from evoalign.baselines import trainer_state
from evoalign.config import reading
from evoalign.config.es import EsConfig
from evoalign.config.run import Config
from evoalign.config.task import TaskConfig
from evoalign.engines.transformers import engine
from evoalign.models import files, origin
from evoalign.rewards import functions
from evoalign.rundir import checkpoint, checksums, journal
from evoalign.tasks import base, countdown, data
from evoalign.tasks.conciseness import Conciseness
from evoalign.tasks.custom import Custom
from evoalign.tasks.data import files as data_files
from evoalign.training import weights

Patch = pytest.MonkeyPatch
load = importlib.import_module("evoalign.config.load")  # the package has a function of that name


@dataclass(frozen=True)
class Fault:
    """Put into the product by `put`; cases of `kind` show it, as one of `shows`. `aim`: see `Bench`."""

    kind: str
    put: Callable[[Patch], AbstractContextManager[None]]
    aim: str
    shows: tuple[str, ...]


def patched(where: str, *changes: tuple[Any, str, Any], shows: str = "silent") -> Fault:
    """Other functions or constants in their modules. `where` is `kind` or `kind > aim`."""

    @contextmanager
    def put(monkeypatch: Patch) -> Iterator[None]:
        with monkeypatch.context() as patch:
            for owner, name, value in changes:
                patch.setattr(owner, name, value)
            yield

    kind, _, aim = where.partition(" > ")
    return Fault(kind, put, aim, tuple(shows.split()))


def loosened(model: type[BaseModel], field: str | None, aim: str, **extra: Any) -> Fault:
    """A model of settings that does not bound a field, or takes what it does not know."""

    @contextmanager
    def put(monkeypatch: Patch) -> Iterator[None]:
        with monkeypatch.context() as patch:
            if field is not None:
                found = model.model_fields[field]
                patch.setattr(found, "metadata", [])
                patch.setattr(found, "annotation", extra.get("annotation", found.annotation))
            else:
                patch.setattr(model, "model_config", {**model.model_config, **extra})
            _rebuild(model)
            yield
        _rebuild(model)

    return Fault("configs", put, aim, ("silent",))


def _rebuild(model: type[BaseModel]) -> None:
    for each in (model, Config):
        each.model_rebuild(force=True)


def swallowed(inner: Callable[..., Any], default: Any) -> Callable[..., Any]:
    """A function whose errors are nothing."""

    def outer(*args: Any, **kwargs: Any) -> Any:
        try:
            return inner(*args, **kwargs)
        except Exception:
            return default

    return outer


@contextmanager
def causes() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise error.__cause__ or error.__context__ or error from None


def raising_rows(inner: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """A generator whose clear errors are what they were made of."""

    def outer(*args: Any) -> Iterator[Any]:
        with causes():
            yield from inner(*args)

    return outer


def raising(inner: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose clear errors are what they were made of."""
    return causes()(inner)


def _rounded(config: Any) -> str:
    tree = config.model_dump(mode="json")
    tree["es"]["sigma"] = tree["es"]["sigma"] and float(f"{tree['es']['sigma']:.0e}")
    return yaml.safe_dump(tree, sort_keys=False)


def _of_one_line(path: Any, source: Any, *, is_list: bool) -> Iterator[Any]:
    if is_list:
        yield from whole_json(path, source, is_list=True)
        return
    lines = [(f"{path}, line {i}", line) for i, line in enumerate(source.read().decode().splitlines(), 1)]
    for where, line in lines:
        if line.strip():
            yield where, data_files._columns(data_files._parse(line, where), where)


def _stripped(row: Any, where: str) -> Any:
    found = whole_columns(row, where)
    return {k: v.replace("\x00", "").replace("\ufeff", "") if isinstance(v, str) else v for k, v in found.items()}


def _half(name: Any, dtype: Any) -> Any:
    model = whole_load(name, dtype)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).to(dtype)
    return model


def _parsed(text: bytes, previous: str) -> tuple[dict[str, Any], str]:
    """Without the hashes."""
    found = quiet_json(text)
    if found is None or not text.endswith(b"\n"):
        raise journal._BadLineError("is cut or damaged")
    return found, found.pop("hash", "")


def _believed(folder: Any) -> Any:
    return checkpoint._record_of(folder)[0]


def _rows_that_parse(path: Any) -> list[Any]:
    rows = [row for line in path.read_bytes().splitlines() if (row := quiet_row(line)) is not None]
    return rows or whole_rows(path)


whole_merge, whole_load, whole_stops, whole_rows = load._merge, engine.load_model, tokens._stops, runs._rows
whole_columns = data_files._columns
whole_json = data_files._json
quiet_row = swallowed(lambda line: runs._Row.model_validate(json.loads(line)), None)
quiet_json = swallowed(json.loads, None)
SAFE = yaml.SafeLoader


def _recorded(run: Any, *_: Any) -> bool:
    return (run / checksums.CHECKSUMS).is_file()


def _any_json(raw: Any, *_: Any, **__: Any) -> Any:
    return json.loads(raw)


FAULTS: dict[str, Fault] = {
    "a bound of a population": loosened(EsConfig, "population_size", "value:es.population_size"),
    "a bound of a decay": loosened(EsConfig, "decay", "value:es.decay"),
    "not a number as a weight": loosened(
        TaskConfig, "reward_weights", "value:task.reward_weights", annotation=list[float] | None),
    "unknown settings": loosened(EsConfig, None, "tree", extra="ignore"),
    "a key twice": patched("configs > text", (reading._Loader, "construct_mapping", SAFE.construct_mapping)),
    "an alias of itself": patched(
        "configs > text", (reading, "_measure", lambda node, known: (1, 1)), shows="traceback hang silent"),
    "a date that is none": patched("configs > text", (reading, "MALFORMED", ()), shows="traceback"),
    "brackets without end": patched("configs > text", (reading, "YAML_DEPTH", 10**9), shows="traceback silent"),
    "the earlier wins": patched(
        "configs", (load, "_merge", lambda low, high: whole_merge(high, low)), shows="silent refused"),
    "secrets": patched("configs > tree", (load, "refuse_secrets", lambda tree: None)),
    "digits lost in writing": patched("configs", (fuzz_configs, "to_yaml", _rounded)),
    "line breaks in a text": patched("data files", (data_files, "_json", _of_one_line), shows="refused silent"),
    "rows shared with rewards": patched(
        "data files", (functions, "fresh", lambda value: value), (base, "fresh", lambda value: value)),
    "no bound of depth": patched(
        "data files > text", (data_files, "_columns", lambda row, where: row), shows="silent traceback"),
    "a column that is missing": patched(
        "data files > missing", (Conciseness, "_check", lambda self, where, row: row), shows="traceback"),
    "no numbers": patched(
        "data files > value", (countdown, "check_row", lambda where, row: None), shows="traceback silent"),
    "texts cleaned": patched("data files", (data_files, "_columns", _stripped)),
    "a parquet file's own error": patched(
        "data files > bytes", (data_files, "_parquet", raising_rows(data_files._parquet)), shows="traceback"),
    "the last row": patched("data files", (data, "_first", lambda rows, *_: rows[:-1] or rows)),
    "messages of any form": patched(
        "data files > value", (Custom, "_check", lambda self, where, row: row), shows="traceback silent"),
    "tensors at random": patched("model folders > weights", (files, "check_whole", lambda name, info: None)),
    "weights rounded": patched("model folders", (fuzz_models, "load_model", _half)),
    "one stop of two": patched("model folders", (tokens, "_stops", lambda *args: whole_stops(*args)[:1])),
    "stops passed over": patched("model folders > stops", (tokens, "_stops", swallowed(tokens._stops, []))),
    "a library's own error": patched(
        "model folders > weights", (fuzz_models, "load_model", raising(engine.load_model)), shows="traceback"),
    "files that a model names": patched(
        "model folders > settings",
        *((where, "refuse_hooks", lambda *_, **__: None) for where in (tokens, origin, files))),
    "checksums": patched("run directories > edit", (runs, "verify", _recorded)),
    "rows passed over": patched("run directories > row", (runs, "_rows", _rows_that_parse), shows="silent traceback"),
    "JSON of any depth": patched(
        "run directories > odd", (reading, "parse", _any_json), (runs, "parse", _any_json), shows="traceback"),
    "a state of GRPO": patched(
        "run directories > bytes", (trainer_state, "_check", lambda folder, step: True), shows="silent"),
    "saved means unchecked": patched(
        "run directories > bytes", (checkpoint, "verify", _believed), (weights, "check", lambda *_: None)),
    "hashes of the journal": patched("corruptions > journal", (journal, "_parse", _parsed), shows="silent traceback"),
    "digests of saved means": patched("corruptions > mean", (checkpoint, "verify", _believed)),
    "lines passed over": patched(
        "corruptions > journal", (journal, "_up_to", lambda *_: ""), (journal, "Damage", lambda *_: None)),
    "results that were changed": patched("corruptions > results", (runs, "verify", _recorded)),
}  # fmt: skip
