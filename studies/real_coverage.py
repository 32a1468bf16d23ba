# SPDX-License-Identifier: Apache-2.0
"""The table of the jobs `coverage` of real.py; used by real_tables.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from evoalign.analysis.coverage.command import BEYOND
from real_rows import NAMES, Row, Study, share

SHOWN_K = (1, 4, 16, 64, 512)


def coverage(study: Study, task: str) -> Iterator[Sequence[object]]:
    """Yield pass@k by temperature and by weight noise of each model, and the support that it lost and gained."""
    for job in sorted(job for job in study.rows if job.startswith(f"coverage/{task}/")):
        found = study.rows[job]["coverage"]
        for i in range(len(found["targets"][0]["ways"])):
            for target in found["targets"]:
                way, name = target["ways"][i], target["target"]
                kind = "temperature" if "temperature" in way else "sigma"
                passes = {one["k"]: f"{share(one['mean'])}{_ends(one)}" for one in way["pass"]}
                changes = [c for c in found["against_base"] if (c["target"], c.get(kind)) == (name, way[kind])]
                support = [f"{100 * c[part]['mean']:+.1f}" for c in changes for part in BEYOND] or ["-", "-"]
                yield f"{kind} {way[kind]:g}", model_of(name), *(passes.get(k, "-") for k in SHOWN_K), *support


def _ends(tree: Row) -> str:
    return "" if tree["low"] is None else f" ({share(tree['low'])} to {share(tree['high'])})"


def model_of(target: str) -> str:
    """Return the method of a target: base, or the folder of a run of `r`."""
    return next((NAMES[arm] for arm in ("es", "grpo") if Path(target).name.startswith(f"r_{arm}_")), target)
