# SPDX-License-Identifier: Apache-2.0
"""Reading rows and splitting them."""

import os
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from task_runs import jsonl

from evoalign import tasks
from evoalign.config import TaskConfig
from evoalign.config.load import locate
from evoalign.errors import ConfigError, DataError
from evoalign.rundir import parquet as tables
from evoalign.tasks import data

ROWS = [{"n": i} for i in range(10)]
FILES = {"all": ROWS, "six": ROWS[:6], "last": ROWS[6:], "five": ROWS[:5], "rest": ROWS[5:], "one": ROWS[:1],
         "two": ROWS[:2], "empty": ROWS[:0]}  # fmt: skip
ORDER = np.random.RandomState(5).permutation(10).tolist()
ENDS = {"train_data": "all", "split": "first_last"}


@pytest.fixture
def load(tmp_path):
    """Loads files of `FILES` by name, as the config or `default` names them."""
    paths = {name: jsonl(tmp_path / name, rows) for name, rows in FILES.items()}

    def load(seed=5, default=None, **settings):
        config = TaskConfig(name="custom", **{name: paths.get(value, value) for name, value in settings.items()})
        shipped = None if default is None else (paths[default[0]], paths[default[1]])
        return data.load(config, seed, lambda where, row: row, shipped)

    return load


def numbers(data):
    return tuple([row["n"] for row in rows] for rows in (data.train, data.validation, data.test))


@pytest.mark.parametrize("seed", [0, 33, 2**32 - 1])
def test_seeded_is_numpys_frozen_permutation(seed, load):
    order = np.random.RandomState(seed).permutation(10).tolist()
    assert numbers(load(seed, train_data="all")) == (order[:8], [], order[8:])


def test_seeds_of_more_than_32_bits_are_all_different(load):
    seeds = (1, 2**32 + 1, 2**33 + 1, 2**63 - 1)
    assert len({tuple(numbers(load(seed, train_data="all"))[0]) for seed in seeds}) == 4


@pytest.mark.parametrize(("settings", "parts"), [
    ({"train_data": "all"}, (ORDER[:8], [], ORDER[8:])),
    ({"train_data": "all", "train_size": 3, "test_size": 1}, (ORDER[:3], [], ORDER[8:9])),
    ({"train_data": "all", "validation_size": 3}, (ORDER[:5], ORDER[5:8], ORDER[8:])),
    ({"train_data": "all", "train_size": 2, "validation_size": 3, "test_size": 1}, (ORDER[:2], ORDER[2:5], ORDER[8:9])),
    ({"train_data": "two"}, ([0], [], [1])), ({**ENDS, "train_size": 2, "test_size": 3}, ([0, 1], [], [7, 8, 9])),
    ({**ENDS, "train_size": 4, "test_size": 6}, ([0, 1, 2, 3], [], [4, 5, 6, 7, 8, 9])),
    ({**ENDS, "train_size": 2, "validation_size": 3, "test_size": 4}, ([0, 1], [2, 3, 4], [6, 7, 8, 9])),
    ({"train_data": "six", "test_data": "last", "train_size": 5}, ([0, 1, 2, 3, 4], [], [6, 7, 8, 9])),
    ({"train_data": "six", "test_data": "last", "validation_size": 2}, ([0, 1, 2, 3], [4, 5], [6, 7, 8, 9])),
    ({"train_data": "six", "test_data": "last", "train_size": 1, "validation_size": 2}, ([0], [1, 2], [6, 7, 8, 9])),
    ({"train_data": "all", "validation_data": "rest"}, (ORDER[:8], [5, 6, 7, 8, 9], ORDER[8:])),
    ({"train_data": "all", "validation_data": "rest", "validation_size": 2}, (ORDER[:8], [5, 6], ORDER[8:])),
    ({"train_data": "two", "test_data": "five", "validation_data": "last"}, ([0, 1], [6, 7, 8, 9], [0, 1, 2, 3, 4])),
    ({"default": ("six", "last")}, ([0, 1, 2, 3, 4, 5], [], [6, 7, 8, 9])),
    ({"default": ("six", "last"), "test_data": "five"}, ([0, 1, 2, 3, 4, 5], [], [0, 1, 2, 3, 4])),
    ({"default": ("six", "last"), "validation_data": "rest", "validation_size": 1},
     ([0, 1, 2, 3, 4, 5], [5], [6, 7, 8, 9])),
    ({"default": ("six", "last"), "train_data": "all"}, (ORDER[:8], [], ORDER[8:])),
])  # fmt: skip
def test_load_takes_the_rows_that_the_settings_name(settings, parts, load):
    """Validation rows follow the training rows where those are counted, and are the last ones otherwise."""
    assert numbers(load(**settings)) == parts


