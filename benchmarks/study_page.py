# SPDX-License-Identifier: Apache-2.0
"""docs/results/TASK.md of es_vs_grpo, a summary, and the tables beside it in docs/results/data.

`collect` reads the runs and draws; `page` and `tables` write from what was collected alone. Every sentence that names a
winner follows from the numbers by a rule, so that none can contradict them.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evoalign.report.tables import bullets, listed
from evoalign.report.tables import markdown_table as table
from study_runs import read_results, rounded

LABELS = {
    "lora": "ES lora",
    "lowrank": "ES lowrank",
    "full": "ES full",
    "grpo": "GRPO",
    "grpo_es": "GRPO on ES members",
}
WHAT = {
    "lora": "noise on B of a LoRA adapter of rank 4 on every linear matrix",
    "lowrank": "rank-1 noise on every linear matrix itself (EGGROLL)",
    "full": "dense noise on all weights; one member at a time, so a population of 32",
    "grpo": "TRL's trainer, all weights, 64 sampled completions a step",
    "grpo_es": "TRL's trainer; the group of a prompt are the greedy completions of ES members: sample, then optimise",
}
SECOND = {"countdown": "accuracy", "conciseness": "exact"}
ABOUT = {
    "countdown": "Countdown: reach a number with each of three or four numbers once. Training on the first 1,700 of "
    "the shipped problems, test on the last 500. Reward: 1 for a right answer and 0.1 for the form.",
    "conciseness": "Conciseness: the reward is minus the difference in length, in characters, to the target answer. "
    "Training on two questions, test on eight others, so that one test question is 12.5 % of the exact matches.",
}
MATCHED = {
    "wall": "wall time",
    "completions": "completions",
    "tokens": "tokens",
    "flops": "FLOPs",
    None: "the end of each run (nothing matched)",
}
LEVEL = 0.05
SAMPLES = 4


def collect(folder: Path, task: str, figures: Path) -> dict[str, Any]:
    """All that the page says, small enough to commit; draws its figures. Raises EvoalignError."""
    from evoalign.analysis.compare import figures as comparison_figures
    from evoalign.analysis.compare import pages as report
    from evoalign.analysis.compare.comparison import compare
    from evoalign.analysis.compare.tables import end_grid

    methods = [name for name in LABELS if any((folder / "final" / name).glob("*/seed_*/results/evaluation.json"))]
    paths = [path.parents[1] for name in methods
             for path in (folder / "final" / name).glob("*/seed_*/results/evaluation.json")]  # fmt: skip
    labels = {LABELS[name]: f"*/final/{name}/*" for name in methods}
    tree: dict[str, Any] = {"format_version": 1, "task": task, "methods": methods, "measures": {}, "figures": {}}
    figures.mkdir(parents=True, exist_ok=True)
    for measure in ("reward", SECOND[task]):
        found = compare(paths, measure=measure, names=labels)
        whole = report.as_tree(found)
        tree["measures"][measure] = {
            "matches": [_match(match, folder) for match in [*whole["matches"], whole["end"]]],
            "end": asdict(end_grid(found)),
        }
        tree["notes"] = [_without(folder, note) for note in whole["notes"]]
        with tempfile.TemporaryDirectory() as place:
            for name, path in comparison_figures.draw(found, Path(place)).items():
                if name == "divergence" and measure != "reward":
                    continue
                tree["figures"][f"{measure}_{name}"] = f"{task}_{path.name}"
                shutil.copyfile(path, figures / f"{task}_{path.name}")
        if measure == "reward":
            tree["runs"] = {group["label"]: [_run(run) for run in group["runs"]] for group in whole["groups"]}
    tree |= _searches(folder, task, figures)
    tree["samples"] = _samples(folder, methods)
    tree["made_with"] = _made_with(paths)
    return rounded(tree)


KL_DRAWS = {"countdown": 32, "conciseness": 8}
"""Completions that the divergence of each collected run is over: `checks.kl_prompts`, or all eight test questions."""


def renewed(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The same runs by the present statistics: means, intervals and tests from the numbers of each seed.

    Rows have no answers to single questions, so that intervals over these, too, stay as they were collected.
    """
    measures = {
        measure: {
            "matches": [_renewed_match(match, measure) for match in found["matches"]],
            "end": _renewed_end(tree, found["end"]),
        }
        for measure, found in tree["measures"].items()
    }
    return rounded({**tree, "measures": measures})


