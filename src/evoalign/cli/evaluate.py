# SPDX-License-Identifier: Apache-2.0
"""`evoalign eval`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from evoalign.cli.options import Debug, More, Sets, console, integers, quiet, say

if TYPE_CHECKING:
    from collections.abc import Mapping

    from evoalign.analysis.evaluations import Evaluations, TargetEvaluation
    from evoalign.statistics import Estimate


def evaluate(
    target: Annotated[
        list[str], typer.Argument(help="Run directories, folders with runs, model folders, PEFT adapters or hub names.")
    ],
    task: Annotated[str | None, typer.Option(help="Task; default for a run: its own.")] = None,
    config: More = None,
    set_: Sets = None,
    split: Annotated[str, typer.Option(help="test, validation or train.")] = "test",
    samples: Annotated[int | None, typer.Option(help="Completions of each prompt and seed.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Comma-separated, such as 0,1,2,3.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Also write measures and completions as JSON, with a task's points next to it.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Evaluate runs, or any models, on a task, with means over training seeds. Exit code 1 if one of several fails."""
    from evoalign.errors import ConfigError

    if split not in ("test", "validation", "train"):
        raise ConfigError(f"--split {split}: use test, validation or train")
    chosen: Literal["test", "validation", "train"] = split
    overrides = {"samples": samples, "temperature": temperature, "seeds": integers(seeds)}
    overrides = {name: value for name, value in overrides.items() if value is not None}
    quiet()
    from rich.console import Console

    from evoalign.analysis import evaluations
    from evoalign.report.progress import Bar
    from evoalign.rundir.files import refuse_links_above

    if output is not None:
        refuse_links_above(output)

    found = evaluations.expand(target)
    told = _show_row if len(found) > 1 else _show

    def judge(one: str) -> evaluations.TargetEvaluation:
        tree = _evaluation_config(one, task, config or [], set_ or [])
        with Bar(f"evaluating {one}", Console(stderr=True)):
            return evaluations.evaluate_one(one, tree, chosen, overrides)

    together = evaluations.evaluate_each(found, judge, told)
    for mean in together.means:
        seeds = ", ".join(str(run.config.seed) for run in mean.runs)
        _say(f"{mean.label}: {len(mean.runs)} runs, trained with seeds {seeds}; each {mean.runs[0].decoding}")
        _print("mean over seeds", f"over {mean.over}", mean.measures)
    for one, why in together.failed.items():
        say(f"{one} could not be evaluated: {why}")
    if output is not None:
        _write(output, together, several=len(found) > 1)
    if together.failed:
        raise typer.Exit(1)


def _evaluation_config(target: str, task: str | None, files: list[Path], sets: list[str]) -> Any:
    """Return the config to evaluate with; None: the run's own config."""
    from evoalign.config import from_dict, load, parse_overrides
    from evoalign.config.outside import EVALUATION_SKIPS
    from evoalign.errors import ConfigError
    from evoalign.rundir.method import method_of
    from evoalign.rundir.own import refuse_own

    own = Path(target) / "config.yaml"
    is_run = own.is_file() and method_of(own.parent) is not None
    if is_run and not (files or sets or task):
        return None
    extra = [f"task.name={task}"] if task else []
    if is_run:
        if any(text.startswith("seed=") for text in sets):
            raise ConfigError(
                f"--set {next(text for text in sets if text.startswith('seed='))}: a run keeps its training seed, "
                "which determines its splits; --seeds sets the sampling seeds"
            )
        ours = load([own, *files], sets)
        if task is not None and task != ours.task.name:  # the run's data files belong to another task
            ours = from_dict({**ours.model_dump(), "task": {"name": task}})
        refuse_own(own.parent, ours, files, [*sets, *extra], EVALUATION_SKIPS)
        return ours
    if files:
        return load(files, [*sets, *extra])
    return from_dict(parse_overrides({}, [*sets, *extra])) if task else None


def _show(found: TargetEvaluation) -> None:
    """Print one target's measures with their intervals over examples."""
    _heading(found)
    _print("mean", "over new examples", found.intervals)


def _show_row(found: TargetEvaluation) -> None:
    """Print the measures of one of several targets, as soon as it is done."""
    _heading(found)
    _say("  " + ", ".join(f"{name} {value:.4f}" for name, value in found.evaluation.measures.items()))


def _heading(found: TargetEvaluation) -> None:
    made = f" (seed {found.config.seed}, {found.generation} done)" if found.generation is not None else ""
    what = f"model {found.model}, task {found.config.task.name}, {found.split} split, {found.decoding}"
    _say(f"{found.target}{made}: {what}")


def _print(mean: str, over: str, measures: Mapping[str, Estimate]) -> None:
    from rich.table import Table

    table = Table("measure", mean, f"95 % interval {over}")
    for name, found in measures.items():
        between = f"{found.low:.4f} to {found.high:.4f}" if found.low is not None else found.why
        table.add_row(name, f"{found.mean:.4f}", between)
    console().print(table)


def _say(text: str) -> None:
    from evoalign.report.tables import visible

    console().print(visible(text), markup=False, highlight=False, soft_wrap=True)


def _write(output: Path, found: Evaluations, *, several: bool) -> None:
    """Write the file, and NAME_points.jsonl next to it (NAME_points_0.jsonl, ... for several targets).

    Never points.jsonl, which would overwrite a run's own file.
    """
    import json

    from evoalign.rundir.files import make_folder, write_rows, write_text

    make_folder(output.parent)
    tree = found.tree() if several else found.judged[0].tree()
    write_text(output, json.dumps(tree, indent=2) + "\n")
    for place, one in enumerate(found.judged):
        name = f"{output.stem}_points_{place}" if several else f"{output.stem}_points"
        write_rows(output.with_name(f"{name}.jsonl"), one.evaluation.points)
