# SPDX-License-Identifier: Apache-2.0
"""Engine `ray` with one cluster and one engine: the checks of the contract that fit into every run of the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from evoalign.config import from_dict
from evoalign.engines.ray.engine import RayEngine
from evoalign.testing import engines as contract
from raying import all_hashes, cluster, engine_of, settings

__all__ = ["cluster"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bench() -> Iterator[contract.Bench]:
    with contract.started(RayEngine, from_dict(settings("lora", 2))) as found:
        yield found


@pytest.mark.parametrize(
    "check",
    [
        contract.check_rollouts,
        contract.check_request_indices,
        contract.check_requests_of_one_member,
        contract.check_repeats,
        contract.check_state,  # leaves the mean moved: these two come last
        contract.check_apply,
    ],
    ids=lambda check: check.__name__,
)
def test_engine_keeps_the_contract(check: contract.Check, bench: contract.Bench) -> None:
    check(bench)


def test_replicas_have_the_same_mean_after_updates(bench: contract.Bench) -> None:
    bench.engine.apply(bench.update())
    assert all_hashes(bench) == [bench.engine.fingerprint()] * 2
    assert engine_of(bench).metrics()["restarts"] == 0
