# SPDX-License-Identifier: Apache-2.0
"""Commands killed in each phase and repeated: the bits and the files of those that never died."""

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kill_points
import pytest
import random_kills

from evoalign.errors import StoppedError
from evoalign.rundir import checkpoint
from evoalign.rundir.directory import RunDir, saved_folders
from evoalign.training.saver import Saver

KILL, INT, TERM = signal.SIGKILL, signal.SIGINT, signal.SIGTERM


@pytest.mark.slow
def test_killed_in_each_phase_and_repeated_nothing_differs_and_nothing_is_left(tmp_path):
    draw, bench = random.Random(1), random_kills.Bench(tmp_path, ["train", "export"], ["lora"])
    rows = [bench.trial(*bench.draw(phase, draw)) for phase in (*random_kills.MAIN, "export")]
    assert [row["exit"] for row in rows] == [-signal.SIGKILL] * len(rows)
    assert [row["outcome"] for row in rows] == ["same"] * len(rows)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    kill_points.train("lora", run)
    return kill_points.traces(run)


@pytest.mark.first("killed", "third")
@pytest.mark.parametrize(
    ("signals", "code"),
    [((KILL,), -KILL), ((INT,), 128 + INT), ((TERM, TERM), 128 + TERM), ((INT, INT, INT), 128 + INT)],
    ids=["killed", "stopped", "at_once", "third"],
)
def test_a_run_with_signals_during_a_background_write_has_whole_checkpoints_and_resumes(
    signals, code, undisturbed, tmp_path
):
    run = tmp_path / "run"
    child = kill_points.PROCESSES.Process(target=_signalled_in_a_write, args=(signals, run))
    child.start()
    child.join(120)
    assert child.exitcode == code
    marks = [checkpoint.verify(folder).generation for folder in saved_folders(run)]
    assert marks == [1] if KILL in signals else 2 in marks
    kill_points.train("lora", run, resume=True)
    assert kill_points.traces(run) == undisturbed
    assert not list(run.rglob("*.tmp")) and not list(run.rglob("*.unusable*"))


def _signalled_in_a_write(signals: Sequence[int], run: Path) -> None:
    """Train, and send the signals while the thread writes the checkpoint of generation 2. Exits as the command does."""
    write, close, release, waited_for = checkpoint._save_file, Saver.close, RunDir.release, threading.Event()

    def slow(tensors: Any, file: Path) -> None:
        if file.parent.name == ".generation_0002.tmp" and file.name == checkpoint.ADAPTER:
            file.write_bytes(b"half")
            for count, number in enumerate(signals):
                if count == 2:
                    assert waited_for.wait(60)
                os.kill(os.getpid(), number)
                time.sleep(0.2)
            time.sleep(0.3)
        write(tensors, file)

    def closing(self: Saver) -> None:
        threading.Timer(0.2, waited_for.set).start()
        close(self)

    def released(self: RunDir) -> None:
        assert not list(run.rglob(".generation_*.tmp")), "the lock is released while the thread writes"
        release(self)

    checkpoint._save_file, Saver.close, RunDir.release = slow, closing, released  # type: ignore[method-assign]
    try:
        kill_points.train("lora", run)
    except StoppedError as error:
        sys.exit(128 + error.signal)
    except KeyboardInterrupt:
        sys.exit(128 + INT)
