# SPDX-License-Identifier: Apache-2.0
"""What the model card says, gathered from a run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evoalign.config import Config, ModelConfig, reading
from evoalign.config.outside import CODE, SCRIPT, marked
from evoalign.config.shipped import locate
from evoalign.errors import DataError, EvoalignError
from evoalign.exporting import card
from evoalign.exporting.excerpts import FIGURE, Sample
from evoalign.exporting.public import public
from evoalign.exporting.source import Source, read_json, shown_name
from evoalign.models.origin import origin
from evoalign.placebos import file as placebo_file
from evoalign.rundir import files, parquet, sealing
from evoalign.rundir.directory import RunDir
from evoalign.setup import task_and_data
from evoalign.tasks.data import HUB
from evoalign.tokens import Tokens

MOST_FIGURE = 2**24
"""Bytes of a figure."""
PNG = b"\x89PNG\r\n\x1a\n"


def gather(
    source: Source, tokens_: Tokens, kind: card.Kind, name: str, saved: str, with_records: bool, samples: int
) -> card.Facts:
    """All that the card says; `saved` is the dtype of the exported weights. Raises DataError for what was altered."""
    config, mark, start = source.config, source.mark, origin(source.model)
    sizes, messages, system = _task_of(config)
    evaluation = _evaluation(source)
    return card.Facts(
        name=name,
        kind=kind,
        method="es" if source.log is not None else "grpo",
        config=public(config.model_copy(update={"model": source.model})),
        base=shown_name(source.model),
        base_on_hub=start.base == source.model.name and not Path(start.base).is_dir(),
        over=shown_name(ModelConfig(name=start.base)) if start.adapters else None,
        generation=mark.generation,
        dtype=source.dtype,
        saved=saved,
        model_hash=source.model_hash,
        weights_hash=mark.weights_hash,
        stop_ids=tokens_.stop_ids,
        chat=messages and bool(tokens_.tokenizer.chat_template),
        system=system,
        with_records=with_records,
        evaluation=evaluation,
        placebo=placebo_file.read(source.run, source.config),
        manifest=source.manifest,
        data=_data(config),
        sizes=sizes,
        samples=_samples(source.run, samples) if evaluation is not None else (),
        figure=bool(figure(source.run)),
        member=source.told,
    )


def figure(run: Path) -> bytes:
    """evolution.png of a run; empty where there is none."""
    try:
        found = reading.read_bytes(run / "figures" / FIGURE, MOST_FIGURE)
    except DataError:
        return b""
    return found if found.startswith(PNG) else b""


def _samples(run: Path, count: int) -> list[Sample]:
    """The first examples of the test split, whatever they earn. Raises DataError for tables that are damaged."""
    tables: list[dict[int, dict[str, Any]]] = []
    for name in ("before", "after"):
        file = RunDir(run).completions(name)
        rows = parquet.read(file) if file.is_file() else []
        if rows and not {"example", "prompt", "text", "reward"} <= rows[0].keys():
            raise DataError(f"{file} has other columns than a run leaves; put it back from a copy")
        tables.append({row["example"]: row for row in reversed(rows)})
    before, after = tables
    shared = sorted(before.keys() & after.keys())[:count]
    return [
        Sample(
            str(after[i]["prompt"]), str(before[i]["text"]), float(before[i]["reward"]), str(after[i]["text"]),
            float(after[i]["reward"]),
        )
        for i in shared
    ]  # fmt: skip


def _evaluation(source: Source) -> dict[str, Any] | None:
    """The comparison of this very mean; a run that went on has one of another mean."""
    found = read_json(source.run / sealing.EVALUATION)
    if found is None or found.get("weights_hash") != source.mark.weights_hash:
        return None
    return {**found, "sealed": sealing.is_sealed(source.run, sealing.EVALUATION)}


def _data(config: Config) -> list[card.DataFile]:
    shown = public(config).task
    named = zip(("training", "test", "validation"), config.task.files, shown.files, strict=True)
    return [card.DataFile(role, str(name), _sha256(source)) for role, source, name in named if source is not None]


def _sha256(source: str) -> str | None:
    file = locate(source)
    return files.digest_of(file) if not source.startswith(HUB) and file.is_file() else None


def _task_of(config: Config) -> tuple[tuple[int, int, int] | None, bool, str | None]:
    """Sizes of training, test and validation where that takes no network and no code but ours; whether it chats, and
    after which system message."""
    chosen = config.task
    known = None, chosen.prompt != "raw", chosen.system_prompt
    names_code = any(mark in (CODE, SCRIPT) for _, _, mark in marked(chosen))
    if names_code or any((file or "").startswith(HUB) for file in chosen.files):
        return known
    try:
        task, data = task_and_data(config, None, None)
        prompt = task.prompt(data.test[0])
    except EvoalignError:  # the data has moved since; the card does without
        return known
    if isinstance(prompt, str):
        return data.sizes, False, None
    return data.sizes, True, next((m["content"] for m in prompt if m["role"] == "system"), None)
