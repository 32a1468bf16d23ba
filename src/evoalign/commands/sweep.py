# SPDX-License-Identifier: Apache-2.0
"""`evoalign sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evoalign.commands.options import Debug, More, Sets, integers, quiet

Grid = Annotated[
    list[str] | None, typer.Option("--grid", "-g", metavar="a.b=v,w", help="A setting and its values; repeat it.")
]


def sweep(
    config: Annotated[Path, typer.Argument(help="A YAML config, of which every run is a variation.")],
    more: More = None,
    set_: Sets = None,
    grid: Grid = None,
    cells: Annotated[Path | None, typer.Option("--cells", help="A YAML list of cells, for what is no product.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Comma-separated, such as 0,1,2,3; default: the config's.")] = None,
    method: Annotated[str, typer.Option(help="es or grpo.")] = "es",
    to: Annotated[Path | None, typer.Option(help="The sweep's folder; default: output_dir with _sweep.")] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="Runs at once; default: one a GPU.")] = None,
    gpus: Annotated[str | None, typer.Option(help="GPUs to use in turn, such as 0,1; default: all.")] = None,
    axes: Annotated[str | None, typer.Option(metavar="X,Y", help="Settings that the heat map lies over.")] = None,
    measure: Annotated[str, typer.Option(help="What figures show.")] = "reward",
    debug: Debug = False,
) -> None:
    """Train a grid of settings with several seeds, each run a process. Exit code 1 where one failed."""
    from evoalign.config import read
    from evoalign.errors import ConfigError

    tree = read([config, *(more or [])], set_ or [])
    if method not in ("es", "grpo"):
        raise ConfigError(f"--method {method}: use es or grpo")
    quiet()
    from evoalign.sweeping import cells as parts
    from evoalign.sweeping.sweep import sweep as run

    axis_list = [parts.axis(text) for text in grid or []]
    if len({key for key, _ in axis_list}) < len(axis_list):
        raise ConfigError(
            "--grid names a setting twice; give all its values at once, as in --grid es.sigma=0.001,0.003"
        )
    done = run(
        tree,
        grid=dict(axis_list),
        cells=parts.read_cells(cells) if cells is not None else (),
        seeds=integers(seeds),
        method="es" if method == "es" else "grpo",
        jobs=jobs,
        gpus=gpus.split(",") if gpus is not None else None,
        to=to,
        axes=axes.split(",") if axes is not None else None,
        measure=measure,
    )
    raise typer.Exit(1 if done.failed else 0)
