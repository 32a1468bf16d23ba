# SPDX-License-Identifier: Apache-2.0
"""Data and rewards of the user's own, with TRL's semantics."""

import asyncio
import datetime
import threading
from contextlib import closing

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from pydantic import ValidationError
from task_runs import jsonl

from evoalign.config import GraderConfig, TaskConfig
from evoalign.errors import ConfigError, DataError, RewardError
from evoalign.rewards.functions import fresh
from evoalign.rollouts import rewards_of
from evoalign.tasks import Data, Task, create, isolate

PLAIN = {"prompt": "2 + 2 =", "answer": "4", "id": 7}
CHAT = {"prompt": [{"role": "user", "content": "2 + 2 ="}], "answer": "4"}


def task(*rewards, **settings):
    return create(TaskConfig(name="custom", **settings), rewards or (length,))


def length(completions, **kwargs):
    return [float(len(c)) for c in completions]


def exact(completions, answer):
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def test_everything_is_passed_by_keyword():
    seen = {}

    def spy(**kwargs):
        seen.update(kwargs)
        return [0.0, 1.0]

    assert task(spy).rewards([" a ", "b"], [PLAIN, PLAIN | {"answer": "5"}]) == [0.0, 1.0]
    loggers = {name: seen.pop(name) for name in ("log_extra", "log_metric")}
    asked = {"prompts": ["2 + 2 =", "2 + 2 ="], "completions": ["a", "b"]}
    assert seen == {**asked, "answer": ["4", "5"], "id": [7, 7]}
    assert loggers["log_metric"]("accuracy", 0.5) is None
    assert loggers["log_extra"]("column", ["x", "y"]) is None


def test_columns_of_a_row_reach_the_functions_that_name_them():
    def hinted(completions, hint):
        return [float(h is None) for h in hint]

    assert task(exact).rewards(["4", "5"], [PLAIN, PLAIN]) == [1.0, 0.0]
    assert task(hinted).rewards(["a", "b"], [PLAIN, PLAIN | {"hint": "x"}]) == [1.0, 0.0], "missing in one row"
    hidden = {"completions": "x", "prompts": "y", "completion_ids": [1]}
    assert task().rewards(["ab"], [PLAIN | hidden]) == [2.0]


def test_the_columns_form_decides_what_rewards_see_not_the_prompts_form():
    seen = []

    def spy(prompts, completions):
        seen.append((prompts, completions))
        return [1.0] * len(prompts)

    task(spy).rewards(["4"], [CHAT])
    assert seen == [([CHAT["prompt"]], [[{"role": "assistant", "content": "4"}]])]
    chat = task(prompt="chat")
    assert chat.prompt(PLAIN) == [{"role": "user", "content": "2 + 2 ="}]
    assert chat.rewards(["four"], [PLAIN]) == [4.0] == [task().compute_reward("four", PLAIN)]
    assert task().prompt(PLAIN) == task(prompt="raw").prompt(PLAIN) == "2 + 2 ="
    assert task().prompt(CHAT) == CHAT["prompt"]
    assert task(lambda **kwargs: 1 / 0).rewards([], []) == []


def test_weighted_sum_ignores_none():
    def sometimes(completions, **kwargs):
        return [None if c == "skip" else 100.0 for c in completions]

    assert task(length, exact, reward_weights=[0.5, 10.0]).rewards(["4", "12"], [PLAIN, PLAIN]) == [10.5, 1.0]
    assert task(length, exact).rewards(["4"], [PLAIN]) == [2.0]
    assert task(length, sometimes).rewards(["skip", "go"], [PLAIN, PLAIN]) == [4.0, 102.0]
    with pytest.raises(RewardError, match=r"\(sometimes\) returned None for the completion 'skip'"):
        task(sometimes).rewards(["go", "skip"], [PLAIN, PLAIN])
    with pytest.raises(ValidationError, match="finite number"):
        task(length, exact, reward_weights=[1.0, float("nan")])


