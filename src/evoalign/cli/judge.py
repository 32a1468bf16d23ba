# SPDX-License-Identifier: Apache-2.0
"""`evoalign judge ask` and `evoalign judge rate`."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from evoalign.cli.options import Debug, check_folder, console, quiet, say

if TYPE_CHECKING:
    from evoalign.analysis.judge.answers import SharedPrompts
    from evoalign.analysis.judge.asking import Transcript
    from evoalign.analysis.judge.judges import Judge
    from evoalign.analysis.judge.judgments import Judgment
    from evoalign.analysis.judge.ratings import Settings

TRANSCRIPT = "judgments.jsonl"
"""File name in the folder of --to."""


class Dimension(StrEnum):
    """A rubric: typer takes no list of Literal."""

    helpfulness = "helpfulness"
    harmlessness = "harmlessness"


Dimensions = Annotated[list[Dimension] | None, typer.Option(help="May be repeated; default: all.")]


def ask(
    targets: Annotated[
        list[str],
        typer.Argument(help="Answers of two models or more, as PATH or NAME=PATH: a finished run or a file."),
    ],
    judge_model: Annotated[str, typer.Option(help="The judge: a model name at --endpoint, or a local model folder.")],
    endpoint: Annotated[str | None, typer.Option(help="OpenAI-compatible URL, as http://127.0.0.1:8000/v1.")] = None,
    key_env: Annotated[str | None, typer.Option(help="Environment variable that holds the endpoint's key.")] = None,
    to: Annotated[
        Path | None,
        typer.Option(help=f"Folder for {TRANSCRIPT}, ratings.json and the figure; an existing one is resumed."),
    ] = None,
    dimension: Dimensions = None,
    questions: Annotated[int | None, typer.Option(min=1, help="Use the first N prompts; default: all.")] = None,
    orders: Annotated[
        Literal["both", "random"], typer.Option(help="both: two requests per pair; random: one, at half the cost.")
    ] = "both",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the number of requests and tokens, and stop.")
    ] = False,
    again: Annotated[bool, typer.Option("--again", help="Request judgments without scores again.")] = False,
    concurrency: Annotated[int, typer.Option(min=1, help="Endpoint: parallel requests.")] = 8,
    retries: Annotated[int, typer.Option(min=0, help="Endpoint: retries per request.")] = 4,
    timeout: Annotated[float, typer.Option(min=0.001, help="Endpoint: seconds per request.")] = 120.0,
    max_tokens: Annotated[int, typer.Option(min=8, help="Maximum tokens per reply.")] = 512,
    debug: Debug = False,
) -> None:
    """Let a judge model compare answers in pairs, and rate the models.

    Each pair of answers is judged in both orders, or in a random one. Judgments that cannot be parsed are counted and
    left out. Rerun the command to resume it; use `evoalign judge rate` for ratings with other settings.
    """
    from evoalign.analysis.judge.asking import RUBRICS, Transcript, check_scored, cost, make_plan, scorer_warnings
    from evoalign.analysis.judge.ratings import Settings
    from evoalign.errors import ConfigError

    check_folder(to)
    if to is None and not dry_run:
        raise ConfigError("no folder given for the judgments; set --to FOLDER")
    shared = _shared_prompts(targets, questions)
    one_order = orders == "random"
    plan = make_plan(shared, judge_model, list(dict.fromkeys(map(str, dimension or RUBRICS))), one_order=one_order)
    transcript = None if to is None else Transcript(to / TRANSCRIPT, plan)
    if transcript is not None and again:
        transcript.drop_unscored()
    remaining = list(plan.comparisons) if transcript is None else transcript.remaining()
    for line in scorer_warnings(judge_model, shared.models):
        say(f"warning: {line}")
    names = ", ".join(plan.models)
    order = "a random order" if one_order else "both orders"
    typer.echo(f"{judge_model} judges {names} on {len(shared.prompts):,} prompts, each pair in {order}")
    typer.echo(cost(remaining, len(plan.comparisons) - len(remaining), max_tokens))
    limits: dict[str, Any] = {"timeout": timeout, "retries": retries, "concurrency": concurrency}
    judge = _judge(judge_model, endpoint, key_env, max_tokens, limits, bool(remaining), dry_run)
    if dry_run or transcript is None:
        return
    if judge is not None and remaining:
        _ask(judge, transcript)
    _rate(transcript.judgments, Settings(), to)
    if (warning := check_scored(transcript)) is not None:
        say(f"warning: {warning}")


def rate(
    file: Annotated[Path, typer.Argument(metavar="JUDGMENTS", help=f"A file such as judged/{TRANSCRIPT}.")],
    to: Annotated[Path | None, typer.Option(help="Folder for ratings.json and the figure.")] = None,
    dimension: Dimensions = None,
    anchor: Annotated[str | None, typer.Option(help="The model rated 1000; default: the weakest.")] = None,
    unparsed: Annotated[
        Literal["leave-out", "tie"], typer.Option(help="Judgments without scores: leave-out, or tie.")
    ] = "leave-out",
    prior: Annotated[float, typer.Option(min=0, help="Extra judgments per pair of models, half won by either.")] = 0.0,
    draws: Annotated[int, typer.Option(min=100, help="Bootstrap draws of the questions.")] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the bootstrap.")] = 0,
    ties: Annotated[
        Literal["davidson", "half"], typer.Option(help="davidson: a parameter for ties; half: half a win for either.")
    ] = "davidson",
    elo: Annotated[int | None, typer.Option(help="Also Elo ratings, in an order shuffled by this seed.")] = None,
    ratings: Annotated[str | None, typer.Option(hidden=True)] = None,
    debug: Debug = False,
) -> None:
    """Rate models from a file of judgments: Bradley-Terry with ties, with intervals and the judge's bias."""
    from evoalign.analysis.judge.judgments import read
    from evoalign.analysis.judge.ratings import Settings
    from evoalign.errors import ConfigError, DataError, plain

    check_folder(to)
    if ratings not in (None, "bradley-terry"):
        raise ConfigError(f"--ratings {ratings} was removed: leave it out, and set --prior 1 for finite ratings")
    judgments = read(file)
    if dimension:
        known = dict.fromkeys(one.dimension for one in judgments)
        if missing := [name for name in dimension if name not in known]:
            has = plain(", ".join(known))
            raise DataError(f"--dimension: no judgments of {' and '.join(missing)} in {file}; it has {has}")
        judgments = [one for one in judgments if one.dimension in dimension]
    _rate(judgments, Settings(anchor, unparsed, prior, draws, seed, ties, elo), to)


