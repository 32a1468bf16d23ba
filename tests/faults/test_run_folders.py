# SPDX-License-Identifier: Apache-2.0
"""In and around a run directory: the user's own files stay, two processes keep apart, nothing stale is used."""

import io
import json
import os
import shutil
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import kill_points
import pytest
import torch
import yaml
from command_line import Run, caller
from forked import Popen
from rich.console import Console
from small_runs import UNCHECKED

import evoalign
from evoalign import tracking
from evoalign.config import from_dict
from evoalign.errors import (
    CheckpointError,
    ConfigError,
    EvoalignError,
    ModelError,
    ResumeError,
    RunExistsError,
    RunGoneError,
)
from evoalign.exporting.export import export
from evoalign.rundir import checkpoint, directory, files, journal
from evoalign.rundir.directory import RunDir, saved_folders
from evoalign.tasks.conciseness import Conciseness
from evoalign.training import replay as replaying
from evoalign.training import stopping

QUIET = Console(quiet=True)
train = partial(evoalign.train, console=QUIET)
ALL = {"evaluation": {"every": 1}, "checkpoint": {"every": 1, "keep_last": 9}}
GRPO = {"max_steps": 2, "num_generations": 2, "per_device_train_batch_size": 4, "rollouts": "engine"}


def small(output: Path, generations: int = 2, **sections: Any) -> dict[str, Any]:
    tree = kill_points.config("lora", output) | {"lora": {"rank": 2}, "sampling": {"max_tokens": 4}}
    tree["es"] = {"sigma": 0.01, "num_generations": generations, "population_size": 4}
    tree["evaluation"] = {"max_tokens": 4, **sections.pop("evaluation", {})}
    return tree | {"checks": UNCHECKED} | sections


def numbers(run: Path) -> list[int]:
    return [int(f.name.removeprefix("generation_")) for f in saved_folders(run)]


def cut(run: Path, lines: int) -> None:
    path = run / "journal.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:lines]))


def told(tree: dict[str, Any], **how: Any) -> str:
    """Train, and return what was printed."""
    out = io.StringIO()
    evoalign.train(tree, console=Console(file=out, width=300), **how)
    return out.getvalue()


def go_on(run: Path, generations: int, **sections: Any) -> str:
    return told(small(run, generations, **{**ALL, **sections}), resume=True)


@pytest.fixture(scope="module")
def six(tmp_path_factory) -> Path:
    return train(small(tmp_path_factory.mktemp("six") / "run", 6, **ALL)).path


@pytest.fixture
def copy(six, tmp_path) -> Path:
    return Path(shutil.copytree(six, tmp_path / "run"))


@pytest.fixture
def cli(tmp_path, monkeypatch, capsys) -> Run:
    """The command line in this process, started in the folder that the run is in."""
    monkeypatch.chdir(tmp_path)
    return caller(monkeypatch, capsys)


@pytest.mark.parametrize("names", [("thesis.txt",), ("config.yaml", "reward.py", "data/thesis.txt")], ids=len)
@pytest.mark.parametrize("how", [{"resume": True}, {"overwrite": True}, {}])
def test_a_project_folder_is_no_run(tmp_path, how, names):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("es: {sigma: 0.01}\n")
    with pytest.raises(RunExistsError):
        train(small(tmp_path), **how)
    assert {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()} == {*names}
    assert all((tmp_path / name).read_text() == "es: {sigma: 0.01}\n" for name in names)


@pytest.mark.slow
def test_a_run_that_never_began_goes_on_only_where_nothing_else_is(tmp_path):
    kill_points.killed("lora", "before the journal", 0, tmp_path / "run")
    (tmp_path / "run/notes.txt").write_text("mine")
    with pytest.raises(RunExistsError):
        kill_points.train("lora", tmp_path / "run", resume=True)
    assert (tmp_path / "run/notes.txt").read_text() == "mine"


