# SPDX-License-Identifier: Apache-2.0
"""Runs of GRPO for tests: in this process, in a process that is killed, in two processes, and what they wrote."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from forked import Popen
from rich.console import Console

import evoalign
from evoalign.config import from_dict, to_yaml
from evoalign.rundir import parquet

CLOCKS = ("seconds", "budget")
"""Columns of metrics.jsonl that are times."""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
Tree = dict[str, Any]


def with_sections(tree: Tree, sections: Mapping[str, Any]) -> Tree:
    """Return a config whose sections are overridden setting by setting."""
    return {**tree, **{n: {**tree.get(n, {}), **s} if isinstance(s, dict) else s for n, s in sections.items()}}


def grpo(tree: Tree, **options: Any) -> evoalign.Result:
    return evoalign.grpo(tree, console=Console(file=io.StringIO()), **options)


def told_by(tree: Tree, **options: Any) -> str:
    """Run, and return what was printed."""
    told = io.StringIO()
    evoalign.grpo(tree, console=Console(file=told, width=300), **options)
    return told.getvalue()


def rows(path: Path) -> list[Tree]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def completions(path: Path, which: int | str) -> list[Tree]:
    """Return the saved completions of a step, or those `before` or `after` the run."""
    name = which if isinstance(which, str) else f"generation_{which:04d}"
    return parquet.read(path / f"results/completions/{name}.parquet")


def _command(tree: Tree, *launcher: str) -> list[str]:
    file = Path(tree["output_dir"]).with_suffix(".yaml")
    file.write_text(to_yaml(from_dict(tree)))
    return [sys.executable, *launcher, "-m", "evoalign.cli", "grpo", str(file), "--resume"]


def killed_when(is_there: Callable[[], bool], tree: Tree) -> None:
    """Run in a child process, and kill it once a condition holds."""
    child = Popen(_command(tree), env=ENVIRONMENT)
    while not is_there():
        assert child.poll() in (None, 0)
        time.sleep(0.002)
    child.send_signal(signal.SIGKILL)
    child.wait()


def launched(tree: Tree) -> None:
    """Run in two processes, resuming a run that is there."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--master_addr=127.0.0.1", f"--master_port={port}")
    done = subprocess.run(_command(tree, *launcher), capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
