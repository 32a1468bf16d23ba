# SPDX-License-Identifier: Apache-2.0
"""Tables for the terminal and for Markdown: measures before and after, completions, journals.

Completions are data. They are shown as text that rich never reads as markup, with every control character made visible,
so that a model cannot move the cursor, set a colour or end the line.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from evoalign.report.terminal import print_line
from evoalign.rundir.journal import Log, Recorded
from evoalign.types import Prompt

SHARES = frozenset({"accuracy", "exact", "format", "high_reward", "right"})
"""Measures shown in percent, like those whose name ends in `_share`."""
NAMES = {"right": "right by gold"}
"""Labels of measures."""
Interval = tuple[float, float, float]
"""Mean of the paired differences, and its 95 % interval; both ends are the mean if there is none."""
HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories of characters that are written as escapes."""
WHOLE = 20
"""Longest name of a measure, in terminal cells, that is not wrapped."""
LINES = 4
"""Most lines of a sample in a table cell."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One test example with its completions before and after training."""

    prompt: Prompt
    target: str | None
    before: str
    after: str


def before_after(
    before: Mapping[str, float],
    after: Mapping[str, float],
    console: Console,
    samples: Sequence[Sample] = (),
    intervals: Mapping[str, Interval] | None = None,
    placebo: Mapping[str, float] | None = None,
    names: Mapping[str, str] | None = None,
    scored: str = "completions",
) -> None:
    """Print the measures that both have, with the change and its interval, then the samples.

    `placebo` has the means over placebos, shown in a column; `names` are labels of measures, and `scored` is the name
    of the samples.
    """
    intervals, labels = intervals or {}, {**NAMES, **(names or {})}
    table = Table(title="test split", title_justify="left", title_style="bold")
    common = [name for name in before if name in after]
    named = [labels.get(name, name.removesuffix("_share").replace("_", " ")) for name in common]
    table.add_column("", overflow="fold", no_wrap=all(cell_len(name) <= WHOLE for name in named))
    more = [*(["95 % interval"] if intervals else []), *(["mean placebo"] if placebo is not None else [])]
    for heading in ("before", "after", "change", *more):
        table.add_column(heading, justify="right", overflow="fold")
    for name, shown in zip(common, named, strict=True):
        change = _signed(name, after[name] - before[name]) + (" points" if is_share(name) else "")
        cells = [value(name, before[name]), value(name, after[name]), change]
        if intervals:
            _, low, high = intervals.get(name, (0.0, 0.0, 0.0))
            none = "-" if name in intervals else ""
            cells.append(f"{_signed(name, low)} to {_signed(name, high)}" if low < high else none)
        if placebo is not None:
            cells.append(value(name, placebo[name]) if name in placebo else "")
        table.add_row(Text(shown), *cells)
    console.print(table)
    if samples:
        console.print(_samples(samples, console, f"sample {scored}"))


def alarm(word: str, reasons: Sequence[str], samples: Sequence[Sample], console: Console) -> None:
    """Print the verdict on a run, its reasons, and completions that show them."""
    ascii_only = not console.encoding.startswith("utf")
    lines = [f"{word.upper()}, judging by the test completions", *(f"- {line}" for line in reasons)]
    for number, line in enumerate(lines):
        style = "bold red" if number == 0 else ""
        console.print(Text(visible(line, ascii_only=ascii_only), style=style), soft_wrap=not console.is_jupyter)
    if samples:
        console.print(_samples(samples, console, "for example"))


def headline(
    before: Mapping[str, float], after: Mapping[str, float], change: Interval | None, count: int, name: str = "reward"
) -> str:
    """Return the change of the reward, or of another measure, in one line."""
    line = f"{name} {before[name]:.4g} -> {after[name]:.4g} on {count:,} test examples"
    if change is None or change[1] == change[2]:
        return line
    mean, low, high = change
    return f"{line} ({mean:+.4g}, 95 % interval {low:+.4g} to {high:+.4g})"


def weighed(name: str, weight: float) -> str:
    """Return the name of a reward with its weight, unless that is 1."""
    if weight == 1:
        return name
    return f"{name} (lower is better)" if weight == -1 else f"{name} (x {weight:g})"


def percent(shares: Mapping[str, float], most: int | None = None) -> str:
    """Return the `most` largest shares as text; those that are 0 % are left out."""
    shown = sorted(shares.items(), key=lambda item: -item[1])[:most]
    return ", ".join(f"{visible(name)} {share:.0%}" for name, share in shown if abs(share) >= 0.005)


def is_share(name: str) -> bool:
    """Whether a measure is shown in percent, by its name."""
    return name in SHARES or name.endswith("_share")


def value(name: str, value: float) -> str:
    """Format a measure: shares in percent."""
    return f"{value:.1%}" if is_share(name) else f"{value:.4g}"


def _signed(name: str, change: float) -> str:
    return f"{100 * change:+.1f}" if is_share(name) else f"{change:+.4g}"