def test_a_folder_that_was_there_is_left_as_it_was(tmp_path, monkeypatch):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.setenv("HOME", str(tmp_path))
    for place in (tmp_path / "link", Path(), Path("~/never/made")):
        tree = small(place, task={"name": "custom", "train_data": str(rows), "test_data": str(rows)})
        with pytest.raises(EvoalignError, match="returned 1 values for 2"):
            train(tree, reward=lambda completions, **columns: [float("nan")])
        (place.expanduser() / "failed_completion.json").unlink()
    assert not list((tmp_path / "empty").iterdir()) and (tmp_path / "link").is_symlink()
    assert not list((tmp_path / "never/made").iterdir())


def test_replay_never_takes_the_place_of_what_has_come(copy, tmp_path):
    target = tmp_path / "to"
    target.mkdir()
    with pytest.raises(OSError, match="not empty"):
        replaying.replay(copy, to=target, progress=lambda done, total: (target / "mine").write_text("mine"))
    assert [p.name for p in target.iterdir()] == ["mine"]
    assert not list(tmp_path.glob(".*.tmp"))


@pytest.mark.slow
def test_a_run_that_is_going_on_is_neither_moved_nor_resumed(tmp_path):
    run, file = tmp_path / "run", tmp_path / "long.yaml"
    file.write_text(yaml.safe_dump(small(run, 400)))
    process = Popen([sys.executable, "-m", "evoalign.cli", "train", str(file)], start_new_session=True)
    deadline = time.monotonic() + 120
    while not (run / "metrics.jsonl").is_file():  # it is past its first generation
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    try:
        for how in ({"overwrite": True}, {"resume": True}):
            with pytest.raises(RunExistsError, match="another process is training there"):
                train(small(run, 400), **how)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == ["run"]
    log = journal.read(run / "journal.jsonl")
    assert log.damage is None and numbers(run)[-1] == log.sealed
    go_on(run, log.sealed + 1, evaluation={}, checkpoint={"every": 1, "keep_last": 2})


def test_a_temporary_folder_that_several_take_at_once_is_had_by_one_and_refused_to_the_others(tmp_path):
    folder, inside = tmp_path / ".adapter.tmp", threading.Lock()

    def take(_: int) -> bool:
        try:
            with files.scratch(folder):
                alone = inside.acquire(blocking=False)
                (folder / "part").write_text("")
                inside.release()
        except RunExistsError:
            return False
        assert alone
        return True

    with ThreadPoolExecutor(8) as threads:
        assert any(list(threads.map(take, range(5_000))))
    assert not folder.exists()
    folder.write_text("the user's")
    with pytest.raises(FileExistsError):
        take(0)


def test_the_lock_ends_with_the_process_and_leaves_no_folder(tmp_path):
    run = RunDir(tmp_path / "a/b")
    run.lock()
    with pytest.raises(RunExistsError, match="another process"):
        RunDir(tmp_path / "a/b").lock()
    run.release()
    assert not (tmp_path / "a").exists()


def test_a_lock_that_a_killed_process_leaves_for_a_moment_is_waited_for(tmp_path, monkeypatch):
    left, run = RunDir(tmp_path / "a/b"), RunDir(tmp_path / "a/b")
    left.lock()
    release = threading.Timer(0.3, left.release)
    release.start()
    monkeypatch.setattr(directory, "LINGERS", 60.0)
    run.lock()
    release.join()
    monkeypatch.setattr(directory, "LINGERS", 0.0)
    with pytest.raises(RunExistsError, match="another process"):
        RunDir(tmp_path / "a/b").lock()
    run.release()
    assert not (tmp_path / "a/b").exists()  # who made its parent may have lost it at that moment


LATEST = {"every": 1, "keep_best": False}


def test_means_beyond_a_journal_that_was_cut_back_are_set_aside(copy):
    cut(copy, 5)
    with pytest.raises(CheckpointError, match="is not of this journal"):
        evoalign.evaluate(copy)
    said = go_on(copy, 3, checkpoint=LATEST | {"keep_last": 2})
    assert "generation_0006 is not of this journal; set aside as generation_0006.unusable" in said
    assert numbers(copy) == [2, 3]
    assert evoalign.evaluate(copy).measures["reward"] is not None


