# SPDX-License-Identifier: Apache-2.0
"""Data and rewards of the user's own, with TRL's semantics."""

import asyncio
import datetime
import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from pydantic import ValidationError

from evoalign.config import GraderConfig, TaskConfig
from evoalign.errors import ConfigError, DataError, RewardError
from evoalign.rewards.functions import fresh
from evoalign.rewards.objective import Columns
from evoalign.rollouts import rewards_of
from evoalign.tasks import Data, Task, create, isolate
from evoalign.types import Example

PLAIN = {"prompt": "2 + 2 =", "answer": "4", "id": 7}
CHAT = {"prompt": [{"role": "user", "content": "2 + 2 ="}], "answer": "4"}


def task(*rewards: Callable[..., Any], **settings: Any) -> Any:
    return create(TaskConfig(name="custom", **settings), rewards or (length,))


def length(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(c)) for c in completions]


def exact(completions: list[str], answer: list[str]) -> list[float | None]:
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


# --- TRL's semantics ------------------------------------------------------------------------------------------------


def test_everything_is_passed_by_keyword() -> None:
    seen: dict[str, Any] = {}

    def spy(**kwargs: Any) -> list[float]:
        seen.update(kwargs)
        return [0.0, 1.0]

    assert task(spy).rewards([" a ", "b"], [PLAIN, PLAIN | {"answer": "5"}]) == [0.0, 1.0]
    loggers = {name: seen.pop(name) for name in ("log_extra", "log_metric")}
    assert seen == {"prompts": ["2 + 2 =", "2 + 2 ="], "completions": ["a", "b"], "answer": ["4", "5"], "id": [7, 7]}
    assert loggers["log_metric"]("accuracy", 0.5) is None
    assert loggers["log_extra"]("column", ["x", "y"]) is None


def test_a_function_gets_only_what_it_names() -> None:
    assert task(exact).rewards(["4", "5"], [PLAIN, PLAIN]) == [1.0, 0.0]


def test_message_prompts_come_with_message_completions() -> None:
    seen: list[Any] = []

    def spy(prompts: Any, completions: Any) -> list[float]:
        seen.append((prompts, completions))
        return [1.0] * len(prompts)

    task(spy).rewards(["4"], [CHAT])
    assert seen == [([CHAT["prompt"]], [[{"role": "assistant", "content": "4"}]])]


def test_the_columns_form_decides_what_rewards_see_not_the_prompts_form() -> None:
    chat = task(prompt="chat")
    assert chat.prompt(PLAIN) == [{"role": "user", "content": "2 + 2 ="}]
    assert chat.rewards(["four"], [PLAIN]) == [4.0]
    assert task().prompt(PLAIN) == task(prompt="raw").prompt(PLAIN) == "2 + 2 ="
    assert task().prompt(CHAT) == CHAT["prompt"]


def test_a_column_missing_in_one_row_is_none() -> None:
    def spy(completions: list[str], hint: list[str | None]) -> list[float]:
        return [float(h is None) for h in hint]

    assert task(spy).rewards(["a", "b"], [PLAIN, PLAIN | {"hint": "x"}]) == [1.0, 0.0]


def test_columns_cannot_hide_the_completions() -> None:
    assert task().rewards(["ab"], [PLAIN | {"completions": "x", "prompts": "y", "completion_ids": [1]}]) == [2.0]


def test_weights() -> None:
    weighted = task(length, exact, reward_weights=[0.5, 10.0])
    assert weighted.rewards(["4", "12"], [PLAIN, PLAIN]) == [10.5, 1.0]
    assert task(length, exact).rewards(["4"], [PLAIN]) == [2.0]
    with pytest.raises(ConfigError, match="1 weights for 2 rewards"):
        task(length, exact, reward_weights=[1.0])
    with pytest.raises(ValidationError, match="finite number"):
        task(length, exact, reward_weights=[1.0, float("nan")])


def test_weighted_sum_ignores_none() -> None:
    def sometimes(completions: list[str], **kwargs: Any) -> list[float | None]:
        return [None if c == "skip" else 100.0 for c in completions]

    assert task(length, sometimes).rewards(["skip", "go"], [PLAIN, PLAIN]) == [4.0, 102.0]
    with pytest.raises(
        RewardError, match=r"every reward function \(sometimes\) returned None for the completion 'skip'"
    ):
        task(sometimes).rewards(["go", "skip"], [PLAIN, PLAIN])


