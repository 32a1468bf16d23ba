# SPDX-License-Identifier: Apache-2.0
"""What a probe recommends, or why it recommends nothing; as a table, as text, and as a config to lay over one's own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich.table import Table
from rich.text import Text

from evoalign.checks.rules import Hacked, Noise
from evoalign.preflight.gains import FEW_PROMPTS, level_of, quantile
from evoalign.report.tables import shorten, visible

ETA = 0.5
"""The step in units of the noise that is recommended for SGD, the paper's (arXiv 2509.24372: alpha = sigma / 2)."""
KEPT = 0.75
"""Least share of the start's fitness, above what broken answers earn, that members have to keep. On a smooth bump,
exp(-|x|^2 / 2 t^2), the gain of a step is largest where members keep exp(-1/2) = 0.61; beyond, they climb back to the
start. The rest is room for the error of the measurement."""
MOST_KEPT = 1.5
"""Most that they may keep. What is linear in the noise moves no population's mean: one that is far above the start in
whichever direction it went wins by breaking, where the reward is one that broken answers earn."""
SURE = 3.0
"""Standard errors by which it has to be above the start to be taken for that."""
BROKEN = 0.1
"""Rise of the share of broken texts, over the unperturbed model's, at which a width breaks the model."""
COVERED = 0.95
"""How often the interval of the gain that was chosen is to hold the gain."""
NEAR = 0.9
"""Of widths whose gains are as close as this the middle one is taken: it is safest from an error to either side."""
SHOWN = 160
"""Characters of a completion that are shown."""


@dataclass(frozen=True, slots=True)
class Rung:
    """One width of the ladder, `es.sigma` or `es.noise_multiplier`. Fitness is the mean reward over the prompts.

    `changed_share` completions differ from the unperturbed model's; `spread` is the standard deviation of the members'
    fitness; `drop` how far their mean lies below the unperturbed model's, `drop_error` its standard error over pairs;
    `kept` the share of that model's fitness, above the lowest seen, that they keep, None where it earns the lowest;
    `both_rise` by how many standard errors the lower one of a pair is above it, None without pairs. `broken_share`
    completions are degenerate (`checks.hacking`: empty, looping, gibberish and so on) or in another script,
    `truncated_share` end for their length.

    `gain` is the fitness that one generation at eta 0.5 is expected to bring, on other prompts where six or more were
    asked; `gain_error` its standard error over pairs, and over prompts where there are six; `chance` the p-value of no
    gain at all, corrected for the number of widths; `least_gain` the smallest that would have been told from chance.
    They are None at the smallest width, which has none below it to be told by. `pairs` counts pairs, or members where
    there are no pairs. `best_text` and `median_text` are what the members of the highest and the median fitness
    answered to the first prompt.
    """

    width: float
    changed_share: float
    spread: float
    drop: float
    drop_error: float
    kept: float | None
    broken_share: float
    truncated_share: float
    gain: float | None
    gain_error: float | None
    chance: float | None
    least_gain: float | None
    pairs: int
    both_rise: float | None = None
    best_text: str = ""
    median_text: str = ""


