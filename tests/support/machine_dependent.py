# SPDX-License-Identifier: Apache-2.0
"""Journals whose weights may come out otherwise on another machine, as they say themselves."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from evoalign.errors import MachineError
from evoalign.rundir import journal


@contextmanager
def skipped_elsewhere(path: Path) -> Iterator[None]:
    """Skips by name where a library's sum has other bits than where the journal was made. Any other is a failure."""
    try:
        yield
    except MachineError as error:
        assert journal.read(path).header.summation is None, "only journals of before may depend on the machine"
        pytest.skip(f"made where a library's product has other bits than on this CPU: {error}")
