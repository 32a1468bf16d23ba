# SPDX-License-Identifier: Apache-2.0
"""What the tests of the doctor share: a small config, and a look into what was found."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from families import make_config

from evoalign.config import Config
from evoalign.preflight.plan import Finding

ROOT = Path(__file__).resolve().parents[2]
DATA = {
    "train_data": str(ROOT / "data/tasks/conciseness/conciseness_train.json"),
    "test_data": str(ROOT / "data/tasks/conciseness/conciseness_test.json"),
}


def config(tmp_path: Path, space: str = "lora", **tree: Any) -> Config:
    sections = {"output_dir": str(tmp_path / "runs/new"), "task": DATA, "evaluation": {"max_tokens": 64}}
    for name, section in tree.items():
        old = sections.get(name)
        sections[name] = {**old, **section} if isinstance(old, dict) else section
    model = sections.pop("model", {})
    return make_config(model.get("name", "tiny"), space, **sections)


def of(found: Iterable[Finding], name: str) -> Finding:
    return next(finding for finding in found if finding.name == name)


def statuses(found: list[Finding]) -> dict[str, str]:
    return {finding.name: finding.status for finding in found}
