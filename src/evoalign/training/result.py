# SPDX-License-Identifier: Apache-2.0
"""Result of a run: the test split before and after training, shown and written to files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from evoalign import evaluation
from evoalign.checks.divergence import Fluency
from evoalign.checks.hacking import Verdict, judge
from evoalign.config import EvaluationConfig
from evoalign.config.reading import read_object
from evoalign.errors import DataError
from evoalign.evaluation import Evaluation, Scored
from evoalign.placebos.estimates import Placebos
from evoalign.report.tables import Interval, Sample, alarm, before_after, headline, is_share, weighed
from evoalign.rewards.objective import aim_of
from evoalign.rundir import parquet
from evoalign.rundir.directory import RunDir
from evoalign.rundir.files import write_json
from evoalign.tasks import Data, Split, Task
from evoalign.transcripts import readable

if TYPE_CHECKING:
    from pandas import DataFrame

SHOWN_SAMPLES = 4
INTERVALS = "over examples: Student's t; of shares (0 or 1), Bonett and Price"
"""Kind of the intervals in results/evaluation.json. A file without this entry has bootstrap (BCa) intervals."""
OF_SETS = f"; of task.fitness, percentiles of {evaluation.RESAMPLES} paired resamples of the examples"
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a finished run. `saved` is a PEFT adapter or a Hugging Face checkpoint."""

    path: Path
    saved: Path
    before: Evaluation
    after: Evaluation
    verdict: Verdict | None = None
    """Signs of reward hacking in the completions."""

    def completions(self) -> DataFrame:
        """Return the completions of the test split as a pandas frame, one row per example, seed and sample.

        Columns: example, seed, sample, prompt, target; and text, reward, each of several rewards, right, finish_reason
        and tokens, each as `.._before` and `.._after`.
        """
        from evoalign.report import frames  # pandas takes its time

        return frames.completions(*([s.flat() for s in found.completions] for found in (self.before, self.after)))

    def measures(self) -> DataFrame:
        """Return the measures of the test split as a pandas frame: before, after, change, its 95 % interval."""
        from evoalign.report import frames

        return frames.measures(self.before.measures, self.after.measures, _change(self.before, self.after))

    def __repr__(self) -> str:
        first, last = self.before.measures, self.after.measures
        count = len(self.before.measures_E["reward"])
        name = aim_of(first)
        line = headline(first, last, _change(self.before, self.after).get(name), count, name)
        alarms = "" if self.verdict is None or self.verdict.word is None else f"\n{self.verdict.word}: see its reasons"
        return f"{shown(self.path)}: {line}{alarms}\nsaved {shown(self.saved)}"

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""
        from evoalign.report import frames

        first, *rest = repr(self).splitlines()
        reasons = [] if self.verdict is None else [*self.verdict.reasons, *self.verdict.lines()]
        figure = self.path / "figures" / "evolution.png"
        return frames.page(first, [*rest, *reasons], self.measures(), self.completions(), figure)


def gold_lines(task: Task, data: Data) -> list[str]:
    """Return a warning if gold answers do not earn the maximum. It is no error: published data has such rows."""
    try:
        task.self_check(data.all)
    except DataError as error:
        return [f"warning: {error}"]
    return []


def write_completions(run: RunDir, name: str, result: Evaluation) -> None:
    """Write the completions of an evaluation to results/completions."""
    parquet.write(run.completions(name), [s.flat() for s in result.completions])


def read_completions(run: RunDir, name: str, task: Task, data: Data, split: Split = "test") -> Evaluation | None:
    """Read an evaluation of a split; None if its file is missing or damaged."""
    examples = data.of(split)
    try:
        scored = [Scored.of(row) for row in parquet.read(run.completions(name))]
        for i, found in enumerate(scored):
            if found.right is None:  # an earlier release did not record it
                right = task.is_right(task.clean(found.text), task.handed(examples[found.example]))
                scored[i] = replace(found, right=right)
        return evaluation.summarise(task, examples, scored)
    except (DataError, TypeError, IndexError, AttributeError):
        return None


