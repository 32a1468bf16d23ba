# SPDX-License-Identifier: Apache-2.0
"""What `--dry-run` prints: the settings that a command uses, and what it would do with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from evoalign.config import Config
    from evoalign.rundir.method import Method


def show_plan(config: Config, method: Method, lines: Sequence[str], *, everything: bool) -> None:
    """The config as YAML, without the sections that nothing reads unless `everything`, and the lines."""
    from evoalign.config import to_yaml

    left_out = [] if everything else unused(config, method)
    typer.echo(to_yaml(config, without=left_out), nl=False)
    if left_out:
        typer.echo(f"# not used here, and shown with --all: {', '.join(left_out)}")
    typer.echo("\n" + "\n".join(lines))


def unused(config: Config, method: Method) -> list[str]:
    """Sections that a training by this method does not read. Code of the user's own may read any."""
    from evoalign.config.spaces import SECTIONS

    members = method == "es" or config.grpo.rollouts == "es"
    used = {config.space.name} if members else set[str]()
    if method == "grpo" and config.grpo.tune == "lora":
        used.add("lora")
    of_spaces = [] if members and config.space.name not in SECTIONS else [s for s in SECTIONS if s not in used]
    return [*([] if members else ["space"]), *of_spaces, *([] if members else ["es"]), *(["grpo"] * (method == "es"))]
