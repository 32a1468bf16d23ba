# SPDX-License-Identifier: Apache-2.0
"""One contract for all trackers, read back from the files of the real libraries."""

from __future__ import annotations

import html
import io
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from matplotlib.image import imread
from offline_wandb import read

from evoalign import tracking
from evoalign.config import Config, from_dict
from evoalign.errors import ConfigError
from evoalign.report import figures
from evoalign.report.tables import visible
from evoalign.tracking import Tracker
from evoalign.tracking.base import step_and_values, values
from evoalign.version import install

ROWS: list[dict[str, Any]] = [
    {
        "generation": i, "mean": -4.0 + i, "zero_variance": i == 1, "tokens": None if i == 0 else 100 + i,
        "seconds": {"rollout": 1.5, "score": 0.25 * i}, "evaluation": {"reward": -2.5} if i == 2 else None,
        "diagnosis": {"verdict": "learns", "noise": {"floor": 0.125}},
    }
    for i in range(4)
]  # fmt: skip
SUMMARY = {"before": {"reward": -4.0}, "after": {"reward": -1.0}}
FINAL = {"eval/before/reward": -4.0, "eval/after/reward": -1.0, "eval/reward": -1.0}
HOSTILE = (
    "<script>alert(1)</script> | a `b` [c](javascript:d) ![e](http://f/g.png) *h* $i$\n# j\x1b[31m \\| &lt;k&gt; é"
)
ANSWERS = [tracking.Answer("What is 1 + 1?", "2", 1.0), tracking.Answer("Say nothing", HOSTILE, -0.25)]
BACKENDS = ["tensorboard", "trackio", "wandb"]
EACH = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Set no network, no login, and an empty home, which shows files left outside the run."""
    for name in [n for n in os.environ if n.startswith(("WANDB_", "TRACKIO_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / "cache"))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("drawn") / "evolution.png"
    figures.evolution([], file)
    return file


def config(run: Path, *backends: str, **settings: Any) -> Config:
    es = {"sigma": 0.01, "num_generations": 4, "population_size": 6}
    return from_dict({"output_dir": str(run), "es": es, "tracking": {"backends": list(backends), **settings}})


def report(run: Path, backend: str, rows: Sequence[Mapping[str, Any]] = ROWS, *, resumed_at: int | None = None,
           whole: bool = True, show: Path | None = None, **settings: Any) -> None:  # fmt: skip
    """Report a run, or a part of one, as training does."""
    (tracker,) = tracking.create(config(run, backend, **settings), run, resumed_at)
    if show:
        tracker.show(0, ANSWERS[:1], {})
    for row in rows:
        tracker.log(row)
    if show:
        tracker.show(4, ANSWERS, {"evolution": show})
    if whole:
        tracker.finish(SUMMARY)
    tracker.close()


# --- readers --------------------------------------------------------------------------------------------------------

Curves = dict[str, list[tuple[int, float]]]


class Recorded(NamedTuple):
    """What a run reported: points by name, config, completions by step, and the PNG of the only figure by step."""

    curves: Curves
    config: Mapping[str, Any]
    completions: dict[int, list[list[Any]]]
    figures: dict[int, bytes]


def curves_of(points: Iterable[tuple[int, Mapping[str, Any]]]) -> Curves:
    curves: Curves = {}
    for step, numbers in points:
        for name, value in numbers.items():
            curves.setdefault(name, []).append((step, value))
    return curves


def read_tensorboard(run: Path) -> Recorded:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugin_util import markdown_to_safe_html

    events = EventAccumulator(str(run / "logs/tensorboard"))
    events.Reload()
    tags = events.Tags()
    curves = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags["scalars"]}
    texts = {tag: {e.step: e.tensor_proto.string_val[0] for e in events.Tensors(tag)} for tag in tags["tensors"]}
    (tree,) = texts.get("config/text_summary", {0: b"es: {sigma: 1}"}).values()
    completions: dict[int, list[list[Any]]] = {}
    for step, text in texts.get("eval/completions/text_summary", {}).items():
        page = markdown_to_safe_html(text)
        cells = [html.unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", page)]
        completions[step] = [[*cells[i : i + 2], float(cells[i + 2])] for i in range(0, len(cells), 3)]
        row = [["<tr>", *[f"<t{kind}>"] * 3] for kind in "hd"]
        assert re.findall(r"<[a-z]+[^>]*>", page) == [
            "<table>", "<thead>", *row[0], "<tbody>", *row[1] * len(completions[step])]  # fmt: skip
    images = {e.step: e.encoded_image_string for tag in tags["images"] for e in events.Images(tag)}
    return Recorded(curves, from_dict(yaml.safe_load(tree.strip(b"`"))).model_dump(mode="json"), completions, images)


def wandb_files(folder: Path) -> list[dict[str, Any]]:
    """Read the files of a run's sessions, oldest first."""
    return [read(f) for f in sorted(folder.glob("offline-run-*/*.wandb"), key=lambda f: f.stat().st_ctime_ns)]


