# SPDX-License-Identifier: Apache-2.0
"""Scoring in a worker process gives what it gives in place. What goes wrong is in tests/faults/test_graders.py."""

import asyncio
import datetime
import decimal
import os
import subprocess
import sys
import threading
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyarrow import parquet
from task_runs import jsonl

from evoalign import tasks
from evoalign.config import GraderConfig, TaskConfig
from evoalign.errors import ConfigError, DataError, RewardError
from evoalign.tasks import Data, Task
from evoalign.tasks.isolated import connection, worker
from evoalign.tasks.isolated.task import Isolated, is_exact

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no process to isolate in")

PLAIN = {"prompt": "2 + 2 =", "answer": "4"}
CHAT = {"prompt": [{"role": "user", "content": "2 + 2 ="}], "answer": "4"}
ODD = ["", " a ", "\x00\x1f", "\u2028\u2029\x85", "\ud800", "\ud83d\ude00", "😀", "\ufeff", '"\\', "é" * 3]


@pytest.fixture
def isolate():
    """Isolated functions or tasks, closed at the end."""
    made = []

    def isolate(*given, grader=None, **settings):
        task = given[0] if isinstance(given[0], Task) else tasks.create(TaskConfig(name="custom", **settings), given)
        made.append(tasks.isolate(task, grader or GraderConfig(retries=0)))
        return made[-1]

    yield isolate
    for task in made:
        task.close()


SOURCE = """
import atexit, datetime, decimal, os, pathlib, sys

def same(completions, points):
    return [float(list(map(ord, c)) == p) for c, p in zip(completions, points)]

def length(completions, **kwargs):
    return [float(len(c)) for c in completions]

def loud(completions, **kwargs):
    print("printed \\ud800"); os.write(1, b"written\\n"); os.system("echo echoed")
    assert sys.stdin.read() == ""
    return [1.0 for _ in completions]

def keep(completions, log):
    atexit.register(pathlib.Path(log[0]).write_text, "kept")
    return [1.0 for _ in completions]

def rich(completions, when, price, raw, **kwargs):
    good = [w == datetime.datetime(2026, 1, 2, 3) and p == decimal.Decimal("1.50") and r == b"\\xff"
            for w, p, r in zip(when, price, raw)]
    return [float(g) for g in good]
"""


@pytest.fixture
def own(isolate, tmp_path):
    """A function of `SOURCE` by import path: a worker that is a fresh process, or else a fork."""
    (tmp_path / "own.py").write_text(SOURCE, encoding="utf-8")

    def own(name, kind="fresh", **settings):
        made = tasks.create(TaskConfig(name="custom", rewards=[f"{tmp_path}/own.py:{name}"], **settings))
        return isolate(made) if kind == "fresh" else isolate(made.functions[0].function, **settings)

    return own


both = pytest.mark.parametrize("kind", ["fork", pytest.param("fresh", marks=pytest.mark.slow)])


def length(completions, **kwargs):
    return [float(len(c)) for c in completions]


def pid(completions, **kwargs):
    return [float(os.getpid()) for _ in completions]


def test_built_in_tasks_score_in_place():
    for task in (tasks.create(TaskConfig(name=name)) for name in ("conciseness", "countdown")):
        assert tasks.isolate(task, GraderConfig()) is task


def test_isolation_can_be_switched_off(isolate):
    task = isolate(pid, grader=GraderConfig(isolated=False))
    assert task.rewards(["a"], [PLAIN]) == [os.getpid()]
    apart = isolate(pid)
    assert apart.rewards(["a"], [PLAIN]) != [os.getpid()]
    assert tasks.isolate(apart, GraderConfig()) is apart


def test_isolate_warns_without_fork(monkeypatch):
    monkeypatch.setattr("evoalign.tasks.isolated.task.SUPPORTED", False)
    with pytest.warns(UserWarning, match="cannot isolate"):
        task = tasks.isolate(tasks.create(TaskConfig(name="custom"), [pid]), GraderConfig())
    assert task.rewards(["a"], [PLAIN]) == [os.getpid()]


