# SPDX-License-Identifier: Apache-2.0
"""`evoalign probe`."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evoalign.cli.options import Debug, More, Sets, console, numbers, quiet
from evoalign.cli.resolving import given

if TYPE_CHECKING:
    from evoalign.preflight.advice import ProbeResult
    from evoalign.preflight.probe import Step

NOTHING = 1
"""Exit code if `--write` has neither a recommendation nor a trial to write; the JSON is written."""


def probe(
    config: Annotated[Path, typer.Argument(help="A YAML config.")],
    more: More = None,
    set_: Sets = None,
    sigmas: Annotated[
        str | None, typer.Option(help="Comma-separated, such as 1e-4,1e-3; default: the config's, times 1/16 to 16.")
    ] = None,
    members: Annotated[
        int | None, typer.Option(help="Members at each sigma; default: 32, up to 128 where there are few examples.")
    ] = None,
    examples: Annotated[int, typer.Option(help="Training examples that are the prompts of all members.")] = 64,
    json_: Annotated[Path | None, typer.Option("--json", help="Also write the measurements as JSON.")] = None,
    write: Annotated[
        Path | None,
        typer.Option(
            help="Write the recommendation, or if undecided a trial, to a new YAML file, and the JSON next to it."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the number of completions and end.")] = False,
    debug: Debug = False,
) -> None:
    """Measure before training how wide the noise should be, and recommend sigma and learning rate, or nothing."""
    from evoalign.errors import ConfigError

    resolved, widths = given(config, more or [], set_ or []), numbers(sigmas)
    if write is not None and write.exists():
        raise ConfigError(f"--write {write} exists already; name a new file")
    if write is not None and json_ is None:
        json_ = write.with_suffix(".json")
        if json_ == write or json_.exists():
            raise ConfigError(f"--write {write}: {json_} is for the measurements; name a new .yaml file")
    quiet()
    from evoalign.preflight import probe as measure

    if dry_run:
        typer.echo("\n".join(measure.plan(resolved, sigmas=widths, members=members, examples=examples)))
        return
    try:
        with _progress() as on_step:
            result = measure.probe(
                resolved, sigmas=widths, members=members, examples=examples, tell=typer.echo, on_step=on_step
            )
    except measure.ProbeStoppedError as stopped:
        _show(stopped.result, json_)
        raise
    _show(result, json_)
    if write is not None:
        _write(result, write)


def _show(result: ProbeResult, json_: Path | None) -> None:
    from evoalign.preflight import advice

    shown = console()
    shown.print(advice.texts(result))
    shown.print(advice.table(result))
    typer.echo("\n".join(advice.lines(result)))
    if json_ is not None:
        import json

        from evoalign.rundir.files import make_folder, write_text

        make_folder(json_.parent)
        write_text(json_, json.dumps(result.to_dict(), indent=2) + "\n")


def _write(result: ProbeResult, path: Path) -> None:
    from evoalign.preflight.advice import overlay
    from evoalign.rundir.files import make_folder, write_text

    if result.width is None and result.trial is None:
        typer.echo(f"{path} is not written")
        raise typer.Exit(NOTHING)
    make_folder(path.parent)
    write_text(path, overlay(result))
    typer.echo(f"written: {path}; train with --config {path}")


@contextmanager
def _progress() -> Generator[Callable[[Step], None]]:
    """Show a progress bar on a terminal; yield a function that prints a line per width."""
    from evoalign.report.progress import Bar

    shown = console()

    def show(step: Step) -> None:
        line = f"{step.width:.4g}: {step.changed_share:.0%} changed, fitness {step.fitness:.4g} ({step.start:.4g})"
        shown.print(f"width {step.done}/{step.total}  {line}", markup=False, highlight=False, soft_wrap=True)

    with Bar("probe", shown):
        yield show
