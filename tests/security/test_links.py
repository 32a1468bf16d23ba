# SPDX-License-Identifier: Apache-2.0
"""Links inside a run directory: nothing is written, replaced or deleted where they lead."""

import shutil
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import kill_points
import pytest
from rich.console import Console
from small_runs import UNCHECKED

import evoalign
from evoalign.analysis.judge.asking import Comparison, Plan, Transcript
from evoalign.analysis.sweeping.cells import make_cells
from evoalign.analysis.sweeping.children import is_busy
from evoalign.analysis.sweeping.sweep import prepare, sweep
from evoalign.engines.server.connection import Command, ServerProcess
from evoalign.errors import RunExistsError
from evoalign.rundir import files
from evoalign.rundir.directory import RunDir, saved_folders
from evoalign.rundir.files import FOLDERS, LIBRARIES, SAVED, links_in, refuse_links, refuse_links_above
from evoalign.rundir.method import JOURNAL
from evoalign.training import saving

SPACES = {"lora": "loras", "lowrank": "checkpoints", "full": "checkpoints"}
PRUNING = {"checkpoint": {"every": 1, "keep_last": 1, "keep_best": False}}
"""What a downloaded config sets to have all older means deleted."""
QUIET = Console(quiet=True)
train, grpo = partial(evoalign.train, console=QUIET), partial(evoalign.grpo, console=QUIET)
Made = Callable[[str], Path]


def small(space: str, output: Path, generations: int = 2, **sections: Any) -> dict[str, Any]:
    tree = kill_points.config(space, output)
    tree["es"] = {"sigma": 0.01, "num_generations": generations, "population_size": 4}
    return tree | {"evaluation": {"max_tokens": 4}, "checks": UNCHECKED, **PRUNING, **sections}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Made:
    folder = tmp_path_factory.mktemp("made")

    def of(space: str) -> Path:
        if not (folder / space).exists():
            train(small(space, folder / space))
        return folder / space

    return of


@pytest.fixture
def stranger(made, tmp_path) -> Path:
    return Path(shutil.copytree(made("lora"), tmp_path / "stranger"))


@pytest.fixture
def victim(made, tmp_path) -> Path:
    return victim_of(made("lora"), tmp_path)


def victim_of(run: Path, tmp_path: Path) -> Path:
    """A run of the user with several saved means, and files of the user with the names of half-written ones."""
    victim = Path(shutil.copytree(run, tmp_path / "victim"))
    for folder in (*FOLDERS, "."):
        (victim / folder).mkdir(exist_ok=True)
        (victim / folder / ".mine.tmp").write_text("mine")
    for folder in (victim / "loras", victim / "checkpoints"):
        for number in (1, 9):
            (folder / f"generation_000{number}").mkdir()
            (folder / f"generation_000{number}/mine").write_text("mine")
    return victim


def contents(folder: Path) -> dict[str, Any]:
    """Every name below a folder, with the bytes of a file and the target of a link."""
    found: dict[str, Any] = {}
    for path in folder.rglob("*"):
        value = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[path.relative_to(folder).as_posix()] = value
    return found


@contextmanager
def untouched(*folders: Path) -> Generator[None]:
    before = [contents(folder) for folder in folders]
    yield
    assert [contents(folder) for folder in folders] == before


@contextmanager
def refused(name: object, *untouched_: Path) -> Generator[None]:
    """The body raises, by this name, and leaves folders as they are."""
    with untouched(*untouched_), pytest.raises(RunExistsError, match=str(name)):
        yield


def link(place: Path, target: Path) -> Path:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(target)
    return place


# --- a run's own folders ---------------------------------------------------------------------------------------------

COMMANDS = {
    "resume": ["train", "stranger", "--resume", "-s", "es.num_generations=3"],
    "overwrite": ["train", "stranger/config.yaml", "-s", "output_dir=stranger", "--overwrite"],
    "placebo": ["placebo", "stranger", "--shuffles", "1"],
    "report": ["report", "stranger"],
}


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.first("resume")
def test_commands_refuse_a_link_in_place_of_a_folder(command, folder, stranger, victim, run):
    place = link(stranger / folder, victim / folder)
    with untouched(victim, stranger):
        done = run(*COMMANDS[command])
    assert done.code == 2 and len(done.err.splitlines()) == 1 and str(place.relative_to(stranger.parent)) in done.err


