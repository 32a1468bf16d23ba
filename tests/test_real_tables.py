# SPDX-License-Identifier: Apache-2.0
"""studies/real_tables.py on small planted rows, of which some jobs are missing."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evoalign import shaping
from evoalign.analysis.coverage.command import BEYOND
from evoalign.checks import axes
from evoalign.checks.axes import Measurement
from evoalign.checks.rules import WINDOW
from evoalign.config import from_dict
from evoalign.tasks.word_problems import WordProblems
from evoalign.types import Generation, Update, population

sys.path.append(str(Path(__file__).parents[1] / "studies"))
import real_figures
import real_tables
from real_analyses import KINDS
from real_rows import Run, unseen

ITEMS, MEMBERS = 200, 8
CONFIG: dict[str, Any] = {
    "task": {"name": "countdown", "train_data": "x.json"}, "output_dir": "x",
    "es": {"sigma": 0.01, "learning_rate": 0.005, "population_size": MEMBERS, "num_generations": 100},
}  # fmt: skip
Row = dict[str, Any]


def drawn(rng: np.random.Generator, share: float, ease: Any = 0.0) -> list[int]:
    return (rng.random(ITEMS) < share + ease).astype(int).tolist()


def generations(count: int, every: int = 0, exact: float = 0.5) -> list[Row]:
    """Return generations of 2 s with 10 completions of 5 tokens each; `budget` is per generation."""
    budget = {"wall_seconds": 2.0, "completions": 10, "generated_tokens": 50}
    rows: list[Row] = [{"generation": i, "budget": budget, "diagnosis": {}} for i in range(count)]
    for i in range(every - 1, count, every) if every else ():
        rows[i] |= {"evaluation": {"right": exact}, "divergence": {"exact": 0.01 * i}}
    return rows


def trained(job: str, before: list[int], after: list[int], placebos: Any = (), **own: Any) -> Row:
    reached = {f"placebo {i}": {"test": {"right": right}, "other": None} for i, right in enumerate(placebos)}
    if placebos:
        for name, right in (("base", [1, 1, 0, 0]), ("run", [1, 0, 0, 0])):
            reached[name] = {"test": {"right": before}, "other": {"right": right}}
    return {
        "job": job, "device": "card", "config": CONFIG, "generations": generations(3), "before": {"right": before},
        "after": {"right": after}, **({"reached": reached} if placebos else {}), **own,
    }  # fmt: skip


def planted(seeds: int = 3) -> list[Row]:
    """Return rows of P: base 0.3, 3-shot 0.4, both ES spaces 0.6, placebos 0.3, GRPO 0.5; no best perturbation."""
    rng = np.random.default_rng(0)
    ease = rng.choice([-0.2, 0.2], ITEMS)
    base, shots = drawn(rng, 0.3, ease), drawn(rng, 0.4, ease)
    arms = {"zero-shot": {"right": base}, "3-shot": {"right": shots}, "self-consistency": {"right": shots}}
    rows: list[Row] = [{"job": "prompting/tool_calls", "device": "card", "arms": arms}]
    for seed in range(seeds):
        for space in ("lora", "lowrank"):
            placebos = [drawn(rng, 0.3, ease) for _ in range(5)]
            rows.append(trained(f"p/{space}/tool_calls/{seed}", base, drawn(rng, 0.6, ease), placebos))
        rows.append(trained(f"p/grpo/1e-5/tool_calls/{seed}", base, drawn(rng, 0.5, ease)))
    return rows


def written(folder: Path, rows: list[Row]) -> dict[str, list[str]]:
    for row in rows:
        (folder / f"{row['job'].replace('/', '_')}.json").write_text(json.dumps(row))
    return {name: list(lines) for name, lines in real_tables.tables(folder).items()}


def cells(lines: list[str], called: str) -> list[str]:
    return next(line for line in lines if line.startswith(f"| {called} |")).strip("| ").split(" | ")


def numbers(cell: str) -> list[float]:
    return [float(number) for number in re.findall(r"[+-]?\d+(?:\.\d+)?", cell)]


def test_tables_is_empty_without_rows(tmp_path: Path) -> None:
    assert real_tables.tables(tmp_path / "none") == {}
    real_tables.draw(tmp_path / "figures", tmp_path / "none")
    assert not (tmp_path / "figures").exists()


def test_contrasts_cover_the_planted_difference(tmp_path: Path) -> None:
    found = written(tmp_path, planted())
    lines = found["p_contrasts_tool_calls"]
    for name, difference in (("3-shot", 20.0), ("zero-shot", 30.0), ("GRPO LoRA", 10.0)):
        mean, low, high = numbers(cells(lines, f"ES lowrank less {name}")[2])
        assert low < difference < high and abs(mean - difference) < 8.0, name
    mean, low, high = numbers(cells(lines, "GRPO LoRA less 3-shot")[2])
    assert low < 10.0 < high and abs(mean - 10.0) < 8.0
    both = [cells(lines, f"ES lora less GRPO LoRA{kind}")[2] for kind in (", kinds of training", ", unseen kinds", "")]
    seen, hidden, whole = (numbers(cell)[0] for cell in both)
    part = float(unseen("tool_calls", ITEMS).mean())
    assert (1 - part) * seen + part * hidden == pytest.approx(whole, abs=0.1) and seen != hidden
    p, holm = map(float, cells(lines, "ES lora less 3-shot")[3:])
    other = float(cells(lines, "ES lowrank less 3-shot")[3])
    assert holm == pytest.approx(max(2 * min(p, other), p), rel=0.1) and p < 0.05
    assert cells(lines, "ES lora less self-consistency")[3:] == ["-", "-"], "the endpoint alone is tested"
    ratio, low, high = numbers(cells(lines, "mean placebo's gain over the gain of ES lora")[2])
    assert low < 0.0 < high and abs(ratio) < 0.2


def test_a_missing_arm_has_no_line_and_no_contrast(tmp_path: Path) -> None:
    found = written(tmp_path, [row for row in planted() if "lora" not in row["job"]])
    assert set(found) == {"p_tool_calls", "p_contrasts_tool_calls", "cost"}
    text = "\n".join(found["p_tool_calls"] + found["p_contrasts_tool_calls"])
    assert "ES lowrank" in text and "ES lora" not in text and "perturbation" not in text
    rows = [row for row in planted() if "grpo" not in row["job"] and "prompting" not in row["job"]]
    (tmp_path / "other").mkdir()
    text = "\n".join(written(tmp_path / "other", rows)["p_contrasts_tool_calls"])
    assert "3-shot" not in text and "GRPO" not in text and "placebo" in text


def test_one_seed_has_no_interval(tmp_path: Path) -> None:
    line = cells(written(tmp_path, planted(1))["p_contrasts_tool_calls"], "ES lora less 3-shot")
    assert len(numbers(line[2])) == 1 and line[3:] == ["-", "-"]


def test_arms_show_placebos_the_other_task_and_summed_costs(tmp_path: Path) -> None:
    line = cells(written(tmp_path, planted())["p_tool_calls"], "ES lora")
    assert line[8] == "0 of 5" and line[10:-1] == ["50.0%", "25.0%", "6", "30", "5"]


@pytest.mark.parametrize("task", ["tool_calls", "word_problems"])
def test_exactness_of_unseen_kinds_is_of_their_rows(task: str, tmp_path: Path) -> None:
    kept = unseen(task, ITEMS)
    assert 0.3 < kept.mean() < 0.7
    row = trained(f"p/lora/{task}/0", [0] * ITEMS, kept.astype(int).tolist())
    assert cells(written(tmp_path, [row])[f"p_{task}"], "ES lora")[3] == "100.0%"


def test_prompting_with_more_tokens_is_an_arm_of_its_own(tmp_path: Path) -> None:
    arms = {name: {"right": [float(i < n) for i in range(ITEMS)]} for name, n in (("zero-shot", 30), ("3-shot", 60))}
    rows = [
        {"job": "prompting/word_problems", "arms": arms},
        {
            "job": "longer/word_problems",
            "max_tokens": 640,
            "arms": {"zero-shot": {"right": [1.0] * ITEMS, "measures": {"truncated_share": 0.25}}},
        },
    ]
    lines = written(tmp_path, rows)["p_word_problems"]
    assert cells(lines, "base, zero-shot, 640 tokens")[2:6:3] == ["100.0%", "25.0%"]
    assert cells(lines, "base, 3-shot")[2] == f"{60 / ITEMS:.1%}"


def of_r(shift: float) -> list[Row]:
    rng, rows = np.random.default_rng(1), list[Row]()
    base = drawn(rng, 0.3)
    for seed in range(4):
        for name, share in (("es/0.5", 0.4 + shift), ("grpo/1e-6", 0.4)):
            ways = [{"temperature": 0.6, "pass": [{"k": 1, "mean": share}, {"k": 4, "mean": share + 0.1}]}]
            of_base = [{"temperature": 0.6, "pass": [{"k": 1, "mean": share / 2}, {"k": 4, "mean": share / 4}]}]
            sampled = [{"target": "base", "ways": of_base}, {"target": "/x/run", "ways": ways}]
            path = generations(8, every=2, exact=share / 2)
            after = drawn(rng, share)
            rows.append(trained(f"r/{name}/tool_calls/{seed}", base, after, sampled=sampled, generations=path))
    return rows


def test_gain_is_split_by_whether_the_base_was_cut_off(tmp_path: Path) -> None:
    first = int(0.2 * ITEMS)
    row = trained("r/es/0.5/tool_calls/0", [0] * ITEMS, [1] * (3 * first) + [0] * (ITEMS - 3 * first))
    lines = written(tmp_path, [row])["r_tool_calls"]
    name = "ES lowrank, eta 0.5"
    assert cells(lines, name)[4] == "-", "these rows do not tell"
    row["before"]["truncated"] = [0] * first + [1] * (ITEMS - first)
    line = cells(written(tmp_path, [row])["r_tool_calls"], name)
    assert (numbers(line[3])[0], numbers(line[4])) == (pytest.approx(60, abs=0.1), [pytest.approx(20, abs=0.1)])


def test_es_less_grpo_is_paired_by_seed_and_read_within_budgets(tmp_path: Path) -> None:
    rows = of_r(0.3)
    rows[3] |= {"sampled": []}
    found = written(tmp_path, rows)
    assert cells(found["r_tool_calls"], "base of ES lowrank")[5:7] == ["35.0%", "17.5%"]
    assert cells(found["r_tool_calls"], "base of GRPO")[5:7] == ["20.0%", "10.0%"], "of the seeds that have it"
    lines = found["r_contrasts_tool_calls"]
    line = cells(lines, "exact share at equal seconds")
    assert line[4] == "0.12 (exact paired permutation)"
    for cell in (line[3], line[5]):
        _, low, high = numbers(cell)
        assert low < 30.0 < high
    assert cells(lines, "pass@1 at temperature 0.6")[1:3] == ["70.0%", "40.0%"]
    assert cells(lines, "pass@4 at temperature 0.6")[1:3] == ["80.0%", "50.0%"]
    assert cells(lines, "exact share at 0.5 of the seconds")[1:3] == ["35.0%", "20.0%"]
    new = unseen("tool_calls", ITEMS)
    for kind, items in (("kinds of training", ~new), ("unseen kinds", new)):
        means = [np.mean([np.array(row["after"]["right"])[items] for row in rows[k::2]]) for k in (0, 1)]
        line = cells(lines, f"exact share, {kind}")
        assert line[1:3] == [f"{mean:.1%}" for mean in means]
        assert numbers(line[5])[0] == pytest.approx(100 * (means[0] - means[1]), abs=0.06)


def test_runs_on_several_cards_are_not_compared(tmp_path: Path) -> None:
    rows = of_r(0.3)
    rows[0]["device"] = "another card"
    with pytest.raises(ValueError, match="another card"):
        written(tmp_path, rows)


def test_curve_adds_the_costs_of_generations() -> None:
    run = Run.of(of_r(0.0)[0])
    assert run is not None
    assert [point["seconds"] for point in run.curve()] == [0.0, 4.0, 8.0, 12.0, 16.0]
    assert [point["kl"] for point in run.curve()[:2]] == [0.0, 0.01]
    assert run.within("completions", 45) == pytest.approx(0.2) and run.within("seconds", 16.0) == run.after.mean()


def test_kl_is_that_of_the_trained_model() -> None:
    """The last exact share stands next to the KL of the same weights, not to an earlier one."""
    row = trained("r/es/0.5/tool_calls/0", [0] * ITEMS, [1] * ITEMS, generations=generations(7, 4))
    early, end = Run.of(row), Run.of(row | {"divergence": {"exact": 0.5}})
    assert early is not None and early.kl is None
    assert end is not None and end.curve()[-1]["kl"] == 0.5


def test_within_a_few_completions_is_between_evaluations() -> None:
    """GRPO's completions are over before ES is first evaluated, when it is no longer the base model."""
    run = Run.of(trained("r/es/0.5/tool_calls/0", [0] * ITEMS, [1] * ITEMS, generations=generations(8, 4, 0.6)))
    assert run is not None
    assert run.within("completions", 20) == pytest.approx(0.3)


