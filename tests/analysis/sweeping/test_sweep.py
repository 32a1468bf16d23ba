# SPDX-License-Identifier: Apache-2.0
"""Sweeps with real child processes: grids, stops, kills, failures and the search."""

from __future__ import annotations

import io
import json
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
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
from evoalign.analysis.sweeping.cells import Folder, Run, axis, make_cells, make_run, name_of, product, read_cells
from evoalign.analysis.sweeping.children import Children
from evoalign.analysis.sweeping.search import Domain, domain, search
from evoalign.analysis.sweeping.sweep import Sweep, sweep
from evoalign.config import load, read, to_yaml
from evoalign.errors import ConfigError, DataError, RunExistsError
from evoalign.version import install

REPOSITORY = Path(__file__).parents[3]
DATA = REPOSITORY / "data" / "tasks" / "conciseness"
LONG = 120
"""Generations of a run that is caught in the middle."""

BASE: dict[str, Any] = {
    "task": {"name": "conciseness", "train_data": str(DATA / "conciseness_train.json"),
             "test_data": str(DATA / "conciseness_test.json")},
    "es": {"num_generations": 2, "population_size": 4, "sigma": 0.01, "learning_rate": 0.01},
    "evaluation": {"max_tokens": 4}, "tracking": {"completions_every": 0}, "engine": {"threads": 1},
    "checks": UNCHECKED,
}  # fmt: skip
EVALUATED = {**BASE, "evaluation": {"max_tokens": 4, "every": 1}}
VALIDATED = {"validation_data": str(DATA / "conciseness_test.json"), "validation_size": 4}
SEARCHED: dict[str, Any] = {**BASE, "task": {**BASE["task"], **VALIDATED}}
SIGMA = {"es.sigma": Domain(0.001, 0.1)}


def run(to: Path, grid: dict[str, list[Any]] | None = None, **options: Any) -> tuple[Sweep, str]:
    """A sweep in this process, and what it printed."""
    out = io.StringIO()
    options = {"jobs": 2, "gpus": None, **options}
    with runs_of_sweeps():
        done = sweep(options.pop("base", BASE), grid=grid, to=to, console=Console(file=out, width=200), **options)
    return done, out.getvalue()


def look(to: Path, trials: int, space: dict[str, Domain] = SIGMA, **options: Any) -> tuple[Sweep, str]:
    """A search in this process, and what it printed."""
    out = io.StringIO()
    base = options.pop("base", SEARCHED)
    with runs_of_sweeps():
        done = search(base, space, trials=trials, to=to, jobs=1, console=Console(file=out, width=200), **options)
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


def until_it_goes_on(run_directory: Path) -> None:
    before = rows(run_directory)
    until(lambda: rows(run_directory) > before)


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


