# SPDX-License-Identifier: Apache-2.0
"""Engine `ray`, of real actors: what every engine promises, the same journal however many replicas, and their loss."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import evoalign
from evoalign import tokens
from evoalign.config import Config, from_dict
from evoalign.engines.ray import team
from evoalign.engines.ray.engine import RayEngine
from evoalign.engines.ray.replica import Replica
from evoalign.errors import ConfigError, EvoalignError
from evoalign.testing import engines as contract
from evoalign.types import Rollout, population
from raying import CORES, all_hashes, call, cluster, engine_of, generations, journal, settings

__all__ = ["cluster"]

pytestmark = pytest.mark.long


@pytest.fixture
def config() -> Config:
    return from_dict(settings("lora", 2))


@pytest.fixture
def bench(config: Config) -> Iterator[contract.Bench]:
    with contract.started(RayEngine, config) as found:
        yield found


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_it_keeps_the_contract(check: contract.Check, bench: contract.Bench) -> None:
    check(bench)


@pytest.mark.parametrize("space", ["lora", "lowrank", "full"])
def test_journal_and_evaluation_do_not_depend_on_number_of_replicas(space: str, tmp_path: Path) -> None:
    """The test split has 245 rows, which are handed out in four chunks."""
    journals, evaluations = [], []
    for replicas in (1, 2, 3):
        given: dict[str, Any] = settings(space, replicas)
        given["task"] |= {"test_size": None}
        journals.append(journal(tmp_path / str(replicas), given))
        evaluations.append(json.loads((tmp_path / str(replicas) / "results" / "evaluation.json").read_text()))
    assert len(journals[0]) == 6 and journals[0] == journals[1] == journals[2]
    assert evaluations[0]["examples"] == 245
    assert evaluations[0]["before"] == evaluations[1]["before"] == evaluations[2]["before"]
    assert evaluations[0]["after"] == evaluations[1]["after"] == evaluations[2]["after"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_replica_that_is_lost_in_mid_rollout_loses_nothing(how: signal.Signals, config: Config) -> None:
    wanted = None
    for lose in (False, True):
        engine = config.engine.model_copy(update={"patience": 30.0})
        with contract.started(RayEngine, config.model_copy(update={"engine": engine})) as bench:
            bench.engine.apply(bench.update())
            plan = bench.plan(population(12))
            answers: list[Rollout] = []
            pid = call(engine_of(bench).team.seats[0], lambda _: os.getpid())
            for rollout in bench.engine.rollout(plan, bench.requests):
                answers.append(rollout)
                if lose and len(answers) == 1:
                    os.kill(pid, how)
            bench.engine.apply(dataclasses.replace(bench.update(), index=1))
            hashes = all_hashes(bench)
            assert len(hashes) == 2 and len(set(hashes)) == 1
            found = (sorted(answers, key=lambda r: (r.member.index, r.request)), bench.engine.fingerprint())
            wanted = wanted or found
            assert found == wanted
            assert engine_of(bench).metrics()["restarts"] >= lose


def test_garbage_is_a_fault(config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wanted = journal(tmp_path / "honest", settings("lora", 2))

    class Broken(Replica):
        """Answers rubbish once, in the first process that is asked."""

        def rollout(self, members: bytes, asked: bytes) -> bytes:
            try:
                (tmp_path / "told").open("x").close()
            except FileExistsError:
                return super().rollout(members, asked)
            return b'[[0, 0, [1], "x", "stop", null]]'

    monkeypatch.setattr(team, "Replica", Broken)
    assert journal(tmp_path / "broken", settings("lora", 2)) == wanted
    assert (tmp_path / "told").exists()


def test_a_replica_whose_mean_differs_is_made_anew(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    engine = config.engine.model_copy(update={"replicas": 3, "compare_every": 1})
    with contract.started(RayEngine, config.model_copy(update={"engine": engine})) as bench:
        bench.engine.apply(bench.update())
        wanted = bench.engine.fingerprint()

        def spoil(replica: Any) -> None:
            next(iter(replica._engine.mean.parts)).master.add_(1.0)

        call(engine_of(bench).team.seats[1], spoil)
        assert bench.engine.fingerprint() == wanted
        assert "replica 1 has another mean than the others" in caplog.text
        assert all_hashes(bench) == [wanted] * 3


def test_weights_that_are_refused_are_not_loaded_by_who_joins(config: Config) -> None:
    engine = config.engine.model_copy(update={"compare_every": 1})
    with contract.started(RayEngine, config.model_copy(update={"engine": engine})) as bench:
        wanted = bench.engine.fingerprint()
        os.kill(call(engine_of(bench).team.seats[0], lambda _: os.getpid()), signal.SIGKILL)
        with pytest.raises(EvoalignError, match="does not fit"):
            bench.engine.load({"no_such_tensor": torch.zeros(1)})
        assert bench.engine.fingerprint() == wanted
        assert engine_of(bench).metrics()["restarts"] == 1


def test_a_replica_that_dies_too_often_ends_the_run(config: Config) -> None:
    engine = config.engine.model_copy(update={"restarts": 0})
    with contract.started(RayEngine, config.model_copy(update={"engine": engine})) as bench:
        os.kill(call(engine_of(bench).team.seats[0], lambda _: os.getpid()), signal.SIGKILL)
        with pytest.raises(EvoalignError, match=r"replica 0 died.*engine\.restarts"):
            bench.engine.fingerprint()


def test_more_replicas_than_there_is_room_for(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evoalign.engines.ray.cluster.WAIT", 3.0)
    many = config.model_copy(update={"engine": config.engine.model_copy(update={"replicas": CORES + 1})})
    with pytest.raises(EvoalignError, match=r"engine\.replicas: 9 replicas .* find no room"):
        RayEngine(many, tokens.load(config.model))


@pytest.mark.parametrize("replica", [{"name": "ray"}, {"name": "own:Engine"}, {"name": "nothing"}])
def test_what_cannot_be_a_replica_is_refused(replica: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"engine\.replica|unknown engine|cannot be a replica"):
        from_dict(settings("lora", 2, replica=replica))


def test_a_run_resumes_with_another_number_of_replicas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = journal(tmp_path / "whole", settings("lowrank", 2))

    def stop(generation: Any) -> None:
        if generation.index == 1:
            raise RuntimeError("stopped")

    cut: dict[str, Any] = settings("lowrank", 2) | {"output_dir": str(tmp_path / "cut")}
    with pytest.raises(RuntimeError, match="stopped"):
        evoalign.train(cut, on_generation=stop)
    cut["engine"] |= {"replicas": 1, "cpus": 0.5}
    evoalign.train(cut, resume=True)
    assert generations(tmp_path / "cut") == wanted
    told = [line for line in "".join(capsys.readouterr()).splitlines() if "last bits" in line]
    assert len(told) == 1 and "engine.cpus" in told[0], "replicas move no bit where answers repeat"


def test_a_cluster_of_its_own_listens_on_loopback_alone_and_ends_with_it() -> None:
    """In a process of its own: this one has a cluster that a test has started."""
    script = """
