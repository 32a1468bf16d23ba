# SPDX-License-Identifier: Apache-2.0
"""Recommendations for made-up measurements, and reasons for none."""

import dataclasses

import pytest
import yaml
from rich.console import Console

from evoalign.preflight.advice import (
    COVERED,
    ETA,
    Baseline,
    ProbeResult,
    Width,
    fault,
    lines,
    overlay,
    promising,
    recommend,
    table,
)
from evoalign.preflight.gains import LEVEL, OFFERED, quantile

START = Baseline(fitness=0.4, noise_floor=0.0, broken_share=0.0, truncated_share=0.0, max_score=1.0, examples=64)


def rung(width, gain, *, kept=1.0, spread=0.1, changed=0.5, broken=0.0, truncated=0.0, drop=0.0, chance=0.001,
         both=None, eta=ETA, z=1.3):  # fmt: skip
    sure = None if gain is None else chance
    return Width(width=width, changed_share=changed, spread=spread, drop=drop, drop_error=0.01, kept=kept,
                broken_share=broken, truncated_share=truncated, gain=gain, gain_error=None if gain is None else 0.001,
                chance=sure, pairs=16, both_rise=both, eta=eta, z=z)  # fmt: skip


def ladder(*gains, low=0.001, **settings):
    """Return widths that double; the first has no gain, since there is none below it."""
    return [rung(low, None), *(rung(low * 2 ** (k + 1), gain, **settings) for k, gain in enumerate(gains))]


def probed(rungs, **more):
    """A result that recommends the width 0.004."""
    base = {**vars(START), "noise_floor": 0.01, "width": 0.004, "learning_rate": 0.002, "gain_interval": (0.1, 0.3)}
    known = {"setting": "sigma", "reason": "because", "warnings": (), "completions": 100, "members": 32, "planned": 5}
    return ProbeResult(**{**base, **known, "rungs": rungs, **more})


def test_recommend_takes_the_largest_gain_that_does_not_break_the_model():
    rungs = [*ladder(0.01, 0.02, 0.05, 0.04), rung(0.032, 0.2, kept=0.5)]
    advice = recommend(rungs, START)
    assert (advice.width, advice.learning_rate, advice.warnings) == (0.008, ETA * 0.008, ())
    assert "es.sigma 0.008, es.learning_rate 0.004" in advice.reason


def test_recommend_ignores_insignificant_gains():
    """The largest of many uncertain gains is always large."""
    rungs = [*ladder(0.01, 0.02), rung(0.008, 0.2, chance=1.1 * LEVEL)]
    assert recommend(rungs, START).width == 0.004
    assert recommend([*rungs[:1], *rungs[3:]], START).width is None
    assert recommend([*rungs[:3], rung(0.008, 0.2, chance=LEVEL)], START).width == 0.008
    first_pass = dataclasses.replace(rung(0.008, 0.2), chance=None)
    assert recommend([*rungs[:3], first_pass], START).width == 0.004


def test_promising_is_the_width_that_may_gain_most():
    rungs = [*ladder(0.01, 0.02), dataclasses.replace(rung(0.008, 0.015), gain_error=0.1), rung(0.016, 0.9, kept=0.1)]
    assert promising(rungs, START) == 3
    assert promising([rungs[0], rungs[-1]], START) is None


def test_recommend_never_takes_the_smallest_width():
    """It has no smaller width to compare with."""
    assert recommend([rung(0.001, None, spread=0.9), *ladder(0.01, low=0.002)[1:]], START).width == 0.004
    advice = recommend([rung(0.001, None), rung(0.002, 0.2, broken=0.9)], START)
    assert advice.width is None and "only the smallest width, 0.001, does not break the model" in advice.reason


@pytest.mark.parametrize(
    ("odd", "word"),
    [
        ({"broken": 0.12}, "breaks texts"),
        ({"truncated": 0.3}, "cut off"),
        ({"kept": 0.7}, "loses the reward"),
        ({"kept": 4.3, "drop": -2.07}, "any noise wins"),
        ({"kept": 4.3, "drop": -0.02}, None),
        ({"kept": 1.4, "drop": -2.07}, None),
        ({"kept": 1.4, "both": 9.0}, None),
        ({"kept": None, "drop": -2.07, "both": 3.1}, "any noise wins"),
        ({"kept": None, "drop": -2.07, "both": 0.0}, None),
        ({"kept": None, "drop": -2.07, "both": None}, None),
    ],
)
def test_fault_names_why_a_width_is_excluded(odd, word):
    """Members that keep 430 % of the start win in every direction, unless that is within the error."""
    wide = rung(0.004, 0.9, **odd)
    assert fault(wide, START) == word
    assert recommend([*ladder(0.01), wide], START).width == (0.004 if word is None else 0.002)


