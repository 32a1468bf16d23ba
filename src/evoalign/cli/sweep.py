# SPDX-License-Identifier: Apache-2.0
"""`evoalign sweep`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from evoalign.cli.options import Debug, More, Sets, integers, quiet
from evoalign.cli.resolving import given, run_of

Value = TypeVar("Value")
Grid = Annotated[
    list[str] | None, typer.Option("--grid", "-g", metavar="a.b=v,w", help="A setting and its values; repeat it.")
]


def sweep(
    config: Annotated[Path, typer.Argument(help="The YAML config that every run starts from.")],
    more: More = None,
    set_: Sets = None,
    grid: Grid = None,
    cells: Annotated[Path | None, typer.Option("--cells", help="YAML list of cells that are no full grid.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Comma-separated, such as 0,1,2,3; default: the config's.")] = None,
    method: Annotated[str, typer.Option(help="es or grpo.")] = "es",
    to: Annotated[Path | None, typer.Option(help="The sweep's folder; default: output_dir with _sweep.")] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="Parallel runs; default: one a GPU.")] = None,
    gpus: Annotated[str | None, typer.Option(help="GPUs to use in turn, such as 0,1; default: all.")] = None,
    search: Annotated[
        list[str] | None, typer.Option("--search", metavar="a.b=LOW..HIGH[:log]", help="Let Optuna choose; repeat it.")
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="Trials of a search, including earlier ones.")] = 20,
    prune: Annotated[bool, typer.Option("--prune", help="Stop trials whose evaluations are below the median.")] = False,
    axes: Annotated[str | None, typer.Option(metavar="X,Y", help="Settings on the axes of the heat map.")] = None,
    measure: Annotated[
        str | None,
        typer.Option(help="Measure to show, or to maximise in a search; default: the training objective."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Train a grid of settings with several seeds, each run in its own process. Exit code 1 if one failed."""
    from evoalign.config import read
    from evoalign.errors import ConfigError

    run, more, sets = run_of(config), more or [], set_ or []
    tree = read([config if run is None else run / "config.yaml", *more], sets)
    if run is not None:
        tree["output_dir"] = given(config, more, sets).output_dir
    if method not in ("es", "grpo"):
        raise ConfigError(f"--method {method}: use es or grpo")
    quiet()
    from evoalign.analysis.sweeping import cells as parts
    from evoalign.analysis.sweeping.search import domain
    from evoalign.analysis.sweeping.search import search as run_search
    from evoalign.analysis.sweeping.sweep import sweep as run_grid

    devices = gpus.split(",") if gpus is not None else None
    common: dict[str, Any] = {"method": method, "jobs": jobs, "gpus": devices, "to": to, "measure": measure}
    common["seeds"] = integers(seeds)
    if search:
        if grid or cells is not None:
            raise ConfigError("--search cannot be combined with --grid or --cells")
        done = run_search(tree, once("--search", map(domain, search)), trials=trials, prune=prune, **common)
    else:
        done = run_grid(
            tree,
            grid=once("--grid", map(parts.axis, grid or [])),
            cells=parts.read_cells(cells) if cells is not None else (),
            axes=[name.strip() for name in axes.split(",")] if axes is not None else None,
            **common,
        )
    raise typer.Exit(1 if done.failed else 0)


def once(option: str, pairs: Iterable[tuple[str, Value]]) -> dict[str, Value]:
    """Return settings with their values. Raises ConfigError for a setting that is given twice."""
    from evoalign.errors import ConfigError

    found: dict[str, Value] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(f"{option} names {key} twice; give all its values in one")
        found[key] = value
    return found
