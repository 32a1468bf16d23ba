# SPDX-License-Identifier: Apache-2.0
"""Compares measured figures with benchmarks/baselines.json, which has a range for each figure that a page claims."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

BASELINES = Path(__file__).with_name("baselines.json")


def check(figures: Mapping[str, float]) -> None:
    """Print each figure with its range; exit with status 1 if one is outside. Figures without a range only print."""
    known = json.loads(BASELINES.read_text(encoding="utf-8"))
    outside: list[str] = []
    print()
    for name, figure in figures.items():
        if name not in known:
            print(f"{name}: {figure:.4g}; no baseline")
            continue
        low, high = known[name]["range"]
        print(f"{name}: {figure:.4g}; baseline {known[name]['figure']:.4g}, range {low:g} to {high:g}", flush=True)
        if not low <= figure <= high:
            outside.append(name)
    if outside:
        raise SystemExit(f"outside the range of benchmarks/baselines.json: {', '.join(outside)}")
