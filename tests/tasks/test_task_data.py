# SPDX-License-Identifier: Apache-2.0
"""Reading rows and splitting them."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from evoalign import tasks
from evoalign.config import TaskConfig
from evoalign.config.load import locate
from evoalign.errors import ConfigError, DataError
from evoalign.rundir import parquet as tables
from evoalign.tasks import data
from evoalign.tasks.base import Data

ROWS = [{"n": i} for i in range(10)]


def config(**settings: Any) -> TaskConfig:
    return TaskConfig(name="custom", **settings)


def split(seed: int = 0, rows: list[dict[str, int]] = ROWS, **settings: Any) -> Data:
    return data.split(rows, config(**settings), seed, "rows.json")


def load(seed: int = 0, default: tuple[str, str | None] | None = None, **settings: Any) -> Data:
    return data.load(config(**settings), seed, lambda where, row: row, default)


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def numbers(rows: Any) -> list[int]:
    return [row["n"] for row in rows]


# --- splits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 33, 2**32 - 1])
def test_seeded_is_numpys_frozen_permutation(seed: int) -> None:
    parts = split(seed)
    order = np.random.RandomState(seed).permutation(10).tolist()
    assert (numbers(parts.train), numbers(parts.test)) == (order[:8], order[8:])


def test_seeds_of_more_than_32_bits_are_all_different() -> None:
    orders = {tuple(numbers(split(seed).train)) for seed in (1, 2**32 + 1, 2**33 + 1, 2**63 - 1)}
    assert len(orders) == 4


def test_seeded_parts_are_cut_to_size() -> None:
    whole, cut = split(5), split(5, train_size=3, test_size=1)
    assert (cut.train, cut.test) == (whole.train[:3], whole.test[:1])
    with pytest.raises(DataError, match=r"task.train_size is 9, but the 80 % of rows.json has 8 rows; lower it"):
        split(train_size=9)


def test_first_last() -> None:
    parts = split(split="first_last", train_size=2, test_size=3)
    assert (numbers(parts.train), numbers(parts.test)) == ([0, 1], [7, 8, 9])
    assert numbers(split(split="first_last", train_size=4, test_size=6).test) == [4, 5, 6, 7, 8, 9]


def test_first_last_may_not_overlap() -> None:
    with pytest.raises(DataError, match="10 rows, so its first 5 and last 6 overlap"):
        split(split="first_last", train_size=5, test_size=6)


@pytest.mark.parametrize("sizes", [{}, {"train_size": 2}, {"test_size": 2}])
def test_first_last_needs_both_sizes(sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"needs task\.train_size and task\.test_size"):
        split(split="first_last", **sizes)


def test_validation_is_taken_from_the_training_side_alone(tmp_path: Path) -> None:
    """The rows that follow the training rows where those are counted, or else the last; the test rows are as ever."""
    whole, held = split(5), split(5, validation_size=3)
    assert (held.train, held.validation, held.test) == (whole.train[:5], whole.train[5:], whole.test)
    after = split(5, train_size=2, validation_size=3, test_size=1)
    assert (after.train, after.validation, after.test) == (whole.train[:2], whole.train[2:5], whole.test[:1])
    ends = split(split="first_last", train_size=2, validation_size=3, test_size=4)
    assert [numbers(part) for part in (ends.train, ends.validation, ends.test)] == [[0, 1], [2, 3, 4], [6, 7, 8, 9]]
    train, test = jsonl(tmp_path / "train", ROWS[:6]), jsonl(tmp_path / "test", ROWS[6:])
    files = load(seed=9, train_data=train, test_data=test, validation_size=2)
    assert [numbers(part) for part in (files.train, files.validation)] == [[0, 1, 2, 3], [4, 5]]
    files = load(seed=9, train_data=train, test_data=test, train_size=1, validation_size=2)
    assert [numbers(part) for part in (files.train, files.validation)] == [[0], [1, 2]]
    assert numbers(files.test) == [6, 7, 8, 9]


def test_a_validation_file_is_cut_to_its_first_rows_and_takes_none_from_training(tmp_path: Path) -> None:
    train, own = jsonl(tmp_path / "train", ROWS[:5]), jsonl(tmp_path / "own", ROWS[5:])
    without, parts = load(train_data=train), load(train_data=train, validation_data=own)
    assert (parts.train, parts.test) == (without.train, without.test)
    assert numbers(parts.validation) == [5, 6, 7, 8, 9] and not without.validation
    assert numbers(load(train_data=train, validation_data=own, validation_size=2).validation) == [5, 6]
    assert load(train_data=train, test_data=own, validation_data=own).validation == ROWS[5:]
    default = (train, own)
    assert numbers(load(default=default, validation_data=own, validation_size=1).validation) == [5]


@pytest.mark.parametrize(("settings", "told"), [
    ({"validation_size": 8}, r"task\.validation_size is 8, but the 80 % of rows.json has 8 rows"),
    ({"train_size": 6, "validation_size": 3}, r"task\.train_size 6 and task\.validation_size 3 are 9 rows, but"),
    (
        {"split": "first_last", "train_size": 6, "test_size": 3, "validation_size": 2},
        r"validation_size 2 are 8 rows, but rows.json before its test rows has 7",
    ),
])  # fmt: skip
def test_a_validation_split_that_does_not_fit_names_the_setting(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(DataError, match=told) as error:
        split(**settings)
    assert "\n" not in str(error.value)


def test_invalid_validation_file_raises_data_error(tmp_path: Path) -> None:
    train = jsonl(tmp_path / "train", ROWS)
    empty, short = jsonl(tmp_path / "empty", []), jsonl(tmp_path / "short", ROWS[:2])
    with pytest.raises(DataError, match="empty has no rows"):
        load(train_data=train, validation_data=empty)
    with pytest.raises(DataError, match=r"task\.validation_size is 3, but .*short has 2 rows"):
        load(train_data=train, validation_data=short, validation_size=3)
    with pytest.raises(DataError, match=r"set task\.train_data, test_data or validation_data"):
        load(train_data=train, validation_data=str(tmp_path / "nowhere"))


def test_an_empty_part_is_an_error() -> None:
    with pytest.raises(DataError, match="too few rows"):
        split(rows=ROWS[:1])
    assert len(split(rows=ROWS[:2]).train) == 1


def test_two_files_keep_their_order(tmp_path: Path) -> None:
    train, test = jsonl(tmp_path / "train", ROWS[:6]), jsonl(tmp_path / "test", ROWS[6:])
    parts = load(seed=9, train_data=train, test_data=test, train_size=5)
    assert (numbers(parts.train), numbers(parts.test)) == ([0, 1, 2, 3, 4], [6, 7, 8, 9])
    with pytest.raises(DataError, match=r"task\.test_size is 5"):
        load(train_data=train, test_data=test, test_size=5)


def test_the_default_test_file_goes_with_the_default_training_file_only(tmp_path: Path) -> None:
    default = jsonl(tmp_path / "train", ROWS[:6]), jsonl(tmp_path / "test", ROWS[6:])
    own = jsonl(tmp_path / "own", ROWS[:5])
    assert numbers(load(default=default).test) == [6, 7, 8, 9]
    assert numbers(load(default=default, test_data=own).test) == [0, 1, 2, 3, 4]
    assert len(load(default=default, train_data=own).test) == 1  # split 80/20


def test_no_data_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"task.train_data is not set"):
        load()


# --- files ----------------------------------------------------------------------------------------------------------


def test_rows_have_their_place(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('{"n": 1}\n\n{"n": "a\u2028b"}\r\n', encoding="utf-8")
    assert data.read(str(path)) == [(f"{path}, line 1", {"n": 1}), (f"{path}, line 3", {"n": "a\u2028b"})]
    path.write_text('\ufeff [{"n": 1},\n {"n": 2}]\n', encoding="utf-8")
    assert [where for where, _ in data.read(str(path))] == [f"{path}, row 1", f"{path}, row 2"]


def test_parquet_is_known_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "rows.data"
    messages = [[{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Ho"}]]
    parquet.write_table(pa.table({"prompt": messages, "n": [1, 2]}), path)
    assert data.read(str(path)) == [
        (f"{path}, row 1", {"prompt": messages[0], "n": 1}),
        (f"{path}, row 2", {"prompt": messages[1], "n": 2}),
    ]


@pytest.mark.parametrize(("content", "message"), [
    (b'{"n": 1}\n{"n": \n', "line 2: not JSON at column"), (b'{"n": 1}\n[1]\n', "line 2: expected an object"),
    (b'{\n "n": 1\n}\n', "line 1: not JSON"), (b'[{"n": 1},\n {"n" 2}]', "not JSON at line 2, column"),
    (b"[1, 2]", "row 1: expected an object"), (b"[]", "has no rows"), (b"", "has no rows"), (b"\n \n", "has no rows"),
    (b"\xff\xfe\x00", "neither parquet nor UTF-8"), (b"PAR1 and no more", "damaged parquet"),
    (b"[" * 200_000, "not readable as JSON"),
    (b'{"n": ' + b"[" * 600 + b"]" * 600 + b"}", "line 1: 'n' is nested deeper than 64 levels; make it flatter"),
    (b'{"n": 1, "n": 2}', "line 1: not readable as JSON: duplicate key 'n'"),
    (b'[{"n": 1}, {"p": [{"m": 1, "o": 2, "m": 1}]}]', "duplicate key 'm'"),
    (b"{%s}" % b",".join(b'"%d": 1' % (i % 199_999) for i in range(200_000)), "duplicate key '0'"),
    (b'{"n": "a\\ud800b"}', r"line 1: 'n' has half a surrogate pair, \\ud800"),
    (b'{"n": [{"\\udfff": 1}]}', r"line 1: 'n' has half a surrogate pair, \\udfff"),
    (b'[{"n": 1}, {"\\ud800": 1}]', "row 2: .* has half a surrogate pair"),
    (b'{"n": "' + b"a" * (1 << 24) + b'b"}', "a text of 'n' has 16,777,217 characters; at most 16,777,216"),
    (b'{"n": ' + b"9" * 5000 + b"}", "line 1: not readable as JSON"), (b"prompt,answer\n1,2\n", "line 1: not JSON"),
])  # fmt: skip
def test_damaged_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        data.read(str(path))
    assert str(path) in str(caught.value)


def test_urls_are_rejected() -> None:
    with pytest.raises(DataError, match=r"https://example\.org/data\.json: URLs are not supported; download the file"):
        data.read("https://example.org/data.json")


def test_missing_file_error_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no data file .*; set task.train_data"):
        data.read(str(tmp_path / "none.json"))
    with pytest.raises(DataError, match="has no JSON, JSONL, CSV, TSV or parquet files"):
        data.read(str(tmp_path))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
def test_pipes_are_rejected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(DataError, match="is not a file"):
        data.read(str(tmp_path / "pipe.jsonl"))


@pytest.mark.parametrize("kind", [pa.timestamp("s"), pa.timestamp("ms")])
def test_times_outside_pythons_range_raise_data_error(kind: pa.DataType, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"prompt": ["Hi"], "t": pa.array([2**52], kind)}), path)
    with pytest.raises(
        DataError, match=r"rows.parquet has a value that Python cannot represent: .*; write it as text"
    ) as error:
        data.read(str(path))
    assert "\n" not in str(error.value)


def test_library_messages_are_printable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(*_: object, **__: object) -> None:
        raise pa.ArrowInvalid("don't know what type: \x0f \x1b[2J")

    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"prompt": ["Hi"]}), path)
    monkeypatch.setattr(parquet, "read_table", damaged)
    monkeypatch.setattr(parquet, "ParquetFile", damaged)
    readers: list[Callable[[], object]] = [lambda: data.read(str(path)), lambda: tables.read(path)]
    for read in readers:
        with pytest.raises(DataError, match=r"know what type: \? \?\[2J") as caught:
            read()
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("task", ["conciseness", "custom"])
def test_column_names_in_errors_are_printable(task: str, tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps([{"pr\x7fmpt\x1b[2J": "a", "x" * 10_000: 1}]))
    made = tasks.create(
        TaskConfig(name=task, train_data=str(tmp_path / "rows.json")), *([[len]] if task == "custom" else [])
    )
    with pytest.raises(DataError, match=r"found pr\?mpt\?\[2J, xxx") as caught:
        made.load_data(0)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500


def test_parquet_rows_are_validated_like_json(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"prompt": ["Hi", "a" * (data.MAX_TEXT + 1)]}), path)
    with pytest.raises(DataError, match="row 2: a text of 'prompt' has"):
        data.read(str(path))


def test_local_files_precede_shipped_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert locate("data/tasks/countdown/countdown.json").is_absolute()
    assert locate("countdown.json") == Path("countdown.json")
    assert locate("data/tasks/none.json") == Path("data/tasks/none.json")
    own = Path("data/tasks/countdown/countdown.json")
    own.parent.mkdir(parents=True)
    own.write_text("[]", encoding="utf-8")
    assert locate(str(own)) == own


# --- hub ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "expected"), [("hub:who/what", ("who/what", "train")), ("hub:who/what:test", ("who/what", "test"))]
)
def test_hub_names(source: str, expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[tuple[str, str]] = []

    def load_dataset(name: str, split: str) -> datasets.Dataset:
        asked.append((name, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert data.read(source)[9] == (f"{source}, row 10", {"n": 9})
    assert asked == [expected]


def test_hub_failures_are_data_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load_dataset(name: str, split: str) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match="cannot load hub:a/b: ConnectionError: no route"):
        data.read("hub:a/b")
    with pytest.raises(ConfigError, match="is not the name of a data set"):
        data.read("hub:")
