# SPDX-License-Identifier: Apache-2.0
"""Links inside a run directory: nothing is written, replaced or deleted where they lead."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kill_points
import pytest
from command_line import Run, caller
from rich.console import Console
from small_runs import UNCHECKED

import evoalign
from evoalign.analysis.judge.asking import Comparison, Plan, Transcript
from evoalign.analysis.sweeping.children import is_busy
from evoalign.analysis.sweeping.sweep import sweep
from evoalign.engines.server.connection import Command, ServerProcess
from evoalign.errors import RunExistsError
from evoalign.rundir import files
from evoalign.rundir.directory import RunDir, saved_folders
from evoalign.rundir.files import FOLDERS, LIBRARIES, SAVED, links_in, refuse_links, refuse_links_above
from evoalign.rundir.method import JOURNAL
from evoalign.training import saving

SPACES = ("lora", "lowrank", "full")
PLACES = {"lora": "loras", "lowrank": "checkpoints", "full": "checkpoints"}
PRUNING = {"checkpoint": {"every": 1, "keep_last": 1, "keep_best": False}}
"""What a downloaded config sets to have all older means deleted."""


def small(space: str, output: Path, generations: int = 2, **sections: Any) -> dict[str, Any]:
    tree = kill_points.config(space, output)
    tree["es"] = {"sigma": 0.01, "num_generations": generations, "population_size": 4}
    return tree | {"evaluation": {"max_tokens": 4}, "checks": UNCHECKED, **PRUNING, **sections}


def quiet() -> Console:
    return Console(file=io.StringIO(), width=300)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from a space to a finished run of it, trained once."""
    folder = tmp_path_factory.mktemp("made")

    def of(space: str) -> Path:
        if not (folder / space).exists():
            evoalign.train(small(space, folder / space), console=quiet())
        return folder / space

    return of


@pytest.fixture
def stranger(made: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made("lora"), tmp_path / "stranger"))


@pytest.fixture
def victim(made: Callable[[str], Path], tmp_path: Path) -> Path:
    return victim_of(made("lora"), tmp_path)


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)
    return caller(monkeypatch, capsys)


def victim_of(run: Path, tmp_path: Path) -> Path:
    """A run of the user with several saved means, and files of the user with the names of half-written ones."""
    victim = Path(shutil.copytree(run, tmp_path / "victim"))
    for folder in FOLDERS:
        (victim / folder).mkdir(exist_ok=True)
        (victim / folder / ".mine.tmp").write_text("mine")
    for folder in (victim / "loras", victim / "checkpoints"):
        for number in (1, 9):
            (folder / f"generation_000{number}").mkdir()
            (folder / f"generation_000{number}/mine").write_text("mine")
    (victim / ".mine.tmp").write_text("mine")
    return victim


def contents(folder: Path) -> dict[str, Any]:
    """Every name below a folder, with the bytes of a file and the target of a link."""
    found: dict[str, Any] = {}
    for path in folder.rglob("*"):
        value = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[path.relative_to(folder).as_posix()] = value
    return found


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
def test_commands_refuse_a_link_in_place_of_a_folder(
    command: str, folder: str, stranger: Path, victim: Path, cli: Run
) -> None:
    place = link(stranger / folder, victim / folder)
    before = contents(victim), contents(stranger)
    done = cli(*COMMANDS[command])
    assert done.code == 2 and len(done.err.splitlines()) == 1 and str(place.relative_to(stranger.parent)) in done.err
    assert (contents(victim), contents(stranger)) == before


@pytest.mark.parametrize("target", ["a folder", "nothing", "a file", "the run itself"])
@pytest.mark.parametrize("folder", FOLDERS)
def test_lock_refuses_a_link_wherever_it_leads(folder: str, target: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / folder).parent.mkdir(parents=True)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    to = {"a folder": "folder", "nothing": "missing", "a file": "file", "the run itself": "run"}[target]
    link(run / folder, tmp_path / to)
    before = contents(tmp_path)
    with pytest.raises(RunExistsError, match=folder):
        RunDir(run).lock()
    assert contents(tmp_path) == before


