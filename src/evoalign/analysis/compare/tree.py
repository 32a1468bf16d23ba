# SPDX-License-Identifier: Apache-2.0
"""A comparison as JSON: all numbers, for each seed."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from evoalign.analysis.compare.comparison import Comparison, Group, Match, amount
from evoalign.analysis.compare.plan import Plan
from evoalign.analysis.compare.runs import Run
from evoalign.analysis.compare.words import summary
from evoalign.statistics import mean

FORMAT_VERSION = 1


def as_tree(comparison: Comparison) -> dict[str, Any]:
    """All numbers, for each seed, as comparison.json has them."""
    return {
        "format_version": FORMAT_VERSION,
        "measure": comparison.measure,
        "plan": _plan_tree(comparison.plan),
        "summary": summary(comparison),
        "notes": list(comparison.notes),
        "left_out": [{"path": str(path), "why": why} for path, why in comparison.left_out],
        "groups": [_group_tree(comparison, group) for group in comparison.groups],
        "matches": [_match_tree(match) for match in comparison.matches],
        "end": _match_tree(comparison.end),
    }


def _plan_tree(plan: Plan | None) -> dict[str, Any] | None:
    return None if plan is None else {"sha256": plan.sha256, **plan.settings.model_dump(mode="json")}


def _group_tree(comparison: Comparison, group: Group) -> dict[str, Any]:
    ends = [run.points[-1].measures for run in group.runs if run.finished]
    return {
        "label": group.label,
        "method": group.method,
        "settings": dict(group.settings),
        "differing": dict(group.differing),
        "end": {n: asdict(mean([end[n] for end in ends])) for n in comparison.measures} if ends else {},
        "runs": [_run_tree(run) for run in group.runs],
    }


def _run_tree(run: Run) -> dict[str, Any]:
    return {
        "path": str(run.path),
        "seed": run.seed,
        "steps": run.steps,
        "finished": run.finished,
        "hardware": run.hardware,
        "cost": asdict(run.cost) if run.cost else None,
        "distance": dict(run.distance) if run.distance else None,
        "shares_before": dict(run.shares_before) if run.shares_before else None,
        "shares_after": dict(run.shares_after) if run.shares_after else None,
        "points": [
            {
                "step": point.step,
                "cost": asdict(point.cost) if point.cost else None,
                "measures": dict(point.measures),
                "divergence": dict(point.divergence) if point.divergence else None,
            }
            for point in run.points
        ],
    }


def _match_tree(match: Match) -> dict[str, Any]:
    return {
        "by": match.by,
        "limit": match.limit,
        "planned": match.plan is not None,
        "notes": list(match.notes),
        "groups": [
            {
                "label": s.group.label,
                "estimate": asdict(s.estimate) if s.estimate else None,
                "over_questions": asdict(s.over_questions) if s.over_questions else None,
                "interquartile_mean": asdict(s.middle) if s.middle else None,
                "runs": [
                    {
                        "path": str(t.run.path),
                        "seed": t.run.seed,
                        "step": t.point.step,
                        "used": amount(match.by, t.point.cost) if match.by else None,
                        "share": t.share if match.by else None,
                        "measures": dict(t.point.measures),
                    }
                    for t in s.taken
                ],
            }
            for s in match.standings
        ],
        "pairs": [{**asdict(pair), "p_values": dict(pair.p_values)} for pair in match.pairs],
        "sensitivity": [asdict(found) for found in match.sensitivity],
    }
