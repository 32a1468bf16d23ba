# SPDX-License-Identifier: Apache-2.0
"""Sweeps with real child processes: grids, stops, kills, failures and the search."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from forked import Popen, runs_of_sweeps
from rich.console import Console
from small_runs import UNCHECKED

from evoalign.analysis.sweeping import children as children_module
from evoalign.analysis.sweeping import results
from evoalign.analysis.sweeping import search as search_module
from evoalign.analysis.sweeping.cells import Folder, axis, make_cells, make_run, name_of, product, read_cells
from evoalign.analysis.sweeping.children import Children
from evoalign.analysis.sweeping.search import Domain, domain, search
from evoalign.analysis.sweeping.sweep import Sweep, sweep
from evoalign.config import load, read, to_yaml
from evoalign.errors import ConfigError, DataError, RunExistsError
from evoalign.version import install

REPOSITORY = Path(__file__).parents[3]
DATA = REPOSITORY / "data" / "tasks" / "conciseness"
SHIPPED = sorted((REPOSITORY / "configs" / "sweeps").glob("*.yaml"))
LONG = 40
"""Generations of a run that is caught in the middle."""

BASE: dict[str, Any] = {
    "task": {
        "name": "conciseness",
        "train_data": str(DATA / "conciseness_train.json"),
        "test_data": str(DATA / "conciseness_test.json"),
    },
    "es": {"num_generations": 2, "population_size": 4, "sigma": 0.01, "learning_rate": 0.01},
    "evaluation": {"max_tokens": 4},
    "checks": UNCHECKED,
    "tracking": {"completions_every": 0},
    "engine": {"threads": 1},
}


def run(to: Path, grid: dict[str, list[Any]] | None = None, **options: Any) -> tuple[Sweep, str]:
    """A sweep in this process, and what it printed."""
    out = io.StringIO()
    options = {"jobs": 2, "gpus": None, **options}
    with runs_of_sweeps():
        done = sweep(options.pop("base", BASE), grid=grid, to=to, console=Console(file=out, width=200), **options)
    return done, out.getvalue()


def started(output: str) -> list[str]:
    return [line.split()[1] for line in output.splitlines() if line.startswith("starts")]


def traces(path: Path) -> dict[str, tuple[int, bytes]]:
    files = [path / "journal.jsonl", path / "results" / "evaluation.json", path / "config.yaml"]
    return {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in files}


def until(what: Callable[[], Any], seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.05)


def rows(run_directory: Path) -> int:
    file = run_directory / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def pids_of(folder: Path) -> list[int]:
    """Processes whose command line names a config of the sweep."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if "evoalign.analysis.sweeping.child" in words and str(folder) in words:
            found.append(int(entry.name))
    return found


class Command:
    """`evoalign sweep` as a process of its own, with one run that is caught in the middle."""

    def __init__(self, folder: Path) -> None:
        self.to = folder / "sweep"
        self.config = folder / "base.yaml"
        self.config.write_text(yaml.safe_dump(BASE))
        self.long = self.to / f"num_generations={LONG}" / "seed_0"
        self.words = [
            sys.executable,
            "-m",
            "evoalign.cli",
            "sweep",
            str(self.config),
            "--jobs",
            "1",
            "--to",
            str(self.to),
        ]
        self.words += ["--grid", f"es.num_generations={LONG}"]

    def start(self) -> subprocess.Popen[str]:
        self.process = subprocess.Popen(self.words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return self.process

    def start_and_catch(self) -> subprocess.Popen[str]:
        """Until the long run has come further than it was."""
        before = rows(self.long)
        process = self.start()
        until(lambda: rows(self.long) > before)
        return process


def kill_one_that_has_come_further(command: Command) -> None:
    before = rows(command.long)
    until(lambda: rows(command.long) > before)
    assert Popen.latest is not None
    Popen.latest.send_signal(signal.SIGKILL)


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    made = Command(tmp_path)
    yield made
    made.process.kill()  # where the test has failed; its runs end with it


@pytest.mark.slow
def test_stopped_or_killed_sweep_leaves_no_orphan_and_resumes(command: Command) -> None:
    process = command.start_and_catch()
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 128 + signal.SIGTERM
    assert "resume with: " in output
    assert str(command.to) in output
    assert "failed" not in output
    assert not pids_of(command.to)
    stopped = rows(command.long)
    assert 0 < stopped < LONG
    assert list(command.long.glob("loras/generation_*")), "it has not saved"

    process = command.start_and_catch()
    assert pids_of(command.to)
    process.kill()  # the sweep alone: its guards end the runs
    process.communicate()
    until(lambda: not pids_of(command.to))
    orphaned = rows(command.long)
    assert stopped < orphaned < LONG

    again = {"es.num_generations": [LONG]}
    killer = threading.Thread(target=kill_one_that_has_come_further, args=(command,))
    killer.start()
    (failed,) = run(command.to, again)[0].failed
    killer.join()
    assert failed.how == "killed by SIGKILL"
    assert orphaned < rows(command.long) < LONG

    assert started(run(command.to, again)[1]) == [f"num_generations={LONG}/seed_0"]
    assert rows(command.long) == LONG
    log = (command.to / "logs" / f"num_generations={LONG}" / "seed_0.log").read_text()
    assert f"resumes after generation {stopped} of {LONG}" in log
    long = traces(command.long)
    assert started(run(command.to, again)[1]) == []
    assert traces(command.long) == long


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Sweep, str]:
    """Two cells, one of which fails when it runs."""
    to = tmp_path_factory.mktemp("grid") / "sweep"
    return run(to, {"model.name": ["/no/such/model", "tiny"], "es.sigma": [0.01]})