TARGETS = {"a folder": "folder", "nothing": "missing", "a file": "file", "the run itself": "run"}
LINKS = {
    **{f"{folder} to {name}": (folder, target) for folder in FOLDERS for name, target in TARGETS.items()},
    **{name: (name, "folder") for name in ("logs/tensorboard", "logs/wandb/cache", "trainer/checkpoint-2")},
    "trainer/checkpoint-2/optimizer.pt": ("trainer/checkpoint-2/optimizer.pt", "folder/thesis.txt"),
}


@pytest.mark.parametrize("name", LINKS)
def test_lock_refuses_a_link(name, tmp_path):
    place, target = LINKS[name]
    (tmp_path / "folder").mkdir()
    for file in ("file", "folder/thesis.txt"):
        (tmp_path / file).write_text("mine")
    link(tmp_path / "run" / place, tmp_path / target)
    with refused(Path(place).name, tmp_path):
        RunDir(tmp_path / "run").lock()


def test_links_in_finds_one_above_a_folder(tmp_path):
    (tmp_path / "victim/completions").mkdir(parents=True)
    place = link(tmp_path / "run/results", tmp_path / "victim")
    assert next(links_in(tmp_path / "run")) == place


def test_lock_removes_links_to_files_out_of_logs_and_takes_those_inside(tmp_path):
    """As wandb makes one, to its log in a cache; a tracker of one's own would write to the target of another."""
    (tmp_path / "mine.txt").write_text("mine")
    places = [link(tmp_path / "run/logs/wandb/run-1/logs/debug-core.log", tmp_path / "missing"),
              link(tmp_path / "run/logs/lines.txt", tmp_path / "mine.txt")]  # fmt: skip
    inside = link(tmp_path / "run/logs/wandb/latest-run", Path("run-1"))
    run = RunDir(tmp_path / "run")
    run.lock()
    run.release()
    assert not any(place.is_symlink() for place in places) and (tmp_path / "mine.txt").read_text() == "mine"
    assert inside.is_symlink()


def test_lock_refuses_a_link_in_place_of_the_journal(stranger, victim):
    place = link(stranger / JOURNAL, victim / JOURNAL)
    with refused(place.name, victim):
        train(small("lora", stranger, 3), resume=True)


def test_grpo_refuses_a_link_in_place_of_the_trainers_folder(victim, tmp_path):
    pytest.importorskip("trl")
    place = link(tmp_path / "grpo/trainer", victim / "loras")
    (tmp_path / "grpo/manifest.json").write_text('{"format_version": 1, "method": "grpo"}')
    with refused(place, victim):
        grpo({"output_dir": str(tmp_path / "grpo"), "task": {"name": "conciseness"}, "grpo": {}}, resume=True)


@pytest.mark.parametrize("space", SPACES)
def test_pruning_deletes_nothing_through_a_link(space, made, tmp_path):
    stranger, victim = Path(shutil.copytree(made(space), tmp_path / "stranger")), victim_of(made(space), tmp_path)
    link(stranger / SPACES[space], victim / SPACES[space])
    with refused(SPACES[space], victim):
        train(small(space, stranger, 3), resume=True)
    with refused(SPACES[space], victim):
        saving.retain(RunDir(stranger), evoalign.Config.model_validate(small(space, stranger)))
    assert len(saved_folders(victim)) > 1


@pytest.mark.parametrize("folder", ["loras", "results", "figures"])
def test_a_folder_that_becomes_a_link_during_a_run_ends_it(folder, victim, tmp_path):
    def swap(generation: evoalign.Generation) -> None:
        if generation.index == 1:
            while not saved_folders(tmp_path / "run"):  # a thread writes the mean of the generation before
                time.sleep(0.01)
            link(tmp_path / "run" / folder, victim / folder)

    with refused(folder, victim):
        train(small("lora", tmp_path / "run", 3), on_generation=swap)


