# SPDX-License-Identifier: Apache-2.0
"""The recommendation of a probe, or why there is none; as a table, as text, and as a config overlay."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich.table import Table
from rich.text import Text

from evoalign.checks.rules import Hacked, Noise
from evoalign.preflight.gains import FEW_PROMPTS, LEVEL, OFFERED, quantile
from evoalign.report.tables import shorten, visible

ETA = 0.5
"""Recommended step for SGD in units of the noise, as in the paper (arXiv 2509.24372: alpha = sigma / 2)."""
KEPT = 0.75
"""Least share of the start's fitness, above that of broken completions, that members have to keep. On a smooth bump,
exp(-|x|^2 / 2 t^2), the gain of a step is largest where members keep exp(-1/2) = 0.61, and beyond that they climb back
to the start. The rest is a margin for the error of the measurement."""
MOST_KEPT = 1.5
"""Largest such share. Effects that are linear in the noise do not move a population's mean: members far above the start
in every direction win by breaking, if broken completions are rewarded."""
SURE = 3.0
"""Standard errors above the start from which members count as better in every direction."""
BROKEN = 0.1
"""A width breaks the model if its share of broken texts is this much above the unperturbed model's."""
COVERED = 0.95
"""Least probability that the interval of the recommended width holds its gain."""
NEAR = 0.9
"""Gains of at least this share of the largest count as equal, and the width in their middle is recommended."""
SURE_GAIN = 2.0
"""Standard errors added to a gain of the first pass. Without them a narrow width is often chosen by chance."""
NEEDED = 2.6
"""Standardised sum that is about significant."""
TRIAL = 10
"""Generations of a trial."""
RULE = 'resume it with more es.num_generations only if its summary does not say "not shown to learn"'
"""When a trial ends."""
SHOWN = 160
"""Most characters of a completion that are shown."""


@dataclass(frozen=True, slots=True)
class Width:
    """The measurements of one width, `es.sigma` or `es.noise_multiplier`. Fitness is the mean reward over the prompts.

    - `changed_share`: completions that differ from the unperturbed model's.
    - `spread`: standard deviation of the members' fitness.
    - `drop`, `drop_error`: how far their mean is below the unperturbed model's, and its standard error over pairs.
    - `kept`: share of that model's fitness, above the lowest seen, that they keep; None if it earns the lowest.
    - `both_rise`: standard errors by which the lower member of a pair is above that model; None without pairs.
    - `broken_share`: completions that are degenerate (`checks.hacking`) or in another script.
    - `truncated_share`: completions that end at `max_tokens`.
    - `gain`, `gain_error`: expected gain in fitness of one generation at `eta`, on other prompts if there are two or
      more, less `drift`; and its standard error over pairs, and over prompts if there are three. None at the smallest
      width.
    - `drift`: expected cost of the random walk in one generation.
    - `eta`: step of the config's optimizer, shaping and pairs that moves the mean as far as `ETA` does with SGD,
      z-scores and members without pairs.
    - `chance`, `z`: p-value of no direction that helps on several prompts, for the tested widths together, and the
      standardised sum; None if this width was not tested. The smaller of two tested widths has them where they are
      significant.
    - `pairs`: number of pairs, or of members without pairs, that the gain is measured with.
    - `best_text`, `median_text`: completions of the first prompt by the members of highest and median fitness.
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
    pairs: int
    z: float | None = None
    drift: float = 0.0
    eta: float = ETA
    both_rise: float | None = None
    best_text: str = ""
    median_text: str = ""


@dataclass(frozen=True)
class Baseline:
    """The unperturbed model on the same prompts. `noise_floor` is the standard deviation of its fitness over repeats,
    `max_score` the highest possible score, and `text` its completion of the first prompt, `prompt`."""

    fitness: float
    noise_floor: float
    broken_share: float
    truncated_share: float
    max_score: float
    examples: int
    prompt: str = ""
    text: str = ""
    question: str = ""
    """The part of the prompt that identifies it among the others."""


@dataclass(frozen=True)
class Advice:
    """A recommended width, or the `reason` why none is recommended.

    `trial` is the width and learning rate to try for `TRIAL` generations where no gain is significant but one was seen.
    """

    width: float | None
    learning_rate: float | None
    gain_interval: tuple[float, float] | None
    reason: str
    warnings: tuple[str, ...]
    trial: tuple[float, float] | None = dataclasses.field(default=None, kw_only=True)


@dataclass(frozen=True, kw_only=True)
class ProbeResult(Baseline, Advice):
    """The measurements of a probe. `width` and `learning_rate` are None if none is recommended; see `reason`.

    - `setting`: sigma or noise_multiplier.
    - `gain_interval`: holds the gain of the recommended width with a probability of at least 95 %, corrected for the
      number of widths (Bonferroni).
    - `completions`: number of all completions, by `members` at each width, of `examples` prompts.
    - `planned`: number of widths; fewer `rungs` were measured if the probe was interrupted.
    - `prompt`, `text`: the first prompt and the unperturbed model's completion.
    - `own_width`: the config's own width.
    """

    setting: str
    rungs: tuple[Width, ...]
    completions: int
    members: int
    planned: int
    own_width: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the measurements for JSON."""
        found = dataclasses.asdict(self)
        del found["max_score"]  # may be infinite
        return found


