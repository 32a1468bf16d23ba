# SPDX-License-Identifier: Apache-2.0
"""Many rows, which are in a file and not in memory: the same rows in the same order, and the same scores."""

import datetime
import errno
import json
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import task_runs
from pyarrow import parquet

from evoalign import rollouts
from evoalign.config import GraderConfig, ModelConfig, TaskConfig
from evoalign.errors import DataError, ModelError
from evoalign.rollouts import Encoded, lengths_of
from evoalign.tasks import Data, Task, create, isolate
from evoalign.tasks.data import spool
from evoalign.testing import tasks as contract
from evoalign.tokens import load
from evoalign.training import heading, saving

DAY = datetime.date(2026, 1, 1)
COUNT = 60
ROWS = [{"prompt": f"{i % 40} ü\u2028", "x": [i, -0.0, None, True, {"a": float("inf")}], "id": i} for i in range(COUNT)]


def by_id(completions, id, **columns):
    """Other for each row, and for a date that is one."""
    days = (isinstance(day, datetime.date) for day in columns.get("day") or [None] * len(id))
    return [len(c) * 100 + i + 0.5 * dated for c, i, dated in zip(completions, id, days, strict=True)]


def jsonl(path):
    return task_runs.jsonl(path, ROWS)


def dated(path):
    """Every third row has a date, which JSON has not."""
    rows = [{"prompt": row["prompt"], "id": row["id"], "day": DAY if row["id"] % 3 == 0 else None} for row in ROWS]
    parquet.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


@pytest.fixture(params=[jsonl, dated])
def source(request, tmp_path):
    return request.param(tmp_path / "rows")


def loaded(monkeypatch, most, task):
    monkeypatch.setattr(spool, "IN_MEMORY", most)
    return task.load_data(7)


@pytest.mark.parametrize("settings", [
    {"validation_size": 5}, {"split": "first_last", "train_size": 20, "validation_size": 10, "test_size": 15},
    {"test_data": "same", "train_size": 30, "test_size": 20},
], ids=["seeded", "first_last", "two"])  # fmt: skip
def test_spooled_rows_keep_content_and_order(source, settings, monkeypatch):
    settings = {k: source if v == "same" else v for k, v in settings.items()}
    task = create(TaskConfig(name="custom", train_data=source, **settings), [by_id])
    whole, many = loaded(monkeypatch, COUNT, task), loaded(monkeypatch, 3, task)
    assert isinstance(whole.train, list) and isinstance(many.train, spool.Spooled)
    for ours, theirs in ((many.train, whole.train), (many.test, whole.test), (many.validation, whole.validation)):
        assert repr(list(ours)) == repr(list(theirs))  # tells 0.0 from -0.0, and 1 from True
        assert [ours[i] for i in range(-len(ours), 0)] == list(theirs)
        assert list(ours[3::2]) == list(theirs[3::2]) and len(ours[3::2]) == len(theirs[3::2])
    assert list(many.all) == list(whole.all) == [many.all[i] for i in range(len(many.all))]
    assert many.all[-1] == whole.all[-1] and list(many.all[5:60:7]) == list(whole.all[5:60:7])
    for rows in (many.all, many.train):
        with pytest.raises(IndexError):
            rows[len(rows)]
    assert saving.data_hash(many) == saving.data_hash(whole)
    assert heading.shared_lines(task, many) == heading.shared_lines(task, whole) != []


def test_a_task_of_many_rows_keeps_the_contract(tmp_path, monkeypatch):
    monkeypatch.setattr(spool, "IN_MEMORY", 3)
    contract.check_task(create(TaskConfig(name="conciseness", validation_size=1)))
    task = create(TaskConfig(name="custom", train_data=dated(tmp_path / "rows"), validation_size=5), [by_id])
    contract.check_splits(task, task.load_data(0))


def test_scores_in_the_graders_process_are_the_same(source, monkeypatch):
    """A row that JSON would change is known there by its place."""
    task = create(TaskConfig(name="custom", train_data=source), [by_id])
    data = loaded(monkeypatch, COUNT, task)
    texts = ["a" * (i % 7) for i in range(len(data.train))]
    wanted = task.rewards(texts, data.train)
    with closing(isolate(task, GraderConfig())) as held:
        many = loaded(monkeypatch, 3, held)
        assert isinstance(many.train, spool.Spooled)
        assert held.rewards(texts, list(many.train)) == wanted
        assert held.rewards(texts[:9], [many.train[i] for i in range(9)]) == wanted[:9]


@pytest.mark.slow
def test_a_training_is_the_same(tmp_path, monkeypatch):
    def journal(name, most):
        monkeypatch.setattr(spool, "IN_MEMORY", most)
        monkeypatch.setattr(rollouts, "EARLY", most)
        tree = {
            "output_dir": str(tmp_path / name), "es": {"sigma": 0.1, "num_generations": 3, "population_size": 4},
            "task": {"name": "custom", "train_data": jsonl(tmp_path / "rows"), "batch_size": 5, "test_size": 2},
            "sampling": {"max_tokens": 4}, "evaluation": {"max_tokens": 4}, "checks": {"canary_every": 0},
        }  # fmt: skip
        return task_runs.lines(task_runs.train(tree, reward=by_id)[0].path / "journal.jsonl")

    ours, theirs = journal("many", 3), journal("whole", COUNT)
    assert len(ours) > 3 and ours[1:] == theirs[1:]
    assert ours[0]["data_hash"] == theirs[0]["data_hash"]


