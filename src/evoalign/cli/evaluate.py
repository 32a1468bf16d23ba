# SPDX-License-Identifier: Apache-2.0
"""`evoalign eval`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from evoalign.cli.options import Debug, More, Sets, console, integers, quiet

if TYPE_CHECKING:
    from evoalign.config import Config


def evaluate(
    target: Annotated[str, typer.Argument(help="A run directory, a model folder, a PEFT adapter or a hub name.")],
    task: Annotated[str | None, typer.Option(help="The task; a run has its own.")] = None,
    config: More = None,
    set_: Sets = None,
    split: Annotated[str, typer.Option(help="test or train.")] = "test",
    samples: Annotated[int | None, typer.Option(help="Completions of each prompt and seed.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Comma-separated, such as 0,1,2,3.")] = None,
    output: Annotated[Path | None, typer.Option(help="Also write measures and completions as JSON.")] = None,
    debug: Debug = False,
) -> None:
    """Score the mean model of a run, or any model, on a task."""
    from evoalign.errors import ConfigError

    if split not in ("test", "train"):
        raise ConfigError(f"--split {split}: use test or train")
    chosen: Literal["test", "train"] = "test" if split == "test" else "train"
    overrides = {"samples": samples, "temperature": temperature, "seeds": integers(seeds)}
    overrides = {name: value for name, value in overrides.items() if value is not None}
    tree = _evaluation_config(target, task, config or [], set_ or [])
    quiet()
    from evoalign.training import resolve as targets

    result = targets.evaluate(target, config=tree, split=chosen, overrides=overrides)
    _show(result.measures)
    if output is not None:
        import dataclasses
        import json

        from evoalign.rundir.files import write_text

        output.parent.mkdir(parents=True, exist_ok=True)
        write_text(output, json.dumps(dataclasses.asdict(result), indent=2) + "\n")


def _evaluation_config(target: str, task: str | None, files: list[Path], sets: list[str]) -> Any:
    """None where a run's own config is used as it is."""
    from evoalign.config import from_dict, load, parse_overrides

    own = Path(target) / "config.yaml"
    is_run = own.is_file() and _is_run(own.parent)
    if is_run and not (files or sets or task):
        return None
    extra = [f"task.name={task}"] if task else []
    if is_run:
        ours = load([own, *files], sets, needs_es=False)
        if task is not None and task != ours.task.name:  # the run's data files are those of another task
            ours = from_dict({**ours.model_dump(), "task": {"name": task}}, needs_es=False)
        if own.resolve() not in [file.resolve() for file in files]:
            _refuse_code_of_run(own, ours, files, [*sets, *extra])
        return ours
    if files:
        return load(files, [*sets, *extra], needs_es=False)
    return from_dict(parse_overrides({}, [*sets, *extra]), needs_es=False) if task else None


def _is_run(path: Path) -> bool:
    quiet()
    from evoalign.rundir.method import method_of

    return method_of(path) is not None


def _refuse_code_of_run(own: Path, config: Config, files: list[Path], sets: list[str]) -> None:
    """Raise ConfigError where the run alone names code: a downloaded run may not say what is imported."""
    from evoalign.config import code_of, read
    from evoalign.errors import ConfigError

    asked: dict[str, Any] = read(files, sets)
    task = asked.get("task") or {}
    named = {_name(asked.get("space")), _name(asked.get("engine")), _name(task.get("objective")), task.get("name")}
    named |= {*task.get("rewards", []), *(asked.get("tracking") or {}).get("backends", [])}
    code = [name for name in code_of(config) if name not in named]
    if code:
        raise ConfigError(
            f"{own.parent} names code of its own ({', '.join(code)}), which is not run unasked; "
            f"if you trust it, pass it with --config {own}"
        )


def _name(section: Any) -> Any:
    """Of a section that may be written as its name alone."""
    return section.get("name") if isinstance(section, dict) else section


def _show(measures: dict[str, float]) -> None:
    from rich.table import Table

    table = Table("measure", "mean")
    for name, value in measures.items():
        table.add_row(name, f"{value:.4f}")
    console().print(table)