def write_results(
    run: RunDir,
    settings: EvaluationConfig,
    mean: Mapping[str, Any],
    before: Evaluation,
    after: Evaluation,
    placebos: Placebos | None = None,
) -> None:
    """Write results/evaluation.json and the completions. `mean` names the weights of `after`."""
    write_completions(run, "after", after)
    tree = {
        "format_version": 1,
        **mean,
        "split": "test",
        "examples": len(next(iter(before.measures_E.values()))),
        "settings": settings.model_dump(mode="json"),
        "before": before.measures,
        "after": after.measures,
        "intervals": INTERVALS + (OF_SETS if before.resampled else ""),
        "change_mean_low_high": {name: list(interval) for name, interval in _change(before, after).items()},
        **({} if placebos is None else {"placebo": placebos.as_dict()}),
    }
    write_json(run.results / "evaluation.json", tree)


def show(
    before: Evaluation,
    after: Evaluation,
    verdict: Verdict,
    console: Console,
    tell: Tell,
    placebos: Placebos | None = None,
    weights: Mapping[str, float] | None = None,
    scored: str = "completions",
) -> None:
    """Show both evaluations, their change and its placebos; above them the signs of reward hacking with completions.

    `weights` are those of several rewards, `scored` is `Task.scored`. A change whose interval contains 0 or is unknown
    is reported.
    """
    change = _change(before, after)
    mean = None if placebos is None else placebos.measures
    if verdict.word is not None:
        alarm(verdict.word, verdict.reasons, _samples(before, after, verdict.shown), console)
    names = {
        f"{evaluation.PREFIX}{name}": f"reward/{weighed(name, weight)}" for name, weight in (weights or {}).items()
    }
    before_after(before.measures, after.measures, console, _samples(before, after), change, mean, names, scored)
    for line in [*verdict.lines(), *(() if placebos is None else placebos.lines())]:
        tell(line)
    name = aim_of(after.measures)
    what = f"the {name}" if name == "reward" else name
    gain = after.measures[name] - before.measures[name]
    mean_change, low, high = change.get(name, (gain, gain, gain))
    if low == high:
        why = "too few examples, or all changed by the same amount"
        why += "" if name in change else ", or the function takes too long or fails on examples drawn again"
        tell(f"the change of {what} on the test split, {mean_change:+.4g}, has no interval: {why}")
    elif low <= 0 <= high:
        interval = f"its 95 % interval, {low:+.4g} to {high:+.4g}, contains 0"
        tell(f"the change of {what} on the test split, {mean_change:+.4g}, is not significant: {interval}")


def validation_of(before: Evaluation, after: Evaluation) -> tuple[dict[str, Any], str]:
    """Return the entry of evaluation.json for the validation split, and the line on its reward before and after."""
    count, name = len(next(iter(before.measures_E.values()))), aim_of(before.measures)
    first, last = (found.measures[name] for found in (before, after))
    line = f"on the {count} validation examples the {name} went from {first:.4g} to {last:.4g}"
    return {"examples": count, "before": before.measures, "after": after.measures}, line


def judged_again(run: RunDir, before: Evaluation, after: Evaluation) -> Verdict:
    """Return the signs of reward hacking in a finished run, with its recorded nats per token."""
    try:
        nats = read_object(run.results / "evaluation.json").get("alarms", {}).get("nats_a_token")
        fluency = None if nats is None else Fluency(**nats)
    except (DataError, TypeError, AttributeError):
        fluency = None
    return judge(before.completions, after.completions, fluency)


def shown(path: Path) -> Path:
    """Return a path relative to the working directory, if it is below that."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _change(before: Evaluation, after: Evaluation) -> dict[str, Interval]:
    """Return the change of each measure and its paired 95 % interval over examples."""
    changes = evaluation.resampled_interval(before, after) | {
        name: evaluation.paired_interval(values, after.measures_E[name], shares=is_share(name))
        for name, values in before.measures_E.items()
        if name in after.measures_E
    }
    return {name: change for name, change in changes.items() if not math.isnan(change[0])}


def _samples(before: Evaluation, after: Evaluation, which: Sequence[int] = range(SHOWN_SAMPLES)) -> list[Sample]:
    pairs = list(zip(before.completions, after.completions, strict=True))
    shown = [pairs[i] for i in which if i < len(pairs)]
    return [
        Sample(b.prompt, None if b.target is None else readable(b.target), readable(b.text), readable(a.text))
        for b, a in shown
    ]
