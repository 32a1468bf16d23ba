# SPDX-License-Identifier: Apache-2.0
"""Generated tasks: rows by seed, disjoint splits, gold answers, near misses, hostile completions, files of a user."""

import functools
import hashlib
import json
import re
import time
from contextlib import closing
from itertools import chain, combinations
from pathlib import Path

import numpy as np
import pytest
from small_runs import UNCHECKED
from task_runs import jsonl, train

from evoalign.config import GraderConfig, TaskConfig
from evoalign.errors import DataError
from evoalign.evaluation import Scored, summarise
from evoalign.rewards.arithmetic import evaluate
from evoalign.rewards.objective import Group
from evoalign.tasks import TASKS, create, isolate
from evoalign.tasks.constraints import EXCLUDE, KINDS
from evoalign.tasks.generated import MAX_RESPONSE, SIZES, Draw, Generated, split_of
from evoalign.tasks.grading import scored
from evoalign.testing.tasks import COMPLETIONS
from evoalign.types import text_of

GENERATED = [name for name, task in TASKS.items() if issubclass(task, Generated)]
each = pytest.mark.parametrize("name", GENERATED)
HASHES = {
    "guess": "73d558bdcfef00f9fed57e91cdbdce33096fc9ff9adbbc377cf530f1038898a2",
    "shopping": "0bc8ae91acd455b81056a3f82d3ca89f035c5b98fb4e26d4935cf3676487df5b",
    "constraints": "0adef5117bad3cf42c29d69a76a15f8e5e008c8e97b40c6de93f46c6484e40ab",
    "tool_calls": "134a2807e18cde28739e8ccd6af5b3d6f3b4a785d7041514ce42b22da5a0d90a",
    "word_problems": "0b43c0959000e06a49a80322d54eaae23cf6246b3241af2a12064c27f1dcade4",
}
"""SHA-256 of the default prompts and gold answers of all splits, as JSON."""
HOSTILE = (
    "[" * MAX_RESPONSE, '{"a":' * (MAX_RESPONSE // 5), "{" * 19_000 + "}", "9" * MAX_RESPONSE, "1e" + "9" * 19_000,
    '{"name": NaN, "arguments": -Infinity}', '{"name": 1e999999999999, "arguments": {}}', " " * MAX_RESPONSE,
    "```" + " \n" * 9_000 + "```", "answer: " * 2_500, "\\boxed{" * 2_800, "1," * 10_000, "1.2." * 5_000,
    "- \n" * 6_000, "a-" * 10_000, "a\n\n" * 6_000, '"' * MAX_RESPONSE, "\ud800\u202e\u0000" * 6_000, "٣２²½" * 5_000,
    "ß" * 20_000, "İ" * MAX_RESPONSE, "=" * MAX_RESPONSE, "answer is -" + "−" * 19_000, "x" * 5_000_000,
)  # fmt: skip
"""Completions that take long, or raise, in careless graders."""


@functools.cache
def splits(name):
    """Return the default splits of a task, made once."""
    return create(TaskConfig(name=name)).load_data(0)


def rows(name):
    return [*splits(name).train, *splits(name).validation, *splits(name).test]


@each
def test_rows_are_the_same_for_every_run_and_no_prompt_is_in_two_splits(name):
    task = create(TaskConfig(name=name))
    data = splits(name)
    assert {split: len(data.of(split)) for split in SIZES} == SIZES
    assert create(TaskConfig(name=name)).load_data(7) == data
    prompts = [text_of(task.prompt(row)) for row in rows(name)]
    keys = {task.key(row): split for split in SIZES for row in data.of(split)}
    assert len(set(prompts)) == len(keys) == sum(SIZES.values())
    assert all(split_of(key) == split for key, split in keys.items())
    given = json.dumps([[prompt, task.gold(row)] for prompt, row in zip(prompts, rows(name), strict=True)])
    assert hashlib.sha256(given.encode()).hexdigest() == HASHES[name]


@each
def test_sizes_cut_or_extend_the_splits_and_seeds_give_other_rows(name):
    cls, data = TASKS[name], splits(name)
    other = create(TaskConfig(name=name, train_size=700, validation_size=20, test_size=3)).load_data(0)
    assert other.sizes == (700, 3, 20)
    assert (other.train[:600], other.validation, other.test) == (data.train, data.validation[:20], data.test[:3])
    again = cls.rows("train", 50, seed=1)
    assert again == cls.rows("train", 50, seed=1)
    assert not {*map(cls.key, again)} <= {*map(cls.key, data.train)}


@each
def test_gold_answers_earn_the_maximum_and_are_right(name):
    task = create(TaskConfig(name=name))
    columns = scored(task, [task.gold(row) for row in rows(name)], rows(name))
    assert all(value == 1.0 for column in columns.values() for value in column)
    task.self_check(rows(name))
    assert all(task.is_right(task.gold(row), row) for row in rows(name))
    assert all(task.rewards(["An answer without anything."], [row]) < [1.0] for row in rows(name))


@each
def test_hostile_completions_are_graded_at_once(name):
    task = create(TaskConfig(name=name))
    texts = [*HOSTILE, *COMPLETIONS]
    for row in rows(name)[:12]:
        for text in texts:
            start = time.process_time()
            columns = task.columns([text], [row])
            assert time.process_time() - start < 0.5, text[:40]
            assert all(0.0 <= column[0] <= 1.0 for column in columns.values())
            assert columns[task.names[-1]] == [0.0] or name == "constraints", text[:40]


@each
def test_a_population_is_graded_within_two_seconds(name):
    task, some = create(TaskConfig(name=name)), rows(name)[:16] * 128
    texts = [f"{task.gold(row)} {i}" for i, row in enumerate(some)]
    start = time.process_time()
    assert len(scored(task, texts, some)[task.names[0]]) == 2048
    assert time.process_time() - start < 2


@pytest.mark.parametrize(("name", "kinds"), [
    ("tool_calls", lambda row: json.loads(row["answer"])["name"]),
    ("word_problems", lambda row: re.sub(r"[A-Z]\w*|\d+", "", row["question"].rpartition(". ")[2])),
])  # fmt: skip
def test_kinds_of_test_rows_alone_are_the_unseen_ones(name, kinds):
    data, task = splits(name), create(TaskConfig(name=name))
    trained = {kinds(row) for row in [*data.train, *data.validation]}
    unseen = {kinds(row) for row in data.test if row["unseen"]}
    assert not any(row["unseen"] for row in [*data.train, *data.validation])
    assert len(unseen) == 4 and not unseen & trained
    assert {kinds(row) for row in data.test if not row["unseen"]} <= trained
    assert 200 < sum(row["unseen"] for row in data.test) < 300
    for row in data.test[:50]:
        assert task.measures(task.gold(row), row) == {"seen": None if row["unseen"] else 1.0,
                                                      "unseen": 1.0 if row["unseen"] else None}  # fmt: skip


def test_no_prompt_of_training_shows_the_schema_of_an_unseen_function():
    def named(row):
        return {json.loads(line)["name"] for line in row["functions"].splitlines()}

    data = splits("tool_calls")
    unseen = {json.loads(row["answer"])["name"] for row in data.test if row["unseen"]}
    shown = set().union(*map(named, [*data.train, *data.validation]))
    assert len(shown) == 8 and not shown & unseen
    assert all(len(named(row)) == 8 and json.loads(row["answer"])["name"] in named(row) for row in rows("tool_calls"))
    assert {row["functions"] for row in data.test if not row["unseen"]} == {data.train[0]["functions"]}
    (mixed,) = {row["functions"] for row in data.test if row["unseen"]}
    assert len(shown & {json.loads(line)["name"] for line in mixed.splitlines()}) == 4


def test_training_prompts_of_tool_calls_share_their_beginning_and_name_no_unseen_function():
    task, data = create(TaskConfig(name="tool_calls")), splits("tool_calls")
    prompts = [text_of(task.prompt(row)) for row in [*data.train, *data.validation]]
    pairs = enumerate(zip(min(prompts), max(prompts), strict=False))
    shared = next(place for place, (one, other) in pairs if one != other)
    assert shared >= 0.8 * np.mean([*map(len, prompts)])
    unseen = {json.loads(row["answer"])["name"] for row in data.test if row["unseen"]}
    assert not any(name in prompt for prompt in prompts for name in unseen)


CALL = {"name": "order", "arguments": {"from": "A", "amount": {"value": 20, "unit": "kg"}, "times": ["08:00", "9"],
                                       "fast": True, "note": None}}  # fmt: skip
GOLD = json.dumps(CALL)


def changed(**arguments):
    return json.dumps({"name": "order", "arguments": CALL["arguments"] | arguments})


@pytest.mark.parametrize(("text", "graded"), [
    (GOLD, 1.0), (f"```json\n{GOLD}\n```", 1.0), (f"```\n{GOLD}```", 1.0), (f" \n{json.dumps(CALL, indent=2)}\n", 1.0),
    (GOLD.replace("20", "20.0"), 1.0), (GOLD.replace("20", "2e1"), 1.0), (GOLD.replace("kg", "\\u006bg"), 1.0),
    ("{}", 0.25), (json.dumps(CALL["arguments"]), 0.25), (GOLD.replace("order", "Order"), 0.25),
    (json.dumps({"name": "order"}), 0.25), (json.dumps(CALL | {"id": 1}), 0.25),
    (json.dumps(CALL | {"arguments": json.dumps(CALL["arguments"])}), 0.25),
    (changed(more=1), 0.25), (changed(amount=20), 0.25), (changed(amount={"value": 20}), 0.25),
    (changed(amount={"value": 20, "unit": "kg", "x": 0}), 0.25), (changed(amount=[["value", 20]]), 0.25),
    (GOLD.replace('"note": null', '"Note": null'), 0.25), (GOLD.replace(', "note": null', ""), 0.25),
    (changed(amount={"value": "20", "unit": "kg"}), 0.5), (changed(amount={"value": 21, "unit": "kg"}), 0.5),
    (GOLD.replace("20", "20.0000000000000000001"), 0.5), (changed(amount={"value": "kg", "unit": 20}), 0.5),
    (changed(amount={"value": True, "unit": "kg"}), 0.5), (changed(times=["9", "08:00"]), 0.5),
    (changed(times=["08:00"]), 0.5), (changed(times="08:00, 9"), 0.5), (changed(times=["08:00", 9]), 0.5),
    (changed(fast=1), 0.5), (changed(fast="true"), 0.5), (changed(note=""), 0.5), (changed(**{"from": "a"}), 0.5),
    (f"Here it is: {GOLD}", 0.0), (f"{GOLD} Done.", 0.0), (f"{GOLD}\n{GOLD}", 0.0), (f"[{GOLD}]", 0.0),
    (f"```json\n{GOLD}\n```\nDone.", 0.0), (f"Sure:\n```json\n{GOLD}\n```", 0.0), (f"```json {GOLD}```", 1.0),
    (f"```{GOLD}```", 1.0), (f"```JSON5\n{GOLD}\n```", 1.0), (f"```json {GOLD}", 0.0), (f"`{GOLD}`", 0.0),
    ("``````", 0.0),
    (GOLD.replace("20", "NaN"), 0.0), (GOLD.replace("20", "Infinity"), 0.0), (GOLD.replace("20", "020"), 0.0),
    (GOLD.replace('"name"', '"name": "x", "name"'), 0.0), (GOLD.replace('"fast"', '"note": null, "fast"'), 0.0),
    (GOLD.replace('"', "'"), 0.0), (GOLD[:-1], 0.0), (GOLD.replace("true", "True"), 0.0), ("order(from='A')", 0.0),
    (GOLD + " " * MAX_RESPONSE, 1.0), (GOLD.replace("kg", "kg" + " " * MAX_RESPONSE), 0.0), ("", 0.0), ("8", 0.0),
])  # fmt: skip
def test_tool_calls_are_compared_as_json(text, graded):
    row = {"request": "r", "functions": "f", "answer": GOLD}
    assert create(TaskConfig(name="tool_calls")).rewards([text], [row]) == [graded]


def test_each_near_miss_of_the_own_calls_is_wrong():
    """Every argument matters: without it, or with another value, no call of the default rows is exact."""
    task = create(TaskConfig(name="tool_calls"))
    for row in rows("tool_calls")[::7]:
        call = json.loads(row["answer"])
        for name, value in call["arguments"].items():
            less = {other: v for other, v in call["arguments"].items() if other != name}
            assert task.rewards([json.dumps(call | {"arguments": less})], [row]) == [0.25]
            other = {"x": 1} if isinstance(value, dict) else [value, 1]
            wrong = json.dumps(call | {"arguments": call["arguments"] | {name: other}})
            assert task.columns([wrong], [row])["exact"] == [0.0]


@pytest.mark.parametrize(("text", "right"), [
    ("1234", True), ("The answer is 1,234.", True), ("The answer is **$1,234.00**!", True), ("= 1234 apples", True),
    ("3 * 4 = 12, so \\boxed{1{,}234}", True), ("\\boxed{1234 \\text{ km}} and not 5", True), ("1\u202f234", True),
    ("Answer: 1234\n", True), ("The answer is:\n1234", True), ("The answer is 617 * 2 = 1234.", True),
    ("To answer this, add 4.\nIt is 1234", True), ("The answer is 5. No: the answer is 1234.", True),
    ("THE ANSWER IS 1234", True), ("first 5, then 1234.0", True), ("\\boxed{?} 1234", True),
    ("1233", False), ("1235", False), ("-1234", False), ("−1234", False), ("1234.5", False), ("123", False),
    ("12345", False), ("1,2345", False), ("1 234", False), ("one thousand two hundred thirty-four", False), ("", False),
    ("1234 or 7", False), ("The answer is 7, not 1234", False), ("\\boxed{7} 1234", False), ("1234e3", False),
    ("The answer is 1234 (= 2 × 617).", True), ("The answer is 1234 = 2 * 617.", True), ("**Answer**: 1234 km", True),
    ("The answer is 2 * 617, which is 1234.", True), ("The answer is 2 x 617 → 1234", True), ("Answer: x = 1234", True),
    ("The answer is 1 234.", True), ("The answer is 1234, because 2 * 617 = 1234 for 5 days.", True),
    ("The answer is 2 boxes * 617 pages = 1234 pages, 5 times.", True), ("The answer is \\frac{2468}{2} = 1234.", True),
    ("\\boxed{2 \\cdot 617 = 1234}", True), ("The answer is 1234 - that is all, 5 days late.", True),
    ("The answer is 1234.\n\nNote: 3 of 5 numbers were not used.", True), ("It is 1234. The answer is above.", True),
    ("The answer is 7. Wait, no, it is 1234.", True), ("The answer is 7; no, 1234.", True), ("No, it is 2. 1234", True),
    ("\\boxed{7}, no: the answer is 1234", True), ("The answer isn't 7, it is 1234.", True),
    ("The answer is 1234. The answer is not 7.", True), ("The answer is not 7 but 1234.", True),
    ("The answer is not 1234.", False), ("The answer is 1234. Wait, no, it is 7.", False), ("It isn't 1234", False),
    ("\\boxed{1234}, no: the answer is 7", False), ("The answer is 1234 * 2 = 2468.", False),
    ("The answer is 1234 + 5, which is 1239.", False), ("The answer is 1234. The answer is 7.", False),
])  # fmt: skip
def test_final_number_is_read_leniently_and_compared_exactly(text, right):
    row = {"question": "q", "answer": "1234"}
    assert create(TaskConfig(name="word_problems")).rewards([text], [row]) == [float(right)]


def test_answers_of_word_problems_follow_from_their_numbers():
    """Independent formulas for half of the templates, without the sentences that do not matter."""
    formulas = {
        "together?": lambda crates, each, fewer: 2 * crates * each - fewer,
        "finish in time?": lambda pages, daily, days, rest: (pages - daily * days) / rest,
        "all around?": lambda long, wide, price, off: 2 * (long + wide) * price - off,
        "in the tank?": lambda rate, minutes, leak, after: rate * minutes - leak * after,
        "more than before?": lambda count, cost, broken, price: (count - broken) * price - count * cost,
        "are left?": lambda total, fast, hours, slow, more: total - fast * hours - slow * more,
    }  # fmt: skip
    aside = re.compile(r"(?<=[.] )?[^.]*(?:years old|outside|house number|radio|postcards|of the month)[^.]*\. ?")
    counts = dict.fromkeys(formulas, 0)
    for row in rows("word_problems"):
        for end, formula in formulas.items():
            if row["question"].endswith(end):
                numbers = map(int, re.findall(r"\d+", aside.sub("", row["question"])))
                assert formula(*numbers) == int(row["answer"]), row
                counts[end] += 1
    assert min(counts.values()) > 20
    assert all(int(row["answer"]) > 0 for row in rows("word_problems"))


def test_workings_of_word_problems_are_right_and_asides_change_no_referent():
    """An aside may be before any sentence but the first, so that none begins with a pronoun or names no noun."""
    pronoun = re.compile(r"(?:^|[.?] )(?:They|It(?! is (?:day )?\d)|Then (?:it|they)|After that|\d+ of them) ")
    for row in rows("word_problems"):
        steps = re.findall(r"([\d(][\d +*/()-]*) = (\d+)", row["working"])
        assert len(steps) >= 2 and all(evaluate(left).value == int(right) for left, right in steps), row
        assert re.findall(r"\d+", row["working"])[-1] == row["answer"]
        assert not pronoun.search(row["question"]), row


TEN = "one two three four five six seven eight nine ten"


@pytest.mark.parametrize(("kind", "value", "right", "wrong"), [
    ("words", ["most", 12], [TEN, f"{TEN} it's well-known"], [f"{TEN} 11 12 13", "only three words", ""]),
    ("words", ["least", 12], [f"{TEN} 11 12", f"{TEN} it's - ! well-known"], [f"{TEN} 11", f"{TEN} - ! ? ..."]),
    ("bullets", 2,
     [f"- {TEN}\n- a", f"Here:\n- {TEN}\n- **b**\n\nend"],
     [TEN, f"- {TEN}", f"- {TEN}\n- b\n- c", f"-{TEN}\n-", f"* {TEN}\n* b", f"- {TEN}\n• b", f"{TEN}\n- \n- ",
      f"- {TEN}\n- b\n* c", f"- {TEN}\n  - b", f"- {TEN}\n- b\n-"]),
    ("keyword", ["river", 2],
     [f"{TEN} River, rivER.", f"{TEN} _river_ the river's edge"],
     [f"{TEN} river", f"{TEN} rivers rivers", f"{TEN} my-river river"]),
    ("forbidden", "it", [TEN, f"{TEN} its it-like"], [f"{TEN} it's", f"{TEN} It’s", f"{TEN} _it_"]),
    ("forbidden", "the", [TEN, f"{TEN} other then"], [f"{TEN} The.", f"the {TEN}"]),
    ("case", "lower", [f"{TEN} é ß"], [f"{TEN} A", f"É {TEN}"]),
    ("case", "upper", [TEN.upper()], [f"{TEN.upper()} a", TEN]),
    ("ending", "So it goes",
     [f"{TEN} So it goes", f"{TEN}, so it goes.\n", f"{TEN} **so it goes!** 😊", f"{TEN} _So it goes_"],
     [f"{TEN} so it goes on", f"So it goes {TEN}", f"{TEN} also it goes", f"{TEN} so it goes 2"]),
    ("quoted", True, [f'"{TEN}"', f"“{TEN}”", f' "{TEN}."\n'], [TEN, f'"{TEN}', f'"{TEN}".', f"'{TEN}'", '""']),
    ("paragraphs", 2, [f"{TEN}\n\na", f"\n\n{TEN}\nb\n \n\nc"], [TEN, f"{TEN}\nb", f"{TEN}\n\nb\n\nc"]),
])  # fmt: skip
def test_constraints_are_checked(kind, value, right, wrong):
    task = create(TaskConfig(name="constraints"))
    row = {"request": "r", "constraints": [{"kind": kind, "value": value}]}
    assert task.columns(right, [row] * len(right)) == {"share": [1.0] * len(right), "all": [1.0] * len(right)}
    assert task.columns(wrong, [row] * len(wrong)) == {"share": [0.0] * len(wrong), "all": [0.0] * len(wrong)}


def test_share_of_constraints_and_all_of_them():
    some = [{"kind": "forbidden", "value": "the"}, {"kind": "quoted", "value": True}, {"kind": "bullets", "value": 3}]
    task, row = create(TaskConfig(name="constraints")), {"request": "r", "constraints": some}
    columns = task.columns([TEN, f'"{TEN}"'], [row, row])
    assert columns == {"share": [1 / 3, 2 / 3], "all": [0.0, 0.0]}
    assert task.rewards([TEN], [row]) == [0.5 * (1 / 3)]


def test_all_allowed_pairs_of_constraints_can_be_kept_together():
    task, draw, pairs = create(TaskConfig(name="constraints")), Draw(3), 0
    for one, other in combinations(KINDS, 2):
        if other not in EXCLUDE.get(one, ()) and one not in EXCLUDE.get(other, ()):
            for _ in range(5):
                some = [{"kind": kind, "value": KINDS[kind][0](draw)} for kind in (one, other)]
                row = {"request": "r", "constraints": some}
                assert task.rewards([task.gold(row)], [row]) == [1.0], some
            pairs += 1
    assert pairs == 28 - 4
    kinds = {one["kind"] for one in chain.from_iterable(row["constraints"] for row in rows("constraints"))}
    assert kinds == {*KINDS} and len(kinds) == 8
    assert {len(row["constraints"]) for row in rows("constraints")} == {1, 2, 3}


@pytest.mark.parametrize(("name", "row", "gold"), [
    ("tool_calls", {"request": "Go", "functions": [{"name": "go"}], "answer": {"name": "go", "arguments": {"n": 1}}},
     '{"name": "go", "arguments": {"n": 1}}'),
    ("word_problems", {"question": "1 + 1?", "answer": 2}, "The answer is 2."),
    ("constraints", {"request": "Write.", "constraints": [{"kind": "quoted", "value": True}]}, None),
])  # fmt: skip
def test_rows_of_a_file_are_used(name, row, gold, tmp_path):
    file = jsonl(tmp_path / "rows.jsonl", [row] * 5)
    task = create(TaskConfig(name=name, train_data=file, test_data=file))
    data = task.load_data(0)
    assert data.sizes == (5, 5, 0) and task.measures("", data.test[0]) == {"seen": None, "unseen": None}
    assert gold in (None, task.gold(data.test[0])) and task.rewards([task.gold(data.test[0])], data.test[:1]) == [1.0]


@pytest.mark.parametrize(("name", "row", "named"), [
    ("tool_calls", {"request": "Go", "functions": "f"}, "answer is None"),
    ("tool_calls", {"request": 3, "functions": "f", "answer": {}}, "request is 3"),
    ("tool_calls", {"request": "Go", "functions": "f", "answer": "[1]"}, r"answer is '\[1\]'"),
    ("tool_calls", {"request": "Go", "functions": "f", "answer": {"name": "go"}}, "answer is {'name': 'go'}"),
    ("tool_calls", {"request": "Go", "functions": "f", "answer": {"name": "go", "arguments": 1}}, "answer is "),
    ("word_problems", {"question": "1 + 1?", "answer": "two"}, "answer is 'two'"),
    ("word_problems", {"question": " ", "answer": "2"}, "question is ' '"),
    ("word_problems", {"question": "1 + 1?", "answer": "2", "unseen": "false"}, "unseen is 'false'"),
    ("constraints", {"request": "Write.", "constraints": [], "unseen": 1}, "unseen is 1"),
    ("constraints", {"request": "Write.", "constraints": []}, r"constraints is \[\]"),
    ("constraints", {"request": "Write.", "constraints": [{"kind": "rhyme", "value": 1}]}, "rhyme"),
    ("constraints", {"request": "Write.", "constraints": [{"kind": [], "value": 1}]}, "is no constraint"),
    ("constraints", {"request": "Write.", "constraints": [{"kind": "bullets", "value": "2"}]}, "bullets is '2'"),
    ("constraints", {"request": "Write.", "constraints": [{"kind": "words", "value": ["about", 9]}]}, "about"),
    ("constraints", {"request": "Write.", "constraints": [{"kind": "case", "value": "title"}]}, "case is 'title'"),
])  # fmt: skip
def test_wrong_rows_of_a_file_are_named(name, row, named, tmp_path):
    file = jsonl(tmp_path / "rows.jsonl", [row] * 5)
    with pytest.raises(DataError, match=named) as caught:
        create(TaskConfig(name=name, train_data=file)).load_data(0)
    assert f"{file}, line 1" in str(caught.value)


def test_seen_and_unseen_are_measured_where_only_some_rows_of_a_file_say_it(tmp_path):
    rows = [{"question": f"{i}?", "answer": i} | ({} if i == 2 else {"unseen": i % 2 == 0}) for i in range(5)]
    file = jsonl(tmp_path / "rows.jsonl", rows)
    task = create(TaskConfig(name="word_problems", train_data=file, test_data=file))
    examples = task.load_data(0).test
    completions = [Scored(i, 0, 0, "", "", str(4 * (i > 3)), 0.0, "stop", 1, {}, None, None) for i in range(5)]
    found = summarise(task, examples, completions)
    assert found.measures["seen"] == 0.0 and found.measures["unseen"] == 1.0
    assert summarise(task, examples[2:3], [completions[0]]).measures.keys().isdisjoint({"seen", "unseen"})


def test_the_objective_of_a_generated_task_is_its_reward():
    task, row = create(TaskConfig(name="tool_calls")), {"request": "r", "functions": "f", "answer": GOLD}
    texts = [GOLD, "{}", changed(fast=1), ""]
    columns = {name: np.array(column)[:, None] for name, column in task.columns(texts, [row] * 4).items()}
    scores = task.objective().scores(Group(0, columns, [[text] for text in texts], [row]))
    assert scores.ravel().tolist() == task.rewards(texts, [row] * 4) == [1.0, 0.25, 0.5, 0.0]


def test_prompts_with_solved_rows_as_in_the_guide(tmp_path):
    """Also in the worker of a user-defined task, where a measure may be None."""
    guide = (Path(__file__).parents[2] / "docs/guides/tasks.md").read_text(encoding="utf-8")
    (tmp_path / "shots.py").write_text(guide.partition('title="shots.py"\n')[2].partition("```")[0])
    config = TaskConfig(name=f"{tmp_path / 'shots.py'}:Shots", train_size=5, validation_size=1, test_size=8)
    plain = create(TaskConfig(name="tool_calls"))
    with closing(isolate(create(config), GraderConfig())) as task:
        data = task.load_data(0)
        row = next(row for row in data.test if row["unseen"])
        messages = task.prompt(row)
        assert [m["role"] for m in messages] == ["user", "assistant"] * 3 + ["user"]
        assert messages[-1:] == plain.prompt(row) and messages[:1] == plain.prompt(data.train[0])
        assert messages[1]["content"] == plain.gold(data.train[0])
        assert task.measures(task.gold(row), row) == {"seen": None, "unseen": 1.0}


def test_a_run_reports_seen_and_unseen_rows_before_and_after(tmp_path):
    """Validation rows are all seen; the objective may be one column, while the reward stays the sum."""
    config = {
        "output_dir": str(tmp_path / "run"), "model": {"name": "tiny", "dtype": "float32"}, "engine": {"device": "cpu"},
        "es": {"sigma": 0.1, "learning_rate": 0.1, "num_generations": 1, "population_size": 4},
        "sampling": {"max_tokens": 4}, "evaluation": {"max_tokens": 4, "every": 1}, "checks": UNCHECKED,
        "task": {"name": "word_problems", "train_size": 4, "validation_size": 4, "test_size": 8, "batch_size": 2,
                 "objective": {"name": "weighted_sum", "weights": {"answered": 1}}},
    }  # fmt: skip
    run, _ = train(config)
    found = json.loads((run.path / "results" / "evaluation.json").read_text())
    for at in ("before", "after"):
        measures = found[at]
        assert {"seen", "unseen", "reward/answered", "reward/exact"} <= measures.keys()
        assert measures["reward"] == measures["reward/exact"] == 0.0