@pytest.mark.parametrize(("settings", "error", "said"), [
    ({}, ConfigError, r"task.train_data is not set"),
    ({"train_data": "all", "train_size": 9}, DataError, r"task.train_size is 9, but the 80 % of .*all has 8 rows"),
    ({"train_data": "one"}, DataError, "too few rows"),
    ({**ENDS, "train_size": 5, "test_size": 6}, DataError, "first 5 and last 6 overlap"),
    (ENDS, ConfigError, r"needs task\.train_size and task\.test_size"),
    ({**ENDS, "train_size": 2}, ConfigError, r"needs task\.train_size and task\.test_size"),
    ({**ENDS, "test_size": 2}, ConfigError, r"needs task\.train_size and task\.test_size"),
    ({"train_data": "six", "test_data": "last", "test_size": 5}, DataError, r"task\.test_size is 5"),
    ({"train_data": "all", "validation_size": 8}, DataError, r"task\.validation_size is 8, but the 80 % of .* 8 rows"),
    ({"train_data": "all", "train_size": 6, "validation_size": 3}, DataError,
     r"task\.train_size 6 and task\.validation_size 3 are 9 rows"),
    ({**ENDS, "train_size": 6, "test_size": 3, "validation_size": 2}, DataError,
     r"validation_size 2 are 8 rows, but .*all before its test rows has 7"),
    ({"train_data": "all", "validation_data": "empty"}, DataError, "empty has no rows"),
    ({"train_data": "all", "validation_data": "two", "validation_size": 3}, DataError,
     r"task\.validation_size is 3, but .*two has 2 rows"),
    ({"train_data": "all", "validation_data": "nowhere"}, DataError,
     r"set task\.train_data, test_data or validation_data"),
])  # fmt: skip
def test_load_rejects_splits_that_do_not_fit(settings, error, said, load):
    with pytest.raises(error, match=said) as caught:
        load(**settings)
    assert "\n" not in str(caught.value)


