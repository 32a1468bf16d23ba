# SPDX-License-Identifier: Apache-2.0
"""The command line. Everything heavy is imported by the command that needs it, so that --help is instant."""

from __future__ import annotations

import sys
import traceback
from typing import Annotated

import typer

from evoalign import analysis
from evoalign.cli.analyze import analyze
from evoalign.cli.canary import canary
from evoalign.cli.data import countdown
from evoalign.cli.doctor import doctor
from evoalign.cli.evaluate import evaluate
from evoalign.cli.export import export
from evoalign.cli.grpo import grpo
from evoalign.cli.init import init
from evoalign.cli.journal import show_journal
from evoalign.cli.options import say
from evoalign.cli.placebo import placebo
from evoalign.cli.probe import probe
from evoalign.cli.replay import replay
from evoalign.cli.sweep import sweep
from evoalign.cli.train import train
from evoalign.errors import EvoalignError, MachineError, StoppedError, cut

OTHER_MACHINE = 3
"""Exit code where a journal's weights come out otherwise on this machine, as it could not promise they would not."""

app = typer.Typer(
    help="Evolution Strategies fine-tuning of language models: only inference, any Python reward.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Make task data.", no_args_is_help=True)
app.add_typer(data_app, name="data")
for command in (sweep, train, grpo, replay, placebo, analyze):
    app.command()(command)
for name, found in analysis.shipped().items():
    if found.command is not None:
        app.command(name)(found.command)
app.command("journal")(show_journal)
for command in (export, doctor, canary, probe):
    app.command()(command)
app.command("eval")(evaluate)
app.command()(init)
data_app.command("countdown")(countdown)


def _version(wanted: bool) -> None:
    if wanted:
        from evoalign.version import __version__

        typer.echo(f"evoalign {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")]
    = False,
) -> None:  # fmt: skip
    pass


def main() -> None:
    """Run a command; an error of ours is one line and exit code 2."""
    try:
        app()
    except StoppedError as stopped:  # after a whole generation, with the exit code that shells give a signal
        say(stopped)
        sys.exit(128 + stopped.signal)
    except MachineError as error:  # nothing is damaged, and nothing is claimed
        say(f"error: {error}")
        sys.exit(OTHER_MACHINE)
    except (EvoalignError, OSError) as error:  # the latter of a disk that is full, a folder that may not be written
        if "--debug" in sys.argv:
            traceback.print_exc()
        say(f"error: {error if isinstance(error, EvoalignError) else cut(str(error), 600)}")
        sys.exit(2)