def read_wandb(run: Path) -> Recorded:
    sessions = wandb_files(run / "logs/wandb")
    history = [row for session in sessions for row in session["history"]]
    points = [(row["_step"], {n: v for n, v in row.items() if re.match("(train|eval|diagnosis)/(?!compl)", n)})
              for row in history]  # fmt: skip
    files = next((run / "logs/wandb").glob("offline-run-*")) / "files"
    tables = {row["_step"]: json.loads((files / row[name]).read_text()) for row in history
              if (name := "eval/completions/path") in row}  # fmt: skip
    assert all(table["columns"] == ["prompt", "completion", "reward"] for table in tables.values())
    images = {row["_step"]: (files / row[name]).read_bytes() for row in history
              if (name := "figures/evolution/path") in row}  # fmt: skip
    return Recorded(curves_of(points), sessions[-1]["config"], {s: t["data"] for s, t in tables.items()}, images)


def logs_of_trackio(run: Path) -> tuple[str, Mapping[str, Any], list[dict[str, Any]]]:
    """Return name, config and logs, read with trackio's own reader in a new process."""
    code = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as S;"
        "print(json.dumps([(n, S.get_run_config('evoalign', n), S.get_logs('evoalign', n))"
        " for n in [r['name'] if isinstance(r, dict) else r for r in S.get_runs('evoalign')]]))"
    )
    environ = {**os.environ, "TRACKIO_DIR": str(run / "logs/trackio")}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    ((name, tree, logs),) = json.loads(done.stdout)
    return name, tree, logs


def read_trackio(run: Path) -> Recorded:
    name, tree, logs = logs_of_trackio(run)
    assert name == run.name
    points = [(row["step"], {n: v for n, v in row.items() if isinstance(v, float | int) and n != "step"})
              for row in logs]  # fmt: skip
    tables = {row["step"]: row["eval/completions"]["_value"] for row in logs if "eval/completions" in row}
    completions = {s: [[r["prompt"], r["completion"], r["reward"]] for r in rows] for s, rows in tables.items()}
    media = run / "logs/trackio/media"
    images = {row["step"]: (media / row[name]["file_path"]).read_bytes() for row in logs
              if (name := "figures/evolution") in row}  # fmt: skip
    return Recorded(curves_of(points), tree, completions, images)


READERS: dict[str, Callable[[Path], Recorded]] = {
    "tensorboard": read_tensorboard, "trackio": read_trackio, "wandb": read_wandb
}  # fmt: skip


# --- the contract ---------------------------------------------------------------------------------------------------


