# SPDX-License-Identifier: Apache-2.0
"""What the page shows of one run, as plain data, whoever gathers it. Nothing in it is trusted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from evoalign.report.figures import ES_WORDS, Ends, Words
from evoalign.report.tables import Interval

State = Literal["done", "measuring", "unfinished"]
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Measure:
    """One measure of the test split: its value before, after (None: not there yet) and in the mean placebo."""

    name: str
    before: float | None
    after: float | None
    change: Interval | None = None
    placebo: float | None = None


@dataclass(frozen=True, slots=True)
class Placebos:
    """What was trained for in the run and its placebos, by name, and the same in sentences."""

    name: str
    before: float
    real: float
    placebos: Sequence[float]
    flip: float | None
    lines: Sequence[str]


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure of an analysis: PNG or SVG."""

    name: str
    kind: Literal["png", "svg+xml"]
    data: bytes


@dataclass(frozen=True, slots=True)
class Analysed:
    """What one analysis wrote: `numbers` as JSON text; `left_out` names what was too large for the page."""

    name: str
    sentences: Sequence[str]
    numbers: str
    pictures: Sequence[Picture] = ()
    left_out: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model said to one question."""

    text: str
    reward: float
    right: bool | None
    finish_reason: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Pair:
    """A question of the test split, and the answers before training and after it, where each is there."""

    key: tuple[int, int, int]
    """Example, seed, sample."""
    prompt: str
    target: str | None
    before: Answer | None
    after: Answer | None


@dataclass(frozen=True, slots=True)
class View:
    """One run. `alarms` and `warnings` are sentences, the worst first; `headline` says what became of the reward, and
    `beside` what has to be read with it. `about` is what it is, and `made` where and with what, by name.

    `settings` are those of the config that the run reads, by dotted name, with their `defaults`. `ends` are by split.
    """

    name: str
    path: str
    method: str = "ES"
    about: Mapping[str, str] = field(default_factory=dict[str, str])
    made: Mapping[str, str] = field(default_factory=dict[str, str])
    state: State = "unfinished"
    steps: int = 0
    total: int | None = None
    words: Words = ES_WORDS
    headline: str = ""
    beside: Sequence[str] = ()
    alarms: Sequence[str] = ()
    warnings: Sequence[str] = ()
    diagnosis: Sequence[str] = ()
    rows: Sequence[Row] = ()
    ends: Mapping[str, Ends] = field(default_factory=dict[str, Ends])
    measures: Sequence[Measure] = ()
    placebos: Placebos | None = None
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    defaults: Mapping[str, str] = field(default_factory=dict[str, str])
    budget: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict[str, Mapping[str, float | None]])
    completions: Sequence[Pair] = ()
    analyses: Sequence[Analysed] = ()