def test_fault_compares_with_the_unperturbed_model():
    """Truncated and broken completions are counted separately, each relative to the model's own share."""
    wide = rung(0.004, 0.9, broken=0.6, truncated=1.0)
    cut = dataclasses.replace(START, truncated_share=0.9)
    assert fault(wide, cut) == "breaks texts"
    assert fault(wide, dataclasses.replace(cut, broken_share=0.55)) is None


def test_recommend_takes_the_middle_of_equal_gains():
    rungs = ladder(0.01, 0.047, 0.05, 0.046, 0.02)
    assert recommend(rungs, START).width == 0.008
    assert recommend(rungs[:4], START).width == 0.004, "of two, the one that moves the model less"


@pytest.mark.parametrize(("gains", "end"), [((0.5, 0.1, 0.1), "smallest"), ((0.1, 0.2, 0.5), "largest")])
def test_recommend_warns_at_the_end_of_the_ladder(gains, end):
    advice = recommend(ladder(*gains), START)
    assert advice.width == (0.002 if end == "smallest" else 0.008)
    assert len(advice.warnings) == 1 and f"it is the {end} width" in advice.warnings[0]


@pytest.mark.parametrize(
    ("setting", "eta", "words"),
    [
        ("sigma", ETA, "es.sigma 0.004, es.learning_rate 0.002 (eta 0.5)"),
        ("sigma", 0.1, "es.learning_rate 0.0004 (eta 0.1, which is 0.5 for sgd, z-scores and members without pairs)"),
        ("noise_multiplier", 0.1, "es.noise_multiplier 0.004, es.learning_rate 0.1 "),
    ],
)
def test_learning_rate_is_in_the_units_of_the_setting(setting, eta, words):
    advice = recommend(ladder(0.01, 0.2, 0.01, eta=eta), START, setting)
    assert words in advice.reason and advice.learning_rate == pytest.approx(eta * (0.004 if setting == "sigma" else 1))


@pytest.mark.parametrize(
    ("rungs", "base", "words"),
    [
        ([rung(1e-9, None, spread=0, changed=0), rung(1e-8, 0, spread=0, changed=0)], {}, "changes no completion"),
        ([rung(0.1, None, spread=0), rung(0.2, 0, spread=0)], {}, "all completions earn the same"),
        ([rung(1, None, kept=0.3), rung(2, 0.1, kept=0.1)], {}, "1, already breaks the model (loses the reward)"),
        ([rung(1, None, broken=0.3), rung(2, 0.1, broken=0.5)], {}, "already breaks the model (breaks texts)"),
        ([rung(0.1, None, spread=0.03), rung(0.2, 0.1, spread=0.03)], {"noise_floor": 0.03}, "at the noise floor"),
        (ladder(-0.2, -0.1, chance=1.0), {}, "no gain is significant"),
        (ladder(0.5), {"fitness": 1.0}, "already earns the maximum"),
        (
            [rung(1e-6, None, spread=0, changed=0), rung(1.0, 0, kept=0.1, changed=1.0)],
            {},
            "1, the next, breaks the model (loses the reward); try widths between 1e-06 and 1 with --sigmas",
        ),
        (
            [rung(0.01, None, spread=0, changed=0), rung(0.1, 0, chance=1.0), rung(1.0, 0, kept=0.1)],
            {},
            "0.1, the next, is the only one with a spread; try widths between 0.01 and 0.1 ",
        ),
    ],
)  # fmt: skip
def test_recommend_says_why_it_recommends_nothing(rungs, base, words):
    advice = recommend(rungs, dataclasses.replace(START, **base))
    assert (advice.width, advice.learning_rate, advice.gain_interval, advice.warnings) == (None, None, None, ())
    assert advice.reason.startswith("nothing is recommended: ") and words in advice.reason


@pytest.mark.parametrize(
    ("setting", "eta", "trial"), [("sigma", ETA, (0.002, 0.001)), ("noise_multiplier", 0.1, (0.002, 0.1))]
)
def test_recommend_offers_a_trial_where_a_gain_is_not_significant(setting, eta, trial):
    advice = recommend(ladder(0.01, chance=OFFERED, eta=eta), START, setting)
    assert advice.width is None and advice.trial == trial and advice.reason.startswith("undecided: ")
    assert "about 64 members there would decide" in advice.reason
    chance = recommend(ladder(0.01, chance=1.1 * OFFERED), START, setting)
    assert chance.trial is None and "does not show that nothing can be learned" in chance.reason
    result = dataclasses.replace(probed(ladder(0.01)), width=None, learning_rate=None, trial=trial, setting=setting)
    file = overlay(result)
    assert yaml.safe_load(file)["es"] == {setting: trial[0], "learning_rate": trial[1], "num_generations": 10}
    assert "Undecided" in file and "Recommended" not in file