def test_a_damaged_mean_does_not_count_among_those_that_stay(copy):
    cut(copy, 11)
    shutil.rmtree(copy / "loras/generation_0006")
    for number in (3, 4, 5):
        (copy / f"loras/generation_000{number}/adapter_model.safetensors").write_bytes(b"no")
    go_on(copy, 6, checkpoint=LATEST | {"keep_last": 3}, evaluation={})
    assert numbers(copy) == [2, 5, 6]
    assert all(checkpoint.verify(folder) for folder in saved_folders(copy))


def test_the_best_is_known_without_the_metrics(copy):
    marks = {n: checkpoint.verify(f) for n, f in zip(numbers(copy), saved_folders(copy), strict=True)}
    rewards = {n: mark.validation for n, mark in marks.items()}
    assert rewards.pop(6) is None and None not in rewards.values(), "the last is evaluated apart"
    best = max(rewards, key=lambda n: (rewards[n] or 0.0, -n))
    (copy / "metrics.jsonl").unlink()
    go_on(copy, 6, checkpoint={"every": 0, "keep_last": 1})
    assert numbers(copy) == sorted({best, 6})


def test_an_update_without_its_seal_counts_as_a_generation(copy):
    cut(copy, 10)
    with pytest.raises(ResumeError, match=r"has 5 generations already, es\.num_generations is 4"):
        go_on(copy, 4)


def test_each_mean_is_saved_once(tmp_path, monkeypatch):
    saved, inner = list[str](), checkpoint.save
    monkeypatch.setattr(
        checkpoint, "save", lambda to, *words, **more: (saved.append(to.name), inner(to, *words, **more))
    )
    train(small(tmp_path / "run", checkpoint={"every": 1}))
    assert saved == ["generation_0001", "generation_0002"]


def test_a_saved_mean_may_be_a_link_to_another_disk(copy, tmp_path):
    there = (copy / "loras/generation_0005").rename(tmp_path / "disk")
    (copy / "loras/generation_0005").symlink_to(there)
    go_on(copy, 7, checkpoint=LATEST | {"keep_last": 1}, evaluation={})
    assert numbers(copy) == [7] and (there / "evoalign.json").is_file()


def test_what_a_process_left_half_written_goes_and_a_note_in_a_saved_mean_stays(copy):
    note = copy / "loras/generation_0006/NOTES.md"
    note.write_text("mine")
    for name in ("loras/.generation_0007.tmp", "results/completions/.x.parquet.tmp", ".metrics.jsonl.tmp"):
        (copy / name).mkdir() if name.startswith("loras") else (copy / name).write_text("half")
    go_on(copy, 6)
    assert not list(copy.rglob(".*.tmp")) and note.read_text() == "mine"


class Brief(Conciseness):
    def compute_reward(self, text: str, example: Any) -> float:
        return -float(len(text))


@pytest.mark.slow
def test_a_run_of_a_task_object_goes_on_with_one_alone(tmp_path):
    tree = small(tmp_path / "run")
    train(tree, task=Brief(from_dict(tree).task))
    tree["es"]["num_generations"] = 3
    with pytest.raises(ResumeError, match="was trained with a task object; resume in Python"):
        train(tree, resume=True)
    train(tree, task=Brief(from_dict(tree).task), resume=True)


@pytest.mark.slow
def test_other_data_are_another_run(tmp_path):
    rows, code = tmp_path / "rows.json", tmp_path / "rewards.py"
    rows.write_text(json.dumps([{"prompt": "Say a:", "answer": "a"}, {"prompt": "Say b:", "answer": "b"}]))
    code.write_text("def f(completions, **rest):\n    return [-float(len(c)) for c in completions]\n")
    task = {"name": "custom", "train_data": str(rows), "test_data": str(rows), "rewards": [f"{code}:f"]}
    train(small(tmp_path / "run", task=task))
    rows.write_text(rows.read_text().replace("Say b:", "Say c:"))
    with pytest.raises(ResumeError, match="was trained on other data"):
        train(small(tmp_path / "run", 3, task=task), resume=True)


