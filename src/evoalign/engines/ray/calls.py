# SPDX-License-Identifier: Apache-2.0
"""What a call of an actor came to: its answer, what it refuses, or that it failed, in a line."""

from __future__ import annotations

import re
from typing import Any

from evoalign.errors import ConfigError, DataError, ModelError, NotFiniteError, plain

TOLD = (ConfigError, DataError, ModelError, NotFiniteError)
"""What an engine says of what it was asked, which another would say as well; all else is a failure of its own."""
_GUESSES = " There are some potential root causes"
"""With this Ray begins a list of what may kill any process."""


class FaultError(Exception):
    """A replica, or a grader, did not answer as one that works would."""


def answer(ray: Any, ref: Any, patience: float) -> Any:
    """What a call of an actor came to. Raises FaultError, and EvoalignError where that is what it raised."""
    errors = ray.exceptions
    try:
        return ray.get(ref, timeout=patience)
    except errors.RayTaskError as error:
        if isinstance(error.cause, TOLD):
            raise error.cause from None
        raise FaultError(f"failed: {line_of(error.cause)}") from error
    except errors.GetTimeoutError as error:
        raise FaultError(f"gave no answer for {patience:g} s") from error
    except errors.RayError as error:
        raise FaultError(f"died: {line_of(error)}") from error


def line_of(error: BaseException) -> str:
    """What it is, where Ray says so the process and its host, and its last line: of an actor that could not be made,
    the reason."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    where = ", ".join(f"{name} {found[1]}" for name in ("pid", "ip") if (found := re.search(rf"\b{name}: (\S+)", text)))
    last = plain(lines[-1].partition(_GUESSES)[0])[:300]
    return f"{type(error).__name__}{f' ({where})' if where else ''}: {last}"
