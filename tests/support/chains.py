# SPDX-License-Identifier: Apache-2.0
"""The hashes of a journal by their definition, made anew as anyone can who alters one."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any


def digest(value: object, **form: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, **form).encode()).hexdigest()


def own_digest(line: Mapping[str, Any]) -> str:
    """Return the hash of a line, without the one it has."""
    return digest({k: v for k, v in line.items() if k != "hash"}, separators=(",", ":"))


def relinked(lines: Iterable[Mapping[str, Any]]) -> str:
    """Return the text of a journal of these lines, whose chain holds."""
    previous, texts = "0" * 64, list[str]()
    for given in lines:
        line = {**given, "previous": previous}
        previous = line["hash"] = own_digest(line)
        texts.append(json.dumps(line, sort_keys=True, separators=(",", ":")) + "\n")
    return "".join(texts)
