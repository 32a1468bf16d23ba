# SPDX-License-Identifier: Apache-2.0
"""`train` as users call it: the run, and then its page `report.html`.

The page is made from a run's files; training does not import it.
"""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Callable
from typing import ParamSpec

from rich.console import Console

from evoalign.analysis.page.run import write_report
from evoalign.report.terminal import print_line
from evoalign.rundir.directory import REPORT
from evoalign.rundir.own import read_own
from evoalign.training.result import Result, shown
from evoalign.training.train import train as core_train

Arguments = ParamSpec("Arguments")


def write_page(result: Result, console: Console | None = None) -> Result:
    """Write the page of a finished run, and return its result.

    A page that cannot be written is a warning: the run is saved by then.
    """
    if os.environ.get("RANK", "0") != "0":  # of the processes of `accelerate launch`, the first one writes
        return result
    console = console or Console()
    try:
        if read_own(result.path).report:
            print_line(console, f"{'report':<12} {shown(write_report(result.path))}")
    except Exception as error:
        why = (str(error).strip().splitlines() or [""])[0]
        print_line(
            console,
            f"warning: {REPORT} was not written ({type(error).__name__}: {why}); the run is complete without it; "
            f"to write it: evoalign report {shlex.quote(str(result.path))}",
        )
    return result


def with_page(run: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return a training function that writes the page of its run."""

    @functools.wraps(run)
    def finished(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        console = kwargs.get("console")
        return write_page(run(*args, **kwargs), console if isinstance(console, Console) else None)

    return finished


train = with_page(core_train)