def test_lock_refuses_a_link_above_a_folder(tmp_path: Path) -> None:
    (tmp_path / "victim/completions").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    link(tmp_path / "run/results", tmp_path / "victim")
    assert next(links_in(tmp_path / "run")) == tmp_path / "run/results"


@pytest.mark.parametrize("name", ["logs/tensorboard", "logs/wandb/cache", "trainer/checkpoint-2",
                                  "trainer/checkpoint-2/optimizer.pt"])  # fmt: skip
def test_lock_refuses_links_out_of_the_folders_of_libraries(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("mine")
    place = link(tmp_path / "run" / name, tmp_path / ("mine" if "." not in name else "mine/thesis.txt"))
    with pytest.raises(RunExistsError, match=place.name):
        RunDir(tmp_path / "run").lock()


def test_lock_removes_links_to_files_out_of_logs(tmp_path: Path) -> None:
    """As wandb makes one, to its log in a cache; a tracker of one's own would write to the target of another."""
    (tmp_path / "mine.txt").write_text("mine")
    places = [link(tmp_path / "run/logs/wandb/run-1/logs/debug-core.log", tmp_path / "missing"),
              link(tmp_path / "run/logs/lines.txt", tmp_path / "mine.txt")]  # fmt: skip
    run = RunDir(tmp_path / "run")
    run.lock()
    run.release()
    assert not any(place.is_symlink() for place in places) and (tmp_path / "mine.txt").read_text() == "mine"


def test_manifest_of_another_program_makes_no_run(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "manifest.json").write_text('{"format_version": 2, "header": {}}')
    link(tmp_path / "out", tmp_path / "mine")
    refuse_links_above(tmp_path / "out/results.json")


def test_lock_takes_links_that_stay_in_the_folder_of_a_tracker(tmp_path: Path) -> None:
    """As wandb leaves them."""
    (tmp_path / "run/logs/wandb/run-1").mkdir(parents=True)
    (tmp_path / "run/logs/wandb/latest-run").symlink_to("run-1")
    run = RunDir(tmp_path / "run")
    run.lock()
    run.release()


def test_lock_refuses_a_link_in_place_of_the_journal(stranger: Path, victim: Path) -> None:
    place, before = link(stranger / JOURNAL, victim / JOURNAL), contents(victim)
    with pytest.raises(RunExistsError, match=place.name):
        evoalign.train(small("lora", stranger, 3), resume=True, console=quiet())
    assert contents(victim) == before


def test_grpo_refuses_a_link_in_place_of_the_trainers_folder(victim: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    run = tmp_path / "grpo"
    run.mkdir()
    (run / "manifest.json").write_text('{"format_version": 1, "method": "grpo"}')
    place, before = link(run / "trainer", victim / "loras"), contents(victim)
    with pytest.raises(RunExistsError, match=str(place)):
        tree = {"output_dir": str(run), "task": {"name": "conciseness"}, "grpo": {}}
        evoalign.grpo(tree, resume=True, console=quiet())
    assert contents(victim) == before


@pytest.mark.parametrize("space", SPACES)
def test_pruning_deletes_nothing_through_a_link(space: str, made: Callable[[str], Path], tmp_path: Path) -> None:
    stranger = Path(shutil.copytree(made(space), tmp_path / "stranger"))
    victim = victim_of(made(space), tmp_path)
    link(stranger / PLACES[space], victim / PLACES[space])
    before = contents(victim)
    with pytest.raises(RunExistsError):
        evoalign.train(small(space, stranger, 3), resume=True, console=quiet())
    config = evoalign.Config.model_validate(small(space, stranger))
    with pytest.raises(RunExistsError):
        saving.retain(RunDir(stranger), config)
    assert len(saved_folders(victim)) > 1 and contents(victim) == before


@pytest.mark.parametrize("folder", ["loras", "results", "figures"])
def test_a_folder_that_becomes_a_link_during_a_run_ends_it(folder: str, victim: Path, tmp_path: Path) -> None:
    before = contents(victim)

    def swap(generation: evoalign.Generation) -> None:
        if generation.index == 1:
            link(tmp_path / "run" / folder, victim / folder)

    with pytest.raises(RunExistsError, match=folder):
        evoalign.train(small("lora", tmp_path / "run", 3), on_generation=swap, console=quiet())
    assert contents(victim) == before


def test_a_run_directory_may_be_a_link(stranger: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    there = shutil.move(stranger, tmp_path / "disk/run")
    (tmp_path / "run").symlink_to(there)
    evoalign.train(small("lora", tmp_path / "run", 3), resume=True, console=quiet())
    assert [folder.name for folder in saved_folders(Path(there))] == ["generation_0003"]
    assert (tmp_path / "run").is_symlink()


# --- other writers ---------------------------------------------------------------------------------------------------

OUTPUTS = {
    "analyze": ["analyze", "hacking", "stranger", "--to", "{}"],
    "analyze below": ["analyze", "hacking", "stranger", "--to", "{}/below"],
    "compare": ["compare", "stranger", "stranger", "--to", "{}"],
    "eval": ["eval", "stranger", "--output", "{}/eval.json"],
    "export": ["export", "stranger", "--to", "{}/export"],
    "judge": ["judge", "rate", "judgments.jsonl", "--to", "{}"],
    "placebo": ["placebo", "stranger", "--shuffles", "1", "--generation", "1", "--json", "{}/placebo.json"],
    "replay": ["replay", "stranger", "--to", "{}/mean"],
    "report": ["report", "stranger", "--to", "{}/report.html"],
}


@pytest.mark.parametrize("folder", ["analysis", "results/mine"])
@pytest.mark.parametrize("command", OUTPUTS)
def test_outputs_below_a_link_in_a_run_are_refused(
    command: str, folder: str, stranger: Path, victim: Path, cli: Run
) -> None:
    place = link(stranger / folder, victim / "results")
    before = contents(victim)
    done = cli(*(word.format(f"stranger/{folder}") for word in OUTPUTS[command]))
    assert done.code == 2 and str(place) in done.err
    assert contents(victim) == before


WRITERS: dict[str, Callable[[Path], object]] = {
    "write_text": lambda folder: files.write_text(folder / "evaluation.json", "theirs"),
    "make_folder": lambda folder: files.make_folder(folder / "new"),
    "remove_whole": lambda folder: files.remove_whole(folder / "generation_0001"),
    "filled": lambda folder: files.filled(folder / "generation_0001").__enter__(),
    "scratch": lambda folder: files.scratch(folder / "generation_0001").__enter__(),
}


@pytest.mark.parametrize("name", WRITERS)
def test_writers_refuse_a_link_above_their_file(name: str, stranger: Path, victim: Path) -> None:
    place, before = link(stranger / "loras", victim / "loras"), contents(victim)
    with pytest.raises(RunExistsError, match=str(place)):
        WRITERS[name](stranger / "loras")
    assert contents(victim) == before


@pytest.mark.parametrize("temporary", [".generation_0002.tmp", ".generation_0002.gone.tmp"])
def test_a_mean_is_replaced_next_to_a_link_that_looks_half_written(
    temporary: str, stranger: Path, victim: Path
) -> None:
    before = contents(victim)
    link(stranger / "loras" / temporary, victim / "loras")
    with files.filled(stranger / "loras/generation_0002") as folder:
        (folder / "new").touch()
    assert [path.name for path in (stranger / "loras/generation_0002").iterdir()] == ["new"]
    assert not list((stranger / "loras").glob(".*")) and contents(victim) == before


@pytest.mark.parametrize("place", ["other", "results/other"])
def test_sweep_deletes_nothing_through_links_of_other_names(place: str, stranger: Path, victim: Path) -> None:
    link(stranger / place, victim)
    (stranger / "loras/.half.tmp").touch()
    before = contents(victim)
    RunDir(stranger).sweep()
    assert contents(victim) == before and not (stranger / "loras/.half.tmp").exists()


@pytest.mark.parametrize("name", ["report.html", "metrics.jsonl", "results/budget.json", "figures/evolution.png"])
def test_a_link_in_place_of_a_file_is_replaced(name: str, stranger: Path, victim: Path) -> None:
    place, before = link(stranger / name, victim / name), contents(victim)
    evoalign.train(small("lora", stranger, 3), resume=True, console=quiet())
    assert place.is_file() and not place.is_symlink() and contents(victim) == before


def test_reading_follows_links(stranger: Path, victim: Path) -> None:
    link(stranger / "metrics.jsonl", victim / "metrics.jsonl")
    assert RunDir(stranger).read_metrics() == RunDir(victim).read_metrics() != {}


PLAN = Plan(("a", "b"), "judge", (Comparison("a", "b", "helpfulness", "question", True, "one", "two"),))


def test_judgments_are_not_appended_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").touch()
    transcript = Transcript(link(tmp_path / "to/judgments.jsonl", tmp_path / "mine.jsonl"), PLAN)
    link(tmp_path / "to/.judgments.jsonl.lock", tmp_path / "new")
    with transcript.opened():
        transcript.add(PLAN.comparisons[0], (1.0, 2.0), "raw", None)
    assert (tmp_path / "mine.jsonl").read_bytes() == b"" and not (tmp_path / "new").exists()
    assert len((tmp_path / "to/judgments.jsonl").read_bytes().splitlines()) == 1


def test_a_servers_log_is_not_copied_through_a_link(tmp_path: Path) -> None:
    process = ServerProcess(Command("json.tool", []), "a server")
    place = link(tmp_path / "logs/server.log", tmp_path / "mine.log")
    process.keep_log(tmp_path / "logs")
    assert place.is_symlink() and not (tmp_path / "mine.log").exists()
    assert (tmp_path / "logs/server2.log").is_file()


@pytest.mark.parametrize(("manifest", "is_refused"), [(None, False), ('{"method": "grpo"}', True), ("damaged", True)])
def test_links_above_a_run_are_refused_only_inside_another(
    manifest: str | None, is_refused: bool, tmp_path: Path
) -> None:
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


# --- sweeps ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["base", "base/seed_0", "configs", "configs/base", "logs", "logs/base", "figures"])
def test_a_sweep_refuses_links_in_its_folder(place: str, victim: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    (folder / "configs").mkdir(parents=True)
    tree = small("lora", tmp_path / "unused")
    made = sweep_folder(folder, tree)
    link(made / place, victim / "results")
    before = contents(victim)
    with pytest.raises(RunExistsError, match=place.rpartition("/")[2]):
        sweep(tree, seeds=[0], to=made, jobs=1, console=quiet())
    assert contents(victim) == before


def sweep_folder(folder: Path, tree: dict[str, Any]) -> Path:
    """The folder of a sweep that was stopped before its first run."""
    from evoalign.analysis.sweeping.cells import make_cells
    from evoalign.analysis.sweeping.sweep import prepare

    base, seeds, made = prepare(tree, [0], "es", folder)
    (folder / "configs").rmdir()
    with made.locked():
        made.add(make_cells(base, [{}], "es"), seeds)
    return folder


def test_is_busy_is_false_for_a_run_that_holds_links(stranger: Path, victim: Path) -> None:
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
def test_every_folder_of_a_run_is_listed(space: str, tmp_path: Path, cli: Run) -> None:
    run = tmp_path / "run"
    tree = small(space, run, report=True, tracking={"completions_every": 1, "backends": ["tensorboard"]})
    evoalign.train(tree | {"evaluation": {"max_tokens": 4, "every": 1}}, console=quiet())
    assert cli("placebo", "run", "--shuffles", "1").code == 0
    assert cli("analyze", "hacking", "run", "--to", "run/analysis").code == 0
    assert cli("report", "run").code == 0
    assert unlisted(run) == []
    refuse_links(run, whole=True)


@pytest.mark.slow
def test_every_folder_of_a_run_of_grpo_is_listed(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    run = tmp_path / "run"
    grpo = {"max_steps": 2, "num_generations": 2, "per_device_train_batch_size": 4, "rollouts": "engine"}
    tree = {"output_dir": str(run), "task": {"name": "conciseness"}, "evaluation": {"max_tokens": 4}, "grpo": grpo}
    evoalign.grpo(tree | {"checkpoint": {"every": 1}, "checks": UNCHECKED}, console=quiet())
    assert unlisted(run) == [] and (run / "trainer").is_dir()
    refuse_links(run, whole=True)