@EACH
def test_tracker_records_numbers_config_completions_and_figures(
    backend: str, drawn: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    names = {"project": "own project", "name": "one of ours"} if backend == "wandb" else {}
    report(run, backend, show=drawn, **names)
    assert capsys.readouterr().out == ""
    found = READERS[backend](run)
    assert found.curves == curves_of([*map(step_and_values, ROWS), (4, FINAL)])
    expected = config(run, backend, **names).model_dump(mode="json")
    assert {name: found.config.get(name) for name in expected} == expected
    shown = [[a.prompt, visible(a.completion), a.reward] for a in ANSWERS]
    assert found.completions == {0: shown[:1], 4: shown}, "character by character"
    (image,) = found.figures.items()
    assert image[0] == 4 and (imread(io.BytesIO(image[1])) == imread(drawn)).all()
    assert backend == "tensorboard" or image[1] == drawn.read_bytes()
    if backend == "wandb":
        (file,) = wandb_files(run / "logs/wandb")
        assert (file["project"], file["name"], file["exit_code"]) == ("own project", "one of ours", 0)
        assert {name: file["summary"][name] for name in FINAL} == FINAL


COLUMNS = {"reward": [-1.0, 0.0, 0.0, 3.0], "cost": [2.0, 2.0, -0.5, 1.0]}


def histograms(run: Path, backend: str) -> dict[str, list[tuple[int, float, float, float]]]:
    """Step, number of values, and bounds of each histogram, by name; read from the files of the library."""
    found: dict[str, list[tuple[int, float, float, float]]] = {}
    if backend == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(run / "logs/tensorboard"), size_guidance={"histograms": 0})
        events.Reload()
        for name in events.Tags()["histograms"]:
            each = [(e.step, e.histogram_value) for e in events.Histograms(name)]
            found[name] = [(step, h.num, h.min, h.max) for step, h in each]
        return found
    rows = (
        [row for file in wandb_files(run / "logs/wandb") for row in file["history"]]
        if backend == "wandb"
        else logs_of_trackio(run)[2]
    )
    for row in rows:  # wandb joins nested names
        step = row["_step" if backend == "wandb" else "step"]
        for name in COLUMNS:
            key = f"train/distribution/{name}"
            one = row.get(key) or {field: row.get(f"{key}/{field}") for field in ("values", "bins")}
            if one["bins"]:
                found.setdefault(key, []).append((step, sum(one["values"]), one["bins"][0], one["bins"][-1]))
    return found


