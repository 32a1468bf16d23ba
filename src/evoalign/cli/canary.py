# SPDX-License-Identifier: Apache-2.0
"""`evoalign canary`."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evoalign.cli.options import Debug, console, quiet

if TYPE_CHECKING:
    from evoalign.engines.server.examination import Check

COLOURS = {"ok": "green", "FAULT": "bold red", "warning": "yellow", "not checked": "dim"}


class Api(StrEnum):
    """The route by which it is asked."""

    completions = "completions"
    chat = "chat"
    generate = "generate"


def canary(
    url: Annotated[str, typer.Argument(help="Address of a server that runs, such as http://127.0.0.1:8000.")],
    adapter: Annotated[
        list[Path] | None, typer.Option(help="Folder of a PEFT adapter; may be given again. Default: noise.")
    ] = None,
    server: Annotated[str, typer.Option(help="sglang, vllm or auto, which asks the server.")] = "auto",
    key_variable: Annotated[str | None, typer.Option(help="Environment variable that holds the server's key.")] = None,
    ca_file: Annotated[Path | None, typer.Option(help="Certificates to check an https address by.")] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Folder that the server sees, too, for adapters; default: in memory.")
    ] = None,
    base: Annotated[str | None, typer.Option(help="Name of the served model; default: as the server says.")] = None,
    api: Annotated[Api, typer.Option(help="Route by which it is asked; generate is SGLang's own.")] = Api.completions,
    as_model: Annotated[bool, typer.Option("--as-model", help="Send an adapter's name as `model`.")] = False,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be given again. Default: eight.")] = None,
    json_: Annotated[Path | None, typer.Option("--json", help="Also write the report as JSON.")] = None,
    debug: Debug = False,
) -> None:
    """Does a running SGLang or vLLM server apply LoRA adapters? Exit code 1: it does not; 2: it could not be asked."""
    import os

    from evoalign.errors import ConfigError

    key = None if key_variable is None else os.environ.get(key_variable)
    if key_variable is not None and not key:
        raise ConfigError(f"--key-variable: there is no {key_variable} in the environment; set it to the server's key")
    quiet()
    with _no_verdict():
        from evoalign.engines.server.canary import examine

        with _stopped_in_order():
            report = examine(
                url,
                adapters=adapter or [],
                server=server,
                key=key,
                ca_file=None if ca_file is None else str(ca_file),
                folder=folder,
                base=base,
                api=api.value,
                as_model=as_model,
                prompts=prompt or [],
                tell=_show,
            )
        if json_ is not None:
            import json

            from evoalign.rundir.files import make_folder, write_text

            make_folder(json_.parent)
            write_text(json_, json.dumps(report.to_dict(), indent=2) + "\n")
        typer.echo(report.verdict())
    raise typer.Exit(report.code)


def _show(check: Check) -> None:
    """A line, as soon as it is known; what a server said is in it."""
    from rich.text import Text

    from evoalign.errors import plain

    line = Text.assemble((f"{check.status:<12}", COLOURS[check.status]), plain(f"{check.name}: {check.detail}"))
    console().print(line, soft_wrap=True)


@contextmanager
def _no_verdict() -> Generator[None]:
    """Python's own exit code for what nobody foresaw, 1, would say that the server has a fault: it is 2."""
    from evoalign.errors import EvoalignError, cut

    try:
        yield
    except (EvoalignError, typer.Exit):
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {cut(str(error), 600)}"
        raise EvoalignError(
            f"the canary failed, which says nothing of the server; --debug shows where ({what})"
        ) from error


@contextmanager
def _stopped_in_order() -> Generator[None]:
    """A stop by Ctrl-C or SIGTERM unloads what was loaded, and is no verdict: exit code 130 or 143."""
    import signal

    def stop(number: int, _: object) -> None:
        raise typer.Exit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
