# SPDX-License-Identifier: Apache-2.0
"""What every engine promises, of SGLang: started here with its adapters in files, and attached with them as tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from served import attached, config

from evoalign import engines
from evoalign.testing.engines import (
    CHECKS,
    Bench,
    Check,
    check_common_random_numbers,
    check_requests_of_one_member,
    started,
)

SEEDED = (check_common_random_numbers, check_requests_of_one_member)
"""They take draws with seeds, which SGLang has with deterministic inference alone, and that is not for CPUs."""
UNSEEDED = [check for check in CHECKS if check not in SEEDED]


@pytest.fixture(scope="module", params=["lora", "lowrank", "tensors"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    by_tensors = request.param == "tensors"
    settings = (
        attached(request.getfixturevalue("url"), engine={"transport": "tensors"})
        if by_tensors
        else config(request.param)
    )
    with started(engines.create, settings) as found:
        yield found


@pytest.mark.parametrize("check", UNSEEDED, ids=lambda check: check.__name__)
def test_sglang_keeps_the_contract(check: Check, bench: Bench) -> None:
    check(bench)


def test_that_it_draws_without_seeds_is_said(bench: Bench) -> None:
    assert "it draws without seeds" in bench.facts.note and not bench.facts.deterministic
