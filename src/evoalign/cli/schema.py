# SPDX-License-Identifier: Apache-2.0
"""`evoalign schema`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evoalign.cli.options import Debug


def schema(
    to: Annotated[Path | None, typer.Option("--to", help="Write it into this file instead of printing it.")] = None,
    debug: Debug = False,
) -> None:
    """Print the JSON schema of a config, with which an editor completes, checks and describes the settings."""
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
