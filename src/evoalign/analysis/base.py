# SPDX-License-Identifier: Apache-2.0
"""The interface of an analysis: targets and settings in; numbers, text and figures out."""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from fnmatch import fnmatch
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from evoalign.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console

    from evoalign.config import Config
    from evoalign.evaluation import Scored
    from evoalign.statistics import Estimate

FORMAT_VERSION = 1
BASE = "base"
"""The target that stands for the model from which the other targets were trained."""


@dataclass(frozen=True)
class NoSettings:
    """Settings of an analysis that has none."""


S = TypeVar("S")


@dataclass(frozen=True)
class Finding:
    """Result of an analysis: `numbers` are written as JSON, see `as_json`; `sentences` are printed.

    `figures` draws into a folder and returns the paths. Both texts may quote a downloaded run: `show` escapes control
    characters.
    """

    numbers: Mapping[str, Any]
    sentences: Sequence[str]
    figures: Callable[[Path], Sequence[Path]] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "numbers", as_json(self.numbers))

    def show(self, console: Console) -> None:
        """Print the sentences."""
        from evoalign.report.tables import tell

        for line in self.sentences:
            tell(console, line)

    def draw(self, folder: Path) -> list[Path]:
        """Draw the figures into an existing folder, and return their paths."""
        return [] if self.figures is None else [*self.figures(folder)]

    def write(self, folder: Path, name: str) -> list[Path]:
        """Write `<name>.json` and the figures into an existing folder, and return their paths."""
        from evoalign.rundir.files import write_json

        drawn, file = self.draw(folder), folder / f"{name}.json"
        tree = {
            "format_version": FORMAT_VERSION,
            "analysis": name,
            "sentences": list(self.sentences),
            "figures": [path.name for path in drawn],
            "numbers": self.numbers,
        }
        write_json(file, tree)
        return [file, *drawn]


class Analysis(ABC, Generic[S]):
    """One question about runs or models. Subclass it, and set its name, its help and its settings."""

    name: ClassVar[str]
    help: ClassVar[str]
    """One line."""
    settings: type[S]
    """A frozen dataclass in which every field has a default; `--set field=value` sets it."""

    @abstractmethod
    def run(self, targets: Sequence[str], settings: S, config: Config | None = None) -> Finding:
        """Analyse runs, model folders or PEFT adapters. `config` applies to targets that have none.

        Raises EvoalignError, which names what is wrong and how to fix it.
        """


def settings_of(analysis: Analysis[S], overrides: Sequence[str] = ()) -> S:
    """Return the settings with `field=value` overrides. Raises ConfigError naming each wrong one."""
    from pydantic import TypeAdapter, ValidationError

    from evoalign.config import parse_overrides

    tree = parse_overrides({}, overrides)
    known = described(analysis)
    unknown = [name for name in tree if name not in known]
    if unknown:
        raise ConfigError(f"analysis {analysis.name} has no setting {unknown[0]}; it has {', '.join(known) or 'none'}")
    try:
        return TypeAdapter(analysis.settings).validate_python(tree)
    except ValidationError as error:
        wrong = error.errors(include_url=False)
        raise ConfigError("\n".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in wrong)) from None


def described(analysis: Analysis[Any]) -> dict[str, Any]:
    """Return the names of the settings and their defaults."""
    return asdict(analysis.settings())


def explained(analysis: Analysis[Any]) -> list[str]:
    """Return the paragraphs of the settings' docstring, each on one line; empty without a docstring."""
    text = inspect.cleandoc(analysis.settings.__doc__ or "")
    if text.startswith(f"{analysis.settings.__name__}("):  # the docstring that `dataclass` generates
        return []
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n") if paragraph]


