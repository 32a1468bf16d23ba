# SPDX-License-Identifier: Apache-2.0
"""Engine `ray` without Ray: settings, joining, and checks of what replicas return."""

import dataclasses
import functools
import time
from array import array
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest

from evoalign.config import from_dict, from_record
from evoalign.engines.ray import actor, engine, replicas
from evoalign.engines.ray.actor import packed
from evoalign.engines.ray.replicas import MARGIN, Replica, ReplicaError, checked_fingerprint, checked_rollouts
from evoalign.errors import ConfigError, ModelError
from evoalign.types import Facts, Member, Request, Rollout, Sampling, population

FACTS = Facts("transformers", "cpu", "float32", True, "a" * 64, 0)


def config_tree(**ray):
    return {"engine": {"name": "ray", **ray}, "es": {"sigma": 0.1}}


# --- settings ---


REMOVED = [("graders", 8), ("audit", 0.1), ("catch_up", "copy"), ("catch_up", "replay")]
DEFAULTS = [("graders", 0), ("audit", 0.0), ("catch_up", "auto")]


@pytest.mark.parametrize(("name", "value"), REMOVED)
def test_removed_setting_is_an_error_in_a_config_and_dropped_from_a_record(name, value):
    with pytest.raises(ConfigError, match=rf"^unknown setting engine\.{name}; .*take it out$"):
        from_dict(config_tree(**{name: value}))
    assert from_record(config_tree(**{name: value})) == from_dict(config_tree())


@pytest.mark.parametrize(("name", "value"), DEFAULTS)
def test_removed_setting_at_its_default_is_read(name, value):
    assert from_dict(config_tree(**{name: value})) == from_dict(config_tree())


def test_at_least_is_not_more_than_replicas():
    with pytest.raises(ConfigError, match="at_least 4 is more than replicas 3"):
        from_dict(config_tree(replicas=3, at_least=4))


@pytest.mark.parametrize(
    ("members", "dense", "ray", "first", "second"),
    [
        (32, False, {}, "engine ray: 4 replicas of transformers on this host share 32 members, 8 per call", None),
        (4, True, {"address": "10.0.0.1:6379"}, "the cluster 10.0.0.1:6379 share 4 members, 1 per call", None),
        (16, False, {}, "", "2 of the replicas are idle: lower engine.chunk (to 4 or less) or engine.replicas"),
        (2, False, {}, "", "lower engine.replicas"),
        (2, True, {}, "", "lower engine.replicas"),
    ],
)
def test_lines_say_how_members_are_shared_and_which_replicas_are_idle(members, dense, ray, first, second):
    found = from_dict(config_tree(replicas=4, **ray)).engine.lines(members, dense)
    assert first in found[0] and len(found) == (1 if second is None else 2)
    assert second is None or second in found[1]


# --- joining ---


def pool(*placed):
    made = object.__new__(replicas.ReplicaPool)
    made.settings = from_dict(config_tree(replicas=3, patience=10)).engine
    made.cluster, made._ray = MagicMock(), MagicMock()
    made.cluster.placed.return_value = list(placed)
    made.replicas, made.facts, made.updates = [Replica(place) for place in range(3)], None, []
    made.load_seconds = made.update_seconds = 0.0
    return made


def test_join_limit_allows_for_loading_and_replaying():
    made = pool()
    assert made.join_limit("loading") == made.join_limit("catching up") == 10
    made.load_seconds, made.update_seconds, made.updates = 60.0, 2.0, [None] * 100
    assert made.join_limit("loading") == MARGIN * 60
    assert made.join_limit("catching up") == MARGIN * (60 + 200)


def test_joining_replica_is_late_only_if_its_host_is_there():
    made, restarted = pool(), []
    made.restart = lambda replica, why: restarted.append(why)
    made._ray.wait.return_value = ([], [])
    replica = made.replicas[1]
    replica.stage, replica.joining, replica.since = "loading", "a call", time.monotonic() - 1000
    made.poll(())
    assert restarted == [] and time.monotonic() - replica.since < 10
    made.cluster.placed.return_value, replica.since = [1], time.monotonic() - 1000
    made.poll(())
    assert restarted == ["did not join within 10 s"]


@pytest.mark.parametrize(("change", "why"), [({"model_hash": "b" * 64}, "weights"), ({"deterministic": False}, "det")])
def test_mismatch_excludes_a_replica_of_another_model_or_device(change, why):
    made = pool()
    assert made.mismatch(FACTS) == made.mismatch(FACTS) == ""
    assert why in made.mismatch(dataclasses.replace(FACTS, **change))
    with pytest.raises(ReplicaError):
        made.mismatch(("facts", 3))


