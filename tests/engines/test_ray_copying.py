# SPDX-License-Identifier: Apache-2.0
"""A copy of a mean between two replicas, by gloo: it comes whole or not at all, and listens for its taker alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
import torch

from evoalign.engines.ray import copying

HERE = "127.0.0.1"
STATE = {"a": torch.arange(12.0).view(3, 4), "b": torch.tensor(float("nan")), "c": torch.zeros(0, 2)}
SLOTS = {"a/m": torch.full((3, 4), -0.0)}


def listening() -> set[str]:
    """Addresses on which this process waits for whoever comes."""
    found = psutil.Process(os.getpid()).net_connections("tcp")
    return {str(c.laddr[0]) for c in found if c.status == psutil.CONN_LISTEN}


def test_a_copy_comes_whole_and_nothing_listens_beyond_the_address_it_was_given() -> None:
    before = listening()
    giver = copying.Giver("gloo", HERE)
    assert HERE in listening() <= before | {HERE}
    with ThreadPoolExecutor() as pool:
        given = pool.submit(giver.give, 7, STATE.items(), SLOTS.items())
        updates, state, slots, size = copying.taken(giver.where, "gloo", HERE)
        assert given.result(60) is True
    assert updates == 7 and size == 4 * (12 + 1 + 0 + 12)
    for found, wanted in ((state, STATE), (slots, SLOTS)):
        assert list(found) == list(wanted)
        for name, tensor in wanted.items():
            assert found[name].shape == tensor.shape
            assert torch.equal(found[name].view(torch.int32), tensor.view(torch.int32))


def test_who_gives_goes_on_where_nobody_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "PATIENCE", timedelta(seconds=1))
    assert copying.Giver("gloo", HERE).give(7, STATE.items(), ()) is False


def test_who_takes_is_told_where_the_other_ends_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "PATIENCE", timedelta(seconds=2))
    giver = copying.Giver("gloo", HERE)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", STATE["a"]
        raise OSError("the disk is gone")

    with ThreadPoolExecutor() as pool:
        given = pool.submit(giver.give, 7, broken(), ())
        with pytest.raises(RuntimeError):
            copying.taken(giver.where, "gloo", HERE)
        assert given.result(60) is False
