# SPDX-License-Identifier: Apache-2.0
"""vLLM's server meets the contract of engines, and `evoalign canary` reports planted faults alone."""

import pytest
from faulty_server import FAULTS, between
from served import config

from evoalign import engines, models
from evoalign.engines.server.client import RefusedError
from evoalign.preflight.canary import PROMPTS, examine
from evoalign.preflight.canary_adapters import random_adapter
from evoalign.preflight.canary_session import Prompter, Session, distance
from evoalign.testing.engines import CHECKS, started

STRONG = 0.25
"""Gain of an adapter that changes all completions."""
LONG = (PROMPTS[0], PROMPTS[-1])
"""Fewer prompts; the last is longer than a block of the prefix cache."""
FAINT = ("The opposite of hot is", "Once upon a time there was a miller who had three sons, and")
"""Weak adapters have little effect on these, so that the examination starts below its threshold."""


@pytest.fixture(scope="module")
def bench():
    """One server for all tests of this file, with room for eight adapters of rank 8 on every projection."""
    with started(engines.create, config(name="vllm-server", lora={"rank": 8}, engine={"members": 8})) as found:
        yield found


@pytest.fixture
def client(bench):
    """The engine's client, which has the server's address and key."""
    return bench.engine.connection.client


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_contract(bench, check):
    check(bench)


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_examine_blames_nothing_of_a_sound_server(client, api):
    report = examine(client.url, key=client.key, api=api, prompts=() if api == "completions" else LONG)
    assert report.server.startswith("vLLM 0.") and report.seconds < 60
    assert not [check.name for check in report.checks if check.status != "ok"], report
    assert len(report.checks) == 16


@pytest.mark.first("drops up_proj")
@pytest.mark.parametrize("fault", FAULTS)
def test_examine_finds_a_planted_fault(client, fault):
    make, wanted = FAULTS[fault]
    with between(client.url, client.key, make()) as address:
        assert {check.name for check in examine(address, prompts=FAINT).faults} == wanted


def test_examine_advises_a_folder_that_the_server_sees(client, tmp_path):
    def blind(path, body, forward):
        return (404, b'{"message": "No adapter found"}') if path.endswith("/load_lora_adapter") else forward(path, body)

    with between(client.url, client.key, blind) as address, pytest.raises(RefusedError, match="--folder"):
        examine(address, prompts=LONG)


def test_base_rows_next_to_adapters_use_no_slot(bench, client):
    """vLLM before 0.33 on a CPU gives them the last slot's adapter, once an adapter has been in each slot."""
    dialect = bench.engine.dialect
    server = client.call(dialect.about(client))
    prompter = Prompter(client, dialect, "completions", server.model)
    session = Session(prompter, server, LONG, None, takes_tensors=False)
    source = random_adapter(str(models.tiny()), 4, None)
    adapter = source.plain(source.strength_of(STRONG))
    try:
        (base,) = session.complete([None])
        for _ in range(bench.config.engine.slots(bench.config) + 2):
            session.completions_of(adapter)
        with session.loaded(adapter) as name:
            (alone,), (mixed, base_row) = session.complete([name]), session.complete([name, None])
        assert distance(mixed, alone) < 1e-3
        assert distance(base_row, base) < 1e-3 < distance(base, alone)
    finally:
        session.close()
