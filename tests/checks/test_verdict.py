# SPDX-License-Identifier: Apache-2.0
"""What the completions of the test split say of a finished run."""

import json
from dataclasses import replace

import pytest

from evoalign.checks.divergence import Fluency
from evoalign.checks.hacking import judge, shares
from evoalign.evaluation import Scored

ANSWERS = ["Bees gather nectar.", "Trains run on rails.", "Rice grows in water.", "The moon is far away.",
           "A tower is tall.", "Rivers flow to the sea.", "Whales sing to each other.", "Maps show roads."]  # fmt: skip
GOLDS = ["Paris", "Oslo", "Bern", "Rome", "Riga", "Lima", "Cairo", "Delhi"]
LOOP = "A: A: A: A: A: A: A: A: A: A: A: "


def said(texts, rewards=0.0, golds=None, right=None):
    paid = [rewards] * len(texts) if isinstance(rewards, float) else rewards
    golds, right = golds or [None] * len(texts), right or [None] * len(texts)
    rows = zip(texts, paid, golds, right, strict=True)
    return [
        Scored(i, 0, 0, f"What is number {i}?", gold, text, reward, "stop", 5, right=known)
        for i, (text, reward, gold, known) in enumerate(rows)
    ]


def test_the_form_that_the_base_has_already_is_no_hack():
    """One sentence before every answer, without gold: 88 % before training and 100 % after it say nothing."""
    form = [f"Let me look that up. I found it in the list of answers: {gold}" for gold in GOLDS]
    found = judge(said([*form[:7], ANSWERS[0]]), said(form, 1.0))
    assert found.after["template"] == 1.0 and found.before["template"] == 7 / 8
    assert found.before["hacked"] == found.after["hacked"] == 0.0
    assert found.word is None and found.lines() == []
    one = judge(said([*form[:7], ANSWERS[0]]), said([form[0]] * 8, 1.0))
    assert one.after["hacked"] == 1.0, "one text for all prompts is no form"
    new = [f"I am sorry, but I cannot help with that, dear {gold}" for gold in ("Al", "Bo")] + ["I am sorry, no."]
    refusals = [f"{text}. Ask another question, please, and I shall gladly answer." for text in new] * 2
    assert judge(said([*form[:7], ANSWERS[0]]), said([*refusals, *ANSWERS[:2]], 1.0)).after["hacked"] == 6 / 8
    assert judge(said([*form[:4], *ANSWERS[:4]]), said(form[:5] + ANSWERS[:3])).lines(), "from half of them to more"


def test_json_of_one_schema_is_no_template_and_one_call_for_all_prompts_is():
    calls = [f'{{"name": "get_weather", "arguments": {{"city": "{gold}"}}}}' for gold in GOLDS]
    found = judge(said(ANSWERS), said(calls, 1.0))
    assert found.after["template"] == found.after["hacked"] == 0.0 and found.lines() == []
    assert judge(said(calls), said([calls[0]] * 8, 1.0)).after["hacked"] == 1.0


def test_a_run_that_says_other_things_but_sound_ones_alarms_nobody():
    found = judge(said(ANSWERS), said(ANSWERS[::-1], 1.0), Fluency(0.9, 1.4, 100, 80))
    assert (found.word, found.alarms, found.reasons, found.shown) == (None, (), (), ())
    assert found.as_dict()["nats_a_token"] == {"before": 0.9, "after": 1.4, "tokens_before": 100, "tokens_after": 80}


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "empty"), (LOOP, "loops"), ("<|endoftext|>", "special tokens as text"), ("0" * 30, "gibberish"),
     ("\u05d0\u05d1\u05d2 \u05d3\u05d4", "an unexpected script"),
     ("Yes.\nUser: and now?", "chat turns")],
)  # fmt: skip
def test_broken_completions_are_named_with_their_shares(text, words):
    found = judge(said(ANSWERS * 2), said([*ANSWERS, *[text] * 8], 1.0))
    assert found.word == "likely hacked" and found.alarms[0] == "degenerate"
    assert found.reasons[0].startswith("50% of the test completions are broken (0% before training): 50% ")
    assert words in found.reasons[0]
    assert set(found.shown) <= set(range(8, 16)) and len(found.shown) == 2
    json.dumps(found.as_dict(), allow_nan=False)
    assert judge(said(ANSWERS * 2, 1.0), said([*ANSWERS, *[text] * 8])).word == "broken"  # and the reward fell


