# SPDX-License-Identifier: Apache-2.0
"""`evoalign score serve`."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from evoalign.cli.options import Debug, quiet


def serve(
    reward: Annotated[str, typer.Option(help="Folder or hub name of the reward model.")],
    cost: Annotated[str | None, typer.Option(help="Folder or hub name of the cost model.")] = None,
    reward_revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a reward model on the hub.")
    ] = None,
    cost_revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a cost model on the hub.")] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; other than loopback needs --token-env.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free port.")] = 8011,
    token_env: Annotated[
        str | None, typer.Option(help="Environment variable with the token that clients must send.")
    ] = None,
    template: Annotated[
        str | None, typer.Option(help="Text with {prompt} and {response}, or chat. Default: that of Safe RLHF.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens of a pair; longer ones are truncated.")] = 2048,
    batch_size: Annotated[int, typer.Option(min=1, max=10**5, help="Pairs per forward pass.")] = 16,
    max_wait: Annotated[
        float, typer.Option(min=0, max=600, help="Seconds that an incomplete batch waits for more pairs.")
    ] = 0.005,
    queue: Annotated[
        int, typer.Option(min=1, max=10**6, help="Maximum pairs that wait; the response to more is 429.")
    ] = 1024,
    max_body: Annotated[int, typer.Option(min=1024, max=2**30, help="Maximum bytes of a request.")] = 2**20,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:K.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, max=4096, help="CPU threads; default: chosen by torch.")] = None,
    debug: Debug = False,
) -> None:
    """Serve reward and cost models over HTTP, for runs with `scorer: {name: service}`. Ctrl-C or SIGTERM ends it."""
    from importlib.util import find_spec

    from pydantic import ValidationError

    from evoalign.config import ScorerConfig
    from evoalign.errors import ConfigError, ModelError
    from evoalign.version import install

    given: dict[str, Any] = {
        "reward": reward,
        "cost": cost,
        "max_tokens": max_tokens,
        "batch_size": batch_size,
        "dtype": dtype,
        "device": device,
        "reward_revision": reward_revision,
        "cost_revision": cost_revision,
        **({} if template is None else {"template": template}),
    }
    try:
        config = ScorerConfig.model_validate({"name": "local", **given})
    except ValidationError as error:
        first = error.errors()[0]
        message = ": ".join(
            [*(f"scorer.{part}" for part in first["loc"][:1]), first["msg"].removeprefix("Value error, ")]
        )
        raise ConfigError(_by_option(message)) from None
    if queue < batch_size:
        raise ConfigError(f"--queue {queue} is less than --batch-size {batch_size}; raise it")
    if any(find_spec(library) is None for library in ("fastapi", "uvicorn")):
        raise ConfigError(f"the service needs the extra scorer: {install('scorer')}")
    import torch

    from evoalign.rewards.scorer.service import Limits
    from evoalign.rewards.scorer.service import serve as run

    quiet()
    if threads is not None:
        torch.set_num_threads(threads)
    limits = Limits(batch_size, max_wait, queue, max_body)
    try:
        run(
            config,
            limits,
            host=host,
            port=port,
            token_env=token_env,
            tell=lambda address: typer.echo(f"{address} is ready"),
        )
    except ModelError as error:
        raise ModelError(_by_option(str(error))) from error
    typer.echo("ended")


def _by_option(message: str) -> str:
    """Replace names of settings in a message by those of the options."""
    return re.sub(r"scorer\.(\w+)", lambda name: f"--{name[1].replace('_', '-')}", message)
