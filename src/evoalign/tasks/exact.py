# SPDX-License-Identifier: Apache-2.0
"""JSON that gives back what it was given, bit for bit: for rows that leave memory, and for what processes send."""

from __future__ import annotations

import json
from typing import Any


def encode(message: object) -> bytes:
    """One line. Strings come back code point for code point, lone surrogates included. Raises ValueError, TypeError."""
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def decode(line: bytes) -> Any:
    """What `encode` was given."""
    return json.loads(line.decode("utf-8", "surrogatepass"))


def is_exact(value: object) -> bool:
    """Whether JSON gives the value back as it was: no tuples, numpy numbers, bytes, dates or keys but strings."""
    if isinstance(value, dict):
        return type(value) is dict and all(type(k) is str and is_exact(v) for k, v in value.items())
    if isinstance(value, list):
        return type(value) is list and all(map(is_exact, value))
    if isinstance(value, int):  # Python refuses to read integers of more than 4300 digits
        return type(value) in (int, bool) and value.bit_length() < 10_000
    return value is None or type(value) in (str, float)
