# SPDX-License-Identifier: Apache-2.0
"""Verdicts on the claims of landscape_plan.md, from the rows of landscape_rows.py; used by result_pages.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from evoalign import statistics
from evoalign.analysis.efficiency import robust_ratio
from evoalign.report.figures import COLORS, GRID, LINES, canvas, frame, plain, save
from evoalign.statistics import Estimate
from landscape_rows import EXAMPLES, KINDS, ROWS

STUDIES = {
    "conciseness": "Conciseness, tiny", "countdown": "Countdown, tiny", "smollm2": "Conciseness, SmolLM2",
}  # fmt: skip
BASE = "base"
SHOWN = {
    BASE: "base", "es": "ES", "grpo": "GRPO", "placebo": "placebo", "next es": "ES", "next grpo": "GRPO",
    "es_eta4": "ES at eta 4", "es_wide": "ES at sigma 0.05", "es_8": "ES of 8 members", "es_128": "ES of 128 members",
}  # fmt: skip
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Claim:
    """A line of a table: which claim, its number in words, what was found, and what that says.

    `against` is what has to lie on the other side of the threshold for *not held*, where that is not `found`: an upper
    end above it shows no barrier. `likewise` is the same of placebos, of which what is held of ES must not hold.
    `reliability` is that of what a cosine is of: below 0.1 it says nothing. `censored` means that the best setting of
    the losing side lies at the end of its grid: a wider grid may turn the result.
    """

    claim: str
    number: str
    found: Estimate
    limit: float | None = None
    above: bool = True
    against: Estimate | None = None
    likewise: Estimate | None = None
    reliability: float = 1.0
    censored: bool = False

    @property
    def verdict(self) -> str:
        """Held, not held or not known, by the side of the threshold on which the interval lies."""
        if self.limit is None:
            return ""
        if self.reliability < 0.1:
            return "no evidence"
        for_, against = self.found, self.against or self.found
        if _beyond(for_, self.limit, self.above):
            both = self.likewise is not None and _beyond(self.likewise, self.limit, self.above)
            if both:
                return "not held: its placebos do likewise"
            return "not known: the grid of the noise ends too early" if self.censored else "held"
        return "not held" if _beyond(against, self.limit, not self.above) else "not known"


def _beyond(found: Estimate, limit: float, above: bool) -> bool:
    if found.low is None or found.high is None:
        return False
    return found.low > limit if above else found.high < limit


def in_a_ring(values: Sequence[float]) -> Estimate:
    """The mean of values of pairs, of each seed and the next one round: neighbours share a seed, and count as that.

    The variance of the mean has the covariance of neighbours in it where that is above 0.
    """
    found = statistics.mean(values)
    if found.low is None or found.high is None or len(values) < 4:
        return found
    gaps = np.array(values) - found.mean
    shared = 1 + 2 * max(0.0, float(gaps @ np.roll(gaps, 1)) / float(gaps @ gaps))
    half = (found.high - found.mean) * shared**0.5
    return Estimate(found.mean, found.n, found.mean - half, found.mean + half)


class Study:
    """The rows of one study."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self.span = {
            kind: {row["seed"]: abs(row["rewards"][-1] - row["rewards"][0]) for row in self.lines(BASE, of)}
            for kind, of in (("es", "es"), ("grpo", "grpo"), ("placebo", "es"))
        }
        """Gain of a method by seed; for a placebo, which gains nothing, the gain of its run."""

    def of(self, what: str, **fixed: Any) -> list[Row]:
        """Rows with these values."""
        return [row for row in self.rows if row["what"] == what and all(row[k] == v for k, v in fixed.items())]

    def lines(self, a: str, b: str) -> list[Row]:
        """Between two models."""
        return self.of("line", a=a, b=b)

    def over(self, what: str, number: Callable[[Row], float], **fixed: Any) -> Estimate | None:
        """The mean of a number over such rows."""
        found = [number(row) for row in self.of(what, **fixed)]
        return statistics.mean(found) if found else None

    def paired(self, what: str, one: Row, other: Row, number: Callable[[Row], float]) -> Estimate | None:
        """The mean over seeds of a number of one kind of rows less that of another."""
        a, b = ({row["seed"]: number(row) for row in self.of(what, **fixed)} for fixed in (one, other))
        both = sorted(a.keys() & b.keys())
        return statistics.mean([a[s] - b[s] for s in both]) if both else None


