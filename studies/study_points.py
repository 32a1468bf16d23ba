# SPDX-License-Identifier: Apache-2.0
"""Points with their interval, as the tables of the studies of methods show them."""

from __future__ import annotations

from evoalign.statistics import Estimate


def points(found: Estimate) -> str:
    """Format an estimate and its interval in points."""
    if found.low is None or found.high is None:
        return f"{100 * found.mean:+.1f} (-)"
    return f"{100 * found.mean:+.1f} ({100 * found.low:+.1f} to {100 * found.high:+.1f})"
