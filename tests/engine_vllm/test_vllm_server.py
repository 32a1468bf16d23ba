# SPDX-License-Identifier: Apache-2.0
"""vLLM's server, started here, keeps the contract of engines."""

import pytest
from served import config

from evoalign import engines
from evoalign.testing.engines import CHECKS, started


@pytest.fixture(scope="module")
def bench():
    """One server for all tests of this file, with room for adapters of rank 8 on every projection."""
    with started(engines.create, config(name="vllm-server", lora={"rank": 8})) as found:
        yield found


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_contract(bench, check):
    check(bench)
