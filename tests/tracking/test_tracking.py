# SPDX-License-Identifier: Apache-2.0
"""Trackers, read back from the files of the real libraries."""

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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

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
TOLD = {"train/mean", "train/zero_variance", "train/tokens", "train/seconds/rollout", "train/seconds/score",
        "eval/reward", "diagnosis/noise/floor"}  # fmt: skip
SUMMARY = {"before": {"reward": -4.0}, "after": {"reward": -1.0}}
FINAL = {"eval/before/reward": -4.0, "eval/after/reward": -1.0, "eval/reward": -1.0}
STEPS = {"train/mean": [0, 1, 2, 3], "train/tokens": [1, 2, 3], "eval/reward": [2, 4]}
HOSTILE = (
    "<script>alert(1)</script> | a `b` [c](javascript:d) ![e](http://f/g.png) *h* $i$\n# j\x1b[31m \\| &lt;k&gt; é"
)
ANSWERS = [tracking.Answer("What is 1 + 1?", "2", 1.0), tracking.Answer("Say nothing", HOSTILE, -0.25)]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Set no network, no login, and an empty home, which shows files left outside the run."""
    for name in [n for n in os.environ if n.startswith(("WANDB_", "TRACKIO_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / "cache"))


def config(run: Path, *backends: str, **settings: Any) -> Config:
    es = {"sigma": 0.01, "num_generations": 4, "population_size": 6}
    return from_dict({"output_dir": str(run), "es": es, "tracking": {"backends": list(backends), **settings}})


def tell(
    run: Path, backend: str, rows: Sequence[Mapping[str, Any]], *, resumed_at: int | None = None, whole: bool = True
) -> None:
    """Report a run, or a part of one, as training does."""
    (tracker,) = tracking.create(config(run, backend), run, resumed_at)
    for row in rows:
        tracker.log(row)
    if whole:
        tracker.finish(SUMMARY)
    tracker.close()


def changed(row: Mapping[str, Any], mean: float) -> dict[str, Any]:
    return {**row, "mean": mean}


# --- a row as numbers -----------------------------------------------------------------------------------------------


def test_values_joins_names() -> None:
    step, numbers = step_and_values(ROWS[2])
    assert step == 2
    assert numbers == {"train/mean": -2.0, "train/zero_variance": 0.0, "train/tokens": 102.0,
                       "train/seconds/rollout": 1.5, "train/seconds/score": 0.5, "eval/reward": -2.5,
                       "diagnosis/noise/floor": 0.125}  # fmt: skip
    assert all(type(number) is float for number in numbers.values())


def test_values_omits_null_text_and_lists() -> None:
    assert values({"a": None, "b": "text", "c": [1, 2], "d": True, "e": {}, "f": {"g": {"h": 3}}}) == {
        "d": 1.0,
        "f/g/h": 3.0,
    }
    assert step_and_values({"generation": 7, "x": {"generation": 1}}) == (7, {"train/x/generation": 1.0})
    both = {"generation": 1, "validation": {"reward": 2}, "divergence": {"exact": 3.0}, "grpo": {"loss": 4}}
    assert step_and_values(both)[1] == {
        "eval/validation/reward": 2.0, "diagnosis/divergence/exact": 3.0, "train/grpo/loss": 4.0
    }  # fmt: skip


# --- what was reported is there ------------------------------------------------------------------------------------


def tensorboard(run: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "logs/tensorboard"))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def wandb(run: Path) -> list[dict[str, Any]]:
    from offline_wandb import read

    return [read(file) for file in sorted((run / "logs/wandb").glob("offline-run-*/*.wandb"), key=_made)]


def _made(file: Path) -> int:
    return file.stat().st_ctime_ns


def trackio(run: Path) -> list[dict[str, Any]]:
    """Read with trackio's own reader, in a new process."""
    code = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as S;"
        "print(json.dumps([{'name': n, 'config': S.get_run_config('evoalign', n), 'logs': S.get_logs('evoalign', n)}"
        " for n in [r['name'] if isinstance(r, dict) else r for r in S.get_runs('evoalign')]]))"
    )
    told = {**os.environ, "TRACKIO_DIR": str(run / "logs/trackio")}
    done = subprocess.run([sys.executable, "-c", code], env=told, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_tensorboard_reads_back(tmp_path: Path) -> None:
    tell(tmp_path / "run", "tensorboard", ROWS)
    scalars = tensorboard(tmp_path / "run")
    assert scalars.keys() == TOLD | FINAL.keys()
    assert scalars["train/mean"] == [(0, -4.0), (1, -3.0), (2, -2.0), (3, -1.0)]
    assert scalars["train/zero_variance"] == [(0, 0.0), (1, 1.0), (2, 0.0), (3, 0.0)]
    assert {name: [step for step, _ in scalars[name]] for name in STEPS} == STEPS
    assert (scalars["eval/before/reward"], scalars["eval/reward"]) == ([(4, -4.0)], [(2, -2.5), (4, -1.0)])


def test_a_row_is_in_the_event_file_before_the_next_one(tmp_path: Path) -> None:
    (tracker,) = tracking.create(config(tmp_path / "run", "tensorboard"), tmp_path / "run")
    for count, row in enumerate(ROWS, 1):
        tracker.log(row)
        assert len(tensorboard(tmp_path / "run")["train/mean"]) == count
    tracker.close()


def test_the_config_is_in_the_event_file(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tell(tmp_path / "run", "tensorboard", ROWS)
    events = EventAccumulator(str(tmp_path / "run/logs/tensorboard"))
    events.Reload()
    (text,) = events.Tensors("config/text_summary")
    assert b"population_size: 6" in text.tensor_proto.string_val[0]


@pytest.mark.slow
def test_wandb_reads_back(tmp_path: Path) -> None:
    run = tmp_path / "run"
    tell(run, "wandb", ROWS)
    (told,) = wandb(run)
    assert (told["project"], told["name"], told["exit_code"]) == ("evoalign", "run", 0)
    assert told["id"] == (run / "logs/wandb_id").read_text().strip()
    expected = config(run, "wandb").model_dump(mode="json")
    assert {name: told["config"].get(name) for name in expected} == expected
    history = {row["_step"]: row for row in told["history"]}
    assert len(told["history"]) == 5 and list(history) == [0, 1, 2, 3, 4]
    for row in ROWS:
        step, numbers = step_and_values(row)
        assert {name: value for name, value in history[step].items() if not name.startswith("_")} == numbers
    assert {name: value for name, value in history[4].items() if not name.startswith("_")} == FINAL
    assert {name: told["summary"][name] for name in FINAL} == FINAL


def test_trackio_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    tell(run, "trackio", ROWS)
    assert capsys.readouterr().out == ""
    (told,) = trackio(run)
    assert told["name"] == "run"
    expected = config(run, "trackio").model_dump(mode="json")
    assert {name: told["config"].get(name) for name in expected} == expected
    logs = [{k: v for k, v in row.items() if k != "timestamp"} for row in told["logs"]]
    assert logs == [*({**step_and_values(row)[1], "step": row["generation"]} for row in ROWS), {**FINAL, "step": 4}]


# --- completions and figures ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("drawn") / "evolution.png"
    figures.evolution([], file)
    return file


def show(run: Path, backend: str, drawn: Path) -> None:
    (tracker,) = tracking.create(config(run, backend), run)
    tracker.show(0, ANSWERS[:1], {})
    for row in ROWS:
        tracker.log(row)
    tracker.show(4, ANSWERS, {"evolution": drawn})
    tracker.finish(SUMMARY)
    tracker.close()


def test_tensorboard_shows_completions_as_they_are_and_figures(tmp_path: Path, drawn: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugin_util import markdown_to_safe_html

    show(tmp_path / "run", "tensorboard", drawn)
    events = EventAccumulator(str(tmp_path / "run/logs/tensorboard"))
    events.Reload()
    first, last = events.Tensors("eval/completions/text_summary")
    assert (first.step, last.step) == (0, 4)
    page = markdown_to_safe_html(last.tensor_proto.string_val[0])
    assert re.findall(r"<[a-z]+[^>]*>", page) == ["<table>", "<thead>", *["<tr>", *["<th>"] * 3], "<tbody>",
                                                *["<tr>", *["<td>"] * 3] * 2]  # fmt: skip
    (shown,) = re.findall(r"<tr>\s*<td>Say nothing</td>\s*<td>(.*?)</td>\s*<td>-0.25</td>", page)
    assert html.unescape(shown) == visible(HOSTILE), "character by character"
    (image,) = events.Images("figures/evolution")
    assert image.step == 4
    assert (imread(io.BytesIO(image.encoded_image_string)) == imread(drawn)).all()


def test_wandb_has_completions_and_figures(tmp_path: Path, drawn: Path) -> None:
    show(tmp_path / "run", "wandb", drawn)
    (told,) = wandb(tmp_path / "run")
    history = {row["_step"]: row for row in told["history"]}
    assert list(history) == [0, 1, 2, 3, 4] and history[0]["train/mean"] == -4.0
    assert [row["eval/completions/nrows"] for row in (history[0], history[4])] == [1, 2]
    files = next((tmp_path / "run/logs/wandb").glob("offline-run-*")) / "files"
    table = json.loads((files / history[4]["eval/completions/path"]).read_text())
    assert table["columns"] == ["prompt", "completion", "reward"]
    assert table["data"] == [["What is 1 + 1?", "2", 1.0], ["Say nothing", visible(HOSTILE), -0.25]]
    assert (files / history[4]["figures/evolution/path"]).read_bytes() == drawn.read_bytes()


def test_trackio_has_completions_and_figures(tmp_path: Path, drawn: Path) -> None:
    show(tmp_path / "run", "trackio", drawn)
    (told,) = trackio(tmp_path / "run")
    tables = {row["step"]: row["eval/completions"] for row in told["logs"] if "eval/completions" in row}
    assert {step: len(table["_value"]) for step, table in tables.items()} == {0: 1, 4: 2}
    assert tables[4]["_value"][1] == {"prompt": "Say nothing", "completion": visible(HOSTILE), "reward": -0.25}
    (image,) = (row["figures/evolution"] for row in told["logs"] if "figures/evolution" in row)
    assert (tmp_path / "run/logs/trackio/media" / image["file_path"]).read_bytes() == drawn.read_bytes()


def test_interrupted_run_is_failed_in_wandb(tmp_path: Path) -> None:
    tell(tmp_path / "run", "wandb", ROWS[:2], whole=False)
    (told,) = wandb(tmp_path / "run")
    assert told["exit_code"] == 1
    assert [row["_step"] for row in told["history"]] == [0, 1]


def test_project_and_name_are_those_of_the_config(tmp_path: Path) -> None:
    chosen = config(tmp_path / "run", "wandb", project="own project", name="one of ours")
    (tracker,) = tracking.create(chosen, tmp_path / "run")
    tracker.close()
    (told,) = wandb(tmp_path / "run")
    assert (told["project"], told["name"]) == ("own project", "one of ours")


# --- resume ---------------------------------------------------------------------------------------------------------


def test_tensorboard_shows_repeated_steps_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    tell(run, "tensorboard", ROWS[:3], whole=False)
    tell(run, "tensorboard", [changed(row, 7.0) for row in ROWS[1:]], resumed_at=1)
    assert len(list((run / "logs/tensorboard").iterdir())) == 2
    assert tensorboard(run)["train/mean"] == [(0, -4.0), (1, 7.0), (2, 7.0), (3, 7.0)]


def test_trackio_continues_its_run_with_repeated_steps_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    tell(run, "trackio", ROWS[:3], whole=False)
    tell(run, "trackio", [changed(row, 7.0) for row in ROWS[1:]], resumed_at=1)
    (told,) = trackio(run)
    steps = [(row["step"], row["train/mean"]) for row in told["logs"] if "train/mean" in row]
    assert steps == [(0, -4.0), (1, 7.0), (2, 7.0), (3, 7.0)]


def test_wandb_continues_under_the_same_id(tmp_path: Path) -> None:
    run = tmp_path / "run"
    tell(run, "wandb", ROWS[:2], whole=False)
    tell(run, "wandb", ROWS[2:], resumed_at=2)
    first, second = wandb(run)
    assert first["id"] == second["id"]
    assert [row["_step"] for row in first["history"]] == [0, 1]
    assert [row["_step"] for row in second["history"]] == [2, 3, 4]


@pytest.mark.slow
def test_new_run_has_a_new_id(tmp_path: Path) -> None:
    run = tmp_path / "run"
    tell(run, "wandb", ROWS[:1])
    tell(run, "wandb", ROWS[:1])
    first, second = wandb(run)
    assert first["id"] != second["id"]


@pytest.mark.first("tensorboard")
@pytest.mark.parametrize("backend", ["tensorboard", "wandb", "trackio"])
def test_tracker_added_at_resume_starts(tmp_path: Path, backend: str) -> None:
    tell(tmp_path / "run", backend, ROWS[2:], resumed_at=2)
    means = {
        "tensorboard": lambda run: [value for _, value in tensorboard(run)["train/mean"]],
        "wandb": lambda run: [r["train/mean"] for r in wandb(run)[0]["history"] if "train/mean" in r],
        "trackio": lambda run: [r["train/mean"] for r in trackio(run)[0]["logs"] if "train/mean" in r],
    }
    assert means[backend](tmp_path / "run") == [-2.0, -1.0]


# --- a tracker is never worth a run ---------------------------------------------------------------------------------


class Broken:
    """A tracker that fails where configured, and keeps what it receives."""

    def __init__(self, *failing: str) -> None:
        self.failing, self.told = failing, list[str]()

    def _tell(self, what: str) -> None:
        self.told.append(what)
        if what in self.failing:
            raise OSError(28, "No space left\non device")

    def log(self, row: Mapping[str, Any]) -> None:
        self._tell("log")

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._tell("finish")

    def close(self) -> None:
        self._tell("close")


@pytest.mark.parametrize(
    ("failing", "told"),
    [
        (("log",), ["log", "close"]),
        (("log", "close"), ["log", "close"]),
        (("finish",), ["log", "log", "finish", "close"]),
        (("close",), ["log", "log", "finish", "close", "close"]),
        ((), ["log", "log", "finish", "close"]),
    ],
)
def test_failing_tracker_is_dropped_with_one_warning(
    failing: tuple[str, ...], told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    broken = Broken(*failing)
    guarded: Tracker = tracking.Guarded("broken", broken)
    for _ in range(2):
        guarded.log(ROWS[0])
    guarded.finish(SUMMARY)
    guarded.close()
    guarded.close()
    assert broken.told == told
    assert len(caplog.messages) == (1 if failing else 0)
    if failing:
        assert "broken failed" in caplog.text and "No space left on device" in caplog.text


def test_tracker_that_exits_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    class Exits(Broken):
        def _tell(self, what: str) -> None:
            super()._tell(what)
            sys.exit(f"no use to {what}")

    exits = Exits()
    tracking.Guarded("exits", exits).log(ROWS[0])
    assert exits.told == ["log", "close"] and "SystemExit: no use to log" in caplog.text


def test_tracker_that_exits_at_start_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "exits.py").write_text(
        "from evoalign.tracking import Tracker\n"
        "class Exits(Tracker):\n"
        "    def __init__(self, config, run, resumed_at): raise SystemExit('no key')\n"
        "    def log(self, row): ...\n"
    )
    with pytest.raises(ConfigError, match=r"exits.py:Exits does not start: no key"):
        tracking.create(config(tmp_path / "run", f"{tmp_path / 'exits.py'}:Exits"), tmp_path / "run")


def test_keyboard_interrupt_is_not_suppressed() -> None:
    class Stopped(Broken):
        def log(self, row: Mapping[str, Any]) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tracking.Guarded("stopped", Stopped()).log(ROWS[0])


def test_tensorboard_that_cannot_write_any_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)  # the writer's thread ends by its error
    run = tmp_path / "run"
    (tracker,) = tracking.create(config(run, "tensorboard"), run)
    tracker.log(ROWS[0])
    shutil.rmtree(run / "logs/tensorboard")
    (run / "logs/tensorboard").write_text("in the way")
    for row in ROWS[1:]:
        tracker.log(row)
    tracker.finish(SUMMARY)
    tracker.close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert caplog.messages[0].startswith("tensorboard failed")


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
    tell(tmp_path / "next", "wandb", ROWS)
    assert len(wandb(tmp_path / "next")[0]["history"]) == 5


# --- what is not installed, and what does not start -----------------------------------------------------------------


@pytest.mark.parametrize("backend", ["tensorboard", "wandb", "trackio"])
def test_missing_trackers_are_named_with_their_install_command(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == backend]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, backend, None)  # what makes `import` say that there is none
    for ask in (tracking.check, lambda c: tracking.create(c, tmp_path / "run")):
        with pytest.raises(ConfigError, match=re.escape(install(backend))) as raised:
            ask(config(tmp_path / "run", backend))
        assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_all_missing_trackers_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=re.escape(f"wandb, trackio not installed; {install('wandb', 'trackio')}")):
        tracking.check(config(tmp_path, "tensorboard", "wandb", "trackio"))


