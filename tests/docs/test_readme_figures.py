# SPDX-License-Identifier: Apache-2.0
"""Every number of README.md is computed from committed rows, or named here as part of a name or a description."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
import pytest
from pages import REPOSITORY

from evoalign import statistics
from evoalign.config import load
from evoalign.models import tiny
from evoalign.tasks.word_problems import WordProblems

Rows = list[dict[str, Any]]
NOT_FIGURES = (
    r"Qwen2\.5-Coder-1\.5B-Instruct", r"SmolLM2(-135M-Instruct)?", r"Qwen2(\.5-0\.5B)?", r"\bH200\b",
    r"Apache-2\.0", r"b?float(16|32)", r"macro-F1", r"Python 3\.11 or newer",
)  # fmt: skip
"""Names with digits."""


@functools.cache
def prose() -> str:
    """Return README.md on one line, without code and link targets."""
    text = re.sub(r"```.*?```", "", (REPOSITORY / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "`", text))
    return " ".join(text.split())


@functools.cache
def rows(file: str) -> Rows:
    """Return the rows of a file of results."""
    return [json.loads(line) for line in (REPOSITORY / file).read_text(encoding="utf-8").splitlines()]


def demo(config: str) -> Rows:
    """Return the rows of the demo's benchmark, one per seed."""
    return sorted((r for r in rows("benchmarks/results/demo.jsonl") if r["config"] == config), key=lambda r: r["seed"])


def span(values: Sequence[float], form: str, scale: float = 1) -> str:
    """Return the least and the largest value in words."""
    return f"{scale * min(values):{form}} to {scale * max(values):{form}}"


def means_of_placebos(config: str, measure: str) -> list[float]:
    """Return the mean placebo of each seed."""
    return [sum(p[measure] for p in row["placebos"]) / len(row["placebos"]) for row in demo(config)]


def demo_row(config: str) -> str:
    """Return the cells of a row: exact answers before, after, of the mean placebos and of the best."""
    before = {100 * row["before"]["exact"] for row in demo(config)}
    after = span([row["real"]["exact"] for row in demo(config)], ".0f", 100)
    assert len(before) == 1 and {len(row["placebos"]) for row in demo(config)} == {20} and len(demo(config)) == 5
    assert all(p["exact"] < row["real"]["exact"] for row in demo(config) for p in row["placebos"])
    noise = span(means_of_placebos(config, "exact"), ".0f", 100)
    best = 100 * max(p["exact"] for row in demo(config) for p in row["placebos"])
    return f"| {before.pop():.1f} % | {after} % | {noise} % | {best:.0f} % |"


def landscape(on: str, model: str) -> list[float]:
    """Return the test reward of each seed at the end."""
    found = [r for r in rows("studies/results/landscape.jsonl") if r["what"] == "end" and r["on"] == on]
    return [row["rewards"]["after"] for row in found if row["model"] == model]


def landscape_row(on: str, form: str) -> str:
    """Return the cells of a row: reward before, after, of the mean placebo and of the best."""
    ends = [r for r in rows("studies/results/landscape.jsonl") if r["what"] == "end" and r["on"] == on]
    (before,) = {row["rewards"]["before"] for row in ends}
    placebos = landscape(on, "placebo of es")
    assert max(placebos) < min(landscape(on, "es"))
    mean, best = sum(placebos) / len(placebos), max(placebos)
    return f"| {before:{form}} | {span(landscape(on, 'es'), form)} | {mean:{form}} | {best:{form}} |"


def hacked() -> float:
    """Return the share of hacked completions of ES with SmolLM2, in per cent."""
    found = [r for r in rows("studies/results/landscape.jsonl") if r["what"] == "end" and r["on"] == "smollm2"]
    shares = [row["rates"]["hacked"] for row in found if row["model"] == "es"]
    return 100 * sum(shares) / len(shares)


def real(job: str) -> dict[str, Any]:
    """Return the rows of a job of the study on a 1.5B model."""
    return json.loads((REPOSITORY / f"studies/results/real/{job}.json").read_text(encoding="utf-8"))


def real_runs(*arms: str) -> Rows:
    """Return the runs on word problems of these arms, or of ES in both spaces."""
    return [real(f"p_{arm}_word_problems_{seed}") for arm in arms or ("lora", "lowrank") for seed in range(3)]