def test_isolated_task_delegates_attributes(isolate, tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", [PLAIN | {"id": i} for i in range(5)])
    plain = tasks.create(TaskConfig(name="custom", train_data=path), [length])
    task = isolate(plain)
    assert (task.name, task.max_reward, task.config) == (plain.name, plain.max_reward, plain.config)
    assert task.load_data(3) == plain.load_data(3)
    assert (task.prompt(CHAT), task.clean(" a "), task.gold(PLAIN)) == (CHAT["prompt"], "a", None)
    assert task.measures("a", PLAIN) == {} and task.point("a", PLAIN, {"reward": 1.0}) is None
    task.self_check([PLAIN])
    assert task.functions == plain.functions
    with pytest.raises(AttributeError, match="nothing_such"):
        task.nothing_such  # noqa: B018


@both
def test_odd_text_arrives_code_point_for_code_point(own, kind):
    task = own("same", kind, strip=False)
    texts = [*ODD, "".join(map(chr, range(0x3000)))]
    assert task.rewards(texts, [PLAIN | {"points": list(map(ord, text))} for text in texts]) == [1.0] * len(texts)


TEXT = st.text(st.characters(exclude_categories=()))  # surrogates too
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner), max_leaves=20)


@given(VALUES)
@example("\ud83d\ude00")  # two code points, which are not the emoji
def test_exact_values_survive_json(value):
    assert is_exact(value)
    back = worker.decode(worker.encode(value))
    assert repr(back) == repr(value)  # tells 1 from True and 1.0, and 0.0 from -0.0
    assert b"\n" not in worker.encode(value)[:-1]


