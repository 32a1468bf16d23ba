# SPDX-License-Identifier: Apache-2.0
"""Graders of engine `ray`, of real actors: the journal of a run without them, and the loss of some."""

from __future__ import annotations

import io
import os
import signal
import threading
from collections.abc import Generator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import evoalign
from evoalign.config import Config, from_dict
from evoalign.engines.ray import graders
from evoalign.engines.ray.cluster import Cluster
from evoalign.engines.ray.graders import Grader, Pool
from evoalign.errors import DataError, EvoalignError, ModelError, RewardError
from evoalign.rewards.objective import Columns
from evoalign.setup import task_and_data
from evoalign.tasks import Data
from raying import CORES, DATA, cluster, generations

pytestmark = pytest.mark.long
__all__ = ["cluster"]

SOURCE = """
import os, signal, time
from pathlib import Path

HERE = Path(__file__).parent

def once(name):
    try:
        (HERE / name).open("x").close()
    except FileExistsError:
        return False
    return True

def length(completions, **columns):
    return [float(len(c)) / 7 for c in completions]

def kills(completions, **columns):
    grader = b"ray::" in Path(f"/proc/{os.getppid()}/cmdline").read_bytes()  # and not the run itself
    if grader and once("killed"):
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)
    return length(completions)

def stops(completions, **columns):
    if "bomb" in completions and once("stopped"):
        os.kill(os.getppid(), signal.SIGSTOP)
        time.sleep(1000)
    return length(completions)

def always(completions, **columns):
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)

def breaks(completions, **columns):
    if "bomb" in completions:
        raise OSError("no judge")
    return length(completions)

def sleeps(completions, **columns):
    if "bomb" in completions:
        (HERE / "began").write_text(str(os.getpid()))
        time.sleep(1000)
    return length(completions)
"""


def settings(to: Path, count: int, task: dict[str, Any], **grader: Any) -> dict[str, Any]:
    files = {"train_data": str(DATA / "questions_train.json"), "test_data": str(DATA / "questions_test.json")}
    return {
        "space": "lora", "model": {"name": "tiny"}, "deterministic": True, "checks": {"placebo": 0}, "report": False,
        "task": {**files, "train_size": 6, "test_size": 6, "validation_size": 2, **task},
        "es": {"num_generations": 2, "population_size": 12, "sigma": 0.01, "learning_rate": 0.005},
        "sampling": {"max_tokens": 8}, "evaluation": {"max_tokens": 8, "every": 1}, "grader": {"retries": 0, **grader},
        "engine": {"name": "ray", "replicas": 1, "cpus": 1, "chunk": 2, "graders": count, "restarts": 2,
                   "replica": {"name": "transformers", "device": "cpu", "threads": 1}},
        "output_dir": str(to),
    }  # fmt: skip


def own(to: Path, name: str) -> dict[str, Any]:
    """A reward function of `SOURCE`; all have the same name, by which their columns are called."""
    (to / "own.py").write_text(SOURCE)
    return {"name": "custom", "rewards": [f"{to / 'own.py'}:{name}"]}


def run(given: dict[str, Any], **more: Any) -> tuple[list[dict[str, Any]], dict[str, float], str]:
    """What the journal has of the generations, what the result measures, and what was said."""
    said = io.StringIO()
    result = evoalign.train(given, console=Console(file=said, width=300), **more)
    return generations(Path(given["output_dir"])), dict(result.after.measures), said.getvalue()


def test_a_run_with_graders_is_the_run_without(tmp_path: Path) -> None:
    wanted = run(settings(tmp_path / "none", 0, own(tmp_path, "length"), batch=5))
    assert "completions are scored" not in wanted[2] and len(wanted[0]) >= 4
    for name, restarts in (("length", 0), ("kills", 1)):
        to = tmp_path / name
        found = run(settings(to, 2, own(tmp_path, name), batch=5))
        assert found[:2] == wanted[:2]
        assert "completions are scored by 2 graders, 5 at a time" in found[2]
        assert f'"grader_restarts": {restarts}' in (to / "metrics.jsonl").read_text().splitlines()[-1]
    assert (tmp_path / "killed").exists()


def test_a_shipped_task_is_graded_by_actors_and_an_object_is_not(tmp_path: Path) -> None:
    wanted = run(settings(tmp_path / "none", 0, {"name": "conciseness"}))
    found = run(settings(tmp_path / "two", 2, {"name": "conciseness"}))
    assert found[:2] == wanted[:2] and "completions are scored by 2 graders, 16 at a time" in found[2]

    def length(completions: list[str]) -> list[float]:
        return [float(len(c)) for c in completions]

    custom = {"name": "custom"}
    here = run(settings(tmp_path / "here", 2, custom, batch=5), reward=length)
    assert "not by 2 graders: they are scored by a Python object" in here[2]