@pytest.mark.parametrize(("placed", "stage"), [((1,), "loading"), ((), "waiting")])
def test_restart_waits_for_room_if_the_host_is_gone(placed, stage):
    """Launching at once would use up another restart."""
    made, replica = pool(*placed), Replica(1, actor=MagicMock(), stage="ready")
    made.start_arguments, made._config = ((), True, False), None
    made.restart(replica, "died")
    assert (replica.stage, replica.restarts) == (stage, 1)
    assert (replica.actor is None) == (stage == "waiting")


def test_ask_all_fetches_a_refusal_from_every_replica():
    """Ray prints errors that were not fetched."""
    made, fetched = pool(0, 1, 2), []

    def get(replica, _):
        fetched.append(replica.place)
        raise ModelError("it does not fit") if replica.place else ReplicaError("died")

    made.get, made.restart = get, MagicMock()
    for replica in made.replicas:
        replica.stage, replica.actor = "ready", MagicMock()
    with pytest.raises(ModelError, match="it does not fit"):
        made.ask_all("load", False)
    assert fetched == [0, 1, 2]


def test_summary_names_the_process_and_drops_guesses():
    died = RuntimeError(
        "The actor died unexpectedly before finishing this task.\n\tclass_name: Replica\n\tpid: 4711\n"
        "\tip: 10.0.0.7\nThe actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR "
        "End of file. There are some potential root causes. (1) The process is killed by SIGKILL by OOM killer"
    )
    assert replicas.summary(died) == (
        "RuntimeError (pid 4711, ip 10.0.0.7): The actor is dead because its worker process has died. "
        "Worker exit type: SYSTEM_ERROR End of file."
    )
    assert (
        replicas.summary(ValueError("no\nmore room")) == "ValueError: more room"
        and replicas.summary(ValueError()) == "ValueError: "
    )


@pytest.mark.parametrize(("summation", "compared"), [("ordered", 1), ("own", 4)])
def test_replicas_are_compared_after_each_update_that_the_space_sums_itself(monkeypatch, summation, compared):
    """The last bits of CMA-ES depend on the host's processor."""
    pool = MagicMock(updates=[])
    pool.ask.return_value, pool.ask_all.return_value = ("float32", []), {Replica(0): FACTS}
    pool.mismatch.return_value, pool.fingerprints.return_value = "", {Replica(0): "a" * 64}
    monkeypatch.setattr(engine, "ReplicaPool", lambda config: pool)
    made = engine.RayEngine(from_dict(config_tree(compare_every=4)), MagicMock())
    made.start(MagicMock(carrier="adapter", summation=summation), MagicMock(), None, False)
    for _ in range(4):
        pool.updates.append(None)
        made.fingerprint()
    assert pool.fingerprints.call_count == compared


# --- what a replica returns ---

GOOD_HASH = (1, "a" * 64)


def test_checked_fingerprint_returns_updates_and_hash():
    assert checked_fingerprint(GOOD_HASH, 1, 1) == checked_fingerprint(GOOD_HASH, 0, 3) == GOOD_HASH


@pytest.mark.parametrize(
    "returned", [(2, "a" * 64), (-1, "a" * 64), (True, "a" * 64), (1.0, "a" * 64), (1, "A" * 64), (1,), 5, None, "text"]
)
def test_checked_fingerprint_rejects_anything_else(returned):
    with pytest.raises(ReplicaError):
        checked_fingerprint(returned, 1, 1)


A, B = population(2)
PLAIN, LOGPROBABILITIES = Request(0, (1, 2), Sampling(8), seed=5), Request(1, (3,), Sampling(4), logprobs=True)
PAIRS = [(A, PLAIN), (B, PLAIN), (A, LOGPROBABILITIES)]
GOOD = [
    Rollout(A, 0, (7, 1), "é\ud800 \x00", "stop"),
    Rollout(B, 0, (7,), "", "length"),
    Rollout(A, 1, (7, 2), "x", "length", (-0.1, 0.0)),
]


def test_checked_rollouts_are_in_the_order_of_the_requests():
    found = checked_rollouts(packed(GOOD[::-1]), PAIRS)
    assert found == GOOD and all(type(r.token_ids) is tuple for r in found)


def test_later_turns_and_an_empty_completion_with_log_probabilities_come_back():
    turns = dataclasses.replace(GOOD[0], later=((3, 2), (1, 1)))
    empty = dataclasses.replace(GOOD[2], token_ids=(), text="", logprobs=())
    assert checked_rollouts(packed([empty, turns]), [PAIRS[0], PAIRS[2]]) == [turns, empty]


