# SPDX-License-Identifier: Apache-2.0
"""The command line. Everything heavy is imported by the command that needs it, so that --help is instant."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from evoalign.commands.compare import compare
from evoalign.commands.grpo import grpo
from evoalign.commands.options import Debug, More, Sets, console, integers, numbers, quiet, say
from evoalign.commands.resolving import resolved
from evoalign.commands.sweep import sweep
from evoalign.errors import EvoalignError, StoppedError

if TYPE_CHECKING:
    from evoalign.config import Config
    from evoalign.doctor import Finding

app = typer.Typer(
    help="Evolution Strategies fine-tuning of language models: only inference, any Python reward.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Make task data.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.command()(sweep)
app.command()(compare)


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


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="A YAML config; with --resume, also a run directory.")],
    more: More = None,
    set_: Sets = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run there, or begin it.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Move an existing run aside.")] = False,
    evaluate_every: Annotated[
        int | None, typer.Option(min=0, help="Evaluate the mean each so many generations; 0: never.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run, and stop.")] = False,
    debug: Debug = False,
) -> None:
    """Train, and compare the test split before and after."""
    from evoalign.config import to_yaml

    sets = [*(set_ or []), *([f"evaluation.every={evaluate_every}"] if evaluate_every is not None else [])]
    found = resolved("train", config, more or [], sets, resume=resume, overwrite=overwrite)
    quiet()
    from evoalign import training

    if dry_run:
        lines = training.dry_run(found, overwrite=overwrite, resume=resume)
        typer.echo(to_yaml(found) + "\n" + "\n".join(lines))
        return
    training.train(found, overwrite=overwrite, resume=resume)


app.command()(grpo)


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(help="A run directory, or a journal.jsonl by itself.")],
    generation: Annotated[
        int | None, typer.Option("--generation", "-g", min=0, help="After so many generations; default: all.")
    ] = None,
    to: Annotated[Path | None, typer.Option(help="Save the mean in this new folder.")] = None,
    model: Annotated[str | None, typer.Option(help="Where the base model is now.")] = None,
    debug: Debug = False,
) -> None:
    """Rebuild the mean from the base model and the journal alone, and check its hash."""
    quiet()
    from rich.console import Console
    from rich.progress import Progress

    from evoalign.replaying import log_of
    from evoalign.replaying import replay as rebuild

    log, console = log_of(run), Console(stderr=True)
    count = log.sealed if generation is None else generation
    if log.damage is not None and generation is None and log.damage.cut:
        say(f"warning: {log.damage.message}")
    if generation is None and len(log.generations) > log.sealed:
        say(f"warning: the update of generation {log.sealed + 1} was never sealed and is left out")
    with Progress(transient=True, console=console, disable=not console.is_terminal) as bar:
        work = bar.add_task("replaying", total=None)
        found = rebuild(
            run,
            generation=generation,
            to=to,
            model=model,
            progress=lambda done, total: bar.update(work, completed=done, total=total),
        )
    saved = f"; saved in {to}" if to else ""
    typer.echo(f"generation {count}: weights_hash {found}, as the journal has it{saved}")


@app.command("journal")
def show_journal(
    run: Annotated[Path, typer.Argument(help="A run directory, or a journal.jsonl by itself.")],
    debug: Debug = False,
) -> None:
    """Print a run's journal as a table, and whether it is whole."""
    from evoalign.errors import JournalError
    from evoalign.replaying import log_of
    from evoalign.report.log import journal_table

    log = log_of(run)
    journal_table(log, console())
    if log.damage is not None:
        raise JournalError(log.damage.message)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run directory, finished or not.")],
    to: Annotated[Path, typer.Option(help="The new folder.")],
    generation: Annotated[
        int | None, typer.Option("--generation", "-g", min=0, help="After so many generations; default: latest saved.")
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Put the adapter into its base model.")] = False,
    push: Annotated[str | None, typer.Option(metavar="USER/NAME", help="Upload to the Hugging Face hub.")] = None,
    public: Annotated[bool, typer.Option("--public", help="Whom a new repository is for; default: you alone.")] = False,
    shard_size: Annotated[str, typer.Option(help="Largest file of a checkpoint.")] = "5GB",
    model: Annotated[str | None, typer.Option(help="Where the base model is now.")] = None,
    debug: Debug = False,
) -> None:
    """Write a run's mean as PEFT and transformers load it, with a model card."""
    quiet()
    from evoalign.exporting import export as write

    folder = write(
        run, to, generation=generation, merge=merge, push=push, private=not public, shard_size=shard_size, model=model
    )
    typer.echo(f"exported to {folder}" + (f" and to {push}" if push else ""))


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(help="A YAML config; without one, this machine alone.")] = None,
    more: More = None,
    set_: Sets = None,
    debug: Debug = False,
) -> None:
    """Check this machine, and whether a config will train on it. Exit code 1 where something failed."""
    from evoalign.config import load
    from evoalign.errors import ConfigError

    if config is None and (more or set_):
        raise ConfigError("--config and --set change a config: give one first, as in `evoalign doctor config.yaml`")
    quiet()
    from evoalign import doctor as checks

    try:
        found = checks.findings(load([config, *(more or [])], set_ or []) if config is not None else None)
    except ConfigError as error:
        found = [*checks.environment(), checks.refused(error)]
    line, code = checks.verdict(_show_findings(found))
    typer.echo(line)
    raise typer.Exit(code)


