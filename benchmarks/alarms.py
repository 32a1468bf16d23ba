#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Which of many finished runs raise an alarm (hacked or broken), against labels that somebody gave by reading them.

    python benchmarks/alarms.py RUNS LABELS.json [--model FOLDER] [--most 32] [--json OUT.json]

RUNS is a folder of run directories, LABELS.json names some of them: {"run": "healthy" | "broken"}. Each is judged anew
from its completions of the test split (`evoalign.checks.hacking`) and from its metrics.jsonl. What each run wrote down
of nats a token is used; --model measures them where that is missing, with the model in that folder in place of the one
that config.yaml names. Where a run does not say which completions are right, those are that say their target.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from evoalign import tokens
from evoalign.checks import hacking
from evoalign.checks.diagnosis import History
from evoalign.checks.divergence import Fluency, Reference, measure
from evoalign.checks.rules import causes
from evoalign.config import Config, load
from evoalign.errors import DataError
from evoalign.evaluation import Scored
from evoalign.rewards.functions import says
from evoalign.rundir import parquet
from evoalign.rundir.directory import RunDir
from evoalign.types import Prompt

RULES = ("hacked", "noise earns", "sigma too large", "cut off")
"""Warnings of the run itself that are shown beside."""


class Chat:
    """The prompts of an evaluation, as its completions hold them."""

    def __init__(self, config: Config, said: Sequence[Scored]) -> None:
        self.chat = config.task.prompt == "chat"
        self.prompts = {s.example: s.prompt for s in said}

    def prompt(self, example: int) -> Prompt:
        """As it was asked."""
        text = self.prompts[example]
        return [{"role": "user", "content": text}] if self.chat else text


def completions(run: RunDir, name: str) -> list[Scored]:
    """Of the test split, with what is right filled in."""
    said = [Scored.of(row) for row in parquet.read(run.completions(name))]
    return [
        dataclasses.replace(s, right=says(s.text, s.target)) if s.right is None and s.target is not None else s
        for s in said
    ]


def nats(run: RunDir, before: list[Scored], after: list[Scored], model: str | None, most: int) -> Fluency | None:
    """As the run wrote it, or measured."""
    written = json.loads((run.results / "evaluation.json").read_text()).get("alarms", {}).get("nats_a_token")
    if written is not None:
        return Fluency(**written)
    if model is None:
        return None
    config = load([run.path / "config.yaml"])
    config = config.model_copy(update={"model": config.model.model_copy(update={"name": model})})
    reference, task = Reference(config), Chat(config, before)
    count = 1 + max(s.example for s in before)
    return measure(reference, tokens.load(config.model), task, range(count), before[:most], after[:most])  # type: ignore


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("labels", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--most", type=int, default=32)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    labels: dict[str, str] = json.loads(asked.labels.read_text())
    found: dict[str, dict[str, object]] = {}
    for name, label in labels.items():
        run = RunDir(asked.runs / name)
        try:
            before, after = (completions(run, which) for which in ("before", "after"))
        except DataError as error:
            print(f"{name}: {error}")
            continue
        judged = hacking.judge(before, after, nats(run, before, after, asked.model, asked.most))
        history = History(load([run.path / "config.yaml"]))
        for line in run.metrics.read_text().splitlines():
            row = json.loads(line)
            history.rows.append({**row, **(row.get("diagnosis") or {})})
        warned = [rule for rule in causes(history) if rule in RULES]
        found[name] = {"label": label, **judged.as_dict(), "warnings": warned, "rules": list(judged.alarms)}
        wrong = (judged.word is None) == (label == "broken")
        print(f"{'WRONG ' if wrong else '':6}{name:20} {label:8} {judged.word or '-':14} {found[name]['nats_a_token']}")
        for reason in judged.reasons:
            print(f"{'':28}{reason}")
        if warned:
            print(f"{'':28}warned of: {', '.join(warned)}")
    confusion(found)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")


def confusion(found: dict[str, dict[str, object]]) -> None:
    """Raised and not raised, of broken and of healthy runs: for each alarm, and for any of them."""
    names = ["any", *hacking.ALARMS, *(f"warning: {rule}" for rule in RULES)]
    print(f"\n{'alarm':28}{'broken, raised':>15}{'missed':>8}{'healthy, raised':>17}{'quiet':>7}")
    for name in names:
        cells = {(label, raised): 0 for label in ("broken", "healthy") for raised in (True, False)}
        for run in found.values():
            rules, warned = run["rules"], run["warnings"]
            assert isinstance(rules, list) and isinstance(warned, list)
            raised = bool(rules) if name == "any" else name in rules or name.removeprefix("warning: ") in warned
            cells[str(run["label"]), raised] += 1
        counts = [cells[key] for key in (("broken", True), ("broken", False), ("healthy", True), ("healthy", False))]
        print(f"{name:28}{counts[0]:15}{counts[1]:8}{counts[2]:17}{counts[3]:7}")


if __name__ == "__main__":
    main()
