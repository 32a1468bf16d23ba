# SPDX-License-Identifier: Apache-2.0
"""Addresses of services, and which of them are of this machine. Who asks says in the error which setting was wrong."""

from __future__ import annotations

import ipaddress
from urllib.parse import SplitResult, urlsplit

import httpx


def parts_of(url: str) -> SplitResult | None:
    """The parts of an http or https address that can be asked; None for what is none."""
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        httpx.URL(url)
    except (ValueError, httpx.InvalidURL):
        return None
    return parts if is_one else None


def is_loopback(host: str) -> bool:
    """Whether a host, as an address or as localhost, is this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_here(url: str) -> bool:
    """Whether an address is of this machine alone."""
    parts = parts_of(url)
    return parts is not None and is_loopback(parts.hostname or "")