@pytest.mark.parametrize(("value", "message"), [
    ([1.0], "bad returned 1 values for 2 completions"), ([1.0, 2.0, 3.0], "bad returned 3 values for 2 completions"),
    (1.0, "bad returned 1.0; return a list"), ("ab", "bad returned 'ab'; return a list"),
    (None, "bad returned None; return a list"), ([1.0, "2"], "bad returned '2' for the completion 'two'"),
    ([1.0, True], "bad returned True for the completion 'two'"),
    ([1.0, float("nan")], "bad returned nan for the completion 'two'"),
    ([float("-inf"), 1.0], "bad returned -inf for the completion 'one'"), ([1.0, [2.0]], "bad returned"),
    ([1e308, 1e308], "no finite sum"),  # each is finite, their sum is not
])  # fmt: skip
def test_invalid_values_raise_reward_error(value, message):
    def bad(**kwargs):
        return value

    with pytest.raises(RewardError, match=message):
        task(bad if value == [1e308, 1e308] else length, bad).rewards(["one", "two"], [PLAIN, PLAIN])


@pytest.mark.parametrize("make", [np.array, torch.tensor, tuple, lambda v: [np.float32(x) for x in v]])
def test_arrays_and_tensors_are_lists_too(make):
    assert task(lambda **kwargs: make([1.0, 2.0])).rewards(["a", "b"], [PLAIN, PLAIN]) == [1.0, 2.0]


def test_a_failing_function_is_named_and_is_never_a_reward():
    def broken(completions):
        raise KeyError("gone")

    with pytest.raises(RewardError, match="reward function broken failed: KeyError: 'gone'") as caught:
        task(broken).rewards(["a"], [PLAIN])
    assert isinstance(caught.value.__cause__, KeyError)


