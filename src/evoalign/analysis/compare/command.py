# SPDX-License-Identifier: Apache-2.0
"""`evoalign compare`, and the same as an analysis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evoalign.analysis.base import Analysis, Finding
from evoalign.report.terminal import Debug, console, quiet

if TYPE_CHECKING:
    from rich.console import Console

    from evoalign.analysis.compare.comparison import Comparison
    from evoalign.config import Config


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, of ES and GRPO; a folder stands for all below.")],
    match: Annotated[
        str | None, typer.Option(help="The budget to match: wall, completions, tokens or flops. Without it, each.")
    ] = None,
    measure: Annotated[
        str | None,
        typer.Option(help="The measure of the test split to compare by; default: what all runs were trained for."),
    ] = None,
    name: Annotated[
        list[str] | None, typer.Option(metavar="LABEL=GLOB", help="Call the group whose runs' paths fit GLOB so.")
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(help="A file that says beforehand: budget, measure, groups, the pairs to decide on, the level."),
    ] = None,
    to: Annotated[
        Path | None, typer.Option(help="Also write comparison.md, comparison.json and figures into this folder.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Put runs side by side at equal budgets, with what their seeds allow to say."""
    from evoalign.errors import ConfigError

    names = dict(_label(text) for text in name or [])
    if to is not None and to.exists() and not to.is_dir():
        raise ConfigError(f"--to {to} is a file; give a folder")
    quiet()
    found = Command().run([str(run) for run in runs], Settings(match, measure, names, plan))
    found.show(console())
    if to is not None:
        written = found.write(to, Command.name)
        typer.echo(f"wrote {', '.join(path.name for path in written)} into {to}")


def _label(text: str) -> tuple[str, str]:
    """`LABEL=GLOB`. Raises ConfigError."""
    from evoalign.errors import ConfigError

    label, equals, pattern = text.partition("=")
    if not (label.strip() and equals and pattern):
        raise ConfigError(f"--name {text!r}: expected LABEL=GLOB, such as GRPO='*/grpo_*'")
    return label.strip(), pattern


@dataclass(frozen=True)
class Settings:
    """As the options of `evoalign compare`. `match`: the budget, wall, completions, tokens or flops; None: each.

    `measure` of the test split to compare by; None: what all runs were trained for. `names`: label of a group to the
    pattern of its runs' paths. `plan`: a file that says beforehand what is compared and decided.
    """

    match: str | None = None
    measure: str | None = None
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    plan: Path | None = None


@dataclass(frozen=True)
class Compared(Finding):
    """A comparison, shown as tables and written as a page."""

    comparison: Comparison

    def show(self, console: Console) -> None:
        from evoalign.analysis.compare import pages

        pages.show(self.comparison, console)

    def write(self, folder: Path, name: str) -> list[Path]:
        """comparison.md, comparison.json and the figures."""
        from evoalign.analysis.compare import pages

        return pages.write(self.comparison, folder)


class Command(Analysis[Settings]):
    """Runs of ES and GRPO at equal budgets. Reads files and runs nothing."""

    name = "compare"
    help = "Runs side by side at equal budgets, with what their seeds allow to say."
    settings = Settings

    def run(self, targets: Sequence[str], settings: Settings, config: Config | None = None) -> Compared:
        """Every run has its own config. Raises ConfigError where runs cannot be compared."""
        from evoalign.analysis.compare import comparison, pages
        from evoalign.errors import ConfigError

        match: comparison.Matching | None = next((m for m in comparison.MATCHINGS if m == settings.match), None)
        if match is None and settings.match is not None:
            raise ConfigError(f"--match {settings.match}: use {', '.join(comparison.MATCHINGS)}")
        found = comparison.compare(targets, match, measure=settings.measure, names=settings.names, plan=settings.plan)
        tree = pages.as_tree(found)
        return Compared(tree, tree["summary"], found)
