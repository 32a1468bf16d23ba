# SPDX-License-Identifier: Apache-2.0
"""Engine `ray` with real actors: the contract of engines, the same journal for any number of replicas, joining.

Faults are in tests/faults/test_ray_faults.py.
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter

import pytest
from ray_cluster import CORES, all_hashes, call, cluster, engine_of, generations, journal, settings

import evoalign
from evoalign import tokens
from evoalign.checks import canary
from evoalign.config import from_dict
from evoalign.engines.ray import replicas
from evoalign.engines.ray.actor import packed
from evoalign.engines.ray.engine import RayEngine
from evoalign.engines.ray.replicas import ReplicaActor, ReplicaPool
from evoalign.engines.ray.schedule import Dispatcher
from evoalign.errors import CanaryError, ConfigError, EvoalignError
from evoalign.testing import engines as contract
from evoalign.types import Plan, Request, Rollout, Sampling, population

__all__ = ["cluster"]
long = pytest.mark.long
CMA = {"num_generations": 3, "population_size": 4, "sigma": 0.05}
FURTHER = {"num_generations": 3, "sigma": 0.01, "learning_rate": 0.01}
SPACES = {
    "lora": {},
    "lora, adam": {"es": FURTHER | {"optimizer": "adam"}},
    "lowrank": {},
    "full": {"es": FURTHER | {"decay": 0.1}},
    "subspace, cma": {"space": {"name": "subspace", "dimension": 8}, "es": CMA | {"optimizer": "cma"}},
    "norms, sep_cma": {"es": CMA | {"optimizer": "sep_cma"}},
}


def tree_of(variant, count=2, **ray):
    return settings(variant.partition(",")[0], count, **ray) | SPACES[variant]


@pytest.fixture(scope="module")
def shared_bench(cluster):
    with contract.started(RayEngine, from_dict(settings("lora", 2))) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    [
        contract.check_rollouts,
        contract.check_request_indices,
        contract.check_requests_of_one_member,
        contract.check_repeats,
        contract.check_state,  # these two change the mean, so they come last
        contract.check_apply,
    ],
    ids=lambda check: check.__name__,
)
def test_engine_keeps_the_contract_on_a_shared_engine(check, shared_bench):
    check(shared_bench)


@pytest.mark.slow
def test_replicas_have_the_same_mean_after_updates(shared_bench):
    shared_bench.engine.apply(shared_bench.update())
    assert all_hashes(shared_bench) == [shared_bench.engine.fingerprint()] * 2
    assert engine_of(shared_bench).metrics()["restarts"] == 0


@pytest.fixture
def config():
    return from_dict(settings("lora", 2))


@long
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_engine_keeps_the_contract(check, config):
    with contract.started(RayEngine, config) as bench:
        check(bench)


@long
@pytest.mark.parametrize("variant", SPACES)
def test_journal_and_evaluation_do_not_depend_on_number_of_replicas(variant, tmp_path):
    """The test split has 245 rows, which make four chunks. With 0 replicas the engine is in process, without Ray."""
    journals, evaluations = [], []
    for count in (1, 2, 3, 0):
        given = tree_of(variant, count)
        given["engine"] = given["engine"] if count else given["engine"]["replica"]
        given["es"] = given["es"] | {"population_size": 12}
        given["task"] |= {"test_size": None}
        journals.append(journal(tmp_path / str(count), given))
        evaluations.append(json.loads((tmp_path / str(count) / "results" / "evaluation.json").read_text()))
    assert len(journals[0]) == 6 and all(found == journals[0] for found in journals)
    assert evaluations[0]["examples"] == 245
    for key in ("before", "after"):
        assert all(found[key] == evaluations[0][key] for found in evaluations)


@long
def test_engine_raises_when_replicas_find_no_room(config, monkeypatch):
    monkeypatch.setattr("evoalign.engines.ray.cluster.WAIT", 3.0)
    many = config.model_copy(update={"engine": config.engine.model_copy(update={"replicas": CORES + 1})})
    with pytest.raises(EvoalignError, match=r"engine\.replicas: 9 "):
        RayEngine(many, tokens.load(config.model))


@pytest.mark.parametrize("replica", [{"name": "ray"}, {"name": "own:Engine"}, {"name": "nothing"}])
def test_config_rejects_engines_that_cannot_be_replicas(replica):
    with pytest.raises(ConfigError, match=r"engine\.replica|unknown engine|cannot be a replica"):
        from_dict(settings("lora", 2, replica=replica))


@long
def test_run_resumes_with_another_number_of_replicas(tmp_path, capsys):
    wanted = journal(tmp_path / "whole", settings("lowrank", 2))

    def stop(generation):
        if generation.index == 1:
            raise RuntimeError("stopped")

    cut = settings("lowrank", 2) | {"output_dir": str(tmp_path / "cut")}
    with pytest.raises(RuntimeError, match="stopped"):
        evoalign.train(cut, on_generation=stop)
    cut["engine"] |= {"replicas": 1, "cpus": 0.5}
    evoalign.train(cut, resume=True)
    assert generations(tmp_path / "cut") == wanted
    warnings = [line for line in "".join(capsys.readouterr()).splitlines() if "last bits" in line]
    assert len(warnings) == 1 and "engine.cpus" in warnings[0], "replicas change no bit of a deterministic run"


def _in_new_process(script, given):
    """Run a script, which gets a config as its argument, in a process without a cluster; return its output."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-c", script, json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, env=clean, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@long
