# SPDX-License-Identifier: Apache-2.0
"""`evoalign compare`, also available as an analysis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from evoalign.analysis.base import Analysis, Finding, parsed_names
from evoalign.report.terminal import Debug, console, quiet

if TYPE_CHECKING:
    from rich.console import Console

    from evoalign.analysis.compare.comparison import Comparison
    from evoalign.analysis.compare.runs import Matching
    from evoalign.config import Config


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories of ES and GRPO, or folders with runs.")],
    match: Annotated[
        str | None, typer.Option(help="The budget to match: wall, completions, tokens or flops; default: each.")
    ] = None,
    measure: Annotated[
        str | None,
        typer.Option(help="Measure of the test split to compare by; default: the training objective."),
    ] = None,
    name: Annotated[
        list[str] | None, typer.Option(metavar="LABEL=GLOB", help="Label of the group whose runs' paths match GLOB.")
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(help="File with budget, measure, groups, pairs to decide on, and level."),
    ] = None,
    to: Annotated[
        Path | None, typer.Option(help="Also write comparison.md, comparison.json and figures to this folder.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Compare runs at equal budgets, with tests over their seeds."""
    from evoalign.errors import ConfigError

    names = parsed_names(name or [])
    if to is not None and to.exists() and not to.is_dir():
        raise ConfigError(f"--to {to} is a file; give a folder")
    quiet()
    found = Command().run([str(run) for run in runs], Settings(match, measure, names, plan))
    found.show(console())
    if to is not None:
        written = found.write(to, Command.name)
        typer.echo(f"wrote {', '.join(path.name for path in written)} into {to}")


@dataclass(frozen=True)
class Settings:
    """The options of `evoalign compare`. `match`: the budget, wall, completions, tokens or flops; None: each.

    `measure`: of the test split; None: the training objective. `names`: label of a group to a glob pattern of its runs'
    paths. `plan`: a file that sets beforehand what is compared and decided.
    """

    match: str | None = None
    measure: str | None = None
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    plan: Path | None = None


@dataclass(frozen=True)
class Compared(Finding):
    """A comparison, printed as tables and written as a page."""

    comparison: Comparison

    def show(self, console: Console) -> None:
        from evoalign.analysis.compare import pages

        pages.show(self.comparison, console)

    def write(self, folder: Path, name: str) -> list[Path]:
        """Write comparison.md, comparison.json and the figures."""
        from evoalign.analysis.compare import pages

        return pages.write(self.comparison, folder)


class Command(Analysis[Settings]):
    """ES and GRPO runs at equal budgets. Reads files, runs nothing."""

    name = "compare"
    help = "Compare runs at equal budgets, with tests over their seeds."
    settings = Settings

    def run(self, targets: Sequence[str], settings: Settings, config: Config | None = None) -> Compared:
        """Compare runs; `config` is not used. Raises ConfigError if they cannot be compared."""
        from evoalign.analysis.compare import comparison, pages

        match = cast("Matching | None", settings.match)
        found = comparison.compare(targets, match, measure=settings.measure, names=settings.names, plan=settings.plan)
        tree = pages.as_tree(found)
        return Compared(tree, tree["summary"], found)
