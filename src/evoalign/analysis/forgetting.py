# SPDX-License-Identifier: Apache-2.0
"""`evoalign analyze forgetting`: what training did to a model outside of its task.

The base model, every saved checkpoint and placebos are evaluated on other tasks and on held-out text. Array suffixes: E
examples or pieces of text, K placebos.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evoalign import statistics
from evoalign.analysis.base import BASE, Analysis, Finding, as_json, below, check_unique, row, short_names
from evoalign.errors import ConfigError, DataError
from evoalign.report import watching
from evoalign.report.figures import COLORS, GRID, canvas, frame, plain, save_both, series
from evoalign.report.tables import shorten, visible
from evoalign.statistics import Estimate

if TYPE_CHECKING:
    from evoalign.analysis.mixer import ModelMixer
    from evoalign.analysis.targets import Target
    from evoalign.config import Config

Floats: TypeAlias = NDArray[np.float64]
MOST_TEXT = 2**28
"""Most bytes of a text file."""


@dataclass(frozen=True)
class Settings:
    """`tasks`: a config file for each other task. `examples` of its test split are evaluated; `measure` None: accuracy
    where the task has it, else the reward.

    `text`: a UTF-8 file of held-out text, cut into `pieces` pieces of `window` tokens; None: the first test prompts of
    the target's own task. `placebos`: how often the journal of a run of ES is followed to its end with shuffled
    coefficients, and evaluated likewise.
    """

    tasks: tuple[Path, ...] = ()
    text: Path | None = None
    examples: int = 100
    measure: str | None = None
    pieces: int = 64
    window: int = 128
    placebos: int = 5


@dataclass(frozen=True, slots=True)
class Point:
    """Saved weights after `step` generations or optimizer steps; `placebo` is a placebo's seed, None: the target."""

    folder: Path
    step: int
    placebo: int | None = None


class Accuracy:
    """A measure of the examples of a task's test split. `falls`: less is worse."""

    falls = True

    def __init__(self, config: Config, measure: str | None) -> None:
        self._config, self._measure = config, measure
        self.name = f"{config.task.name} {measure or 'accuracy'}"

    def config(self, target: Target) -> Config:
        """Return the config that the points of a target are evaluated with."""
        from evoalign.analysis.targets import locate

        made = self._config if target.run is None else locate(str(target.weights), self._config).config
        return made.model_copy(update={"model": target.config.model, "engine": target.config.engine})

    def is_trained(self, target: Target) -> bool:
        """Return whether it is the task that the target was trained on."""
        task, made = self.config(target).task, target.config.task
        return (task.name, task.files) == (made.name, made.files)

    def score(self, mixer: ModelMixer, name: str) -> Floats:
        """Return the scores [E] of a point; of the base model for `BASE`."""
        found = mixer.evaluate({name: 1.0}).measures_E
        measure = self._measure or ("accuracy" if "accuracy" in found else "reward")
        if measure not in found:
            raise ConfigError(f"measure: task {self._config.task.name} has no {measure}; it has {', '.join(found)}")
        self.name = f"{self._config.task.name} {measure}"
        return np.array(found[measure])


class Text:
    """Nats per token, the logarithm of the perplexity, of pieces of held-out text; each first token is not counted."""

    falls = False

    def __init__(self, file: Path | None, pieces: int, window: int) -> None:
        from evoalign.config.reading import read_bytes

        self._pieces, self._window, self._text = pieces, window, None
        if file is not None:
            try:
                self._text = read_bytes(file, MOST_TEXT, "give a text file").decode("utf-8")
            except UnicodeDecodeError:
                raise ConfigError(f"text: {file} is not UTF-8; give a text file") from None
        self.name = f"nats per token of {'the test prompts' if file is None else file.name}"

    def config(self, target: Target) -> Config:
        return target.config

    def is_trained(self, _: Target) -> bool:
        return False

    def score(self, mixer: ModelMixer, name: str) -> Floats:
        import torch

        from evoalign.checks.divergence import Sample, logits_of

        nats: list[float] = []
        with torch.no_grad():
            mixer.write({name: 1.0})
            device = next(mixer.model.parameters()).device
            for ids in self._cut(mixer):
                sample = Sample(tuple(ids[:1]), tuple(ids[1:]))
                logp_TV = logits_of(mixer.model, sample, device).double().log_softmax(-1)
                ids_T1 = torch.tensor(sample.token_ids, device=device)[:, None]
                nats.append(float(-logp_TV.gather(1, ids_T1).mean()))
        return np.array(nats)

    def _cut(self, mixer: ModelMixer) -> list[tuple[int, ...]]:
        """Return the pieces of two or more tokens. Raises DataError where there is none."""
        from evoalign import tokens

        known = tokens.load(mixer.config.model, mixer.config.task.template_kwargs)
        if self._text is None:
            prompts = (known.encode(mixer.task.prompt(example)) for example in mixer.examples[: self._pieces])
            found = [ids[: self._window] for ids in prompts if len(ids) > 1]
        else:
            ids = known.encode_text(self._text)
            starts = range(0, min(len(ids), self._pieces * self._window), self._window)
            found = [ids[i : i + self._window] for i in starts if len(ids) - i > 1]
        if not found:
            raise DataError(f"{self.name}: there is no text of two tokens; give a longer one as text=FILE")
        return found