def _samples(samples: Sequence[Sample], console: Console, title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_lines=True, expand=True)
    columns, ascii_only = {"prompt": 3, "target": 2, "before": 4, "after": 4}, not console.encoding.startswith("utf")
    if all(sample.target is None for sample in samples):
        del columns["target"]
    for heading, ratio in columns.items():
        table.add_column(heading, ratio=ratio, overflow="fold")
    room = LINES * max(8, console.width * columns["prompt"] // 13 - 3)
    prompts = questions([_prompt_text(sample.prompt) for sample in samples], room)
    for sample, prompt in zip(samples, prompts, strict=True):
        target = "-" if sample.target is None else sample.target
        texts = {"prompt": prompt, "target": target, "before": sample.before, "after": sample.after}
        cells: list[Text] = []
        for heading, ratio in columns.items():
            room = LINES * max(8, console.width * ratio // 13 - 3)
            text = shorten(visible(texts[heading], ascii_only=ascii_only), room)
            cells.append(Text(text) if text else Text("(empty)", style="dim italic"))
        table.add_row(*cells)
    return table


def _prompt_text(prompt: Prompt) -> str:
    """Return a prompt as text, with the roles of several messages."""
    if isinstance(prompt, str):
        return prompt
    roles = [f"{message.get('role', '')}: {message.get('content', '')}" for message in prompt]
    return "\n".join(roles) if len(prompt) != 1 else prompt[0].get("content", "")


def questions(prompts: Sequence[str], length: int) -> list[str]:
    """Cut prompts to `length` characters. Longer ones lose the beginning that all share, such as a system message.

    The end is kept where all prompts are the same.
    """
    first, last = min(prompts, default=""), max(prompts, default="")
    shared = first[: next((i for i, pair in enumerate(zip(first, last, strict=False)) if len({*pair}) > 1), len(first))]
    start = shared.rfind("\n") + 1 or shared.rfind(" ") + 1
    if len(set(prompts)) == 1:
        start = len(shared) - max(0, length - 3)
    return [
        prompt if len(prompt) <= length else shorten(f"...{prompt[start:]}" if start > 3 else prompt, length)
        for prompt in prompts
    ]


def shorten(text: str, length: int) -> str:
    """Cut text to `length` characters, ending in dots if it was longer."""
    return text if len(text) <= length else text[: max(0, length - 3)] + "..."


def visible(text: str, *, ascii_only: bool = False) -> str:
    """Return text on one line, with newlines, tabs and invisible characters written as escapes."""
    if not text.isprintable():
        text = "".join(
            c.encode("unicode_escape", "backslashreplace").decode("ascii") if unicodedata.category(c) in HIDDEN else c
            for c in text
        )
    return text.encode("ascii", "backslashreplace").decode("ascii") if ascii_only else text


def tell(console: Console, *lines: str) -> None:
    """Print lines, each on one, with control characters shown as text."""
    ascii_only = not console.encoding.startswith("utf")
    print_line(console, "\n".join(visible(line, ascii_only=ascii_only) for line in lines))


def journal_table(log: Log, console: Console) -> None:
    """Print the header of a journal, one row per generation, and whether it is whole."""
    header, model = log.header, log.header.config.get("model")
    named = cast(dict[str, object], model) if isinstance(model, dict) else {}
    for line in (
        f"model {named.get('name')}, revision {named.get('revision')}, {header.dtype}, hash {header.model_hash[:16]}",
        f"space {header.space}, {header.evolved_parameters:,} evolved numbers, seed {header.config.get('seed')}",
        f"made on {header.device} with {', '.join(f'{k} {v}' for k, v in header.versions.items())}",
    ):
        tell(console, line)
    table = Table("generation", "mean", "best", "worst", "std", "rms c", "sigma", "step", "weights_hash")
    for column in table.columns[:-1]:
        column.justify = "right"
    for recorded in log.generations:
        table.add_row(*_journal_cells(recorded))
    console.print(table)
    per = (log.size / len(log.generations)) if log.generations else 0.0
    state = "whole" if log.damage is None else "damaged after this"
    console.print(f"{log.sealed} generations, {log.size:,} bytes, {per:,.0f} per generation; {state}", highlight=False)
    if log.ending is not None:
        unit = {"plateau": "evaluations without a better reward", "time": "seconds"}[log.ending.reason]
        console.print(f"the run ended there as its settings say: {log.ending.limit:g} {unit}", highlight=False)
    if len(log.generations) > log.sealed:
        console.print(
            f"the update of generation {len(log.generations)} was recorded but never sealed: --resume applies it",
            highlight=False,
        )


def _journal_cells(recorded: Recorded) -> Iterator[str]:
    fitness_M = np.asarray(recorded.fitness_M)
    update = recorded.update
    with np.errstate(over="ignore", invalid="ignore"):
        rms_c = np.sqrt(np.mean(np.square(update.coefficients)))
        spread = (fitness_M.mean(), fitness_M.max(), fitness_M.min(), fitness_M.std())
    yield str(update.generation + 1)
    for value in (*spread, rms_c, update.sigma, update.step):
        yield f"{value:.4g}"
    yield recorded.weights_hash[:16] if recorded.weights_hash else "not sealed"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> list[str]:
    """Return a Markdown table; the first `words` columns are left-aligned. An empty line ends it."""
    rule = "|" + "---|" * words + "---:|" * (len(header) - words)
    return [_markdown_row(header), rule, *map(_markdown_row, rows), ""]


def _markdown_row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell or " " for cell in cells) + " |"


def bullets(lines: Iterable[str]) -> list[str]:
    """Return a Markdown list and an empty line; nothing without lines."""
    found = [f"- {line}" for line in lines]
    return [*found, ""] if found else []


def listed(names: Sequence[str]) -> str:
    """Join names: `a`, `a and b`, `a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def escape(text: str) -> str:
    """Escape text for Markdown, on one line: no link, picture, markup or mention."""
    return re.sub(r"([\\`*_\[\]<>|#!~$&@])", r"\\\1", visible(text))
