# SPDX-License-Identifier: Apache-2.0
"""pass@k against all subsets and against a model whose chance to solve is known; support, variety, words, the page."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Visit, chromium
from test_mixer import of_task, plain, write

from evoalign import tokens
from evoalign.analysis.base import BASE
from evoalign.analysis.coverage import estimators, figures
from evoalign.analysis.coverage.command import Coverage, Settings, against_base, contest, differences, measure
from evoalign.analysis.coverage.estimators import Problem, Tries, Way
from evoalign.analysis.mixer import EvalSettings, ModelMixer, Perturbation
from evoalign.config import Config
from evoalign.errors import ConfigError
from evoalign.models import tiny

SMALL = Settings(temperature=(0.7, 1.0), sigma=(0.004,), samples=4, examples=4, tokens=24)
HEAT, NOISE = Way("temperature", 1.0), Way("sigma", 0.01)


def tried(shares: list[float], n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((n, len(shares))) < np.array(shares)


@pytest.mark.parametrize("k", range(1, 8))
def test_pass_at_k_is_the_mean_over_all_subsets(k: int) -> None:
    solved_NP = tried([0.0, 0.1, 0.3, 0.5, 0.9, 1.0], 7)

    def by_subsets(rows: list[int], k: int) -> np.ndarray:
        return np.mean([solved_NP[list(chosen)].any(0) for chosen in combinations(rows, k)], axis=0)

    brute = by_subsets([*range(7)], k)
    without = [by_subsets([i for i in range(7) if i != j], min(k, 6)) for j in range(7)]
    np.testing.assert_allclose(estimators.pass_at(solved_NP, k), brute, rtol=0, atol=1e-15)
    np.testing.assert_allclose(estimators.gaps(solved_NP, k), brute - np.array(without), rtol=0, atol=1e-15)


def test_pass_at_512_is_exact_where_floats_would_cancel() -> None:
    solved_NP = np.zeros((1024, 2), dtype=bool)
    solved_NP[0, 0] = True
    assert estimators.pass_at(solved_NP, 512).tolist() == [0.5, 0.0]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("k", [1, 4, 12])
def test_intervals_hold_a_known_pass_at_k_and_the_error_is_not_too_small(k: int, shared: bool) -> None:
    """500 times 100 problems of known chances and 12 tries; shared: a try is good or bad at all problems alike.

    A problem's chance is u^3, u uniform; a shared try of quality v, uniform from 0 to 2, solves it with v u^3 or 1.
    """
    rng = np.random.default_rng([k, shared])
    quality = (np.arange(2000) + 0.5) / 1000 if shared else np.ones(1)
    chances = [np.mean(np.minimum(1, quality * u**3)) for u in (np.arange(999) + 0.5) / 999]
    truth = float(np.mean([1 - (1 - chance) ** k for chance in chances]))
    held, means, errors = np.zeros(2), list[float](), list[float]()
    for _ in range(500):
        quality_N1 = 2 * rng.random((12, 1)) if shared else np.ones((12, 1))
        solved_NP = rng.random((12, 100)) < quality_N1 * rng.random(100) ** 3
        found = [estimators.estimate(solved_NP, k, shared=s) for s in (shared, False)]
        held += [(one.low or 0.0) <= truth <= (one.high or 0.0) for one in found]
        solved_NP = rng.random((12, 100)) < quality_N1 * np.linspace(0, 1, 100) ** 3
        means.append(estimators.pass_at(solved_NP, k).mean())
        errors.append(estimators.error(estimators.gaps(solved_NP, k), shared=shared) ** 2)
    assert held[0] >= 465, held
    assert not shared or k == 12 or held[1] < 450, "problems that share their tries are not independent"
    assert 0.85 < np.mean(errors) / np.var(means) < 2.6


def test_a_try_that_is_shared_counts_once() -> None:
    """All problems solved by the same draws of noise say as little of the next draw as one problem does."""
    one = tried([0.5], 16)
    gaps, alone = (estimators.gaps(solved, 1) for solved in (np.repeat(one, 50, axis=1), one))
    shared, apart = (estimators.error(gaps, shared=s) for s in (True, False))
    assert shared == pytest.approx(estimators.error(alone, shared=True)) and apart == pytest.approx(shared / 50**0.5)


@pytest.mark.parametrize("seed", range(4))
def test_support_is_the_mean_over_all_halves(seed: int) -> None:
    base, own = tried([0.0, 0.1, 0.5, 0.2, 1.0, 0.4], 6, seed), tried([0.2, 0.0, 0.5, 0.1, 0.9, 0.0], 6, seed + 9)
    halves = [([*a], [j for j in range(6) if j not in a]) for a in combinations(range(6), 3)]
    for other in (own, base):
        pairs = [(base[a].any(0), other[b].any(0)) for a, b in halves]
        brute = {"preserved": [a & b for a, b in pairs], "shrunk": [a & ~b for a, b in pairs],
                 "expanded": [b & ~a for a, b in pairs], "neither": [~a & ~b for a, b in pairs]}  # fmt: skip
        found = estimators.support(base, other)
        assert found.keys() == brute.keys()
        for part, marks in brute.items():
            np.testing.assert_allclose(found[part], np.mean(marks, axis=0), atol=1e-15)


def test_the_best_way_is_chosen_by_other_problems() -> None:
    even, odd = np.zeros((4, 6), dtype=bool), np.zeros((4, 6), dtype=bool)
    even[:, ::2], odd[:, 1::2] = True, True
    found, chosen = estimators.chosen_elsewhere([even, odd], 2)
    assert chosen == (1, 0) and not found.any(), "each way is best exactly where it may not be chosen"


def test_overlap_and_variety_against_counts_by_hand() -> None:
    a, b = np.array([[1, 1, 0, 0, 1, 0, 1]] * 2, dtype=bool), np.array([[1, 0, 1, 0, 1, 0, 1]] * 2, dtype=bool)
    assert estimators.jaccard(a, b).mean == pytest.approx(3 / 5)
    assert math.isnan(estimators.jaccard(a & False, b & False).mean)
    assert estimators.entropy(["x", "x", "y", "y"]) == pytest.approx(math.log(2)) and estimators.entropy(["x"] * 3) == 0
    assert estimators.distinct(["a b a", "a b"], 1) == 2 / 5 and estimators.distinct(["a b a", "a b"], 2) == 2 / 3
    assert math.isnan(estimators.distinct(["", "a"], 2))
    texts = ["a b", "b c", "", "", "b a"]
    sets = [set(text.split()) for text in texts]
    brute = [1 - len(x & y) / len(x | y) if x | y else 0.0 for x, y in combinations(sets, 2)]
    assert estimators.pairwise(texts) == pytest.approx(np.mean(brute))


@pytest.fixture(scope="module")
def config() -> Config:
    return of_task(task={"name": "countdown"}, evaluation={"max_tokens": 12, "temperature": 0.5, "samples": 3})


@pytest.fixture(scope="module")
def ways(config: Config) -> dict[Way, Tries]:
    return tries_of(BASE, SMALL, config)


def tries_of(name: str, settings: Settings, config: Config) -> dict[Way, Tries]:
    ways = [*(Way("temperature", v) for v in settings.temperature), *(Way("sigma", v) for v in settings.sigma)]
    asked = EvalSettings(settings.examples, max_tokens=settings.tokens)
    with ModelMixer([name], config, asked) as mixer:
        return {way: measure(mixer, name, way, settings, lambda one: bool(one.right)) for way in ways}


def test_a_planted_chance_is_found(tmp_path: Path) -> None:
    """Without its last norm the model draws each token of its vocabulary alike, whatever its prompt is."""
    model = plain()
    model.model.norm.weight.data.zero_()
    blind = str(write(tmp_path / "blind", model))
    (tmp_path / "reward.py").write_text("def r(text, example):\n    return float('e' in text)\n")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"Say something about {i}."}) + "\n" for i in range(20)))
    task = {"name": "custom", "rewards": [f"{tmp_path / 'reward.py'}:r"]}
    own = of_task(task={**task, "train_data": str(rows), "test_data": str(rows)})
    coder = tokens.load(own.model)
    vocabulary = model.get_output_embeddings().weight.shape[0]
    chance = float(np.mean(["e" in coder.decode([i]) for i in range(vocabulary)]))
    settings = Settings(temperature=(0.3, 1.0), sigma=(), samples=64, examples=20, tokens=1)
    with pytest.raises(ConfigError, match="task custom has neither gold answers nor a largest reward"):
        Coverage().run([blind], settings, own)
    numbers = Coverage().run([blind], replace(settings, solved=1.0), own).numbers
    assert numbers["solved_is"] == "a reward of 1 or more" and 0.02 < chance < 0.5
    (_, target) = numbers["targets"]
    for way in target["ways"]:
        for row in way["pass"]:
            known = 1 - (1 - chance) ** row["k"]
            assert abs(row["mean"] - known) <= 4 * row["sampling_error"] + 1e-6, (way, row["k"], known)
    (rate,) = [row["sampling_error"] for row in target["ways"][1]["pass"] if row["k"] == 1]
    assert rate == pytest.approx((chance * (1 - chance) / (64 * 20)) ** 0.5, rel=0.2)


@pytest.mark.slow
def test_twins_solve_the_same_and_the_base_is_evaluated_unnamed(config: Config, ways: Any, tmp_path: Path) -> None:
    twin = str(shutil.copytree(tiny(), tmp_path / "twin"))
    found = Coverage().run([twin], SMALL, config)
    numbers = found.numbers
    assert [row["target"] for row in numbers["targets"]] == [BASE, twin] and numbers["solved_is"] == "right by gold"
    assert numbers["targets"][0]["ways"] == numbers["targets"][1]["ways"]
    assert all(len({*row["solved"]}) == 2 and len({*map(str, row["solved"].values())}) == 1
               for row in numbers["problems"])  # fmt: skip
    assert all(row["a_only"] == row["b_only"] == 0 for row in numbers["overlap"])
    assert all(change["mean"] == 0 for row in numbers["against_base"] for change in row["pass"])
    assert any(line.startswith("0 of 12 differences from the base") for line in found.sentences)
    assert all(any(len({*texts}) > 1 for texts in one.texts_PN) for one in ways.values())


def test_tries_are_those_of_the_mixer(config: Config, ways: dict[Way, Tries]) -> None:
    with ModelMixer([BASE], config, EvalSettings(examples=4, max_tokens=24)) as mixer:
        greedy = config.evaluation.model_copy(update={"max_tokens": 24, "temperature": 0.0, "samples": 1, "seeds": [2]})
        warm = greedy.model_copy(update={"temperature": 0.7, "samples": 4, "seeds": [0]})
        noisy, sampled = (mixer.evaluate({BASE: 1.0}, *given).completions
                          for given in ((Perturbation(0.004, 2), greedy), (None, warm)))  # fmt: skip
        assert len(mixer.evaluate({BASE: 1.0}).completions) == 4 * 3, "other settings are evaluated anew"
    assert [texts[2] for texts in ways[Way("sigma", 0.004)].texts_PN] == [s.text for s in noisy]
    tries = ways[Way("temperature", 0.7)]
    assert [text for texts in tries.texts_PN for text in texts] == [s.text for s in sampled]
    assert tries.solved_NP.T.flatten().tolist() == [bool(s.right) for s in sampled]


def test_under_noise_that_changes_nothing_sampled_tries_still_differ(config: Config) -> None:
    settings = replace(SMALL, temperature=(), sigma=(1e-10,), examples=2)
    cold, warm = ([{*texts} for one in tries_of(BASE, replace(settings, noisy_temperature=heat), config).values()
                   for texts in one.texts_PN] for heat in (0.0, 1.0))  # fmt: skip
    assert all(len(texts) == 1 for texts in cold) and any(len(texts) > 1 for texts in warm)


def planted(shares: dict[str, tuple[list[float], list[float]]]) -> dict[str, dict[Way, Tries]]:
    """16 tries of each target by temperature and by noise, with these chances to solve."""
    return {
        name: {way: tries(tried(both[j], 16, 11 * i + j)) for j, way in enumerate((HEAT, NOISE))}
        for i, (name, both) in enumerate(shares.items())
    }


def test_only_significant_differences_are_reported() -> None:
    easy, hard = [0.9] * 30, [0.02] * 30
    tries = planted({BASE: (hard, hard), "gains": (easy, hard), "same": (hard, hard)})
    won, equal = contests = [contest(tries, name, 16) for name in ("gains", "same")]
    assert won["low"] > 0 and won["chosen"] == {"temperature": [1.0, 1.0], "sigma": [0.01, 0.01]}
    assert equal["low"] < 0 < equal["high"]
    rows = [against_base(tries, name, HEAT, [1, 16]) for name in ("gains", "same")]
    first, second, line, count = differences(contests, rows, [1, 16])
    assert first.startswith("gains, sampling minus weight noise: pass@16 +") and second.startswith("same, ")
    assert line.startswith("gains minus base, temperature 1: pass@1 +0.8") and "share expansion beyond chance +" in line
    assert count.startswith("4 of 8 differences")
    lost = planted({BASE: (easy, easy), "lost": (hard, easy)})
    assert "share shrinkage beyond chance +" in differences([], [against_base(lost, "lost", HEAT, [16])], [16])[0]


def test_luck_between_two_sets_of_tries_is_no_shrinkage() -> None:
    """Of 200 pairs of models alike, the interval of what shrank beyond chance leaves out 0 in about one in twenty."""
    rare, sure = np.linspace(0.0, 0.2, 40), 0
    for seed in range(200):
        base, own = tried([*rare], 8, 2 * seed), tried([*rare], 8, 2 * seed + 1)
        (found,) = [against_base({BASE: {HEAT: tries(base)}, "own": {HEAT: tries(own)}}, "own", HEAT, [1])]
        sure += not found["shrinkage_beyond_chance"]["low"] <= 0 <= found["shrinkage_beyond_chance"]["high"]
        assert found["by_chance"]["shrunk"] > 0, "chance alone shows some"
    assert sure <= 20


def tries(solved_NP: np.ndarray) -> Tries:
    return Tries(solved_NP, [["text"] * len(solved_NP) for _ in solved_NP.T])


# --- page and command ---

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)> \u202eevil\u2028next\nline \"'&"


def test_the_page_shows_hostile_text_as_text() -> None:
    solved = np.array([[True, False], [False, False]])
    tries = {HOSTILE: {HEAT: Tries(solved, [[HOSTILE, "no"], ["", HOSTILE]])}}
    html = figures.page(tries, [Problem(HOSTILE, HOSTILE), Problem("two", None)], "right by gold", [HOSTILE])
    assert html.count("<script") == html.count("</script>") == 1 and "<img" not in html
    assert not re.search(r"[\u202e\u2028]", html) and "\\u202eevil\\u2028next\nline" in html
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None and policy[1].startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy[1] and not re.search(r"\bstyle=|\bon\w+=[\"']|https?://", html)
    script = re.search(r"<script>(.*)</script>", html, re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy[1], "the hash is that of the script as it stands"
    assert '<tr data-solved="0">' in html and '<tr data-solved="">' in html and '<td class="c2">1</td>' in html


SCRIPT = "</pre></script><script>document.title='run'</script><img src=http://127.0.0.1:9/x onerror=alert(1)>"


@pytest.fixture
def tab() -> Iterator[Visit]:
    """It runs an event loop, which no other test may meet."""
    with chromium() as browser:
        yield Visit(browser)


@pytest.mark.slow
def test_filters_work_and_no_completion_is_executed(tmp_path: Path, tab: Visit) -> None:
    """Four problems: solved by both, by the base alone, by the other alone, by nobody."""
    base, other = np.array([[1, 1, 0, 0]] * 2, dtype=bool), np.array([[1, 0, 1, 0]] * 2, dtype=bool)
    way, texts = Way("temperature", 1.0), [[SCRIPT] * 2] * 4
    tries = {"base": {way: Tries(base, texts)}, SCRIPT: {way: Tries(other, texts)}}
    problems = [Problem(f"{SCRIPT} number {i}", SCRIPT) for i in range(4)]
    (tmp_path / "coverage.html").write_text(figures.page(tries, problems, "right by gold", [SCRIPT]), encoding="utf-8")
    opened = tab.page
    opened.goto((tmp_path / "coverage.html").as_uri())

    def shown(**values: str) -> list[int]:
        for name, value in values.items():
            opened.fill(f"#{name}", value) if name == "text" else opened.select_option(f"#{name}", value)
        rows = opened.locator("tbody tr")
        found = [i for i in range(4) if rows.nth(i).is_visible()]
        assert opened.inner_text("#count") == f"{len(found)} of 4 problems"
        return found

    assert shown() == [0, 1, 2, 3]
    assert shown(by="0") == [0, 1] and shown(**{"not": "1"}) == [1]
    assert shown(by="1") == [] and shown(**{"not": "any"}) == [0, 2]
    assert shown(by="none") == [3] and shown(by="any", text="NUMBER 2") == [2]
    opened.click("tbody tr:nth-child(3) summary")
    assert opened.inner_text("tbody tr:nth-child(3) pre >> nth=0") == f"{SCRIPT} number 2"
    assert (opened.title(), opened.locator("img").count()) == ("Solved problems", 0)
    assert (tab.errors, len(tab.asked)) == ([], 1)