@dataclass(frozen=True, slots=True)
class Course:
    """Scores of one target on one probe: of the base, of each saved point, and of each placebo of the last one.

    `trained`: the probe is the task that the target was trained on.
    """

    target: str
    probe: str
    falls: bool
    trained: bool
    steps: tuple[int, ...]
    base_E: Floats
    own_E: tuple[Floats, ...]
    placebo_KE: tuple[Floats, ...]

    @property
    def changes(self) -> list[Estimate]:
        """The change of each saved point from the base, over examples."""
        return [statistics.paired(self.base_E, own_E) for own_E in self.own_E]

    @property
    def drift(self) -> Estimate | None:
        """The mean change by placebos, over examples and placebos; None without placebos."""
        return statistics.crossed(np.stack(self.placebo_KE) - self.base_E) if self.placebo_KE else None

    @property
    def beyond(self) -> Estimate | None:
        """The last point minus the mean of the placebos; the interval contains 0 for one more placebo."""
        return statistics.beside(self.own_E[-1], np.stack(self.placebo_KE)) if self.placebo_KE else None

    def tree(self) -> dict[str, Any]:
        """Return scores and changes for JSON; the perplexity of a text is that of its mean."""

        def values(scores_E: Floats) -> dict[str, float]:
            mean = float(scores_E.mean())
            return {"mean": mean} if self.falls else {"mean": mean, "perplexity": exp(min(mean, 700.0))}

        points = [
            {"step": step, **values(scores_E), "change": change}
            for step, scores_E, change in zip(self.steps, self.own_E, self.changes, strict=True)
        ]
        return as_json(
            {
                "target": self.target,
                "probe": self.probe,
                "less_is_worse": self.falls,
                "trained": self.trained,
                "items": len(self.base_E),
                "base": values(self.base_E),
                "points": points,
                "placebos": [values(one) for one in self.placebo_KE],
                "drift": self.drift,
                "beyond_drift": self.beyond,
            }
        )


class Forgetting(Analysis[Settings]):
    """Perplexity of held-out text and accuracy on other tasks, of the base model and over the saved checkpoints.

    Placebos of runs of ES show what noise alone does.
    """

    name = "forgetting"
    help = "Perplexity of held-out text and accuracy on other tasks, over checkpoints, with placebos."
    settings = Settings

    def run(self, targets: Sequence[str], settings: Settings, config: Config | None = None) -> Finding:
        """Loads the base model and the weights of one point at a time. Raises EvoalignError."""
        from evoalign.analysis.targets import locate

        check_unique(targets)
        for name, least in (("examples", 1), ("pieces", 1), ("window", 2), ("placebos", 0)):
            if getattr(settings, name) < least:
                raise ConfigError(f"{name}: {getattr(settings, name)} is too few; set {least} or more")
        located = [locate(name, config) for name in targets]
        courses = measure(located, settings)
        numbers = {**asdict(settings), "targets": [t.described() for t in located], "courses": courses}
        lines = [_row(course) for course in courses]
        if not settings.tasks:
            lines.append("No other task was evaluated; name config files of tasks: tasks=[other.yaml].")
        if settings.text is None:
            lines.append("The text is the test prompts; give a text that is unrelated to the task: text=FILE.")
        if any(_has_journal(t) for t in located) and not any(course.placebo_KE for course in courses):
            lines.append("There are no placebos, so forgetting and noise cannot be distinguished; set placebos=5.")
        if len(courses) > 1:
            lines.append(f"{len(courses)} verdicts are not corrected for their number: 1 in 20 is a false positive.")
        return Finding(numbers, lines, figures=partial(draw, courses))


def measure(located: Sequence[Target], settings: Settings) -> list[Course]:
    """Return the scores of each target on each task and text. Raises EvoalignError."""
    from evoalign.config import load
    from evoalign.setup import as_config
    from evoalign.training.replay import replay

    configs = [as_config(load([file])) for file in settings.tasks]
    probes = [Accuracy(config, settings.measure) for config in configs]
    probes = [*probes, Text(settings.text, settings.pieces, settings.window)]
    saved = [[Point(folder, generation or 0) for folder, generation in target.saved] for target in located]
    placebos = [settings.placebos if _has_journal(target) else 0 for target in located]
    watching.count(sum(k + len(probes) * (len(points) + k) for points, k in zip(saved, placebos, strict=True)))
    courses: list[Course] = []
    for target, own, k in zip(located, saved, placebos, strict=True):
        with tempfile.TemporaryDirectory(prefix="evoalign-") as scratch:
            points, step = list(own), own[-1].step
            for seed in watching.each(range(k), f"{target.name}, placebos"):
                assert target.run is not None
                to = Path(scratch) / f"placebo_{seed}"
                replay(target.run, generation=step, to=to, counterfactual="shuffle", seed=seed)
                points.append(Point(to, step, seed))
            courses += [_course(target, probe, points, settings.examples) for probe in probes]
    return courses