@pytest.mark.slow
def test_failed_cell_does_not_stop_others(grid: tuple[Sweep, str]) -> None:
    done, output = grid
    (failed,) = done.failed
    assert failed.run.cell.settings["model.name"] == "/no/such/model"
    assert failed.code == 2
    assert "exit code 2" in output
    assert "/no/such/model" in failed.tail[-1]
    assert failed.tail[-1] in output
    assert str(failed.log) in output
    results = json.loads((done.path / "results.json").read_text())
    states = {cell["settings"]["model.name"]: cell["runs"][0]["state"] for cell in results["cells"]}
    assert states == {"/no/such/model": "failed", "tiny": "done"}


@pytest.mark.slow
def test_results_equal_those_of_the_runs(grid: tuple[Sweep, str]) -> None:
    done, _ = grid
    (cell,) = [cell for cell in done.cells if cell["settings"]["model.name"] == "tiny"]
    evaluation = json.loads((Path(cell["runs"][0]["path"]) / "results" / "evaluation.json").read_text())
    assert cell["mean"]["reward"] == evaluation["after"]["reward"]
    assert cell["mean"]["start"] == evaluation["before"]["reward"]
    assert 0 <= cell["mean"]["hacked_share"] <= 1
    assert cell["mean"]["completions"] == 2 * 4 * 2  # generations, members, prompts
    assert cell["std"]["reward"] is None, "one seed has no spread"
    assert (
        f"| `{cell['name']}` | 1 of 1 | {evaluation['after']['reward']:,.4g} |" in (done.path / "table.md").read_text()
    )


@pytest.mark.slow
def test_second_command_adds_cells_and_retries_failures(grid: tuple[Sweep, str]) -> None:
    done, _ = grid
    tiny = done.path / "model.name=tiny,sigma=0.01" / "seed_0"
    before = traces(tiny)
    (failed,) = done.failed
    both = {"model.name": ["tiny", "/no/such/model"], "es.sigma": ["1e-2"]}
    more, output = run(done.path, both, seeds=[0])
    assert started(output) == [failed.run.name]
    assert [end.run.name for end in more.failed] == [failed.run.name]
    more, output = run(done.path, {"model.name": ["tiny"], "es.sigma": [0.01]}, seeds=[0, 1])
    assert started(output) == ["model.name=tiny,sigma=0.01/seed_1"]
    assert not more.failed
    assert traces(tiny) == before
    (cell,) = [cell for cell in more.cells if cell["settings"]["model.name"] == "tiny"]
    assert [r["state"] for r in cell["runs"]] == ["done", "done"]
    assert cell["std"]["tokens"] is not None

    other = {**BASE, "es": {**BASE["es"], "population_size": 6}}
    with pytest.raises(ConfigError, match=r"es\.population_size is 4 in the run and 6 now; choose another folder"):
        run(done.path, base=other)