def real_seeds() -> Rows:
    """Return the runs of ES `lora` on word problems by seed, and check their placebos."""
    found = [real(f"p_lora_word_problems_{seed}") for seed in range(3)]
    for row in found:
        placebos = [one["test"]["measures"]["right"] for name, one in row["reached"].items() if "placebo" in name]
        assert len(placebos) == 5 and max(placebos) < row["after"]["measures"]["right"]
        assert len(row["after"]["right"]) == 500
        row["placebos"] = placebos
    return found


def real_row() -> str:
    (before,) = {row["before"]["measures"]["right"] for row in real_seeds()}
    after = span([row["after"]["measures"]["right"] for row in real_seeds()], ".0f", 100)
    noise = span([sum(row["placebos"]) / 5 for row in real_seeds()], ".0f", 100)
    best = 100 * max(max(row["placebos"]) for row in real_seeds())
    return f"3 seeds, `, exact answers: ` | {100 * before:.1f} % | {after} % | {noise} % | {best:.0f} % |"


def real_prompting() -> str:
    arms = real("prompting_word_problems")["arms"]
    shots, vote = (100 * sum(arms[name]["right"]) / len(arms[name]["right"]) for name in ("3-shot", "self-consistency"))
    es = span([row["after"]["measures"]["right"] for row in real_runs()], ".0f", 100)
    grpo = span([row["after"]["measures"]["right"] for row in real_runs("grpo_1e-4")], ".0f", 100)
    best = real("perturb_word_problems")
    chosen = f"the best of {best['perturbations']} random perturbations {100 * np.mean(best['right']):.0f} %"
    return (
        f"reach {shots:.0f} % of the test problems, {chosen}, ES {es} %, "
        f"a vote of 16 samples without training {vote:.0f} %, and five minutes of GRPO LoRA {grpo} %."
    )


def real_texts() -> str:
    """Return the sentences on one test problem, whose question and completions are those of the rows."""
    place, row = 4, real("p_lora_word_problems_0")
    question = WordProblems.rows("test", place + 1)[place]["question"]
    assert all(part in question for part in ("4 loaves take 800 grams of flour", "orders 17 loaves", "2450 grams"))
    before, after = (row[end]["texts"][place] for end in ("before", "after"))
    assert r"17 \times 800 = 13600" in before and r"\boxed{11150}" in before
    assert r"\frac{800 \text{ grams}}{4 \text{ loaves}}" in after and r"\boxed{950}" in after
    return (
        "4 loaves take 800 grams of flour: how much do 17 loaves take beyond the 2450 grams at hand? "
        "Qwen2.5-Coder-1.5B-Instruct multiplies 17 by 800 and answers 11150. After five minutes of ES it divides by "
        "4 first and answers 950."
    )


def unseen_kinds() -> str:
    """Check the intervals of ES, GRPO and the vote less three examples, on kinds that training does not have."""
    kept = np.array([row["unseen"] for row in WordProblems.rows("test", 500)])
    arms = real("prompting_word_problems")["arms"]
    shots, vote = (np.array(arms[name]["right"])[kept] for name in ("3-shot", "self-consistency"))
    grpo = np.array([row["after"]["right"] for row in real_runs("grpo_1e-4")])[:, kept]
    for better in (statistics.crossed(grpo - shots), statistics.paired(shots, vote, shares=True)):
        assert better.low is not None and better.low > 0
    for space in ("lora", "lowrank"):
        after = np.array([real(f"p_{space}_word_problems_{seed}")["after"]["right"] for seed in range(3)])
        gap = statistics.crossed(after[:, kept] - shots)
        assert gap.low is not None and gap.high is not None and gap.low < 0 < gap.high
    return "no difference of ES from the three examples is shown; GRPO and the vote are above them."


def cut_off() -> str:
    before = real("prompting_word_problems")["arms"]["zero-shot"]["measures"]["truncated_share"]
    after = span([row["after"]["measures"]["truncated_share"] for row in real_runs()], ".0f", 100)
    room = real("longer_word_problems")["arms"]["zero-shot"]["measures"]
    assert room["truncated_share"] == 0
    return (
        f"without training {100 * before:.0f} % of the answers are cut off, after ES {after} %; "
        f"with room for all, {100 * room['right']:.0f} % are right"
    )


