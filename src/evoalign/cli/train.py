# SPDX-License-Identifier: Apache-2.0
"""`evoalign train` and `evoalign grpo`."""

from __future__ import annotations

from typing import Annotated

import typer

from evoalign.cli.options import All, Debug, DryRun, Given, More, Overwrite, Resume, Sets, quiet
from evoalign.cli.resolving import resolved, show_plan


def train(
    config: Given,
    more: More = None,
    set_: Sets = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    evaluate_every: Annotated[
        int | None, typer.Option(min=0, help="Generations between evaluations of the mean; 0: none.")
    ] = None,
    dry_run: DryRun = False,
    all_: All = False,
    debug: Debug = False,
) -> None:
    """Train, and compare the test split before and after."""
    found = resolved("es", config, more or [], set_ or [], evaluate_every, resume=resume, overwrite=overwrite)
    quiet()
    from evoalign.training import train as training

    if dry_run:
        lines = training.dry_run(found, overwrite=overwrite, resume=resume)
        show_plan(found, "es", lines, everything=all_)
        return
    from evoalign.analysis.runs import write_page

    write_page(training.train(found, overwrite=overwrite, resume=resume))


def grpo(
    config: Given,
    more: More = None,
    set_: Sets = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    evaluate_every: Annotated[
        int | None, typer.Option(min=0, help="Steps between evaluations of the policy; 0: none.")
    ] = None,
    dry_run: DryRun = False,
    all_: All = False,
    debug: Debug = False,
) -> None:
    """Train GRPO (grpo.algorithm: PPO or DPO) on the same task, and compare the test split before and after."""
    found = resolved("grpo", config, more or [], set_ or [], evaluate_every, resume=resume, overwrite=overwrite)
    quiet()
    if dry_run:
        from evoalign.baselines import planning

        lines = planning.dry_run(found, overwrite=overwrite, resume=resume)
        show_plan(found, "grpo", lines, everything=all_)
        return
    from evoalign.analysis.grpo_runs import grpo as run

    run(found, resume=resume, overwrite=overwrite)