@pytest.mark.parametrize(("value", "message"), [
    ([1.0], "bad returned 1 values for 2 completions"), ([1.0, 2.0, 3.0], "bad returned 3 values for 2 completions"),
    (1.0, "bad returned 1.0; return a list"), ("ab", "bad returned 'ab'; return a list"),
    (None, "bad returned None; return a list"), ([1.0, "2"], "bad returned '2' for the completion 'two'"),
    ([1.0, True], "bad returned True for the completion 'two'"),
    ([1.0, float("nan")], "bad returned nan for the completion 'two'"),
    ([float("-inf"), 1.0], "bad returned -inf for the completion 'one'"), ([1.0, [2.0]], "bad returned"),
    ([1e308, 1e308], None),
])  # fmt: skip
def test_invalid_values_raise_reward_error(value: Any, message: str | None) -> None:
    def bad(**kwargs: Any) -> Any:
        return value

    if message is None:  # each is finite, their sum is not
        bad_twice, message = task(bad, bad), "no finite sum"
    else:
        bad_twice = task(length, bad)
    with pytest.raises(RewardError, match=message):
        bad_twice.rewards(["one", "two"], [PLAIN, PLAIN])


@pytest.mark.parametrize("make", [np.array, torch.tensor, tuple, lambda v: [np.float32(x) for x in v]])
def test_arrays_and_tensors_are_lists_too(make: Callable[[list[float]], Any]) -> None:
    assert task(lambda **kwargs: make([1.0, 2.0])).rewards(["a", "b"], [PLAIN, PLAIN]) == [1.0, 2.0]


def test_a_failing_function_is_named_and_is_never_a_reward() -> None:
    def broken(completions: list[str]) -> list[float]:
        raise KeyError("gone")

    with pytest.raises(RewardError, match="reward function broken failed: KeyError: 'gone'") as caught:
        task(broken).rewards(["a"], [PLAIN])
    assert isinstance(caught.value.__cause__, KeyError)


