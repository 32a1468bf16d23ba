# SPDX-License-Identifier: Apache-2.0
"""`evoalign schema`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evoalign.cli.options import Debug


def schema(
    to: Annotated[Path | None, typer.Option("--to", help="A file to write it into, instead of printing it.")] = None,
    debug: Debug = False,
) -> None:
    """Print the JSON schema of a config, by which an editor completes and checks the YAML, with every description."""
    from evoalign.cli.scaffold import schema_text
    from evoalign.errors import ConfigError

    if to is None:
        typer.echo(schema_text(), nl=False)
        return
    try:
        to.write_text(schema_text(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {to}: {error.strerror}; give another file") from None
    typer.echo(f"wrote {to}; name it in the first line of a config:\n# yaml-language-server: $schema={to}")