def test_numbers_of_another_type_become_the_plan_s_own():
    given = [dataclasses.replace(GOOD[0], request=False), dataclasses.replace(GOOD[1], member=Member(True, 1, 1))]
    assert given[1].member == B
    found = checked_rollouts(packed(given), PAIRS[:2])
    assert [(type(r.member.index), type(r.request)) for r in found] == [(int, int)] * 2


def test_a_replica_freezes_what_it_starts_with(monkeypatch):
    monkeypatch.setattr(actor.spaces, "create", MagicMock())
    monkeypatch.setattr(actor.spaces, "adapted", MagicMock())
    replica = actor.ReplicaActor(MagicMock(), "no folder")
    replica._engine = MagicMock()
    done: list[str] = []
    watched = {name: functools.partial(done.append, name) for name in ("collect", "freeze")}
    monkeypatch.setattr(actor, "gc", SimpleNamespace(**watched))
    replica.start(MagicMock(), False, False)
    assert done == ["collect", "freeze"]


def changed(place, **fields):
    return [dataclasses.replace(r, **fields) if i == place else r for i, r in enumerate(GOOD)]


ROWS, IDS, LOGPROBS = packed(GOOD)


@pytest.mark.parametrize(
    "returned",
    [
        None, 5, b"", "text", {}, [], [None] * 3, [1, 2, 3], object(), GOOD, (ROWS,), (ROWS, IDS),
        (None, IDS, LOGPROBS),
        (ROWS, 5, LOGPROBS), (ROWS, IDS, None), (ROWS, IDS[:-1], LOGPROBS), (ROWS, IDS + IDS, LOGPROBS),
        (ROWS, IDS, LOGPROBS[:-1]), (ROWS, IDS, LOGPROBS + LOGPROBS), ([None] * 3, IDS, LOGPROBS),
        ([(A, 0, -1, *ROWS[0][3:]), *ROWS[1:]], IDS, LOGPROBS), ([(A, 0, 1.0, *ROWS[0][3:]), *ROWS[1:]], IDS, LOGPROBS),
        ([(A, 0, 1, *ROWS[0][3:]), (B, 0, 2, *ROWS[1][3:]), ROWS[2][:-1]], IDS, LOGPROBS),
        ([(A, 0, -1, *ROWS[0][3:]), (B, 0, 4, *ROWS[1][3:]), ROWS[2]], IDS, LOGPROBS),
        (ROWS, array("d", IDS), LOGPROBS), (ROWS, array("i", [-7, 1, 7, 7, 2]), LOGPROBS),
        (ROWS, IDS, array("f", LOGPROBS)), (ROWS, np.array(IDS), np.array(LOGPROBS)),
    ],
)  # fmt: skip
def test_checked_rollouts_rejects_anything_else(returned):
    with pytest.raises(ReplicaError):
        checked_rollouts(returned, PAIRS)


@pytest.mark.parametrize(
    "rollouts",
    [
        GOOD[:2], [*GOOD, GOOD[0]], [*GOOD[:2], GOOD[0]], changed(0, member=None), changed(0, member=Member(9, 1, 1)),
        changed(0, member=dataclasses.replace(A, noise=5)), changed(0, member=Member([0], 0, 1)),
        changed(0, request=2), changed(0, request=None), changed(0, token_ids=(7, 1.0)), changed(0, token_ids=(-1,)),
        changed(0, token_ids=(2**31,)), changed(0, token_ids=(10**400,)), changed(0, token_ids=(7,) * 9),
        changed(0, token_ids=float("nan")), changed(0, token_ids=("7",)), changed(0, text=5), changed(0, text=b"x"),
        changed(0, finish_reason="gone"), changed(0, finish_reason=None), changed(0, logprobs=(0.0, 0.0)),
        changed(2, logprobs=None), changed(2, logprobs=(0.0,)), changed(2, logprobs=(0.0, float("nan"))),
        changed(2, logprobs=(0.0, float("-inf"))), changed(2, logprobs=(0.0, "1")),
    ],
)  # fmt: skip
def test_invalid_rollouts_are_an_error(rollouts):
    """Of the replica itself, which counts as failed, or of the process that checks what it returns."""
    with pytest.raises((ReplicaError, TypeError, OverflowError, ValueError)):
        checked_rollouts(packed(rollouts), PAIRS)


def test_log_probabilities_of_another_rollout_are_refused():
    asked = [(m, dataclasses.replace(LOGPROBABILITIES, sampling=Sampling(8))) for m in (A, B)]
    rollouts = [Rollout(A, 1, (7, 1), "", "stop", (-0.1,)), Rollout(B, 1, (7,), "", "stop", (-0.2, -0.3))]
    with pytest.raises(ValueError):
        checked_rollouts(packed(rollouts), asked)
