# SPDX-License-Identifier: Apache-2.0
"""Countdown: prompts, splits and the reward, against the published rules."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from task_runs import jsonl

from evoalign.config import TaskConfig
from evoalign.errors import DataError
from evoalign.rewards import arithmetic
from evoalign.tasks import countdown, create
from evoalign.tasks.countdown import MAX_RESPONSE, Countdown, answer_reward, format_reward, last_answer

FIXTURE = Path(__file__).parent / "fixtures" / "countdown.json"
ROWS = json.loads(FIXTURE.read_text(encoding="utf-8"))
ROW = {"numbers": [44, 19, 35], "target": "98", "solution": "((44 + 19) + 35)", "context": "Make 98.\n<think>"}
FULL = "</think>\n<answer>44 + 19 + 35</answer>"


def task(**settings):
    return create(TaskConfig(name="countdown", train_data=str(FIXTURE), **settings))


@pytest.mark.parametrize(("text", "reward"), [
    (FULL, 1.1), (" " + FULL + " \n", 1.1),  # stripped
    ("44 and 19 ...</think>\n<answer>\n44 + 19 + 35</answer>", 0.1),  # leading newline inside the answer
    ("</think>\n<answer>44 + 19 + 35\n</answer>", 1.1),  # trailing one
    ("</think><answer>44 + 19 + 35</answer>", 1.06),  # no newline between the blocks
    ("</think>\n\n<answer>44 + 19 + 35</answer>", 1.06), ("<answer>44 + 19 + 35</answer>", 1.05),
    ("44 + 19 + 35</think>", 0.01), ("</think>\n<answer>44 + 19</answer>", 0.1), (FULL + " done", 1.06), ("", 0.0),
    ("<|im_end|>", 0.0), ("Use [44 19 35] to make 98.", 0.0),
])  # fmt: skip
def test_reward_is_a_tenth_of_format_plus_answer(text, reward):
    assert task().rewards([text], [ROW])[0] == pytest.approx(reward, abs=1e-12)


def test_a_subclass_with_its_own_reward_has_its_own_maximum_and_no_parts():
    class Doubled(Countdown):
        max_reward = 2.0

        def compute_reward(self, text, example):
            return 2.0 * self.is_right(text, example)

    class Shown(Countdown):
        def prompt(self, example):
            return "Now: " + super().prompt(example)

    config = TaskConfig(name="countdown", reward_weights=[0.5, 1.0])
    doubled, same = Doubled(config), Shown(config)
    doubled.self_check([ROW])
    same.self_check([ROW])
    assert (doubled.max_reward, doubled.parts([FULL], [ROW])) == (2.0, {})
    assert (same.max_reward, same.parts([FULL], [ROW])) == (1.5, {"format": [1.0], "accuracy": [1.0]})


def test_without_strip_only_one_newline_may_follow_and_spaces_count_for_the_limit():
    texts = [FULL + "\n", FULL + "\n\n", FULL + " ", FULL.rjust(MAX_RESPONSE), FULL.rjust(MAX_RESPONSE + 1)]
    assert task(strip=False).rewards(texts, [ROW] * 5) == pytest.approx([1.1, 1.06, 1.06, 1.1, 0.0])


@pytest.mark.parametrize(("text", "value"), [
    ("44 + 19 + 35", 1.0), ("35+(19+44)", 1.0), ("44 + 19 + 35 = 98", 0.0), ("= 98", 0.0), ("98", 0.0),
    ("44 + 19 + 35 + 0", 0.0),  # a number that was not given
    ("44 + 54", 0.0), ("44 + 19 + 35 + 44 - 44", 0.0),  # a number used twice
    ("44 + 19", 0.0), ("35 + 19 * 44", 0.0), ("44 + 19 + 035", 0.0), ("44 + 19 - -35", 0.0), ("44 + 19 + 35\n", 1.0),
    ("\n44 + 19 + 35", 0.0), ("44 + 19 + ３５", 0.0), ("", 0.0),
])  # fmt: skip
def test_answer_rules(text, value):
    assert answer_reward(f"<answer>{text}</answer>", [44, 19, 35], "98") == value


@pytest.mark.parametrize(("text", "numbers", "target", "value"), [
    ("(10 / (60 - 57)) * 80", [60, 10, 57, 80], "266.6666666666667", 1.0),
    ("(10 / (60 - 57)) * 80", [60, 10, 57, 80], "266.66667", 1.0),  # 3.3e-6 away
    ("(10 / (60 - 57)) * 80", [60, 10, 57, 80], "266.6667", 0.0),  # 3.3e-5 away
    ("69 - (55 + 25)", [69, 55, 25], "-11", 1.0), ("69 - (55 + 25)", [69, 55, 25], "11", 0.0),
    ("71 + 15 / 4", [71, 15, 4], "74.75", 1.0), ("71 + 15 / 4", [71, 15, 4], 74.75, 1.0),
    ("1 / 100000", [1, 100000], "0", 0.0),  # a difference of exactly 1e-5 is too much
    ("1 / 100001", [1, 100001], "0", 1.0),
    ("3**4", [3, 4], "81", 0.0), ("7//2+1", [7, 2, 1], "4", 0.0), ("(4)(3+2)", [4, 3, 2], "20", 0.0),  # no operators
    ("-4+9", [4, 9], "5", 0.0),
])  # fmt: skip
def test_answer_reward_compares_values_by_the_four_operators(text, numbers, target, value):
    assert answer_reward(f"<answer>{text}</answer>", numbers, target) == value


def test_the_last_answer_counts():
    right, wrong = "<answer>44+19+35</answer>", "<answer>1</answer>"
    assert answer_reward(wrong + right, [44, 19, 35], "98") == 1.0
    assert answer_reward(right + wrong, [44, 19, 35], "98") == 0.0
    assert answer_reward(right + "<answer>1", [44, 19, 35], "98") == 1.0
    assert answer_reward("<answer>" + right, [44, 19, 35], "98") == 0.0  # the first opening tag begins the block


def test_answer_reward_evaluates_an_answer_once_for_all_members_and_reports(monkeypatch):
    """Grading and the axis report each go over all completions of a generation in turn."""
    seen = []
    monkeypatch.setattr(countdown, "evaluate", lambda answer: seen.append(answer) or arithmetic.evaluate(answer))
    texts = [f"thought {i}: <answer>1000 + {i // 2}</answer>" for i in range(10_000)]
    for _ in range(2):
        assert [answer_reward(text, [i // 2, 1000], 1007) for i, text in enumerate(texts)].index(1.0) == 14
    assert len(seen) == len(set(seen)) == 5000


PIECES = st.sampled_from(
    ["<think>", "</think>", "<answer>", "</answer>", "\n", " ", "1+2", "<", "/", ">", "answer>", "</think>\n<answer>"]
)


@given(st.lists(PIECES, max_size=14).map("".join))
@example("<think></think>\n<answer>1</answer> and <answer>2</answer>")  # in the full format
@example("<think>a</think> b</think>\n<answer>1</answer>")
def test_scanning_agrees_with_the_published_expressions(text):
    matches = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    assert last_answer(text) == (matches[-1] if matches else None)
    for response in (text, "<think>" + text):
        if re.match(r"^<think>.*?</think>\n<answer>.*?</answer>$", response, re.DOTALL):
            expected = 1.0
        else:
            think = re.search(r"<think>.*?</think>", response, re.DOTALL) is not None
            block = re.search(r"<answer>.*?</answer>", response, re.DOTALL) is not None
            expected = 0.1 * think + 0.5 * block
        assert format_reward(response) == expected


def test_measures():
    figures = task().measures("<answer>44+19+35</answer>", ROW)
    assert figures == {"accuracy": 1.0, "format": 0.5, "answer_reward": 1.0, "high_reward": 1.0}
    wrong = task().measures("</think>\n<answer>1</answer>", ROW)
    assert wrong == {"accuracy": 0.0, "format": 1.0, "answer_reward": 0.0, "high_reward": 0.0}


def test_raw_prompt_is_the_context_and_short_is_exact():
    assert task().prompt(ROWS[0]) == task(prompt="raw").prompt(ROWS[0]) == ROWS[0]["context"]
    assert task(prompt="short").prompt(ROW) == "Use [44 19 35] to make 98. <think>"
    assert task(prompt="short").prompt({"numbers": [7, 30, 5], "target": "-18"}) == "Use [7 30 5] to make -18. <think>"


def test_chat_is_a_system_and_a_user_message():
    system, user = task(prompt="chat").prompt(ROW)
    assert (system["role"], user["role"]) == ("system", "user")
    assert user["content"].startswith("Using the numbers [44, 19, 35], create an equation that equals 98. ")
    assert "<think>" not in user["content"][-20:]


def test_response_opens_the_think_block_unless_the_prompt_does():
    row = ROW | {"context": "Make 98 from 44, 19 and 35."}
    for form, asked in ((task(prompt="chat"), ROW), (task(), row)):
        assert form.compute_reward("<think>" + FULL, asked) == 1.1
        assert form.measures(FULL, asked)["format"] == 0.5
    assert task(prompt="short").compute_reward(FULL, ROW) == 1.1
    opened = task(prompt="chat_opened")
    *chat, begun = opened.prompt(ROW)
    assert chat == task(prompt="chat").prompt(ROW)
    assert begun == {"role": "assistant", "content": "Let me solve this step by step.\n<think>"}
    assert opened.compute_reward(FULL, ROW) == 1.1
    assert opened.measures("44, 19</think>\n<answer>1</answer>", ROW)["format"] == 1.0


@pytest.mark.parametrize("prompt", ["raw", "chat", "short", "chat_opened"])
def test_every_gold_answer_earns_the_maximum(prompt):
    form = task(prompt=prompt, split="first_last", train_size=7, test_size=7)
    data = form.load_data(0)
    assert form.max_reward == 1.1
    form.self_check([*data.train, *data.test])


def test_self_check_counts_the_gold_answers_that_fail_and_shows_the_first():
    wrong, unknown = ROW | {"solution": "44 + 19"}, ROW | {"solution": None}
    with pytest.raises(DataError) as error:
        task().self_check([ROW, wrong, unknown, *[wrong] * 4])
    said = str(error.value)
    assert said.startswith("task countdown: 5 of 6 gold answers do not earn 1.1: ") and "and 2 more; fix" in said
    assert [f"of row {i} earns 0.1" in said for i in range(7)] == [False, True, False, True, True, False, False]


def test_the_default_is_the_shipped_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # found from any folder
    data = create(TaskConfig(name="countdown")).load_data(33)
    assert (len(data.train), len(data.test)) == (1760, 440)


@pytest.mark.parametrize(("change", "message"), [
    ({"numbers": "44 19"}, "numbers is '44 19'"), ({"numbers": []}, "numbers is"),
    ({"numbers": [1, True]}, "numbers is"), ({"numbers": [1, -2]}, "numbers is"), ({"numbers": [1, 2.5]}, "numbers is"),
    ({"target": None}, "target is None"), ({"target": "1/3"}, "target is '1/3'"),
    ({"target": "1e999999999"}, "target is"), ({"target": "nan"}, "target is"), ({"target": "٣"}, "target is"),
    ({"target": True}, "target is"), ({"context": ""}, "context is"), ({"solution": 3}, "solution is 3"),
])  # fmt: skip
def test_bad_rows_are_named(change, message, tmp_path):
    path = jsonl(tmp_path / "data", [ROW, ROW | change])
    with pytest.raises(DataError, match=message) as caught:
        create(TaskConfig(name="countdown", train_data=path)).load_data(0)
    assert f"{path}, line 2" in str(caught.value)


def test_only_raw_needs_the_context(tmp_path):
    path = jsonl(tmp_path / "data", [{"numbers": [1, 2], "target": 3}] * 5)
    assert len(create(TaskConfig(name="countdown", train_data=path, prompt="short")).load_data(0).test) == 1
    with pytest.raises(DataError, match=r"task\.prompt: short, chat, chat_opened"):
        create(TaskConfig(name="countdown", train_data=path)).load_data(0)


def test_answers_that_are_too_long_do_not_fill_the_cache():
    countdown._reaches.cache_clear()
    countdown._value.cache_clear()
    for answer, kept in (("1+" * 2**16 + "1", 0), ("1+1", 1)):
        assert answer_reward(f"<answer>{answer}</answer>", [1, 1], 2) == kept
        assert countdown._reaches.cache_info().currsize == countdown._value.cache_info().currsize == kept