@app.command()
def probe(
    config: Annotated[Path, typer.Argument(help="A YAML config.")],
    more: More = None,
    set_: Sets = None,
    sigmas: Annotated[
        str | None, typer.Option(help="Comma-separated, such as 1e-4,1e-3; default: the config's, times 1/16 to 16.")
    ] = None,
    members: Annotated[int, typer.Option(help="Members at each sigma.")] = 32,
    examples: Annotated[int, typer.Option(help="Training examples that all of them answer.")] = 64,
    json_: Annotated[Path | None, typer.Option("--json", help="Also write what was measured as JSON.")] = None,
    debug: Debug = False,
) -> None:
    """Measure before training how wide the noise should be, and recommend sigma and learning rate."""
    from evoalign.config import load

    resolved, widths = load([config, *(more or [])], set_ or []), numbers(sigmas)
    quiet()
    from evoalign import probe as measure

    result = measure.probe(resolved, sigmas=widths, members=members, examples=examples, tell=typer.echo)
    console().print(measure.table(result))
    typer.echo("\n".join(measure.lines(result)))
    if json_ is not None:
        import json

        from evoalign.checkpoint import write_text

        json_.parent.mkdir(parents=True, exist_ok=True)
        write_text(json_, json.dumps(result.to_dict(), indent=2) + "\n")


@app.command("eval")
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
    from evoalign import targets

    result = targets.evaluate(target, config=tree, split=chosen, overrides=overrides)
    _show(result.measures)
    if output is not None:
        import dataclasses
        import json

        from evoalign.checkpoint import write_text

        output.parent.mkdir(parents=True, exist_ok=True)
        write_text(output, json.dumps(dataclasses.asdict(result), indent=2) + "\n")


@app.command()
def init(directory: Annotated[Path, typer.Argument(help="A new or empty folder.")], debug: Debug = False) -> None:
    """Write a starting config, reward.py and prompts.jsonl for a task of your own."""
    from evoalign.scaffold import init as write

    write(directory)
    typer.echo(f"wrote {directory}; next: cd {directory} && evoalign train config.yaml")