@pytest.mark.slow
def test_a_run_goes_on_wherever_it_was_moved_and_whatever_it_is_called(copy, tmp_path, cli):
    moved = copy.rename(tmp_path / "run #2: 2024")
    for target in (str(moved), str(moved / "config.yaml"), moved.name):
        before = len((moved / "journal.jsonl").read_bytes())
        sealed = journal.read(moved / "journal.jsonl").sealed
        done = cli("train", target, "--resume", "-s", f"es.num_generations={sealed + 1}")
        assert done.code == 0, done.err
        assert len((moved / "journal.jsonl").read_bytes()) > before
    assert [p.name for p in tmp_path.iterdir()] == [moved.name]


@pytest.mark.slow
def test_a_run_without_its_config_says_what_to_give(copy, cli):
    (copy / "config.yaml").unlink()
    done = cli("train", copy, "--resume")
    assert done.code == 2 and "has no config.yaml; give the config that the run was made with" in done.err


def test_a_hook_may_change_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    train(small(Path("run")), on_generation=lambda g: os.chdir(tmp_path / "elsewhere"))
    assert numbers(tmp_path / "run") == [1, 2] and not list((tmp_path / "elsewhere").iterdir())


FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB\nand more")
LOWER = "lower engine.memory_gib or engine.max_rows"
HELP = f"allocate 1 GiB; {LOWER}"


@pytest.mark.first("memory")
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (TimeoutError(), ""), (OSError(28, "No space left on device"), ""), (EvoalignError("a judge is out"), ""),
        pytest.param(FULL, f"{HELP}; ", id="memory"),
        pytest.param(MemoryError(), f"MemoryError; {LOWER}; ", id="MemoryError"),
        pytest.param(RuntimeError("can't allocate memory: error code 12"), f"12; {LOWER}; ", id="torch's on a CPU"),
    ],
)  # fmt: skip
def test_a_failure_says_what_is_kept_and_how_to_go_on(tmp_path, error, message):
    def hook(generation: evoalign.Generation) -> None:
        if generation.index == 1:
            raise error

    said = rf"{message}kept up to generation 2; resume with: evoalign train .*run --resume"
    with pytest.raises(EvoalignError, match=said):
        train(small(tmp_path / "run", 3), on_generation=hook)
    if not message:
        train(small(tmp_path / "run", 3), resume=True)


def test_out_of_memory_in_the_first_generation_is_one_line_too(tmp_path, monkeypatch):
    def full(*_: Any) -> None:
        raise FULL

    monkeypatch.setattr("evoalign.rollouts.collect", full)
    with pytest.raises(EvoalignError, match=f"{HELP}$"):
        train(small(tmp_path / "run", 3))
    assert not (tmp_path / "run").exists()


