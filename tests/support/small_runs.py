# SPDX-License-Identifier: Apache-2.0
"""What runs of tests leave out that are not about it."""

from __future__ import annotations

from typing import Any

UNCHECKED: dict[str, Any] = {"control_every": 0, "canary_every": 0, "perplexity": False, "placebo": 0}
"""`checks`: all that they ask of the model, a fifth of the time of a small run."""