import json, os, sys
import psutil
from evoalign import tokens
from evoalign.config import from_dict
from evoalign.engines.ray.engine import RayEngine

config = from_dict(json.loads(sys.argv[1]))
engine = RayEngine(config, tokens.load(config.model))
own = psutil.Process()
family = [own, *own.children(recursive=True)]
listening = [c.laddr.ip for p in family for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
print(len(family), sorted(set(listening)), os.environ["RAY_AUTH_MODE"], len(os.environ["RAY_AUTH_TOKEN"]))
engine.close()
_, alive = psutil.wait_procs(family[1:], timeout=30)
print([p.name() for p in alive])
"""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    asked = [sys.executable, "-c", script, json.dumps(settings("lora", 1))]
    said = subprocess.run(asked, capture_output=True, text=True, env=clean, timeout=300, check=False)
    assert said.returncode == 0, said.stderr
    first, left = said.stdout.strip().splitlines()[-2:]
    count, rest = first.split(" ", 1)
    assert int(count) > 4 and rest == "['127.0.0.1', '::ffff:127.0.0.1'] token 64"
    assert left == "[]"


def test_run_with_its_own_cluster_stops_in_order_on_sigterm(tmp_path: Path) -> None:
    """Ray handles SIGTERM itself, and would end the process in mid-generation.

    A thread of Ray's may receive the signal, so that it reaches Python a generation or more later.
    """
    script = """
import json, os, signal, sys
import evoalign
from evoalign.errors import StoppedError

def stop(generation):
    if generation.index == 0:
        os.kill(os.getpid(), signal.SIGTERM)

try:
    evoalign.train(json.loads(sys.argv[1]), on_generation=stop)
except StoppedError as error:
    print("said:", error)
print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
"""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    given: dict[str, Any] = settings("lora", 1) | {"output_dir": str(tmp_path / "run")}
    given["es"] |= {"num_generations": 500}
    asked = [sys.executable, "-c", script, json.dumps(given)]
    said = subprocess.run(asked, capture_output=True, text=True, env=clean, timeout=300, check=False)
    assert said.returncode == 0, said.stderr
    stopped = re.search(r"said: stopped after generation (\d+) of 500", said.stdout)
    assert stopped and said.stdout.endswith("True\n")
    lines = generations(tmp_path / "run")
    assert len(lines) == 2 * int(stopped[1]) and 1 <= int(stopped[1]) < 500
