# SPDX-License-Identifier: Apache-2.0
"""Which model."""

from __future__ import annotations

from typing import Literal

from evoalign.config.base import Section


class ModelConfig(Section):
    """A folder, a hub name, or `tiny`: the small base model that comes with the package."""

    name: str = "tiny"
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: float32 on the CPU, bfloat16 on a GPU."""
    trust_remote_code: Literal[False] = False