def test_required_trainer_arguments_are_rejected() -> None:
    def by_ids(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [float(len(ids)) for ids in completion_ids]

    def by_state(completions: list[str], trainer_state: Any = None) -> list[float]:
        return [float(trainer_state is None)] * len(completions)

    with pytest.raises(ConfigError, match="by_ids requires completion_ids"):
        task(by_ids)
    assert task(by_state).rewards(["a"], [PLAIN]) == [1.0]


def test_no_completions_no_calls() -> None:
    assert task(lambda **kwargs: 1 / 0).rewards([], []) == []


def test_one_completion() -> None:
    assert task().compute_reward("abc", PLAIN) == 3.0


# --- the simple form, and async -------------------------------------------------------------------------------------


def test_the_simple_form() -> None:
    def compute_reward(text: str, example: Any) -> float | None:
        return None if example["id"] == 8 else float(text == example["answer"])

    assert task(compute_reward).rewards([" 4 ", "5"], [PLAIN, PLAIN]) == [1.0, 0.0]
    assert task(length, compute_reward).rewards(["4"], [PLAIN | {"id": 8}]) == [1.0]


def test_async_functions_are_awaited_together() -> None:
    async def judge(completions: list[str], **kwargs: Any) -> list[float]:
        await asyncio.sleep(0.2)
        return [1.0 for _ in completions]

    async def slow(text: str, example: Any) -> float:
        await asyncio.sleep(0.2)
        return float(len(text))

    started = time.monotonic()
    assert task(judge, slow, length, judge).rewards(["ab", "c"], [PLAIN, PLAIN]) == [6.0, 4.0]
    assert time.monotonic() - started < 0.6  # one after the other: 0.8


def test_async_inside_a_running_loop() -> None:
    async def judge(completions: list[str]) -> list[float]:
        await asyncio.sleep(0)
        return [1.0 for _ in completions]

    async def notebook() -> list[float]:
        return task(judge).rewards(["a"], [PLAIN])

    assert asyncio.run(notebook()) == [1.0]


def test_async_objects_and_failures() -> None:
    class Judge:
        async def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
            if completions == ["bad"]:
                raise TimeoutError("judge is away")
            return [2.0 for _ in completions]

    assert task(Judge()).rewards(["a"], [PLAIN]) == [2.0]
    with pytest.raises(RewardError, match="reward function Judge failed: TimeoutError: judge is away"):
        task(Judge(), length).rewards(["bad"], [PLAIN])


def test_a_plain_function_may_run_a_loop_of_its_own() -> None:
    async def judge(completions: list[str]) -> list[float]:
        return [1.0]

    def wrapped(completions: list[str]) -> list[float]:
        return asyncio.run(judge(completions))

    assert task(judge, wrapped).rewards(["a"], [PLAIN]) == [2.0]


# --- where functions and rows come from -----------------------------------------------------------------------------


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


def test_functions_by_import_path(tmp_path: Path) -> None:
    source = tmp_path / "mine.py"
    source.write_text("def score(completions, **kwargs):\n    return [len(c) for c in completions]\n", encoding="utf-8")
    config = TaskConfig(name="custom", rewards=[f"{source}:score"])
    assert create(config).rewards(["abc"], [PLAIN]) == [3.0]
    with pytest.raises(ConfigError, match=r"task\.rewards"):
        create(TaskConfig(name="custom", rewards=[f"{source}:none"]))
    with pytest.raises(ConfigError, match=r"task\.rewards is empty"):
        create(TaskConfig(name="custom"))
    with pytest.raises(ConfigError, match="is not a function"):
        task("length")  # type: ignore[arg-type]


def test_jsonl_and_parquet(tmp_path: Path) -> None:
    rows = [PLAIN | {"id": i} for i in range(5)]
    data = task(train_data=write(tmp_path / "rows.jsonl", *rows)).load_data(0)
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
def test_bad_prompts_are_named(tmp_path: Path, prompt: Any, message: str) -> None:
    path = write(tmp_path / "rows", PLAIN, {"prompt": prompt})
    with pytest.raises(DataError, match=message) as caught:
        task(train_data=path).load_data(0)
    assert f"{path}, line 2" in str(caught.value)


def test_invalid_signatures_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="raw and chat"):
        task(prompt="short")
    with pytest.raises(DataError, match="cannot be raw"):
        task(prompt="raw", train_data=write(tmp_path / "rows", CHAT, CHAT)).load_data(0)
    with pytest.raises(DataError, match="no prompt; found question"):
        task(train_data=write(tmp_path / "other", {"question": "?"})).load_data(0)


def test_required_columns_must_exist(tmp_path: Path) -> None:
    path = write(tmp_path / "rows", {"prompt": "a"}, {"prompt": "b"})
    with pytest.raises(DataError, match=r"exact takes answer, which the data does not have \(columns: prompt\)"):
        task(exact, train_data=path).load_data(0)
    old = write(tmp_path / "old", {"prompt": "a", "answer": "4"}, {"prompt": "b", "answer": "5"})
    with pytest.raises(DataError, match=r"takes answer, which .*; task\.columns calls answer solution"):
        task(exact, train_data=old, columns={"solution": "answer"}).load_data(0)
    with pytest.raises(DataError, match=r"by_text takes text, .*; a function for one completion takes text and"):
        task(by_text_alone(), train_data=old).load_data(0)


def by_text_alone() -> Any:
    def by_text(text: str) -> float:
        return float(len(text))

    return by_text


# --- what a reward changes ------------------------------------------------------------------------------------------


def pops(text: str, example: Any) -> float:
    return float(len(example["numbers"]) - bool(example["numbers"].pop()) + 1)


def pops_all(prompts: list[Any], completions: list[Any], numbers: list[list[int]], **columns: Any) -> list[float]:
    """Return the sizes of row, prompt and completion, then remove an item from each."""
    rows = list(zip(prompts, completions, numbers, strict=True))
    left = [float(sum(map(len, row))) for row in rows]
    for row in rows:
        for part in row:
            part.pop()
    return left


