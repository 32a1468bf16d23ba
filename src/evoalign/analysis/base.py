# SPDX-License-Identifier: Apache-2.0
"""What every analysis is: a question asked of runs or models, answered in numbers, in plain words and in figures."""

from __future__ import annotations

import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from evoalign.errors import ConfigError
from evoalign.report.terminal import print_line

if TYPE_CHECKING:
    from rich.console import Console

    from evoalign.config import Config

FORMAT_VERSION = 1


@dataclass(frozen=True)
class NoSettings:
    """Of an analysis that has none."""


S = TypeVar("S")


@dataclass(frozen=True)
class Finding:
    """What came out: `numbers` as JSON, and `sentences` that say the same in plain words.

    Both may quote a run that was downloaded: `show` writes control characters out.
    """

    numbers: Mapping[str, Any]
    sentences: Sequence[str]

    def show(self, console: Console) -> None:
        """Print it; by default the sentences."""
        from evoalign.report.tables import visible

        for line in self.sentences:
            print_line(console, visible(line))

    def draw(self, folder: Path) -> list[Path]:
        """Figures, drawn into a folder that exists; none by default."""
        return []

    def write(self, folder: Path, name: str) -> list[Path]:
        """Write `<name>.json` and the figures into a folder that exists, and return their paths."""
        from evoalign.rundir.files import write_text

        drawn, file = self.draw(folder), folder / f"{name}.json"
        tree = {
            "format_version": FORMAT_VERSION,
            "analysis": name,
            "sentences": list(self.sentences),
            "figures": [path.name for path in drawn],
            "numbers": self.numbers,
        }
        write_text(file, json.dumps(tree, indent=2, allow_nan=False) + "\n")
        return [file, *drawn]


class Analysis(ABC, Generic[S]):
    """One question. Make a subclass `Command` of it in a folder of its own; state its name, its help and settings."""

    name: ClassVar[str]
    help: ClassVar[str]
    """One line."""
    settings: type[S]
    """A frozen dataclass in which every field has a default; `--set field=value` sets it."""
    command: ClassVar[Callable[..., None] | None] = None
    """A command `evoalign <name>` beside `evoalign analyze <name>`, for one that has options of its own."""

    @abstractmethod
    def run(self, targets: Sequence[str], settings: S, config: Config | None = None) -> Finding:
        """The answer for runs, model folders or PEFT adapters. `config` is that of targets which have none.

        Raises EvoalignError, which names what is wrong and how to fix it.
        """


def settings_of(analysis: Analysis[S], overrides: Sequence[str] = ()) -> S:
    """Its settings with `field=value` overrides. Raises ConfigError naming each wrong one."""
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
    """The names of its settings and their defaults."""
    defaults: Any = analysis.settings()
    return {field.name: asdict(defaults)[field.name] for field in fields(defaults)}


def explained(analysis: Analysis[Any]) -> list[str]:
    """What its settings are: the paragraphs of their docstring, each on one line; none where it has none."""
    text = inspect.cleandoc(analysis.settings.__doc__ or "")
    if text.startswith(f"{analysis.settings.__name__}("):  # what a dataclass without one is given
        return []
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n") if paragraph]