def test_own_cluster_listens_on_loopback_only_and_ends_with_the_engine():
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
    first, left = _in_new_process(script, settings("lora", 1)).strip().splitlines()[-2:]
    count, rest = first.split(" ", 1)
    assert int(count) > 4 and rest == "['127.0.0.1', '::ffff:127.0.0.1'] token 64"
    assert left == "[]"


@long
def test_run_with_own_cluster_stops_in_order_on_sigterm(tmp_path):
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
    given = settings("lora", 1) | {"output_dir": str(tmp_path / "run")}
    given["es"] |= {"num_generations": 500}
    output = _in_new_process(script, given)
    stopped = re.search(r"said: stopped after generation (\d+) of 500", output)
    assert stopped and output.endswith("True\n")
    lines = generations(tmp_path / "run")
    assert len(lines) == 2 * int(stopped[1]) and 1 <= int(stopped[1]) < 500


# --- joining ---


def config_of(variant, count=2, **ray):
    return from_dict(tree_of(variant, count, **ray))


@long
@pytest.mark.parametrize("reload", [False, True], ids=["updates", "updates and loaded weights"])
@pytest.mark.parametrize("variant", SPACES)
def test_joining_replica_replays_to_the_mean_of_the_others(variant, reload):
    with contract.started(RayEngine, config_of(variant)) as bench:
        pool = engine_of(bench).pool
        for index in range(3):
            if reload and index == 1:
                bench.engine.load(dict(bench.engine.state()), dict(bench.engine.optimizer_state()) or None)
            bench.engine.apply(dataclasses.replace(bench.update(), index=index))
        wanted = bench.engine.fingerprint()
        pool.restart(pool.replicas[1], "is restarted by a test")
        assert len(pool.ready) == 1 and pool.replicas[1].stage == "loading"
        assert all_hashes(bench) == [wanted] * 2
        # The next update also depends on the optimizer's state, and with decay on the weights of the start.
        bench.engine.apply(dataclasses.replace(bench.update(), index=3))
        assert len(set(all_hashes(bench))) == 1 and bench.engine.fingerprint() != wanted


@long
def test_joining_replica_receives_updates_made_meanwhile():
    with contract.started(RayEngine, config_of("lora")) as bench:
        pool = engine_of(bench).pool
        bench.engine.apply(bench.update())
        pool.restart(pool.replicas[0], "is restarted by a test")
        for index in range(1, 5):
            bench.engine.apply(dataclasses.replace(bench.update(), index=index))
            list(bench.engine.rollout(bench.plan(population(2)), bench.requests))
            bench.engine.fingerprint()
        assert len(set(all_hashes(bench))) == 1 and len(pool.ready) == 2


