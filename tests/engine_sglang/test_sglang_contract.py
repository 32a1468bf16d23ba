# SPDX-License-Identifier: Apache-2.0
"""SGLang meets the contract of engines: launched, and attached with adapters in files, as tensors, and by OpenAI's chat
completions."""

import pytest
import replicated
from served import attached, config

from evoalign import engines
from evoalign.testing.answers import same_up_to_ties
from evoalign.testing.engines import CHECKS, check_common_random_numbers, check_requests_of_one_member, started
from evoalign.types import MEAN_PLAN

SEEDED = (check_common_random_numbers, check_requests_of_one_member)
"""Checks that need seeded sampling, which SGLang supports with deterministic inference only, not on CPUs."""
UNSEEDED = [check for check in CHECKS if check not in SEEDED]


ATTACHED = {"files": {"transport": "files"}, "tensors": {"transport": "tensors"}, "chat": {"api": "chat"}}


@pytest.fixture(scope="module", params=["launched", *ATTACHED])
def bench(request, launched, url):
    if request.param == "launched":
        start = dict(launched.engine.state())
        yield launched
        launched.engine.load(start)
        list(launched.engine.rollout(MEAN_PLAN, launched.requests))  # so that the server has the mean
    else:
        with started(engines.create, attached(url, engine=ATTACHED[request.param])) as found:
            yield found


@pytest.mark.parametrize("check", UNSEEDED, ids=lambda check: check.__name__)
def test_sglang_meets_the_contract(check, bench):
    check(bench)


def test_facts_note_sampling_without_seeds(bench):
    assert "without seeds" in bench.facts.note and not bench.facts.deterministic


@pytest.mark.long
def test_two_servers_of_ray_actors_match_one_engine():
    """They leave nothing behind."""
    replicated.check_life(config(), same_up_to_ties, lose=True)
