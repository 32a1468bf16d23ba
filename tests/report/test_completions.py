# SPDX-License-Identifier: Apache-2.0
"""Completions of the best, the median and the worst member, from a real run and by hand."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from rich.console import Console

import evoalign
from evoalign import tokens
from evoalign.config import ModelConfig, TaskConfig
from evoalign.errors import DataError
from evoalign.report import rows
from evoalign.rundir.parquet import read as table_of
from evoalign.tasks import create
from evoalign.tasks.base import Data, Task
from evoalign.types import Example, Generation, Prompt, Rollout, Update, population

TOKENS = tokens.load(ModelConfig(name="tiny"))


class Echo(Task):
    """Prompts that are messages, and no gold answers."""

    name = "echo"

    def load_data(self, seed: int) -> Data:
        return Data([], [])

    def prompt(self, example: Example) -> Prompt:
        return [{"role": "system", "content": "Say it."}, {"role": "user", "content": example["word"]}]

    def compute_reward(self, text: str, example: Example) -> float:
        return 0.0


def generation(scores: list[list[float]], index: int = 3, *, antithetic: bool = False) -> Generation:
    members = population(len(scores), antithetic=antithetic)
    rollouts = tuple(
        Rollout(member, p, tuple(range(p + 1)), f"text {member.index} {p}\x00\n", "length" if p else "stop")
        for member in reversed(members)  # in any order
        for p in range(len(scores[0]))
    )
    fitness = tuple(float(np.mean(row)) for row in scores)
    update = Update(index, index, members, (0.0,) * len(members), 0.01, 0.005)
    rows = tuple(map(tuple, scores))
    return Generation(
        index, 10, fitness, rows, update, "00", 9, 0.0, 0.0, {}, rows=(4, 2), rollouts=rollouts
    )  # fmt: skip


def written(path: Path, one: Generation) -> list[dict[str, Any]]:
    rows.write_completions(path, one, [{"word": "four"}, {"word": "two"}], Echo(TaskConfig()), TOKENS)
    return table_of(path)


def test_rows_in_a_fixed_order_with_what_each_member_said(tmp_path: Path) -> None:
    scores = [[1.0, 2.0], [9.0, 9.5], [0.0, -1.0], [5.0, 5.0]]
    path = tmp_path / "folder" / "a.parquet"
    rows = written(path, generation(scores, antithetic=True))
    assert [(row["role"], row["member"], row["sign"]) for row in rows] == [
        ("best", 1, -1), ("best", 1, -1), ("median", 0, 1), ("median", 0, 1), ("worst", 2, 1), ("worst", 2, 1),
    ]  # fmt: skip
    assert [row["score"] for row in rows] == [9.0, 9.5, 1.0, 2.0, 0.0, -1.0]
    assert [row["fitness"] for row in rows] == [9.25, 9.25, 1.5, 1.5, -0.5, -0.5]
    assert [row["prompt"] for row in rows] == ["Say it.\nfour", "Say it.\ntwo"] * 3
    assert [row["rendered"] for row in rows] == [
        f"<|im_start|>system\nSay it.<|im_end|>\n<|im_start|>user\n{word}<|im_end|>\n<|im_start|>assistant\n"
        for word in ("four", "two")
    ] * 3
    assert [row["text"] for row in rows[:2]] == ["text 1 0\x00\n", "text 1 1\x00\n"]
    assert [(row["finish_reason"], row["tokens"]) for row in rows[:2]] == [("stop", 1), ("length", 2)]
    assert all(row["generation"] == 3 and row["target"] is None for row in rows)
    schema = parquet.read_schema(path)
    assert schema.names == ["generation", "role", "member", "sign", "fitness", "prompt", "target", "rendered", "text",
                            "score", "finish_reason", "tokens"]  # fmt: skip
    assert schema.field("score").type == schema.field("fitness").type == pyarrow.float64()
    assert [p.name for p in path.parent.iterdir()] == ["a.parquet"], "no temporary file is left"


@pytest.mark.parametrize(
    ("fitness", "expected"),
    [
        ([1.0, 1.0, 1.0], (0, 0, 0)),
        ([0.0, 2.0, 2.0, 0.0, 1.0], (1, 4, 0)),
        ([3.0, 1.0, 3.0, 1.0], (0, 1, 1)),  # the lower of the two middle ones
        ([2.0, 1.0], (0, 1, 1)),
        ([0.0, 1.0, 2.0], (2, 1, 0)),
    ],
)
def test_of_members_alike_the_one_with_the_lowest_index(fitness: list[float], expected: tuple[int, ...]) -> None:
    assert tuple(rows.roles(fitness).values()) == expected
    assert list(rows.roles(fitness)) == ["best", "median", "worst"]


@pytest.mark.parametrize(
    ("every", "kept"), [(0, []), (1, list(range(10))), (4, [0, 4, 8, 9]), (9, [0, 9]), (100, [0, 9])]
)
def test_when_completions_are_kept(every: int, kept: list[int]) -> None:
    due = [i for i in range(10) if rows.completions_due(every, i, 10)]
    assert due == kept


@pytest.mark.slow
def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    rows = written(path, generation([[1.0, 2.0], [3.0, 4.0]]))
    data = path.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")  # parquet has no checksum for what follows
    caught = 0
    for place in range(4, footer, 5):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :])
        try:
            assert table_of(path) == rows, f"byte {place} of {footer}"
        except DataError as error:
            assert str(path) in str(error) and "\n" not in str(error)
            caught += 1
    assert caught > footer / 5 / 2
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=r"a\.parquet is damaged"):
        table_of(path)


@pytest.mark.slow
def test_a_real_run_keeps_what_its_members_said(tmp_path: Path) -> None:
    seen = list[Generation]()
    tree = {"output_dir": str(tmp_path / "run"), "seed": 1, "evaluation": {"max_tokens": 12},
            "task": {"batch_size": 1},
            "es": {"sigma": 0.02, "learning_rate": 0.02, "num_generations": 2, "population_size": 6}}  # fmt: skip
    evoalign.train(tree, console=Console(file=io.StringIO()), on_generation=seen.append)
    task = create(TaskConfig(), None)
    train = task.load_data(1).train
    for one in seen:
        examples = [train[i] for i in one.rows]
        rows.write_completions(tmp_path / f"{one.index}.parquet", one, examples, task, TOKENS)
        found = table_of(tmp_path / f"{one.index}.parquet")
        assert len(found) == 3 and len(examples) == 1
        for row, example in zip(found, examples * 3, strict=True):
            assert row["prompt"] == example["prompt"] and row["target"] == task.gold(example)
            assert row["rendered"] == TOKENS.render([{"role": "user", "content": example["prompt"]}])[0]
            assert row["score"] == task.rewards([row["text"]], [example])[0]
        ranked = sorted(one.fitness_M)
        means = [np.mean([r["score"] for r in found if r["role"] == role]) for role in ("best", "median", "worst")]
        assert means == pytest.approx([ranked[-1], ranked[2], ranked[0]])