def test_a_run_directory_may_be_a_link(stranger, tmp_path):
    there = stranger.rename(tmp_path / "disk")
    link(tmp_path / "run", there)
    train(small("lora", tmp_path / "run", 3), resume=True)
    assert [folder.name for folder in saved_folders(there)] == ["generation_0003"]
    assert (tmp_path / "run").is_symlink()


# --- other writers ---------------------------------------------------------------------------------------------------

OUTPUTS = {
    "analyze": ["analyze", "hacking", "stranger", "--to", "{}"],
    "analyze below": ["analyze", "hacking", "stranger", "--to", "{}/below"],
    "compare": ["compare", "stranger", "stranger", "--to", "{}"],
    "eval": ["eval", "stranger", "--output", "{}/eval.json"], "export": ["export", "stranger", "--to", "{}/export"],
    "judge": ["judge", "rate", "judgments.jsonl", "--to", "{}"],
    "placebo": ["placebo", "stranger", "--shuffles", "1", "--generation", "1", "--json", "{}/placebo.json"],
    "replay": ["replay", "stranger", "--to", "{}/mean"], "report": ["report", "stranger", "--to", "{}/report.html"],
}  # fmt: skip


@pytest.mark.parametrize("folder", ["analysis", "results/mine"])
@pytest.mark.parametrize("command", OUTPUTS)
def test_outputs_below_a_link_in_a_run_are_refused(command, folder, stranger, victim, run):
    place = link(stranger / folder, victim / "results")
    with untouched(victim):
        done = run(*(word.format(f"stranger/{folder}") for word in OUTPUTS[command]))
    assert done.code == 2 and str(place) in done.err


WRITERS: dict[str, Callable[[Path], object]] = {
    "write_text": lambda folder: files.write_text(folder / "evaluation.json", "theirs"),
    "make_folder": lambda folder: files.make_folder(folder / "new"),
    "remove_whole": lambda folder: files.remove_whole(folder / "generation_0001"),
    "filled": lambda folder: files.filled(folder / "generation_0001").__enter__(),
    "scratch": lambda folder: files.scratch(folder / "generation_0001").__enter__(),
}


@pytest.mark.parametrize("name", WRITERS)
def test_writers_refuse_a_link_above_their_file(name, stranger, victim):
    with refused(link(stranger / "loras", victim / "loras"), victim):
        WRITERS[name](stranger / "loras")


@pytest.mark.parametrize("temporary", [".generation_0002.tmp", ".generation_0002.gone.tmp"])
def test_a_mean_is_replaced_next_to_a_link_that_looks_half_written(temporary, stranger, victim):
    link(stranger / "loras" / temporary, victim / "loras")
    with untouched(victim), files.filled(stranger / "loras/generation_0002") as folder:
        (folder / "new").touch()
    assert [path.name for path in (stranger / "loras/generation_0002").iterdir()] == ["new"]
    assert not list((stranger / "loras").glob(".*"))


@pytest.mark.parametrize("place", ["other", "results/other"])
def test_sweep_deletes_nothing_through_links_of_other_names(place, stranger, victim):
    link(stranger / place, victim)
    (stranger / "loras/.half.tmp").touch()
    with untouched(victim):
        RunDir(stranger).sweep()
    assert not (stranger / "loras/.half.tmp").exists()


def test_links_in_place_of_files_are_read_and_replaced(stranger, victim):
    names = ("report.html", "metrics.jsonl", "results/budget.json", "figures/evolution.png")
    places = [link(stranger / name, victim / name) for name in names]
    assert RunDir(stranger).read_metrics() == RunDir(victim).read_metrics() != {}
    with untouched(victim):
        train(small("lora", stranger, 3), resume=True)
    assert all(place.is_file() and not place.is_symlink() for place in places)


PLAN = Plan(("a", "b"), "judge", (Comparison("a", "b", "helpfulness", "question", True, "one", "two"),))


def test_judgments_are_not_appended_through_a_link(tmp_path):
    (tmp_path / "mine.jsonl").touch()
    transcript = Transcript(link(tmp_path / "to/judgments.jsonl", tmp_path / "mine.jsonl"), PLAN)
    link(tmp_path / "to/.judgments.jsonl.lock", tmp_path / "new")
    with transcript.opened():
        transcript.add(PLAN.comparisons[0], (1.0, 2.0), "raw", None)
    assert (tmp_path / "mine.jsonl").read_bytes() == b"" and not (tmp_path / "new").exists()
    assert len((tmp_path / "to/judgments.jsonl").read_bytes().splitlines()) == 1