def test_sweep_raises_for_a_bad_value_before_writing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cell sigma=-1: es\.sigma"):
        run(tmp_path / "sweep", {"es.sigma": [0.1, -1]})
    with pytest.raises(ConfigError, match=r"unknown setting es\.sgima; did you mean es\.sigma"):
        run(tmp_path / "sweep", {"es.sgima": [0.1]})
    with pytest.raises(ConfigError, match="seed cannot be swept; use --seeds"):
        run(tmp_path / "sweep", {"seed": [0, 1]})
    with pytest.raises(ConfigError, match="each once"):
        run(tmp_path / "sweep", seeds=[1, 1])
    with pytest.raises(ConfigError, match="--measure accuracy: task conciseness has no such measure; it has reward, "):
        run(tmp_path / "sweep", {"es.sigma": [0.1]}, measure="accuracy")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "axes", ["es.sgima", "es.sigma,es.sigma", "es.sigma,es.learning_rate,lora.rank", "es.sigma,lora.alpha"]
)
def test_check_axes_requires_one_or_two_swept_settings(tmp_path: Path, axes: str) -> None:
    grid = {"es.sigma": [0.1, 0.2], "es.learning_rate": [0.1], "lora.rank": [1, 2]}
    with pytest.raises(ConfigError, match=f"--axes {axes}: .*es.sigma, es.learning_rate, lora.r"):
        run(tmp_path / "sweep", grid, axes=axes.split(","))
    assert not (tmp_path / "sweep" / "sweep.json").exists()
    results.check_axes(["es.sigma", "lora.rank"], [dict.fromkeys(grid)])
    results.check_axes(None, [{}])


def test_sweep_refuses_a_folder_with_other_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunExistsError, match="is not a sweep"):
        run(tmp_path, {"es.sigma": [0.1]})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("es.sigma=0.001,0.003", ("es.sigma", [0.001, 0.003])),
        ("lora.target_layers=[3],[2, 3]", ("lora.target_layers", [[3], [2, 3]])),
        ("space=lora,lowrank", ("space", ["lora", "lowrank"])),
    ],
)
def test_axis_parses_a_grid(text: str, expected: tuple[str, list[Any]]) -> None:
    assert axis(text) == expected


@pytest.mark.parametrize("text", ["es.sigma", "=1", "es.sigma=", "es.sigma=[1", "es.sigma=]"])
def test_axis_raises_for_a_bad_grid(text: str) -> None:
    with pytest.raises(ConfigError, match="expected setting=value,value"):
        axis(text)


def test_cells_are_named_by_parsed_settings() -> None:
    cells = make_cells(BASE, product({"es.sigma": ["1e-3", 0.001, 0.01], "lora.rank": [1]}), "es")
    assert [cell.name for cell in cells] == ["sigma=0.001,lora.rank=1", "sigma=0.01,lora.rank=1"]
    assert [cell.settings["es.sigma"] for cell in cells] == [0.001, 0.01]
    assert name_of({}, "es") == "base"
    assert name_of({"grpo.beta": 0.1, "lora.target_layers": [2, 3]}, "grpo") == "beta=0.1,lora.target_layers=2+3"
    assert name_of({"es.antithetic": True, "task.batch_size": None}, "es") == "antithetic=true,task.batch_size=none"
    odd = [name_of({"model.name": name}, "es") for name in ("../a b", "../a:b", "x" * 300, "x" * 301)]
    assert len(set(odd)) == 4
    assert all(len(name) <= 120 and "/" not in name for name in odd)


def test_noise_multiplier_replaces_sigma() -> None:
    (cell,) = make_cells(BASE, [{"es.noise_multiplier": 0.1}], "es")
    only = make_run(BASE, cell, 3, "es", Path("to"))
    assert only.config.es.sigma is None
    assert (only.config.seed, only.config.output_dir) == (3, "to/noise_multiplier=0.1/seed_3")


def test_grpo_cells_need_no_es_settings() -> None:
    base = {key: value for key, value in BASE.items() if key != "es"}
    (cell,) = make_cells(base, [{"grpo.beta": 0.02}], "grpo")
    only = make_run(base, cell, 0, "grpo", Path("to"))
    assert (cell.name, only.steps) == ("beta=0.02", only.config.grpo.max_steps)
    with pytest.raises(ConfigError, match=r"missing setting es.*--method grpo"):
        make_cells({**base, "grpo": {}}, [{"lora.rank": 2}], "es")


