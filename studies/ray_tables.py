# SPDX-License-Identifier: Apache-2.0
"""Tables and figure of docs/results/scale.md, from the rows of the ray_* scripts; used by result_pages.py."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray_straggler
from evoalign.report.figures import canvas, frame, save, series

RESULTS = Path(__file__).parent / "results"
MEASURED = [RESULTS.parents[1] / "benchmarks" / "results" / f"ray_{card}.jsonl" for card in ("h100", "h200")]
CASES = {
    "weak": "`lowrank`, 128 members per replica", "strong": "`lowrank`, 128 members in all",
    "dense": "`full`, 32 members in all",
}  # fmt: skip
Row = Mapping[str, Any]
Lines = Iterator[str]


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> Lines:
    """Yield a Markdown table whose columns after the first are numbers."""
    yield f"| {' | '.join(head)} |"
    yield f"| --- |{' ---: |' * (len(head) - 1)}"
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"


def of_gpus(rows: Sequence[Row], simulated: Row) -> Lines:
    """Measured generations, the share of what as many engines without Ray do, and what was predicted from these."""
    had = [r for r in rows if "took" in r]
    each: dict[tuple[object, str], list[float]] = {}
    for row in had:
        if not row["replicas"]:
            each.setdefault((_where(row), row["case"]), []).append(_speed(row))
    alone = {key: statistics.mean(speeds) for key, speeds in each.items()}
    alone |= {(where, "strong"): speed for (where, case), speed in alone.items() if case == "weak"}
    said = {
        (_where(p), p["point"]): p["simulated"]
        for p in simulated["points"]
        if "session" in p and (p["source"], p["what"]) == ("from no Ray", "seconds")
    }
    lines: list[tuple[object, ...]] = []
    for case, called in CASES.items():
        ran = (r for r in had if r["case"] == case and r["replicas"])
        for row in sorted(ran, key=lambda r: (r["replicas"], _where(r))):
            base, (session, engine, shape) = alone[_where(row), case] * row["replicas"], _where(row)
            speeds = [t["tokens"] / t["seconds"] for t in row["took"]]
            spread = f"{_speed(row):,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})"
            seconds = (f"{_middle(row, name):.2f}" for name in ("rollout", "seconds"))
            name = f"{case}, {row['replicas']} replica{'s' * (row['replicas'] > 1)}"
            expected = f"{said[_where(row), name]:.2f}" if (_where(row), name) in said else "-"
            lines.append((called, f"{engine}, {shape.upper()}", row["replicas"], session, spread,
                          f"{_speed(row) / base:.1%}", *seconds, expected))  # fmt: skip
    head = ("case", "engine, shape", "replicas", "session", "tokens/s, median (all)", "of as many engines without Ray",
            "rollout, s", "generation, s", "simulated, s")  # fmt: skip
    yield from table(head, lines)


def _where(row: Row) -> tuple[int, str, str]:
    """Return the session, the engine of a replica, and the shape of the model."""
    return row["session"], row.get("replica", "vllm"), row["shape"]


def _speed(row: Row) -> float:
    return statistics.median(t["tokens"] / t["seconds"] for t in row["took"])


def _middle(row: Row, name: str) -> float:
    return statistics.median(t[name] for t in row["took"])


def of_ahead(found: Row) -> Lines:
    """Yield weak generations on 1 to 8 GPUs as simulated, with those that were measured."""
    lines = [
        (f"{p['replica']}, {p['shape'].upper()}", p["replicas"], p["session"],
         *(f"{p[name]:.2f}" for name in ("rollout", "update", "total")), f"{p['share']:.1%}",
         *("-" if p[name] is None else form.format(p[name])
           for name, form in (("measured", "{:.2f}"), ("measured_share", "{:.1%}"))))
        for p in found["ahead"]
    ]  # fmt: skip
    head = ("engine, shape", "replicas", "session", "simulated: rollout, s", "update, s", "generation, s",
            "of as many engines without Ray", "measured: generation, s", "of as many engines without Ray")  # fmt: skip
    yield from table(head, lines)


def of_stragglers(simulated: Row, measured: Sequence[Row]) -> Lines:
    """Yield rollouts with a slow replica over the least time, simulated and measured, with and without declining."""
    virtual = {row["chunk"]: row for row in simulated["rules"]}
    actors = {(found["undeclined"], row["chunk"]): row for found in measured for row in found["rows"]}
    lines: list[tuple[object, ...]] = []
    for (undeclined, chunk), row in actors.items():
        prefix, seconds = "undeclined_" if undeclined else "", ray_straggler.against(row, True)
        lines.append((
            "does not decline" if undeclined else "declines", chunk,
            *(f"{virtual[chunk][prefix + name]:.3f}" for name in ("median", "worst")),
            *(f"{of(seconds):.3f}" for of in (statistics.median, max)), row["copies"],
        ))  # fmt: skip
    head = ("a slow replica", "members per chunk", "simulated: median over the least", "worst",
            "measured: median over the least", "worst", "chunks assigned twice")  # fmt: skip
    yield from table(head, lines)


def of_bytes(found: Row) -> Lines:
    """Yield the bytes between two hosts."""
    lines: list[tuple[object, ...]] = []
    for space, row in found["summary"].items():
        wire, sizes = row["lines"]["wire"], row["bytes"]
        lines.append((
            f"`{space}`", f"{wire['a_member']:,.0f}", f"{wire['a_generation']:,.0f}",
            f"{sizes['float32 weights that evolve']:,}",
            f"{sizes['a replica joins']:,}" if "a replica joins" in sizes else "-",
        ))  # fmt: skip
    head = (
        "space, tiny model", "bytes per member", "further bytes per generation", "bytes of the weights that evolve",
        "bytes if a replica joins",
    )  # fmt: skip
    yield from table(head, lines)


def of_points(found: Row) -> Lines:
    """Yield the range of the simulation's errors for each kind of measured point."""
    kinds: dict[tuple[str, str], list[float]] = {}
    for point in found["points"]:
        case = point["point"].split(", ")[0]
        kind = CASES[case] if "session" in point else "four replicas, one slow"
        kinds.setdefault((kind, point["what"]), []).append(100 * point["error"])
    lines = [
        (kind, "generation" if what == "seconds" else what, len(off), f"{min(off):+.1f} % to {max(off):+.1f} %")
        for (kind, what), off in kinds.items()
    ]
    yield from table(("case", "predicted", "points", "error of the simulation"), lines)