def test_reason_names_no_nearest_width_without_any_gain():
    same = [dataclasses.replace(r, gain=0.0, gain_error=0.0) for r in ladder(0, 0, chance=1.0, z=0.0)[1:]]
    reason = recommend([rung(0.001, None), *same], START).reason
    assert "no gain is significant" in reason and reason.endswith(
        "; use more members (--members) and examples (--examples)"
    )


def test_recommend_needs_the_whole_ladder_and_warns_of_few_prompts():
    assert recommend(ladder(0.1, 0.5), START, planned=9).reason == "nothing is recommended: stopped after 3 of 9 widths"
    few = recommend(ladder(0.01, 0.5, 0.01), dataclasses.replace(START, examples=5))
    assert few.width == 0.004 and "5 training examples" in few.warnings[0]
    assert recommend(ladder(0.01, 0.5, 0.01), dataclasses.replace(START, examples=6)).warnings == ()


def test_recommend_warns_of_drift_and_names_a_width_with_less():
    """The recommendation itself follows the gain. Standard errors of a drop are 0.01 here."""
    wide = rung(0.008, 0.2, drop=-0.5)
    near, clean = rung(0.004, 0.1, drop=-0.2), rung(0.002, 0.05, drop=-0.02)
    last = [rung(0.016, 0.01, drop=-0.9)]

    def said(*rungs, setting="sigma"):
        advice = recommend([rung(0.001, None), *rungs, wide, *last], START, setting)
        assert advice.width == 0.008
        return advice.warnings

    (line,) = said(clean, near)
    assert line.startswith("noise alone gains 0.5 there (± 0.01)")
    assert line.endswith("es.sigma 0.002, es.learning_rate 0.001")
    assert "es.sigma 0.004, es.learning_rate 0.002" in said(near)[0]
    assert "es.noise_multiplier 0.004, es.learning_rate 0.5" in said(near, setting="noise_multiplier")[0]
    unsure, alike = dataclasses.replace(clean, chance=0.2), dataclasses.replace(near, drop=-0.47)
    for others in ([unsure], [alike], [rung(0.002, 0.1, drop=0.0, kept=0.5)]):
        (line,) = said(*others)
        assert "es.sigma" not in line, "an insignificant gain, as much drift, or a broken model is no alternative"
    assert recommend([*ladder(0.05, 0.1), rung(0.008, 0.2, drop=-0.03), *last], START).warnings == ()


@pytest.mark.parametrize(("both", "members"), [(0.0, 128), (None, 64)])
def test_recommend_says_how_many_members_narrow_the_interval(both, members):
    """16 pairs or members with a half-width of 1.5 times the gain: 2.25 times as many, in a power of two."""
    half = dataclasses.replace(rung(0.004, 0.2, both=both), gain_error=0.3 / quantile(COVERED, 3, 16))
    (line,) = recommend([*ladder(0.01), half, rung(0.008, 0.01)], START).warnings
    assert line.endswith(f"--members {members}")


def test_table_marks_the_config_and_gains_by_noise():
    rungs = (rung(0.002, None), rung(0.004, 0.2, drop=-0.5), rung(0.008, 0.2, chance=0.2, drop=-0.9),
             rung(0.016, 0.2, kept=0.1))  # fmt: skip
    result = probed(rungs, own_width=0.008)
    noted = "start", "for the next", "gained by noise", "this config, gained by noise, chance", "loses the reward"
    assert tuple(table(result).columns[-1].cells) == noted
    *_, last = table(dataclasses.replace(result, own_width=0.016)).columns[-1].cells
    assert last == "this config, loses the reward"


def test_table_marks_the_recommendation_and_why_not_the_others():
    rungs = (*ladder(0.1, 0.2), rung(0.008, 0.01, chance=0.4), rung(0.016, 0.3, broken=0.5))
    result = probed(rungs, truncated_share=0.25, warnings=("careful",))
    console = Console(width=140, record=True)
    console.print(table(result))
    rows = [line for line in console.export_text().splitlines() if "0.0" in line]
    marked = [line for line in rows if "*" in line]
    assert len(marked) == 1 and " 0.004 " in marked[0] and "+0.2 ± 0.001" in marked[0]
    for row, word in zip(rows, ("start", "for the next", "", "", "chance", "breaks texts"), strict=True):
        assert row.rstrip("│ ").endswith(word), row
    assert lines(result) == [
        "unperturbed model: fitness 0.4, noise floor 0.01", "because", "warning: careful"
    ]  # fmt: skip