def _has_journal(target: Target) -> bool:
    from evoalign.rundir.method import JOURNAL

    return target.is_whole_run and target.run is not None and (target.run / JOURNAL).is_file()


def _course(target: Target, probe: Accuracy | Text, points: Sequence[Point], examples: int) -> Course:
    """Score the base model and all points, whose weights are loaded one after the other."""
    from evoalign.analysis.mixer import EvalSettings, ModelMixer

    config, scores = probe.config(target), list[Floats]()
    for point in points:
        name = str(point.folder)
        what = f"after {point.step}" if point.placebo is None else f"placebo {point.placebo}"
        watching.begin(f"{target.name}, {probe.name}, {what}")
        with ModelMixer([name], config, EvalSettings(examples=examples)) as mixer:
            scores += [probe.score(mixer, one) for one in ([name] if scores else [BASE, name])]
    base_E, *rest = with_scores(scores, probe.name)
    steps = tuple(p.step for p in points if p.placebo is None)
    own_E, placebo_KE = tuple(rest[: len(steps)]), tuple(rest[len(steps) :])
    return Course(target.name, probe.name, probe.falls, probe.is_trained(target), steps, base_E, own_E, placebo_KE)


def with_scores(scores_E: Sequence[Floats], name: str) -> list[Floats]:
    """Return the scores of the examples that have one at every point. Raises ConfigError where there is none."""
    known_E = ~np.isnan(scores_E).any(axis=0)
    if not known_E.any():
        raise ConfigError(f"measure: {name} applies to no evaluated example; set more examples, or another measure")
    return [own_E[known_E] for own_E in scores_E]


def _row(course: Course) -> str:
    """Return a row, with whether the last point is worse than the base, and than noise alone."""

    def verdict(found: Estimate) -> str:
        if not statistics.is_sure(found):
            return "no significant change"
        return "worse" if (found.mean < 0) is course.falls else "better"

    numbers, change, placebos = course.tree(), course.changes[-1], len(course.placebo_KE)
    base, last = numbers["base"], numbers["points"][-1]
    cells: dict[str, object] = {"base": base["mean"], "last": last["mean"]}
    cells["perplexity"] = None if course.falls else f"{base['perplexity']:.3g} to {last['perplexity']:.3g}"
    cells |= {"change": f"{change}, {verdict(change)}", f"by {placebos} placebos": course.drift}
    cells["beyond placebos"] = course.beyond and f"{course.beyond}, {verdict(course.beyond)}"
    return row(f"{course.target}: {course.probe}{' (the task that it was trained on)' * course.trained}", cells)


def draw(courses: Sequence[Course], folder: Path) -> list[Path]:
    """Draw the change from the base over checkpoints, with placebos of the end: a panel for each task and text."""
    probes = list(dict.fromkeys(course.probe for course in courses))
    targets = list(dict.fromkeys(course.target for course in courses))
    short = short_names(targets)
    figure = canvas(8.0, 2.5 * len(probes) + 1.2, layout="constrained")
    panels = figure.subplots(len(probes), 1, squeeze=False)[:, 0]
    frame(panels[0], "Change from the base model", "")
    for axes, probe in zip(panels, probes, strict=True):
        plain(axes)
        axes.axhline(0, color=GRID, linewidth=1.2)
        axes.set_ylabel(shorten(visible(probe), 40))
        for course in (one for one in courses if one.probe == probe):
            index, changes = targets.index(course.target), course.changes
            label, color = short[course.target], COLORS[index % len(COLORS)]
            x, y = [0, *course.steps], [0.0, *(c.mean for c in changes)]
            axes.plot(x, y, label=label, markersize=4, **series(index))
            for step, change in zip(course.steps, changes, strict=True):
                if change.low is not None and change.high is not None:
                    axes.plot([step, step], [change.low, change.high], color=color, linewidth=1.0)
            ends = [float((one - course.base_E).mean()) for one in course.placebo_KE]
            axes.plot([course.steps[-1]] * len(ends), ends, color=color, marker="x", linestyle="", markersize=6)
    panels[-1].set_xlabel("generation or step: lines are 95 % over examples; x: placebos of the end")
    below(figure, panels[0], 1)
    return save_both(figure, folder / "forgetting.png")