def of_curves(found: Row) -> Lines:
    """Yield efficiency against replicas, for a growing and a fixed population."""
    points, cases = found["curves"], ("weak", "long", "strong")
    curves = {case: {p["replicas"]: p for p in points if p["case"] == case} for case in cases}
    lines = [
        (f"{replicas:,}", *(f"{curve[replicas]['efficiency']:.1%}" for curve in curves.values()),
         *(f"{weak[name]:,.1f}" for name in ("seconds", "rollout", "busy", "update")))
        for replicas, weak in curves["weak"].items()
        if replicas in (1, 2, 4, 8, 32, 128, 1024, 4096)
    ]  # fmt: skip
    head = ("replicas", "efficiency, 128 members per replica", "the same, 8 times the tokens",
            "efficiency, 4,096 members in all", "128 members per replica: generation, s", "rollout, s",
            "of it driver, s", "update, s")  # fmt: skip
    yield from table(head, lines)


def of_slow(found: Row) -> Lines:
    """One slow replica of sixteen, by chunks for each."""
    lines = [
        (p["slow"], p["chunk"], p["chunks_a_replica"], f"{p['rollout']:.2f}", f"{p['worst']:.2f}", p["copies"])
        for p in found["slow"]
    ]
    head = ("slow replicas", "members per chunk", "chunks per replica", "rollout, s", "worst of ten",
            "chunks assigned twice")  # fmt: skip
    yield from table(head, lines)


def of_failing(found: Row) -> Lines:
    """Replicas that fail."""
    lines = [
        (p["replicas"], "never" if p["hours"] is None else f"{p['hours']:g} h", p["failures"], f"{p['seconds']:.2f}")
        for p in found["failing"]
    ]
    yield from table(("replicas", "mean time between failures", "failures in 100 generations", "generation, s"), lines)


def tables() -> dict[str, Lines]:
    """Return the tables of the page by name."""
    rows = [json.loads(line) for path in MEASURED for line in path.read_text(encoding="utf-8").splitlines()]
    found = _read("ray_simulation")
    stragglers = [f for f in (_read("ray_straggler"), _read("ray_undeclined")) if f]
    sent = _read("ray_bytes")
    return {
        "gpus": of_gpus(rows, found),
        "ahead": of_ahead(found),
        "stragglers": of_stragglers(found, stragglers),
        "bytes": of_bytes(sent),
        "points": of_points(found),
        "curves": of_curves(found),
        "slow": of_slow(found),
        "failing": of_failing(found),
    }


def _read(name: str) -> Any:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def draw(to: Path) -> None:
    """Efficiency against replicas, and where the seconds of a generation go; simulated."""
    found, figure = _read("ray_simulation"), canvas(9, 4, layout="constrained")
    left, right = figure.subplots(1, 2)
    names = {
        "weak": "weak, 128 members per replica",
        "long": "weak, 8 x as long texts",
        "strong": "strong, 4,096 members",
    }
    for i, (case, called) in enumerate(names.items()):
        curve = [p for p in found["curves"] if p["case"] == case]
        left.plot(
            [p["replicas"] for p in curve], [p["efficiency"] for p in curve], label=called, markersize=4, **series(i)
        )
    weak = [p for p in found["curves"] if p["case"] == "weak"]
    for i, name in enumerate(("rollout", "busy", "update", "score")):
        called = {"busy": "driver, within rollout"}.get(name, name)
        right.plot([p["replicas"] for p in weak], [p[name] for p in weak], label=called, markersize=4, **series(i))
    left.set_ylim(0, 1.05)
    right.set_yscale("log")
    for axes, title in ((left, "Efficiency, simulated"), (right, "Seconds of a weak generation, simulated")):
        axes.set_xscale("log", base=2)
        frame(axes, title, "replicas")
        axes.legend(frameon=False, fontsize=8)
    save(figure, to / "scale.png")
