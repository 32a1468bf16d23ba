# SPDX-License-Identifier: Apache-2.0
"""Similarity in plain words: one sentence each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from evoalign.analysis.estimates import told
from evoalign.analysis.parts import ALL
from evoalign.analysis.parts import UNEMBEDDING as HEAD
from evoalign.statistics import LEVEL

if TYPE_CHECKING:
    from evoalign.analysis.similarity.chance import Across, Agreement
    from evoalign.analysis.similarity.finding import Pair
    from evoalign.analysis.similarity.kept import GainKept
    from evoalign.analysis.similarity.overlap import Overlap

NONE = "no common direction is shown"
FEWEST = round(1 / LEVEL) - 1
"""Placebos of which none can be so far from 0 by chance once in twenty times."""
DIRECTIONS = 4
"""Singular directions whose overlap is told, or the most below that are known."""
ALIKE = 1.2
"""Up to so many times as much of a change in one layer as in another is evenly."""
MOST_PAIRS = 10
"""Pairs that are all told of; of more, those with a direction in common."""


def pairs(names: Sequence[str], found: Sequence[Pair]) -> list[str]:
    """A sentence for each pair; where there are many, for those that are not as chance has them, and how many are."""
    said = [(pair(names[p.a], names[p.b], p, len(found)), _verdict(p, len(found))) for p in found]
    if len(said) <= MOST_PAIRS:
        return [line for line, _ in said]
    told = [line for line, verdict in said if not verdict.startswith(NONE)]
    return [*told, f"of the other {len(said) - len(told)} pairs {NONE} (Bonferroni over {len(said)})"]


def pair(a: str, b: str, found: Pair, tests: int) -> str:
    """The cosine of a pair beside what chance gives; `tests` pairs are looked at."""
    own = found.cosines[ALL]
    head = f"{a} and {b}: cosine of the weight changes "
    if own.value is None or own.spread is None:
        return f"{head}unknown, since one of them did not change"
    said, beside = f"{head}{own.value:.4g}", _beside(own.placebos, own.p)
    if found.same_noise:
        mend = "" if own.placebos else "; --set placebos=20 says what that alone brings"
        return f"{said}; both drew the same noise, so that no spread by chance is known{beside}{mend}"
    over = f" (Bonferroni over {tests} pairs)" if tests > 1 else ""
    by_chance = f"; with a random sign of each row it would be 0 +- {own.spread:.2g}"
    return f"{said}{by_chance}{beside}: {_verdict(found, tests)}{over}"


def _verdict(found: Pair, tests: int) -> str:
    """At 5 % over all pairs by the spread; placebos, where there are any, have to agree."""
    own = found.cosines[ALL]
    if own.value is None or own.spread is None or found.same_noise:
        return ""
    within = abs(own.value) <= NormalDist().inv_cdf(1 - LEVEL / 2 / tests) * own.spread
    if within or (own.p is not None and own.p > LEVEL):
        return NONE if within or len(own.placebos) >= FEWEST else f"{NONE}, which takes {FEWEST} placebos"
    return "a common direction" if own.value > 0 else "opposite directions"


def overlaps(names: Sequence[str], found: Sequence[Pair]) -> list[str]:
    """A sentence for each pair whose largest singular directions have more in common than chance has, on a side."""
    said = [_overlap(p, 2 * len(found)) for p in found]
    return [f"{names[p.a]} and {names[p.b]}: {line}" for p, line in zip(found, said, strict=True) if line]


def _overlap(found: Pair, tests: int) -> str:
    """Of all matrices; `tests` sides of pairs are looked at. Says nothing where neither side is beyond chance."""
    by_k = found.overlaps.get(ALL, {})
    k = max((k for k in by_k if k <= DIRECTIONS), default=None)
    if k is None:
        return ""
    kinds = ("left (output)", "right (input)")
    beyond = [kind for kind, own in zip(kinds, by_k[k], strict=True) if _is_beyond(own, tests, found.same_noise)]
    if not beyond:
        return ""
    sides = ", ".join(
        f"{kind} {own.value:.3g}; {own.chance:.3g} +- {own.spread:.2g} by chance{_beside(own.placebos, own.p)}"
        for kind, own in zip(kinds, by_k[k], strict=True)
    )
    many = "largest singular direction" if k == 1 else f"{k} largest singular directions"
    mean = f"mean over {by_k[k][0].matrices} matrices"
    return f"overlap of the {many}, {mean}: {sides}: beyond chance, {' and '.join(beyond)}"


def _is_beyond(own: Overlap, tests: int, same_noise: bool) -> bool:
    """As of cosines, at one end: by the spread where it holds, and by the placebos where there are any."""
    if own.p is None and same_noise:
        return False
    far = same_noise or own.value - own.chance > NormalDist().inv_cdf(1 - LEVEL / tests) * own.spread
    return far and (own.p is None or own.p <= LEVEL)


def agreement(found: Agreement) -> str:
    """How far seeds agree."""
    many = f"{len(found.group.seeds)} seeds of {found.group.label}"
    reliable = "" if found.reliability is None else f", a reliability of {found.reliability:.2g} of all together"
    return (
        f"{many}: two seeds' changes have cosine {told(found.cosine)} in the mean; the mean changes of two halves "
        f"of the seeds {told(found.halves)}{reliable}{_beside(found.placebos, found.p)}"
    )


def across(found: Across) -> str:
    """How alike the seeds of two settings are."""
    beside = _beside(found.placebos, found.p)
    return f"a seed of {found.a.label} and one of {found.b.label}: cosine {told(found.cosine)} in the mean{beside}"


def target(found: Mapping[str, Any], *, tied: bool) -> str:
    """The size of a change, where it lies, its rank and sparsity. Where `tied`, the unembedding is no part apart."""
    where: Mapping[str, Any] = found["where"]
    whole = where[ALL]
    relative = "" if whole["relative"] is None else f", {whole['relative']:.3%} of the base's"
    norms = _range([one["norm"] for one in whole["placebos"]])
    kinds = [name for name in where if name != ALL and not name.startswith("layer ") and not (tied and name == HEAD)]
    parts = sorted(((where[name]["share"], name) for name in kinds), reverse=True)
    shares = ", ".join(f"{name} {share:.0%}" for share, name in parts if share >= 0.005)
    layers = [(s["share"], n) for n, s in where.items() if n.startswith("layer ")]
    most = _most(layers) if layers and max(layers)[0] > 0 else ""
    rank = "" if whole["participation_rank"] is None else (
        f"; rank of a matrix's change, median: participation {whole['participation_rank']:.3g} (of noise "
        f"{whole['participation_rank_of_noise']:.3g}"
        f"{_range([one['participation_rank'] for one in whole['placebos']])}), entropy {whole['entropy_rank']:.3g}"
    )  # fmt: skip
    still = whole["at_most"]["absolute"].get("0")
    sparse = "" if still is None else f"; {still:.1%} of the numbers did not change"
    return f"{found['target']}: norm of the change {whole['norm']:.4g}{relative}{norms}: {shares}{most}{rank}{sparse}"


def _most(layers: Sequence[tuple[float, str]]) -> str:
    """In which layer most of the change lies, or that no layer has much more than another."""
    (low, _), (high, name) = min(layers), max(layers)
    if len(layers) == 1 or high > ALIKE * low:
        return f", most in {name} ({high:.0%})"
    each = f"{high:.0%} each" if f"{low:.0%}" == f"{high:.0%}" else f"{low:.0%} to {high:.0%} each"
    return f", evenly over the {len(layers)} layers ({each})"


def unembedding(name: str, found: Sequence[Mapping[str, Any]], *, tied: bool) -> list[str]:
    """The change of what gives the logits."""
    also = f" ({name}, which is the embeddings, too: they are tied)" if tied else f" ({name})"
    said = [
        f"{one['target']} {own['norm']:.4g}, {own['share']:.1%} of its squared change" if own["norm"] else
        f"{one['target']} did not change it"
        for one in found for own in [one["where"][HEAD]]
    ]  # fmt: skip
    return [f"norm of the change of the unembedding{also}: {'; '.join(said)}"]


def gain(name: str, found: GainKept, *placebos: GainKept) -> str:
    """What low ranks keep."""
    head = f"{name}: reward {found.before:.4g} before, {found.after:.4g} with the whole change"
    head += _range([one.after for one in placebos])
    cuts = ", ".join(f"rank {c.rank} {c.reward:.4g}" + ("" if c.share is None else f" ({c.share.mean:.0%} of the gain)")
                     for c in found.cuts)  # fmt: skip
    if any(c.share is None for c in found.cuts):
        return f"{head}; {cuts}: the gain may be 0, so no share of it is told"
    least = "no rank asked keeps 90 % of the gain" if found.minimal is None else (
        f"rank {found.minimal} keeps 90 % of the gain"
    )  # fmt: skip
    low = "none asked" if found.low is None else str(found.low)
    high = "more than asked" if found.high is None else str(found.high)
    return f"{head}; {cuts}: {least} (95 % interval {low} to {high})"


def without_placebos(names: Sequence[str]) -> list[str]:
    """Of runs of ES that stand by themselves."""
    if not names:
        return []
    return [
        f"{', '.join(names)}: without placebos signal and random walk are not told apart; --set placebos=20 makes them"
    ]


def _beside(placebos: Sequence[float], p: float | None) -> str:
    return "" if p is None else f"{_range(placebos)}, p {p:.2g}"


def _range(values: Sequence[float | None]) -> str:
    """What placebos came to."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    return f"; {len(known)} placebo{'s' if len(known) > 1 else ''} {min(known):.3g} to {max(known):.3g}"
