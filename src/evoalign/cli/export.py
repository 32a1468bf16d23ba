# SPDX-License-Identifier: Apache-2.0
"""`evoalign export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evoalign.cli.options import Debug, quiet


def export(
    run: Annotated[Path, typer.Argument(help="A run directory, finished or not.")],
    to: Annotated[Path, typer.Option(help="New folder to write.")],
    generation: Annotated[
        int | None, typer.Option("--generation", "-g", min=0, help="Generations of the mean; default: latest saved.")
    ] = None,
    member: Annotated[
        int | None,
        typer.Option("--member", "-m", min=0, help="Member to export instead of the mean."),
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Put the adapter into its base model.")] = False,
    push: Annotated[str | None, typer.Option(metavar="USER/NAME", help="Upload to the Hugging Face hub.")] = None,
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public; default: private.")] = False,
    shard_size: Annotated[str, typer.Option(help="Largest file of a checkpoint.")] = "5GB",
    model: Annotated[str | None, typer.Option(help="Name or folder of the base model, if it has moved.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="DTYPE", help="Dtype of merged or whole weights: float32, bfloat16 or float16."),
    ] = None,
    samples: Annotated[
        int, typer.Option(min=0, max=99, help="Prompts of the card, with completions before and after.")
    ] = 3,
    debug: Debug = False,
) -> None:
    """Write a run's mean, or a member of any generation, as PEFT and transformers load it, with a model card."""
    quiet()
    from evoalign.exporting.export import dtype_in, rounding_of
    from evoalign.exporting.export import export as write

    folder = write(
        run, to, generation=generation, member=member, merge=merge, push=push, private=not public,
        shard_size=shard_size, model=model, dtype=dtype, samples=samples,
    )  # fmt: skip
    why = " (the base's own, or narrower as the run served it; --dtype for another)" if merge and dtype is None else ""
    lost = rounding_of(run, folder, merged=merge)
    weights = f"weights in {dtype_in(folder)}{why}" + (f", {lost}" if lost else "")
    typer.echo(f"exported to {folder}" + (f" and to {push}" if push else "") + f", {weights}")
    typer.echo(f"{folder / 'README.md'} has the code that loads it; evoalign eval {folder} --config CONFIG scores it")
