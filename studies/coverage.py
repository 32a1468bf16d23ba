# SPDX-License-Identifier: Apache-2.0
"""How often each 95 % interval that evoalign reports holds what it is an interval of, by simulation on one CPU core.

    python studies/coverage.py > studies/results/coverage.json     # about seven minutes
    python studies/coverage.py --tried                                # what was tried and holds less
    python studies/coverage.py --table                                # the table of the rows that are committed

Samples are normal, skewed (exponential) or heavy-tailed (Student's t with three degrees of freedom), all with standard
deviation 1. Of the layouts of seeds and questions the seeds' part is drawn so, the questions' part is normal and twice
as wide, what is left normal and as wide. Of placebos all three parts are drawn so. Random numbers follow from the cell
alone, so that each can be made again.
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from evoalign import shaping, statistics
from evoalign.analysis.compare.statistics import compare
from evoalign.placebos.counterfactual import shuffled
from evoalign.report.tables import markdown_table as table
from evoalign.types import Update, population

ROWS = Path(__file__).parent / "results" / "coverage.json"
SAMPLES = 2000
"""A share of 95 % then has a standard error of 0.5 points."""
ITEMS = 40
NUMBERS = (3, 5, 12)
EXAMPLES = (3, 5, 8, 12, 50, 200)
PROMPTS = (8, 32)
PLACEBOS = (3, 5, 20)
SPLIT: Mapping[Literal["above", "share"], str] = {"above": "one more placebo above the mean placebo",
                                                  "share": "share that is drift"}  # fmt: skip
NULL = "run of ES without signal above its mean placebo"
MEMBERS, GENERATIONS, NUMBERS_EVOLVED = 8, 6, 32
Generator = np.random.Generator
Held = Callable[[Generator], bool | None]
"""One sample: whether its interval holds the truth; None where there is no interval."""


def normal(random: Generator, size: Any) -> Any:
    return random.standard_normal(size)


def skewed(random: Generator, size: Any) -> Any:
    return random.exponential(size=size) - 1


def heavy(random: Generator, size: Any) -> Any:
    return random.standard_t(3, size) / 3**0.5


FAMILIES: Mapping[str, Callable[[Generator, Any], Any]] = {"normal": normal, "skewed": skewed, "heavy": heavy}
MIDDLE = {"normal": 0.0, "skewed": 2 * (0.5 - 0.75 * np.log(0.75) + 0.25 * np.log(0.25)) - 1, "heavy": 0.0}
"""The interquartile mean of each."""


@dataclass(frozen=True)
class Cell:
    """`share` of `samples` intervals held the truth; `n` seeds, examples or prompts."""

    interval: str
    family: str
    n: int
    share: float
    samples: int


def holds(low: float | None, high: float | None, truth: float) -> bool | None:
    return None if low is None or high is None else bool(low <= truth <= high)


def of(found: statistics.Estimate, truth: float) -> bool | None:
    return holds(found.low, found.high, truth)


def layout(random: Generator, family: str, seeds: int) -> Any:
    """[S, I] values of mean 0."""
    items = 2 * random.standard_normal((1, ITEMS))
    return FAMILIES[family](random, (seeds, 1)) + items + random.standard_normal((seeds, ITEMS))


def pair(random: Generator, family: str, n: int, *, paired: bool) -> Any:
    """Two groups of runs, one standard deviation apart; paired ones share half of their variance."""
    draw, common = FAMILIES[family], random.standard_normal(n) if paired else np.zeros(n)
    a, b = ({i + (0 if paired or not g else n): v for i, v in enumerate(draw(random, n) + common)} for g in (0, 1))
    return compare("a", {i: v + 1 for i, v in a.items()}, "b", b)


def of_pair(random: Generator, family: str, n: int, *, paired: bool, effect: bool) -> bool | None:
    """Return whether the interval holds the true difference of 1 (an effect: 1 over the standard deviation)."""
    found = pair(random, family, n, paired=paired)
    sign = 1.0 if found.a == "a" else -1.0
    if effect:
        return holds(found.effect_low, found.effect_high, sign / (2**0.5 if paired else 1.0))
    return holds(found.low, found.high, sign)


def of_layouts(random: Generator, family: str, n: int, *, paired: bool) -> bool | None:
    """Two groups on the same questions, which they find as hard as each other."""
    items = 2 * random.standard_normal((1, ITEMS))
    a, b = (items + layout(random, family, n) / 2 for _ in range(2))
    return of(statistics.crossed_difference(a, b, paired=paired), 0.0)


def of_ratio(random: Generator, family: str, n: int) -> bool | None:
    """Nats and tokens of prompts: the longer the answer, the more nats, 0.5 a token; nats have the family's spread."""
    tokens = random.integers(20, 120, n).astype(float)
    nats = tokens * (0.5 + 0.25 * FAMILIES[family](random, n))
    return of(statistics.ratio(nats, tokens), 0.5)