@pytest.mark.parametrize("space", [None, {"grpo.learning_rate": Domain(1e-4, 1e-3)}])
def test_grpo_sweep_requires_trl(
    space: dict[str, Domain] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evoalign.tracking.is_installed", lambda name: name != "trl")
    with pytest.raises(ConfigError, match=re.escape(f"needs the extra grpo: {install('grpo')}")):
        _ = look(tmp_path / "new", 1, space, method="grpo") if space else run(tmp_path / "new", method="grpo")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_cells_are_valid(path: Path) -> None:
    header = path.read_text().split("\n\n")[0]
    words = next(line for line in header.splitlines() if "evoalign sweep configs/" in line).split()
    base = REPOSITORY / words[words.index("sweep") + 1]
    assert f"--cells {path.relative_to(REPOSITORY)}" in header
    cells, sets = read_cells(path), re.findall(r"--set (\S+)", header)
    assert len(make_cells(read([base], sets), cells, "es")) == len(cells)


def test_published_grid_has_ten_cells() -> None:
    cells = read_cells(REPOSITORY / "configs" / "sweeps" / "conciseness_alpha_sigma.yaml")
    pairs = {(cell["es.learning_rate"], cell["es.sigma"]) for cell in cells}
    assert len(pairs) == 10
    published = [(0.0005, 0.001), (0.0005, 0.01), (0.0015, 0.001), (0.0015, 0.01), (0.001, 0.005), (0.00075, 0.0015),
                 (0.0005, 0.003)]  # fmt: skip
    assert set(published) <= pairs


def test_children_get_threads_and_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children = Children(tmp_path, 3, ["4", "7"])
    monkeypatch.setattr(children_module, "cores", lambda: 7)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    environments = [children._environment(slot) for slot in range(3)]
    assert [e["CUDA_VISIBLE_DEVICES"] for e in environments] == ["4", "7", "4"]
    assert environments[0]["OMP_NUM_THREADS"] == "2"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert children._environment(0)["OMP_NUM_THREADS"] == "5"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 3")
    assert children_module.visible_gpus(None) == ["2", "3"]
    assert children_module.visible_gpus(["1"]) == ["1"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("es.sigma=0.001..0.03:log", ("es.sigma", Domain(0.001, 0.03, log=True))),
        ("es.sigma=1e-3..3e-2", ("es.sigma", Domain(0.001, 0.03))),
        ("es.population_size=8..64:log", ("es.population_size", Domain(8, 64, log=True))),
        ("space.name=lora,lowrank", ("space.name", Domain(choices=("lora", "lowrank")))),
    ],
)
def test_domain_parses_a_search_space(text: str, expected: tuple[str, Domain]) -> None:
    assert domain(text) == expected
    assert repr(domain(text)) == repr(expected)


@pytest.mark.parametrize("text", ["es.sigma", "es.sigma=", "es.sigma=1..1", "es.sigma=0..1:log", "es.sigma=1..2:lin",
                                  "es.sigma=0..inf", "es.sigma=a..b", "lora.target_layers=[1],[2]"])  # fmt: skip
def test_domain_raises_for_a_bad_space(text: str) -> None:
    with pytest.raises(ConfigError, match="expected setting="):
        domain(text)


def test_domain_raises_for_a_reversed_range() -> None:
    with pytest.raises(ConfigError, match=r"--search es.sigma=0.1..0.05:log: the low end is above the high end"):
        domain("es.sigma=0.1..0.05:log")


SEARCHED: dict[str, Any] = {**BASE, "task": {**BASE["task"], "validation_data": str(DATA / "conciseness_test.json"),
                                           "validation_size": 4}}  # fmt: skip


def look(to: Path, trials: int, space: dict[str, Domain], **options: Any) -> tuple[Sweep, str]:
    out = io.StringIO()
    base = options.pop("base", SEARCHED)
    with runs_of_sweeps():
        done = search(base, space, trials=trials, to=to, jobs=1, console=Console(file=out, width=200), **options)
    return done, out.getvalue()


