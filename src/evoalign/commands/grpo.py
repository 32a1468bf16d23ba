# SPDX-License-Identifier: Apache-2.0
"""`evoalign grpo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evoalign.commands.options import Debug, More, Sets, quiet
from evoalign.commands.resolving import resolved


def grpo(
    config: Annotated[Path, typer.Argument(help="A YAML config; with --resume, also a run directory.")],
    more: More = None,
    set_: Sets = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run there, or begin it.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Move an existing run aside.")] = False,
    debug: Debug = False,
) -> None:
    """Train the GRPO baseline on the same task, and compare the test split before and after."""
    found = resolved("grpo", config, more or [], set_ or [], resume=resume, overwrite=overwrite)
    quiet()
    from evoalign.baselines import grpo as baseline

    baseline.grpo(found, resume=resume, overwrite=overwrite)