def of_placebos(random: Generator, family: str, n: int, what: Literal["above", "share"]) -> bool | None:
    """A run that gained 6 on the mean question, and n placebos that gained 3: their luck, and each question's, is the
    family's. Above: a run that is one more placebo."""
    draw = FAMILIES[family]
    real = 6 + 2 * draw(random, ITEMS)
    placebos = 3 + 1.5 * draw(random, (n, 1)) + 2 * draw(random, (n, ITEMS))
    if what == "above":
        return of(statistics.beside(3 + 1.5 * draw(random, 1) + 2 * draw(random, ITEMS), placebos), 0.0)
    return of(statistics.ratio(placebos, real), 0.5)


def null_run(random: Generator, n: int, *, antithetic: bool) -> tuple[Any, Any]:
    """Rewards by question of a toy run of ES whose fitness is luck, [I], and of its n placebos, [n, I].

    A question's reward is a direction that questions share in part, less a square of the distance.
    """
    members, own = population(MEMBERS, antithetic=antithetic), np.empty((GENERATIONS, MEMBERS, NUMBERS_EVOLVED))
    for eps_ND in own:
        noise = random.standard_normal((MEMBERS, NUMBERS_EVOLVED))
        eps_ND[:] = [m.sign * noise[m.noise] for m in members]
    fitness = random.standard_normal((GENERATIONS, MEMBERS))
    updates = [
        Update(g, g, members, tuple(shaping.shape(f[:, None], "zscore")), 1.0, 0.5) for g, f in enumerate(fitness)
    ]
    ways = [[u.coefficients for u in updates], *([shuffled(u, seed) for u in updates] for seed in range(n))]
    means = np.einsum("kgm,gmd->kd", np.array(ways), own) * 0.5 / MEMBERS
    towards = random.standard_normal((1, NUMBERS_EVOLVED)) + random.standard_normal((ITEMS, NUMBERS_EVOLVED))
    rewards = means @ towards.T - 0.3 * (means**2).sum(1, keepdims=True)
    return rewards[0], rewards[1:]


def of_null(random: Generator, n: int, *, antithetic: bool) -> bool | None:
    """Return whether the printed interval of a run without signal includes 0."""
    return of(statistics.beside(*null_run(random, n, antithetic=antithetic)), 0.0)


def of_null_conditional(random: Generator, n: int) -> bool | None:
    """Return whether the interval conditional on the run, which earlier releases printed, includes 0."""
    own, placebos = null_run(random, n, antithetic=True)
    return of(statistics.crossed(own - placebos), 0.0)


def of_shares(random: Generator, lost: float, won: float, n: int) -> bool | None:
    """Return whether the interval of a change of 0-or-1 examples holds the true change."""
    u = random.random(n)
    before, after = (u < lost).astype(float), ((u >= lost) & (u < lost + won)).astype(float)
    return of(statistics.paired(before, after, shares=True), won - lost)


def cells() -> Iterator[tuple[str, str, int, Held]]:
    """Interval, family, n, and how one sample of it is made."""
    for family, draw in FAMILIES.items():
        yield from (("mean over runs, t; bands", family, n, lambda r, n=n, d=draw: of(statistics.mean(d(r, n)), 0.0))
                    for n in NUMBERS)  # fmt: skip
        yield from (
            ("interquartile mean, ranks", family, n,
             lambda r, n=n, d=draw, m=MIDDLE[family]: of(statistics.interquartile_mean(d(r, n)), m))
            for n in (5, 8, 12)
        )  # fmt: skip
        for paired, name in ((True, "paired"), (False, "not paired")):
            for effect, what in ((False, "difference over runs"), (True, "effect size")):
                yield from ((f"{what}, {name}", family, n,
                             lambda r, f=family, n=n, p=paired, e=effect: of_pair(r, f, n, paired=p, effect=e))
                            for n in NUMBERS)  # fmt: skip
            yield from ((f"difference over runs and questions, {name}", family, n,
                         lambda r, f=family, n=n, p=paired: of_layouts(r, f, n, paired=p))
                        for n in NUMBERS)  # fmt: skip
        yield from (("mean over runs and questions", family, n,
                     lambda r, f=family, n=n: of(statistics.crossed(layout(r, f, n)), 0.0))
                    for n in NUMBERS)  # fmt: skip
        yield from (("change over examples, t", family, n,
                     lambda r, n=n, d=draw: of(statistics.paired(np.zeros(n) + 0.5, d(r, n) + 0.5), 0.0))
                    for n in EXAMPLES)  # fmt: skip
        for what, name in SPLIT.items():
            yield from ((f"{name}, over placebos and questions", family, n,
                         lambda r, f=family, n=n, w=what: of_placebos(r, f, n, w))
                        for n in PLACEBOS)  # fmt: skip
        yield from (("KL a token, Fieller over prompts", family, n, lambda r, f=family, n=n: of_ratio(r, f, n))
                    for n in PROMPTS)  # fmt: skip
    for antithetic, name in ((True, "pairs"), (False, "one-sided")):
        yield from ((f"{NULL}, {name}", "normal", n, lambda r, n=n, a=antithetic: of_null(r, n, antithetic=a))
                    for n in PLACEBOS)  # fmt: skip
    for lost, won in ((0.0, 0.05), (0.05, 0.25), (0.1, 0.6)):
        yield from (("change over examples, 0 or 1", f"{lost:.0%} lost, {won:.0%} won", n,
                     lambda r, a=lost, b=won, n=n: of_shares(r, a, b, n)) for n in EXAMPLES)  # fmt: skip


