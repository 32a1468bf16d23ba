# SPDX-License-Identifier: Apache-2.0
"""Writes the tables and figures of docs/results from the committed rows.

    python studies/result_pages.py             # all pages
    python studies/result_pages.py countdown   # one page

A table goes between the comments `<!-- table NAME -->` and `<!-- end NAME -->` of its page; the text around it is
written by hand. The rows are in benchmarks/results and studies/results.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import episodes
import landscape_claims
import methods_tables
import quantised_tables
import ray_tables
import real_tables
import safety_tables
import sweeps
from evoalign import statistics
from evoalign.report.figures import COLORS, canvas, frame, save

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "results"
FIGURES = PAGES / "figures"
BUDGETS = {"wall": "wall time", "completions": "completions", "tokens": "tokens", "flops": "FLOPs", None: "end of run"}
METHODS = {
    "lora": "ES lora", "lowrank": "ES lowrank", "full": "ES full", "grpo": "GRPO", "grpo_es": "GRPO on ES members",
}  # fmt: skip
MEASURES = {"countdown": "accuracy", "conciseness": "reward"}
Tree = Mapping[str, Any]
Tables = Mapping[str, Iterator[str]]


def es_vs_grpo(task: str) -> Tree:
    """Return the rows of benchmarks/es_vs_grpo.py."""
    return json.loads((ROOT / f"benchmarks/results/es_vs_grpo/{task}.json").read_text(encoding="utf-8"))


def budgets(tree: Tree, measure: str) -> Iterator[str]:
    """Yield the mean of each method at equal budgets, and the difference of GRPO from the best ES with its interval."""
    labels = list(METHODS.values())
    head = (f"{measure} at equal", "budget", *labels, "GRPO less the best ES (95 %)", "p, Holm")
    yield f"| {' | '.join(head)} |"
    yield f"|---|{'---:|' * (len(head) - 1)}"
    for match in tree["measures"][measure]["matches"]:
        means = {g["label"]: g["estimate"]["mean"] for g in match["groups"] if g["estimate"]}
        shown = [f"{means[label]:.3g}" if label in means else "-" for label in labels]
        best = max((label for label in labels[:3] if label in means), key=means.__getitem__)
        pair = next((p for p in match["pairs"] if {p["a"], p["b"]} == {"GRPO", best}), None)
        gap = ("-", "-")
        if pair:
            low, mean, high = (pair[k] for k in ("low", "difference", "high"))
            if pair["a"] != "GRPO":
                low, mean, high = -high, -mean, -low
            gap = (f"{mean:+.3g} ({low:+.3g} to {high:+.3g}), {best}", f"{pair['p_adjusted']:.2g}")
        limit = f"{match['limit']:.3g}" if match["limit"] else "none"
        yield f"| {BUDGETS[match['by']]} | {' | '.join((limit, *shown, *gap))} |"


def ends(tree: Tree, *measures: str) -> Iterator[str]:
    """Yield measures, distances and cost at the end of the runs, one column per method."""
    labels = list(METHODS.values())
    yield f"| at the end, mean of {len(tree['runs'][labels[0]])} seeds | {' | '.join(labels)} |"
    yield f"|---|{'---:|' * len(labels)}"
    rows: dict[str, Callable[[Tree], float]] = {
        **{measure: lambda run, m=measure: run["after"][m] for measure in measures},
        "hacked share": lambda run: run["shares_after"]["hacked"],
        "KL from the base, nats per token": lambda run: run["divergence"]["exact"],
        "distance from the base, relative": lambda run: run["distance"]["relative"],
        "steps": lambda run: run["steps"],
        "completions": lambda run: run["cost"]["completions"],
        "TFLOP": lambda run: (run["cost"]["forward_flops"] + (run["cost"]["backward_flops"] or 0)) / 1e12,
        "wall time, s": lambda run: run["cost"]["wall_seconds"],
        "peak memory, GiB": lambda run: run["cost"]["peak_memory_bytes"] / 2**30,
    }
    for name, of in rows.items():
        found = [statistics.mean([of(run) for run in tree["runs"][label]]) for label in labels]
        shown = [
            f"{f.mean:.3g} ({f.low:.3g} to {f.high:.3g})" if name in measures and f.low is not None
            else (f"{f.mean:,.0f}" if f.mean >= 100 else f"{f.mean:.3g}")
            for f in found
        ]  # fmt: skip
        yield f"| {name} | {' | '.join(shown)} |"


def search(tree: Tree) -> Iterator[str]:
    """Yield the search of each method."""
    yield "| method | trials | completions | seconds | chosen | reward on validation | highest reward of a trial |"
    yield "|---|---:|---:|---:|---|---:|---:|"
    for name, found in tree["chosen"]["methods"].items():
        budget, settings = found["budget"], ", ".join(f"`{k} {v:g}`" for k, v in found["settings"].items())
        trials = [t["rewards"] for t in tree["searches"][name] if len(t["rewards"]) == len(tree["chosen"]["seeds"])]
        highest = max(sum(rewards) / len(rewards) for rewards in trials)
        yield (
            f"| {METHODS[name]} | {budget['trials']} | {budget['completions']:,} | {budget['wall_seconds']:,.0f} | "
            f"{settings} | {found['validation']['mean']['reward']:.3g} | {highest:.3g} |"
        )


def draw(tree: Tree, task: str) -> None:
    """Draw the test measure of every seed against wall time and completions."""
    figure = canvas(9, 4, layout="constrained")
    for axes, column, name in zip(figure.subplots(1, 2, sharey=True), (1, 2), ("seconds", "completions"), strict=True):
        for color, (label, runs) in zip(COLORS, tree["runs"].items(), strict=False):
            for i, run in enumerate(runs):
                places, rewards = zip(*((row[column], row[5]) for row in run["curve"]), strict=True)
                axes.plot(places, rewards, color=color, linewidth=0.7, alpha=0.6, label=None if i else label)
        frame(axes, f"Test reward, {task.capitalize()}", name)
    figure.axes[0].legend(frameon=False, fontsize=8)
    save(figure, FIGURES / f"{task}.png")


def of_task(task: str) -> Tables:
    """Return the tables of a page of es_vs_grpo."""
    tree = es_vs_grpo(task)
    measure = MEASURES[task]
    shown = ("reward", "exact", "empty_share") if task == "conciseness" else ("reward", "accuracy")
    return {measure: budgets(tree, measure), "ends": ends(tree, *shown), "search": search(tree)}


TABLES: Mapping[str, Callable[[], Tables]] = {
    "countdown": lambda: of_task("countdown"),
    "conciseness": lambda: of_task("conciseness"),
    "sweeps": sweeps.tables,
    "landscape": landscape_claims.tables,
    "safety": safety_tables.tables,
    "scale": ray_tables.tables,
    "episodes": episodes.tables,
    "methods": methods_tables.tables,
    "quantised": quantised_tables.tables,
    **({"real": real_tables.tables} if real_tables.ROWS.is_dir() else {}),
}
DRAWINGS: Mapping[str, Callable[[Path], None]] = {
    "countdown": lambda to: draw(es_vs_grpo("countdown"), "countdown"),
    "conciseness": lambda to: draw(es_vs_grpo("conciseness"), "conciseness"),
    "sweeps": sweeps.draw,
    "landscape": landscape_claims.draw,
    "safety": safety_tables.draw,
    "scale": ray_tables.draw,
    "episodes": lambda to: None,
    "methods": lambda to: None,
    "quantised": lambda to: None,
    "real": real_tables.draw,
}


def filled(name: str) -> str:
    """Return a page with its tables replaced by those of the rows."""
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    for table, lines in TABLES[name]().items():
        place = re.compile(rf"(<!-- table {table} -->\n).*?(<!-- end {table} -->)", re.DOTALL)
        body = "".join(f"{line}\n" for line in lines)
        page, count = place.subn(lambda found, body=body: f"{found[1]}\n{body}\n{found[2]}", page)
        assert count == 1, f"{name}.md has {count} places for the table {table}"
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = (*TABLES, [])  # argparse checks the default as well
    parser.add_argument("pages", nargs="*", choices=names, metavar="PAGE", help=", ".join(TABLES))
    for name in parser.parse_args().pages or TABLES:
        (PAGES / f"{name}.md").write_text(filled(name), encoding="utf-8")
        DRAWINGS[name](FIGURES)


if __name__ == "__main__":
    main()