def fault(width: Width, base: Baseline) -> str | None:
    """Return why a width is excluded whatever its gain, in two or three words, or None."""
    # Without a lowest reward any model seems unbroken next to the widest noise, so texts are checked as well.
    if width.broken_share - base.broken_share > BROKEN:
        return "breaks texts"
    if width.truncated_share - base.truncated_share > Hacked.rise:
        return "cut off"
    if width.kept is None:
        return "any noise wins" if width.both_rise is not None and width.both_rise > SURE else None
    if width.kept < KEPT:
        return "loses the reward"
    return "any noise wins" if width.kept > MOST_KEPT and gains_by_noise(width) else None


def gains_by_noise(width: Width) -> bool:
    """Return whether members are better than the model in every direction, which makes the mean drift."""
    return -width.drop > SURE * width.drop_error


def is_sure(width: Width) -> bool:
    """Return whether the gain is significant."""
    return width.chance is not None and width.chance <= LEVEL


def _is_above_noise(width: Width, base: Baseline) -> bool:
    return width.spread > Noise.ratio * base.noise_floor


def rate_of(width: Width, setting: str) -> float:
    """Return the learning rate of a width."""
    return width.eta * width.width if setting == "sigma" else width.eta


def promising(rungs: Sequence[Width], base: Baseline) -> int | None:
    """Return the index of the width that may gain most, by two standard errors, and does not break the model."""
    known = [
        (w.gain + SURE_GAIN * (w.gain_error or 0.0), k)
        for k, w in enumerate(rungs)
        if w.gain is not None and fault(w, base) is None and _is_above_noise(w, base)
    ]
    return max(known)[1] if known else None