def as_json(value: Any) -> Any:
    """Return a value for JSON: an `Estimate` and other dataclasses as fields, arrays as lists, None if not finite."""
    if hasattr(value, "tree"):
        return value.tree()
    if is_dataclass(value):
        return {one.name: as_json(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_json(one) for key, one in value.items()}  # pyright: ignore[reportUnknownArgumentType]
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [as_json(one) for one in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not isfinite(value) else value


def row(label: str, cells: Mapping[str, object]) -> str:
    """Return `label: name value; name value`: one row of results as text, intervals included.

    A number has three digits; a cell of None is left out.
    """
    shown = [
        f"{name} {value}" if isinstance(value, str | int) else f"{name} {value:.3g}"
        for name, value in cells.items()
        if value is not None
    ]
    return f"{label}: {'; '.join(shown)}"


def by_example(completions: Sequence[Scored], marks: Sequence[bool]) -> dict[int, float]:
    """Return the share of marked completions of each example."""
    found: defaultdict[int, list[bool]] = defaultdict(list)
    for one, mark in zip(completions, marks, strict=True):
        found[one.example].append(mark)
    return {example: sum(own) / len(own) for example, own in found.items()}


def check_unique(targets: Sequence[str]) -> None:
    """Raise ConfigError where a target is given twice."""
    if twice := sorted({name for name in targets if list(targets).count(name) > 1}):
        raise ConfigError(f"{twice[0]} is given twice; name each target once")


def error_bars(found: Sequence[Estimate]) -> list[list[float]]:
    """Return the lengths of the intervals below and above the means for `errorbar`; 0 without an interval."""
    lows = [max(0.0, one.mean - (one.mean if one.low is None else one.low)) for one in found]
    highs = [max(0.0, (one.mean if one.high is None else one.high) - one.mean) for one in found]
    return [lows, highs]


LABELS: ContextVar[Mapping[str, str]] = ContextVar("labels")
"""Labels of targets that the user gives, which `short_names` returns."""


def short_names(names: Sequence[str], length: int = 60) -> dict[str, str]:
    """Return the names of targets in figures: the parts of their paths in which they differ, invisible characters
    escaped.

    Folders that all of them share are left out at both ends, and so are the `key=value` items of a sweep's folders that
    all of them share. One target alone has its last folder, and the one above a seed or a generation.
    """
    from evoalign.report.tables import visible

    given = LABELS.get({})
    parts = {name: list(Path(name).absolute().parts) for name in names if name != BASE}
    known = list(parts.values())
    if len(known) == 1:
        known[0][:] = known[0][-2 if _NUMBERED.fullmatch(known[0][-1]) else -1 :]
    for end in (0, -1):
        while len(known) > 1 and min(map(len, known)) > 1 and len({one[end] for one in known}) == 1:
            for one in known:
                del one[end]
    items = [{item for part in one for item in part.split(",") if "=" in item} for one in known]
    shared = set[str].intersection(*items) if len(items) > 1 else set[str]()
    shorter = {name: _without(own, shared) for name, own in parts.items()}
    if len(set(shorter.values())) < len(shorter) or not all(shorter.values()):
        shorter = {name: "/".join(own) for name, own in parts.items()}
    found = {name: visible(given.get(name) or shorter.get(name, name)) for name in names}
    half = (length - 3) // 2
    return {n: t if len(t) <= length else f"{t[:half]}...{t[half + 3 - length :]}" for n, t in found.items()}


_NUMBERED = re.compile(r"(seed|generation)_\d+")


def labels_of(names: Sequence[str], targets: Sequence[str]) -> dict[str, str]:
    """Return the label of each target that a `LABEL=GLOB` of `names` matches. Raises ConfigError."""
    labels: dict[str, str] = {}
    for label, pattern in parsed_names(names).items():
        hits = [t for t in targets if fnmatch(t, pattern) or fnmatch(Path(t).name, pattern)]
        if len(hits) != 1:
            raise ConfigError(f"--name {label}={pattern} matches {len(hits)} targets; it must match one")
        labels[hits[0]] = label
    return labels


def parsed_names(texts: Sequence[str]) -> dict[str, str]:
    """Return the patterns by label of texts such as `GRPO=*/grpo_*`. Raises ConfigError."""
    names: dict[str, str] = {}
    for text in texts:
        label, equals, pattern = text.partition("=")
        if not (label.strip() and equals and pattern):
            raise ConfigError(f"--name {text!r}: expected LABEL=GLOB, such as GRPO='*/grpo_*'")
        names[label.strip()] = pattern
    return names


def _without(parts: Sequence[str], shared: Collection[str]) -> str:
    kept = [",".join(item for item in part.split(",") if item not in shared) for part in parts]
    return "/".join(part for part in kept if part)


def below(figure: Figure, axes: Axes, columns: int, title: str | None = None) -> None:
    """Draw the legend of `axes` below all panels."""
    handles, labels = axes.get_legend_handles_labels()
    look: dict[str, Any] = {"frameon": False, "title": title, "alignment": "left"}
    figure.legend(handles, labels, loc="outside lower left", ncols=columns, **look)


def files(folder: Path, name: str, shown: Sequence[str], most: int) -> Iterator[tuple[Path, Sequence[str]]]:
    """Yield `NAME.png`, `NAME_2.png`, ... with what each file shows: `most` of the given names."""
    for number, start in enumerate(range(0, len(shown), most), 1):
        yield folder / (f"{name}.png" if number == 1 else f"{name}_{number}.png"), shown[start : start + most]
