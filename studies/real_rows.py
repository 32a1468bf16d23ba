# SPDX-License-Identifier: Apache-2.0
"""Rows of real.py by job, and measures of its runs; used by real_tables.py and real_figures.py.

Array suffixes: S seeds, I test items, K placebos.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evoalign import statistics
from evoalign.analysis.compare.statistics import shared
from evoalign.checks.rules import WINDOW, History, WrongAxis
from evoalign.config import Config
from evoalign.placebos.estimates import Split, split
from evoalign.statistics import Estimate
from evoalign.tasks.tool_calls import ToolCalls
from evoalign.tasks.word_problems import WordProblems

ROWS = Path(__file__).resolve().parent / "results" / "real"
CHOICE = 100
"""The first seed of runs that choose a setting."""
RIGHT = "right"
NAMES = {
    "lora": "ES lora", "lowrank": "ES lowrank", "es": "ES lowrank", "grpo": "GRPO", "random": "GRPO, random rewards",
}  # fmt: skip
SPENT = {"seconds": "wall_seconds", "completions": "completions", "tokens": "generated_tokens"}
Row = Mapping[str, Any]
Floats = NDArray[np.float64]
Lines = Iterator[str]


@dataclass(frozen=True)
class Run:
    """A run of training, by the parts of its job's name.

    `value` is its eta, rate, number of members, kind of completions or weights.
    """

    kind: str
    arm: str
    value: str
    task: str
    seed: int
    row: Row

    @classmethod
    def of(cls, row: Row) -> Run | None:
        """Return the run of a job's rows; None for a job that trains nothing."""
        match row["job"].split("/"):
            case ["p", ("lora" | "lowrank") as space, task, seed]:
                return cls("p", space, "", task, int(seed), row)
            case [("step" | "population") as kind, value, task, seed]:
                return cls(kind, "es", value, task, int(seed), row)
            case ["hack", arm, *value, seed]:
                return cls("hack", arm, "".join(value), "word_problems", int(seed), row)
            case ["long", tokens, weights, seed]:
                return cls("long", "es", f"{weights} in {tokens} tokens", "countdown", int(seed), row)
            case [("p" | "r" | "mix") as kind, arm, value, task, seed]:
                return cls(kind, arm, value, task, int(seed), row)
            case _:
                return None

    @property
    def called(self) -> str:
        """The method's name in tables."""
        name = "GRPO LoRA" if (self.kind, self.arm) == ("p", "grpo") else NAMES[self.arm]
        return f"{name}, failed" if "failed" in self.row else name

    @cached_property
    def before(self) -> Floats:
        """Exactness by test item [I] before training."""
        return np.array(self.row["before"]["right"], dtype=np.float64)

    @cached_property
    def after(self) -> Floats:
        """Exactness by test item [I] after training."""
        return np.array(self.row["after"]["right"], dtype=np.float64)

    @cached_property
    def gain(self) -> Estimate:
        """Change of the exact share, with its interval for new items."""
        return statistics.paired(self.before, self.after, shares=True)

    @property
    def gain_of_whole(self) -> float | None:
        """The part of the gain on items whose answer before training was not cut off; None for rows without that."""
        if (truncated := self.row["before"].get("truncated")) is None:
            return None
        return float(((self.after - self.before) * (1 - np.array(truncated))).mean())

    @cached_property
    def placebos(self) -> Floats:
        """Exactness by placebo and item [K, I]; K is 0 for a run without placebos."""
        found = [v["test"]["right"] for k, v in self.row.get("reached", {}).items() if k.startswith("placebo")]
        return np.array(found, dtype=np.float64).reshape(len(found), len(self.after))

    @cached_property
    def split(self) -> Split | None:
        """Gains of the run and of its placebos; None without placebos."""
        if not len(self.placebos):
            return None
        return split(self.before.tolist(), self.after.tolist(), self.placebos.tolist())

    @property
    def drift(self) -> float | None:
        """Mean gain of the placebos."""
        return None if self.split is None else self.split.drift.mean

    def other(self, name: str) -> float | None:
        """Return the exact share of the other task, of `base` or `run`."""
        found = self.row.get("reached", {}).get(name, {}).get("other")
        return None if found is None else float(np.mean(found["right"]))

    @property
    def lost(self) -> float | None:
        """Loss of exact share on the other task."""
        base, own = self.other("base"), self.other("run")
        return None if base is None or own is None else base - own

    @property
    def walk(self) -> float:
        """Length of the random walk of the run's steps in units of sigma: eta sqrt(T / N)."""
        es = self.row["config"]["es"]
        return es["learning_rate"] / es["sigma"] * math.sqrt(len(self.row["generations"]) / es["population_size"])

    @property
    def kl(self) -> float | None:
        """KL of the trained model from the base, nats per token; None if it was not measured."""
        found = self.row.get("divergence") or next((g.get("divergence") for g in self.row["generations"][-1:]), None)
        return found["exact"] if found else None

    def pass_at(self, k: int, *, of_base: bool = False) -> float | None:
        """Return pass@k at temperature 0.6 of the trained model, or of its base; None if it was not measured."""
        found = [target for target in self.row.get("sampled", []) if (target["target"] == "base") == of_base]
        return next((one["mean"] for t in found for one in t["ways"][0]["pass"] if one["k"] == k), None)

    @cached_property
    def spent(self) -> list[dict[str, float]]:
        """Seconds of training, completions and tokens up to each generation, summed over the rows."""
        total, found = dict.fromkeys(SPENT, 0.0), list[dict[str, float]]()
        for generation in self.row["generations"]:
            total = {name: total[name] + generation["budget"][of] for name, of in SPENT.items()}
            found.append(total)
        return found

    @property
    def cost(self) -> Mapping[str, float]:
        """Seconds of training, completions and tokens of the run; 0 for one that failed."""
        return self.spent[-1] if self.spent else dict.fromkeys(SPENT, 0.0)

    def curve(self) -> list[Row]:
        """Return the evaluations on the test split: costs, exact share, and reward and KL where measured."""
        first, last = ({"exact": float(right.mean()), "reward": self.row[end].get("measures", {}).get("reward")}
                       for end, right in (("before", self.before), ("after", self.after)))  # fmt: skip
        found: list[Row] = [{**dict.fromkeys(SPENT, 0.0), **first, "kl": 0.0}]
        for generation, spent in zip(self.row["generations"][:-1], self.spent, strict=False):
            if generation.get("evaluation"):
                kl = (generation.get("divergence") or {}).get("exact")
                measures = generation["evaluation"]
                found.append({**spent, "exact": measures[RIGHT], "reward": measures.get("reward"), "kl": kl})
        return [*found, {**self.cost, **last, "kl": self.kl}]

    def within(self, name: str, most: float) -> float:
        """Return the exact share at a number of `seconds` or `completions`, between evaluations by a straight line."""
        curve = self.curve()
        return float(np.interp(most, [point[name] for point in curve], [point["exact"] for point in curve]))

    def at_kl(self, kl: float, of: str = "exact") -> float | None:
        """Return the `exact` share or the `reward` where the KL first reaches a value; None if it does not.

        Between evaluations it follows a straight line.
        """
        curve = [point for point in self.curve() if point["kl"] is not None and point[of] is not None]
        for one, two in pairwise(curve):
            if one["kl"] < kl <= two["kl"]:
                return float(np.interp(kl, [one["kl"], two["kl"]], [one[of], two[of]]))
        return None