def recommend(rungs: Sequence[Width], base: Baseline, setting: str = "sigma", *, planned: int | None = None) -> Advice:
    """Recommend the width of the largest significant gain that does not break the model, or none.

    Nothing is recommended if fewer widths than `planned` were measured.
    """
    if planned is not None and len(rungs) < planned:
        return nothing(f"stopped after {len(rungs)} of {planned} widths")
    if base.fitness >= base.max_score:
        return nothing("the unperturbed model already earns the maximum; use harder data")
    whole = [w for w in rungs if fault(w, base) is None]
    usable = [
        (w, w.gain) for w in whole if w.gain is not None and w.gain > 0 and is_sure(w) and _is_above_noise(w, base)
    ]
    if not usable:
        return nothing(_why_not(rungs, whole, base), _nearest(whole, base), setting)
    largest = max(gain for _, gain in usable)
    tied = [(w, gain) for w, gain in usable if gain >= NEAR * largest]
    best, gain = tied[(len(tied) - 1) // 2]
    tried = sum(w.gain is not None and w.chance is not None for w in rungs)
    half = quantile(COVERED, tried, best.pairs) * (best.gain_error or 0.0)
    rate = rate_of(best, setting)
    same = "" if best.eta == ETA else f", which is {ETA:g} for sgd, z-scores and members without pairs"
    reason = (
        f"recommended: es.{setting} {best.width:.4g}, es.learning_rate {rate:.4g} (eta {best.eta:.3g}{same}); expected "
        f"gain per generation {gain:.2g} (95 % interval {gain - half:+.2g} to {gain + half:+.2g})"
    )
    warnings: list[str] = []
    if best is rungs[1] or best is rungs[-1]:
        side = ("smallest", "smaller") if best is rungs[1] else ("largest", "larger")
        warnings.append(f"it is the {side[0]} width that could be recommended; try {side[1]} ones too with --sigmas")
    if base.examples < FEW_PROMPTS:
        warnings.append(f"{base.examples} training examples: with fewer than {FEW_PROMPTS}, gains may not generalise")
    warnings += _drift(best, usable, setting)
    if gain - half <= 0:
        members = best.pairs * (1 if best.both_rise is None else 2) * (half / gain) ** 2  # an error falls as its root
        warnings.append(f"the interval contains 0; repeat with --members {1 << int(members).bit_length()}")
    return Advice(best.width, rate, (gain - half, gain + half), reason, tuple(warnings))


def _drift(best: Width, usable: Sequence[tuple[Width, float]], setting: str) -> list[str]:
    """Return a warning if noise alone earns reward, with the widest smaller width at which it surely earns less."""
    if not gains_by_noise(best):
        return []
    above = SURE * best.drop_error
    less = [
        (w, gain)
        for w, gain in usable
        if w.width < best.width
        and (not gains_by_noise(w) or w.drop - best.drop > math.hypot(above, SURE * w.drop_error))
    ]
    line = f"noise alone gains {-best.drop:.3g} there (± {best.drop_error:.2g}), so part of the training will be drift"
    if not less:
        return [line]
    other, _ = max(less, key=lambda found: (not gains_by_noise(found[0]), found[0].width))
    return [f"{line}; less with es.{setting} {other.width:.4g}, es.learning_rate {rate_of(other, setting):.4g}"]


def nothing(why: str, nearest: Width | None = None, setting: str = "sigma") -> Advice:
    """Recommend nothing; offer a trial of `nearest` if its gain is nearly significant."""
    if nearest is None or (nearest.gain or 0.0) <= 0 or nearest.chance is None or nearest.chance > OFFERED:
        return Advice(None, None, None, f"nothing is recommended: {why}", ())
    rate = rate_of(nearest, setting)
    trial = f"try es.{setting} {nearest.width:.4g}, es.learning_rate {rate:.4g} for {TRIAL} generations, and {RULE}"
    return Advice(None, None, None, f"undecided: {why}; or {trial}", (), trial=(nearest.width, rate))


def _nearest(whole: Sequence[Width], base: Baseline) -> Width | None:
    """Return the tested width with the largest gain; None without a width above the noise."""
    measured = [w for w in whole if w.gain is not None and _is_above_noise(w, base)]
    return max(measured, key=lambda w: (w.chance is not None, w.gain or 0.0), default=None)


def _why_not(rungs: Sequence[Width], whole: Sequence[Width], base: Baseline) -> str:
    """Return the first reason that applies."""
    if not whole:
        why = f"the smallest width, {rungs[0].width:.4g}, already breaks the model ({fault(rungs[0], base)})"
        return f"{why}; try smaller ones with --sigmas"
    if not any(w.spread > 0 for w in rungs):
        if all(w.changed_share == 0 for w in rungs):
            return f"the largest width, {rungs[-1].width:.4g}, changes no completion; try larger ones with --sigmas"
        return "all completions earn the same; give partial credit, easier examples or more of them (--examples)"
    for near, far in pairwise(rungs):  # the ladder may have no width between no signal and a broken model
        if near.spread == 0 and _is_above_noise(far, base) and not any(w.width > far.width for w in whole):
            refused = fault(far, base)
            what = "is the only one with a spread" if refused is None else f"breaks the model ({refused})"
            return (
                f"members of width {near.width:.4g} all earn the same, and {far.width:.4g}, the next, {what}; try "
                f"widths between {near.width:.4g} and {far.width:.4g} with --sigmas"
            )
    if base.noise_floor > 0 and not any(_is_above_noise(w, base) for w in whole):
        return (
            f"the members' spread is at the noise floor, {base.noise_floor:.2g}; use more examples (--examples) or "
            "lower sampling.temperature"
        )
    return _chance(_nearest(whole, base), whole)


def _chance(nearest: Width | None, whole: Sequence[Width]) -> str:
    if nearest is None:
        why = f"only the smallest width, {whole[0].width:.4g}, does not break the model, and a gain needs two widths"
        return f"{why}; try smaller ones with --sigmas"
    why = f"no gain is significant at {nearest.width:.4g}, which may gain most"
    if nearest.chance is not None:
        why += f" (p {nearest.chance:.2g}); that does not show that nothing can be learned"
    if nearest.z is not None and 0 < nearest.z < NEEDED:  # z grows as the root of the members
        members = (1 if nearest.both_rise is None else 2) * nearest.pairs * (NEEDED / nearest.z) ** 2
        why += f"; about {members:,.0f} members there would decide" if members < 10_000 else ""
    return f"{why}; use more members (--members) and examples (--examples)"


def table(result: ProbeResult) -> Table:
    """Return one row per width, with the recommended one marked; the last column says why others are not."""
    names = "changed", "broken", "cut off", "spread", "drop", "kept", "noise cost", "gain a generation", "chance"
    shown = Table("", result.setting, *names)
    for column in shown.columns[1:]:
        column.justify = "right"
    shown.add_column("")
    shown.add_row("", "0", "", f"{result.broken_share:.1%}", f"{result.truncated_share:.1%}", *[""] * 6, "start")
    for w in result.rungs:
        mark = "*" if w.width == result.width else ""
        gain = "-" if w.gain is None else f"{w.gain:+.3g} ± {w.gain_error or 0.0:.2g}"
        chance, kept = "-" if w.chance is None else f"{w.chance:.2g}", "-" if w.kept is None else f"{w.kept:.0%}"
        shares = (f"{share:.1%}" for share in (w.changed_share, w.broken_share, w.truncated_share))
        found = (f"{w.spread:.4g}", f"{w.drop:+.4g}", kept, f"{w.drift:.2g}", gain, chance)
        shown.add_row(mark, f"{w.width:.4g}", *shares, *found, _note(w, result))
    return shown


def _note(width: Width, result: ProbeResult) -> str:
    refused = fault(width, result)
    notes = ["this config" if width.width == result.own_width else "", refused or ""]
    if refused is None:
        notes.append("gained by noise" if gains_by_noise(width) else "")
        first = "for the next" if len(result.rungs) > 1 else ""
        tested = "first pass" if width.chance is None else "" if is_sure(width) else "chance"
        notes.append(first if width.gain is None else tested)
    return ", ".join(filter(None, notes))


def texts(result: ProbeResult) -> Table:
    """Return completions of the first prompt: the unperturbed model's, and those of two members of each width."""
    shown = Table(result.setting, "member", "answer", show_lines=False)
    shown.title, shown.title_justify = Text(f"answers to: {_one_line(result.question or result.prompt)}"), "left"
    shown.add_row("0", "start", _one_line(result.text))
    for w in result.rungs:
        shown.add_row(f"{w.width:.4g}", "best", _one_line(w.best_text))
        shown.add_row("", "median", _one_line(w.median_text))
    return shown


def _one_line(text: str) -> Text:
    """Return a model's text without markup and control characters."""
    return Text(shorten(visible(text), SHOWN)) if text else Text("(empty)", style="dim italic")


def lines(result: ProbeResult) -> list[str]:
    """Return the unperturbed model's fitness, the recommendation and the warnings."""
    start = f"unperturbed model: fitness {result.fitness:.4g}, noise floor {result.noise_floor:.2g}"
    return [start, result.reason, *(f"warning: {line}" for line in result.warnings)]


def overlay(result: ProbeResult) -> str:
    """Return the recommendation, or the trial, as YAML for `--config`. One of them must not be None."""
    measured = f"{result.completions} completions of {result.examples} prompts at {result.planned} widths"
    heading, width, rate, more = "Recommended by", result.width, result.learning_rate, ""
    if result.trial is not None:
        (width, rate), more = result.trial, f"  num_generations: {TRIAL}\n"
        heading = f"No gain was significant. Train for {TRIAL} generations, and {RULE}.\n# Undecided by"
    return (
        f"# {heading} `evoalign probe` from {measured}.\nes:\n  {result.setting}: {width!r}\n"
        f"  learning_rate: {rate!r}\n{more}"
    )