def barrier_of(row: Row, end: str, span: float) -> float:
    """An end of its interval over the span. Where no example dips at any point there is none: the barrier is 0."""
    if row[end] is None:
        assert row["why"].startswith("all points lie on the chord"), row["why"]
        return 0.0
    return row[end] / span


def largest_step(row: Row) -> float:
    """Between neighbours of the line, as a share of what its ends differ by."""
    rewards = np.array(row["rewards"])
    return float(np.abs(np.diff(rewards)).max() / abs(rewards[-1] - rewards[0]))


def change(row: Row) -> float:
    """Return the change of the reward under noise."""
    return float(np.mean(row["rewards"])) - row["reward"]


def first_quarter(row: Row) -> float:
    """The share of the gain in training reward that is made by a quarter of the steps.

    From the first step's reward; by the tenth of the steps about the quarter, and by the last tenth.
    """
    rewards = np.array(row["rewards"])
    few, quarter = max(1, len(rewards) // 10), len(rewards) // 4
    there = rewards[quarter - few // 2 : quarter - few // 2 + few].mean()
    return float((there - rewards[0]) / (rewards[-few:].mean() - rewards[0]))


def slope(distances: Sequence[float], steps: Sequence[float]) -> float:
    """Return the slope of log distance over log step in the last half: 0.5 is a random walk, 1 a straight line."""
    half = len(steps) // 2
    return float(np.polyfit(np.log(steps[half:]), np.log(distances[half:]), 1)[0])


# --- the claims -------------------------------------------------------------------------------------------------------


def of_lines(study: Study) -> Iterator[Claim]:
    """1 to 4."""
    for claim, kind, above in (("1", "es", False), ("2", "grpo", True)):
        moved = [largest_step(row) for row in study.lines(BASE, kind) if row["rewards"][0] != row["rewards"][-1]]
        if moved:
            words = f"largest of 20 steps from base to {SHOWN[kind]}, share of the way"
            yield Claim(claim, words, statistics.mean(moved), 0.25, above)
    for claim, kind, pairs in (("3", "es", study.lines("es", "grpo")), *(
        ("4", kind, study.lines(kind, f"next {kind}")) for kind in KINDS
    )):  # fmt: skip
        rows = [row for row in pairs if row["seed"] in study.span[kind]]
        if not rows:
            continue
        average = statistics.mean if claim == "3" else in_a_ring
        low, high = (
            average([barrier_of(row, end, study.span[kind][row["seed"]]) for row in rows]) for end in ("low", "high")
        )
        words = f"{SHOWN[kind]} to {SHOWN['grpo' if claim == '3' else kind]}"
        if claim == "3":
            yield Claim("3, a barrier", f"{words}, lower end of the barrier / s", low, 0.05, True, high)
        flat = sum(row["high"] is None for row in rows)
        note = f" (no example dips in {flat})" if flat else ""
        name = "3, none" if claim == "3" else "4"
        yield Claim(name, f"{words}, higher end of the barrier / s{note}", high, 0.05, False, low)


def of_changes(study: Study) -> Iterator[Claim]:
    """5 and 6."""
    cosines = {
        (a, b): [row["cosine"] for row in study.of("cosine", a=a, b=b, part="all")]
        for a, b in (("es", "grpo"), *((kind, kind) for kind in KINDS))
    }
    reliable = {kind: reliability(cosines[kind, kind]) for kind in KINDS if cosines[kind, kind]}
    for (a, b), values in cosines.items():
        if values:
            words = f"cosine of the changes, {SHOWN[a]} and {SHOWN[b]}"
            found = in_a_ring(values) if a == b else statistics.mean(values)
            yield Claim("5", words, found, 0.05, False, reliability=min(reliable[a], reliable[b]))
    for kind, value in reliable.items():
        words = f"reliability of the mean change of half of the seeds, {SHOWN[kind]}"
        yield Claim("", words, Estimate(value, len(cosines[kind, kind]), why="from the cosines"))
    alike = {
        kind: [row["cosine"] for row in study.of("cosine", a=kind, b=kind, part="unembedding")]
        for kind in ("grpo", "es")
    }
    if alike["grpo"] and None not in [*alike["grpo"], *alike["es"]]:
        more = [one - other for one, other in zip(alike["grpo"], cosines["grpo", "grpo"], strict=True)]
        yield Claim("6", "GRPO's cosine over seeds, unembedding less all weights", in_a_ring(more), 0.0)
        less = [one - other for one, other in zip(alike["grpo"], alike["es"], strict=True)]
        words, trust = "cosine of the unembedding's changes, GRPO less ES", min(reliable["grpo"], reliable["es"])
        yield Claim("6, as planned", words, in_a_ring(less), 0.0, reliability=trust)


def reliability(cosines: Sequence[float]) -> float:
    """Return the cosine that mean changes of two halves of the seeds would have (Spearman and Brown)."""
    half, mean = len(cosines) // 2, max(0.0, float(np.mean(cosines)))
    return half * mean / (1 + (half - 1) * mean)


def of_noise(study: Study) -> Iterator[Claim]:
    """7 to 9."""
    for part in ("all", "unembedding"):
        lost = {
            kind: {
                row["seed"]: change(row) / study.span[kind][row["seed"]]
                for row in study.of("noise", model=kind, part=part, sigma=0.005)
                if row["seed"] in study.span[kind]
            }
            for kind in ("grpo", "es")
        }
        if both := sorted(lost["grpo"].keys() & lost["es"].keys()):
            found = statistics.mean([lost["grpo"][seed] - lost["es"][seed] for seed in both])
            yield Claim("7", f"noise of 0.005 on {part}: change / its own s, GRPO less ES", found, 0.0)
    for name, one, other in (("8", "es", BASE), ("8, placebo", "placebo", BASE), ("8, beyond it", "es", "placebo")):
        fixed = [{"model": model, "part": "all", "sigma": 0.05} for model in (one, other)]
        found = study.paired("noise", fixed[0], fixed[1], lambda row: float(np.mean(row["rewards"])))
        if found:
            yield Claim(name, f"reward under noise of 0.05, {SHOWN[one]} less {SHOWN[other]}", found, 0.0)
    methods = sorted({row["model"] for row in study.of("noise", part="all", sigma=0.01)} - {BASE, "placebo"})
    for claim, kinds in (("9", ["es", "grpo"]), ("9, ES alone", [m for m in methods if m != "grpo"]), *(
        (f"9, {SHOWN[kind]}", [kind]) for kind in methods
    )):  # fmt: skip
        rows = [row for row in study.of("noise", part="all", sigma=0.01) if row["model"] in kinds]
        if len(kinds) == 1 and claim == "9, ES alone":
            continue
        if len({row["hacked"] for row in rows}) > 1:
            found = rank_correlation([row["hacked"] for row in rows], [change(row) for row in rows])
            if len(kinds) > 1:  # runs of a method are alike
                found = Estimate(found.mean, found.n, why=f"{len(kinds)} methods: no interval")
            yield Claim(claim, "rank correlation of hacked share and change at 0.01", found, 0.0)


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> Estimate:
    """Spearman's, with an interval by Fisher's z."""
    rank, n = float(stats.spearmanr(a, b).statistic), len(a)
    if n < 5:
        return Estimate(rank, n, None, None, f"{n} runs: no interval")
    half = 1.96 / (n - 3) ** 0.5
    low, high = (float(np.tanh(np.arctanh(rank) + side)) for side in (-half, half))
    return Estimate(rank, n, low, high)


def of_ends(study: Study) -> Iterator[Claim]:
    """10 to 13."""
    for model in (BASE, "es", "grpo"):
        rows = [row for row in study.of("coverage", model=model) if model != BASE or row["tries"] > 128]
        if rows:
            words = f"pass@{rows[0]['tries']} by temperature less that by noise, {SHOWN[model]}"
            widest = max(way["sigma"] for way in rows[0]["ways"] if "sigma" in way)
            ends = [sigma == widest for row in rows for sigma in row["contest"]["chosen"]["sigma"]]
            found = statistics.mean([row["contest"]["mean"] for row in rows])
            yield Claim("10", words, found, 0.0, censored=float(np.mean(ends)) >= 0.5)
    for claim, kind, sign, words, limit in (
        ("11", "es_eta4", "degenerate", "degenerate share, ES at eta 4", 0.1),
        ("12", "es_wide", "hacked", "hacked share, ES at sigma 0.05", 0.05),
    ):
        more = {
            whose: {
                row["seed"]: row["rates"][sign] - less["rates"][sign]
                for row in study.of("end", model=f"{whose}{kind}")
                for less in study.of("end", model=f"{whose}es", seed=row["seed"])
            }
            for whose in ("", "placebo of ")
        }
        if not more[""]:
            continue
        of_es, of_placebos = (statistics.mean(list(found.values())) for found in more.values())
        yield Claim(claim, f"{words} less ES", of_es, limit, likewise=of_placebos)
        if both := sorted(more[""].keys() & more["placebo of "].keys()):
            own, placebos = ([more[whose][seed] for seed in both] for whose in ("", "placebo of "))
            yield Claim(f"{claim}, placebo", "the same of their placebos", of_placebos, limit)
            beyond = statistics.mean([a - b for a, b in zip(own, placebos, strict=True)])
            yield Claim(f"{claim}, beyond it", "the one less the other", beyond)
    ends = {kind: [row["rewards"]["after"] for row in study.of("end", model=kind)] for kind in ("grpo", "es")}
    words = "variance of the final reward between seeds, GRPO over ES"
    if min(map(len, ends.values())) < len(study.lines(BASE, "es")):  # of the test examples that lines were asked
        ends = {kind: [row["rewards"][-1] for row in study.lines(BASE, kind)] for kind in ends}
        words += ", some test examples"
    if min(map(len, ends.values())) > 2:
        ratio = robust_ratio(ends["grpo"], ends["es"])
        yield Claim("13", words, Estimate(ratio.mean, ratio.n, ratio.low, ratio.high, ratio.why), 1.0)


def unclaimed_paths(study: Study) -> Iterator[Claim]:
    """How runs went, and what they lost, without a threshold."""
    for model in KINDS:
        found = study.over("divergence", lambda row: row["exact"], model=model)
        if found:
            yield Claim("", f"KL from the base, nats per token, {SHOWN[model]}", found)
    for model in ("es", "grpo"):
        found = study.over("course", first_quarter, model=model)
        if found:
            yield Claim("", f"share of the gain in training by a quarter of the steps, {SHOWN[model]}", found)
    rows = study.of("path")
    if rows:
        for words, number in (
            (
                "slope of log distance over log step, last half, ES",
                lambda row: slope(row["distances"][0], row["steps"]),
            ),
            ("the same, placebos", lambda row: np.mean([slope(one, row["steps"]) for one in row["distances"][1:]])),
            ("share of the squared distance that is signal, ES", lambda row: row["signal_share"]["mean"]),
        ):
            yield Claim("", words, statistics.mean([float(number(row)) for row in rows]))
    for model in ("es", "grpo"):
        rows = study.of("forgetting", model=model, probe="nats a token of the test prompts")
        words = "nats per token of the test prompts, change by"
        if rows:
            yield Claim("", f"{words} {SHOWN[model]}", statistics.mean([row["end"]["change"]["mean"] for row in rows]))
        drifts = [row["drift"]["mean"] for row in rows if row["drift"]]
        if drifts:
            yield Claim("", f"{words} its placebos", statistics.mean(drifts))


PARTS: Sequence[Callable[[Study], Iterator[Claim]]] = (of_lines, of_changes, of_noise, of_ends)


def table(studies: Mapping[str, Study], parts: Sequence[Callable[[Study], Iterator[Claim]]]) -> Iterator[str]:
    """Yield a line per claim, with the number and the verdict of each study."""
    found: dict[tuple[str, str], dict[str, Claim]] = {}
    for part in parts:
        for name, study in studies.items():
            for claim in part(study):
                found.setdefault((claim.claim, claim.number.partition(" (no example")[0]), {})[name] = claim
    yield f"| number | {' | '.join(STUDIES.values())} |"
    yield f"|---|{'---|' * len(STUDIES)}"
    for (claim, number), cells in found.items():
        shown = [_shown(cells[name]) if name in cells else "-" for name in STUDIES]
        yield f"| {claim}{': ' if claim else ''}{number} | {' | '.join(shown)} |"


def _shown(claim: Claim) -> str:
    return f"{_number(claim.found)}: **{claim.verdict}**" if claim.verdict else _number(claim.found)


def ends(studies: Mapping[str, Study]) -> Iterator[str]:
    """Yield the test reward and the shares of hacked and degenerate completions of runs and their placebos."""
    yield "| study | runs | reward | of its placebos | hacked, degenerate | of its placebos |"
    yield "|---|---|---|---|---|---|"
    for name, study in studies.items():
        for model in dict.fromkeys(row["model"].removeprefix("placebo of ") for row in study.of("end")):
            cells = [STUDIES[name], SHOWN[model]]
            both = [study.of("end", model=f"{whose}{model}") for whose in ("", "placebo of ")]
            cells += [_number(statistics.mean([r["rewards"]["after"] for r in rows])) if rows else "-" for rows in both]
            for rows in both:
                shares = [np.mean([r["rates"][sign] for r in rows]) for sign in ("hacked", "degenerate") if rows]
                cells.append(", ".join(f"{share:.1%}" for share in shares) or "-")
            yield f"| {' | '.join(cells)} |"


def _number(found: Estimate) -> str:
    if found.low is None or found.high is None:
        return f"{found.mean:.3g}" if np.isfinite(found.mean) else "-"
    return f"{found.mean:.3g} ({found.low:.3g} to {found.high:.3g})"


# --- the figures ------------------------------------------------------------------------------------------------------


def draw_lines(study: Study, name: str, to: Path) -> None:
    """Reward along lines between models: every seed thin, the mean thick."""
    panels = (
        ("from the base model", ((BASE, "es"), (BASE, "grpo"), (BASE, "placebo"))),
        ("between trained ones", (("es", "grpo"), ("es", "next es"), ("grpo", "next grpo"))),
    )
    if not study.lines(BASE, "es"):
        return
    figure = canvas(9.0, 4.2, layout="constrained")
    for axes, (title, pairs) in zip(figure.subplots(1, 2), panels, strict=True):
        frame(axes, title, "share of the way in the weights")
        axes.set_ylabel(f"reward, {EXAMPLES[name]} test examples")
        for index, (a, b) in enumerate(pairs):
            rewards_SA = np.array([row["rewards"] for row in study.lines(a, b)])
            if not len(rewards_SA):
                continue
            alphas = np.linspace(0, 1, rewards_SA.shape[1])
            axes.plot(alphas, rewards_SA.T, color=COLORS[index], linewidth=0.6, alpha=0.45)
            label = f"{SHOWN[a]} to {SHOWN[b]}" + (" of the next seed" if "next" in b else "")
            axes.plot(
                alphas, rewards_SA.mean(0), color=COLORS[index], linestyle=LINES[index], linewidth=2.2, label=label
            )
        axes.legend(frameon=False, loc="best")
    save(figure, to / f"landscape_lines_{name}.png")


def draw_noise(study: Study, name: str, to: Path) -> None:
    """Reward under noise on all weights: every seed a point, the mean a line."""
    if not study.of("noise"):
        return
    figure = canvas(6.4, 4.2, layout="constrained")
    axes = figure.subplots()
    frame(axes, "under noise on all weights", "standard deviation of the noise; 0: none")
    axes.set_ylabel(f"reward, {EXAMPLES[name]} test examples, mean of 4 draws")
    sigmas = sorted({row["sigma"] for row in study.of("noise")})
    for index, model in enumerate((BASE, *KINDS)):
        rows = study.of("noise", model=model, part="all")
        at = [
            [row["reward"] for row in rows],
            *([float(np.mean(r["rewards"])) for r in rows if r["sigma"] == s] for s in sigmas),
        ]
        places = range(len(at))
        for place, values in zip(places, at, strict=True):
            axes.plot([place + 0.04 * (index - 1.5)] * len(values), values, ".", color=COLORS[index], alpha=0.4)
        means = [float(np.mean(values)) for values in at]
        axes.plot(places, means, color=COLORS[index], linestyle=LINES[index], linewidth=2, label=SHOWN[model])
    axes.set_xticks(range(len(sigmas) + 1), ["0", *(f"{sigma:g}" for sigma in sigmas)])
    axes.legend(frameon=False)
    save(figure, to / f"landscape_noise_{name}.png")


def draw_coverage(study: Study, name: str, to: Path) -> None:
    """Draw pass@1 and pass@k of each way, averaged over seeds with different problems."""
    rows = {model: study.of("coverage", model=model) for model in (BASE, "es", "grpo")}
    rows[BASE] = [row for row in rows[BASE] if row["tries"] > 128]
    if not all(rows.values()):
        return
    figure = canvas(9.0, 3.8, layout="constrained")
    for axes, kind in zip(figure.subplots(1, 2, sharey=True), ("temperature", "sigma"), strict=True):
        frame(axes, {"temperature": "by temperature", "sigma": "by noise on the weights"}[kind], kind)
        axes.set_ylabel("solved, share of problems")
        for index, (model, found) in enumerate(rows.items()):
            last = f"pass@{found[0]['tries']}"
            for form, line in (("pass@1", ":"), (last, "-")):
                ways = [[way for way in row["ways"] if kind in way] for row in found]
                across = [way[kind] for way in ways[0]]
                mean = np.mean([[way[form] for way in one] for one in ways], axis=0)
                axes.plot(
                    across, mean, line, color=COLORS[index], marker="o", markersize=3, label=f"{SHOWN[model]}, {form}"
                )
        if kind == "sigma":
            axes.set_xscale("log")
        plain(axes)
    figure.axes[1].legend(frameon=False, fontsize=8, loc="upper left")
    figure.axes[1].grid(axis="y", color=GRID)
    save(figure, to / f"landscape_coverage_{name}.png")


def read() -> dict[str, Study]:
    """All studies that have rows."""
    rows = [json.loads(text) for text in ROWS.read_text(encoding="utf-8").splitlines()]
    found = {name: Study([row for row in rows if row["on"] == name]) for name in STUDIES}
    return {name: study for name, study in found.items() if study.rows}


def tables() -> dict[str, Iterator[str]]:
    """Return the tables of the page by name."""
    studies = read()
    return {"claims": table(studies, PARTS), "ends": ends(studies), "paths": table(studies, [unclaimed_paths])}


def draw(to: Path) -> None:
    """Draw the figures of the page."""
    for name, study in read().items():
        for one in (draw_lines, draw_noise, draw_coverage):
            one(study, name, to)