def test_a_servers_log_is_not_copied_through_a_link(tmp_path):
    process = ServerProcess(Command("json.tool", []), "a server")
    place = link(tmp_path / "logs/server.log", tmp_path / "mine.log")
    process.keep_log(tmp_path / "logs")
    assert place.is_symlink() and not (tmp_path / "mine.log").exists()
    assert (tmp_path / "logs/server2.log").is_file()


@pytest.mark.parametrize(("manifest", "is_refused"), [(None, False), ('{"method": "grpo"}', True), ("damaged", True)])
def test_links_above_a_run_are_refused_only_inside_another(manifest, is_refused, tmp_path):
    project = tmp_path / "project"
    (tmp_path / "disk").mkdir()
    link(project / "results", tmp_path / "disk")
    if manifest is not None:
        (project / "manifest.json").write_text(manifest)
        (project / "config.yaml").touch()
    if is_refused:
        with pytest.raises(RunExistsError, match="results"):
            refuse_links_above(project / "results/run/config.yaml")
    else:
        files.make_folder(project / "results/run")
        assert (tmp_path / "disk/run").is_dir()


def test_manifest_of_another_program_makes_no_run(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "manifest.json").write_text('{"format_version": 2, "header": {}}')
    link(tmp_path / "out", tmp_path / "mine")
    refuse_links_above(tmp_path / "out/results.json")


# --- sweeps ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["base", "base/seed_0", "configs", "configs/base", "logs", "logs/base", "figures"])
def test_a_sweep_refuses_links_in_its_folder(place, victim, tmp_path):
    """That of a sweep which was stopped before its first run."""
    tree = small("lora", tmp_path / "unused")
    base, seeds, made = prepare(tree, [0], "es", tmp_path / "sweep")
    with made.locked():
        made.add(make_cells(base, [{}], "es"), seeds)
    link(tmp_path / "sweep" / place, victim / "results")
    with refused(place.rpartition("/")[2], victim):
        sweep(tree, seeds=[0], to=tmp_path / "sweep", jobs=1, console=QUIET)


def test_is_busy_is_false_for_a_run_that_holds_links(stranger, victim):
    link(stranger / "loras", victim / "loras")
    assert not is_busy(stranger), "a sweep would wait for it forever"


# --- the list of folders ---------------------------------------------------------------------------------------------


def unlisted(run: Path) -> list[str]:
    """The folders of a run that the central list lacks, except those below the folders of libraries."""
    names = [path.relative_to(run) for path in run.rglob("*") if path.is_dir()]
    inside = [name for name in names if name.parts[0] not in LIBRARIES or len(name.parts) == 1]
    return [name.as_posix() for name in inside if name.as_posix() not in FOLDERS and not any(map(name.match, SAVED))]


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.first("lora")
def test_every_folder_of_a_run_is_listed(space, tmp_path, run):
    path = tmp_path / "run"
    tree = small(space, path, report=True, tracking={"completions_every": 1, "backends": ["tensorboard"]})
    train(tree | {"evaluation": {"max_tokens": 4, "every": 1}})
    for words in ("placebo run --shuffles 1", "analyze hacking run --to run/analysis", "report run"):
        assert run(*words.split()).code == 0
    assert unlisted(path) == []
    refuse_links(path, whole=True)


@pytest.mark.slow
def test_every_folder_of_a_run_of_grpo_is_listed(tmp_path):
    pytest.importorskip("trl")
    run = tmp_path / "run"
    given = {"max_steps": 2, "num_generations": 2, "per_device_train_batch_size": 4, "rollouts": "engine"}
    tree = {"output_dir": str(run), "task": {"name": "conciseness"}, "evaluation": {"max_tokens": 4}, "grpo": given}
    grpo(tree | {"checkpoint": {"every": 1}, "checks": UNCHECKED})
    assert unlisted(run) == [] and (run / "trainer").is_dir()
    refuse_links(run, whole=True)
