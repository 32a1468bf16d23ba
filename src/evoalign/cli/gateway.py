# SPDX-License-Identifier: Apache-2.0
"""`evoalign gateway`."""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from evoalign.cli.options import Debug, More, Sets, quiet

if TYPE_CHECKING:
    from evoalign.gateway.serving import Model


def gateway(
    target: Annotated[str, typer.Argument(help="A run directory, a model folder, a PEFT adapter or a hub name.")],
    config: More = None,
    set_: Sets = None,
    generation: Annotated[
        int | None, typer.Option("--generation", "-g", min=0, help="Generations of the mean; default: latest saved.")
    ] = None,
    member: Annotated[
        int | None, typer.Option("--member", "-m", min=0, help="Member of that generation, counted from 0, to serve.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; other than loopback needs --token-env and TLS files.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free port.")] = 8010,
    token_env: Annotated[
        str | None, typer.Option(help="Environment variable with the API key of clients; default: a random key.")
    ] = None,
    certfile: Annotated[Path | None, typer.Option(help="TLS certificate, in PEM form.")] = None,
    keyfile: Annotated[Path | None, typer.Option(help="Private key of the certificate.")] = None,
    debug: Debug = False,
) -> None:
    """Serve a run's mean, a member, or any model, by the APIs of OpenAI and Anthropic. Ctrl-C or SIGTERM ends it.

    Requests that set no max_tokens, temperature or top_p have those of the config's section `evaluation`.
    """
    quiet()
    from rich.console import Console
    from rich.progress import Progress

    from evoalign.gateway.serving import Address, serve
    from evoalign.training.hosting import opened

    console = Console(stderr=True)
    with (
        _stopped(),
        Progress(transient=True, console=console, disable=not console.is_terminal) as bar,
    ):
        work = bar.add_task("replaying", total=None, visible=generation is not None)

        def tell(model: Model, url: str, key: str | None) -> None:
            bar.stop()
            typer.echo(f"{model.what} is ready at {url} until Ctrl-C; clients read these variables:")
            typer.echo(f"export OPENAI_BASE_URL={url}")
            typer.echo(f"export OPENAI_API_KEY={key or f'${token_env}'}")

        serve(
            lambda: opened(
                target,
                config or [],
                set_ or [],
                generation=generation,
                member=member,
                progress=lambda done, total: bar.update(work, completed=done, total=total),
            ),
            Address(host, port, token_env, certfile, keyfile),
            tell,
        )
    typer.echo("ended")


@contextmanager
def _stopped() -> Generator[None]:
    """End the body by KeyboardInterrupt at the first SIGINT or SIGTERM, and suppress what follows from that.

    Further signals do not interrupt the end.
    """
    from evoalign.errors import EvoalignError

    numbers, has_come = (signal.SIGINT, signal.SIGTERM), False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal has_come
        has_come = True
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    except (KeyboardInterrupt, EvoalignError):  # an import that is interrupted is an EvoalignError
        if not has_come:
            raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