def test_an_old_run_comes_back_where_the_new_one_cannot_begin(copy, monkeypatch):
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    before = kill_points.traces(copy)
    monkeypatch.setattr(directory, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        train(small(copy, 6), overwrite=True)
    assert kill_points.traces(copy) == before and [p.name for p in copy.parent.iterdir()] == ["run"]


def test_a_run_that_lost_its_folder_before_it_began_touches_no_other(copy, monkeypatch):
    """Whoever moves a run aside keeps its lock until it is there; whoever holds a folder that went away stops."""
    first, second, inner = RunDir(copy), RunDir(copy), Path.rename
    config = from_dict(small(copy))
    first.lock()

    def rename(self: Path, target: Any) -> Path:
        with pytest.raises(RunExistsError, match="another process"):
            second.lock()
        return inner(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    first.create(config, {"format_version": 1, "who": "first"}, overwrite=True)
    monkeypatch.undo()
    assert first.is_here and first.aside is not None and not (first.aside / ".lock").exists()
    first.release()
    second.lock()
    copy.rename(copy.with_name("away"))
    with pytest.raises(RunGoneError):
        second.create(config, {"format_version": 1, "who": "second"}, overwrite=False)
    assert not copy.exists() and json.loads((copy.with_name("away") / "manifest.json").read_text())["who"] == "first"


def test_overwrite_says_where_the_old_run_went(copy):
    said = told(small(copy), overwrite=True)
    aside = next(p for p in copy.parent.iterdir() if p.name.startswith("run."))
    assert f" is now {aside}" in said
    assert numbers(aside)[-1] == 6 and numbers(copy) == [1, 2]


class Ear:
    """A tracker that notes the generations of its rows."""

    def __init__(self, heard: list[Any]) -> None:
        self.heard = heard

    def log(self, row: Any) -> None:
        self.heard.append(row["generation"])

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def test_trackers_are_told_rows_that_were_lost(copy, monkeypatch):
    heard: list[Any] = []
    monkeypatch.setattr(tracking, "create", lambda config, run, at: (heard.append(("start", at)), [Ear(heard)])[1])
    cut(copy, 7)
    rows = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join([rows[0], '{"generation": 1, "mean": 0.0}\n', rows[2][:40]]))
    go_on(copy, 5)
    assert heard == [("start", 3), 1, 2, 3, 4]


def test_a_wrong_tracker_stops_it_before_anything_is_evaluated(tmp_path, monkeypatch):
    def create(config: Any, run: Path, at: int | None) -> list[Any]:
        raise ConfigError("no login")

    out = io.StringIO()
    monkeypatch.setattr(tracking, "create", create)
    with pytest.raises(ConfigError, match="no login"):
        evoalign.train(small(tmp_path / "run"), console=Console(file=out, width=300))
    assert "evaluating the start" not in out.getvalue() and not (tmp_path / "run").exists()


FOLDERS = ("results/completions/", "figures/", "logs/")
BEGINNINGS = [  # what is there when the process dies, in the order of this release and of those before
    (".lock",),
    (".lock", ".manifest.json.tmp"),
    (".lock", "manifest.json"),
    (".lock", "manifest.json", "results/"),
    (".lock", "manifest.json", *FOLDERS, ".config.yaml.tmp"),
    (".lock", "manifest.json", *FOLDERS, "config.yaml", "results/.budget.json.tmp", "logs/tensorboard/events"),
    (".lock", "manifest.json", *FOLDERS, "config.yaml", "results/completions/before.parquet", "journal.jsonl"),
    (".lock", "trainer/"),
    (".lock", "results/completions/"),
    (".lock", *FOLDERS, ".config.yaml.tmp"),
    (".lock", *FOLDERS, "config.yaml", ".manifest.json.tmp"),
]


def lay(run: Path, names: tuple[str, ...]) -> RunDir:
    for name in names:
        file = run / name
        (file if name.endswith("/") else file.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            file.write_text('{"format_version": 1}' if name == "manifest.json" else "half")
    return RunDir(run)


@pytest.mark.parametrize("names", BEGINNINGS, ids=lambda names: names[-1])
@pytest.mark.parametrize("overwrite", [True, False])
def test_a_run_that_died_in_its_beginning_is_made_again(names, overwrite, tmp_path):
    run = lay(tmp_path / "run", names)
    run.refuse(overwrite=overwrite)
    run.lock()
    run.create(from_dict(small(run.path)), {"format_version": 1}, overwrite=overwrite)
    run.release()
    left = {p.relative_to(run.path).as_posix() for p in run.path.rglob("*")}
    assert left == {"manifest.json", "config.yaml", "results", "results/completions", "figures", "logs"}
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    "names",
    [
        ("journal.jsonl",), ("results/budget.json",),
        ("config.yaml",), ("config.yaml", "logs/"), ("logs/mine",), ("manifest.json", "results/mine.csv"),
        (*FOLDERS, "config.yaml", ".mine.tmp"), (*FOLDERS, "config.yaml", "results/evaluation.json"),
        ("manifest.json", "trainer/checkpoint-1/whole.json"), ("manifest.json", "loras/generation_0001/"),
        ("manifest.json", "metrics.jsonl"),
    ],
    ids=lambda names: names[-1],
)  # fmt: skip
def test_what_may_be_the_users_or_a_run_is_not_taken(names, tmp_path):
    run = lay(tmp_path, names)
    with pytest.raises(RunExistsError):
        run.refuse(overwrite=False)
    (tmp_path / "manifest.json").write_text('{"name": "a web page"}')
    assert not run.is_unstarted()


def test_a_manifest_of_something_else_is_not_ours_to_clear(tmp_path):
    (tmp_path / "manifest.json").write_text('{"name": "a web page"}')
    run = RunDir(tmp_path)
    assert not run.is_unstarted()
    with pytest.raises(RunExistsError, match="--overwrite"):
        run.refuse(overwrite=False)


@pytest.mark.slow
def test_a_run_that_died_in_its_beginning_comes_to_the_same_bits(six, tmp_path):
    lay(tmp_path / "run", BEGINNINGS[6])
    go_on(tmp_path / "run", 6)
    assert kill_points.traces(tmp_path / "run") == kill_points.traces(six)


@pytest.mark.first("removed", "the journal alone", "a file", others="slow")
@pytest.mark.parametrize("how", ["moved", "removed", "replaced", "the journal alone", "moved before a file is written"])
def test_a_run_whose_folder_goes_away_stops_by_name(how, tmp_path, monkeypatch):
    """Else it is the system's word for a file that is not there, and the advice to resume where nothing is."""
    run, moved, inner = tmp_path / "run", tmp_path / "moved", os.fsync

    def fsync(handle: int) -> None:
        inner(handle)
        if "file" in how and run.is_dir() and [*run.glob("results/completions/.generation_0001*")]:
            run.rename(moved)

    def hook(generation: evoalign.Generation) -> None:
        if generation.index != 0 or "file" in how:
            return
        if how == "the journal alone":
            (run / "journal.jsonl").unlink()
            return
        run.rename(moved)
        if how == "removed":
            shutil.rmtree(moved)
        if how == "replaced":
            shutil.copytree(moved, run)

    tree = small(run, 3) | {"tracking": {"completions_every": int("file" in how)}}
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(RunGoneError, match=r"run(/journal\.jsonl)? was removed, moved or replaced while"):
            train(tree, on_generation=hook)
    if how == "replaced":
        assert (run / "manifest.json").is_file() and len((run / "metrics.jsonl").read_text().splitlines()) == 1
    elif how != "the journal alone":
        assert not run.exists()
    if how.startswith("moved"):
        assert (moved / "journal.jsonl").is_file()
    if how == "moved":
        go_on(moved, 3, evaluation={})


@pytest.mark.slow
def test_a_run_of_grpo_whose_folder_goes_away_stops_by_name(tmp_path, monkeypatch):
    pytest.importorskip("trl")
    run, inner = tmp_path / "run", RunDir.append_metrics
    moves = lambda self, row: (inner(self, row), run.rename(tmp_path / "moved"))  # noqa: E731
    monkeypatch.setattr(RunDir, "append_metrics", moves)
    tree = {"output_dir": str(run), "task": {"name": "conciseness"}, "evaluation": {"max_tokens": 4}, "grpo": GRPO}
    with pytest.raises(RunGoneError, match="was removed, moved or replaced while"):
        evoalign.grpo(tree, console=QUIET)
    assert not run.exists()


def test_another_process_lock_and_run_are_left_alone(tmp_path):
    ours, theirs = RunDir(tmp_path / "run"), RunDir(tmp_path / "run")
    ours.lock()
    ours.create(from_dict(small(ours.path)), {"format_version": 1}, overwrite=False)
    ours.path.rename(tmp_path / "moved")
    theirs.lock()
    theirs.create(from_dict(small(ours.path)), {"format_version": 1}, overwrite=False)
    ours.undo()
    ours.release()
    with pytest.raises(RunExistsError, match="another process"):
        RunDir(tmp_path / "run").lock()
    assert theirs.manifest.is_file()
    theirs.release()


def pruned(monkeypatch: pytest.MonkeyPatch, run: Path, times: int) -> list[Path]:
    """The latest saved mean is replaced by a later one, so many times, each just after it was verified."""
    inner, gone = checkpoint.verify, list[Path]()

    def verify(folder: Path) -> checkpoint.Mark:
        found = inner(folder)
        if len(gone) < times and folder.parent.parent == run:
            number = len(gone) + 7
            shutil.copytree(folder, folder.with_name(f"generation_{number:04d}"))
            shutil.rmtree(folder)
            gone.append(folder)
        return found

    monkeypatch.setattr(checkpoint, "verify", verify)
    return gone


def test_a_saved_mean_that_is_pruned_meanwhile_is_read_anew(copy, tmp_path, monkeypatch):
    wanted = evoalign.evaluate(copy).measures
    for read in (lambda: evoalign.evaluate(copy).measures, lambda: export(copy, tmp_path / "to") and wanted):
        gone = pruned(monkeypatch, copy, 1)
        assert read() == wanted and len(gone) == 1
        monkeypatch.undo()
        (copy / "loras/generation_0007").rename(copy / "loras/generation_0006")
    pruned(monkeypatch, copy, 99)
    with pytest.raises(ModelError, match=r"was deleted while it was read.*checkpoint\.keep_last"):
        export(copy, tmp_path / "again")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "to"]