def test_rows_have_their_place(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('{"n": 1}\n\n{"n": "a\u2028b"}\r\n', encoding="utf-8")
    assert data.read(str(path)) == [(f"{path}, line 1", {"n": 1}), (f"{path}, line 3", {"n": "a\u2028b"})]
    path.write_text('\ufeff [{"n": 1},\n {"n": 2}]\n', encoding="utf-8")
    assert [where for where, _ in data.read(str(path))] == [f"{path}, row 1", f"{path}, row 2"]
    rows = [{"prompt": [{"role": "user", "content": text}], "n": i} for i, text in enumerate(("Hi", "Ho"))]
    parquet.write_table(pa.Table.from_pylist(rows), path)
    assert data.read(str(path)) == [(f"{path}, row {i + 1}", row) for i, row in enumerate(rows)]


@pytest.mark.parametrize(("content", "message"), [
    (b'{"n": 1}\n{"n": \n', "line 2: not JSON at column"), (b'{"n": 1}\n[1]\n', "line 2: expected an object"),
    (b'{\n "n": 1\n}\n', "line 1: not JSON"), (b'[{"n": 1},\n {"n" 2}]', "not JSON at line 2, column"),
    (b"[1, 2]", "row 1: expected an object"), (b"[]", "has no rows"), (b"", "has no rows"), (b"\n \n", "has no rows"),
    (b"\xff\xfe\x00", "neither parquet nor UTF-8"), (b"PAR1 and no more", "damaged parquet"),
    (b"[" * 200_000, "not readable as JSON"),
    (b'{"n": ' + b"[" * 600 + b"]" * 600 + b"}", "line 1: 'n' is nested deeper than 64 levels"),
    (b'{"n": 1, "n": 2}', "line 1: not readable as JSON: duplicate key 'n'"),
    (b'[{"n": 1}, {"p": [{"m": 1, "o": 2, "m": 1}]}]', "duplicate key 'm'"),
    (b"{%s}" % b",".join(b'"%d": 1' % (i % 199_999) for i in range(200_000)), "duplicate key '0'"),
    (b'{"n": "a\\ud800b"}', r"line 1: 'n' has half a surrogate pair, \\ud800"),
    (b'{"n": [{"\\udfff": 1}]}', r"line 1: 'n' has half a surrogate pair, \\udfff"),
    (b'[{"n": 1}, {"\\ud800": 1}]', "row 2: .* has half a surrogate pair"),
    (b'{"n": "' + b"a" * (1 << 24) + b'b"}', "a text of 'n' has 16,777,217 characters; at most 16,777,216"),
    (b'{"n": ' + b"9" * 5000 + b"}", "line 1: not readable as JSON"), (b"prompt,answer\n1,2\n", "line 1: not JSON"),
])  # fmt: skip
def test_damaged_files_are_named(tmp_path, content, message):
    path = tmp_path / "rows.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        data.read(str(path))
    assert str(path) in str(caught.value)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
def test_pipes_are_rejected(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(DataError, match="is not a file"):
        data.read(str(tmp_path / "pipe.jsonl"))


@pytest.mark.parametrize(("column", "said"), [
    (pa.array(["Hi", "a" * (data.MAX_TEXT + 1)]), "row 2: a text of 'prompt' has"),
    (pa.array([2**52], pa.timestamp("s")), "has a value that Python cannot represent: .*; write it as text"),
    (pa.array([2**52], pa.timestamp("ms")), "has a value that Python cannot represent: .*; write it as text"),
], ids=["long", "seconds", "milliseconds"])  # fmt: skip
def test_parquet_values_are_validated_like_json(column, said, tmp_path):
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"prompt": column}), path)
    with pytest.raises(DataError, match=said) as error:
        data.read(str(path))
    assert "\n" not in str(error.value)


def test_library_messages_are_printable(tmp_path, monkeypatch):
    def damaged(*_, **__):
        raise pa.ArrowInvalid("don't know what type: \x0f \x1b[2J")

    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"prompt": ["Hi"]}), path)
    for name in ("read_table", "ParquetFile"):
        monkeypatch.setattr(parquet, name, damaged)
    readers = [lambda: data.read(str(path)), lambda: tables.read(path)]
    for read in readers:
        with pytest.raises(DataError, match=r"know what type: \? \?\[2J") as caught:
            read()
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("task", ["conciseness", "custom"])
def test_column_names_in_errors_are_printable(task, tmp_path):
    file = jsonl(tmp_path / "rows.json", [{"pr\x7fmpt\x1b[2J": "a", "x" * 10_000: 1}])
    made = tasks.create(TaskConfig(name=task, train_data=file), [len] if task == "custom" else None)
    with pytest.raises(DataError, match=r"found pr\?mpt\?\[2J, xxx") as caught:
        made.load_data(0)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500


def test_local_files_precede_shipped_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert locate("data/tasks/countdown/countdown.json").is_absolute()
    assert locate("countdown.json") == Path("countdown.json")
    assert locate("data/tasks/none.json") == Path("data/tasks/none.json")
    own = Path("data/tasks/countdown/countdown.json")
    own.parent.mkdir(parents=True)
    own.write_text("[]", encoding="utf-8")
    assert locate(str(own)) == own


@pytest.mark.parametrize(("source", "split"), [("hub:who/what", "train"), ("hub:who/what:test", "test")])
def test_read_loads_data_sets_of_the_hub(source, split, monkeypatch):
    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert data.read(source)[9] == (f"{source}, row 10", {"n": 9})
    assert asked == [("who/what", split)]


def test_hub_failures_are_data_errors(monkeypatch):
    def load_dataset(name, split):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match="cannot load hub:a/b: ConnectionError: no route"):
        data.read("hub:a/b")
    with pytest.raises(ConfigError, match="is not the name of a data set"):
        data.read("hub:")
