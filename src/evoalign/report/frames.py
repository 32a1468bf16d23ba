# SPDX-License-Identifier: Apache-2.0
"""Results of a run as pandas frames, and as HTML for notebooks. Imports pandas."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from evoalign.report.tables import Interval

SHOWN = 4
"""Completions shown in a notebook."""
KEYS = ["example", "seed", "sample"]
"""Columns that identify a completion of an evaluation."""


def completions(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return one row per test example, seed and sample: prompt, target, and columns `_before` and `_after` of text,
    reward, each of several rewards, right, finish_reason and tokens.
    """
    first, last = (pd.DataFrame.from_records(list(rows)) for rows in (before, after))
    same = [*KEYS, "prompt", "target"]
    first, last = (side.drop(columns="rendered", errors="ignore") for side in (first, last))
    both = first.merge(last.drop(columns=["prompt", "target"]), on=KEYS, suffixes=("_before", "_after"))
    own = [f"{name}_{when}" for name in first.columns if name not in same for when in ("before", "after")]
    return both.reindex(columns=[*same, *own])


def measures(before: Mapping[str, float], after: Mapping[str, float], change: Mapping[str, Interval]) -> pd.DataFrame:
    """Return one row per measure that both have: before, after, change, and low and high of its 95 % interval (missing
    if there is none).
    """
    rows: dict[str, list[float | None]] = {}
    for name in (name for name in before if name in after):
        mean, low, high = change.get(name, (after[name] - before[name], 0.0, 0.0))
        rows[name] = [before[name], after[name], mean, *((low, high) if low < high else (None, None))]
    return pd.DataFrame.from_dict(rows, orient="index", columns=["before", "after", "change", "low", "high"])


def page(headline: str, lines: Sequence[str], found: pd.DataFrame, texts: pd.DataFrame, figure: Path | None) -> str:
    """Return HTML: the headline, measures, figure, `lines`, and the first completions. All text is escaped."""
    columns = [name for name in ("prompt", "target", "text_before", "text_after") if name in texts]
    shown = texts[columns].head(SHOWN).dropna(axis="columns", how="all")
    parts = [f"<p><b>{html.escape(headline)}</b></p>", found.to_html(float_format="{:.4g}".format, na_rep="", border=0)]
    if figure is not None and figure.is_file():
        image = base64.b64encode(figure.read_bytes()).decode()
        parts.append(f'<img alt="rewards over the run" style="max-width: 100%" src="data:image/png;base64,{image}">')
    parts += [f"<p>{html.escape(line)}</p>" for line in lines]
    table = shown.to_html(index=False, na_rep="", border=0, escape=True)
    parts.append(table.replace("<td>", '<td style="text-align: left">'))
    return f'<div style="overflow-x: auto">{"".join(parts)}</div>'