class Takes(Task):
    """Custom task whose scoring methods all clear the row."""

    name = "takes"
    max_reward = 3.0

    def load_data(self, seed: int) -> Data:
        rows = [{"numbers": [1, 2, 3], "deep": {"a": [1]}, "when": datetime.date(2020, 1, 1)}]
        return Data(rows, rows)

    def prompt(self, example: Example) -> str:
        return "Hello"

    def compute_reward(self, text: str, example: Example) -> float:
        return self._taken(example)

    def gold(self, example: Example) -> str:
        return str(self._taken(example))

    def measures(self, text: str, example: Example) -> dict[str, float]:
        return {"left": self._taken(example)}

    def _taken(self, example: Any) -> float:
        count = float(len(example["numbers"]) + len(example["deep"]["a"]) - 1)
        example["numbers"].clear()
        example["deep"]["a"].clear()
        return count


class TakesAtOnce(Takes):
    def columns(self, texts: Sequence[str], examples: Sequence[Example]) -> Columns:
        return {"left": [self._taken(example) for example in examples]}


@pytest.mark.parametrize("isolated", [True, False])
@pytest.mark.parametrize("kind", ["simple", "trl", "task", "task at once"])
def test_rewards_get_copies(kind: str, isolated: bool) -> None:
    """Rows are shared by all members, by later generations, by evaluations and, of functions, by each other."""
    if kind in ("simple", "trl"):
        row: Example = {"prompt": [{"role": "user", "content": "Hi"}] * 2, "numbers": [1, 2, 3]}
        made, want = (
            task(*([pops, pops] if kind == "simple" else [pops_all, pops_all])),
            [6.0 if kind == "simple" else 12.0] * 4,
        )
    else:
        made, want = (Takes if kind == "task" else TakesAtOnce)(TaskConfig()), [3.0] * 4
        row = made.load_data(0).train[0]
    scored = isolate(made, GraderConfig(isolated=isolated, retries=0))
    before = repr(row)
    try:
        if kind.startswith("task"):
            row = scored.load_data(0).train[0]
        for _ in range(2):
            assert rewards_of(scored, ["a", "b", "c", "d"], [row] * 4) == want
        if kind.startswith("task"):
            scored.self_check([row, row])
            for _ in range(2):
                assert scored.measures("a", scored.handed(row)) == {"left": 3.0}
                assert scored.gold(scored.handed(row)) == "3.0"
        assert repr(row) == before
    finally:
        scored.close()


def test_immutable_values_are_not_copied() -> None:
    text, numbers, lock = "a" * 1000, [1, 2], threading.Lock()
    copied = fresh({"text": text, "numbers": numbers, "array": np.arange(3), "lock": lock})
    assert copied["text"] is text and copied["lock"] is lock
    assert copied["numbers"] == numbers and copied["numbers"] is not numbers


# --- right answers --------------------------------------------------------------------------------------------------


def written(path: Path, rows: Sequence[Example]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("isolated", [True, False])
def test_gold_column_does_not_affect_scores(tmp_path: Path, isolated: bool) -> None:
    file = written(tmp_path / "rows.jsonl", [PLAIN, {**PLAIN, "answer": None}])
    settings = {"train_data": file, "test_data": file, "gold": "answer"}
    found = isolate(task(length, **settings), GraderConfig(isolated=isolated))
    try:
        known, unknown = found.load_data(0).test
        assert (found.gold(known), found.gold(unknown)) == ("4", None)
        assert [found.is_right(text, known) for text in ("it is 4.", "44", "five")] == [True, False, False]
        assert found.is_right("4", unknown) is None and found.compute_reward("four", known) == 4.0
        found.self_check([known, unknown])
        assert task(length).gold(known) is None, "not asked for"
    finally:
        found.close()


@pytest.mark.parametrize(("answer", "said"), [
    ({}, "column right is missing"), ({"right": 4}, "column right holds 4, which is not text"),
], ids=["missing", "number"])  # fmt: skip
def test_gold_column_must_contain_text(tmp_path: Path, answer: Example, said: str) -> None:
    file = written(tmp_path / "rows.jsonl", [{"prompt": "2 + 2 =", **answer}])
    with pytest.raises(DataError, match=said):
        task(length, train_data=file, test_data=file, gold="right").load_data(0)


def test_built_in_tasks_reject_a_gold_column() -> None:
    with pytest.raises(ConfigError, match=r"task\.gold: answer is not for task conciseness"):
        create(TaskConfig(name="conciseness", gold="answer"))