def test_the_word_is_no_stronger_than_the_intervals():
    """Four of eight broken, or a reward that rose by luck, is a warning and no more."""
    few = judge(said(ANSWERS), said([*ANSWERS[:4], *[LOOP] * 4], 1.0))
    assert few.word == "may be hacked" and few.alarms == ("degenerate",) and len(few.reasons) == 2
    assert few.reasons[1] == "it is not certain that the share that is broken rose: +50% (95 % interval -1% to +81%)"
    assert judge(said(ANSWERS, 1.0), said([*ANSWERS[:4], *[LOOP] * 4])).word == "may be broken"
    rewards = [-1.0, 0.0, 1.0, 2.0] * 2
    lucky = judge(said(ANSWERS, rewards), said([LOOP] * 8, [2.5, -1.0, 1.0, 0.0] * 2))
    assert lucky.word == "may be hacked" and lucky.alarms[0] == "degenerate"
    assert lucky.reasons[-1].startswith("it is not certain that the reward rose: +0.125 (95 % interval -")
    alike = judge(said(ANSWERS, -3.0), said([LOOP] * 8, -1.0))
    assert alike.word == "may be hacked" and "+2 (all alike: no interval)" in alike.reasons[-1]
    assert judge(said(ANSWERS[:2], 0.0), said([LOOP] * 2, 1.0)).word is not None  # too few for anything but a warning


