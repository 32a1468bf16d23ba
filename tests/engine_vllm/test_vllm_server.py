# SPDX-License-Identifier: Apache-2.0
"""vLLM's server, started here, keeps the contract of engines, and `evoalign canary` judges it as it is."""

import pytest
from served import config

from evoalign import engines, models
from evoalign.engines.server.asking import Asker, apart
from evoalign.engines.server.canary import PROMPTS, examine
from evoalign.engines.server.errors import RefusedError
from evoalign.engines.server.session import Session
from evoalign.engines.server.sources import made
from evoalign.testing.engines import CHECKS, started
from faulty_server import FAULTS, between

OF_THE_CPU = {"base beside"}
"""What vLLM's kernels for the CPU do wrong, once an adapter has been in each slot: the last test shows it."""
STRONG = 0.25
"""An adapter's gain that all answers show."""


@pytest.fixture(scope="module")
def bench():
    """One server for all tests of this file, with room for adapters of rank 8 on every projection."""
    with started(engines.create, config(name="vllm-server", lora={"rank": 8})) as found:
        yield found


@pytest.fixture
def client(bench):
    """The engine's own, which has the server's address and key."""
    return bench.engine._there()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_contract(bench, check):
    check(bench)


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_the_canary_blames_nothing_that_is_right(client, api):
    report = examine(client.url, key=client._key, api=api)
    assert report.server.startswith("vLLM 0.") and report.seconds < 60
    assert {check.name for check in report.checks if check.status != "ok"} <= OF_THE_CPU, report
    assert len(report.checks) == 16


@pytest.mark.first("drops up_proj", others="long")
@pytest.mark.parametrize("fault", FAULTS)
def test_the_canary_finds_a_planted_fault(client, fault):
    make, wanted = FAULTS[fault]
    with between(client.url, client._key, make()) as address:
        assert {check.name for check in examine(address).faults} - OF_THE_CPU == wanted


def test_adapters_that_the_server_does_not_see_are_told(client, tmp_path):
    def blind(path, body, forward):
        return (404, b'{"message": "No adapter found"}') if path.endswith("/load_lora_adapter") else forward(path, body)

    with between(client.url, client._key, blind) as address, pytest.raises(RefusedError, match="give --folder"):
        examine(address)


def test_base_rows_beside_adapters_answer_by_the_last_slot(bench, client):
    """vLLM 0.32 on a CPU takes -1, for no adapter, as an index: the canary is right to blame it."""
    dialect = bench.engine.dialect
    server = client.call(dialect.about(client))
    session = Session(client, "vllm", Asker(client, dialect, "completions", server.model), server, PROMPTS, None)
    source = made(str(models.tiny()), 4, None)
    adapter = source.plain(source.strength_of(STRONG))
    try:
        base = session.ask(None)
        for _ in range(bench.config.engine.slots(bench.config) + 2):
            session.answers(adapter)
        with session.loaded(adapter) as name:
            alone, (said, beside) = session.ask(name), session.at_once([name, None])
        assert apart(said, alone) < 1e-3
        assert apart(beside, base) > 0.05, "it does no more: leave `base beside` out of OF_THE_CPU"
    finally:
        session.close()