@pytest.mark.slow
def test_stopped_or_killed_sweep_leaves_no_orphan_and_resumes(tmp_path: Path) -> None:
    to, config, grid = tmp_path / "sweep", tmp_path / "base.yaml", {"es.num_generations": [LONG]}
    log = tmp_path / "printed"
    config.write_text(yaml.safe_dump(BASE))
    name = f"num_generations={LONG}/seed_0"
    long = to / name

    def start_and_catch() -> Popen:
        """Until the long run has come further than it was."""
        words = [sys.executable, "-m", "evoalign.cli", "sweep", str(config), "--jobs=1", f"--to={to}"]
        with log.open("wb") as printed:
            process = Popen([*words, "--grid", f"es.num_generations={LONG}"], stdout=printed)
        try:
            until_it_goes_on(long)
        except BaseException:
            process.send_signal(signal.SIGKILL)  # its runs end with it
            raise
        return process

    def kill_once_it_goes_on() -> None:
        until_it_goes_on(long)
        assert Popen.latest is not None
        Popen.latest.send_signal(signal.SIGKILL)

    process = start_and_catch()
    process.send_signal(signal.SIGTERM)
    assert process.wait(240) == 128 + signal.SIGTERM
    output = log.read_text()
    assert "resume with: " in output and str(to) in output and "failed" not in output
    until(lambda: not pids_of(to))
    stopped = rows(long)
    assert 0 < stopped < LONG
    assert list(long.glob("loras/generation_*")), "it has not saved"

    process = start_and_catch()
    assert pids_of(to)
    process.send_signal(signal.SIGKILL)  # the sweep alone: its guards end the runs
    process.wait()
    until(lambda: not pids_of(to))
    orphaned = rows(long)
    assert stopped < orphaned < LONG

    killer = threading.Thread(target=kill_once_it_goes_on)
    killer.start()
    (failed,) = run(to, grid)[0].failed
    killer.join()
    assert failed.how == "killed by SIGKILL"
    assert orphaned < rows(long) < LONG

    assert started(run(to, grid)[1]) == [name]
    assert rows(long) == LONG
    assert f"resumes after generation {stopped} of {LONG}" in (to / f"logs/{name}.log").read_text()
    before = traces(long)
    assert started(run(to, grid)[1]) == []
    assert traces(long) == before


@pytest.mark.slow
def test_failed_cell_stops_no_other_and_is_retried_with_new_cells(tmp_path: Path) -> None:
    missing = "/no/such/model"
    done, output = run(tmp_path / "sweep", {"model.name": [missing, "tiny"], "es.sigma": [0.01]})
    (failed,) = done.failed
    assert failed.run.cell.settings["model.name"] == missing and failed.code == 2 and "exit code 2" in output
    assert missing in failed.tail[-1] and failed.tail[-1] in output and str(failed.log) in output
    of_model = {
        cell["settings"]["model.name"]: cell for cell in json.loads((done.path / "results.json").read_text())["cells"]
    }
    assert {name: cell["runs"][0]["state"] for name, cell in of_model.items()} == {missing: "failed", "tiny": "done"}

    # The results are those of the run.
    cell = of_model["tiny"]
    tiny = done.path / "model.name=tiny,sigma=0.01" / "seed_0"
    assert Path(cell["runs"][0]["path"]) == tiny and cell in done.cells
    evaluation = json.loads((tiny / "results" / "evaluation.json").read_text())
    assert cell["mean"]["reward"] == evaluation["after"]["reward"]
    assert cell["mean"]["start"] == evaluation["before"]["reward"]
    assert 0 <= cell["mean"]["hacked_share"] <= 1
    assert cell["mean"]["completions"] == 2 * 4 * 2  # generations, members, prompts
    assert cell["std"]["reward"] is None, "one seed has no spread"
    line = f"| `{cell['name']}` | 1 of 1 | {evaluation['after']['reward']:,.4g} |"
    assert line in (done.path / "table.md").read_text()

    # A second command.
    before = traces(tiny)
    more, output = run(done.path, {"model.name": ["tiny", missing], "es.sigma": ["1e-2"]}, seeds=[0])
    assert started(output) == [failed.run.name] == [end.run.name for end in more.failed]
    more, output = run(done.path, {"model.name": ["tiny"], "es.sigma": [0.01]}, seeds=[0, 1])
    assert started(output) == ["model.name=tiny,sigma=0.01/seed_1"] and not more.failed
    assert traces(tiny) == before
    (cell,) = [cell for cell in more.cells if cell["settings"]["model.name"] == "tiny"]
    assert [r["state"] for r in cell["runs"]] == ["done", "done"] and cell["std"]["tokens"] is not None
    with pytest.raises(ConfigError, match=r"es\.population_size is 4 in the run and 6 now; choose another folder"):
        run(done.path, base={**BASE, "es": {**BASE["es"], "population_size": 6}})