# --- what was tried and holds less ------------------------------------------------------------------------------------


def bootstrap(random: Generator, n: int) -> bool | None:
    """Efron's BCa of normal samples, as evoalign once had it, with fewer resamples."""
    from scipy.stats import bootstrap as of_scipy

    found = of_scipy((random.standard_normal(n),), np.mean, n_resamples=999, rng=random).confidence_interval
    return holds(float(found.low), float(found.high), 0.0)


def satterthwaite(random: Generator, family: str, n: int) -> bool | None:
    """One t of the sum of both sources, with Satterthwaite's degrees of freedom."""
    values = layout(random, family, n)
    parts = statistics._parts(values)
    square = max(parts.seeds + parts.items - parts.rest, parts.seeds, parts.items)
    dfs = n - 1, ITEMS - 1, (n - 1) * (ITEMS - 1)
    spread = sum(v**2 / df for v, df in zip((parts.seeds, parts.items, parts.rest), dfs, strict=True))
    half = statistics.t_of(square**2 / spread) * square**0.5
    return holds(values.mean() - half, values.mean() + half, 0.0)


def t_of_shares(random: Generator, won: float, n: int) -> bool | None:
    """Where no example changed it has no width, and does not hold what is not 0."""
    gaps = (random.random(n) < won).astype(float)
    found = statistics.mean(gaps)
    return gaps[0] == won if found.low is None else of(found, won)


def tried() -> Iterator[tuple[str, str, int, Held]]:
    for n in PLACEBOS:
        yield f"{NULL}, conditional on the run", "normal", n, lambda r, n=n: of_null_conditional(r, n)
    for n in NUMBERS:
        yield "mean over runs, BCa bootstrap", "normal", n, lambda r, n=n: bootstrap(r, n)
        for family in ("normal", "skewed"):
            yield ("mean over runs and questions, Satterthwaite", family, n,
                   lambda r, f=family, n=n: satterthwaite(r, f, n))  # fmt: skip
        yield "change over examples, t", "5% won", n, lambda r, n=n: t_of_shares(r, 0.05, n)


def measured(name: str, family: str, n: int, one: Held, samples: int) -> Cell:
    random = np.random.default_rng(zlib.crc32(f"{name} {family} {n}".encode()))
    held = [found for _ in range(samples) if (found := one(random)) is not None]
    return Cell(name, family, n, round(sum(held) / len(held), 4), len(held))


def as_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line an interval and n; a column a family. Of shares, the families are what is lost and won."""
    lines: dict[tuple[str, int], dict[str, str]] = {}
    for row in rows:
        lines.setdefault((row["interval"], row["n"]), {})[row["family"]] = f"{row['share']:.1%}"
    plain = {key: found for key, found in lines.items() if "normal" in found}
    shares = {key: found for key, found in lines.items() if "normal" not in found}
    said: list[list[str]] = []
    for part in (plain, shares):
        names = list(dict.fromkeys(family for found in part.values() for family in found))
        cells = [(name, str(n), *(found.get(f, "-") for f in names)) for (name, n), found in part.items()]
        said.append(table(("interval", "n", *names), cells))
    return [*said[0], *said[1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--only", default="", help="Intervals with this in their name.")
    parser.add_argument("--tried", action="store_true", help="What was tried in place of these.")
    parser.add_argument("--table", action="store_true", help="Show what is committed as a table; simulate nothing.")
    arguments = parser.parse_args()
    if arguments.table:
        print("\n".join(as_table(json.loads(ROWS.read_text()))))
        return
    rows = []
    for name, family, n, one in tried() if arguments.tried else cells():
        if arguments.only in name:
            rows.append(asdict(measured(name, family, n, one, arguments.samples)))
            print(rows[-1], file=sys.stderr, flush=True)
    print("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]")


if __name__ == "__main__":
    main()