@EACH
def test_tracker_records_histograms_of_rewards(backend: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (tracker,) = tracking.create(config(run, backend), run, None)
    for row in ROWS:
        if row["generation"] % 3 == 0:
            tracker.distribute(row["generation"], COLUMNS)
        tracker.log(row)
    tracker.close()
    bounds = {"reward": (4, -1, 3), "cost": (4, -0.5, 2)}
    expected = {f"train/distribution/{name}": [(0, *found), (3, *found)] for name, found in bounds.items()}
    found = {name: each for name, each in histograms(run, backend).items() if name in expected}
    assert found == expected
    assert [step for step, _ in READERS[backend](run).curves["train/mean"]] == [0, 1, 2, 3]


@pytest.mark.parametrize(("backend", "resumed_at"), [("tensorboard", 1), ("trackio", 1), ("wandb", 2)])
def test_tracker_continues_its_run_with_repeated_steps_once(backend: str, resumed_at: int, tmp_path: Path) -> None:
    """The first session reports three generations; W&B, which cannot go back a step, two."""
    run = tmp_path / "run"
    report(run, backend, ROWS[: 2 if backend == "wandb" else 3], whole=False)
    if backend == "tensorboard":
        time.sleep(1)  # its files are read in the order of the seconds in their names
    report(run, backend, [{**row, "mean": 7.0} for row in ROWS[resumed_at:]], resumed_at=resumed_at)
    assert READERS[backend](run).curves["train/mean"] == [(i, -4.0 + i if i < resumed_at else 7.0) for i in range(4)]
    if backend == "tensorboard":
        assert len(list((run / "logs/tensorboard").iterdir())) == 2
    if backend == "wandb":
        first, second = wandb_files(run / "logs/wandb")
        assert first["id"] == second["id"] == (run / "logs/wandb_id").read_text().strip()
        assert (first["project"], first["name"]) == ("evoalign", "run")
        assert (first["exit_code"], second["exit_code"]) == (1, 0), "an interrupted run failed"
        assert [[row["_step"] for row in file["history"]] for file in (first, second)] == [[0, 1], [2, 3, 4]]


@pytest.mark.slow
def test_new_run_has_a_new_id(tmp_path: Path) -> None:
    for _ in range(2):
        report(tmp_path, "wandb", ROWS[:1])
    first, second = wandb_files(tmp_path / "logs/wandb")
    assert first["id"] != second["id"]


@pytest.mark.first("tensorboard", others="slow")
@EACH
def test_tracker_added_at_resume_starts(tmp_path: Path, backend: str) -> None:
    report(tmp_path / "run", backend, ROWS[2:], resumed_at=2)
    assert [value for _, value in READERS[backend](tmp_path / "run").curves["train/mean"]] == [-2.0, -1.0]


def test_a_row_is_in_the_event_file_before_the_next_one(tmp_path: Path) -> None:
    (tracker,) = tracking.create(config(tmp_path, "tensorboard"), tmp_path)
    for count, row in enumerate(ROWS, 1):
        tracker.log(row)
        assert len(read_tensorboard(tmp_path).curves["train/mean"]) == count
    tracker.close()


def test_values_are_floats_by_joined_names_without_null_text_and_lists() -> None:
    step, numbers = step_and_values(ROWS[2])
    assert step == 2 and all(type(number) is float for number in numbers.values())
    assert numbers == {"train/mean": -2.0, "train/zero_variance": 0.0, "train/tokens": 102.0,
                       "train/seconds/rollout": 1.5, "train/seconds/score": 0.5, "eval/reward": -2.5,
                       "diagnosis/noise/floor": 0.125}  # fmt: skip
    mixed = {"a": None, "b": "text", "c": [1, 2], "d": True, "e": {}, "f": {"g": {"h": 3}}}
    assert values(mixed) == {"d": 1.0, "f/g/h": 3.0}
    assert step_and_values({"generation": 7, "x": {"generation": 1}}) == (7, {"train/x/generation": 1.0})
    both = {"generation": 1, "validation": {"reward": 2}, "divergence": {"exact": 3.0}, "grpo": {"loss": 4}}
    assert step_and_values(both)[1] == {
        "eval/validation/reward": 2.0, "diagnosis/divergence/exact": 3.0, "train/grpo/loss": 4.0
    }  # fmt: skip


# --- a tracker is never worth a run ---------------------------------------------------------------------------------


class Broken:
    """A tracker that fails where configured, and keeps the names of its calls."""

    def __init__(self, *failing: str, error: BaseException) -> None:
        self.failing, self.error, self.calls = failing, error, list[str]()

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*_: Any) -> None:
            self.calls.append(name)
            if name in self.failing:
                raise self.error

        return call


FULL = OSError(28, "No space left\non device")


