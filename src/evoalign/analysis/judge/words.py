# SPDX-License-Identifier: Apache-2.0
"""What judgments come to, in plain words: how they were rated, and what is to be known before that is believed."""

from __future__ import annotations

import math

from evoalign.analysis.judge.elo import K
from evoalign.analysis.judge.judgments import TIE
from evoalign.analysis.judge.ratings import Dimension, Ratings, Settings
from evoalign.analysis.judge.strengths import ABOVE, BASE, BELOW, OPEN
from evoalign.statistics import Estimate

MEND = (
    "judge more questions, or give --prior 1, a weak prior that the output then names; --ratings elo is always finite, "
    "and depends on the order"
)
SAID = {
    ABOVE: "no judgment is against its being any distance above {reference}, so that the likelihood rises without end",
    BELOW: "no judgment is against its being any distance below {reference}, so that the likelihood rises without end",
    OPEN: "no chain of judgments connects it with {reference}, or there are ties alone",
}


def sentences(found: Ratings) -> list[str]:
    """How the judgments were rated, then what is to be said of each dimension."""
    lines = [_told(dimension, found.settings) for dimension in found.dimensions]
    return [_method(found.settings), *(line for told in lines for line in told)]


def _method(settings: Settings) -> str:
    left = "count as ties" if settings.unparsed == "tie" else "are left out"
    rules = f"Judgments without scores {left}; scores at most {TIE} apart are a tie."
    at = "the weakest model" if settings.anchor is None else f"the model {settings.anchor}"
    if settings.method == "elo":
        return (
            f"Elo (K {K:g}, scale 400, start 1000) in the order of the file, moved so that {at} is {BASE:g}. Mean, "
            f"sd and interval are over {settings.shuffles} random orders (seed {settings.seed}), not over other "
            f"questions. {rules}"
        )
    prior = (
        f"with a weak prior: {settings.prior:g} judgments more between each two models, half won by either"
        if settings.prior
        else "by maximum likelihood"
    )
    return (
        f"Bradley-Terry with Davidson's ties {prior}. On the Elo scale, {at} is {BASE:g}; intervals are 95 % of the "
        f"difference to that model for new questions ({settings.draws} bootstrap draws, seed {settings.seed}). {rules}"
    )


def _told(found: Dimension, settings: Settings) -> list[str]:
    kept, name = found.trust, found.name
    lines = [
        f"{name}: {kept.judgments} judgments of {kept.questions} questions, {_share(kept.unparsed, kept.judgments)} "
        f"without scores; of those with scores {_share(kept.ties, kept.parsed)} are ties."
    ]
    if not kept.parsed and settings.unparsed != "tie":
        return [
            *lines,
            f"{name}: no ratings: no judgment has scores; `raw` of each says what the judge said, or why not.",
        ]
    lines.append(
        f"{name}: the two orders agree in {_percent(kept.agreement)} of {kept.both} pairs of answers read in both; of "
        f"the wins there {_percent(kept.first_wins)} went to the answer shown first{_bias(kept.first_wins)}."
    )
    lines += [_pair(found, pair.models) for pair in kept.pairs]
    return [*lines, *_endless(found)] if settings.method == "bradley-terry" else lines


def _pair(found: Dimension, models: tuple[str, str]) -> str:
    pair = next(pair for pair in found.trust.pairs if pair.models == models)
    line = f"{found.name}: {models[0]} against {models[1]}: won {pair.won}, lost {pair.lost}, tied {pair.tied}"
    line += f", {pair.unparsed} without scores" if pair.unparsed else ""
    gap = None if found.strengths is None else found.strengths.differences[models]
    if gap is None or gap.rating is None:
        return f"{line}."
    ends = f"95 %: {gap.low:+.0f} to {gap.high:+.0f}" if gap.low is not None and gap.high is not None else gap.why
    return f"{line}; {gap.rating:+.0f} points ({ends})."


def _endless(found: Dimension) -> list[str]:
    """The models that have no finite rating beside the reference, why, and what to do."""
    lines: list[str] = []
    for why, said in SAID.items():
        names = [row.model for row in found.rows if row.rated.rating is None and row.rated.why == why]
        if names:
            told = said.format(reference=found.reference)
            lines.append(f"{found.name}: no finite rating of {', '.join(names)}: {told}; {MEND}.")
    return lines


def _bias(found: Estimate) -> str:
    if found.low is None or found.high is None:
        return ""
    if found.low <= 0.5 <= found.high:
        return ", which shows no bias"
    return ": a bias to the first" if found.low > 0.5 else ": a bias to the second"


def _share(part: int, whole: int) -> str:
    return f"{part} ({part / whole:.1%})" if whole else f"{part}"


def _percent(found: Estimate) -> str:
    if math.isnan(found.mean):
        return f"no share ({found.why})"
    if found.low is None or found.high is None:
        return f"{found.mean:.1%} ({found.why})"
    return f"{found.mean:.1%} (95 %: {found.low:.1%} to {found.high:.1%})"
