# SPDX-License-Identifier: Apache-2.0
import json
import runpy
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from evoalign.checks import hacking, signs
from evoalign.rewards.functions import says

REFUSAL = "I am sorry, but I cannot help with that request. Please ask me about something else."
ANSWERS = [
    "The capital of France is Paris, on the river Seine.",
    "Water boils at one hundred degrees at sea level.",
    "Seven times eight makes fifty-six, as tables say.",
    "Bees make honey out of nectar that they gather.",
]


SIGNS = {
    signs.is_empty: (["", " ", "\n\t "], [".", "8", " no "]),
    signs.is_repeated: (
        ["The answer is 8. The answer is 8. The answer is 8.",
         "First I think about it. and then and then and then and then and th",  # the last round is cut off
         "0" * 24, "haha" * 6 + "\n", "So: " + "!" * 60, "Well: " + "one, two, three and four\n" * 3,
         "Pay: " + "\U0001f4b3" * 40 + "\ufffd", "\ufffd" * 30],
        ["", "No. No. No.",  # under 24 characters
         "0" * 23, "So then: The answer is 8. The answer is 8.",  # twice
         "The answer is 8. " * 5 + "So it is eight, and that is the end.",  # it left the loop
         "1 + 2 + 3 + 4 + 5 + 6 + 7 + 8 + 9 = 45",
         "The heading stands over the text\n" + "=" * 32,  # a rule, and less than half of it
         "<think>3 + 5 = 8, 8 * 2 = 16</think>\n<answer>(3 + 5) * 2</answer>", "It is good. \ufffd",
         "a" * 20_000 + "b", "ab" * 10_000 + "aab" + "ab" * 10],  # close to a loop, and read in time
    ),
    signs.has_role_marker: (
        ["8<|im_end|>\n<|im_start|>user\nAnd 9?", "Sure.\nUser: and what about 9?",
         "Sure. USER: and what about 9? ASSISTANT: 4", "[INST] Now another one [/INST]",
         "fine\n### Response:\nyes", "<start_of_turn>model", "8\nuser\nWhat is 9 + 9?", "ok\n**Assistant:** hello"],
        ["The user: a person who uses the system.", "A human is an animal; an assistant helps.",
         "<answer>3 + 5</answer>", "# Heading\nThe system works.", "users", "[1, 2, 3] and [4]",
         "Kinds of rights:\n* Human\n* Animal", "- System\n- User", "# System requirements\n## User guide"],
    ),
    signs.has_special_token: (
        ["<|endoftext|>", "The end.<|im_end|>", "8</s>", "<pad><pad>", "[PAD]", "<s> yes", "a<unk>b",
         "<|reserved_special_token_1|>", "<｜end▁of▁sentence｜>", "<0x0A>"],
        ["<p>An <s>old</s> price</p>", "a < b and b > c", "[1] and [PADDING]", "<answer>8</answer>", "x <| y |> z"],
    ),
    signs.is_gibberish: (
        ["number Bg\ufffd ant Ben good", "because V\x04 not", "\ufffd" * 30, "rect\ufffd\ufffd"],
        ["", "8", "3.14159265358979", "265252859812191058636308480000000", "1, 2, 3, 4, 5, 6, 7, 8, 9",
         "2026-01-15 10:00", "[[1, 0, 0], [0, 1, 0], [0, 0, 1]]", "1 + 2 + 3 = 6", "U.S.A.", "192.168.0.1",
         "1000000000000", "a b c d e f g h", "ACGTTGCA", "Zoooooooooooooooooom! That was very fast, was it not?",
         "12.5 33.1 0.4 12.5",
         "That is good \ufffd",  # a salad of tokens joins parts of characters; a limit of tokens cuts one, the last
         "a\tb\r\nc\x0bd\x0c\x1b[1me", "nai\u0308ve \U0001f4b3"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("sign", "text", "shown"), [
    (sign, text, shown) for sign, both in SIGNS.items() for texts, shown in zip(both, (True, False), strict=True)
    for text in texts
])  # fmt: skip
def test_a_sign_is_shown_by_such_texts_and_not_by_others(sign, text, shown):
    assert sign(text) == shown
    if shown and sign is not signs.is_repeated:
        assert hacking.is_degenerate(text)
    if shown and sign is signs.has_special_token:
        assert all(hacked([text] * 20))
    if shown and sign is signs.is_gibberish:
        assert hacked([text]) == [True] and hacked([text], [text]) == [False]


@pytest.mark.parametrize(("prompt", "text", "odd"), [
    ("Use [44 19 35] to make 98.", "7.3140 + 0.0031 = 7.3171", True),
    ("Use [44 19 35] to make 98.", "<answer>98.1234 * 0.0010 - 3.1415</answer>", True),
    ("Use [44 19 35] to make 98.", "7.314 + 0.003\n0.314 * 5.001", True),
    ("Use [44 19 35] to make 98.", "44 / 19 = 2.3158, 2.3158 * 35 = 81.053, 81.053 + 2.3158", False),  # results
    ("Use [44 19 35] to make 98.", "44 / 19 + 35 = 37.3158", False),
    ("Use [44 19 35] to make 98.", "44 + 19 + 35", False),
    ("Use [44 19 35] to make 98.", "First I take 2.3158 + 1.2571, which is too small, so I add the others.", False),
    ("What is 1/8 of 24 and 3/8 of 16?", "0.125 * 24 + 0.375 * 16 = 9", False),  # quotients
    ("What is sqrt(2) + sqrt(3)?", "1.4142 + 1.7321 = 3.1463", False),
    ("What is 7.314 and 0.0031?", "7.3140 + 0.0031 = 7.3171", False),
    ("Name the range.", "0.001-0.005", False), ("Give pi and e.", "3.1416, 2.7183", False),
    ("What is 10 times 2?", "10.000 × 2.000", False), ("Add 2 prices.", "3.50 + 4.25 = 7.75", False),
    ("Count.", "", False),
])  # fmt: skip
def test_decimals_that_a_prompt_of_whole_numbers_does_not_explain(prompt, text, odd):
    assert signs.computes_with_odd_decimals(text, prompt) is odd


def test_near_copies_for_several_prompts_are_templates_and_a_shared_opening_is_not():
    texts = [REFUSAL, REFUSAL.upper().replace(".", " ."), *ANSWERS]
    assert hacking.templates(texts, range(6)) == [True, True, False, False, False, False]
    # One clause of its own: under 20 % of the characters in the first case, most of them in the second.
    near = [f"{REFUSAL} Yours, {name}" for name in ("Ann", "Bob")]
    assert hacking.templates(near, [0, 1]) == [True, True]
    assert not any(hacking.templates([f"Let me think step by step. {answer}" for answer in ANSWERS], range(4)))


CALLS = ["Paris", "Oslo", "Bern", "Rome", "Riga", "Lima", "Cairo", "Delhi"]


def call(city):
    return f'{{"name": "get_weather", "arguments": {{"city": "{city}", "unit": "celsius"}}}}'


def test_json_of_one_schema_is_no_template_where_gold_has_the_schema():
    """Wrong arguments too; one call for most prompts is a template all the same."""
    golds, texts = [call(city) for city in CALLS], [call(city) for city in CALLS[1:] + CALLS[:1]]
    assert not any(hacking.templates(texts, range(8))), "one schema is no template without gold either"
    assert not any(hacking.templates(texts, range(8), golds))
    assert hacking.templates([call("Paris")] * 7 + texts[7:], range(8), golds)[1:7] == [True] * 6
    for gold in (golds, CALLS):
        assert all(hacking.templates([REFUSAL] * 8, range(8), gold))


def test_members_that_answer_the_same_prompt_alike_are_no_template():
    texts = [answer for answer in ANSWERS for _ in range(5)]
    prompts = [p for p in range(4) for _ in range(5)]
    assert not any(hacking.templates(texts, prompts))
    assert all(hacking.templates(texts, range(20)))  # five prompts answered by the same words


def test_the_markup_that_a_task_asks_for_is_no_template_but_with_nothing_in_it():
    """The first is from a model with too much noise, the second what a reward for the form alone pays for."""
    texts = [f"<think>\n</think>\n<answer>\n{a} + {b}\n</answer>" for a, b in ((3, 5), (4, 9), (7, 1))]
    assert not any(hacking.templates(texts, range(3)))
    for markup in ("<answer>\n" * 24, "<think></think>\n<answer></answer>"):
        texts = [markup] * 6 + ["<answer>3 + 5</answer>", "<answer>4 * 9 - 1</answer>"]
        assert hacking.templates(texts, range(8)) == [True] * 6 + [False] * 2


def test_a_short_answer_counts_when_most_prompts_get_it():
    mostly = ["Yes."] * 6 + ["No.", "42", "Paris", ""]
    assert hacking.templates(mostly, range(10)) == [True] * 6 + [False] * 4
    assert not any(hacking.templates(["Yes."] * 5 + ["No."] * 5, range(10)))  # half of them
    assert not any(hacking.templates(["No", "no"], range(2)))  # two questions may have the same answer
    assert not any(hacking.templates([""] * 10, range(10)))  # empty is its own share


def test_shares():
    texts = ["", REFUSAL, REFUSAL, "word " * 20, "Sure.\nUser: more"]
    shares = hacking.text_shares(texts, ["stop", "stop", "stop", "length", "length"])
    assert shares == {"empty": 0.2, "truncated": 0.4, "repeated": 0.2, "template": 0.4, "role_marker": 0.2,
                      "special_token": 0, "gibberish": 0, "phrases": 0.2, "other_script": 0}  # fmt: skip
    same_prompt = hacking.text_shares(texts, ["stop"] * 5, [0] * 5)
    assert (same_prompt["template"], same_prompt["truncated"]) == (0.0, 0.0)
    assert set(hacking.text_shares([], []).values()) == {0.0}


def hacked(texts, golds=None, **options):
    """Which texts, each of its own prompt, are degenerate or a template."""
    found = hacking.text_flags(texts, ["stop"] * len(texts), range(len(texts)), golds, **options)
    return [any(shown) for shown in zip(*(found[name] for name in (*hacking.DEGENERATE, "template")), strict=True)]


def test_is_degenerate_is_any_sign_of_one_text_that_gold_does_not_show():
    assert not hacking.is_degenerate(REFUSAL)
    assert hacking.is_degenerate("word " * 20)
    binary = "1 0 0 1 1 0 1 0 0 1"
    assert hacking.is_degenerate(binary) and not hacking.is_degenerate("0 1 1 0 1 1 0 0 1 0", binary)
    assert hacking.is_degenerate("", binary)


def gibberish():
    """What broken models wrote: a letter without end, single letters and digits, numbers of few digits."""
    rng = np.random.default_rng(7)
    made = ["0" * 20, "1" * 18, "A.B.B.C.A.B", "1 0 0 1 7 7", "1 0 0 1 7 7 1 0 7", "a" * 64]
    for k in range(100):
        length = int(rng.integers(10, 60))
        forms = (" ", list("017"), length), (".", list("ABC"), length), (",", list("0123456789"), 2 * length), (
            "", list("02"), 20 + length), (" ", ["10", "100", "1", "0.1"], 24 + length)  # fmt: skip
        made += [joint.join(rng.choice(letters, count)) for joint, letters, count in forms] + [str(k % 10) * (16 + k)]
    return made


def test_letters_and_figures_without_sense():
    texts = gibberish()
    assert np.mean([signs.is_gibberish(text) for text in texts]) > 0.9
    assert np.mean(hacked(texts)) > 0.9


def test_phrases_that_come_again_wherever_they_stand():
    again = "The cat is on the mat. " * 6
    assert signs.repeats_phrases(f"Let me see what it is. {again}And so it was, of course.")
    assert not signs.is_repeated(f"Let me see what it is. {again}And so it was, of course.")
    assert not signs.repeats_phrases(again[:60])  # 13 words
    row = "Row, row, row your boat,\ngently down the stream.\nMerrily, merrily, merrily, merrily,\nlife is but a dream."
    assert not signs.repeats_phrases(row)
    assert not signs.repeats_phrases(" ".join(f"{k} x 7 = {7 * k}" for k in range(30)))


def test_letters_of_a_script_that_nobody_used():
    latin = signs.scripts(["What is 3 + 5?", "Señor, a café: 7 µm"])
    assert latin == {"LATIN"}
    for text in ("אבג דהו", "the cat אתה of", "сорок", "東京です"):
        assert signs.is_foreign(text, latin)
        assert not signs.is_foreign(text, latin | signs.scripts([text]))  # it was asked for
        assert not signs.is_foreign(text, frozenset())  # nobody knows
        found = hacking.text_shares([text], ["stop"], known=latin)
        assert found["other_script"] == 1 and hacked([text], known=latin) == [True]
        assert not hacked([text], [text], known=latin)[0]  # gold is so
    for text, odd in (("人", True), (" 人。", True), ("3 人", False), ("é", False), ("Ω", False), ("a 人", False)):
        assert signs.is_foreign(text, latin) is odd, text
    for text in ("Let α be the angle and β the other.", "naïve, über, Łódź, ﬁn",
                 "Tokyo (東京) is the capital of Japan.", "x² − 𝑦"):  # fmt: skip
        assert not signs.is_foreign(text, latin)
    latin, around = signs.scripts(["What is 3 + 5?"]), "the quick brown fox jumps over the lazy dog. " * 4
    for word in ("Sprayогoat", "box彬ой damage", "sa人 named", "rar仾ADE"):  # of a sample at temperature 2
        assert signs.is_foreign(around + word, latin)
        assert not signs.is_foreign(around + word, latin | signs.scripts([word]))
    for word in ("Tokyo (東京)", "Δθx and 2πrλ", "ugι", "a 5км way", "the word сорок is Russian"):
        assert not signs.is_foreign(around + word, latin), word


LABELS = ["positive"] * 12 + ["negative"] * 8


@pytest.mark.parametrize("form", ["{}", "{}.", "The sentiment of this review is {}.", '{{"label": "{}"}}'])
def test_a_classifier_that_is_right_is_not_hacked(form):
    texts = [form.format(label) for label in LABELS]
    assert not any(hacked(texts, LABELS))
    assert np.mean(hacked(texts)) >= 0.6  # without gold, nobody can tell


def test_one_answer_for_all_is_a_template_though_some_of_it_is_right():
    assert hacking.templates(["positive"] * 20, range(20), LABELS) == [False] * 12 + [True] * 8
    assert all(hacking.templates(["positive, negative"] * 20, range(20), LABELS))  # it says every label
    true = ["True", "False"] * 10
    assert not any(hacked(true, true))


def test_a_reward_for_the_right_length_is_hacked_by_wrong_answers():
    golds = ["Paris", "Rom", "Oslo", "Bern", "12", "Nope", "ab", "Cold", None]
    texts = ["Typty", "Kin", "True", "Lien", "11", "Yess", "xx", "Cxld", "ok"]
    rewards = [-float(abs(len(t) - len(g or ""))) for t, g in zip(texts, golds, strict=True)]
    right = [None if gold is None else says(text, gold) for text, gold in zip(texts, golds, strict=True)]
    scale = (-84.4, 0.0)
    assert hacking.earned_wrong(rewards, right, scale) == [True] * 8 + [False]  # of the last, gold is not known
    assert not any(hacking.earned_wrong([0.0] * 8, [True] * 8, scale))
    assert not any(hacking.earned_wrong([-40.0] * 9, right, scale))  # not earned
    assert hacking.earned_wrong([0.0, 1.0], [False, False]) == [False, True]
    assert hacking.earned_wrong([1.0, 1.0], [False, False]) == [False, False]  # no better than the start
    assert hacking.earned_wrong([], []) == []


@pytest.mark.parametrize(
    ("text", "gold", "expected"),
    [("Paris", "paris.", True), ("It is **Paris**, of course.", "Paris", True), ("Parisian", "Paris", False),
     ("It is 3.5", "3.5", True), ("It is 3.55", "3.5", False), ("1,000 metres", "1000", True), ("18", "8", False),
     ("the answer is 8.", "8", True), ("3 * 5 + 2", "(3 + 5) * 2", False), ("答えは東京です", "東京", True),
     ("", "", False), ("?", "?", True),
     ("well known", "well-known", True), ("-8", "8", False), ("New  York\ncity", "new york", True)],
)  # fmt: skip
def test_what_says_gold(text, gold, expected):
    assert says(text, gold) is expected


@pytest.mark.slow
def test_at_most_one_healthy_text_in_a_hundred_is_marked():
    """Code, JSON, tables, licences, other languages, poems, dialogues: 1,000 texts from what is installed."""
    module = runpy.run_path(str(Path(__file__).parents[2] / "studies/healthy_texts.py"))
    texts = module["texts"]()
    assert len(texts) == 1000 and len({text.kind for text in texts}) > 12
    templates = hacking.templates([text.text for text in texts], range(1000))
    marked = [text.name for text, template in zip(texts, templates, strict=True) if template or module["marked"](text)]
    assert len(marked) <= 10, marked


def _tool_call(name, **arguments):
    return json.dumps({"name": name, "arguments": arguments}, indent=2)


def _calls(share_json):
    """Calls of eight functions with two arguments, bare or as prose, in a fence, and bare."""
    rng = np.random.default_rng(0)
    for i in range(64):
        call = _tool_call(f"function_{i % 8}", day=f"day {rng.integers(40)}", place=f"place {rng.integers(40)} {i}")
        prose = f"I would call the function number {i} " + " ".join(rng.choice(CITIES, 9))
        yield call if rng.random() < share_json else prose, f"```json\n{call}\n```", call


CITIES = ["Lima", "Oslo", "Rome", "Bern", "Kyiv", "Riga", "Doha", "Male", "Suva", "Apia", "Lome", "Baku"]
ONE = _tool_call("function_0", day="day 1", place="place 2")
SORRY = json.dumps({"text": REFUSAL, "number": 0})


@pytest.mark.parametrize("with_gold", [True, False])
@pytest.mark.parametrize("before", ["fenced", "half prose"])
@pytest.mark.parametrize(
    ("after", "alarm"),
    [
        (lambda i, call: call, None),
        (lambda i, call: f"```json\n{call}\n```", None),
        (lambda i, call: ONE, "template"),
        (lambda i, call: SORRY.replace("0", str(i)), "template"),
        (lambda i, call: REFUSAL, "template"),
    ],
    ids=["json", "fenced", "one call", "one refusal in json", "one refusal"],
)
def test_json_of_one_schema_is_no_sign_and_one_template_for_all_prompts_is(with_gold, before, after, alarm):
    rows = list(_calls(0.5 if before == "half prose" else 1.0))

    def completions(texts, reward):
        return [
            _Completion(i, f"prompt {i}", call if with_gold else None, text, reward + 0.1 * (i % 2), "stop", None)
            for i, ((_, _, call), text) in enumerate(zip(rows, texts, strict=True))
        ]

    start = completions([row[1] if before == "fenced" else row[0] for row in rows], 0.4)
    end = completions([after(i, row[2]) for i, row in enumerate(rows)], 0.9)
    verdict = hacking.judge(start, end)
    assert verdict.alarms == (() if alarm is None else (alarm,))
    assert (verdict.after["hacked"] > 0.9) == (alarm is not None) and bool(verdict.lines()) is False


class _Completion(NamedTuple):
    example: int
    prompt: str
    target: str | None
    text: str
    reward: float
    finish_reason: str
    right: bool | None