class Study:
    """All rows, of which any may be missing."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows: dict[str, Row] = {row["job"]: row for row in rows if "job" in row}
        self.runs = sorted(
            (run for row in self.rows.values() if (run := Run.of(row)) is not None),
            key=lambda run: (run.kind, list(NAMES).index(run.arm), run.task, _number(run.value), run.seed),
        )

    @classmethod
    def read(cls, folder: Path = ROWS) -> Study:
        """Read a folder of rows."""
        return cls([json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))])

    def find(self, kind: str, arm: str | None = None, task: str | None = None, value: str | None = None) -> list[Run]:
        """Return the final runs of a kind, by value and seed."""
        return [
            run
            for run in self.runs
            if run.kind == kind and run.seed < CHOICE
            and arm in (None, run.arm) and task in (None, run.task) and value in (None, run.value)
        ]  # fmt: skip

    def choosing(self) -> list[Run]:
        """Return the runs that choose a setting."""
        return [run for run in self.runs if run.seed >= CHOICE]

    def tasks(self, *kinds: str) -> list[str]:
        """Return the tasks that have rows of these kinds of jobs."""
        own = [run.task for run in self.runs if run.kind in kinds and run.seed < CHOICE]
        parts = [job.split("/") for job in self.rows]
        whole = [part[1] for part in parts if part[0] in kinds and len(part) == (3 if part[0] == "coverage" else 2)]
        return list(dict.fromkeys([*own, *whole]))

    def arms(self, task: str) -> dict[str, Row]:
        """Return the rows of the arms that do not train."""
        arms = self.rows.get(f"prompting/{task}", {}).get("arms", {})
        found = {name: arms[name] for name in ("zero-shot", "3-shot", "self-consistency") if name in arms}
        if longer := self.rows.get(f"longer/{task}"):
            found |= {f"{name}, {longer['max_tokens']} tokens": arm for name, arm in longer["arms"].items()}
        if best := self.rows.get(f"perturb/{task}"):
            found["best perturbation"] = best
        return found

    def prompted(self, task: str) -> dict[str, Floats]:
        """Return exactness by item of the arms that do not train."""
        return {name: np.array(row["right"], dtype=np.float64) for name, row in self.arms(task).items()}


def _number(text: str) -> float:
    """Return the number that a text begins with, to sort by."""
    head = text.split()[0] if text else ""
    try:
        return float(head)
    except ValueError:
        return 0.0


def first_warning(row: Row) -> int | None:
    """Return the number of generations after which the axis report warns first; None if it never does."""
    history = History(Config.model_validate(row["config"]))
    rule = WrongAxis("wrong axis")
    for count, generation in enumerate(row["generations"], 1):
        history.rows.append({"axes": generation.get("diagnosis", {}).get("axes")})
        if count >= WINDOW and rule.sentence(history) is not None:
            return count
    return None


@lru_cache
def unseen(task: str, items: int) -> NDArray[np.bool_]:
    """Return by test row whether training has no row of its kind: a function's schema, or a problem's template."""
    kinds = {"tool_calls": ToolCalls, "word_problems": WordProblems}
    return (
        np.array([row["unseen"] for row in kinds[task].rows("test", items)]) if task in kinds else np.zeros(items, bool)
    )


def stacked(runs: Sequence[Run]) -> Floats:
    """Return exactness after training [S, I]."""
    return np.stack([run.after for run in runs])


def paired(a: Sequence[Run], b: Sequence[Run]) -> tuple[Floats, Floats, bool]:
    """Return exactness after training of both groups of runs, of common seeds if they share nearly all.

    Raises ValueError if they ran on several kinds of cards.
    """
    if len(cards := {run.row["device"] for run in (*a, *b)}) > 1:
        raise ValueError(f"runs of equal seconds are compared on one kind of card, not on {sorted(cards)}")
    of_a, of_b = ({run.seed: run for run in runs} for runs in (a, b))
    if seeds := shared(of_a, of_b):
        return stacked([of_a[s] for s in seeds]), stacked([of_b[s] for s in seeds]), True
    return stacked(a), stacked(b), False


def table(head: Sequence[str], lines: Sequence[Sequence[object]]) -> Lines:
    """Yield a Markdown table whose columns after the first are numbers."""
    yield f"| {' | '.join(head)} |"
    yield f"| --- |{' ---: |' * (len(head) - 1)}"
    for line in lines:
        assert len(line) == len(head), f"{len(line)} cells under {len(head)} names: {line}"
        yield f"| {' | '.join(map(str, line))} |"


def share(value: float | np.floating[Any] | None) -> str:
    """Return a share in per cent."""
    return "-" if value is None else f"{value:.1%}"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def by_seed(runs: Sequence[Run], of: Callable[[Run], float | None]) -> dict[int, float]:
    """Return a number of each run by its seed, of those that have it."""
    return {run.seed: float(value) for run in runs if (value := of(run)) is not None}


def points(value: float | Estimate | None) -> str:
    """Return a difference of shares in points, with its interval if it has one."""
    if value is None:
        return "-"
    if not isinstance(value, Estimate):
        return f"{round(100 * value, 1) + 0.0:+.1f}"  # no -0.0
    if value.low is None or value.high is None:
        return f"{100 * value.mean:+.1f}"
    return f"{100 * value.mean:+.1f} ({100 * value.low:+.1f} to {100 * value.high:+.1f})"
