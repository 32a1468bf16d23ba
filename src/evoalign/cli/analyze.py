# SPDX-License-Identifier: Apache-2.0
"""`evoalign analyze`."""

from __future__ import annotations

import textwrap
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evoalign.cli.options import Debug, More, check_folder, console, quiet

if TYPE_CHECKING:
    from evoalign.analysis import Analysis

WIDTH = 100
"""Width of the explanation in characters."""


def analyze(
    name: Annotated[
        str | None, typer.Argument(help="An analysis, or a custom one as package.module:Class or file.py:Class.")
    ] = None,
    targets: Annotated[
        list[str] | None,
        typer.Argument(help="Run directories, folders of runs, saved means of runs, model folders, PEFT adapters."),
    ] = None,
    config: More = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", "-s", metavar="a=b", help="Set a setting of the analysis.")
    ] = None,
    to: Annotated[Path | None, typer.Option(help="Also write the numbers and figures into this folder.")] = None,
    labels: Annotated[
        list[str] | None,
        typer.Option("--name", metavar="LABEL=GLOB", help="Label, in figures, of the target whose path matches GLOB."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Analyse runs and models. Without a name, list the analyses; without targets, list the settings of one."""
    from evoalign import analysis

    if name is None:
        for known, summary in analysis.summaries().items():
            typer.echo(f"{known:12} {summary}")
        return
    chosen = analysis.find(name)
    if not targets:
        _show_settings(chosen)
        return
    from evoalign.analysis.base import LABELS, labels_of, settings_of
    from evoalign.analysis.targets import expanded
    from evoalign.config import load
    from evoalign.errors import ConfigError

    check_folder(to)
    targets = expanded(targets)
    LABELS.set(labels_of(labels or [], targets))
    settings = settings_of(chosen, sets or [])
    quiet()
    from rich.console import Console

    from evoalign.report.progress import Bar
    from evoalign.rundir.directory import older_report
    from evoalign.rundir.files import ANALYSES, make_folder
    from evoalign.setup import as_config

    own = as_config(load(config)) if config else None
    shown = Console(stderr=True)
    with Bar(chosen.name, shown) if shown.is_terminal else nullcontext():
        try:
            finding = chosen.run(targets, settings, own)
        except FileNotFoundError as error:  # of a custom analysis that reads the files of its targets
            raise ConfigError(f"{chosen.name}: there is no file {error.filename}; give finished runs") from error
    finding.show(console())
    if to is not None:
        make_folder(to)
        wrote = ", ".join(path.name for path in finding.write(to, chosen.name))
        typer.echo(f"wrote {wrote} into {to}{older_report(to.parent) if to.name == ANALYSES else ''}")


def _show_settings(chosen: Analysis[Any]) -> None:
    from evoalign.analysis.base import described, explained

    typer.echo(f"{chosen.name}: {chosen.help}")
    for key, value in described(chosen).items():
        shown = f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else value
        typer.echo(f"  --set {key}={shown}")
    for paragraph in explained(chosen):
        typer.echo("\n" + textwrap.fill(paragraph, WIDTH, break_on_hyphens=False))