def by_ids(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def by_state(completions, trainer_state=None):
    return [float(trainer_state is None)] * len(completions)


def test_the_simple_form():
    def compute_reward(text, example):
        return None if example["id"] == 8 else float(text == example["answer"])

    assert task(compute_reward).rewards([" 4 ", "5"], [PLAIN, PLAIN]) == [1.0, 0.0]
    assert task(length, compute_reward).rewards(["4"], [PLAIN | {"id": 8}]) == [1.0]


def test_async_functions_are_awaited_together():
    begun = []

    async def all_have_begun():
        begun.append(1)
        while len(begun) < 4:
            await asyncio.sleep(0.01)

    async def judge(completions, **kwargs):
        await all_have_begun()
        return [1.0 for _ in completions]

    async def slow(text, example):
        await all_have_begun()
        return float(len(text))

    assert task(judge, slow, length, judge).rewards(["ab", "c"], [PLAIN, PLAIN]) == [6.0, 4.0]


def test_async_functions_work_inside_and_around_a_loop():
    async def judge(completions):
        await asyncio.sleep(0)
        return [1.0 for _ in completions]

    async def notebook():
        return task(judge).rewards(["a"], [PLAIN])

    def wrapped(completions):
        return asyncio.run(judge(completions))

    assert asyncio.run(notebook()) == [1.0]
    assert task(judge, wrapped).rewards(["a"], [PLAIN]) == [2.0]


def test_async_objects_and_failures():
    class Judge:
        async def __call__(self, completions, **kwargs):
            if completions == ["bad"]:
                raise TimeoutError("judge is away")
            return [2.0 for _ in completions]

    assert task(Judge()).rewards(["a"], [PLAIN]) == [2.0]
    with pytest.raises(RewardError, match="reward function Judge failed: TimeoutError: judge is away"):
        task(Judge(), length).rewards(["bad"], [PLAIN])


def test_functions_by_import_path(tmp_path):
    source = tmp_path / "mine.py"
    source.write_text("def score(completions, **kwargs):\n    return [len(c) for c in completions]\n", encoding="utf-8")
    assert create(TaskConfig(name="custom", rewards=[f"{source}:score"])).rewards(["abc"], [PLAIN]) == [3.0]
    for rewards, message in ([f"{source}:none"], r"task\.rewards"), ([], r"task\.rewards is empty"):
        with pytest.raises(ConfigError, match=message):
            create(TaskConfig(name="custom", rewards=rewards))


@pytest.mark.parametrize(("make", "message"), [
    (lambda: task("length"), "is not a function"), (lambda: task(by_ids), "by_ids requires completion_ids"),
    (lambda: task(length, exact, reward_weights=[1.0]), "1 weights for 2 rewards"),
])  # fmt: skip
def test_invalid_functions_and_settings_are_rejected(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
    assert task(by_state).rewards(["a"], [PLAIN]) == [1.0]


def test_jsonl_and_parquet(tmp_path):
    rows = [PLAIN | {"id": i} for i in range(5)]
    data = task(train_data=jsonl(tmp_path / "rows.jsonl", rows)).load_data(0)
    assert sorted(row["id"] for row in [*data.train, *data.test]) == [0, 1, 2, 3, 4]
    path = tmp_path / "rows.parquet"
    # Columnar files give every message every field; the empty ones are dropped.
    messages = [[{"role": "user", "content": "Hi", "name": None}], [{"role": "user", "content": "Ho", "name": "Al"}]]
    parquet.write_table(pa.table({"prompt": messages, "answer": ["a", "b"]}), path)
    data = task(exact, train_data=str(path), test_data=str(path)).load_data(0)
    assert data.train[0] == {"prompt": [{"role": "user", "content": "Hi"}], "answer": "a"}
    assert task().prompt(data.train[1]) == [{"role": "user", "content": "Ho", "name": "Al"}]


@pytest.mark.parametrize(("prompt", "message"), [
    (None, "prompt is None"), ("", "prompt is ''"), ([], r"prompt is \[\]"), (3, "prompt is 3"),
    (["Hi"], "message 'Hi'"), ([{"role": "user"}], "message {'role': 'user'}"),
    ([{"role": "user", "content": 3}], "with strings"),
    ([{"role": "user", "content": [{"type": "image"}]}], "a part of type 'image'"),
])  # fmt: skip
def test_bad_prompts_are_named(tmp_path, prompt, message):
    path = jsonl(tmp_path / "rows", [PLAIN, {"prompt": prompt}])
    with pytest.raises(DataError, match=message) as caught:
        task(train_data=path).load_data(0)
    assert f"{path}, line 2" in str(caught.value)


def by_text(text):
    return float(len(text))


BARE = [{"prompt": "a"}, {"prompt": "b"}]
ANSWERED = [{"prompt": "a", "answer": "4"}, {"prompt": "b", "answer": "5"}]


@pytest.mark.parametrize(("reward", "rows", "settings", "message"), [
    (length, [CHAT, CHAT], {"prompt": "raw"}, "cannot be raw"), (length, [{"question": "?"}], {}, "found question"),
    (exact, BARE, {}, r"exact takes answer, which the data does not have \(columns: prompt\)"),
    (exact, [{**row, "target": "Ho"} for row in BARE], {}, r"or set task\.columns: \{answer: target\}"),
    (exact, ANSWERED, {"columns": {"solution": "answer"}}, r"takes answer, .*; task\.columns calls answer solution"),
    (by_text, ANSWERED, {}, r"by_text takes text, .*; a function for one completion takes text and"),
    (length, BARE, {"gold": "right"}, "column right is missing"),
    (length, [{**row, "right": 4} for row in BARE], {"gold": "right"}, "column right holds 4, which is not text"),
])  # fmt: skip
def test_rows_need_the_columns_that_functions_and_settings_name(reward, rows, settings, message, tmp_path):
    with pytest.raises(DataError, match=message):
        task(reward, train_data=jsonl(tmp_path / "rows", rows), **settings).load_data(0)


def pops(text, example):
    return float(len(example["numbers"]) - bool(example["numbers"].pop()) + 1)


def pops_all(prompts, completions, numbers, **columns):
    """Return the sizes of row, prompt and completion, then remove an item from each."""
    rows = list(zip(prompts, completions, numbers, strict=True))
    left = [float(sum(map(len, row))) for row in rows]
    for row in rows:
        for part in row:
            part.pop()
    return left


class Takes(Task):
    """Custom task whose scoring methods all clear the row."""

    name, max_reward = "takes", 3.0

    def load_data(self, seed):
        rows = [{"numbers": [1, 2, 3], "deep": {"a": [1]}, "when": datetime.date(2020, 1, 1)}]
        return Data(rows, rows)

    def prompt(self, example):
        return "Hello"

    def compute_reward(self, text, example):
        count = float(len(example["numbers"]) + len(example["deep"]["a"]) - 1)
        example["numbers"].clear()
        example["deep"]["a"].clear()
        return count

    def gold(self, example):
        return str(self.compute_reward("", example))

    def measures(self, text, example):
        return {"left": self.compute_reward("", example)}


class TakesAtOnce(Takes):
    def columns(self, texts, examples):
        return {"left": [self.compute_reward("", example) for example in examples]}


@pytest.mark.parametrize("isolated", [True, False])
@pytest.mark.parametrize(("rewards", "want"), [
    ([pops, pops], 6.0), ([pops_all, pops_all], 12.0), (Takes, 3.0), (TakesAtOnce, 3.0),
], ids=["simple", "trl", "task", "task at once"])  # fmt: skip
def test_rewards_get_copies(rewards, want, isolated):
    """Rows are shared by all members, by later generations, by evaluations and, of functions, by each other."""
    made = task(*rewards) if isinstance(rewards, list) else rewards(TaskConfig())
    row = {"prompt": [{"role": "user", "content": "Hi"}] * 2, "numbers": [1, 2, 3]}
    with closing(isolate(made, GraderConfig(isolated=isolated, retries=0))) as scored:
        if isinstance(made, Takes):
            row = scored.load_data(0).train[0]
        before = repr(row)
        for _ in range(2):
            assert rewards_of(scored, ["a", "b", "c", "d"], [row] * 4) == [want] * 4
        if isinstance(made, Takes):
            scored.self_check([row, row])
            for _ in range(2):
                assert scored.measures("a", scored.handed(row)) == {"left": 3.0}
                assert scored.gold(scored.handed(row)) == "3.0"
        assert repr(row) == before


def test_immutable_values_are_not_copied():
    text, numbers, lock = "a" * 1000, [1, 2], threading.Lock()
    copied = fresh({"text": text, "numbers": numbers, "array": np.arange(3), "lock": lock})
    assert copied["text"] is text and copied["lock"] is lock
    assert copied["numbers"] == numbers and copied["numbers"] is not numbers


@pytest.mark.parametrize("isolated", [True, False])
def test_gold_column_does_not_affect_scores(tmp_path, isolated):
    file = jsonl(tmp_path / "rows.jsonl", [PLAIN, {**PLAIN, "answer": None}])
    made = task(train_data=file, test_data=file, gold="answer")
    with closing(isolate(made, GraderConfig(isolated=isolated))) as found:
        known, unknown = found.load_data(0).test
        assert (found.gold(known), found.gold(unknown)) == ("4", None)
        assert [found.is_right(text, known) for text in ("it is 4.", "44", "five")] == [True, False, False]
        assert found.is_right("4", unknown) is None and found.compute_reward("four", known) == 4.0
        found.self_check([known, unknown])
        assert task(length).gold(known) is None, "not asked for"


@pytest.mark.parametrize(
    ("settings", "roles"),
    [
        ({}, None),
        ({"prompt": "raw"}, None),
        ({"prompt": "chat"}, ["user"]),
        ({"system_prompt": "Be brief."}, ["system", "user"]),
    ],
)
def test_a_text_is_a_user_message_of_a_chat(settings, roles):
    """A system message is of a chat, also where `task.prompt` is not set."""
    prompt = task(**settings).prompt(PLAIN)
    assert prompt == PLAIN["prompt"] if roles is None else [message["role"] for message in prompt] == roles