def real_grpo() -> str:
    """Return what GRPO and ES reached and took on the real model."""
    full = {arm: [real(f"r_{arm}_word_problems_{seed}") for seed in range(4)] for arm in ("grpo_2e-6", "es_0.5")}
    assert all(148 < row["cost"]["wall_seconds"] < 156 for runs in full.values() for row in runs)
    arms = {**full, **{name: real_runs(name) for name in ("grpo_1e-4", "lora", "lowrank")}}
    shares = [span([row["after"]["measures"]["right"] for row in runs], ".0f", 100) for runs in full.values()]
    peak = [f"{max(row['cost']['peak_memory_bytes'] for row in runs) / 2**30:.0f}" for runs in arms.values()]
    return (
        f"150 s of GRPO with all weights reach {shares[0]} % in {peak[0]} GiB, ES {shares[1]} % in {peak[1]} "
        f"(four seeds); GRPO LoRA took {peak[2]} GiB, five minutes of ES {peak[3]} (`) and {peak[4]} (`)."
    )


@functools.cache
def peaks() -> dict[str, float]:
    """Return the largest peak of memory of each method in GiB."""
    tree = json.loads((REPOSITORY / "benchmarks/results/grpo_h200.json").read_text(encoding="utf-8"))
    found: dict[str, float] = {}
    for call in tree["calls"]:
        for name, run in call["runs"].items():
            for row in run.get("rows") or []:
                peak = row["budget"]["peak_memory_bytes"] / 2**30
                found[name] = max(peak, found.get(name, 0))
    return found


def grpo_memory() -> str:
    """Return the range of GRPO's peaks."""
    return f"GRPO took {span([peak for name, peak in peaks().items() if 'GRPO' in name], '.0f')} GiB"


def memory_ratios() -> str:
    """Return the range of GRPO's peaks over those of ES: of all weights over `lowrank`, of adapters over both."""
    own = peaks()
    ratios = [peak / own["ES lora" if "LoRA" in name else "ES lowrank"] for name, peak in own.items() if "GRPO" in name]
    pairs = [("r_grpo_2e-6", "r_es_0.5"), ("p_grpo_1e-4", "p_lora"), ("p_grpo_1e-4", "p_lowrank")]
    for pair in pairs:
        grpo, es = (real(f"{arm}_word_problems_0")["cost"]["peak_memory_bytes"] for arm in pair)
        ratios.append(grpo / es)
    return f"GRPO took {span(ratios, '.1f')} times the memory of ES"


def against_loop() -> str:
    """Return the range of the population against a loop over members at two prompts."""
    cpu = [float(r["against loop"].split()[0]) for r in rows("benchmarks/results/population.jsonl")
           if r["model"] == "tiny" and r["space"] == "lora" and "32 prompts" not in r["machine"]]  # fmt: skip
    took = {
        row["way"]: median(one["seconds"] for one in row["took"])
        for row in rows("benchmarks/results/vllm_h200.jsonl")
        if row["benchmark"] == "generation" and row["shape"] == "7b"
    }
    largest = max(seconds for way, seconds in took.items() if way != "population") / took["population"]
    return f"{span([*cpu, largest], '.0f')} times as fast"


def at_32_prompts() -> str:
    (row,) = (r for r in rows("benchmarks/results/population.jsonl") if "32 prompts" in r["machine"])
    return f"with 32 prompts on a CPU {float(row['against loop'].split()[0]):.0f} times"


def countdown() -> dict[str, float]:
    """Return the accuracy of each method at equal wall time."""
    tree = json.loads((REPOSITORY / "benchmarks/results/es_vs_grpo/countdown.json").read_text(encoding="utf-8"))
    assert {len(runs) for runs in tree["runs"].values()} == {12}
    (match,) = (m for m in tree["measures"]["accuracy"]["matches"] if m["by"] == "wall")
    return {group["label"]: 100 * group["estimate"]["mean"] for group in match["groups"]}


def journal() -> str:
    most = max(int(r["journal, bytes a generation"].replace(",", "")) for r in rows("benchmarks/results/replay.jsonl"))
    return f"about {most / 1000:.1f} kB per generation (30 members)"


