# SPDX-License-Identifier: Apache-2.0
"""What judgments come to, by dimension: a row a model, and in words what is to be known before they are believed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from evoalign.analysis.judge import elo as elo_
from evoalign.analysis.judge.elo import Elo
from evoalign.analysis.judge.judgments import Judgment, models_of
from evoalign.analysis.judge.strengths import ABOVE, BASE, BELOW, Rated, Strengths, counts_of, strengths
from evoalign.analysis.judge.trust import Trust, trust
from evoalign.errors import ConfigError
from evoalign.statistics import Estimate

FORMAT_VERSION = 1
Method: TypeAlias = Literal["bradley-terry", "elo"]
Unparsed: TypeAlias = Literal["leave-out", "tie"]


@dataclass(frozen=True, slots=True)
class Settings:
    """How judgments are rated.

    `prior` judgments more between each two models, half won by either, make every estimate of Bradley and Terry
    finite; 0 is maximum likelihood alone. `draws` are of the bootstrap, `shuffles` the orders that Elo is averaged
    over.
    """

    method: Method = "bradley-terry"
    anchor: str | None = None
    unparsed: Unparsed = "leave-out"
    prior: float = 0.0
    draws: int = 2000
    shuffles: int = 200
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """A model in a dimension: its rating, and what it won, lost and shared in judgments with scores."""

    model: str
    rated: Rated
    won: int
    lost: int
    tied: int
    elo: Elo | None = None


@dataclass(frozen=True, slots=True)
class Dimension:
    """All that the judgments of a dimension come to; `strengths` is None of Elo's ratings."""

    name: str
    reference: str
    rows: tuple[Row, ...]
    trust: Trust
    strengths: Strengths | None


@dataclass(frozen=True, slots=True)
class Ratings:
    """The dimensions in the order in which they come, and how they were rated."""

    settings: Settings
    dimensions: tuple[Dimension, ...]

    def tree(self) -> dict[str, Any]:
        """As plain data, which JSON has."""
        return {
            "format_version": FORMAT_VERSION,
            "settings": asdict(self.settings),
            "dimensions": [_tree(dimension) for dimension in self.dimensions],
        }


def rate(judgments: Sequence[Judgment], settings: Settings) -> Ratings:
    """All dimensions, each for itself. Raises ConfigError for an anchor that one of them does not have."""
    names = list(dict.fromkeys(one.dimension for one in judgments))
    return Ratings(settings, tuple(_rate([j for j in judgments if j.dimension == n], n, settings) for n in names))


def _rate(judgments: Sequence[Judgment], name: str, settings: Settings) -> Dimension:
    models = models_of(judgments)
    if settings.anchor is not None and settings.anchor not in models:
        raise ConfigError(f"--anchor {settings.anchor}: {name} has {', '.join(models)}; name one of these")
    counts_QP3 = counts_of(judgments, models, unparsed_ties=settings.unparsed == "tie")
    found = trust(judgments, models)
    if not len(counts_QP3):
        unread = dict.fromkeys(models, Rated(None, why="no judgment has scores"))
        return Dimension(name, settings.anchor or models[0], _rows(models, unread, found, {}), found, None)
    if settings.method == "elo":
        reference, rated, elos = _elo(judgments, models, settings)
        return Dimension(name, reference, _rows(models, rated, found, elos), found, None)
    strong = strengths(
        counts_QP3, models, anchor=settings.anchor, prior=settings.prior, draws=settings.draws, seed=settings.seed
    )
    return Dimension(name, strong.reference, _rows(models, strong.ratings, found, {}), found, strong)


def _elo(
    judgments: Sequence[Judgment], models: Sequence[str], settings: Settings
) -> tuple[str, dict[str, Rated], dict[str, Elo]]:
    """The reference, and the ratings with that model at 1000: its own order's, and its mean over orders."""
    ties = settings.unparsed == "tie"
    outcomes = [(one, 0.5 if one.outcome is None and ties else one.outcome) for one in judgments]
    played = [(models.index(o.model_a), models.index(o.model_b), score) for o, score in outcomes if score is not None]
    found = elo_.elo(played, len(models), shuffles=settings.shuffles, seed=settings.seed)
    weakest = min(range(len(models)), key=lambda i: found[i].rating)
    at = weakest if settings.anchor is None else models.index(settings.anchor)
    own, mean = BASE - found[at].rating, BASE - found[at].mean
    elos = {
        name: Elo(one.rating + own, one.mean + mean, one.sd, one.low + mean, one.high + mean)
        for name, one in zip(models, found, strict=True)
    }
    return models[at], {name: Rated(one.rating, one.low, one.high) for name, one in elos.items()}, elos


def _rows(models: Sequence[str], rated: dict[str, Rated], found: Trust, elos: dict[str, Elo]) -> tuple[Row, ...]:
    """The strongest first, those without a rating where they belong: above all, below all, or last."""
    rows: list[Row] = []
    for name in models:
        here = [(p.won, p.lost, p.tied) if p.models[0] == name else (p.lost, p.won, p.tied)
                for p in found.pairs if name in p.models]  # fmt: skip
        won, lost, tied = (sum(column) for column in zip(*here, strict=True))
        rows.append(Row(name, rated[name], won, lost, tied, elos.get(name)))
    unrated = {ABOVE: math.inf, BELOW: -math.inf}

    def strength(row: Row) -> float:
        return unrated.get(row.rated.why or "", -math.inf) if row.rated.rating is None else row.rated.rating

    return tuple(sorted(rows, key=strength, reverse=True))


def _tree(found: Dimension) -> dict[str, Any]:
    kept, strong = found.trust, found.strengths
    differences = {} if strong is None else {models: asdict(gap) for models, gap in strong.differences.items()}
    return {
        "dimension": found.name,
        "reference": found.reference,
        "nu": None if strong is None else strong.nu,
        "models": [
            {"model": row.model, **asdict(row.rated), "won": row.won, "lost": row.lost, "tied": row.tied,
             "elo": None if row.elo is None else asdict(row.elo)}
            for row in found.rows
        ],
        "pairs": [{**asdict(pair), "difference": differences.get(pair.models)} for pair in kept.pairs],
        "judgments": kept.judgments,
        "questions": kept.questions,
        "unparsed": kept.unparsed,
        "ties": kept.ties,
        "both_orders": kept.both,
        "agreement": _plain(kept.agreement),
        "first_wins": _plain(kept.first_wins),
    }  # fmt: skip


def _plain(found: Estimate) -> dict[str, Any]:
    return {**asdict(found), "mean": None if math.isnan(found.mean) else found.mean}
