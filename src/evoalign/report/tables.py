# SPDX-License-Identifier: Apache-2.0
"""What training changed, on the test split: measures before and after, and completions side by side.

Completions are data. They are shown as text that rich never reads as markup, with every control character made
visible, so that a model cannot move the cursor, set a colour or end the line.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from evoalign.types import Prompt

SHARES = frozenset({"accuracy", "exact", "format", "high_reward", "right"})
"""Measures shown in percent, beside those whose name ends in `_share`."""
NAMES = {"right": "right by gold"}
"""Of measures whose own name says too little."""
Interval = tuple[float, float, float]
"""Mean of the paired differences, and the ends of its 95 % interval; both the mean where there is none."""
WHOLE = 20
"""Cells of a terminal up to which the names of measures are not broken: there the numbers beside them wrap first."""
LINES = 4
"""Lines of a table cell that a sample fills at most."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One test example and what the model said to it before and after training."""

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
) -> None:
    """Prints the measures that both have, with the change and its interval where there is one, then the samples.

    `placebo` is what the mean placebo has of them, in a column of its own; `names` what some of them are called.
    """
    console.print(_measures(before, after, intervals or {}, placebo, {**NAMES, **(names or {})}))
    if samples:
        console.print(_samples(samples, console))


def alarm(word: str, reasons: Sequence[str], samples: Sequence[Sample], console: Console) -> None:
    """Prints what is wrong with a run, why, and completions that show it."""
    ascii_only = not console.encoding.startswith("utf")
    lines = [f"{word.upper()}: what the test completions say, whatever they earn", *(f"- {line}" for line in reasons)]
    for number, line in enumerate(lines):
        style = "bold red" if number == 0 else ""
        console.print(Text(visible(line, ascii_only=ascii_only), style=style), soft_wrap=not console.is_jupyter)
    if samples:
        console.print(_samples(samples, console, "for example"))


def _measures(
    before: Mapping[str, float],
    after: Mapping[str, float],
    intervals: Mapping[str, Interval],
    placebo: Mapping[str, float] | None,
    names: Mapping[str, str],
) -> Table:
    table = Table(title="test split", title_justify="left", title_style="bold")
    common = [name for name in before if name in after]
    named = [names.get(name, name.removesuffix("_share").replace("_", " ")) for name in common]
    table.add_column("", overflow="fold", no_wrap=all(cell_len(name) <= WHOLE for name in named))
    more = [*(["95 % interval"] if intervals else []), *(["mean placebo"] if placebo is not None else [])]
    for heading in ("before", "after", "change", *more):
        table.add_column(heading, justify="right", overflow="fold")
    for name, shown in zip(common, named, strict=True):
        old, new = before[name], after[name]
        cells = [_value(name, old), _value(name, new), _change(name, new - old)]
        if name in intervals:
            _, low, high = intervals[name]
            cells.append(f"{_signed(name, low)} to {_signed(name, high)}" if low < high else "-")
        elif intervals:
            cells.append("")
        if placebo is not None:
            cells.append(_value(name, placebo[name]) if name in placebo else "")
        table.add_row(Text(shown), *cells)
    return table


def headline(
    before: Mapping[str, float], after: Mapping[str, float], change: Interval | None, count: int, name: str = "reward"
) -> str:
    """In a line what became of the reward, or of another measure."""
    said = f"{name} {before[name]:.4g} -> {after[name]:.4g} on {count:,} test examples"
    if change is None or change[1] == change[2]:
        return said
    mean, low, high = change
    return f"{said} ({mean:+.4g}, 95 % interval {low:+.4g} to {high:+.4g})"


def weighed(name: str, weight: float) -> str:
    """What one of several rewards is called: with its weight, unless that is 1; that of -1 in words."""
    if weight == 1:
        return name
    return f"{name} (lower is better)" if weight == -1 else f"{name} (x {weight:g})"


def is_share(name: str) -> bool:
    """Whether a measure is a share, by its name."""
    return name in SHARES or name.endswith("_share")


def _value(name: str, value: float) -> str:
    return f"{value:.1%}" if is_share(name) else f"{value:.4g}"


def _signed(name: str, change: float) -> str:
    return f"{100 * change:+.1f}" if is_share(name) else f"{change:+.4g}"


def _change(name: str, change: float) -> str:
    return _signed(name, change) + (" points" if is_share(name) else "")


def _samples(samples: Sequence[Sample], console: Console, title: str = "sample completions") -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_lines=True, expand=True)
    columns = {"prompt": 3, "target": 2, "before": 4, "after": 4}
    if all(sample.target is None for sample in samples):
        del columns["target"]
    for heading, ratio in columns.items():
        table.add_column(heading, ratio=ratio, overflow="fold")
    for sample in samples:
        texts = {
            "prompt": _prompt_text(sample.prompt),
            "target": "-" if sample.target is None else sample.target,
            "before": sample.before,
            "after": sample.after,
        }
        table.add_row(*(_cell(texts[heading], console, ratio) for heading, ratio in columns.items()))
    return table


def _prompt_text(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return prompt[0].get("content", "")
    return "\n".join(f"{message.get('role', '')}: {message.get('content', '')}" for message in prompt)


def _cell(text: str, console: Console, ratio: int) -> Text:
    """Text that fits `LINES` lines of a column that has `ratio` of 13 parts of the width."""
    if not text:
        return Text("(empty)", style="dim italic")
    ascii_only = not console.encoding.startswith("utf")
    return Text(shorten(visible(text, ascii_only=ascii_only), LINES * max(8, console.width * ratio // 13 - 3)))


def shorten(text: str, length: int) -> str:
    """At most `length` characters, with dots where the rest was."""
    return text if len(text) <= length else text[: max(0, length - 3)] + "..."


def visible(text: str, *, ascii_only: bool = False) -> str:
    """The text on one line: newline, tab and every other character without a shape of its own written out."""
    shown = text if text.isprintable() else "".join(map(_visible, text))
    return shown.encode("ascii", "backslashreplace").decode("ascii") if ascii_only else shown


def _visible(character: str) -> str:
    if character == "\n":
        return "\\n"
    if character == "\t":
        return "\\t"
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        return character.encode("unicode_escape", "backslashreplace").decode("ascii")
    return character
