# SPDX-License-Identifier: Apache-2.0
"""Refuse links inside a run directory, so that a run writes and deletes nothing outside of it.

The run directory itself may be a link. A link in place of a file, or of a saved mean (`SAVED`), is replaced by what is
written there, and its target stays as it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from evoalign.errors import RunExistsError
from evoalign.rundir.method import JOURNAL, is_run

ANALYSES = "analysis"
"""The folder of a run that `evoalign analyze ... --to` fills for the report."""
MADE = ("results", "results/completions", "figures", "logs")
"""The folders that each run has from its beginning."""
FOLDERS = (*MADE, "loras", "checkpoints", "trainer", ANALYSES)
"""All folders that evoalign makes in a run directory, except saved means and what libraries put into `LIBRARIES`."""
LIBRARIES = ("logs", "trainer")
"""The folders that trackers, servers and TRL write to: no link in them may lead out of them."""
SAVED = ("loras/generation_*", "checkpoints/generation_*")
"""Saved means. Each is replaced, renamed or deleted as a whole."""


def links_in(run: Path, names: Sequence[str] = FOLDERS, *, whole: bool = False) -> Iterator[Path]:
    """Yield the links in place of these folders of a run directory.

    With `whole`, yield also a link in place of the journal, to which lines are appended, and the links in `LIBRARIES`
    that lead out of them, except those to files in `logs` (see `unlink_files`).
    """
    yield from (run / name for name in names if is_link(run / name))
    if whole:
        yield from (file for file in [run / JOURNAL] if is_link(file))
        for name in LIBRARIES:
            yield from (link for link in _leading_out(run / name) if name != "logs" or link.is_dir())


def refuse_links(run: Path, names: Sequence[str] = FOLDERS, *, whole: bool = False) -> None:
    """Raise RunExistsError naming the first of `links_in` a run directory."""
    for link in links_in(run, names, whole=whole):
        _refuse(link)


def unlink_files(run: Path) -> None:
    """Remove links to files outside of `logs`, such as the one of wandb to its own log; their targets stay."""
    for link in _leading_out(run / "logs"):
        if not link.is_dir():
            link.unlink()


def refuse_links_above(path: Path) -> None:
    """Raise RunExistsError where `path` is in a run directory, and a folder between the two is a link."""
    links: list[Path] = []
    for folder in path.absolute().parents:
        if links and _is_run(folder):
            _refuse(links[-1])
        if is_link(folder):
            links.append(folder)


def is_link(path: Path) -> bool:
    """Return whether a symbolic link, or a junction of Windows, is at a path."""
    is_junction = getattr(os.path, "isjunction", None)  # from Python 3.12 on
    return path.is_symlink() or bool(is_junction and is_junction(path))


def _refuse(link: Path) -> None:
    kind = "folder" if link.is_dir() else "file"
    raise RunExistsError(
        f"{link} is a link, and a {kind} inside a run or sweep may not be one: put the {kind} itself there. To keep a "
        "run on another disk, move the whole run there and put a link in its place"
    )


def _leading_out(folder: Path) -> Iterator[Path]:
    inside = Path(os.path.realpath(folder))
    for place, folders, files in os.walk(folder):
        for entry in (Path(place, name) for name in (*folders, *files)):
            if is_link(entry) and not Path(os.path.realpath(entry)).is_relative_to(inside):
                yield entry


def _is_run(folder: Path) -> bool:
    """Return whether a folder holds a run: other programs have a manifest.json, too."""
    return is_run(folder) and (folder / "config.yaml").exists()