@pytest.mark.parametrize(
    ("failing", "error", "calls"),
    [
        (("log",), FULL, ["log", "close"]),
        (("distribute",), FULL, ["close"]),
        (("log", "close"), FULL, ["log", "close"]),
        (("finish",), FULL, ["log", "log", "finish", "close"]),
        (("close",), FULL, ["log", "log", "finish", "close", "close"]),
        ((), FULL, ["log", "log", "finish", "close"]),
        (("log", "close"), SystemExit("no use to log"), ["log", "close"]),
    ],
)
def test_failing_tracker_is_dropped_with_one_warning(
    failing: tuple[str, ...], error: BaseException, calls: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    broken: Any = Broken(*failing, error=error)
    guarded: Tracker = tracking.Guarded("broken", broken)
    guarded.distribute(0, COLUMNS)
    for _ in range(2):
        guarded.log(ROWS[0])
    guarded.finish(SUMMARY)
    guarded.close()
    guarded.close()
    assert broken.calls == ["distribute", *calls]
    assert len(caplog.messages) == (1 if failing else 0)
    reason = "No space left on device" if error is FULL else "SystemExit: no use to log"
    assert not failing or ("broken failed" in caplog.text and reason in caplog.text)


def test_keyboard_interrupt_is_not_suppressed() -> None:
    stopped: Any = Broken("log", error=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        tracking.Guarded("stopped", stopped).log(ROWS[0])


def test_tensorboard_that_cannot_write_any_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)  # the writer's thread ends by its error
    (tracker,) = tracking.create(config(tmp_path, "tensorboard"), tmp_path)
    tracker.log(ROWS[0])
    shutil.rmtree(tmp_path / "logs/tensorboard")
    (tmp_path / "logs/tensorboard").write_text("in the way")
    for row in ROWS[1:]:
        tracker.log(row)
    tracker.finish(SUMMARY)
    tracker.close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert caplog.messages[0].startswith("tensorboard failed")


def wandb_processes(parent: int) -> list[int]:
    """Return running processes of wandb that a process started."""
    found = list[int]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
        except OSError:  # ended while we looked
            continue
        state, its_parent = rest.split()[:2]
        if name.startswith("wandb") and state != "Z" and int(its_parent) == parent:
            found.append(int(stat.parent.name))
    return found


@pytest.mark.slow
def test_wandb_without_its_process_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tmp_path / "run"
    (tracker,) = tracking.create(config(run, "wandb"), run)
    tracker.log(ROWS[0])
    (core,) = wandb_processes(os.getpid())
    os.kill(core, signal.SIGKILL)
    for row in ROWS[1:]:
        tracker.log(row)
    tracker.finish(SUMMARY)
    tracker.close()
    assert [message.partition(" failed")[0] for message in caplog.messages if "left out" in message] == ["wandb"]
    report(tmp_path / "next", "wandb")
    assert len(wandb_files(tmp_path / "next/logs/wandb")[0]["history"]) == 5


# --- what is not installed, and what does not start -----------------------------------------------------------------


@pytest.mark.parametrize("missing", [*([backend] for backend in BACKENDS), ["wandb", "trackio"]], ids="-".join)
def test_missing_trackers_are_named_with_their_install_command(
    missing: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] in missing]:
        monkeypatch.delitem(sys.modules, name)
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)  # makes `import` report that there is none
    chosen = config(tmp_path / "run", *dict.fromkeys(["tensorboard", *missing]))
    for ask in (tracking.check, lambda c: tracking.create(c, tmp_path / "run")):
        named = re.escape(f"{', '.join(missing)} not installed; {install(*missing)}")
        with pytest.raises(ConfigError, match=named) as raised:
            ask(chosen)
        assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_folder_of_a_librarys_name_is_not_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evoalign_no_such_library").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not tracking.is_installed("evoalign_no_such_library") and tracking.is_installed("tensorboard")


EXITS = """
from evoalign.tracking import Tracker
class Exits(Tracker):
    def __init__(self, config, run, resumed_at): raise SystemExit('no key')
    def log(self, row): ...
"""