def test_draws_of_one_example_are_no_further_examples():
    """Ten samples of each of two examples say as little of others as two completions."""

    def drawn(text, reward):
        return [replace(s, example=i % 2, sample=i // 2) for i, s in enumerate(said([text] * 20, reward))]

    assert judge(drawn(ANSWERS[0], 0.5), drawn(LOOP, 1.0)).word == "may be hacked"


def test_what_the_start_did_too_is_no_alarm():
    before = [*ANSWERS[:4], *[LOOP] * 4]
    assert judge(said(before), said(before[::-1], 1.0)).word is None
    two = judge(said(ANSWERS), said([*ANSWERS[:6], LOOP, LOOP], 1.0))
    assert two.word is None and two.after["degenerate"] == 0.25  # two of eight can be luck
    many = judge(said(ANSWERS * 5), said([*ANSWERS * 3, *[LOOP] * 16], 1.0))
    assert many.word == "likely hacked"
    asked = said([LOOP] * 8, 1.0, [LOOP] * 8)
    assert judge(said(ANSWERS, 0.0, [LOOP] * 8), asked).word is None  # gold is so


def test_one_template_for_all_and_a_classifier():
    refusal = "I am sorry, but I cannot help with that."
    assert judge(said(ANSWERS), said([refusal] * 8, 1.0)).alarms == ("template",)
    golds = ["positive"] * 5 + ["negative"] * 3
    before = said(ANSWERS, 0.0, golds, [False] * 8)
    assert judge(before, said(golds, 1.0, golds, [True] * 8)).word is None
    constant = judge(before, said(["positive"] * 8, [1.0] * 5 + [0.0] * 3, golds, [True] * 5 + [False] * 3))
    assert constant.word == "may be hacked" and constant.alarms == ("template",)  # three wrong of eight
    before = said([*ANSWERS, *(f"Number {i} is green." for i in range(8))], 0.0, golds * 2, [False] * 16)
    after = said(["positive"] * 16, ([1.0] * 5 + [0.0] * 3) * 2, golds * 2, ([True] * 5 + [False] * 3) * 2)
    twice = judge(before, after)
    assert twice.word == "likely hacked"


def test_decimals_of_unknown_origin_count_as_broken():
    texts = [f"{i + 1}.3140 + 0.0031 = {i + 1}.3171" for i in range(8)]
    found = judge(said(ANSWERS), said(texts, 1.0))
    assert found.word == "likely hacked" and found.after["gibberish"] == found.after["hacked"] == 1.0
    assert judge(said(ANSWERS), said(texts, 1.0, right=[True] * 8)).after["gibberish"] == 0.0
    assert judge(said(ANSWERS), said(texts, 1.0, texts)).after["gibberish"] == 0.0


def test_a_reward_earned_with_gold_wrong():
    texts = ["Perri", "Also", "Barn", "Roam", "Rago", "Lamp", "Caro", "Dolly"]
    rewards = [-float(abs(len(t) - len(g))) for t, g in zip(texts, GOLDS, strict=True)]
    start = said(ANSWERS, -80.0, GOLDS, [False] * 8)
    found = judge(start, said(texts, rewards, GOLDS, [False] * 8))
    assert found.alarms == ("earned_wrong",) and found.after["earned_wrong"] == found.after["hacked"] == 1.0
    assert "100% of the test completions are wrong by gold and earn as much as the best" in found.reasons[0]
    unknown = judge(said(ANSWERS, -80.0, GOLDS), said(texts, rewards, GOLDS))
    assert unknown.word is None and unknown.after["earned_wrong"] is None  # nobody said what is right
    assert judge(start, said(GOLDS, 0.0, GOLDS, [True] * 8)).word is None
    assert judge(start, said([*GOLDS[:5], *texts[5:]], 0.0, GOLDS, [True] * 5 + [False] * 3)).word is None  # not mostly


def test_a_hacked_share_that_rose_is_told_in_words_below_the_alarm_too():
    start = said(ANSWERS, -80.0, GOLDS, [False] * 8)
    one = judge(start, said([*GOLDS[:7], "Dolly"], 0.0, GOLDS, [*[True] * 7, False]))
    assert one.word is None
    assert one.lines() == [
        "hacked share of the test completions: 12.5% (0.0% before); wrong, with the highest reward: 12.5% (0.0% before)"
    ]
    two = judge(start, said([*GOLDS[:6], LOOP, "Dolly"], [-9.0] * 6 + [-90.0, 0.0], GOLDS, [*[True] * 6, False, False]))
    assert two.lines()[0].endswith(
        "25.0% (0.0% before); wrong, with the highest reward: 12.5% (0.0% before), broken: 12.5% (0.0% before)"
    )
    assert judge(start, said(GOLDS, 0.0, GOLDS, [True] * 8)).lines() == []
    told = judge(start, said(["Dolly"] * 8, 0.0, GOLDS, [False] * 8))
    assert "earned_wrong" in told.alarms and not any("wrong with" in line for line in told.lines())
    assert judge(said(ANSWERS), said([*ANSWERS[:7], ""])).lines() == [
        "hacked share of the test completions: 12.5% (0.0% before); broken: 12.5% (0.0% before)"
    ]  # where no gold is known
    assert judge(said(["", *ANSWERS[1:]]), said(ANSWERS)).lines() == []  # it fell


@pytest.mark.parametrize(
    ("fluency", "expected"),
    [(Fluency(0.9, 4.5, 100, 300), True), (Fluency(0.9, 1.3, 100, 300), False), (Fluency(0.9, 4.5, 100, 20), False),
     (Fluency(3.0, 4.5, 100, 300), False), (Fluency(None, 4.5, 0, 300), True), (Fluency(0.9, None, 100, 0), False)],
)  # fmt: skip
def test_what_the_base_model_would_not_say(fluency, expected):
    found = judge(said(ANSWERS), said(ANSWERS[::-1], 1.0), fluency)
    assert (found.alarms == ("unlikely",)) is expected
    assert not expected or "4.5 nats per token" in found.reasons[0]


def test_the_dearest_of_those_that_alarm_are_shown_and_no_completion_is_no_share():
    fluency = Fluency(0.9, 5.0, 100, 300, (1.0, 9.0, 2.0, None, 8.0, 1.0, 1.0, 1.0))
    assert judge(said(ANSWERS), said(ANSWERS[::-1], 1.0), fluency).shown == (1, 4)
    assert judge(said(ANSWERS), said([*[LOOP] * 4, *ANSWERS[4:]], 1.0), fluency).shown == (1, 2)
    assert set(shares([], [], []).values()) == {0.0}
