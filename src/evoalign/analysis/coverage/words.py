# SPDX-License-Identifier: Apache-2.0
"""What the numbers of `compute` say, no stronger than their intervals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from evoalign import statistics
from evoalign.analysis.estimates import told
from evoalign.statistics import Estimate

Row = Mapping[str, Any]


def sentences(numbers: Mapping[str, Any]) -> list[str]:
    """What was asked; each target by itself; temperature beside noise; each target beside the base."""
    n, ks = numbers["samples"], numbers["k"]
    few = 1 - 0.05 ** (1 / n)
    lines = [
        f"{numbers['examples']} problems, {n} tries at each in each way; solved is: {numbers['solved_is']}. Intervals "
        "are at 95 % for new problems and new tries of these models, each for itself. A problem that no try solved "
        f"may still be solved by up to {few:.1%} of further tries (95 %)."
    ]
    for target in numbers["targets"]:
        lines += [_of_target(target, kind, ks) for kind in ("temperature", "sigma") if _has(target["ways"], kind)]
        lines.append(_varied(target, n))
    lines += _contests(numbers["temperature_less_noise"], ks[-1])
    return [*lines, *_beside_base(numbers)]


def _has(rows: Iterable[Row], kind: str) -> bool:
    return any(kind in row for row in rows)


def estimate(row: Row) -> Estimate:
    """An estimate as `tree` wrote it down."""
    mean = float("nan") if row["mean"] is None else row["mean"]
    return Estimate(mean, row["n"], row["low"], row["high"], row["why"], row["items"])


def way_of(row: Row) -> str:
    """For people: temperature 0.2, sigma 0.001."""
    kind = "temperature" if "temperature" in row else "sigma"
    return f"{kind} {row[kind]:g}"


def _of_target(target: Row, kind: str, ks: Sequence[int]) -> str:
    shown = [ks[0], ks[-1]] if len(ks) > 1 else ks
    said: list[str] = []
    for row in target["ways"]:
        if kind in row:
            of_k = {one["k"]: estimate(one) for one in row["pass"]}
            said.append(f"{way_of(row)}: " + ", ".join(f"pass@{k} {told(of_k[k])}" for k in shown))
    return f"{target['target']}, {'; '.join(said)}."


def _varied(target: Row, n: int) -> str:
    said = [
        f"{way_of(row)} {row['entropy']['mean']:.2f} nats and {row['pairwise']['mean']:.2f}" for row in target["ways"]
    ]
    return (
        f"{target['target']}, entropy of the {n} answers to a problem and mean difference of two of them: "
        f"{', '.join(said)}."
    )


def _contests(rows: Sequence[Row], last: int) -> list[str]:
    lines: list[str] = []
    for row in rows:
        if row["k"] != last or "mean" not in row:
            continue
        found = estimate(row)
        heat, noise = (
            " and ".join(f"{v:g}" for v in sorted({*row["chosen"][kind]})) for kind in ("temperature", "sigma")
        )
        how = (
            f"at pass@{last} from equally many tries, temperature {heat} beside sigma {noise}, chosen by other problems"
        )
        if not statistics.is_sure(found):
            verdict = f"which of sampling and weight noise solves more is not sure: {told(found, '+.3g')}"
        else:
            better, worse = ("sampling", "weight noise") if found.mean > 0 else ("weight noise", "sampling")
            verdict = f"{better} solves more than {worse}, sampling less noise {told(found, '+.3g')}"
        lines.append(f"{row['target']}: {how}: {verdict}.")
    return lines


CLAIMS = (
    ("shrinkage_beyond_chance", "solves less of what the base solves than other tries of the base do",
     "keeps more of what the base solves than other tries of the base do"),
    ("expansion_beyond_chance", "solves more of what the base does not than other tries of the base do",
     "solves less of what the base does not than other tries of the base do"),
)  # fmt: skip


def _beside_base(numbers: Mapping[str, Any]) -> list[str]:
    rows: Sequence[Row] = numbers["against_base"]
    if not rows:
        return ["No target but the base: nothing to compare with it."]
    ks = numbers["k"]
    shown = sorted({ks[0], ks[-1]})
    each = len(shown) + len(CLAIMS)
    lines = [
        f"{each * len(rows)} comparisons with the base follow, of {' and '.join(f'pass@{k}' for k in shown)}, and of "
        "what the base solves and does not solve, in each way: one in twenty has an interval without 0 by chance alone."
        " Those of solved problems are for new problems, and under weight noise for these draws of it alone."
    ]
    for name in dict.fromkeys(row["target"] for row in rows):
        own = [row for row in rows if row["target"] == name]
        sure = [line for row in own for line in _sure(row, shown)]
        rest = each * len(own) - len(sure)
        more = (
            [f"{'the other ' if sure else 'all '}{rest} of {each * len(own)} comparisons are not sure"] if rest else []
        )
        lines.append(f"{name} and base: {'; '.join([*sure, *more])}.")
    return lines


def _sure(row: Row, shown: Sequence[int]) -> list[str]:
    said: list[str] = []
    for change in row["pass"]:
        found = estimate(change)
        if change["k"] in shown and statistics.is_sure(found):
            said.append(f"at {way_of(row)} pass@{change['k']} differs by {told(found, '+.3g')}")
    for key, more, less in CLAIMS:
        found = estimate(row[key])
        if statistics.is_sure(found):
            what = more if found.mean > 0 else less
            said.append(f"at {way_of(row)} it {what}, by {told(found, '+.3g')} of all problems")
    return said
