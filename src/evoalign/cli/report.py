# SPDX-License-Identifier: Apache-2.0
"""`evoalign report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evoalign.cli.options import Debug


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, or folders that hold some.")],
    to: Annotated[
        Path | None, typer.Option(help="The file to write; default: report.html in the directory of the one run.")
    ] = None,
    analyses: Annotated[
        Path | None, typer.Option(help="A folder of `evoalign analyze ... --to` with analyses of these runs together.")
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve the page on this machine and follow the runs; writes no file.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port for --serve; 0: any free one.")] = 8050,
    debug: Debug = False,
) -> None:
    """Show runs on an HTML page that loads nothing: warnings, curves, completions, settings, analyses."""
    from evoalign.analysis.compare.runs import find_in_order
    from evoalign.analysis.page import page
    from evoalign.analysis.page.run import not_shown, shared, stamp, views_of
    from evoalign.analysis.page.serving import Server
    from evoalign.errors import ConfigError
    from evoalign.rundir.directory import REPORT
    from evoalign.rundir.files import make_folder, refuse_links, refuse_links_above, write_text

    found = find_in_order(runs)
    for path in not_shown(analyses, found) if analyses else ():
        typer.echo(f"warning: --analyses {analyses} is also of {path}, which is not on the page; add it", err=True)

    def render(tag: str | None = None) -> str:
        return page.render(views_of(found), tag, shared(analyses) if analyses else ())

    if serve:
        if to is not None:
            raise ConfigError("--serve and --to cannot be combined")
        with Server(lambda: stamp(found, analyses), render, port) as server:
            typer.echo(f"{server.url} follows {len(found)} run{'' if len(found) == 1 else 's'}; Ctrl-C ends it")
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                typer.echo("ended")
        return
    if to is None and len(found) > 1:
        raise ConfigError(f"{len(found)} runs: name the file with --to, such as --to {REPORT}")
    file = found[0] / REPORT if to is None else to
    refuse_links_above(file)
    if to is None:
        refuse_links(found[0])
    if file.exists() and not page.is_ours(file):
        raise ConfigError(f"{file} exists and is no report; choose another file with --to")
    written = render()
    make_folder(file.parent)
    write_text(file, written)
    typer.echo(f"wrote {file}")
