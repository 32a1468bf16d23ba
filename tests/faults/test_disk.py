# SPDX-License-Identifier: Apache-2.0
"""A full disk: one line that says so, nothing lost, and the run resumes to the same bits.

A file that may not grow (RLIMIT_FSIZE) fails where a full disk does, in Python, in safetensors and in torch alike; a
flush that fails (ENOSPC) is what a disk that allocates late gives.
"""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kill_points
import pytest
from rich.console import Console

import evoalign
from evoalign.analysis.sweeping.sweep import Sweep, sweep
from evoalign.baselines.steps import Steps
from evoalign.errors import EvoalignError
from evoalign.exporting.export import export
from evoalign.rundir.files import as_os_errors, filled, write_text

Traces = dict[str, Any]


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """No file grows beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def full_at(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """No file of this name, or below a folder of it, is flushed to the disk."""
    inner = os.fsync

    def fsync(handle: int) -> None:
        path = str(Path(f"/proc/self/fd/{handle}").readlink())
        if f"/{name}" in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        inner(handle)

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    kill_points.train("lora", run)
    return run


@pytest.fixture(scope="module")
def whole(whole_run) -> Traces:
    return kill_points.traces(whole_run)


def test_a_checkpoint_that_does_not_fit_is_one_line_and_the_run_resumes(whole, tmp_path):
    said = r"File too large: '.*generation_0001'; kept up to generation [12]; resume with: "
    with small_files(20_000), pytest.raises(EvoalignError, match=said):
        kill_points.train("lora", tmp_path / "run")
    assert not list((tmp_path / "run").rglob("*.tmp"))
    kill_points.train("lora", tmp_path / "run", resume=True)
    assert kill_points.traces(tmp_path / "run") == whole


@pytest.mark.slow
@pytest.mark.last("manifest", "before", "metrics", "evolution", "budget")
@pytest.mark.parametrize(
    "name",
    ["run/journal.jsonl", "run/.manifest.json", "run/results/completions/.before.parquet", "run/.metrics.jsonl",
     "run/figures/.evolution", "run/results/.budget", "run/results/.evaluation", "run/loras/.generation_0002"],
)  # fmt: skip
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="a file's name is asked of Linux")
def test_any_file_that_does_not_fit_is_one_line_and_the_run_resumes(name, whole, tmp_path, monkeypatch):
    run = tmp_path / "run"
    if name == "run/.metrics.jsonl":  # written whole where a run resumes
        kill_points.killed("lora", "before the seal", 1, run)
    with monkeypatch.context() as patch:
        full_at(patch, name)
        with pytest.raises((EvoalignError, OSError), match="No space left on device") as raised:
            kill_points.train("lora", run, resume=True)
    assert "\n" not in str(raised.value) and not list(run.rglob("*.tmp"))
    kill_points.train("lora", run, resume=True)
    assert kill_points.traces(run) == whole and not list(run.rglob("*.tmp"))


@pytest.mark.slow
@pytest.mark.last("lora")
@pytest.mark.parametrize("tune", ["full", "lora"])
def test_a_state_or_policy_of_grpo_that_does_not_fit_is_one_line_and_resumes(tune, tmp_path, monkeypatch):
    pytest.importorskip("trl")
    grpo = {"max_steps": 2, "num_generations": 2, "per_device_train_batch_size": 4, "rollouts": "engine", "tune": tune}
    tree = {"output_dir": str(tmp_path / "run"), "task": {"name": "conciseness"}, "evaluation": {"max_tokens": 4},
            "checkpoint": {"every": 1}, "grpo": grpo}  # fmt: skip
    inner, said = Steps.on_log, r"(File too large|disk full).*; kept up to step 1; resume with: "

    def on_log(self: Steps, args: Any, state: Any, *rest: Any, **named: Any) -> None:
        inner(self, args, state, *rest, **named)
        if state.global_step == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    with monkeypatch.context() as patch, small_files(resource.RLIM_INFINITY):
        patch.setattr(Steps, "on_log", on_log)
        with pytest.raises(EvoalignError, match=said):
            evoalign.grpo(tree, console=Console(quiet=True))
    evoalign.grpo(tree, resume=True, console=Console(quiet=True))
    assert sorted(p.name for p in tmp_path.glob("run/*/generation_*")) == ["generation_0001", "generation_0002"]


@pytest.mark.long
@pytest.mark.parametrize("name", [".sweep.json", "configs", ".results.json", ".table.md"])
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="a file's name is asked of Linux")
def test_a_sweep_whose_files_do_not_fit_is_one_line_and_goes_on(name, tmp_path, monkeypatch):
    to, base = tmp_path / "sweep", kill_points.config("lora", tmp_path / "unused")
    base["es"] |= {"num_generations": 1, "population_size": 2}
    del base["output_dir"]

    def run() -> Sweep:
        return sweep(base, grid={"es.sigma": [0.02]}, to=to, jobs=1, gpus=None, console=Console(quiet=True))

    with monkeypatch.context() as patch:
        full_at(patch, f"sweep/{name}")
        with pytest.raises((EvoalignError, OSError), match="No space left on device") as raised:
            run()
    assert "\n" not in str(raised.value) and not [p for p in to.rglob("*.tmp") if p.is_file()]
    assert len(run().cells) == 1 and (to / "table.md").is_file()
    assert [p.name for p in tmp_path.iterdir()] == ["sweep"]


def test_an_export_that_does_not_fit_leaves_nothing(whole_run, tmp_path):
    with small_files(20_000), pytest.raises(EvoalignError, match=r"nothing was exported to .*: File too large"):
        export(whole_run, tmp_path / "to")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("said", "match"),
    [("Error while serializing: I/O error: No space left on device (os error 28)", "No space left on device: '/a'"),
     ("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0", "disk full")],
)  # fmt: skip
def test_what_libraries_say_of_a_full_disk_is_an_os_error(said, match):
    with pytest.raises(OSError, match=match), as_os_errors(Path("/a")):
        raise RuntimeError(said)
    with pytest.raises(RuntimeError, match="of another kind"), as_os_errors(Path("/a")):
        raise RuntimeError("of another kind")


def test_a_file_is_never_written_through_a_link_that_lies_in_its_way(tmp_path):
    """Nor is a pipe waited for: a run directory may be somebody else's."""
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / ".a.json.tmp").symlink_to("theirs")
    os.mkfifo(tmp_path / ".b.json.tmp")
    for name in ("a.json", "b.json"):
        write_text(tmp_path / name, "ours")
        assert (tmp_path / name).read_text() == "ours" and not (tmp_path / name).is_symlink()
    assert (tmp_path / "theirs").read_text() == "theirs" and len(list(tmp_path.iterdir())) == 3


def test_what_a_dead_process_left_goes_and_what_a_living_one_writes_stays(tmp_path):
    (tmp_path / ".to.tmp/below").mkdir(parents=True)
    (tmp_path / ".to.tmp/half").write_text("half")
    with filled(tmp_path / "to") as ours:
        (ours / "file").write_text("ours")
        with pytest.raises(EvoalignError, match="another process is writing there"), filled(tmp_path / "to"):
            pass
    assert [p.name for p in tmp_path.iterdir()] == ["to"] and [p.name for p in (tmp_path / "to").iterdir()] == ["file"]