def _renewed_match(match: Mapping[str, Any], measure: str) -> dict[str, Any]:
    from evoalign.analysis.compare.statistics import adjust, compare
    from evoalign.statistics import interquartile_mean, mean

    values = {group["label"]: {run["seed"]: run["measures"][measure] for run in group["runs"]}
              for group in match["groups"] if group["runs"]}  # fmt: skip
    groups = [
        {
            **group,
            "estimate": asdict(mean(list(values[group["label"]].values()))) if group["runs"] else None,
            "interquartile_mean": asdict(interquartile_mean(list(values[group["label"]].values())))
            if group["runs"]
            else None,
        }
        for group in match["groups"]
    ]
    labels = list(values)
    found = adjust([compare(a, values[a], b, values[b]) for i, a in enumerate(labels) for b in labels[i + 1 :]])
    before = {(pair["a"], pair["b"]): pair.get("over_questions") for pair in match["pairs"]}
    pairs = [{**asdict(pair), "over_questions": before.get((pair.a, pair.b))} for pair in found]
    return {**match, "groups": groups, "pairs": pairs}


def _renewed_end(tree: Mapping[str, Any], end: Mapping[str, Any]) -> dict[str, Any]:
    from evoalign.statistics import mean

    runs = [[run for run in tree["runs"][label] if run["finished"]] for label in end["header"][1:]]
    rows: list[Sequence[str]] = []
    for name, *cells in end["rows"]:
        measure, interval, _ = name.partition(" [95 %]")
        if name == A_COMPLETION:
            continue
        if interval:
            cells = [_cell(mean([run["after"][measure] for run in of])) for of in runs]
        rows.append([name, *cells])
        if name == A_TOKEN:
            rows.append([A_COMPLETION, *(_nats(of, KL_DRAWS[tree["task"]]) for of in runs)])
    return {**end, "rows": rows}


A_TOKEN = "KL from the base model, exact (nats per token)"
A_COMPLETION = "KL from the base model, exact (nats per completion)"


def _nats(runs: Sequence[Mapping[str, Any]], draws: int) -> str:
    """Of rows that do not say it: nats a token times the tokens of a completion."""
    known = [run["divergence"] for run in runs if run["divergence"]]
    nats = [d["completion"] if d.get("completion") is not None else d["exact"] * d["tokens"] / draws for d in known]
    return f"{sum(nats) / len(nats):.4g}" if nats else "-"


def _cell(found: Any) -> str:
    return f"{found.mean:.4g}" + ("" if found.low is None else f" [{found.low:.4g}, {found.high:.4g}]")


def _without(folder: Path, note: str) -> str:
    """Without where the runs lay."""
    return note.replace(f"{folder}/", "")


