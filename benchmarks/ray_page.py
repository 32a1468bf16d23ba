# SPDX-License-Identifier: Apache-2.0
"""The tables, sentences with figures, and the figure of docs/results/scale.md, from rows alone.

    python benchmarks/ray_page.py

Rows are those of ray_scaling.py (results/ray_h100.jsonl), ray_straggler.py, ray_bytes.py and ray_simulation.py; what is
not there is left out. What the page says in words, without figures, is written by hand.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray_straggler
from evoalign.report.figures import canvas, frame, save, series

RESULTS = Path(__file__).parent / "results"
PAGE = RESULTS.parents[1] / "docs" / "results" / "scale.md"
FIGURE = PAGE.parent / "figures" / "scale.png"
CASES = {
    "weak": "`lowrank`, 128 members a replica", "strong": "`lowrank`, 128 members in all",
    "dense": "`full`, 32 members in all",
}  # fmt: skip
Row = Mapping[str, Any]
Lines = Iterator[str]


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> Lines:
    """Of Markdown; all but the first column are numbers."""
    yield f"| {' | '.join(head)} |"
    yield f"| --- |{' ---: |' * (len(head) - 1)}"
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"


def of_gpus(rows: Sequence[Row]) -> Lines:
    """Measured generations, and the share of what as many engines without Ray do."""
    had = [r for r in rows if "took" in r]
    each: dict[tuple[object, str], list[float]] = {}
    for row in had:
        if not row["replicas"]:
            each.setdefault((row.get("session"), row["case"]), []).append(_speed(row))
    alone = {key: statistics.mean(speeds) for key, speeds in each.items()}
    alone |= {(session, "strong"): speed for (session, case), speed in alone.items() if case == "weak"}
    lines: list[tuple[object, ...]] = []
    for case, called in CASES.items():
        for row in sorted((r for r in had if r["case"] == case), key=lambda r: (r.get("session", 0), r["replicas"])):
            base, count = alone.get((row.get("session"), case), 0.0), row["replicas"] or 1
            speeds = [t["tokens"] / t["seconds"] for t in row["took"]]
            share = f"{_speed(row) / (base * count):.1%}" if base and row["replicas"] else "-"
            seconds = (f"{_middle(row, name):.3f}" for name in ("rollout", "score", "update", "seconds"))
            spread = f"{_speed(row):,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})"
            lines.append(
                (
                    called,
                    row.get("session", "-"),
                    row["replicas"] or "no Ray",
                    row["members"],
                    len(speeds),
                    spread,
                    share,
                    *seconds,
                )
            )
    head = ("case", "session", "replicas, a GPU each", "members", "generations", "tokens/s, median (all)",
            "of as many engines without Ray", "rollout s", "score s", "update s", "generation s")  # fmt: skip
    yield from table(head, lines)


def _speed(row: Row) -> float:
    return statistics.median(t["tokens"] / t["seconds"] for t in row["took"])


def _middle(row: Row, name: str) -> float:
    return statistics.median(t[name] for t in row["took"])


def of_stragglers(measured: Sequence[Row]) -> Lines:
    """Measured generations with a slow replica; with and without the rule by which it declines."""
    lines: list[tuple[object, ...]] = []
    for found in measured:
        rule = "does not decline" if found["undeclined"] else "declines"
        for row in found["rows"]:
            plain, counted = ray_straggler.against(row, False), ray_straggler.against(row, True)
            middle = (f"{of(part):.3f}" for part in (plain, counted) for of in (statistics.median, max))
            added = f"{1000 * statistics.median(row['added']):.1f}"
            lines.append((rule, row["chunk"], added, *middle, row["copies"], found["load"]))
    head = (
        "a slow replica", "members a chunk", "ms that the machine adds to a chunk", "median over the least", "worst",
        "median, machine counted", "worst, machine counted", "chunks dealt twice", "load of the machine",
    )  # fmt: skip
    yield from table(head, lines)


def of_rules(found: Row) -> Lines:
    """Generations with a slow replica in virtual time."""
    lines = [
        (row["chunk"], *(f"{row[name]:.3f}" for name in ("median", "worst", "undeclined_median", "undeclined_worst")))
        for row in found["rules"]
    ]
    yield from table(
        ("members a chunk", "median over the least, simulated", "worst", "median where it does not decline", "worst"),
        lines,
    )


def of_bytes(found: Row) -> Lines:
    """What passes between two hosts."""
    lines: list[tuple[object, ...]] = []
    for space, row in found["summary"].items():
        wire, sizes = row["lines"]["wire"], row["bytes"]
        lines.append((
            f"`{space}`", f"{wire['a_member']:,.0f}", f"{wire['a_generation']:,.0f}",
            f"{sizes['float32 weights that evolve']:,}",
            f"{sizes['a replica joins']:,}" if "a replica joins" in sizes else "-",
        ))  # fmt: skip
    head = (
        "space, tiny model", "bytes a member", "bytes a generation besides", "bytes of the weights that evolve",
        "bytes as a replica joins",
    )  # fmt: skip
    yield from table(head, lines)


def of_joining(rows: Sequence[Row]) -> Lines:
    """Replicas that were started again."""
    joins = [row for row in rows if row.get("case") == "join"]
    lines = [(row["updates"], f"{row['loading']:.1f}", f"{row['catching up']:.1f}") for row in joins]
    head = ("updates to replay", "loading s", "catching up s")
    yield from table(head, lines) if lines else iter(["Not measured yet."])


def of_points(found: Row) -> Lines:
    """Simulated against measured."""
    lines = [
        (f"{p['point']}, {'generation' if p['what'] == 'seconds' else p['what']}", p["source"], f"{p['simulated']:.3f}",
         f"{p['measured']:.3f} ({p['least']:.3f} to {p['most']:.3f})", f"{100 * p['error']:+.1f} %")
        for p in found["points"]
    ]  # fmt: skip
    yield from table(("point", "predicted", "simulated s", "measured s, median (all)", "error"), lines)


def of_curve(found: Row, case: str) -> Lines:
    """Efficiency against replicas."""
    lines = [
        (f"{p['replicas']:,}", f"{p['members']:,}", p["chunk"], f"{p['efficiency']:.1%}", f"{p['seconds']:,.1f}",
         f"{p['rollout']:,.1f}", f"{p['busy']:,.1f}", f"{p['score']:,.2f}", f"{p['update']:,.2f}",
         f"{p['copies']:,.0f}", p["limit"])
        for p in found["curves"] if p["case"] == case
    ]  # fmt: skip
    yield from table(
        ("replicas", "members", "members a chunk", "efficiency, simulated", "generation s", "rollout s",
         "of it the driver is busy s", "score s", "update s", "chunks dealt twice", "limit"), lines,
    )  # fmt: skip


def of_slow(found: Row) -> Lines:
    """One slow replica of sixteen, by chunks for each."""
    lines = [
        (p["slow"], p["chunk"], p["chunks_a_replica"], f"{p['rollout']:.2f}", f"{p['worst']:.2f}", p["copies"])
        for p in found["slow"]
    ]
    head = ("replicas that are slow", "members a chunk", "chunks a replica", "rollout s, simulated", "worst of ten",
            "chunks dealt twice")  # fmt: skip
    yield from table(head, lines)


def of_failing(found: Row) -> Lines:
    """Replicas that fail."""
    lines = [
        (p["replicas"], "never" if p["hours"] is None else f"{p['hours']:g} h", p["failures"], f"{p['seconds']:.2f}")
        for p in found["failing"]
    ]
    yield from table(("replicas", "one fails every", "failures in 100 generations", "generation s, simulated"), lines)


def limits(found: Row) -> Lines:
    """What the driver, the update and the grading allow, from their parameters."""
    driver, given = found["driver"], found["parameters"]
    weak = [p for p in found["curves"] if p["case"] == "weak"]
    usual = dict(given["chunk"])[128]
    rows = 128 * given["prompts"]
    most = 1 / driver["completion"]
    long = [p for p in found["curves"] if p["case"] == "long"]
    above = [p["replicas"] for p in weak if p["efficiency"] >= 0.9]
    half, half_long = ([p["replicas"] for p in which if p["efficiency"] >= 0.5] for which in (weak, long))
    update = (usual - given["update"]) / given["update_member"]
    twice = [p for p in weak if p["copies"]]
    yield (
        f"- **Weak scaling, simulated:** efficiency is 90 % or more up to {max(above)} replicas, and half or more up "
        f"to {max(half)}; with completions that are eight times as long half or more up to {max(half_long)}."
    )
    yield (
        f"- **The update** is made by every replica for all members, {1000 * given['update_member']:.2f} ms a member: "
        f"with {update:,.0f} members it takes as long as {rows:,} completions on a replica, however many there are."
    )
    yield (
        f"- **The driver** parses and checks a completion of 128 tokens in {1e6 * driver['completion']:.0f} us on the "
        f"machine where that was measured: {most:,.0f} a second at the most. A replica makes {rows / usual:,.0f} a "
        f"second, so {most * usual / rows:,.0f} replicas keep one driver wholly busy."
    )
    if twice:
        yield (
            f"- From {twice[0]['replicas']:,} replicas on, of those in the table, answers wait so long to be parsed "
            "that replicas look slow that are not, and chunks are dealt twice for nothing: of "
            f"{twice[-1]['replicas']:,} chunks {twice[-1]['copies']:,.0f} in a generation."
        )
    yield (f"- **Scoring** in the driver takes {1e6 * given['score']:.1f} us a completion in Conciseness.")


def parts() -> dict[str, Callable[[], Lines]]:
    """What there are rows for, by the name of its place in the page."""
    rows = [json.loads(line) for line in (RESULTS / "ray_h100.jsonl").read_text(encoding="utf-8").splitlines()]
    found = _read("ray_simulation")
    stragglers = [f for f in (_read("ray_straggler"), _read("ray_undeclined")) if f]
    sent = _read("ray_bytes")
    return {
        "limits": lambda: limits(found),
        "gpus": lambda: of_gpus(rows),
        "rules": lambda: of_rules(found),
        "stragglers": lambda: of_stragglers(stragglers),
        "bytes": lambda: of_bytes(sent) if sent else iter(["Not measured yet."]),
        "joining": lambda: of_joining(rows),
        "points": lambda: of_points(found),
        "weak": lambda: of_curve(found, "weak"),
        "long": lambda: of_curve(found, "long"),
        "strong": lambda: of_curve(found, "strong"),
        "slow": lambda: of_slow(found),
        "failing": lambda: of_failing(found),
    }


def _read(name: str) -> Any:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def written(page: str) -> str:
    """The page with its tables made anew."""
    for name, lines in parts().items():
        start, end = f"<!-- table of {name} -->\n", f"<!-- end of {name} -->"
        before, there, rest = page.partition(start)
        assert there and end in rest, f"the page has no place for {name}"
        listed = "".join(f"{line}\n" for line in lines())
        page = f"{before}{start}\n{listed}\n{end}{rest.partition(end)[2]}"
    return page


def draw(to: Path) -> None:
    """Efficiency against replicas, and where the seconds of a generation go; simulated."""
    found, figure = _read("ray_simulation"), canvas(9, 4, layout="constrained")
    left, right = figure.subplots(1, 2)
    names = {
        "weak": "weak, 128 members a replica",
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
    save(figure, to)


def main() -> None:
    """Write the page's tables and draw its figure."""
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    draw(FIGURE)


if __name__ == "__main__":
    main()
