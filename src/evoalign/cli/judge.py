# SPDX-License-Identifier: Apache-2.0
"""`evoalign judge`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evoalign.cli.options import Debug, check_folder, console, quiet, say

if TYPE_CHECKING:
    from evoalign.analysis.judge.answers import Asked
    from evoalign.analysis.judge.base import Judge
    from evoalign.analysis.judge.judgments import Judgment
    from evoalign.analysis.judge.ratings import Settings
    from evoalign.analysis.judge.transcript import Transcript

TRANSCRIPT = "judgments.jsonl"
"""Of the folder that --to names."""


class Method(StrEnum):
    """How judgments become ratings."""

    bradley_terry = "bradley-terry"
    elo = "elo"


class Unparsed(StrEnum):
    """What becomes of judgments without scores."""

    leave_out = "leave-out"
    tie = "tie"


class Dimension(StrEnum):
    """What is judged."""

    helpfulness = "helpfulness"
    harmlessness = "harmlessness"


def judge(
    targets: Annotated[
        list[str] | None,
        typer.Argument(help="Two models or more, by their answers: PATH or NAME=PATH, a finished run or a file."),
    ] = None,
    judge_model: Annotated[
        str | None, typer.Option(help="Model that judges: its name at --endpoint; without that, its folder.")
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="OpenAI-compatible address, as http://127.0.0.1:8000/v1.")
    ] = None,
    key_env: Annotated[str | None, typer.Option(help="Environment variable that holds the endpoint's key.")] = None,
    to: Annotated[
        Path | None, typer.Option(help=f"Folder for {TRANSCRIPT}, ratings.json and the figure; it may be gone on with.")
    ] = None,
    dimension: Annotated[list[Dimension] | None, typer.Option(help="May be given again; default: both.")] = None,
    questions: Annotated[int | None, typer.Option(min=1, help="The first so many prompts; default: all.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what it would cost, and stop.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Ask those without scores once more.")] = False,
    concurrency: Annotated[int, typer.Option(min=1, help="Endpoint: questions under way at once.")] = 8,
    retries: Annotated[int, typer.Option(min=0, help="Endpoint: further attempts for one question.")] = 4,
    timeout: Annotated[float, typer.Option(min=0.001, help="Endpoint: seconds for one reply.")] = 120.0,
    max_tokens: Annotated[int, typer.Option(min=8, help="Of one reply.")] = 512,
    from_: Annotated[Path | None, typer.Option("--from", help="Rate the judgments of this file; ask no judge.")] = None,
    ratings: Annotated[Method, typer.Option(help="bradley-terry, with ties, or elo.")] = Method.bradley_terry,
    anchor: Annotated[str | None, typer.Option(help="The model at 1000; default: the weakest.")] = None,
    unparsed: Annotated[Unparsed, typer.Option(help="Judgments without scores: leave-out, or tie.")] = (
        Unparsed.leave_out
    ),
    prior: Annotated[
        float, typer.Option(min=0, help="Bradley-Terry: so many judgments more between each two, half won by either.")
    ] = 0.0,
    draws: Annotated[int, typer.Option(min=100, help="Bradley-Terry: bootstrap draws of the questions.")] = 2000,
    shuffles: Annotated[int, typer.Option(min=1, help="Elo: random orders.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Of the bootstrap, and of the orders.")] = 0,
    debug: Debug = False,
) -> None:
    """Let a model judge which of two answers is better, and rate models by that, with intervals and the judge's faults.

    Each pair of answers is judged in both orders. A judgment that cannot be read is left out and counted. The same
    command goes on where it was stopped.
    """
    from evoalign.analysis.judge.judgments import read
    from evoalign.analysis.judge.ratings import Settings
    from evoalign.errors import ConfigError

    check_folder(to)
    settings = Settings(ratings.value, anchor, unparsed.value, prior, draws, shuffles, seed)
    if from_ is not None:
        if targets or judge_model or endpoint:
            raise ConfigError("--from rates judgments that are there; leave out the models and the judge, or --from")
        _show(_of_dimensions(read(from_), from_, dimension), settings, to)
        return
    if judge_model is None:
        raise ConfigError("no judge; give --judge-model FOLDER, or --endpoint URL with --judge-model NAME")
    if to is None and not dry_run:
        raise ConfigError("give --to FOLDER: what the judge says is kept there, and the same command goes on with it")
    from evoalign.analysis.judge.asking import check_any, cost_of, same_as_scorer, unanswered
    from evoalign.analysis.judge.transcript import Transcript, planned

    found = _answers(targets or [], questions, anchor)
    plan = planned(found, judge_model, list(dict.fromkeys(one.value for one in dimension or Dimension)))
    transcript = None if to is None else Transcript(to / TRANSCRIPT, plan)
    if transcript is not None and again:
        transcript.forget_unparsed()
    left = list(plan.items) if transcript is None else transcript.left()
    for line in same_as_scorer(judge_model, found.models):
        say(f"warning: {line}")
    typer.echo(f"{judge_model} judges {_names(found)} on {len(found.prompts):,} prompts, each pair in both orders")
    typer.echo(str(cost_of(left, len(plan.items) - len(left), max_tokens)))
    asked = _judge(
        judge_model, endpoint, key_env, max_tokens, timeout, retries, concurrency, load=bool(left) and not dry_run
    )
    if dry_run or transcript is None:
        if endpoint is None and left:
            _check_folder(judge_model)
        return
    if asked is not None and left:
        _ask(asked, transcript)
    _show(transcript.judgments, settings, to)
    check_any(transcript)
    if (silent := unanswered(transcript)) is not None:
        say(f"warning: {silent}; with --again the same command asks them once more")


def _of_dimensions(judgments: list[Judgment], file: Path, wanted: list[Dimension] | None) -> list[Judgment]:
    """Those of the dimensions that --dimension names; all without it. Raises DataError where one has no judgment."""
    from evoalign.errors import DataError, plain

    if not wanted:
        return judgments
    there = dict.fromkeys(one.dimension for one in judgments)
    if missing := [one.value for one in wanted if one.value not in there]:
        has = plain(", ".join(there))
        raise DataError(f"--dimension: no judgments of {' and '.join(missing)} in {file}; it has {has}")
    return [one for one in judgments if one.dimension in [dimension.value for dimension in wanted]]


def _answers(targets: list[str], questions: int | None, anchor: str | None) -> Asked:
    from evoalign.analysis.judge.answers import asked, read
    from evoalign.errors import ConfigError

    if not targets:
        raise ConfigError("nothing to judge; give two or more models' answers, or --from JUDGMENTS.jsonl to rate")
    found = asked([read(target) for target in targets], questions)
    if anchor is not None and anchor not in [model.name for model in found.models]:
        raise ConfigError(f"--anchor {anchor}: the models are {_names(found)}; name one of these")
    for model in found.models:
        alone, further = found.alone[model.name], model.further
        left = [f"{alone:,} prompts that not all answered"] if alone else []
        left += [f"{further:,} further answers to the same prompts"] if further else []
        if left:
            say(f"{model.name}: left out {' and '.join(left)}")
    return found


def _names(found: Asked) -> str:
    return ", ".join(model.name for model in found.models)


def _judge(
    model: str,
    url: str | None,
    key_env: str | None,
    max_tokens: int,
    timeout: float,
    retries: int,
    concurrency: int,
    *,
    load: bool,
) -> Judge | None:
    """None for a folder that is not to be loaded; an address and its key are looked at in any case."""
    import os

    from evoalign.errors import ConfigError

    if url is None:
        if key_env is not None:
            raise ConfigError("--key-env is for --endpoint; a model's folder needs no key")
        if not load:
            return None
        quiet()
        from evoalign.analysis.judge.local import Local

        return Local(model, max_tokens=max_tokens)
    from evoalign.analysis.judge.endpoint import Endpoint

    key = None if key_env is None else os.environ.get(key_env)
    if key_env is not None and not key:
        raise ConfigError(f"--key-env: there is no {key_env} in the environment; set it to the endpoint's key")
    return Endpoint(url, model, key, max_tokens=max_tokens, timeout=timeout, retries=retries, concurrency=concurrency)


def _check_folder(model: str) -> None:
    quiet()
    from evoalign.analysis.judge.local import check

    check(model)


def _ask(judge_: Judge, transcript: Transcript) -> None:
    from rich.console import Console

    from evoalign.analysis.judge.asking import ask
    from evoalign.report.progress import Bar
    from evoalign.report.watching import phase

    with Bar("judging", Console(stderr=True)), phase("judgments", len(transcript.left())) as work:

        def told() -> None:
            work.done += 1

        try:
            ask(judge_, transcript, told)
        except KeyboardInterrupt:
            say(f"stopped; what was judged is in {transcript.path}, and the same command goes on")
            raise typer.Exit(130) from None


def _show(judgments: list[Judgment], settings: Settings, to: Path | None) -> None:
    import json

    from evoalign.analysis.judge.figure import draw, table
    from evoalign.analysis.judge.ratings import rate
    from evoalign.analysis.judge.words import sentences
    from evoalign.report.tables import visible
    from evoalign.report.terminal import print_line
    from evoalign.rundir.files import make_folder, write_text

    found = rate(judgments, settings)
    told = sentences(found)
    screen = console()
    screen.print(table(found))
    for line in told:
        print_line(screen, visible(line))
    if to is not None:
        make_folder(to)
        drawn = draw(found, to)
        tree = {**found.tree(), "sentences": told, "figures": [path.name for path in drawn]}
        write_text(to / "ratings.json", json.dumps(tree, indent=2, allow_nan=False) + "\n")
        say(f"wrote ratings.json, {', '.join(path.name for path in drawn)} into {to}")
