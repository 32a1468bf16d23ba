# SPDX-License-Identifier: Apache-2.0
"""How much a model's text differs from that of its base model.

Training measures it too, by `evoalign.checks.divergence`, whose names are kept here.
"""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(importlib.import_module("evoalign.checks.divergence"), name)
