# SPDX-License-Identifier: Apache-2.0
"""The command line. Everything heavy is imported by the command that needs it, so that --help is instant."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Annotated

import typer

from evoalign.analysis.compare.command import compare
from evoalign.cli.analyze import analyze
from evoalign.cli.canary import canary
from evoalign.cli.data import countdown
from evoalign.cli.doctor import doctor
from evoalign.cli.evaluate import evaluate
from evoalign.cli.export import export
from evoalign.cli.gateway import gateway
from evoalign.cli.init import demo, init, schema
from evoalign.cli.judge import ask, rate
from evoalign.cli.options import say
from evoalign.cli.placebo import placebo
from evoalign.cli.probe import probe
from evoalign.cli.replay import replay, show_journal
from evoalign.cli.report import report
from evoalign.cli.score import serve
from evoalign.cli.select import select
from evoalign.cli.sweep import sweep
from evoalign.cli.train import grpo, train
from evoalign.errors import EvoalignError, MachineError, StoppedError, cut

OTHER_MACHINE = 3
"""Exit code where a journal's weights come out otherwise on this machine, as it could not promise they would not."""

START, RUN, RUNS, MORE = "To begin", "A run and its results", "Several runs", "More"
"""Headings of `--help`, in the order in which people need what is below them."""

app = typer.Typer(
    help="Evolution Strategies fine-tuning of language models: only inference, any Python reward.",
    epilog="First: evoalign demo. Then: evoalign init my_task, and what it says. evoalign COMMAND --help has examples.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Make task data.", no_args_is_help=True)
judge_app = typer.Typer(help="Compare answers in pairs with a judge model, and rate models.", no_args_is_help=True)
score_app = typer.Typer(help="Reward and cost models as a service.", no_args_is_help=True)


def _register() -> None:
    """Each command with an example, in the order of `--help`."""
    commands: list[tuple[str, str, Callable[..., None], str]] = [
        (START, "demo", demo, "evoalign demo"),
        (START, "init", init, "evoalign init my_task"),
        (START, "doctor", doctor, "evoalign doctor config.yaml"),
        (START, "probe", probe, "evoalign probe config.yaml --write wide.yaml"),
        (RUN, "train", train, "evoalign train config.yaml --set es.sigma=0.002 --dry-run"),
        (RUN, "eval", evaluate, "evoalign eval runs/quickstart --samples 20 --temperature 0.7"),
        (RUN, "report", report, "evoalign report runs/my_task --serve"),
        (RUN, "placebo", placebo, "evoalign placebo runs/quickstart"),
        (RUN, "select", select, "evoalign select runs/my_task --top 50 --vote"),
        (RUN, "export", export, "evoalign export runs/my_task --to adapter"),
        (RUN, "journal", show_journal, "evoalign journal runs/my_task"),
        (RUN, "replay", replay, "evoalign replay runs/my_task --generation 20 --to old"),
        (RUN, "gateway", gateway, "evoalign gateway runs/my_task --generation 20 --member 3"),
        (RUNS, "grpo", grpo, "evoalign grpo config.yaml"),
        (RUNS, "compare", compare, "evoalign compare runs/a runs/b"),
        (RUNS, "sweep", sweep, "evoalign sweep config.yaml --grid es.sigma=0.01,0.02 --seeds 0,1,2 --jobs 2"),
        (RUNS, "analyze", analyze, "evoalign analyze distance runs/my_task"),
        (MORE, "canary", canary, "evoalign canary http://127.0.0.1:8000"),
        (MORE, "schema", schema, "evoalign schema --to evoalign.schema.json"),
    ]
    for panel, name, command, example in commands:
        app.command(name, rich_help_panel=panel, epilog=f"Example: {example}")(command)
    app.add_typer(judge_app, name="judge", rich_help_panel=RUNS)
    judge_app.command("ask", epilog="Example: evoalign judge ask runs/a runs/b --judge-model ./judge --to judged")(ask)
    judge_app.command("rate", epilog="Example: evoalign judge rate judged/judgments.jsonl --prior 1")(rate)
    app.add_typer(score_app, name="score", rich_help_panel=MORE)
    score_app.command("serve", epilog="Example: evoalign score serve --reward models/reward --cost models/cost")(serve)
    app.add_typer(data_app, name="data", rich_help_panel=MORE)
    data_app.command("countdown", epilog="Example: evoalign data countdown problems.json --count 2200")(countdown)


_register()


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


def _with_notes(error: Exception) -> str:
    return "; ".join([str(error), *getattr(error, "__notes__", ())])


def main() -> None:
    """Run a command; an error of ours is one line and exit code 2."""
    try:
        app()
    except StoppedError as stopped:  # after a whole generation, with the exit code that shells give a signal
        say(_with_notes(stopped))
        sys.exit(128 + stopped.signal)
    except MachineError as error:  # nothing is damaged, and nothing is claimed
        say(f"error: {_with_notes(error)}")
        sys.exit(OTHER_MACHINE)
    except (EvoalignError, OSError) as error:  # the latter of a disk that is full, a folder that may not be written
        if "--debug" in sys.argv:
            traceback.print_exc()
        say(f"error: {_with_notes(error) if isinstance(error, EvoalignError) else cut(str(error), 600)}")
        sys.exit(2)
