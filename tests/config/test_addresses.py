# SPDX-License-Identifier: Apache-2.0
"""What is an address, and which are of this machine."""

import pytest

from evoalign.http import is_here, is_loopback, parts_of


@pytest.mark.parametrize("url", ["", "host:8000", "ftp://host", "http://", "http://h:99999", "http://h:0", "http://[::1",
                                 "http://h/\x1b[1m"])  # fmt: skip
def test_what_cannot_be_asked_has_no_parts_and_is_not_here(url):
    assert parts_of(url) is None and not is_here(url)


def test_parts_are_those_of_the_address():
    parts = parts_of("HTTPS://Host:8000/v1?a=1")
    assert parts is not None
    assert (parts.scheme, parts.hostname, parts.port, parts.path, parts.query) == ("https", "host", 8000, "/v1", "a=1")


@pytest.mark.parametrize(
    ("host", "here"),
    [*((host, True) for host in ("localhost", "127.0.0.1", "127.9.9.9", "::1", "[::1]")),
     *((host, False) for host in ("localhost.com", "127.0.0.1.com", "0.0.0.0", "10.0.0.1", "host"))],
)  # fmt: skip
def test_which_hosts_are_of_this_machine(host, here):
    assert is_loopback(host) == is_here(f"http://{'[::1]' if host == '::1' else host}:3/v1") == here
