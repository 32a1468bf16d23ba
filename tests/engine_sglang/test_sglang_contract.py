# SPDX-License-Identifier: Apache-2.0
"""What every engine promises, of SGLang: started here, and attached with adapters in files, as tensors, and by OpenAI's
chat completions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from served import attached

from evoalign import engines
from evoalign.testing.engines import (
    CHECKS,
    Bench,
    Check,
    check_common_random_numbers,
    check_requests_of_one_member,
    started,
)
from evoalign.types import MEAN_PLAN

SEEDED = (check_common_random_numbers, check_requests_of_one_member)
"""They take draws with seeds, which SGLang has with deterministic inference alone, and that is not for CPUs."""
UNSEEDED = [check for check in CHECKS if check not in SEEDED]


ATTACHED = {"files": {"transport": "files"}, "tensors": {"transport": "tensors"}, "chat": {"api": "chat"}}


@pytest.fixture(scope="module", params=["launched", *ATTACHED])
def bench(request: pytest.FixtureRequest, launched: Bench, url: str) -> Iterator[Bench]:
    if request.param == "launched":
        start = dict(launched.engine.state())
        yield launched
        launched.engine.load(start)
        list(launched.engine.rollout(MEAN_PLAN, launched.requests))  # the server has it when it is next asked
    else:
        with started(engines.create, attached(url, engine=ATTACHED[request.param])) as found:
            yield found


@pytest.mark.parametrize("check", UNSEEDED, ids=lambda check: check.__name__)
def test_sglang_keeps_the_contract(check: Check, bench: Bench) -> None:
    check(bench)


def test_that_it_draws_without_seeds_is_said(bench: Bench) -> None:
    assert "it draws without seeds" in bench.facts.note and not bench.facts.deterministic