@pytest.mark.slow
def test_search_resumes(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    space = {"es.sigma": Domain(0.001, 0.1, log=True)}
    _, output = look(tmp_path / "sweep", 1, space)
    assert started(output) == ["trial_0000/seed_0"]
    first = traces(tmp_path / "sweep" / "trial_0000" / "seed_0")
    study = search_module._optuna()(tmp_path / "sweep")
    study.sampler = optuna.samplers.TPESampler(seed=1)
    killed = study.ask().suggest_float("es.sigma", 0.001, 0.1, log=True)  # asked for, and then it was killed

    done, output = look(tmp_path / "sweep", 2, space)
    assert started(output) == ["trial_0001/seed_0"]
    assert traces(tmp_path / "sweep" / "trial_0000" / "seed_0") == first
    sigmas = [cell["settings"]["es.sigma"] for cell in done.cells]
    assert sigmas[1] == killed
    assert len(set(sigmas)) == 2
    rewards = [cell["mean"]["validation/reward"] for cell in done.cells]
    best = load([tmp_path / "sweep" / "best.yaml"])
    assert best == done.best
    assert best.es.sigma == sigmas[rewards.index(max(rewards))]
    cost = json.loads((tmp_path / "sweep" / "results.json").read_text())["search"]
    assert (cost["trials"], cost["complete"], cost["training"]["completions"]) == (2, 2, 2 * 2 * 4 * 2)
    assert "conciseness_test.json (4 examples); the test split" in output
    assert "2 trials (0 pruned, 0 failed), 32 training completions" in output
    figure = tmp_path / "sweep" / "figures" / "search.png"
    assert figure.is_file() and f"figure   {figure}\n" in output
    table = (tmp_path / "sweep" / "table.md").read_text()
    assert "| cell | es.sigma | seeds done | reward | validation reward |" in table and table in output
    assert all(f"| `trial_{i:04d}` | {sigma:g} | 1 of 1 |" in table for i, sigma in enumerate(sigmas))

    with pytest.raises(ConfigError, match="has a sweep of another config: search is"):
        look(tmp_path / "sweep", 3, {"es.sigma": Domain(0.001, 0.2, log=True)})
    with pytest.raises(ConfigError, match="has a sweep of another config: search is"):
        run(tmp_path / "sweep", base=SEARCHED)


@pytest.mark.long
def test_lagging_trial_is_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optuna")
    monkeypatch.setattr(search_module, "STARTUP_TRIALS", 1)
    base = {**SEARCHED, "evaluation": {"max_tokens": 24, "every": 1}, "es": {**BASE["es"], "num_generations": LONG}}
    original = search_module._optuna

    def prepared() -> Any:
        def open_study(folder: Path) -> Any:
            study = original()(folder)
            for rate, generations in ((10.0, 2), (1e-9, LONG)):  # a broken model, which says less, and one that stays
                study.enqueue_trial({"es.learning_rate": rate, "es.num_generations": generations})
            return study

        return open_study

    monkeypatch.setattr(search_module, "_optuna", prepared)
    space = {"es.learning_rate": Domain(1e-9, 10.0, log=True), "es.num_generations": Domain(2, LONG)}
    done, output = look(tmp_path / "sweep", 2, space, base=base, prune=True, seeds=[0, 1])
    assert "pruned   trial_0001/seed_0" in output
    assert "trial_0001/seed_1" not in started(output)
    assert 0 < rows(done.path / "trial_0001" / "seed_0") < LONG
    assert not done.failed


def test_search_raises_for_an_unknown_measure_before_any_run(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    base = {**BASE, "evaluation": {"max_tokens": 4, "every": 1}}
    with pytest.raises(ConfigError, match="--measure accuracy: task conciseness has no such measure"):
        look(tmp_path / "sweep", 2, {"es.sigma": Domain(0.001, 0.1)}, base=base, prune=True, measure="accuracy")
    assert not list(tmp_path.iterdir())


def test_search_raises_for_a_measure_missing_in_evaluations(tmp_path: Path) -> None:
    """Of a task of one's own, which is asked by its runs alone."""
    optuna = pytest.importorskip("optuna")
    base = {**BASE, "evaluation": {"max_tokens": 4, "every": 1}}
    folder = Folder(tmp_path, base, "es")
    space = {"es.sigma": Domain(0.001, 0.1)}
    source = search_module._Search(optuna.create_study(), space, folder, [0], 1, "accuracy", True)
    asked = source.next()
    assert asked is not None
    asked.path.mkdir(parents=True)
    (asked.path / "metrics.jsonl").write_text(
        '{"generation": 0, "evaluation": {"reward": 1.0, "accuracy": 1.0}, "validation": {"reward": 1.0}}\n'
    )
    children = Children(tmp_path, 1, [])
    children.running[asked.name] = SimpleNamespace(run=asked)  # type: ignore[assignment]
    with pytest.raises(
        ConfigError, match="--measure accuracy: the validation split has no such measure; it has reward"
    ):
        source.look(children)


def test_search_requires_a_validation_split(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    space = {"es.sigma": Domain(0.001, 0.1)}
    for prune in (False, True):
        base = {**BASE, "evaluation": {"max_tokens": 4, "every": 1}}
        with pytest.raises(
            ConfigError, match=r"task conciseness has none: set task\.validation_size, .*validation_data"
        ):
            look(tmp_path / "sweep", 2, space, base=base, prune=prune)
    base = {**BASE, "task": {**BASE["task"], "validation_size": 99}}
    with pytest.raises(DataError, match=r"task\.validation_size is 99, but .*conciseness_train\.json has 2 rows"):
        look(tmp_path / "sweep", 2, space, base=base)
    assert not list(tmp_path.iterdir())


def test_search_and_pruner_do_not_read_the_test_split(tmp_path: Path) -> None:
    """What the test split prefers is the trial that validation likes least."""
    optuna = pytest.importorskip("optuna")
    base = {**SEARCHED, "evaluation": {"max_tokens": 4, "every": 1}}
    study = optuna.create_study(direction="maximize")
    source = search_module._Search(study, {"es.sigma": Domain(0.001, 0.1)}, Folder(tmp_path, base, "es"), [0], 2,
                                   "reward", True)  # fmt: skip
    children = Children(tmp_path, 1, [])
    for test, validation in ((5.0, -5.0), (-1.0, 1.0)):
        asked = source.next()
        assert asked is not None
        (asked.path / "results").mkdir(parents=True)
        row = {"generation": 0, "seconds": {}, "evaluation": {"reward": test}, "validation": {"reward": validation}}
        (asked.path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        children.running[asked.name] = SimpleNamespace(run=asked)  # type: ignore[assignment]
        source.look(children)
        del children.running[asked.name]
        (asked.path / "config.yaml").write_text(to_yaml(asked.config))
        ends = {"before": {"reward": 0.0}, "after": {"reward": test}}
        told = {**ends, "generation": 2, "validation": {**ends, "after": {"reward": validation}}}
        (asked.path / "results/evaluation.json").write_text(json.dumps(told))
        source.done(asked)
    trials = study.get_trials()
    assert [trial.value for trial in trials] == [-5.0, 1.0]
    assert [trial.intermediate_values for trial in trials] == [{1: -5.0}, {1: 1.0}]
    best = source.conclude()
    assert best is not None and best.es.sigma == trials[1].params["es.sigma"]
    assert "conciseness_test.json (4 examples), on which it was chosen" in (tmp_path / "best.yaml").read_text()


def cells(*means: dict[str, float], state: str = "done") -> list[dict[str, Any]]:
    runs = [{"state": state}]
    return [{"name": f"c{i}", "settings": {}, "runs": runs, "mean": mean, "std": {}} for i, mean in enumerate(means)]


def test_best_is_chosen_on_validation_or_called_optimistic() -> None:
    both = cells({"reward": 3.0, "validation/reward": 0.0}, {"reward": 1.0, "validation/reward": 2.0})
    best = results.best(both, "reward")
    assert best is not None and (best["cell"], best["chosen_on"], best["reward"]) == ("c1", "validation", 2.0)
    assert "Best on the validation split by mean reward: `c1`" in results.table(both, "reward")
    test = cells({"reward": 3.0}, {"reward": 1.0, "validation/reward": 2.0})
    best = results.best(test, "reward")
    assert best is not None and (best["cell"], best["chosen_on"]) == ("c0", "test")
    assert "Best on the test split by mean reward: `c0`" in results.table(test, "reward")
    assert "optimistic: set task.validation_size" in results.table(test, "reward")
    assert "optimistic" not in results.table(test, "reward", ["es.sigma"]), "a search has its own"
    for few, measure in ((both, "seconds"), (both[:1], "reward"), (cells({}, {}), "reward")):
        assert results.best(few, measure) is None
    assert results.best([both[0], *cells({"reward": 9.0}, state="failed")], "reward") is None


def test_prune_requires_evaluation_every(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set evaluation\.every"):
        look(tmp_path / "sweep", 2, {"es.sigma": Domain(0.001, 0.1)}, prune=True)


def test_lock_accepts_a_folder_of_a_sweep_killed_at_its_start(tmp_path: Path) -> None:
    for name in (".lock", ".sweep.json.tmp"):
        (tmp_path / name).write_text("half")
    folder = Folder(tmp_path, {}, "es")
    with folder.locked():
        pass
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunExistsError, match="is not a sweep"), folder.locked():
        pass