# --- without a model ---


@pytest.fixture
def pool(tmp_path: Path) -> Generator[Any]:
    """A pool of two graders of a function of `SOURCE`, and the data of the run."""
    made: list[tuple[Any, ...]] = []

    def pool(name: str, grader: type[Grader] = Grader, **more: Any) -> tuple[Pool, Data]:
        config = from_dict(settings(tmp_path / "run", 2, own(tmp_path, name), **{"batch": 3, **more}))
        task, data = task_and_data(config, None, None)
        cluster = Cluster(config)
        made.append((task, cluster))
        return Pool(config, data, cluster), data

    yield pool
    for task, held in made:
        held.close()
        task.close()


def ask(pool: Pool, data: Data, texts: list[str], stopping: threading.Event | None = None) -> Columns:
    return pool.columns(texts, data.train, range(len(texts)), stopping or threading.Event())


def test_a_grader_that_hangs_is_started_again(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graders, "MARGIN", 3.0)
    some, data = pool("stops", timeout=2)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda texts: ask(some, data, texts), [["bomb", "a"], ["b"]]))
    assert found == [{"stops": [4 / 7, 1 / 7]}, {"stops": [1 / 7]}] and some.restarts == 1


def test_an_exception_names_the_completion(pool: Any) -> None:
    some, data = pool("breaks")
    with pytest.raises(RewardError, match=r"breaks .*OSError: no judge.*completion 'bomb' causes it alone") as caught:
        ask(some, data, ["a", "bomb", "b"])
    assert caught.value.failed is not None
    assert (caught.value.failed["completion"], caught.value.failed["example"]) == ("bomb", dict(data.train[1]))
    assert some.restarts == 0 and ask(some, data, ["a"]) == {"breaks": [1 / 7]}


def test_a_grader_that_dies_too_often_ends_the_run(pool: Any) -> None:
    some, data = pool("always")
    with pytest.raises(EvoalignError, match=r"grader \d died.*started again 2 times \(engine\.restarts\)"):
        ask(some, data, ["a"])
    assert some.restarts >= 2


def test_who_no_longer_waits_is_let_go(pool: Any, tmp_path: Path) -> None:
    some, data = pool("sleeps", timeout=1000)
    stopping = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(ask, some, data, ["bomb"], stopping)
        while not (tmp_path / "began").exists() or not (tmp_path / "began").read_text():
            stopping.wait(0.01)
        stopping.set()
        with pytest.raises(CancelledError):
            asked.result()
    assert ask(some, data, ["a"]) == {"sleeps": [1 / 7]}
    worker = int((tmp_path / "began").read_text())
    while _lives(worker):  # its guard sees that the grader is gone
        threading.Event().wait(0.1)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_garbage_is_a_fault(pool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Broken(Grader):
        def columns(self, piece: bytes) -> bytes:
            try:
                (tmp_path / "told").open("x").close()
            except FileExistsError:
                return super().columns(piece)
            return b'{"columns": {"length": [NaN]}}'

    monkeypatch.setattr(graders, "Grader", Broken)
    some, data = pool("length")
    assert ask(some, data, ["a"]) == {"length": [1 / 7]} and some.restarts == 1


def test_rows_that_read_otherwise_there_are_an_error(pool: Any) -> None:
    some, data = pool("length")
    data.train[0]["prompt"] = "another"
    with pytest.raises(DataError, match="rows of the train split read otherwise where a grader loads them"):
        ask(some, data, ["a"])


def test_no_room_for_graders(pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evoalign.engines.ray.cluster.WAIT", 3.0)
    config: Config = from_dict(settings(tmp_path / "run", CORES + 1, own(tmp_path, "length"), batch=3))
    cluster = Cluster(config)
    try:
        with pytest.raises(ModelError, match=rf"engine\.graders: {CORES + 1} graders .* find no room"):
            Pool(config, Data([], []), cluster)
    finally:
        cluster.close()


def test_a_killed_grader_loses_nothing(pool: Any) -> None:
    some, data = pool("length")
    import ray

    wanted = ask(some, data, ["a", "bb", "ccc"])
    for seat in some.seats:
        os.kill(ray.get(seat.actor.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
    assert ask(some, data, ["a", "bb", "ccc"]) == wanted and some.restarts >= 1
