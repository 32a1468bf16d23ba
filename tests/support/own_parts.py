# SPDX-License-Identifier: Apache-2.0
"""One of each kind of part, from one file outside: engine, space, task, objective, shaping, tracker, analysis."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from toy_engine import ToyEngine

from evoalign.analysis.base import Analysis, Finding
from evoalign.config import Section
from evoalign.rewards.objective import Objective, WeightedSum
from evoalign.rundir import journal
from evoalign.shaping import zscore
from evoalign.spaces.lora import Lora
from evoalign.tasks import Data, Task
from evoalign.tracking import Ready, Tracker


class Engine(ToyEngine):
    """The toy."""


class First(Section):
    first: float = 2.0


class Space(Lora):
    """A LoRA of its own width in the first generation."""

    name, settings = "outside", First

    def width_factor(self, generation):
        return self.options.first if generation == 1 else 1.0


def squashed(scores_MP):
    """Z-scores between -1 and 1."""
    return np.tanh(zscore(scores_MP))


class Outside(Task):
    """Say many vowels, and few words."""

    name, weighted = "outside", WeightedSum({"reward": 1.0})

    def load_data(self, seed):
        return Data([{"prompt": text} for text in ("One", "Two", "Three")], [{"prompt": "Four"}])

    def prompt(self, example):
        return [{"role": "user", "content": example["prompt"]}]

    def compute_reward(self, text, example):
        return float(sum(c in "aeiou" for c in text))

    def columns(self, texts, examples):
        return {"reward": self.rewards(texts, examples), "words": [float(len(t.split())) for t in texts]}


class Balance(Objective):
    """The reward less words, which weigh more each generation."""

    name, per_completion = "balance", True

    def __init__(self, step=0.5):
        self.step, self.state = step, {"weight": 0.0}

    def scores(self, group):
        return group.columns_MP["reward"] - self.state["weight"] * group.columns_MP["words"]

    def update(self, group):
        self.state = {"weight": self.state["weight"] + self.step}


class Lines(Tracker):
    """Every row as a line of a file."""

    def __init__(self, config, run, resumed_at):
        self.file = (run / "logs" / "lines.txt").open("w" if resumed_at is None else "a")

    def log(self, row):
        print(json.dumps(row["mean"]), file=self.file)

    def finish(self, summary):
        print(json.dumps(sorted(summary)), file=self.file)

    def close(self):
        self.file.close()

    @classmethod
    def ready(cls):
        return Ready("warning", "it forgets", "back it up")


@dataclass(frozen=True)
class Times:
    times: int = 1


class Moves(Analysis):
    """How often runs moved their weights."""

    name, help, settings = "moves", "How often runs moved their weights.", Times

    def run(self, targets, settings, config=None):
        moves = {run: settings.times * len(journal.read(Path(run, "journal.jsonl")).generations) for run in targets}
        return Finding(moves, [f"{run} moved {count} times" for run, count in moves.items()])