def _match(match: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    groups = [
        {
            "label": group["label"],
            "estimate": group["estimate"],
            "runs": [{key: run[key] for key in ("seed", "step", "share", "measures")} for run in group["runs"]],
        }
        for group in match["groups"]
    ]
    return {**match, "groups": groups, "notes": [_without(folder, note) for note in match["notes"]]}


def _run(run: Mapping[str, Any]) -> dict[str, Any]:
    """Of each run its end, and its curve as rows of step, seconds, completions, tokens, FLOPs, reward and KL."""
    first, last = run["points"][0], run["points"][-1]
    curve = []
    for point in run["points"]:
        cost = point["cost"] or {}
        flops = (cost.get("forward_flops") or 0.0) + (cost.get("backward_flops") or 0.0)
        tokens = cost.get("prompt_tokens", 0) + cost.get("generated_tokens", 0)
        kl = (point["divergence"] or {}).get("exact")
        curve.append([point["step"], cost.get("wall_seconds"), cost.get("completions"), tokens, flops,
                      point["measures"]["reward"], kl])  # fmt: skip
    return {
        "seed": run["seed"],
        "steps": run["steps"],
        "finished": run["finished"],
        "hardware": run["hardware"],
        "cost": run["cost"],
        "before": first["measures"],
        "after": last["measures"],
        "divergence": last["divergence"],
        "distance": run["distance"],
        "shares_before": run["shares_before"],
        "shares_after": run["shares_after"],
        "curve": curve,
    }


def _searches(folder: Path, task: str, figures: Path) -> dict[str, Any]:
    """The search of each method, and the heat maps of it."""
    searches: dict[str, Any] = {}
    maps: dict[str, str] = {}
    for name in LABELS:
        if not read_results(folder / "tune" / name):
            continue
        searches[name] = [
            {
                "settings": cell["settings"],
                "rewards": [run["numbers"]["reward"] for run in cell["runs"] if "numbers" in run],
                "hacked": cell["mean"].get("hacked_share"),
            }
            for stage in ("tune", "refine")
            for cell in (read_results(folder / stage / name) or {"cells": []})["cells"]
        ]
        drawn = folder / "tune" / name / "figures" / "heat_map.png"
        if drawn.is_file():
            shutil.copyfile(drawn, figures / f"{task}_search_{name}.png")
            maps[name] = f"{task}_search_{name}.png"
    file = folder / "chosen.json"
    return {"searches": searches, "heat_maps": maps, "chosen": json.loads(file.read_text()) if file.is_file() else None}


def _samples(folder: Path, methods: Sequence[str]) -> list[dict[str, Any]]:
    """The first few test examples, as seed 0, or the lowest there is, of each method answers them."""
    from evoalign.rundir import parquet

    samples: dict[int, dict[str, Any]] = {}
    for name in methods:
        runs = sorted((folder / "final" / name).glob("*/seed_*"), key=lambda path: int(path.name.split("_")[1]))
        for label, which in (("before", "before"), (LABELS[name], "after")):
            file = runs[0] / "results" / "completions" / f"{which}.parquet"
            rows = sorted(parquet.read(file), key=lambda row: row["example"])[:SAMPLES] if file.is_file() else []
            for row in rows:
                sample = samples.setdefault(row["example"], {"prompt": row["prompt"], "target": row["target"]})
                sample.setdefault("answers", {})[label] = {"text": row["text"], "reward": row["reward"]}
    return list(samples.values())


def _made_with(paths: Sequence[Path]) -> dict[str, Any]:
    manifest = json.loads((paths[0] / "manifest.json").read_text(encoding="utf-8"))
    return {key: manifest.get(key) for key in ("versions", "hardware", "git", "version") if manifest.get(key)}


# --- the page ---------------------------------------------------------------------------------------------------------


OLD = (
    "**These rows are old.** They have a mean for each run and not what each question earned, so that intervals and "
    "tests are over seeds alone and hold for these questions. Intervals of means are t intervals over seeds; those of "
    "shares may end below 0 or above 1. The KL is over one answer to each prompt. There is no placebo, so nothing here "
    "separates learning from drift. A matched budget is the least that all runs reached, so that the outcome set it."
)
"""Of runs made before results of single questions, placebos and plans."""


def page(tree: Mapping[str, Any]) -> str:
    """Markdown: what a reader reads; `tables` has the rest."""
    task, chosen = tree["task"], tree["chosen"]
    seeds = sorted({run["seed"] for runs in tree["runs"].values() for run in runs})
    header = ("method", "what it is", "settings searched", "steps of a run", "completions of a step")
    lines = [
        f"# ES and GRPO on {task.capitalize()}",
        "",
        f"{ABOUT[task]} The model is `tiny`, half a million weights, which comes with evoalign. Each run has one CPU "
        f"core. Settings were searched for each method with as many trials of about the same wall time on other "
        f"examples; then {len(seeds)} seeds were trained with those that did best, and evaluated on the test split "
        "along the way.",
        "",
        *table(header, [_method(tree, name) for name in tree["methods"]], words=3),
        *bullets(_lost(tree, seeds)),
        "## In short",
        "",
        OLD,
        "",
        *([PLAINLY[task], ""] if task in PLAINLY else []),
        *in_short(tree),
        "Bold is the highest mean, which is no claim by itself: the last column has those. It is shown only where "
        "every method has an evaluation within the budget. `start` is the base model. Learning rates are constant, so "
        "that each point of a curve is a run of that length. The sentences follow by rules from the numbers, which are "
        f"in three tables: [means with their intervals and the share of the budget used](data/{task}_means.csv), "
        f"[tests of every pair](data/{task}_tests.csv), and [every seed](data/{task}_seeds.csv).",
        "",
        "## At equal budgets",
        "",
        "Each seed thin, the mean bold, with its 95 % band over seeds.",
        "",
    ]
    for measure in ("reward", SECOND[task]):
        lines += [*_pictures(tree, measure), ""]
    lines += ["## At the end: divergence, distance, text and cost", "", *table(**_end(tree))]
    if "reward_divergence" in tree["figures"]:
        file = tree["figures"]["reward_divergence"]
        lines += [f"![Reward against the divergence from the base model](figures/{file})", ""]
    if chosen:
        lines += ["## The search", "", *_search(tree, chosen), *searched(_labelled(chosen))]
        maps = [f"![Search of {LABELS[m]}](figures/{file})" for m, file in tree["heat_maps"].items()]
        lines += [*maps, ""] if maps else []
    lines += ["## What they answer", "", *_answers(tree["samples"])]
    lines += ["## What this cannot tell", "", *bullets([*LIMITS[task], *_notes(tree)])]
    lines += ["## Made with", "", *_commands(tree)]
    return "\n".join(lines).rstrip() + "\n"


def _pictures(tree: Mapping[str, Any], measure: str) -> list[str]:
    """A measure against each budget that has a figure."""
    files = {MATCHED[by]: tree["figures"].get(f"{measure}_{by}") for by in MATCHED}
    return [f"![{measure} against {by}](figures/{file})" for by, file in files.items() if file]


def _end(tree: Mapping[str, Any]) -> dict[str, Any]:
    grid = tree["measures"]["reward"]["end"]
    return {"header": grid["header"], "rows": grid["rows"]}


def _notes(tree: Mapping[str, Any]) -> list[str]:
    """What the comparisons note, each once."""
    matches = [match for found in tree["measures"].values() for match in found["matches"]]
    there = [f"At {_where(match)}: {note}." for match in matches for note in match["notes"]]
    return list(dict.fromkeys([*tree["notes"], *there]))


def _where(match: Mapping[str, Any]) -> str:
    if not match["by"]:
        return MATCHED[None]
    return f"equal {MATCHED[match['by']]}"


def _method(tree: Mapping[str, Any], name: str) -> tuple[str, ...]:
    runs = tree["runs"][LABELS[name]]
    found = ((tree["chosen"] or {}).get("methods") or {}).get(name)
    settings = ", ".join(f"{key.split('.')[1]} {value:g}" for key, value in found["settings"].items()) if found else "-"
    completions = [run["cost"]["completions"] / run["steps"] for run in runs if run["cost"] and run["steps"]]
    each = f"{sum(completions) / len(completions):,.0f}" if completions else "-"
    return LABELS[name], WHAT[name], settings, f"{runs[0]['steps']:,}", each


def _lost(tree: Mapping[str, Any], seeds: Sequence[int]) -> list[str]:
    """Seeds that a method lacks: runs are seldom lost at random."""
    lines: list[str] = []
    for label, runs in tree["runs"].items():
        missing = sorted(set(seeds) - {run["seed"] for run in runs})
        if missing:
            lines.append(
                f"{label} lacks seed {listed([str(seed) for seed in missing])}, whose run was stopped before its end "
                f"and is left out: {len(runs)} seeds."
            )
    return lines


def in_short(tree: Mapping[str, Any]) -> list[str]:
    """For each measure a table of its means at each budget, and of which differences are significant there."""
    lines: list[str] = []
    for measure, found in tree["measures"].items():
        labels = [group["label"] for group in found["matches"][0]["groups"]]
        starts = [run["before"][measure] for runs in tree["runs"].values() for run in runs]
        start = f"{sum(starts) / len(starts):.3g}"
        rows = [(_budget(m), start, *_means(m, labels), told_apart(m["pairs"])) for m in found["matches"]]
        header = (f"{measure} at equal", "start", *labels, f"significant across seeds (p < {LEVEL:g}, Holm)")
        lines += table(header, rows)
    return [*lines, *bullets(_leaders(tree))]


def _budget(match: Mapping[str, Any]) -> str:
    if not match["limit"]:
        return MATCHED[match["by"]]
    return f"{MATCHED[match['by']]} ({match['limit']:.4g}{' s' if match['by'] == 'wall' else ''})"


def _means(match: Mapping[str, Any], labels: Sequence[str]) -> list[str]:
    """The highest in bold where every method has one."""
    means = {group["label"]: group["estimate"]["mean"] for group in match["groups"] if group["estimate"]}
    shown = [f"{means[label]:.3g}" if label in means else "-" for label in labels]
    if len(means) == len(labels):
        best = labels.index(max(means, key=lambda label: means[label]))
        shown[best] = f"**{shown[best]}**"
    return shown


def told_apart(pairs: Sequence[Mapping[str, Any]]) -> str:
    """`A > B, C; D > B`: of pairs whose first has the higher mean, those whose difference is significant."""
    above: dict[str, list[str]] = {}
    for pair in pairs:
        if pair["p_adjusted"] is not None and pair["p_adjusted"] < LEVEL:
            above.setdefault(pair["a"], []).append(pair["b"])
    return "; ".join(f"{label} > {', '.join(below)}" for label, below in above.items()) or "none"


def _leaders(tree: Mapping[str, Any]) -> list[str]:
    """Whether the highest mean reward depends on what is matched, and how GRPO and ES differ."""
    leaders: dict[str, list[str]] = {}
    lines: list[str] = []
    for match in tree["measures"]["reward"]["matches"]:
        missing = [group["label"] for group in match["groups"] if not group["estimate"]]
        if missing and match["by"]:
            lines.append(f"At equal {MATCHED[match['by']]} nothing is said of {listed(missing)}: no evaluation of it "
                         "lies within the budget.")  # fmt: skip
        elif match["by"]:
            best = max(match["groups"], key=lambda group: group["estimate"]["mean"])["label"]
            leaders.setdefault(best, []).append(MATCHED[match["by"]])
    if len(leaders) == 1:
        name, by = next(iter(leaders.items()))
        lines.insert(0, f"The highest mean reward is that of {name} at equal {listed(by)}.")
    elif leaders:
        said = "; ".join(f"{label} at equal {listed(by)}" for label, by in leaders.items())
        lines.insert(0, f"Which mean reward is highest depends on what is matched: {said}.")
    if tree.get("chosen"):
        lines += _better(tree["searches"], tree["chosen"])
    return [*lines, *_es_against_grpo(tree)]


def _es_against_grpo(tree: Mapping[str, Any]) -> list[str]:
    """The question of the field: plain GRPO beside each space of ES."""
    lines: list[str] = []
    for match in tree["measures"]["reward"]["matches"]:
        if not match["by"]:
            continue
        found: dict[str, list[str]] = {"above": [], "below": [], "no significant difference from": []}
        for pair in match["pairs"]:
            if "GRPO" not in (pair["a"], pair["b"]) or "GRPO on ES members" in (pair["a"], pair["b"]):
                continue
            sure = pair["p_adjusted"] is not None and pair["p_adjusted"] < LEVEL
            where = ("above" if pair["a"] == "GRPO" else "below") if sure else "no significant difference from"
            found[where].append(pair["b"] if pair["a"] == "GRPO" else pair["a"])
        said = "; ".join(f"{where} {listed(names)}" for where, names in found.items() if names)
        if said:
            lines.append(f"GRPO against ES at equal {MATCHED[match['by']]}: {said}.")
    return lines


def _search(tree: Mapping[str, Any], chosen: Mapping[str, Any]) -> list[str]:
    spent = {LABELS[name]: found["budget"] for name, found in chosen["methods"].items()}
    completions = [found["completions"] for found in spent.values()]
    trials = sorted({found["trials"] for found in spent.values()})
    ratio = max(completions) / max(1, min(completions))
    even = f"{trials[0]} trials" if len(trials) == 1 else f"{trials[0]} to {trials[-1]} trials"
    refined = chosen.get("refined")
    data = {"countdown": "500 further problems", "conciseness": "48 other questions of the same families"}[tree["task"]]
    return [
        f"Each method was searched with {even} of {len(chosen['seeds'])} seeds"
        + (": a grid of twelve, then two further learning rates around the best of them" if refined else "")
        + f", runs of about {chosen['seconds']:.0f} "
        f"seconds of training on one core, evaluated on {data}: none of them is in the training or the test split, and "
        "the seeds are others than those above. The cell with the best mean reward there was taken. The search is "
        "equal in trials and about equal in wall seconds; it is **not** equal in completions, of which the method "
        f"with the most had {ratio:.3g} times as many as the one with the least."
        + (" The second round had runs of as many steps, on another machine than the first." if refined else ""),
        "",
        *bullets([*_cut_off(tree["searches"], chosen), *_at_edge(tree["searches"], chosen)]),
    ]


def searched(chosen: Mapping[str, Any]) -> list[str]:
    """Markdown: what the search of each method took, and what it chose."""
    header = ("method", "trials", "runs", "completions", "tokens", "FLOPs", "seconds in all", "of a run", "chosen",
              "reward there")  # fmt: skip
    return table(header, [_searched(*pair) for pair in chosen["methods"].items()])


def _searched(method: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    spent = found["budget"]
    failed = f" ({spent['not_done']} failed)" if spent["not_done"] else ""
    settings = ", ".join(f"`{key} {value:g}`" for key, value in found["settings"].items())
    low, high = spent["run_seconds"]
    return (
        method, f"{spent['trials']}", f"{spent['runs']}{failed}", f"{spent['completions']:,}", f"{spent['tokens']:,}",
        f"{spent['flops']:.3g}", f"{spent['wall_seconds']:,.0f}", f"{low:.0f} to {high:.0f}", settings,
        f"{found['validation']['mean']['reward']:.4g}",
    )  # fmt: skip


def _better(searches: Mapping[str, Any], chosen: Mapping[str, Any]) -> list[str]:
    """Where a later round of the search found a better cell than the one that the final runs have."""
    lines: list[str] = []
    for name, found in chosen["methods"].items():
        cells = searches.get(name, ())
        means = [(sum(cell["rewards"]) / len(cell["rewards"]), cell["settings"]) for cell in cells
                 if len(cell["rewards"]) == len(chosen["seeds"])]  # fmt: skip
        mean, settings = max(means, key=lambda pair: pair[0], default=(None, None))
        if mean is not None and settings != found["settings"] and mean > found["validation"]["mean"]["reward"]:
            better = ", ".join(f"{key} {value:g}" for key, value in settings.items())
            lines.append(
                f"**{LABELS[name]} may do better than on this page**: {better} reached {mean:.3g} on the validation "
                "split in a second round of the search, which every method had and the final runs do not use; these "
                f"have the settings that reached {found['validation']['mean']['reward']:.3g} there."
            )
    return lines


def _cut_off(searches: Mapping[str, Any], chosen: Mapping[str, Any]) -> list[str]:
    """Cells that lack a run; they cannot be chosen."""
    return [
        f"{LABELS[name]}: {', '.join(f'{key} {value:g}' for key, value in cell['settings'].items())} has "
        f"{len(cell['rewards'])} of {len(chosen['seeds'])} runs, the others failed or were stopped: it could not "
        "be chosen."
        for name, cells in searches.items()
        for cell in cells
        if len(cell["rewards"]) < len(chosen["seeds"])
    ]


def _at_edge(searches: Mapping[str, Any], chosen: Mapping[str, Any]) -> list[str]:
    """Where the best cell lies at the end of what was tried, so that a better one may lie beyond."""
    lines: list[str] = []
    for name, found in chosen["methods"].items():
        for key, value in found["settings"].items():
            tried = sorted({cell["settings"][key] for cell in searches.get(name, ())})
            if len(tried) > 1 and value in (tried[0], tried[-1]):
                end = "lowest" if value == tried[0] else "highest"
                lines.append(
                    f"{LABELS[name]}: {key} {value:g} is the {end} that was tried; a better one may lie beyond."
                )
    return lines


def _labelled(chosen: Mapping[str, Any]) -> dict[str, Any]:
    return {**chosen, "methods": {LABELS[name]: found for name, found in chosen["methods"].items()}}


def _answers(samples: Sequence[Mapping[str, Any]]) -> list[str]:
    """One row an example, one column a method."""
    if not samples:
        return []
    who = list(samples[0]["answers"])
    rows = [(f"`{_inline(sample['prompt'])[-160:]}` (target: `{_inline(sample['target'] or '-')[-160:]}`)",
             *(_answer(sample["answers"][name]) for name in who)) for sample in samples]  # fmt: skip
    asked = "The first test examples, each answer with its reward; the lowest seed of each method."
    return [asked, "", *table(("prompt", *who), rows, words=1 + len(who))]


def _answer(answer: Mapping[str, Any]) -> str:
    text = f"`{_inline(answer['text'])}`" if answer["text"].strip() else "(empty)"
    return f"{text} {answer['reward']:.3g}"


def _inline(text: str) -> str:
    return " ".join(text.split()).replace("`", "'").replace("|", "\\|")


PLAINLY = {
    "conciseness": "**The reward counts characters and nothing else.** No method learnt to answer rightly and briefly: "
    "a high reward here is an answer of the right length, as the answers at the end of this page show, and most runs "
    "are far from the base model by then. What `hacked` counts is said in [the guide](../guides/compare.md).",
}
FAIRNESS = [
    "Settings were searched at equal wall time. At equal completions, tokens and FLOPs a method that takes many "
    "completions a step is cut off early in its run, at settings for a whole one: that favours small steps, GRPO here.",
    "Settings were chosen by shorter runs than the final ones, at constant rates: that favours rates that are fast at "
    "first, and may drift later.",
    "ES trains at the temperature that is evaluated, 0. GRPO samples at temperature 1 and is evaluated at 0; its "
    "temperature, the completions of a step and the clip were not searched, and neither was the population of ES.",
    "The grid of learning rates is wider for GRPO than for ES, of as many points.",
    "Tests are corrected within one table, not over all tables of this page.",
]
LIMITS = {
    "countdown": [
        "One tiny model, half a million weights, trained for this task's form: how methods rank on it says little "
        "about how they rank on a language model of billions, where noise, memory and batching differ.",
        "One core a run: a method whose work is more parallel gains more from a larger machine than it can show here.",
        "Wall time is that of this implementation. `full` serves one member at a time here, and pays for it.",
        "The grid is coarse: three by four. A better setting of any method may lie between its cells or beyond them.",
        *FAIRNESS,
    ],
    "conciseness": [
        "Eight test questions: one is 12.5 % of the exact matches, and a reward is carried by a few long answers.",
        "Two training questions can be learnt by heart within a few steps. What is measured is how that generalises.",
        "Adapters and low-rank noise are on every matrix of the model here; `configs/quickstart.yaml` has them on one.",
        "One tiny model, half a million weights, one core a run.",
        "The grids of ES are centred on the widths of noise that `evoalign probe` finds: a little more search for ES.",
        *FAIRNESS,
    ],
}


def _commands(tree: Mapping[str, Any]) -> list[str]:
    task, chosen = tree["task"], tree["chosen"] or {}
    seeds = ",".join(str(run["seed"]) for run in next(iter(tree["runs"].values())))
    seconds = f" --seconds {chosen['seconds']:g}" if chosen.get("seconds") else ""
    final = f" --seconds {chosen['final_seconds']:g}" if chosen.get("final_seconds") else ""
    words = {"tune": seconds, "refine": "", "final": f" --seeds {seeds}{final}"}
    jobs = chosen.get("jobs", {})
    lines = [
        "```sh",
        *(
            f"python benchmarks/es_vs_grpo.py {stage} --task {task} --to DIR --jobs {jobs[stage]}{more}"
            for stage, more in words.items()
            if stage in jobs
        ),
        f"python benchmarks/es_vs_grpo.py page --task {task} --from DIR",
        "```",
        "",
        f"Numbers: `benchmarks/results/es_vs_grpo/{task}.json`, from which the last command writes this "
        f"page again where it is given no folder. Base configs: `configs/comparison/{task}_*.yaml`.",
        "",
    ]
    made = tree.get("made_with") or {}
    if made.get("hardware"):
        cores = made["hardware"].get("cores")
        lines += [
            f"The final runs: {jobs.get('final')} at once on a machine of {cores} CPU cores, one thread each.",
            "",
        ]
    if isinstance(made.get("versions"), Mapping):
        lines += [", ".join(f"{name} {value}" for name, value in made["versions"].items() if value) + ".", ""]
    return lines


# --- the tables beside it ---------------------------------------------------------------------------------------------


def tables(tree: Mapping[str, Any]) -> dict[str, str]:
    """By name, the CSV of all means at each budget, of all tests, and of every seed."""
    matches = [(measure, match) for measure, found in tree["measures"].items() for match in found["matches"]]
    means = [_mean_row(measure, match, group) for measure, match in matches for group in match["groups"]]
    tests = [_test_row(measure, match, pair) for measure, match in matches for pair in match["pairs"]]
    seeds = [_seed_row(label, run, SECOND[tree["task"]]) for label, runs in tree["runs"].items() for run in runs]
    return {"means": _csv(means), "tests": _csv(tests), "seeds": _csv(seeds)}


Row = dict[str, Any]


def _csv(rows: Sequence[Row]) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def _mean_row(measure: str, match: Mapping[str, Any], group: Mapping[str, Any]) -> Row:
    found = group["estimate"] or {"mean": None, "low": None, "high": None}
    middle = group.get("interquartile_mean") or {"mean": None, "low": None, "high": None}
    used = [run["share"] for run in group["runs"] if run["share"] is not None]
    return {
        "measure": measure, "matched": match["by"] or "nothing", "budget": match["limit"], "method": group["label"],
        "seeds": len(group["runs"]), "mean": found["mean"], "low": found["low"], "high": found["high"],
        "interquartile_mean": middle["mean"], "iqm_low": middle["low"], "iqm_high": middle["high"],
        "budget_used": round(sum(used) / len(used), 4) if used else None,
    }  # fmt: skip


def _test_row(measure: str, match: Mapping[str, Any], pair: Mapping[str, Any]) -> Row:
    names = ("a", "b", "difference", "low", "high", "effect", "n_a", "n_b", "paired", "test", "p", "p_adjusted")
    return {"measure": measure, "matched": match["by"] or "nothing", **{name: pair[name] for name in names}}


def _seed_row(label: str, run: Mapping[str, Any], second: str) -> Row:
    def of(section: str, name: str) -> float | None:
        return (run[section] or {}).get(name)

    return {
        "method": label, "seed": run["seed"], "steps": run["steps"],
        **{f"{name}_{when}": run[when][name] for name in ("reward", second) for when in ("before", "after")},
        "kl": of("divergence", "exact"), "relative_distance": of("distance", "relative"),
        "hacked": of("shares_after", "hacked"), "training_seconds": of("cost", "wall_seconds"),
    }  # fmt: skip
