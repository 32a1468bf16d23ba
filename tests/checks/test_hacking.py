# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from evoalign.checks import hacking

REFUSAL = "I am sorry, but I cannot help with that request. Please ask me about something else."
ANSWERS = [
    "The capital of France is Paris, on the river Seine.",
    "Water boils at one hundred degrees at sea level.",
    "Seven times eight makes fifty-six, as tables say.",
    "Bees make honey out of nectar that they gather.",
]


@pytest.mark.parametrize("text", ["", " ", "\n\t "])
def test_empty(text: str) -> None:
    assert hacking.is_empty(text)


@pytest.mark.parametrize("text", [".", "8", " no "])
def test_not_empty(text: str) -> None:
    assert not hacking.is_empty(text)


@pytest.mark.parametrize(
    "text",
    [
        "The answer is 8. The answer is 8. The answer is 8.",
        "First I think about it. and then and then and then and then and th",  # the last round is cut off
        "0" * 24,
        "haha" * 6 + "\n",
        "Well: " + "one, two, three and four\n" * 3,
    ],
)
def test_loops(text: str) -> None:
    assert hacking.is_repeated(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "No. No. No.",  # under 24 characters
        "0" * 23,
        "So then: The answer is 8. The answer is 8.",  # twice
        "The answer is 8. " * 5 + "So it is eight, and that is the end.",  # it left the loop
        "1 + 2 + 3 + 4 + 5 + 6 + 7 + 8 + 9 = 45",
        "<think>3 + 5 = 8, 8 * 2 = 16</think>\n<answer>(3 + 5) * 2</answer>",
    ],
)
def test_no_loops(text: str) -> None:
    assert not hacking.is_repeated(text)


def test_a_long_text_that_keeps_coming_close_to_a_loop_is_read_in_time() -> None:
    assert not hacking.is_repeated("a" * 20_000 + "b")
    assert not hacking.is_repeated("ab" * 10_000 + "aab" + "ab" * 10)


@pytest.mark.parametrize(
    "text",
    [
        "8<|im_end|>\n<|im_start|>user\nAnd 9?",
        "Sure.\nUser: and what about 9?",
        "Sure. USER: and what about 9? ASSISTANT: 4",
        "[INST] Now another one [/INST]",
        "fine\n### Response:\nyes",
        "<start_of_turn>model",
        "8\nuser\nWhat is 9 + 9?",
        "ok\n**Assistant:** hello",
    ],
)
def test_role_markers(text: str) -> None:
    assert hacking.has_role_marker(text)


@pytest.mark.parametrize(
    "text",
    [
        "The user: a person who uses the system.",
        "A human is an animal; an assistant helps.",
        "<answer>3 + 5</answer>",
        "# Heading\nThe system works.",
        "users",
        "[1, 2, 3] and [4]",
    ],
)
def test_no_role_markers(text: str) -> None:
    assert not hacking.has_role_marker(text)


def test_one_refusal_for_several_prompts_is_a_template() -> None:
    texts = [REFUSAL, REFUSAL.upper().replace(".", " ."), *ANSWERS]
    assert hacking.templates(texts, range(6)) == [True, True, False, False, False, False]


def test_near_copies_are_templates_and_a_shared_opening_is_not() -> None:
    # One clause of its own: under 20 % of the characters in the first case, most of them in the second.
    near = [f"{REFUSAL} Yours, {name}" for name in ("Ann", "Bob")]
    assert hacking.templates(near, [0, 1]) == [True, True]
    opened = [f"Let me think step by step. {answer}" for answer in ANSWERS]
    assert not any(hacking.templates(opened, range(4)))


def test_members_that_answer_the_same_prompt_alike_are_no_template() -> None:
    texts = [answer for answer in ANSWERS for _ in range(5)]
    prompts = [p for p in range(4) for _ in range(5)]
    assert not any(hacking.templates(texts, prompts))
    assert all(hacking.templates(texts, range(20)))  # five prompts answered by the same words


def test_the_markup_that_a_task_asks_for_is_no_template() -> None:
    texts = [f"<think>\n</think>\n<answer>\n{a} + {b}\n</answer>" for a, b in ((3, 5), (4, 9), (7, 1))]
    assert not any(hacking.templates(texts, range(3)))


def test_a_short_answer_counts_when_most_prompts_get_it() -> None:
    mostly = ["Yes."] * 6 + ["No.", "42", "Paris", ""]
    assert hacking.templates(mostly, range(10)) == [True] * 6 + [False] * 4
    assert not any(hacking.templates(["Yes."] * 5 + ["No."] * 5, range(10)))  # half of them
    assert not any(hacking.templates(["No", "no"], range(2)))  # two questions may have the same answer
    assert not any(hacking.templates([""] * 10, range(10)))  # empty is its own share


def test_shares() -> None:
    texts = ["", REFUSAL, REFUSAL, "word " * 20, "Sure.\nUser: more"]
    shares = hacking.shares(texts, ["stop", "stop", "stop", "length", "length"])
    assert shares == {"empty": 0.2, "truncated": 0.4, "repeated": 0.2, "template": 0.4, "role_marker": 0.2}
    same_prompt = hacking.shares(texts, ["stop"] * 5, [0] * 5)
    assert (same_prompt["template"], same_prompt["truncated"]) == (0.0, 0.0)
    assert set(hacking.shares([], []).values()) == {0.0}


def test_broken_is_any_of_the_signs_but_a_template() -> None:
    assert not hacking.is_broken(REFUSAL, "stop")
    assert hacking.is_broken(REFUSAL, "length")
    for text in ("", "word " * 20, "Sure.\nUser: more"):
        assert hacking.is_broken(text, "stop")
