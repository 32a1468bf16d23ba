# SPDX-License-Identifier: Apache-2.0
"""`evoalign canary`."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from evoalign.cli.options import Debug, console, quiet

if TYPE_CHECKING:
    from evoalign.preflight.canary import Check

COLOURS = {"ok": "green", "FAULT": "bold red", "warning": "yellow", "not checked": "dim"}


def canary(
    url: Annotated[str, typer.Argument(help="Address of a running server, such as http://127.0.0.1:8000.")],
    adapter: Annotated[
        list[Path] | None, typer.Option(help="Folder of a PEFT adapter; can be repeated. Default: noise.")
    ] = None,
    server: Annotated[str, typer.Option(help="sglang, vllm or auto, which detects it.")] = "auto",
    key_variable: Annotated[str | None, typer.Option(help="Environment variable that holds the server's key.")] = None,
    ca_file: Annotated[Path | None, typer.Option(help="Certificates to check an https address by.")] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Folder for adapters, visible to the server too; default: in memory.")
    ] = None,
    base: Annotated[str | None, typer.Option(help="Name of the served model; default: as the server reports.")] = None,
    api: Annotated[
        Literal["completions", "chat", "generate"], typer.Option(help="Route of requests; generate is SGLang's.")
    ] = "completions",
    as_model: Annotated[bool, typer.Option("--as-model", help="Send an adapter's name as `model`.")] = False,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; can be repeated. Default: eight.")] = None,
    json_: Annotated[Path | None, typer.Option("--json", help="Also write the report as JSON.")] = None,
    debug: Debug = False,
) -> None:
    """Check whether a running SGLang or vLLM server applies LoRA adapters. Exit code 1: it does not; 2: no verdict."""
    import os

    from evoalign.errors import ConfigError

    key = None if key_variable is None else os.environ.get(key_variable)
    if key_variable is not None and not key:
        raise ConfigError(f"--key-variable: there is no {key_variable} in the environment; set it to the server's key")
    quiet()
    with _no_verdict():
        from evoalign.preflight.canary import examine

        with _stopped_in_order():
            report = examine(
                url,
                adapters=adapter or [],
                server=server,
                key=key,
                ca_file=None if ca_file is None else str(ca_file),
                folder=folder,
                base=base,
                api=api,
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
    """Print a check; its detail may quote the server."""
    from rich.text import Text

    from evoalign.errors import plain

    line = Text.assemble((f"{check.status:<12}", COLOURS[check.status]), plain(f"{check.name}: {check.detail}"))
    console().print(line, soft_wrap=True)


@contextmanager
def _no_verdict() -> Generator[None]:
    """Turn an unexpected exception into EvoalignError: Python's exit code 1 would report a fault of the server."""
    from evoalign.errors import EvoalignError, cut

    try:
        yield
    except (EvoalignError, typer.Exit):
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {cut(str(error), 600)}"
        raise EvoalignError(
            f"the canary itself failed, which is no verdict on the server; --debug shows where ({what})"
        ) from error


@contextmanager
def _stopped_in_order() -> Generator[None]:
    """Unload adapters after Ctrl-C or SIGTERM, and exit with code 130 or 143."""
    import signal

    def stop(number: int, _: object) -> None:
        raise typer.Exit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
