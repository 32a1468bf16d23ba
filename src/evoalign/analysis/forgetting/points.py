# SPDX-License-Identifier: Apache-2.0
"""The points of a target, and what each of them scores. Array suffix: E examples, or pieces of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from evoalign import tokens
from evoalign.analysis.lab import BASE, Asked, Floats, Lab
from evoalign.analysis.targets import Target, locate
from evoalign.checks.divergence import Sample, logits_of
from evoalign.config import Config
from evoalign.config.reading import read_bytes
from evoalign.errors import ConfigError, DataError
from evoalign.report import watching
from evoalign.rundir.directory import generation_of, saved_folders
from evoalign.rundir.method import JOURNAL
from evoalign.training.replay import replay

MOST_TEXT = 2**28
"""Bytes of a text file."""


@dataclass(frozen=True, slots=True)
class Point:
    """Saved weights: after `step` generations or steps; `placebo` is the seed of one, None of the target's own."""

    folder: Path
    step: int
    placebo: int | None = None


def own_points(target: Target) -> list[Point]:
    """What a run saved, in order, or the one thing that a target is."""
    if not _is_whole(target):
        return [Point(target.weights, 0)]
    assert target.run is not None
    return [Point(folder, generation_of(folder)) for folder in saved_folders(target.run)]


def has_placebos(target: Target) -> bool:
    """Whether it is a run that a journal tells of."""
    return _is_whole(target) and target.run is not None and (target.run / JOURNAL).is_file()


def _is_whole(target: Target) -> bool:
    return target.run is not None and Path(target.name).resolve() == target.run.resolve()


def points_of(target: Target, placebos: int, scratch: Path) -> list[Point]:
    """Its own points, then placebos of its end, made in `scratch`.

    Raises JournalError, ResumeError where a placebo cannot be made.
    """
    found = own_points(target)
    if not has_placebos(target):
        return found
    assert target.run is not None
    for seed in watching.each(range(placebos), f"{target.name}, placebos"):
        to = scratch / f"placebo_{seed}"
        replay(target.run, generation=found[-1].step, to=to, counterfactual="shuffle", seed=seed)
        found.append(Point(to, found[-1].step, seed))
    return found


class Probe(Protocol):
    """One thing that is asked of every point."""

    name: str
    """Of the task or text, and of the measure."""
    falls: bool
    """Whether less is worse: of an accuracy it is, of nats a token it is not."""

    def asked(self, target: Target) -> Config:
        """The config that a point of a target is asked with."""
        ...

    def score(self, lab: Lab, name: str) -> Floats:
        """[E] of a point of a lab; the base model's under `BASE`."""
        ...


class Accuracy:
    """The mean of a measure over the test split of a task."""

    falls = True

    def __init__(self, config: Config, measure: str | None) -> None:
        self._config, self._measure = config, measure
        self.name = f"{config.task.name} {measure or 'accuracy'}"

    def asked(self, target: Target) -> Config:
        if target.run is None:
            return self._config.model_copy(update={"model": target.config.model, "engine": target.config.engine})
        made = locate(str(target.weights), self._config).config
        return made.model_copy(update={"model": target.config.model, "engine": target.config.engine})

    def score(self, lab: Lab, name: str) -> Floats:
        found = lab.answer({name: 1.0}).measures_E
        measure = self._measure or ("accuracy" if "accuracy" in found else "reward")
        if measure not in found:
            raise ConfigError(f"measure: task {self._config.task.name} has no {measure}; it has {', '.join(found)}")
        self.name = f"{self._config.task.name} {measure}"
        return np.array(found[measure])


class Text:
    """Nats a token, the logarithm of the perplexity, of held-out text: of each piece all tokens but the first."""

    falls = False

    def __init__(self, file: Path | None, pieces: int, window: int) -> None:
        self._file, self._pieces, self._window = file, pieces, window
        self._text = None if file is None else _read(file)
        self.name = f"nats a token of {'the test prompts' if file is None else file.name}"

    def asked(self, target: Target) -> Config:
        return target.config

    @torch.no_grad()
    def score(self, lab: Lab, name: str) -> Floats:
        lab.write({name: 1.0})
        device = next(lab.model.parameters()).device
        return np.array([_nats(lab.model, ids, device) for ids in self._cut(lab)])

    def _cut(self, lab: Lab) -> list[tuple[int, ...]]:
        """Pieces of two tokens or more. Raises DataError where there is none."""
        known = tokens.load(lab.config.model)
        if self._text is None:
            prompts = (known.encode(lab.task.prompt(example)) for example in lab.examples[: self._pieces])
            found = [ids[: self._window] for ids in prompts if len(ids) > 1]
        else:
            ids = known.encode_text(self._text)
            starts = range(0, min(len(ids), self._pieces * self._window), self._window)
            found = [ids[i : i + self._window] for i in starts if len(ids) - i > 1]
        if not found:
            raise DataError(f"{self.name}: there is no text of two tokens; give a longer one as text=FILE")
        return found


def _nats(model: Any, ids: Sequence[int], device: torch.device) -> float:
    """Mean nats of the tokens after the first."""
    sample = Sample(tuple(ids[:1]), tuple(ids[1:]))
    logp_TV = logits_of(model, sample, device).double().log_softmax(-1)
    said_T = torch.tensor(sample.token_ids, device=device)
    return float(-logp_TV.gather(1, said_T[:, None]).mean())


def _read(file: Path) -> str:
    try:
        return read_bytes(file, MOST_TEXT, "give a text file").decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"text: {file} is not UTF-8; give a text file") from None


def scores(probe: Probe, target: Target, points: Sequence[Point], examples: int) -> Iterator[Floats]:
    """[E] of the base model, then of each point, whose weights are loaded one after the other."""
    config, asked = probe.asked(target), Asked(examples=examples)
    for i, point in enumerate(points):
        name = str(point.folder)
        what = f"after {point.step}" if point.placebo is None else f"placebo {point.placebo}"
        watching.begin(f"{target.name}, {probe.name}, {what}")
        with Lab([name], config, asked) as lab:
            if i == 0:
                yield probe.score(lab, BASE)
            yield probe.score(lab, name)