def test_folder_of_a_librarys_name_is_not_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evoalign_no_such_library").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not tracking.is_installed("evoalign_no_such_library")
    assert tracking.is_installed("tensorboard")


def test_tracker_that_does_not_start_is_a_config_error(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    with pytest.raises(ConfigError, match=r"trackio does not start: .*registry-x"):
        tracking.create(config(tmp_path / "run", "tensorboard", "trackio", project="registry-x"), tmp_path / "run")
    assert set(threading.enumerate()) <= threads


def test_duplicate_backend_is_started_once(tmp_path: Path) -> None:
    trackers = tracking.create(config(tmp_path / "run", "tensorboard", "tensorboard"), tmp_path / "run")
    assert len(trackers) == 1
    trackers[0].close()


def test_create_without_backends_returns_nothing(tmp_path: Path) -> None:
    assert tracking.create(config(tmp_path / "run"), tmp_path / "run") == []


# --- what a run leaves ----------------------------------------------------------------------------------------------


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


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Create a working folder, a temporary folder and a home, which must stay empty."""
    for name in ("work", "temporary", "home"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    yield tmp_path


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
def test_trackers_leave_no_files_outside_the_run_and_no_process(folders: Path, drawn: Path) -> None:
    run = folders / "run"
    secret = "a-secret-that-nobody-may-write-down"
    told = {**os.environ, "EVOALIGN_SECRET": secret, "HF_TOKEN": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", ALL_THREE, str(run), str(drawn)], cwd=folders / "work", env=told,
                          capture_output=True, text=True, check=True, timeout=120)  # fmt: skip
    assert json.loads(done.stdout) == {"threads": [], "children": [], "environment": True}
    outside = [p for p in folders.rglob("*") if p.is_file() and run not in p.parents]
    assert outside == []
    written = [p for p in run.rglob("*") if p.is_file()]
    assert {p.relative_to(run).parts[:2] for p in written} == {
        ("logs", "tensorboard"), ("logs", "wandb"), ("logs", "wandb_id"), ("logs", "trackio")}  # fmt: skip
    assert not [p for p in written if secret.encode() in p.read_bytes()]


@pytest.mark.slow
def test_two_runs_of_one_process_are_separate(tmp_path: Path) -> None:
    for name in ("first", "second"):
        tell(tmp_path / name, "trackio", ROWS)
    for name in ("first", "second"):
        (told,) = trackio(tmp_path / name)
        assert told["name"] == name and len(told["logs"]) == 5


@pytest.mark.slow
def test_open_wandb_run_of_the_user_continues(tmp_path: Path) -> None:
    import wandb as library

    (tmp_path / "own").mkdir()
    own = library.init(project="own", dir=str(tmp_path / "own"), id="own")
    try:
        own.log({"x": 1.0})
        tell(tmp_path / "run", "wandb", ROWS)
        assert library.run is own
        own.log({"x": 2.0})
    finally:
        own.finish()
        library.teardown()
    (told,) = wandb(tmp_path / "run")
    assert len(told["history"]) == 5
    from offline_wandb import read

    (file,) = (tmp_path / "own/wandb").glob("offline-run-*/*.wandb")
    assert [row["x"] for row in read(file)["history"]] == [1.0, 2.0]


# --- nothing is imported unasked ------------------------------------------------------------------------------------

UNASKED = """
import io, sys
import evoalign
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
print(sorted({name.partition(".")[0] for name in sys.modules} & {"tensorboard", "wandb", "trackio"}))
"""


@pytest.mark.slow
def test_a_run_without_trackers_imports_none(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", UNASKED, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