class Counting(Task):
    """Records which rows were accessed."""

    name = "counting"

    def __init__(self):
        super().__init__(TaskConfig())
        self.asked = []

    def load_data(self, seed):
        return Data(ROWS, ROWS)

    def prompt(self, example):
        self.asked.append(example["id"])
        return "" if example["id"] == COUNT - 1 else f"{example['id']} is"

    def compute_reward(self, text, example):
        return 0.0


def test_large_splits_encode_only_requested_prompts(monkeypatch):
    tokens, task = load(ModelConfig(name="tiny")), Counting()
    monkeypatch.setattr(rollouts, "EARLY", COUNT - 1)
    found = Encoded(task, tokens, ROWS)
    assert not task.asked
    assert [found[3], found[3], found[0]] == [tokens.encode("3 is"), tokens.encode("3 is"), tokens.encode("0 is")]
    assert task.asked == [3, 0]
    monkeypatch.setattr(rollouts, "EARLY", COUNT)
    with pytest.raises(ModelError, match="has no tokens"):  # of few, one that cannot be is told at once
        Encoded(task, tokens, ROWS)


def test_large_splits_estimate_prompt_lengths(monkeypatch):
    tokens, task = load(ModelConfig(name="tiny")), Counting()
    whole = [len(tokens.encode(f"{i} is")) for i in range(COUNT - 1)]
    assert lengths_of(task, tokens, ROWS[:-1]) == whole and len(set(whole)) > 1
    monkeypatch.setattr(rollouts, "EARLY", 20)
    task.asked.clear()
    assert lengths_of(task, tokens, ROWS[:-1]) == [whole[i // 3 * 3] for i in range(COUNT - 1)]
    assert task.asked == list(range(0, COUNT - 1, 3))


def test_rows_that_are_not_used_are_not_read(tmp_path):
    path = Path(jsonl(tmp_path / "rows"))
    path.write_text(path.read_text().replace('"id": 30}', '"id": '), encoding="utf-8")

    def load(**settings):
        return create(TaskConfig(name="custom", train_data=str(path), **settings), [by_id]).load_data(0)

    few = load(test_data=str(path), train_size=20, validation_size=10, test_size=5)
    assert few.sizes == (20, 5, 10) and few.validation[-1]["id"] == 29
    for settings in ({"train_size": 21, "validation_size": 10, "test_size": 5}, {"train_size": 20}):
        with pytest.raises(DataError, match="line 31: not JSON"):
            load(test_data=str(path), **settings)


def test_full_disk_error_names_tmpdir(tmp_path, monkeypatch):
    def full(line):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: SimpleNamespace(write=full))
    with pytest.raises(DataError, match=r"No space left on device; free space there, or set TMPDIR"):
        loaded(monkeypatch, 3, create(TaskConfig(name="custom", train_data=jsonl(tmp_path / "rows")), [by_id]))


MEASURED = """
import re, sys
from pathlib import Path
from evoalign.training.train import dry_run
told = dry_run(sys.argv[1])
print(next(line for line in told if line.startswith("rollouts")))
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""
"""Not getrusage's peak, which a process inherits from its parent."""


def million():
    words = [format(n, "x") for n in np.random.RandomState(0).randint(16**6, 16**7, 4096).tolist()]
    for i in range(1_000_000):
        text = " ".join(words[(i * k) % 4096] for k in range(1, 19))
        yield {"prompt": f"Question {i}: {text}", "answer": words[i % 4096], "id": i}


def as_lines(path):
    with path.open("w") as out:
        out.writelines(json.dumps(row) + "\n" for row in million())


def as_parquet(path):
    """All in one row group, as the library writes it."""
    parquet.write_table(pa.Table.from_pylist(list(million())), path)


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from /proc")
@pytest.mark.parametrize("write", [as_lines, as_parquet])
def test_a_million_rows_take_less_than_a_gibibyte(tmp_path, write):
    write(tmp_path / "rows")
    assert (tmp_path / "rows").stat().st_size > (150_000_000 if write is as_lines else 50_000_000)
    (tmp_path / "reward.py").write_text("def short(completions, answer):\n    return [0.0 for _ in completions]\n")
    (tmp_path / "config.yaml").write_text(
        "output_dir: run\ntask: {name: custom, train_data: rows, rewards: [reward.py:short], batch_size: 8}\n"
        "model: {name: tiny}\nes: {sigma: 0.02, population_size: 4}\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", MEASURED, "config.yaml"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    rollouts_, peak = ran.stdout.splitlines()
    assert rollouts_.startswith("rollouts 32 a generation")
    assert 100 << 10 < int(peak) < 1 << 20  # KiB