@pytest.mark.parametrize("value", [
    (1,), {1: "a"}, b"a", np.float64(1.0), np.int64(1), {"a": [(1,)]}, {1}, datetime.date(2026, 1, 1), 10**5000,
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_inexact_values_are_detected(value):
    assert not is_exact(value)


@both
def test_ten_megabytes(own, kind):
    task = own("length", kind)
    texts = [chr(97 + i % 26) * (170_000 + i) for i in range(60)]
    assert task.rewards(texts, [PLAIN] * 60) == [170_000.0 + i for i in range(60)]


def test_async_functions_start_in_a_fork_of_a_running_loop(isolate):
    async def judge(completions):
        await asyncio.sleep(0)
        return [2.0 for _ in completions]

    async def notebook():
        return isolate(judge).rewards(["a"], [PLAIN])

    assert asyncio.run(notebook()) == [2.0]


@both
def test_output_of_user_code_goes_to_stderr(own, kind, capfd):
    task = own("loud", kind)
    assert task.rewards(["a"], [PLAIN]) == task.rewards(["a"], [PLAIN]) == [1.0]
    task.close()
    out, err = capfd.readouterr()
    assert out == ""
    assert [err.count(word) for word in ("printed \\ud800\n", "written\n", "echoed\n")] == [2, 2, 2]


def test_worker_keeps_state_between_calls(isolate):
    class Counter:
        calls = 0

        def __call__(self, completions):
            self.calls += 1
            if completions == ["raise"]:
                raise ValueError("once")
            return [float(self.calls) for _ in completions]

    counter = Counter()
    task = isolate(counter, grader=GraderConfig(retries=0))
    assert task.rewards(["a"], [PLAIN]) == [1.0]
    with pytest.raises(RewardError, match="ValueError: once"):
        task.rewards(["raise"], [PLAIN])
    assert task.rewards(["a"], [PLAIN]) == [3.0]
    assert counter.calls == 0


def test_the_worker_outlives_the_thread_that_started_it(isolate):
    task = isolate(pid)
    seen = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: seen.extend(task.rewards(["a"], [PLAIN])))
        thread.start()
        thread.join()
    assert len(set(seen)) == 1


@pytest.mark.slow
def test_a_fresh_process_has_the_same_path_and_folder(isolate, tmp_path, monkeypatch):
    (tmp_path / "my_package_of_rewards.py").write_text(
        "import os, sys\n"
        "def here(completions, cwd, **kwargs):\n"
        "    return [float(os.getcwd() == cwd[0] and 'pytest' not in sys.modules) for _ in completions]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    task = isolate(tasks.create(TaskConfig(name="custom", rewards=["my_package_of_rewards:here"])))
    assert task.rewards(["a"], [PLAIN | {"cwd": str(tmp_path)}]) == [1.0]


@pytest.mark.slow
def test_exit_handlers_run_when_the_task_is_closed(own, tmp_path, monkeypatch):
    monkeypatch.setattr(connection, "CLOSE_LIMIT", 60.0)
    task = own("keep")
    assert task.rewards(["a"], [PLAIN | {"log": str(tmp_path / "log")}]) == [1.0]
    task.close()
    assert (tmp_path / "log").read_text() == "kept"


@pytest.mark.slow
def test_import_error_in_the_worker_raises_reward_error(isolate, tmp_path):
    source = (
        "import sys\nif 'pytest' not in sys.modules: raise OSError('no model')\ndef fails(completions): return [0.0]\n"
    )
    (tmp_path / "fails.py").write_text(source)
    task = isolate(tasks.create(TaskConfig(name="custom", rewards=[f"{tmp_path}/fails.py:fails"])))
    with pytest.raises(ConfigError, match="fails to import: OSError: no model"):
        task.rewards(["a"], [PLAIN])


@pytest.mark.slow
def test_functions_of_a_script_are_forked(tmp_path):
    """`__main__` is another module in another process."""
    script = tmp_path / "script.py"
    script.write_text(
        "from evoalign import tasks\n"
        "from evoalign.config import GraderConfig, TaskConfig\n"
        "def score(completions): return [float(len(c)) for c in completions]\n"
        "task = tasks.isolate(tasks.create(TaskConfig(name='custom', rewards=['__main__:score'])), GraderConfig())\n"
        "print(task.rewards(['abc'], [{'prompt': '?'}]))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[3.0]\n"


@pytest.fixture
def data(tmp_path):
    row = {"when": datetime.datetime(2026, 1, 2, 3), "price": decimal.Decimal("1.50"), "raw": b"\xff"}
    parquet.write_table(pa.Table.from_pylist([{"prompt": str(i), **row} for i in range(5)]), tmp_path / "rows.parquet")
    return tmp_path / "rows.parquet"


@both
def test_rows_arrive_unchanged(own, kind, data):
    task = own("rich", kind, train_data=str(data))
    rows = task.load_data(0)
    examples = [*rows.test, *rows.train]
    assert task.rewards(["a"] * 5, examples) == [1.0] * 5
    with pytest.raises(DataError, match="column 'when' has a datetime"):
        task.rewards(["a"], [dict(examples[0])])  # not a row that load_data gave


@pytest.mark.slow
def test_changed_data_file_raises_data_error(own, data):
    task = own("rich", train_data=str(data))
    rows = task.load_data(0)
    task.rewards(["a"], rows.train[:1])
    task.close()  # the next call starts another worker, which reads the file again
    table = parquet.read_table(data)
    parquet.write_table(table.set_column(0, "prompt", pa.array(["other"] * 5)), data)
    with pytest.raises(DataError, match=r"row 0 of the train split differs in 'prompt'"):
        task.rewards(["a"], rows.train[:1])


OWN = """
import os, time
from evoalign.errors import DataError
from evoalign.tasks import Data, Task

class Own(Task):
    name = "own"
    max_reward = 1.0
    def load_data(self, seed):
        self.words = {"a": "x", "b": "y"}
        return Data([{"word": "a"}], [{"word": "b"}])
    def prompt(self, example): return example["word"]
    def compute_reward(self, text, example): return float(text == self.words[example["word"]])
    def gold(self, example): return self.words[example["word"]]
    def measures(self, text, example): return {"pid": os.getpid(), "right": text == self.gold(example)}
    def point(self, text, example, rewards): return {"pid": os.getpid(), "said": text, **example, **rewards}
    def clean(self, text):
        if text == "hang": time.sleep(1000)
        return text.strip().lower()

class Strict(Own):
    name = "strict"
    def self_check(self, examples): raise DataError(f"row 0 of {len(examples)} is no good")
    def measures(self, text, example): time.sleep(1000)
    def rewards(self, texts, examples):
        import numpy
        if texts[0] == "short": return [1.0, 2.0]
        return numpy.array([{"nan": float("nan")}.get(t, 2.0) for t in texts])
"""


def own_task(path, name):
    path.write_text(OWN, encoding="utf-8")
    return tasks.create(TaskConfig(name=f"{path}:{name}"))


@both
def test_custom_task_scores_in_the_worker(isolate, tmp_path, kind):
    plain = own_task(tmp_path / "own.py", "Own")
    plain.from_config = kind == "fresh"
    task = isolate(plain)
    data = task.load_data(0)
    assert isinstance(task, Isolated)
    assert task.rewards([" X ", "z"], [data.train[0]] * 2) == [1.0, 0.0]
    assert task.compute_reward("y", data.test[0]) == 1.0
    assert (task.gold(data.test[0]), task.clean(" X ")) == ("y", "x")
    measures = task.measures("y", data.test[0])
    assert measures["right"] == 1.0 and measures["pid"] != os.getpid()
    point = task.point("y", data.test[0], {"reward": 1.5, "cost": None})
    assert point == {"pid": measures["pid"], "said": "y", **data.test[0], "reward": 1.5, "cost": None}
    task.self_check([*data.train, *data.test])


def test_custom_task_errors_and_hangs_raise_reward_error(isolate, tmp_path):
    task = own_task(tmp_path / "own.py", "Strict")
    task.from_config = False
    task = isolate(task, grader=GraderConfig(timeout=1.0, retries=0))
    row = task.load_data(0).train[0]
    assert task.rewards(["a"], [row]) == [2.0]
    for text, message in (("nan", "task strict returned .*nan.* as the reward of 'nan'"), ("short", "2 rewards for 1")):
        with pytest.raises(RewardError, match=message):
            task.rewards([text], [row])
    with pytest.raises(DataError, match="row 0 of 1 is no good"):
        task.self_check([row])
    for ask, text in ((lambda: task.measures("word", row), "word"), (lambda: task.clean("hang"), "hang")):
        with pytest.raises(RewardError, match=rf"task strict hung: .* the completion '{text}' causes it") as caught:
            ask()
        assert (caught.value.failed or {})["completion"] == text


class Lazy(Sequence):
    """Rows made on access, each time anew, as data sets have them."""

    def __init__(self, first):
        self.first = first

    def __len__(self):
        return 2

    def __getitem__(self, index):
        if index not in (0, 1):
            raise IndexError(index)
        return {"key": (self.first + index, 0)}


class Held(Task):
    """Handed over as an object, with what a script put into it; learns its maximum from its data."""

    name = "held"

    def __init__(self, bonus):
        super().__init__(TaskConfig(name="held"))
        self.bonus = bonus

    def load_data(self, seed):
        self.max_reward = 7.5
        return Data(Lazy(1), Lazy(3))

    def prompt(self, example):
        return str(example["key"])

    def compute_reward(self, text, example):
        return len(text) + self.bonus + example["key"][0] if isinstance(example["key"], tuple) else float("nan")


def test_a_task_object_is_forked_with_what_it_holds_and_lazy_rows_are_created_once(isolate):
    task = isolate(Held(0.5))
    assert task.max_reward == float("inf")
    data = task.load_data(0)
    assert task.max_reward == 7.5
    assert task.rewards(["abc", "a"], [data.train[1], data.test[0]]) == [5.5, 4.5]


@pytest.mark.slow
def test_a_subclass_of_custom_keeps_what_it_loads(isolate, tmp_path):
    path = tmp_path / "keeping.py"
    path.write_text("""
from evoalign.tasks import Data
from evoalign.tasks.custom import Custom
class Keeping(Custom):
    def __init__(self, config):
        super().__init__(config, [self.score])
    def load_data(self, seed):
        self.bonus = 2.0 + seed
        return Data([{'prompt': '?'}], [{'prompt': '!'}])
    def score(self, completions):
        return [self.bonus for _ in completions]
""")
    task = isolate(tasks.create(TaskConfig(name=f"{path}:Keeping")))
    assert task.rewards(["a"], [task.load_data(1).train[0]]) == [3.0]