def test_an_export_takes_away_what_a_killed_one_left(copy, tmp_path):
    for name in (".to.tmp/half", ".to.rebuilt.tmp/mean/half"):
        (tmp_path / name).mkdir(parents=True)
    export(copy, tmp_path / "to")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "to"]


TERM, INT = signal.SIGTERM, signal.SIGINT


@pytest.mark.parametrize(
    ("signals", "raises"), [((TERM, TERM), SystemExit), ((INT, TERM), SystemExit), ((TERM, INT), KeyboardInterrupt)]
)
def test_a_second_signal_stops_at_once(signals, raises, monkeypatch):
    monkeypatch.setattr(stopping, "SAME_SECONDS", 0.0)
    with pytest.raises(raises) as raised, stopping.Stop() as stop:
        signal.raise_signal(signals[0])
        assert stop.asked == signals[0]
        signal.raise_signal(signals[1])
    assert raises is KeyboardInterrupt or raised.value.code == 128 + signal.SIGTERM  # type: ignore[union-attr]


def test_a_pair_of_signals_is_one(monkeypatch):
    monkeypatch.setattr(stopping, "SAME_SECONDS", 3600.0)
    with stopping.Stop() as stop:
        signal.raise_signal(TERM)
        signal.raise_signal(TERM)
        assert stop.asked == TERM


def test_what_is_not_there_is_said_to_be_not_there(tmp_path, cli):
    (tmp_path / "folder").mkdir()
    assert "nope does not exist; give a run directory, or a model's folder or hub name" in cli("eval", "nope").err
    assert "folder is not a run directory (config.yaml, and journal.jsonl" in cli("eval", "folder").err


def test_an_export_passes_no_words_of_python_on(copy, tmp_path, cli):
    done = cli("export", copy, "--to", copy / "config.yaml/to")
    assert done.code == 2 and f"to: Not a directory: {copy / 'config.yaml'}" in done.err and "Errno" not in done.err
    (copy / "SHA256SUMS").unlink()
    file = copy / "results/evaluation.json"
    file.write_text(json.dumps({"weights_hash": json.loads(file.read_text())["weights_hash"]}))
    done = cli("export", copy, "--to", tmp_path / "to")
    assert done.code == 2 and "evaluation.json is damaged (split)" in done.err and "KeyError" not in done.err
