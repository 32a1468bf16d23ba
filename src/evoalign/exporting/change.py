# SPDX-License-Identifier: Apache-2.0
"""What a model card says of before and after: the measures, how much of the gain is drift, and what alarmed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evoalign.exporting.markdown import plain
from evoalign.placebos.estimates import PlaceboResults, beyond_drift, largest, parse, sentence
from evoalign.rewards.fitness import aim_of

NOT_SEALED = (
    "These numbers are **not sealed**: the run that wrote them was of an earlier release, went on since, or its seal "
    "was taken away, so that nothing shows whether they were changed."
)


def change(found: Mapping[str, Any], placebo: PlaceboResults | None) -> str:
    """`found` is results/evaluation.json, `placebo` what results/placebo.json has. Raises DataError."""
    settings: Mapping[str, Any] = found["settings"]
    decoding = "greedy"
    if settings["temperature"] > 0:
        decoding = (
            f"sampled at temperature {settings['temperature']:g}, top_p {settings['top_p']:g}, {settings['samples']} "
            f"completions for each of the seeds {', '.join(map(str, settings['seeds']))}"
        )
    head = (
        f"Means over {found['examples']} examples of the {found['split']} split, {decoding}, at most "
        f"{settings['max_tokens']} tokens. Intervals are of the mean paired difference over examples (95 %, "
        f"{_kind(found)}): they say nothing of other seeds.\n\n"
        "| measure | before | after | change | 95 % interval |\n|---|---:|---:|---:|---:|"
    )
    head = _alarm(found) + head
    rows = [_row(found, name) for name in found["before"] if name in found["after"]]
    rows += placebo_lines(found, placebo)
    return "\n".join([head, *rows, *([] if found.get("sealed", True) else ["", NOT_SEALED])])


def placebo_lines(found: Mapping[str, Any], kept: PlaceboResults | None = None) -> list[str]:
    """How much of the gain is drift, by the run's own placebos or by `kept`, whichever are more. Raises DataError."""
    own = parse(found["placebo"], "results/evaluation.json") if "placebo" in found else None
    known = largest(own, kept)
    if known is None:
        return []
    whole = [] if known.fitness is None else [f"{plain(known.fitness.line())}."]
    reward = f"Reward: {sentence(known.reward)}; {beyond_drift(known.reward, advise=False)}."
    return ["", " ".join(["**Signal beside drift.**", *whole, reward])]


def _kind(found: Mapping[str, Any]) -> str:
    """Of its intervals; results of before they said so have those of the bootstrap."""
    if "intervals" not in found:
        return "BCa bootstrap"
    trained = aim_of(found["after"])
    whole = "" if trained == "reward" else f"; of {plain(trained)}, which all answers have together, of resamples"
    return f"t, or Bonett and Price where a measure is 0 or 1{whole}"


def _alarm(found: Mapping[str, Any]) -> str:
    """What the completions say of the run, whatever they earn; empty where nothing alarmed."""
    alarms: Mapping[str, Any] = found.get("alarms") or {}
    if not alarms.get("verdict"):
        return ""
    reasons = "\n".join(f"- {plain(str(line))}" for line in alarms.get("reasons") or ())
    return f"**{plain(str(alarms['verdict'])).capitalize()}**, by what the completions say:\n\n{reasons}\n\n"


def _row(found: Mapping[str, Any], name: str) -> str:
    before, after = found["before"][name], found["after"][name]
    interval = found.get("change_mean_low_high", {}).get(name)
    bounds = f"{interval[1]:+.4g} to {interval[2]:+.4g}" if interval and interval[1] < interval[2] else ""
    return f"| {plain(name)} | {before:.4g} | {after:.4g} | {after - before:+.4g} | {bounds} |"