@pytest.mark.parametrize(
    ("backend", "message"), [("trackio", r"trackio does not start: .*registry-x"),
                             ("exits.py:Exits", r"exits.py:Exits does not start: no key")],
)  # fmt: skip
def test_tracker_that_does_not_start_is_a_config_error_and_the_others_are_closed(
    backend: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("exits.py").write_text(EXITS)
    threads = set(threading.enumerate())
    with pytest.raises(ConfigError, match=message):
        tracking.create(config(tmp_path / "run", "tensorboard", backend, project="registry-x"), tmp_path / "run")
    assert set(threading.enumerate()) <= threads


def test_create_starts_each_backend_once(tmp_path: Path) -> None:
    (tracker,) = tracking.create(config(tmp_path, "tensorboard", "tensorboard"), tmp_path)
    tracker.close()
    assert tracking.create(config(tmp_path), tmp_path) == []


# --- what a run leaves ----------------------------------------------------------------------------------------------

ALL_THREE = """
import json, os, sys, threading
from pathlib import Path
from evoalign import tracking
from evoalign.config import from_dict
run = Path(sys.argv[1])
config = from_dict({"output_dir": str(run), "es": {"sigma": 0.01, "num_generations": 2},
                    "tracking": {"backends": ["tensorboard", "wandb", "trackio"]}})
before = dict(os.environ)
trackers = tracking.create(config, run)
for tracker in trackers:
    tracker.show(0, [tracking.Answer("a", "b", 1.0)], {})
    for generation in range(2):
        tracker.log({"generation": generation, "mean": 1.0})
    tracker.show(2, [tracking.Answer("a", "b", 1.0)], {"drawn": Path(sys.argv[2])})
    tracker.finish({"after": {"reward": 1.0}})
for tracker in trackers:
    tracker.close()
alive = [t.name for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
here = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
names = [Path(f"/proc/{pid}/comm").read_text().strip() for pid in here]
print(json.dumps({"threads": alive, "children": names, "environment": dict(os.environ) == before}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="looks into /proc")
def test_trackers_leave_no_files_outside_the_run_and_no_process(
    tmp_path: Path, drawn: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("work", "temporary", "home"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    run, secret = tmp_path / "run", "a-secret-that-nobody-may-write-down"
    environ = {**os.environ, "EVOALIGN_SECRET": secret, "HF_TOKEN": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", ALL_THREE, str(run), str(drawn)], cwd=tmp_path / "work", env=environ,
                          capture_output=True, text=True, check=True, timeout=120)  # fmt: skip
    assert json.loads(done.stdout) == {"threads": [], "children": [], "environment": True}
    written = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert [p for p in written if run not in p.parents] == []
    assert {p.relative_to(run).parts[:2] for p in written} == {
        ("logs", "tensorboard"), ("logs", "wandb"), ("logs", "wandb_id"), ("logs", "trackio")}  # fmt: skip
    assert not [p for p in written if secret.encode() in p.read_bytes()]


@pytest.mark.slow
def test_two_runs_of_one_process_are_separate(tmp_path: Path) -> None:
    for name in ("first", "second"):
        report(tmp_path / name, "trackio")
    for name in ("first", "second"):
        assert len(read_trackio(tmp_path / name).curves["train/mean"]) == 4


@pytest.mark.slow
def test_open_wandb_run_of_the_user_continues(tmp_path: Path) -> None:
    import wandb as library

    (tmp_path / "own").mkdir()
    own = library.init(project="own", dir=str(tmp_path / "own"), id="own")
    try:
        own.log({"x": 1.0})
        report(tmp_path / "run", "wandb")
        assert library.run is own
        own.log({"x": 2.0})
    finally:
        own.finish()
        library.teardown()
    assert len(wandb_files(tmp_path / "run/logs/wandb")[0]["history"]) == 5
    assert [row["x"] for row in wandb_files(tmp_path / "own/wandb")[0]["history"]] == [1.0, 2.0]


UNASKED = """
import io, sys
import evoalign
from importlib.util import find_spec
from pathlib import Path
from rich.console import Console
from evoalign import tracking
from evoalign.config import from_dict
from evoalign.version import install
config = from_dict({"output_dir": sys.argv[1], "evaluation": {"max_tokens": 4}, "task": {"test_size": 2},
                    "checks": {"control_every": 0, "canary_every": 0, "perplexity": False, "placebo": 0},
                    "es": {"sigma": 0.02, "num_generations": 1, "population_size": 2}})
tracking.check(config)
assert tracking.create(config, Path(sys.argv[1]) / "unused") == []
chosen = from_dict({**config.model_dump(), "tracking": {"backends": ["tensorboard", "wandb", "trackio"]}})
tracking.check(chosen)
evoalign.train({**config.model_dump(), "output_dir": sys.argv[1] + "/run"}, console=Console(file=io.StringIO()))
assert not {name.partition(".")[0] for name in sys.modules} & {"tensorboard", "wandb", "trackio"}
import evoalign.training.resolve, evoalign.exporting.export, evoalign.preflight.doctor
assert "trl" not in sys.modules
if find_spec("trl") is not None:
    from evoalign.baselines import trainer
assert "wandb" not in sys.modules
"""


@pytest.mark.slow
def test_a_run_without_trackers_imports_none_and_evaluating_no_trl_and_grpo_no_wandb(tmp_path: Path) -> None:
    """TRL imports wandb where it finds it, and wandb makes temporary folders."""
    words, environment = [sys.executable, "-c", UNASKED, str(tmp_path)], os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.glob("*wandb*"))
