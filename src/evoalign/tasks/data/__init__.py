# SPDX-License-Identifier: Apache-2.0
"""Rows from files, folders and hub data sets, and how they become a training, a validation and a test split.

`sources` says what may be named, `files` how a file is read, `columns` under which names the task gets what it looks
for, `spool` where many rows are, and `splits` which rows are for what.
"""

from __future__ import annotations

from evoalign.tasks.data.columns import lacking, likely, listed
from evoalign.tasks.data.files import MAX_TEXT, Row
from evoalign.tasks.data.sources import HUB, hub_parts, read, rows_of
from evoalign.tasks.data.splits import Check, Parts, held_back, load, parted_otherwise, random_state, split

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