@dataclass(frozen=True, slots=True)
class Base:
    """The unperturbed model on the same prompts. `noise_floor` is the standard deviation of its fitness when it is
    scored again, `max_score` the highest score there is, `text` its answer to the first prompt, `prompt`."""

    fitness: float
    noise_floor: float
    broken_share: float
    truncated_share: float
    max_score: float
    examples: int
    prompt: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Advice:
    """`width` and `learning_rate` are None where nothing is recommended; `reason` says why."""

    width: float | None
    learning_rate: float | None
    gain_interval: tuple[float, float] | None
    reason: str
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a probe measured. `width` and `learning_rate` are None where no width is recommended; `reason` says why.

    `setting` is sigma or noise_multiplier; `fitness`, `broken_share` and `truncated_share` are the unperturbed
    model's, `noise_floor` the standard deviation of its fitness when it is scored again. `gain_interval` holds the gain
    of the recommended width with 95 % probability or more, all widths counted (Bonferroni). `completions` counts all
    that were asked for, by `members` at each width, on `examples` prompts; of `planned` widths `rungs` were measured.
    `prompt` is the first prompt and `text` the unperturbed model's answer to it, `own_width` that of the config.
    """

    setting: str
    fitness: float
    broken_share: float
    truncated_share: float
    noise_floor: float
    rungs: tuple[Rung, ...]
    width: float | None
    learning_rate: float | None
    gain_interval: tuple[float, float] | None
    reason: str
    warnings: tuple[str, ...]
    completions: int
    members: int
    examples: int
    planned: int
    prompt: str = ""
    text: str = ""
    own_width: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


def fault(rung: Rung, base: Base) -> str | None:
    """Why a width is refused however much it gains, in a word or two; None where it is not."""
    # A reward without a bottom makes any model look whole beside the widest noise: then the texts tell.
    if rung.broken_share - base.broken_share > BROKEN:
        return "breaks texts"
    if rung.truncated_share - base.truncated_share > Hacked.rise:
        return "cut off"
    if rung.kept is None:
        return "wins by breaking" if rung.both_rise is not None and rung.both_rise > SURE else None
    if rung.kept < KEPT:
        return "loses the reward"
    return "wins by breaking" if rung.kept > MOST_KEPT and gains_by_noise(rung) else None


def gains_by_noise(rung: Rung) -> bool:
    """Whether the members are surely better than the model itself, whichever way they went: what so comes is drift."""
    return -rung.drop > SURE * rung.drop_error


def is_sure(rung: Rung, base: Base) -> bool:
    """Whether chance is no explanation of the gain."""
    return rung.chance is not None and rung.chance <= level_of(base.examples)


def recommend(
    rungs: Sequence[Rung], base: Base, setting: str = "sigma", eta: float = ETA, *, planned: int | None = None
) -> Advice:
    """The width of the largest gain among those that are no chance and do not break the model; or none, and why.

    `eta` is what takes the config's optimizer as far as `ETA` takes plain SGD. Of fewer widths than were `planned`
    nothing is recommended.
    """
    if planned is not None and len(rungs) < planned:
        return _nothing(f"stopped after {len(rungs)} of {planned} widths")
    if base.fitness >= base.max_score:
        return _nothing(
            "the unperturbed model earns the maximum already: there is nothing to learn; use harder data",
        )
    whole = [r for r in rungs if fault(r, base) is None]
    usable = [(r, r.gain) for r in whole if r.gain is not None and r.gain > 0 and is_sure(r, base) and _tells(r, base)]
    if not usable:
        return _nothing(_why_not(rungs, whole, base))
    largest = max(gain for _, gain in usable)
    tied = [(r, gain) for r, gain in usable if gain >= NEAR * largest]
    best, gain = tied[(len(tied) - 1) // 2]
    tried = len(rungs) - 1
    half = quantile(COVERED, tried, best.pairs) * (best.gain_error or 0.0)
    rate = eta * best.width if setting == "sigma" else eta
    same = "" if eta == ETA else f", with this optimizer as far as {ETA:g} with sgd"
    reason = (
        f"recommended: es.{setting} {best.width:.4g}, es.learning_rate {rate:.4g} (eta {eta:.3g}{same}): in the middle "
        f"of those within {NEAR:.0%} of the largest gain among widths that chance does not explain and that do not "
        f"break the model; {gain:.2g} a generation ({gain - half:+.2g} to {gain + half:+.2g}, 95 % or more, of {tried} "
        f"widths); {best.changed_share:.0%} of the completions change"
    )
    warnings = [*_warnings(best, rungs, base), *_drift(best, usable, setting, rate)]
    if gain - half <= 0:
        members = best.pairs * (1 if best.both_rise is None else 2) * (half / gain) ** 2  # errors fall with their root
        told = f"--members {1 << int(members).bit_length()} tells, by its width"
        warnings.append(f"its interval contains 0: how much it gains is not known; {told}")
    return Advice(best.width, rate, (gain - half, gain + half), reason, tuple(warnings))


def _drift(best: Rung, usable: Sequence[tuple[Rung, float]], setting: str, rate: float) -> list[str]:
    """Where noise alone earns the reward: how much, and the widest smaller width at which it surely earns less."""
    if not gains_by_noise(best):
        return []
    above = SURE * best.drop_error
    less = [
        (r, gain)
        for r, gain in usable
        if r.width < best.width
        and (not gains_by_noise(r) or r.drop - best.drop > math.hypot(above, SURE * r.drop_error))
    ]
    line = f"noise alone gains {-best.drop:.3g} there (± {best.drop_error:.2g}): what is trained will in part be drift"
    if not less:
        return [line]
    other, gain = max(less, key=lambda found: (not gains_by_noise(found[0]), found[0].width))
    scale = other.width / best.width if setting == "sigma" else 1
    return [
        f"{line}; es.{setting} {other.width:.4g}, es.learning_rate {rate * scale:.4g} ({gain:.2g} a "
        f"generation, {-other.drop:.3g} by noise) leaves more to the reward and less to drift"
    ]


def _tells(rung: Rung, base: Base) -> bool:
    return rung.spread > Noise.ratio * base.noise_floor


def _warnings(best: Rung, rungs: Sequence[Rung], base: Base) -> list[str]:
    found: list[str] = []
    if best is rungs[1] or best is rungs[-1]:
        side = ("smallest that can be recommended", "smaller") if best is rungs[1] else ("largest", "larger")
        found.append(f"it is the {side[0]} of the ladder; try {side[1]} ones too with --sigmas")
    if base.examples < FEW_PROMPTS:
        found.append(
            f"the gain is that on {base.examples} {'prompts' if base.examples > 1 else 'prompt'}: whether it holds for "
            f"others takes {FEW_PROMPTS} training examples or more to tell"
        )
    return found


def _nothing(why: str) -> Advice:
    return Advice(None, None, None, f"nothing is recommended: {why}")


def _why_not(rungs: Sequence[Rung], whole: Sequence[Rung], base: Base) -> str:
    """The first of the possible reasons that holds."""
    asked: tuple[Callable[[], str | None], ...] = (
        lambda: _too_small(rungs, whole, base),
        lambda: _no_difference(rungs),
        lambda: _too_coarse(rungs, whole, base),
        lambda: _at_the_floor(whole, base),
    )
    return next((why for ask in asked if (why := ask()) is not None), None) or _chance(whole, base)


def _too_small(rungs: Sequence[Rung], whole: Sequence[Rung], base: Base) -> str | None:
    if whole:
        return None
    low = rungs[0]
    return (
        f"the smallest width, {low.width:.4g}, already breaks the model ({fault(low, base)}: members keep "
        f"{_share(low.kept)} of its fitness, {low.broken_share:.0%} of their completions are broken and "
        f"{low.truncated_share:.0%} cut off, {base.broken_share:.0%} and {base.truncated_share:.0%} of its own); try "
        "smaller ones with --sigmas"
    )


def _no_difference(rungs: Sequence[Rung]) -> str | None:
    if any(r.spread > 0 for r in rungs):
        return None
    high = rungs[-1]
    if all(r.changed_share == 0 for r in rungs):
        return f"the largest width, {high.width:.4g}, changes no completion; try larger ones with --sigmas"
    return (
        f"completions change (up to {max(r.changed_share for r in rungs):.0%}) and all earn the same: nothing can be "
        "learned with this reward, which does not tell them apart; give partial credit, easier examples or more of "
        "them (--examples)"
    )


def _too_coarse(rungs: Sequence[Rung], whole: Sequence[Rung], base: Base) -> str | None:
    """Where the ladder steps over what is between no signal and the widest members that are not broken."""
    for near, far in pairwise(rungs):
        if near.spread == 0 and _tells(far, base) and not any(r.width > far.width for r in whole):
            refused = fault(far, base)
            what = "is the first that tells them apart" if refused is None else f"breaks the model ({refused})"
            return (
                f"members of width {near.width:.4g} all earn the same ({near.changed_share:.0%} of their completions "
                f"change), and {far.width:.4g}, the next, {what}; try widths between {near.width:.4g} and "
                f"{far.width:.4g} with --sigmas"
            )
    return None


def _at_the_floor(whole: Sequence[Rung], base: Base) -> str | None:
    if base.noise_floor == 0 or any(_tells(r, base) for r in whole):
        return None
    return (
        f"the spread of the members is at the noise floor of {base.noise_floor:.2g}; use more examples (--examples), "
        "or lower sampling.temperature"
    )


def _chance(whole: Sequence[Rung], base: Base) -> str:
    told = [(r, r.gain or 0.0, r.least_gain or 0.0) for r in whole if r.gain is not None and _tells(r, base)]
    asked = "use more members (--members) and examples (--examples)"
    if not told:
        return (
            f"only the smallest width, {whole[0].width:.4g}, does not break the model, and none below it shows whether "
            "its members win by chance; try smaller ones with --sigmas"
        )
    rung, gain, least = max(told, key=lambda r: r[1] / r[2] if r[2] else 0.0)
    where = "" if base.examples < FEW_PROMPTS else ", or what they gain on some prompts not on others"
    more = ""
    if gain > 0 and rung.chance is not None and rung.chance < 1:
        many = 2 * rung.pairs * (least / gain) ** 2
        more = f"; were it real, about {many:,.0f} members would tell" if many < 10_000 else ""
    error = f"{rung.gain_error or 0.0:.2g}"
    near = f". Nearest to it is {rung.width:.4g}, {gain:+.2g} (standard error {error}) a generation, where {least:.2g} "
    near = f"{near}would have been told from chance{more}" if least else ""
    return (
        f"what members gain at one width they do not gain at the next smaller one{where}, beyond what chance shows: "
        f"nothing can be learned with this reward, as far as this probe can tell{near}; {asked}"
    )


def table(result: ProbeResult) -> Table:
    """One row a width, the recommended one marked; the last column says what else is not recommended, and why."""
    base = _base_of(result)
    shown = Table("", result.setting, "changed", "broken", "cut off", "spread", "drop", "kept")
    shown.add_column("gain a generation")
    shown.add_column("chance")
    for column in shown.columns[1:]:
        column.justify = "right"
    shown.add_column("")
    shown.add_row("", "0", "", f"{base.broken_share:.1%}", f"{base.truncated_share:.1%}", "", "", "", "", "", "start")
    for r in result.rungs:
        mark = "*" if r.width == result.width else ""
        gain = "-" if r.gain is None else f"{r.gain:+.3g} ± {r.gain_error or 0.0:.2g}"
        chance = "-" if r.chance is None else f"{r.chance:.2g}"
        shown.add_row(mark, f"{r.width:.4g}", f"{r.changed_share:.1%}", f"{r.broken_share:.1%}",
                      f"{r.truncated_share:.1%}", f"{r.spread:.4g}", f"{r.drop:+.4g}", _share(r.kept), gain, chance,
                      _note(r, result, base))  # fmt: skip
    return shown


def _note(rung: Rung, result: ProbeResult, base: Base) -> str:
    refused = fault(rung, base)
    noted = ["this config" if rung.width == result.own_width else "", refused or ""]
    if refused is None:
        noted.append("gained by noise" if gains_by_noise(rung) else "")
        unvouched = "for the next" if len(result.rungs) > 1 else ""
        noted.append(unvouched if rung.gain is None else "" if is_sure(rung, base) else "chance")
    return ", ".join(filter(None, noted))


def texts(result: ProbeResult) -> Table:
    """What the best and the median member of each width answer to the first prompt, below the unperturbed model."""
    shown = Table(result.setting, "member", "answer", show_lines=False)
    shown.title, shown.title_justify = Text(f"answers to: {_one_line(result.prompt)}"), "left"
    shown.add_row("0", "start", _one_line(result.text))
    for r in result.rungs:
        shown.add_row(f"{r.width:.4g}", "best", _one_line(r.best_text))
        shown.add_row("", "median", _one_line(r.median_text))
    return shown


def _share(kept: float | None) -> str:
    return "-" if kept is None else f"{kept:.0%}"


def _one_line(text: str) -> Text:
    """Of what a model wrote: no markup, no control character."""
    return Text(shorten(visible(text), SHOWN)) if text else Text("(empty)", style="dim italic")


def lines(result: ProbeResult) -> list[str]:
    """The start, the recommendation and the warnings, in words."""
    start = f"unperturbed: fitness {result.fitness:.4g}, noise floor {result.noise_floor:.2g}"
    return [
        f"{start}, broken {result.broken_share:.1%}, cut off {result.truncated_share:.1%}",
        result.reason,
        *(f"warning: {line}" for line in result.warnings),
    ]


def overlay(result: ProbeResult) -> str:
    """YAML of what is recommended, for `--config`; there has to be something."""
    return (
        f"# Recommended by `evoalign probe` from {result.members} members on {result.examples} prompts at each of "
        f"{result.planned} widths.\nes:\n  {result.setting}: {result.width!r}\n"
        f"  learning_rate: {result.learning_rate!r}\n"
    )


def _base_of(result: ProbeResult) -> Base:
    return Base(result.fitness, result.noise_floor, result.broken_share, result.truncated_share, float("inf"),
                result.examples, result.prompt, result.text)  # fmt: skip
