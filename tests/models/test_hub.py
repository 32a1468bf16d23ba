# SPDX-License-Identifier: Apache-2.0
"""A machine without a network is told so at once, and not after a minute of retries."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
from huggingface_hub import constants

from evoalign.errors import DataError
from evoalign.models.files import look_for_hub, not_cached, place
from evoalign.tasks.data.files import rows_of

MISSING = OSError("nothing of that name in the cached files")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """The hosts whose address was asked for; there is none."""
    hosts: list[object] = []

    def getaddrinfo(host: object, *_: object) -> None:
        hosts.append(host)
        raise socket.gaierror("no address")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    look_for_hub.cache_clear()
    yield hosts
    look_for_hub.cache_clear()


def test_a_hub_without_an_address_is_asked_for_nothing(asked: list[object]) -> None:
    assert [place("somebody/model"), place("somebody/other")] == ["somebody/model", "somebody/other"]
    assert len(asked) == 1 and constants.HF_HUB_OFFLINE, "the library would retry for more than a minute"
    assert "the hub cannot be reached" in str(not_cached(MISSING)), "nobody has set HF_HUB_OFFLINE"


def test_behind_a_proxy_names_are_for_the_proxy_to_find(asked: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    place("somebody/model")
    assert asked == [] and not constants.HF_HUB_OFFLINE


def test_a_folder_needs_no_hub(asked: list[object]) -> None:
    place("tiny")
    assert asked == []


def test_data_of_a_hub_that_is_not_there_are_asked_for_once(asked: list[object]) -> None:
    start = time.perf_counter()
    with pytest.raises(DataError, match="cannot load hub:somebody/rows"):
        list(rows_of("hub:somebody/rows"))
    assert len(asked) == 1 and constants.HF_HUB_OFFLINE
    assert time.perf_counter() - start < 10, "the library would retry for half a minute"