def killed() -> str:
    died = [row for row in rows("benchmarks/results/kills.jsonl") if row["exit"] != 0]
    return f"{sum(row['outcome'] == 'same' for row in died)} of {len(died)} commands"


def lines_of_the_loop() -> str:
    return f"in {len((REPOSITORY / 'examples/es_loop.py').read_text(encoding='utf-8').splitlines())} lines"


def demo_figure() -> str:
    first, generations = demo("quickstart")[0], load([REPOSITORY / "configs/quickstart.yaml"]).es.num_generations
    return (
        f"over {generations} generations: the test split goes from {first['before']['reward']:.1f} "
        f"to {first['real']['reward']:.1f}"
    )


def countdown_row() -> str:
    assert len(landscape("countdown", "es")) == 8 and len(landscape("countdown", "placebo of es")) == 8
    return f"8 seeds, reward: ` {landscape_row('countdown', '.2f')}"


def smollm2_row() -> str:
    assert len(landscape("smollm2", "es")) == 4 and len(landscape("smollm2", "placebo of es")) == 4
    return f"4 seeds, reward: ` {landscape_row('smollm2', '.0f')}"


def data_sizes() -> str:
    questions = json.loads((REPOSITORY / "data/tasks/conciseness/questions_test.json").read_text(encoding="utf-8"))
    assert {row["examples"] for row in rows("benchmarks/results/demo.jsonl")} == {len(questions)}
    return f"{len(questions)} questions"


def wall_time_on_countdown() -> str:
    found = countdown()
    es = [share for label, share in found.items() if label.startswith("ES ")]
    return f"an accuracy of {found['GRPO']:.1f} % and ES {span(es, '.1f')} % at equal wall time"


FIGURES: dict[str, Callable[[], str]] = {
    "the figure": demo_figure,
    "a real model": real_row,
    "prompting": real_prompting,
    "texts": real_texts,
    "unseen kinds": unseen_kinds,
    "cut off": cut_off,
    "GRPO on the real model": real_grpo,
    "demo": lambda: demo_row("quickstart"),
    "template": lambda: demo_row("template"),
    "Countdown": countdown_row,
    "SmolLM2": smollm2_row,
    "hacked": lambda: f"{hacked():.0f} % of the completions show signs of hacking",
    "test questions": data_sizes,
    "parameters of tiny": lambda: f"{weights_of_tiny() / 1e6:.1f} M parameters",
    "memory of lora": lambda: f"ES took {peaks()['ES lora']:.1f} GiB",
    "memory of lowrank": lambda: f"and {peaks()['ES lowrank']:.1f} GiB",
    "memory of GRPO": grpo_memory,
    "memory, ratios": memory_ratios,
    "speed": against_loop,
    "speed, 32 prompts": at_32_prompts,
    "journal": journal,
    "GRPO and ES": wall_time_on_countdown,
    "killed": killed,
    "the whole algorithm": lines_of_the_loop,
}
"""Each phrase with figures, computed from the rows. A phrase may occur more than once."""
SETTINGS = (
    "`, 5 seeds, exact answers", ", 20 in the next two", "Countdown, 500 problems, ` with",
    "Word problems, 500 problems", "dequantised from 4 bits",
    "at 32 completions per backward pass", "a population of 30 with two prompts", "30 members with two prompts",
    "(12 seeds, equal tuning trials)",
)  # fmt: skip
"""Phrases that describe how the figures were measured; the functions above check their numbers where rows have them."""


def weights_of_tiny() -> int:
    from safetensors import safe_open

    with safe_open(tiny() / "model.safetensors", "pt") as file:
        return sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118


@pytest.mark.parametrize("name", FIGURES)
def test_phrase_of_readme_follows_from_the_rows(name: str) -> None:
    assert FIGURES[name]() in prose()


def test_readme_has_no_number_that_is_not_checked() -> None:
    text = prose()
    for known in [compute() for compute in FIGURES.values()]:
        text = text.replace(known, "")
    for known in SETTINGS:
        assert known in text, known
        text = text.replace(known, "")
    for name in NOT_FIGURES:
        text = re.sub(name, "", text)
    assert not (left := [text[max(0, m.start() - 40) : m.end() + 20] for m in re.finditer(r"\d+", text)]), left