GRID = {"es.sigma": [0.1, 0.2], "es.learning_rate": [0.1], "lora.rank": [1, 2]}
AXES = ("es.sgima", "es.sigma,es.sigma", "es.sigma,es.learning_rate,lora.rank", "es.sigma,lora.alpha")


@pytest.mark.parametrize(
    ("grid", "options", "error"),
    [
        ({"es.sigma": [0.1, -1]}, {}, r"cell sigma=-1: es\.sigma"),
        ({"es.sgima": [0.1]}, {}, r"unknown setting es\.sgima; did you mean es\.sigma"),
        ({"seed": [0, 1]}, {}, "seed cannot be swept; use --seeds"),
        (None, {"seeds": [1, 1]}, "each once"),
        (
            {"es.sigma": [0.1]}, {"measure": "accuracy"},
            "--measure accuracy: task conciseness has no such measure; it has reward, ",
        ),
        *((GRID, {"axes": a.split(",")}, f"--axes {a}: .*es.sigma, es.learning_rate, lora.r") for a in AXES),
    ],
)  # fmt: skip
def test_sweep_raises_for_a_bad_value_before_writing(
    tmp_path: Path, grid: dict[str, list[Any]] | None, options: dict[str, Any], error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        run(tmp_path / "sweep", grid, **options)
    assert not (tmp_path / "sweep" / "sweep.json").exists() and ("axes" in options or not list(tmp_path.iterdir()))


def test_check_axes_accepts_two_swept_settings_and_none() -> None:
    results.check_axes(["es.sigma", "lora.rank"], [dict.fromkeys(GRID)])
    results.check_axes(None, [{}])


def test_sweep_refuses_a_folder_with_other_files_but_not_that_of_one_killed_at_its_start(tmp_path: Path) -> None:
    for name in (".lock", ".sweep.json.tmp"):
        (tmp_path / name).write_text("half")
    with Folder(tmp_path, {}, "es").locked():
        pass
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunExistsError, match="is not a sweep"), Folder(tmp_path, {}, "es").locked():
        pass
    (tmp_path / "other").mkdir()
    (tmp_path / "notes.txt").rename(tmp_path / "other/notes.txt")
    with pytest.raises(RunExistsError, match="is not a sweep"):
        run(tmp_path / "other", {"es.sigma": [0.1]})


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        (axis, "es.sigma=0.001,0.003", ("es.sigma", [0.001, 0.003])),
        (axis, "lora.target_layers=[3],[2, 3]", ("lora.target_layers", [[3], [2, 3]])),
        (axis, "space=lora,lowrank", ("space", ["lora", "lowrank"])),
        (domain, "es.sigma=0.001..0.03:log", ("es.sigma", Domain(0.001, 0.03, log=True))),
        (domain, "es.sigma=1e-3..3e-2", ("es.sigma", Domain(0.001, 0.03))),
        (domain, "es.population_size=8..64:log", ("es.population_size", Domain(8, 64, log=True))),
        (domain, "space.name=lora,lowrank", ("space.name", Domain(choices=("lora", "lowrank")))),
    ],
)
def test_axis_and_domain_parse_a_setting(parse: Callable[[str], Any], text: str, expected: tuple[str, Any]) -> None:
    assert parse(text) == expected and repr(parse(text)) == repr(expected)


VALUES, RANGE = "expected setting=value,value", "expected setting="
REVERSED = r"--search es.sigma=0.1..0.05:log: the low end is above the high end"


