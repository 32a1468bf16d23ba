# SPDX-License-Identifier: Apache-2.0
"""Rows of files, folders and hub data sets, and their training, validation and test splits."""

from __future__ import annotations

from evoalign.tasks.data.files import HUB, MAX_TEXT, Row, hub_parts, read, rows_of
from evoalign.tasks.data.splits import (
    Check,
    Parts,
    held_back,
    lacking,
    likely,
    listed,
    load,
    parted_otherwise,
    random_state,
    split,
)

__all__ = [
    "HUB",
    "MAX_TEXT",
    "Check",
    "Parts",
    "Row",
    "held_back",
    "hub_parts",
    "lacking",
    "likely",
    "listed",
    "load",
    "parted_otherwise",
    "random_state",
    "read",
    "rows_of",
    "split",
]
