# SPDX-License-Identifier: Apache-2.0
"""Engine `ray` when replicas die, hang or return garbage, and when the run itself or a node is killed.

A run that meets a fault has to end with the journal of a run that meets none.
"""

import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from ray_cluster import all_hashes, call, cluster, engine_of, generations, journal, settings

from evoalign.config import Config, from_dict
from evoalign.engines.ray import replicas
from evoalign.engines.ray.engine import RayEngine
from evoalign.engines.ray.replicas import ReplicaActor
from evoalign.errors import EvoalignError
from evoalign.testing import engines as contract
from evoalign.types import Rollout, population

__all__ = ["cluster"]
pytestmark = pytest.mark.long
Journal = list[dict[str, Any]]


def config_of(**ray: Any) -> Config:
    return from_dict(settings("lora", 2, **ray))


def pid_of(bench: contract.Bench, place: int) -> int:
    return call(engine_of(bench).pool.replicas[place], lambda _: os.getpid())


# --- a fault in any call of a replica, once ---


Fault = Callable[..., Any]
"""Called in place of a method, with a function that calls it."""


class Unreadable:
    """An object that raises as it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("not a number",)


def end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_meanwhile(do: Fault) -> Any:
    threading.Timer(0.02, end).start()
    do()
    time.sleep(60)


def fail(do: Fault) -> Any:
    raise OSError("no space left")


def kill(do: Fault) -> None:
    end()


def kill_afterwards(do: Fault) -> None:
    do()
    end()


def stop(do: Fault) -> Any:
    os.kill(os.getpid(), signal.SIGSTOP)
    return do()


def fewer(do: Fault) -> Any:
    rows, *tokens = do()
    return rows[:-1], *tokens


def without_texts(do: Fault) -> Any:
    rows, *tokens = do()
    return [(*row[:3], 5, *row[4:]) for row in rows], *tokens


def faulty(folder: Path, faults: dict[str, Fault]) -> type[ReplicaActor]:
    """Return an actor class with faults by method: the first is met once by any replica, the second as it rejoins."""

    class Faulty(ReplicaActor):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.rejoins = (folder / "fault0").exists()

    def method_of(number: int, name: str, fault: Fault) -> Any:
        own = getattr(ReplicaActor, name)

        def method(self: Any, *args: Any) -> Any:
            if number == 0 or self.rejoins:
                try:
                    (folder / f"fault{number}").open("x").close()
                except FileExistsError:
                    return own(self, *args)
                return fault(lambda: own(self, *args))
            return own(self, *args)

        return method

    for number, (name, fault) in enumerate(faults.items()):
        setattr(Faulty, name, method_of(number, name, fault))
    return Faulty


@pytest.fixture(scope="module")
def reference(cluster, tmp_path_factory) -> Journal:
    return journal(tmp_path_factory.mktemp("reference"), settings("lora", 2))


FAULTS: dict[str, dict[str, Fault]] = {
    **{f"kill at {name}": {name: kill} for name in ("load_model", "start", "rollout", "apply", "fingerprint")},
    **{f"kill after {name}": {name: kill_afterwards} for name in ("start", "apply", "fingerprint")},
    "kill during rollout": {"rollout": kill_meanwhile},
    **{f"kill at rollout, then at {name}": {"rollout": kill, name: kill} for name in ("start", "apply", "fingerprint")},
    "stop at rollout": {"rollout": stop}, "stop at apply": {"apply": stop}, "exception": {"rollout": fail},
    "no result": {"rollout": lambda do: do() and None}, "too few rollouts": {"rollout": fewer},
    "invalid rollouts": {"rollout": without_texts},
    "no hash": {"fingerprint": lambda do: do() and None}, "cannot be unpickled": {"rollout": lambda do: Unreadable()},
    "cannot be pickled": {"rollout": lambda do: threading.Lock()},
}  # fmt: skip


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", FAULTS)
def test_run_with_a_fault_has_the_journal_of_one_without(name, reference, tmp_path, monkeypatch, caplog):
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors cannot import this module
    monkeypatch.setattr(replicas, "ReplicaActor", faulty(tmp_path, FAULTS[name]))
    caplog.set_level(logging.WARNING, "evoalign.engine.ray")
    patience = 30.0 if "stop" in name else 600.0
    given = settings("lora", 2, compare_every=1, patience=patience, restarts=10)
    assert journal(tmp_path / "run", given) == reference
    assert all((tmp_path / f"fault{number}").exists() for number in range(len(FAULTS[name])))
    restarts = [record.getMessage() for record in caplog.records if "is restarted" in record.getMessage()]
    assert len(restarts) >= len(FAULTS[name]) and not any("another mean" in line for line in restarts)


# --- faults seen from the engine ---


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_replica_lost_in_mid_rollout_loses_no_rollout(how, cluster):
    wanted = None
    for lose in (False, True):
        with contract.started(RayEngine, config_of(patience=30.0)) as bench:
            bench.engine.apply(bench.update())
            rollouts: list[Rollout] = []
            pid = pid_of(bench, 0)
            for rollout in bench.engine.rollout(bench.plan(population(12)), bench.requests):
                rollouts.append(rollout)
                if lose and len(rollouts) == 1:
                    os.kill(pid, how)
            bench.engine.apply(dataclasses.replace(bench.update(), index=1))
            hashes = all_hashes(bench)
            assert len(hashes) == 2 and len(set(hashes)) == 1
            found = sorted(rollouts, key=lambda r: (r.member.index, r.request)), bench.engine.fingerprint()
            wanted = wanted or found
            assert found == wanted
            assert engine_of(bench).metrics()["restarts"] >= lose


@pytest.mark.parametrize("replicas", [3, 2], ids=["a majority", "none"])
def test_replica_whose_mean_differs_is_replaced_or_all_replay(replicas, cluster, caplog):
    """Without a majority that has the same mean, all replicas replay."""

    def spoil(actor: Any) -> None:  # in here: actors cannot import this module
        next(iter(actor._engine.mean.parts)).master.add_(1.0)

    with contract.started(RayEngine, from_dict(settings("lora", replicas, compare_every=1))) as bench:
        bench.engine.apply(bench.update())
        wanted = bench.engine.fingerprint()
        call(engine_of(bench).pool.replicas[1], spoil)
        assert bench.engine.fingerprint() == wanted
        if replicas == 3:
            assert "replica 1 has another mean than the others" in caplog.text
            assert all_hashes(bench) == [wanted] * 3
        else:
            assert engine_of(bench).metrics()["restarts"] == 2


def test_refused_weights_are_not_loaded_by_a_joining_replica(cluster):
    with contract.started(RayEngine, config_of(compare_every=1)) as bench:
        wanted = bench.engine.fingerprint()
        os.kill(pid_of(bench, 0), signal.SIGKILL)
        with pytest.raises(EvoalignError, match="does not fit"):
            bench.engine.load({"no_such_tensor": torch.zeros(1)})
        assert bench.engine.fingerprint() == wanted
        assert engine_of(bench).metrics()["restarts"] == 1


def test_run_ends_after_too_many_restarts(cluster):
    with contract.started(RayEngine, config_of(restarts=0)) as bench:
        os.kill(pid_of(bench, 0), signal.SIGKILL)
        with pytest.raises(EvoalignError, match=r"replica 0 died.*engine\.restarts"):
            bench.engine.fingerprint()


def test_state_continues_with_another_replica(cluster):
    with contract.started(RayEngine, config_of()) as bench:
        bench.engine.apply(bench.update())
        wanted = dict(bench.engine.state())
        found = dict[str, torch.Tensor]()
        for name, tensor in bench.engine.state():
            if not found:
                os.kill(pid_of(bench, 0), signal.SIGKILL)
            found[name] = tensor
        assert len(wanted) > 1 and found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


# --- the run's own process and node managers, which run in processes of their own ---


class Driver:
    """A run by the command line."""

    def __init__(self, folder: Path, given: dict[str, Any]) -> None:
        self.folder, self.run = folder, Path(given["output_dir"])
        (folder / "config.yaml").write_text(yaml.safe_dump(given))
        self.start()

    def start(self, *options: str) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        script = "import sys; from evoalign import cli; sys.argv[0] = 'evoalign'; cli.main()"
        command = [sys.executable, "-c", script, "train", str(self.folder / "config.yaml"), *options]
        with (self.folder / "log").open("a") as log:
            self.process = psutil.Popen(command, env=kept, stdout=log, stderr=log)

    def wait_for_lines(self, count: int) -> None:
        path = self.run / "journal.jsonl"
        while not path.exists() or len(path.read_bytes().splitlines()) < count:
            assert self.process.poll() is None, (self.folder / "log").read_text()[-2000:]
            time.sleep(0.005)

    def resume(self) -> Journal:
        self.start("--resume")
        assert self.process.wait(240) == 0, (self.folder / "log").read_text()[-2000:]
        return generations(self.run)


def _actors() -> list[psutil.Process]:
    """Return processes of replicas on clusters that this process started."""
    found = list[psutil.Process]()
    for process in psutil.Process().children(recursive=True):
        try:
            found += [process] if " ".join(process.cmdline()).startswith("ray::") else []
        except psutil.Error:  # it ended
            continue
    return [process for process in found if "ReplicaActor" in " ".join(process.cmdline())]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("lines", [0, 3])
@pytest.mark.parametrize("own", [True, False], ids=["own cluster", "cluster that stays"])
def test_killed_run_leaves_no_process_and_resumes(own, lines, cluster, reference, tmp_path):
    address = None if own else cluster.get_runtime_context().gcs_address
    given: dict[str, Any] = settings("lora", 2, address=address) | {"output_dir": str(tmp_path / "run")}
    driver = Driver(tmp_path, given)
    if lines:
        driver.wait_for_lines(lines)
    else:
        time.sleep(6)
    started = driver.process.children(recursive=True)
    driver.process.kill()
    driver.process.wait(30)
    _, alive = psutil.wait_procs(started, timeout=30)
    assert not alive
    until = time.monotonic() + 30
    while _actors() and time.monotonic() < until:
        time.sleep(0.2)
    assert not _actors()
    assert driver.resume() == reference


@pytest.fixture
def nodes(tmp_path) -> Generator[Any]:
    """Start a process with a cluster of three nodes, each with room for one replica; yields how to talk to it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, str(Path(__file__).parents[1] / "support/ray_nodes.py")]
    process = subprocess.Popen(command, env=kept, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def say(word: str) -> str:
        assert process.stdin is not None and process.stdout is not None
        print(word, file=process.stdin, flush=True)
        return next(line for line in process.stdout if line.startswith("nodes: ")).removeprefix("nodes: ").strip()

    yield say
    process.stdin.close()  # type: ignore[union-attr]
    process.wait(60)


@pytest.mark.timeout(1200)
def test_run_whose_replicas_node_is_killed_has_the_same_journal(reference, nodes, tmp_path):
    given = settings("lora", 2, address=nodes("address"), compare_every=1, restarts=10, patience=60.0)
    given["es"] |= {"num_generations": 40}
    driver = Driver(tmp_path, given | {"output_dir": str(tmp_path / "run")})
    driver.wait_for_lines(3)
    assert nodes("lose a replica") == "done"
    assert driver.process.wait(400) == 0, (tmp_path / "log").read_text()[-2000:]
    assert generations(driver.run)[:6] == reference
    rows = [json.loads(line) for line in (driver.run / "metrics.jsonl").read_text().splitlines()]
    assert max(row.get("engine", {}).get("restarts", 0) for row in rows) >= 1


@pytest.mark.timeout(1200)
def test_run_whose_own_node_is_killed_resumes_on_another_cluster(reference, nodes, tmp_path):
    given = settings("lora", 2, address=nodes("address"), patience=40.0, restarts=2)
    driver = Driver(tmp_path, given | {"output_dir": str(tmp_path / "run")})
    driver.wait_for_lines(2)
    assert nodes("lose the head") == "done"
    assert driver.process.wait(300) != 0
    given["engine"]["address"] = None
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(given | {"output_dir": str(tmp_path / "run")}))
    assert driver.resume() == reference