def test_drift_share_is_no_gain_where_the_runs_lost(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    placebos = [drawn(rng, 0.4) for _ in range(3)]
    rows = [trained(f"p/lora/tool_calls/{seed}", [1] * ITEMS, drawn(rng, 0.3), placebos) for seed in range(3)]
    lines = written(tmp_path, rows)["p_contrasts_tool_calls"]
    assert cells(lines, "mean placebo's gain over the gain of ES lora")[2] == "no gain"


def test_mix_has_planted_effects(tmp_path: Path) -> None:
    """ES adds 0.1, temperature 1 adds 0.05 with GRPO and 0.2 more with ES."""
    planned = {"es/1": 0.75, "es/0": 0.5, "grpo/engine": 0.45, "grpo/es": 0.4}
    rows = [
        trained(f"mix/{cell}/tool_calls/{seed}", [0] * ITEMS, [1] * round(share * ITEMS + seed) + [0] * 10)
        for cell, share in planned.items()
        for seed in range(3)
        if cell != "grpo/es" or seed < 2
    ]
    for row in rows:
        row["after"]["right"] = (row["after"]["right"] + [0] * ITEMS)[:ITEMS]
    found = written(tmp_path, rows)
    assert len(found["mix_tool_calls"]) == 2 + 4
    effects = [line.strip("| ").split(" | ") for line in found["mix_effects_tool_calls"][2:]]
    assert [(effect[1], numbers(effect[2])[0]) for effect in effects] == [
        ("2", 20.0),
        ("2", 15.0),
        ("2", 25.0),
        ("2", 5.0),
        ("2", 20.0),
    ]


def test_step_size_walks_eta_root_of_generations_over_members(tmp_path: Path) -> None:
    placebos = [[0] * ITEMS] * 3
    row = trained("step/0.5/tool_calls/0", [0] * ITEMS, [1] * ITEMS, placebos, generations=generations(32))
    larger = {**CONFIG, "es": {**CONFIG["es"], "population_size": 128}}
    most = row | {"job": "population/128/tool_calls/0", "config": larger, "generations": generations(16)}
    one, two = (line.strip("| ").split(" | ") for line in written(tmp_path, [row, most])["step"][2:])
    assert one[:7] == ["0.5", "8", "0", "64", "320", "32", "1.00"] and one[8:] == ["+0.0, +0.0", "0 of 3", "+25.0"]
    assert two[:7] == ["0.5", "128", "0", "32", "160", "16", "0.18"]


def follows_format(rng: np.random.Generator, index: int) -> Row | None:
    """Return the axis report of a generation in which members differ in format, and 2 % is right by luck."""
    skill = rng.standard_normal((64, 1))
    formed = (rng.random((64, 16)) < 0.5 + 0.2 * np.tanh(skill)).astype(float)
    right = (rng.random((64, 16)) < 0.02).astype(float)
    scores = 0.1 * formed + right
    update = Update(index, index, population(64), tuple(map(float, shaping.zscore(scores))), 0.01, 0.005)
    fitness = tuple(map(float, scores.mean(axis=1)))
    made = Generation(index, 100, fitness, tuple(map(tuple, scores.tolist())), update, "", 1, 0, 0, {})
    nothing = np.zeros((64, 16))
    columns = {"format": formed, "accuracy": right, "tokens": nothing, "truncated": nothing}
    return axes.row_of(made, Measurement(columns, "accuracy"))


def test_first_warning_counts_the_generations_until_the_rule_fires() -> None:
    rng, rows = np.random.default_rng(0), generations(25)
    for i, row in enumerate(rows):
        row["diagnosis"] = {"axes": follows_format(rng, i)}
    tree = {"config": from_dict(CONFIG).model_dump(mode="json"), "generations": rows}
    found = real_tables.first_warning(tree)
    assert found is not None and WINDOW <= found <= 25
    assert real_tables.first_warning({**tree, "generations": rows[: found - 1]}) is None


def hacked(arm: str, seed: int, kl: float, exact: float) -> Row:
    """Return a run whose brevity rises from 0.4 to 0.8, and whose exact share falls from 0.5, over its KL."""
    path = generations(4)
    path[1] |= {"evaluation": {"right": (0.5 + exact) / 2, "reward": 0.6}, "divergence": {"exact": kl / 2}}
    before, after = ([1] * n + [0] * (ITEMS - n) for n in (100, round(exact * ITEMS)))
    row = trained(f"hack/{arm}/{seed}", before, after)
    for end, reward in (("before", 0.4), ("after", 0.8)):
        row[end]["measures"] = {"reward": reward}
    return row | {"generations": path, "divergence": {"exact": kl}}


def test_hacking_runs_are_compared_at_equal_kl(tmp_path: Path) -> None:
    rows = [hacked("es", 0, 0.05, 0.4), hacked("es", 1, 0.05, 0.4), hacked("grpo", 0, 0.1, 0.1)]
    found = written(tmp_path, rows)
    ends = ["ES lowrank", "0", "4", "0.050", "0.400", "0.800", "50.0%", "40.0%"]
    at = ["49.6%, 0.416", "49.0%, 0.440", "48.0%, 0.480", "46.0%, 0.560", "40.0%, 0.800", "-, -"]
    assert cells(found["hack"], "ES lowrank") == ends + at
    assert cells(found["hack"], "GRPO")[11:] == ["42.0%, 0.480", "30.0%, 0.600", "10.0%, 0.800"]
    contrasts = [line.strip("| ").split(" | ") for line in found["hack_contrasts"][2:]]
    assert contrasts[2:] == [
        ["0.01", "2 and 1", "48.0%", "46.0%", "+2.0", "0.480", "0.440"],
        ["0.02", "2 and 1", "46.0%", "42.0%", "+4.0", "0.560", "0.480"],
        ["0.05", "2 and 1", "40.0%", "30.0%", "+10.0", "0.800", "0.600"],
    ]
    real_tables.draw(tmp_path / "figures", tmp_path)
    assert [file.stem for file in (tmp_path / "figures").iterdir()] == ["real_hack"]


@pytest.mark.parametrize(("kl", "scale", "style"), [(0.5, "linear", "-"), (10.0, "symlog", "None")])
def test_a_run_that_went_far_is_drawn_as_points_on_a_logarithmic_axis(tmp_path, monkeypatch, kl, scale, style) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(real_figures, "save", lambda figure, to: drawn.append(figure))
    written(tmp_path, [hacked("grpo", 0, kl, 0.1)])
    real_tables.draw(tmp_path / "figures", tmp_path)
    (axes,) = drawn[0].axes
    assert (axes.get_xscale(), axes.lines[0].get_linestyle()) == (scale, style)


def test_hacking_run_without_kl_has_no_value_at_equal_kl(tmp_path: Path) -> None:
    failed = trained("hack/grpo/0", [1] * ITEMS, [1] * ITEMS, generations=[], failed="not finite")
    found = written(tmp_path, [failed])
    assert cells(found["hack"], "GRPO, failed")[2:] == ["0", "-", "-", "-", "100.0%", "100.0%", *6 * ["-, -"]]
    assert "hack_contrasts" not in found


def test_gate_marks_tasks_between_15_and_70_per_cent(tmp_path: Path) -> None:
    tasks = {
        name: {"right": [1] * n + [0] * (100 - n), "seconds": 30.0} for name, n in (("a", 14), ("b", 15), ("c", 71))
    }
    found = written(tmp_path, [{"job": "gate", "device": "card", "tasks": tasks, "job_seconds": 90.0}])
    assert [line.split(" | ")[-1] for line in found["gate"][2:]] == ["no |", "yes |", "no |"]
    assert found["cost"][-1].endswith("| 1 | - | 1.5 |")


def test_kinds_are_of_the_rows_of_their_templates(tmp_path: Path) -> None:
    """Of four unseen kinds one alone is right."""
    rows = WordProblems.rows("test", ITEMS)
    right = [int(" printers " in row["question"]) for row in rows]
    found = written(tmp_path, [trained(f"p/lora/word_problems/{seed}", [0] * ITEMS, right) for seed in range(2)])
    line = cells(found["kinds_word_problems"], "ES lora")
    assert line[1:] == ["0.0%", "0.0%", "0.0%", "100.0%", "0.0%"]
    unseen_rows = [any(words in row["question"] for words in KINDS.values()) for row in rows]
    assert unseen_rows == [row["unseen"] for row in rows]


def test_alignment_has_a_line_for_each_width_and_number_of_members(tmp_path: Path) -> None:
    at = {"rank": 4, "sigma": 0.001, "members": 64, "expected": 0.002, "placebo": {"p": 0.01},
          "cosine": {"mean": 0.0015, "low": 0.001, "high": 0.002},
          "corrected": {"mean": 0.003, "low": 0.0, "high": 0.005}}  # fmt: skip
    row = {"job": "alignment/word_problems", "alignment": {"targets": [{"target": "base", "rows": [at]}]}}
    line = cells(written(tmp_path, [row])["alignment_word_problems"], "4")
    assert line == ["4", "0.001", "64", "1500 (1000 to 2000)", "3000 (0 to 5000)", "2000", "0.01"]
    at["corrected"] = None
    assert cells(written(tmp_path, [row])["alignment_word_problems"], "4")[4] == "-"


def test_draw_makes_the_figures_that_have_rows(tmp_path: Path) -> None:
    placebos = [[0] * ITEMS] * 3
    rows = [
        *of_r(0.1),
        trained("step/0.5/tool_calls/0", [0] * ITEMS, [1] * ITEMS, placebos),
        trained("long/512/0,1/0", [0] * ITEMS, [1] * ITEMS, placebos),
    ]
    rows[-1]["config"] = from_dict(CONFIG).model_dump(mode="json")
    written(tmp_path, rows)
    real_tables.draw(tmp_path / "figures", tmp_path)
    names = {"real_budget_tool_calls", "real_kl_tool_calls", "real_step", "real_long"}
    assert {file.stem for file in (tmp_path / "figures").iterdir()} == names


def test_probe_shows_the_recommended_width_or_the_trial(tmp_path: Path) -> None:
    rungs = [{"width": 0.001, "gain": 0.02}, {"width": 0.002, "gain": None}]
    kinds: dict[str, Row] = {
        "100": {"width": 0.001, "trial": None, "gain_interval": [0.01, 0.03], "rungs": rungs},
        "101": {"width": None, "trial": [0.002, 0.001], "gain_interval": None, "rungs": rungs},
    }
    rows = [
        {"job": f"probe/lora/tool_calls/{seed}", "device": "card", "seconds": 12.0, "probe": probe,
         "width": probe["width"] or probe["trial"][0]}
        for seed, probe in kinds.items()
    ]  # fmt: skip
    lines = written(tmp_path, rows)["probe"]
    shown = [line.strip("| ").split(" | ")[2:] for line in lines[2:]]
    assert shown == [
        ["0.001", "-", "0.001", "+0.0200 (+0.0100 to +0.0300)", "12"],
        ["none", "0.002", "0.002", "-", "12"],
    ]


def test_coverage_names_the_method_of_each_model(tmp_path: Path) -> None:
    def ways(kind: str, mean: float) -> list[Row]:
        return [{kind: 0.2, "pass": [{"k": k, "mean": mean, "low": None, "high": None} for k in (1, 16)]}]

    targets = {"base": 0.25, "/runs/r_es_0.5_tool_calls_0": 0.5, "/runs/r_grpo_1e-6_tool_calls_0": 0.75}
    rows = [
        {
            "job": f"coverage/tool_calls/{way}",
            "device": "card",
            "coverage": {
                "targets": [{"target": name, "ways": ways(kind, mean)} for name, mean in targets.items()],
                "against_base": [
                    {"target": name, kind: 0.2, BEYOND[0]: {"mean": mean / 10}, BEYOND[1]: {"mean": -mean / 10}}
                    for name, mean in [*targets.items()][1:]
                ],
            },
        }
        for way, kind in (("0.2", "temperature"), ("noise", "sigma"))
    ]
    lines = written(tmp_path, rows)
    shown = [line.strip("| ").split(" | ") for line in lines["coverage_tool_calls"][2:]]
    assert [line[:5] for line in shown[:3]] == [
        ["temperature 0.2", name, share, "-", share]
        for name, share in (("base", "25.0%"), ("ES lowrank", "50.0%"), ("GRPO", "75.0%"))
    ]
    assert [line[-2:] for line in shown[:3]] == [["-", "-"], ["+5.0", "-5.0"], ["+7.5", "-7.5"]]
    assert {line[0] for line in shown[3:]} == {"sigma 0.2"}


def test_choices_are_of_validation_rows_and_are_no_final_runs(tmp_path: Path) -> None:
    validation = {"before": {"right": 0.25}, "after": {"right": 0.5}}
    found = written(tmp_path, [trained("r/es/0.5/tool_calls/100", [0] * ITEMS, [1] * ITEMS, validation=validation)])
    assert cells(found["choices"], "r: ES lowrank, tool_calls")[1:] == ["0.5", "100", "25.0%", "50.0%", "6"]
    assert set(found) == {"choices", "cost"}