@pytest.mark.parametrize(
    ("parse", "text", "error"),
    [
        *((axis, text, VALUES) for text in ("es.sigma", "=1", "es.sigma=", "es.sigma=[1", "es.sigma=]")),
        *((domain, text, RANGE) for text in ("es.sigma", "es.sigma=", "es.sigma=1..1", "es.sigma=0..1:log")),
        *((domain, f"es.sigma={text}", RANGE) for text in ("1..2:lin", "0..inf", "a..b")),
        (domain, "lora.target_layers=[1],[2]", RANGE),
        (domain, "es.sigma=0.1..0.05:log", REVERSED),
    ],
)
def test_axis_and_domain_raise_for_a_bad_setting(parse: Callable[[str], Any], text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        parse(text)


def test_cells_are_named_by_parsed_settings() -> None:
    cells = make_cells(BASE, product({"es.sigma": ["1e-3", 0.001, 0.01], "lora.rank": [1]}), "es")
    assert [cell.name for cell in cells] == ["sigma=0.001,lora.rank=1", "sigma=0.01,lora.rank=1"]
    assert [cell.settings["es.sigma"] for cell in cells] == [0.001, 0.01]
    assert name_of({}, "es") == "base"
    assert name_of({"grpo.beta": 0.1, "lora.target_layers": [2, 3]}, "grpo") == "beta=0.1,lora.target_layers=2+3"
    assert name_of({"es.antithetic": True, "task.batch_size": None}, "es") == "antithetic=true,task.batch_size=none"
    odd = [name_of({"model.name": name}, "es") for name in ("../a b", "../a:b", "x" * 300, "x" * 301)]
    assert len(set(odd)) == 4 and all(len(name) <= 120 and "/" not in name for name in odd)


def test_noise_multiplier_replaces_sigma_and_grpo_cells_need_no_es_settings() -> None:
    (cell,) = make_cells(BASE, [{"es.noise_multiplier": 0.1}], "es")
    config = make_run(BASE, cell, 3, "es", Path("to")).config
    assert (config.es.sigma, config.seed, config.output_dir) == (None, 3, "to/noise_multiplier=0.1/seed_3")
    base = {key: value for key, value in BASE.items() if key != "es"}
    (cell,) = make_cells(base, [{"grpo.beta": 0.02}], "grpo")
    only = make_run(base, cell, 0, "grpo", Path("to"))
    assert (cell.name, only.steps) == ("beta=0.02", only.config.grpo.max_steps)
    with pytest.raises(ConfigError, match=r"missing setting es.*--method grpo"):
        make_cells({**base, "grpo": {}}, [{"lora.rank": 2}], "es")


def test_grpo_sweep_and_search_require_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evoalign.tracking.is_installed", lambda name: name != "trl")
    needed = re.escape(f"needs the extra grpo: {install('grpo')}")
    with pytest.raises(ConfigError, match=needed):
        look(tmp_path / "new", 1, {"grpo.learning_rate": Domain(1e-4, 1e-3)}, method="grpo")
    with pytest.raises(ConfigError, match=needed):
        run(tmp_path / "new", method="grpo")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs" / "sweeps").glob("*.yaml")), ids=lambda path: path.stem)
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
    published = {(0.0005, 0.001), (0.0005, 0.01), (0.0015, 0.001), (0.0015, 0.01), (0.001, 0.005), (0.00075, 0.0015),
                 (0.0005, 0.003)}  # fmt: skip
    assert len(pairs) == 10 and published <= pairs


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
    assert children_module.visible_gpus(None) == ["2", "3"] and children_module.visible_gpus(["1"]) == ["1"]


@pytest.mark.slow
def test_search_resumes(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    to, space = tmp_path / "sweep", {"es.sigma": Domain(0.001, 0.1, log=True)}
    assert started(look(to, 1, space)[1]) == ["trial_0000/seed_0"]
    first = traces(to / "trial_0000" / "seed_0")
    study = search_module._optuna()(to)
    study.sampler = optuna.samplers.TPESampler(seed=1)
    killed = study.ask().suggest_float("es.sigma", 0.001, 0.1, log=True)  # asked for, and then it was killed

    done, output = look(to, 2, space)
    assert started(output) == ["trial_0001/seed_0"]
    assert traces(to / "trial_0000" / "seed_0") == first
    sigmas = [cell["settings"]["es.sigma"] for cell in done.cells]
    assert sigmas[1] == killed and len(set(sigmas)) == 2
    rewards = [cell["mean"]["validation/reward"] for cell in done.cells]
    best = load([to / "best.yaml"])
    assert best == done.best and best.es.sigma == sigmas[rewards.index(max(rewards))]
    cost = json.loads((to / "results.json").read_text())["search"]
    assert (cost["trials"], cost["complete"], cost["training"]["completions"]) == (2, 2, 2 * 2 * 4 * 2)
    assert "conciseness_test.json (4 examples); the test split" in output
    assert "2 trials (0 pruned, 0 failed), 32 training completions" in output
    figure = to / "figures" / "search.png"
    assert figure.is_file() and f"figure   {figure}\n" in output
    table = (to / "table.md").read_text()
    assert "| cell | es.sigma | seeds done | reward | validation reward |" in table and table in output
    assert all(f"| `trial_{i:04d}` | {sigma:g} | 1 of 1 |" in table for i, sigma in enumerate(sigmas))

    with pytest.raises(ConfigError, match="has a sweep of another config: search is"):
        look(to, 3, {"es.sigma": Domain(0.001, 0.2, log=True)})
    with pytest.raises(ConfigError, match="has a sweep of another config: search is"):
        run(to, base=SEARCHED)


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


NO_SPLIT = r"task conciseness has none: set task\.validation_size, .*validation_data"
FEW_ROWS = r"task\.validation_size is 99, but .*conciseness_train\.json has 2 rows"


@pytest.mark.parametrize(
    ("base", "options", "exception", "error"),
    [
        (EVALUATED, {"prune": True, "measure": "accuracy"}, ConfigError, "--measure accuracy: task conciseness has no"),
        (EVALUATED, {}, ConfigError, NO_SPLIT),
        (EVALUATED, {"prune": True}, ConfigError, NO_SPLIT),
        ({**BASE, "task": {**BASE["task"], "validation_size": 99}}, {}, DataError, FEW_ROWS),
        (SEARCHED, {"prune": True}, ConfigError, r"set evaluation\.every"),
    ],
)
def test_search_raises_for_a_bad_setting_before_any_run(
    tmp_path: Path, base: dict[str, Any], options: dict[str, Any], exception: type[Exception], error: str
) -> None:
    pytest.importorskip("optuna")
    with pytest.raises(exception, match=error):
        look(tmp_path / "sweep", 2, base=base, **options)
    assert not list(tmp_path.iterdir())


def evaluated(source: Any, tmp_path: Path, **evaluation: dict[str, float]) -> Run:
    """The next trial, with these evaluations after its first generation, as the search looks at it while it runs."""
    trial = source.next()
    assert trial is not None
    (trial.path / "results").mkdir(parents=True)
    (trial.path / "metrics.jsonl").write_text(json.dumps({"generation": 0, "seconds": {}, **evaluation}) + "\n")
    children = Children(tmp_path, 1, [])
    children.running[trial.name] = SimpleNamespace(run=trial)  # type: ignore[assignment]
    source.look(children)
    return trial


def test_search_raises_for_a_measure_missing_in_evaluations(tmp_path: Path) -> None:
    """Of a task of one's own, which is asked by its runs alone."""
    study = pytest.importorskip("optuna").create_study()
    source = search_module._Search(study, SIGMA, Folder(tmp_path, EVALUATED, "es"), [0], 1, "accuracy", True)
    error = "--measure accuracy: the validation split has no such measure; it has reward"
    with pytest.raises(ConfigError, match=error):
        evaluated(source, tmp_path, evaluation={"reward": 1.0, "accuracy": 1.0}, validation={"reward": 1.0})


def test_search_and_pruner_do_not_read_the_test_split(tmp_path: Path) -> None:
    """What the test split prefers is the trial that validation likes least."""
    study = pytest.importorskip("optuna").create_study(direction="maximize")
    base = {**SEARCHED, "evaluation": EVALUATED["evaluation"]}
    source = search_module._Search(study, SIGMA, Folder(tmp_path, base, "es"), [0], 2, "reward", True)
    for test, validation in ((5.0, -5.0), (-1.0, 1.0)):
        trial = evaluated(source, tmp_path, evaluation={"reward": test}, validation={"reward": validation})
        (trial.path / "config.yaml").write_text(to_yaml(trial.config))
        before = {"before": {"reward": 0.0}}
        tree = {**before, "after": {"reward": test}, "validation": {**before, "after": {"reward": validation}}}
        (trial.path / "results/evaluation.json").write_text(json.dumps({**tree, "generation": 2}))
        source.done(trial)
    trials = study.get_trials()
    assert [trial.value for trial in trials] == [-5.0, 1.0]
    assert [trial.intermediate_values for trial in trials] == [{1: -5.0}, {1: 1.0}]
    best = source.conclude()
    assert best is not None and best.es.sigma == trials[1].params["es.sigma"]
    assert "conciseness_test.json (4 examples), on which it was chosen" in (tmp_path / "best.yaml").read_text()


def cells(*means: dict[str, float], state: str = "done", seeds: int = 1, apart: float = 0.0) -> list[dict[str, Any]]:
    """Cells whose seeds differ by `apart` from one another, each by another amount in the two cells."""
    found: list[dict[str, Any]] = []
    for i, mean in enumerate(means):
        shifts = [apart * (seed - (seeds - 1) / 2) * (-1) ** i for seed in range(seeds)]
        runs = [
            {"state": state, "seed": seed, "numbers": {name: value + shift for name, value in mean.items()}}
            for seed, shift in enumerate(shifts)
        ]
        found.append({"name": f"c{i}", "settings": {}, "runs": runs, "mean": mean, "std": {}})
    return found


def test_best_is_chosen_on_validation_or_called_optimistic() -> None:
    both = cells({"reward": 3.0, "validation/reward": 0.0}, {"reward": 1.0, "validation/reward": 2.0})
    best = results.best(both, "reward")
    assert best is not None and (best["cell"], best["chosen_on"], best["reward"]) == ("c1", "validation", 2.0)
    assert "on the validation split by mean reward: `c1`" in results.table(both, "reward")
    test = cells({"reward": 3.0}, {"reward": 1.0, "validation/reward": 2.0})
    best = results.best(test, "reward")
    assert best is not None and (best["cell"], best["chosen_on"]) == ("c0", "test")
    assert "on the test split by mean reward: `c0`" in results.table(test, "reward")
    assert "optimistic: set task.validation_size" in results.table(test, "reward")
    assert "optimistic" not in results.table(test, "reward", ["es.sigma"]), "a search has its own"
    for few, measure in ((both, "seconds"), (both[:1], "reward"), (cells({}, {}), "reward")):
        assert results.best(few, measure) is None
    assert results.best([both[0], *cells({"reward": 9.0}, state="failed")], "reward") is None


@pytest.mark.parametrize(
    ("seeds", "gap", "apart", "is_best"),
    [
        (1, 5.0, 0.0, False),
        (2, 0.003, 0.01, False),
        (4, 5.0, 0.01, False),
        (6, 0.003, 0.01, False),
        (6, 5.0, 0.01, True),
    ],
)
def test_table_names_best_cell_only_if_seeds_show_a_difference(
    seeds: int, gap: float, apart: float, is_best: bool
) -> None:
    tree = cells({"reward": 1.0}, {"reward": 1.0 + gap}, seeds=seeds, apart=apart)
    text = results.table(tree, "reward")
    assert ("Best on the test split" in text) == is_best and ("No cell is shown to be best" in text) != is_best
    best = results.best(tree, "reward")
    assert best is not None and best["next"]["cell"] == "c0" and best["next"]["difference"] == pytest.approx(gap)