@long
def test_replicas_join_once_there_is_room(cluster):
    room = cluster.util.placement_group([{"CPU": CORES - 2}])
    assert room.wait(60)
    with contract.started(RayEngine, config_of("lora", 4, at_least=1)) as bench:
        pool, plan = engine_of(bench).pool, bench.plan(population(8))
        assert {replica.stage for replica in pool.replicas} == {"ready", "waiting"} and len(pool.ready) <= 2
        bench.engine.apply(bench.update())
        wanted, alone = bench.engine.fingerprint(), list(bench.engine.rollout(plan, bench.requests))
        cluster.util.remove_placement_group(room)
        until, found = time.monotonic() + 300, alone
        while len(pool.ready) < 4 and time.monotonic() < until:
            found = list(bench.engine.rollout(plan, bench.requests))
        assert Counter(found) == Counter(alone)
        assert all_hashes(bench) == [wanted] * 4
        assert bench.engine.metrics()["replicas"] == 4


@long
def test_canary_finds_the_replica_that_ignores_adapters(monkeypatch, cluster):
    class Deaf(ReplicaActor):
        ignores_adapters = False

        def rollout(self, plan, requests):
            def nothing(*_):
                """Put no adapters in place."""

            if self.ignores_adapters:
                self._engine._put_adapters = nothing
            return super().rollout(plan, requests)

    monkeypatch.setattr(replicas, "ReplicaActor", Deaf)
    replica = {"name": "transformers", "device": "cpu", "threads": 1, "decoder": "library"}
    with contract.started(RayEngine, config_of("lora", replica=replica)) as bench:
        call(engine_of(bench).pool.replicas[1], lambda actor: setattr(actor, "ignores_adapters", True))
        parts = bench.engine.parts()
        assert len(parts) == 2 and not hasattr(parts[0], "apply"), "an update goes to all replicas"

        def check(engine):
            prompt = bench.requests[0].prompt_ids
            canary.check(engine, bench.space, bench.layout, prompt, generation=0, width=0.01, exact=True)

        check(parts[0])
        with pytest.raises(CanaryError):
            check(parts[1])


# --- a slow replica: tests/engines/test_ray_schedule.py checks durations in virtual time ---

MEMBERS, SECONDS = 128, 0.02


class Sleeper(ReplicaActor):
    """Sleeps for each member in place of a model, and counts members."""

    seconds = SECONDS
    members = 0

    def load_model(self):
        return "float32", []

    def set_seconds(self, seconds):
        self.seconds = seconds

    def count(self):
        return self.members

    def rollout(self, plan, requests):
        time.sleep(len(plan.members) * self.seconds)
        self.members += len(plan.members)
        return packed([Rollout(m, 0, (m.index,), f"member {m.index}", "stop") for m in plan.members])


@pytest.fixture
def sleepers(cluster):
    from ray import cloudpickle

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "ReplicaActor", Sleeper)
        cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors cannot import this module
        pool = ReplicaPool(from_dict(settings("lora", 4, chunk=4)))
        while len(pool.ready) < 4:
            pool.admit()
    yield pool
    pool.close()


@long
@pytest.mark.parametrize("slow", [0, 3])
def test_slow_replica_gets_fewer_members_and_changes_no_rollout(sleepers, cluster, slow):
    cluster.get(sleepers.replicas[slow].actor.set_seconds.remote(4 * SECONDS))
    dispatcher, plan = Dispatcher(sleepers), Plan(0, 1.0, population(MEMBERS))
    for _ in range(3):
        found = Counter(
            (r.member.index, r.text, r.token_ids) for r in dispatcher.run(plan, [Request(0, (1,), Sampling(4))], 4)
        )
        assert found == Counter((i, f"member {i}", (i,)) for i in range(MEMBERS))
    counts = cluster.get([replica.actor.count.remote() for replica in sleepers.replicas])
    # In proportion to speed its share is 4 of 52; an equal share would be 1 of 4.
    assert 0 < counts[slow] < 0.15 * sum(counts)
    assert all(counts[slow] < count for place, count in enumerate(counts) if place != slow)