@data_app.command("countdown")
def countdown(
    output: Annotated[Path, typer.Argument(help="The JSON file to write.")],
    count: Annotated[int, typer.Option(min=1, help="Problems.")] = 2200,
    numbers: Annotated[str, typer.Option(help="3, 4 or mixed.")] = "mixed",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    debug: Debug = False,
) -> None:
    """Solver-verified Countdown problems in the published form, from the tenth that the tiny model never saw."""
    from evoalign.errors import ConfigError
    from evoalign.tasks.generate import write_countdown

    sizes: dict[str, Any] = {"3": 3, "4": 4, "mixed": "mixed"}
    if numbers not in sizes:
        raise ConfigError(f"--numbers {numbers}: use 3, 4 or mixed")
    if output.exists() and not overwrite:
        raise ConfigError(f"{output} exists; choose another file, or replace it with --overwrite")
    write_countdown(output, count, sizes[numbers], seed)
    typer.echo(f"wrote {count} problems to {output}")


def main() -> None:
    """Run a command; an error of ours is one line and exit code 2."""
    try:
        app()
    except StoppedError as stopped:  # after a whole generation, with the exit code that shells give a signal
        say(stopped)
        sys.exit(128 + stopped.signal)
    except (EvoalignError, OSError) as error:  # the latter of a disk that is full, a folder that may not be written
        if "--debug" in sys.argv:
            traceback.print_exc()
        say(f"error: {error}")
        sys.exit(2)


def _evaluation_config(target: str, task: str | None, files: list[Path], sets: list[str]) -> Any:
    """None where a run's own config is used as it is."""
    from evoalign.config import from_dict, load

    own = Path(target) / "config.yaml"
    is_run = own.is_file() and _is_run(own.parent)
    if is_run and not (files or sets or task):
        return None
    extra = [f"task.name={task}"] if task else []
    if is_run:
        ours = load([own, *files], sets)
        if task is not None and task != ours.task.name:  # the run's data files are those of another task
            ours = from_dict({**ours.model_dump(), "task": {"name": task}})
        if own.resolve() not in [file.resolve() for file in files]:
            _refuse_code_of_run(own, ours, files, [*sets, *extra])
        return ours
    if files:
        return load(files, [*sets, *extra])
    from evoalign.config import parse_overrides

    return from_dict(parse_overrides({"es": {"sigma": 0.001}}, [*sets, *extra])) if task else None


def _is_run(path: Path) -> bool:
    quiet()
    from evoalign.rundir import method_of

    return method_of(path) is not None


def _refuse_code_of_run(own: Path, config: Config, files: list[Path], sets: list[str]) -> None:
    """Raise ConfigError where the run alone names code: a downloaded run may not say what is imported."""
    from evoalign.config import code_of, read
    from evoalign.errors import ConfigError

    asked: dict[str, Any] = read(files, sets)
    space, task = asked.get("space"), asked.get("task") or {}
    named = {space if isinstance(space, str) else (space or {}).get("name"), task.get("name"), *task.get("rewards", [])}
    code = [name for name in code_of(config) if name not in named]
    if code:
        raise ConfigError(
            f"{own.parent} names code of its own ({', '.join(code)}), which is not run unasked; "
            f"if you trust it, pass it with --config {own}"
        )


def _show(measures: dict[str, float]) -> None:
    from rich.table import Table

    table = Table("measure", "mean")
    for name, value in measures.items():
        table.add_row(name, f"{value:.4f}")
    console().print(table)


def _show_findings(found: Iterable[Finding]) -> list[Finding]:
    """Each as soon as it is known: rows of a table on a terminal, plain lines elsewhere."""
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    shown: list[Finding] = []
    console, table = Console(), Table("check", "", "finding")
    colours = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}
    with Live(table, console=console, vertical_overflow="visible") if console.is_terminal else nullcontext():
        for finding in found:
            shown.append(finding)
            text = f"{finding.detail}; {finding.mend}" if finding.mend else finding.detail
            table.add_row(finding.name, Text(finding.status, colours[finding.status]), Text(text))
            if not console.is_terminal:
                typer.echo(f"{finding.status:<8} {finding.name}: {text}")
    return shown


if __name__ == "__main__":
    main()