def _shared_prompts(targets: list[str], questions: int | None) -> SharedPrompts:
    from evoalign.analysis.judge.answers import read, share

    shared = share([read(target) for target in targets], questions)
    for model in shared.models:
        alone, further = shared.alone[model.name], model.further
        left = [f"{alone:,} prompts that not all models answered"] if alone else []
        left += [f"{further:,} further answers to the same prompts"] if further else []
        if left:
            say(f"{model.name}: left out {' and '.join(left)}")
    return shared


def _judge(
    model: str,
    endpoint: str | None,
    key_env: str | None,
    max_tokens: int,
    limits: dict[str, Any],
    is_needed: bool,
    dry_run: bool,
) -> Judge | None:
    """Return the judge after checking its settings; None for a local model that is not needed, or in a dry run."""
    from evoalign.errors import ConfigError

    if endpoint is not None:
        from evoalign.analysis.judge.judges import Endpoint

        key = None if key_env is None else os.environ.get(key_env)
        if key_env is not None and not key:
            raise ConfigError(f"--key-env: the environment variable {key_env} is not set; set it to the endpoint's key")
        return Endpoint(endpoint, model, key, max_tokens=max_tokens, **limits)
    if key_env is not None:
        raise ConfigError("--key-env is used with --endpoint only; a local model needs no key")
    if not is_needed:
        return None
    quiet()
    from evoalign.analysis.judge import local

    if dry_run:
        local.check(model)
        return None
    return local.Local(model, max_tokens=max_tokens)


def _ask(judge: Judge, transcript: Transcript) -> None:
    from rich.console import Console

    from evoalign.analysis.judge.asking import ask as request
    from evoalign.report.progress import Bar
    from evoalign.report.watching import phase

    with Bar("judging", Console(stderr=True)), phase("judgments", len(transcript.remaining())) as work:

        def advance() -> None:
            work.done += 1

        try:
            request(judge, transcript, advance)
        except KeyboardInterrupt:
            say(f"interrupted; judgments so far are in {transcript.path}; rerun the command to resume")
            raise typer.Exit(130) from None


def _rate(judgments: list[Judgment], settings: Settings, to: Path | None) -> None:
    from evoalign.analysis.judge import report
    from evoalign.analysis.judge.ratings import rate
    from evoalign.report.tables import tell
    from evoalign.rundir.files import make_folder, write_json

    found = rate(judgments, settings)
    sentences, screen = report.sentences(found), console()
    screen.print(report.table(found))
    for line in sentences:
        tell(screen, line)
    if to is not None:
        make_folder(to)
        drawn = report.draw(found, to)
        tree = {**found.tree(), "sentences": sentences, "figures": [path.name for path in drawn]}
        write_json(to / "ratings.json", tree)
        say(f"wrote ratings.json, {', '.join(path.name for path in drawn)} to {to}")
