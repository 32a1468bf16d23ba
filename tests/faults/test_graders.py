# SPDX-License-Identifier: Apache-2.0
"""Reward functions that hang, die, raise or answer nonsense: the run stops or asks again, and nothing becomes a score.

Real processes throughout. Each function writes down the pids it ran in, so that orphans are seen.
"""

import asyncio
import io
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kill_points
import psutil
import pytest
from rich.console import Console
from small_runs import UNCHECKED

import evoalign
from evoalign import rollouts, tasks
from evoalign.config import GraderConfig, TaskConfig
from evoalign.errors import ConfigError, RewardError, StoppedError
from evoalign.plugins import load_object
from evoalign.tasks import Data, Task
from evoalign.tasks.isolated import connection, worker
from evoalign.types import Example, Prompt

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no process to isolate in")

GRADERS = '''
import ctypes, os, re, signal, stat, subprocess, sys, time

def note(log, *pids):
    with open(log, "a") as file:
        file.write("".join(f"{pid}\\n" for pid in pids or [os.getpid()]))

def bombed(completions):
    return any("bomb" in c for c in completions)

def say(line):
    """Onto the worker's own connection."""
    for number in range(3, 100):
        try:
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                os.write(number, line)
        except OSError:
            pass

def bomb(name, do):
    def grader(completions, log, **columns):
        note(log[0])
        if bombed(completions):
            do(columns)
        return [1.0 for _ in completions]
    grader.__name__ = name
    return grader

def drip(_):
    for _ in range(2000):
        say(b"x")
        time.sleep(0.01)

def ignore_sigterm(_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        pass

def hoard(_):
    kept = []
    while True:
        kept.append(bytearray(1 << 24))

def fail(_):
    raise ConnectionError("the judge is away")

for name, do in {
    "writes": lambda columns: say(columns["line"][0].encode("latin-1")),
    "drips": drip,
    "sleeps": lambda _: time.sleep(1000),
    "holds_the_gil": lambda _: re.match("(a+)+$", "a" * 60 + "b"),
    "ignores_sigterm": ignore_sigterm,
    "exits": lambda _: os._exit(0),
    "leaves": lambda _: sys.exit(3),
    "hoards": hoard,
    "kills_itself": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "segfaults": lambda _: ctypes.string_at(0),
    "raises": fail,
}.items():
    globals()[name] = bomb(name, do)

async def awaits(completions, log, **kwargs):
    import asyncio
    note(log[0])
    if bombed(completions):
        await asyncio.sleep(1000)
    return [1.0 for _ in completions]

def good(completions, log, **kwargs):
    note(log[0])
    return [float(len(c)) for c in completions]

def forks(completions, log, **kwargs):
    """Both come back."""
    if bombed(completions):
        os.fork()
    return good(completions, log)

def leaves_a_child(completions, log, **kwargs):
    note(log[0])
    note(log[0], subprocess.Popen(["sleep", "1000"]).pid)
    while bombed(completions):
        time.sleep(1)
    return [1.0 for _ in completions]

def escapes(completions, log, **kwargs):
    """Into a session of its own; and once more, with nothing between that leads there."""
    note(log[0])
    start = "import subprocess; print(subprocess.Popen(['sleep', '1000'], stdout=-3, start_new_session=True).pid)"
    orphan = int(subprocess.run([sys.executable, "-c", start], stdout=subprocess.PIPE, check=True).stdout)
    note(log[0], subprocess.Popen(["sleep", "1000"], start_new_session=True).pid, orphan)
    if "exit" in completions:
        os._exit(1)
    while bombed(completions):
        time.sleep(1)
    return [1.0 for _ in completions]

def hoards_in_torch(completions, log, **kwargs):
    import torch
    return [float(len(torch.ones(1 << 28 if bombed(completions) else 1)) > 0) for _ in completions]

def mistaken(completions, **columns):
    return [float(a == c) for a, c in zip(columns["anwser"], completions)]

def looks_up(completions, **columns):
    return [1.0 for _ in columns["answer"]]

def comes_back(completions, log, how, **kwargs):
    """Fails the first time and then works."""
    if not os.path.exists(log[0]):
        note(log[0])
        {"raise": fail, "hang": lambda _: time.sleep(1000), "garble": lambda _: say(b"garbage\\n"),
         "die": lambda _: os._exit(1)}[how[0]](None)
    else:
        note(log[0])
    return [float(len(c)) for c in completions]

def big_batches_hang(completions, log, **kwargs):
    note(log[0])
    if len(completions) > 2:
        time.sleep(1000)
    return [1.0 for _ in completions]

def odd(completions, log, kind, **kwargs):
    class Lines:
        def __repr__(self):
            return "a\\n" * 10_000
    text = "x" * 3_000_000
    return {"text": text, "texts": [text], "lines": [Lines()], "huge": [10**400], "beyond": [10**5000]}[kind[0]]

def wrong(completions, log, values, **kwargs):
    note(log[0])
    return [float(v) if isinstance(v, str) else v for v in values[0]]
'''

Make = Callable[..., Task]
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
both = pytest.mark.parametrize("make", ["fork", pytest.param("fresh", marks=pytest.mark.slow)], indirect=True)


@pytest.fixture
def log(tmp_path) -> Path:
    return tmp_path / "pids"


@pytest.fixture
def make(request, tmp_path) -> Iterator[Make]:
    """A task with functions by name: handed over as Python objects (a fork), or as import paths (a fresh process).

    The fork is the default, since a fresh process takes seconds to import torch.
    """
    kind = getattr(request, "param", "fork")
    source = tmp_path / "graders.py"
    source.write_text(GRADERS, encoding="utf-8")
    made: list[Task] = []

    def make(*names: str, **grader: Any) -> Task:
        paths = [f"{source}:{name}" for name in names]
        if kind == "fresh":
            task = tasks.create(TaskConfig(name="custom", rewards=paths))
        else:
            task = tasks.create(TaskConfig(name="custom"), [load_object(path, "rewards") for path in paths])
        made.append(tasks.isolate(task, GraderConfig(**{"timeout": 60.0, "retries": 1} | grader)))
        return made[-1]

    yield make
    for task in made:
        task.close()


def pids(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().split()]


def is_running(pid: int) -> bool:
    """A zombie has ended: whoever should have waited for it is gone, or slow."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(is_true: Callable[[], Any], seconds: float, what: str = "") -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def assert_gone(numbers: list[int]) -> None:
    wait_until(lambda: not any(map(is_running, numbers)), 30, f"still running, some of {numbers}")


def group_of(pid: int) -> list[int]:
    return [member for member in psutil.pids() if _group(member) == pid]


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def row(log: Path, **columns: Any) -> dict[str, Any]:
    return {"prompt": "Say it:", "log": str(log)} | columns


def refused(task: Task, texts: list[str], example: dict[str, Any], *words: str, **failed: Any) -> dict[str, Any]:
    """The call raises, which is to say that it gives no score: in one line with these words. Returns what is kept."""
    with pytest.raises(RewardError) as caught:
        task.rewards(texts, [example] * len(texts))
    told, kept = str(caught.value), json.loads(json.dumps(caught.value.failed))
    assert all(word in told for word in words) and "\n" not in told, told
    assert failed.items() <= kept.items(), kept
    return kept | {"told": told}


# --- hangs and deaths -----------------------------------------------------------------------------------------------

HUNG, SEGFAULT, AWAY = "no answer within 1 s", "died: killed by SIGSEGV", "failed: ConnectionError: the judge is away"


@pytest.mark.first("fork-sleeps", "fork-exits", "fork-leaves-", "fork-kills", "fork-segfaults", "fork-raises",
                   others="slow")  # fmt: skip
@pytest.mark.last("fork-drips", "fork-awaits", "fork-holds", "fresh-leaves", "fresh-segfaults")
@pytest.mark.parametrize(
    ("make", "name", "reason", "message"),
    [
        *(("fork", name, "hung", HUNG)
          for name in ("sleeps", "holds_the_gil", "ignores_sigterm", "awaits", "drips", "leaves_a_child")),
        ("fork", "exits", "died", "died: exit status 0"), ("fork", "leaves", "raised", "failed: SystemExit: 3"),
        ("fork", "kills_itself", "died", "died: killed by SIGKILL"), ("fork", "segfaults", "died", SEGFAULT),
        ("fork", "raises", "raised", AWAY), ("fresh", "leaves_a_child", "hung", HUNG),
        ("fresh", "leaves", "raised", "failed: SystemExit: 3"), ("fresh", "segfaults", "died", SEGFAULT),
        ("fresh", "raises", "raised", AWAY),
    ],
    indirect=["make"],
)  # fmt: skip
def test_what_gives_no_answer_stops_the_run(make, log, name, reason, message):
    task = make(name, retries=0, timeout=1.0 if reason == "hung" else 60.0)
    alone = "the completion 'bomb it' causes it alone; fix it"
    failed = refused(task, ["a", "bomb it", "c"], row(log, id=7), f"reward function {name} ", message, alone)
    seconds, trace, _ = (failed.pop(name) for name in ("seconds", "traceback", "told"))
    assert failed == {
        "reason": reason, "function": name, "prompt": "Say it:", "completion": "bomb it",
        "example": row(log, id=7), "attempts": 1,
    }  # fmt: skip
    assert seconds > 0
    assert ("Traceback" in trace) if reason == "raised" else trace is None
    assert task.rewards(["fine"], [row(log)]) == [1.0]  # a new worker
    task.close()
    assert_gone(pids(log))


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux alone")
@pytest.mark.first("fork")
@pytest.mark.parametrize(
    ("make", "name"),
    [("fork", "hoards"), ("fork", "hoards_in_torch"), ("fresh", "hoards"), ("fresh", "hoards_in_torch")],
    indirect=["make"],
)
def test_memory_has_an_end(make, log, name):
    """Half a GiB beyond what the worker starts with; torch itself fits."""
    task = make(name, retries=0, memory_gib=0.5)
    alone = "the completion 'bomb it' causes it alone"
    refused(task, ["a", "bomb it"], row(log), f"reward function {name} ", alone, "fix it or raise grader.memory_gib")
    assert task.rewards(["fine"], [row(log)]) == [1.0]


def test_memory_is_half_of_the_machine_or_of_its_group(tmp_path, monkeypatch):
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    monkeypatch.setattr(worker, "GROUP_LIMIT", tmp_path / "memory.max")
    assert worker.half_of_memory() == whole // 2
    worker.GROUP_LIMIT.write_text("max\n")
    assert worker.half_of_memory() == whole // 2
    worker.GROUP_LIMIT.write_text(f"{1 << 20}\n")
    assert worker.half_of_memory() == 1 << 19


@pytest.mark.last("raise-fresh", "garble-fresh", "hang-fresh")
@both
@pytest.mark.parametrize("how", ["raise", "hang", "die", "garble"])
def test_what_comes_back_is_asked_again(make, log, how):
    task = make("comes_back", timeout=1.0 if how == "hang" else 60.0)
    assert task.rewards(["four", "to"], [row(log, how=how)] * 2) == [4.0, 2.0]
    first, second = pids(log)
    assert (first == second) == (how == "raise")  # an exception leaves the worker, and what it keeps, in place
    if how != "raise":
        assert not is_running(first)


@both
def test_a_function_that_forks_shifts_no_scores(make, log):
    task = make("forks", retries=0)
    for text in ("bomb it", "ab", "bomb", "a", "abc"):
        assert task.rewards([text], [row(log)]) == [float(len(text))]
    wait_until(lambda: len(pids(log)) >= 7, 120)
    numbers = pids(log)
    worker = max(set(numbers), key=numbers.count)
    assert numbers.count(worker) == 5
    assert_gone([pid for pid in numbers if pid != worker])


@pytest.mark.parametrize(
    "line",
    ["garbage\n", "\xff\n", pytest.param("[" * 100_000 + "\n", id="deep"), "[1.0]\n", '{"value": [9.0]}\n',
     '{"id": 1000, "value": [9.0]}\n', '{"id": 1000, "calling": "f"}\n', '{"id": 1}\n'],
)  # fmt: skip
def test_what_is_no_answer_is_no_score(make, log, line):
    task = make("writes", retries=0)
    said = "reward function writes died: its connection carried "
    assert len(refused(task, ["bomb"], row(log, line=line), said, reason="died")["told"]) < 400
    assert_gone(pids(log))
    assert task.rewards(["a"], [row(log, line=line)]) == [1.0]


@pytest.mark.slow
def test_an_endless_answer_is_cut(make, log, monkeypatch):
    monkeypatch.setattr(connection, "LINE_LIMIT", 200)
    refused(make("drips", retries=0), ["bomb"], row(log), "reward function drips died: an answer of more than")


@pytest.mark.parametrize("early", [True, False])
def test_a_worker_that_cannot_start_is_told(make, tmp_path, monkeypatch, early):
    make("good")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "a", "log": "b"}\n' * 2)
    config = TaskConfig(name="custom", rewards=[f"{tmp_path / 'graders.py'}:good"], train_data=str(data))
    task = tasks.isolate(tasks.create(config), GraderConfig(retries=1))
    gone.rmdir()
    if early:
        task.load_data(0)
    refused(task, ["a"], {"prompt": "a", "log": "b"}, "died: FileNotFoundError", "2 attempts")


def test_attempts_are_counted(make, log):
    refused(make("exits", retries=2), ["bomb"], row(log), "3 attempts", attempts=3)
    assert len(pids(log)) == 3


def test_no_completion_is_blamed_for_a_batch(make, log):
    said = "none of the 4 completions causes it alone, only the whole batch"
    task, texts = make("big_batches_hang", retries=0, timeout=1.0), ["a", "b", "c", "d"]
    refused(task, texts, row(log), said, "raise grader.timeout", completion=None, completions=texts, count=4)


@pytest.mark.slow
def test_others_that_do_it_too_are_told(make, log):
    task, others = make("exits", retries=0), "and so do others"
    refused(task, ["a", "bomb 1", "b", "bomb 2"], row(log), f"'bomb 1' causes it alone, {others}")
    assert others not in refused(task, ["a", "bomb 1", "b"], row(log))["told"]


def test_a_mistake_is_told_with_its_line_and_the_columns_and_not_waited_for(make, log, monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr("evoalign.tasks.isolated.task.time.sleep", waits.append)
    line = next(i for i, text in enumerate(GRADERS.split("\n"), 1) if "anwser" in text)
    words = (f"reward function mistaken failed: KeyError: 'anwser' in graders.py line {line}; the data has the",
             " the data has the columns prompt, log, answer (2 attempts, ",
             "; all completions cause it, such as 'a'; fix it")  # fmt: skip
    refused(make("mistaken", retries=5), ["a", "b", "c"], row(log, answer="4"), *words, completion="a")
    assert waits == []
    some = "all completions that were scored alone, 18 of 50, cause it, such as 'a'"
    refused(make("mistaken", retries=0), ["a"] * 50, row(log), some)


def test_a_judge_that_answered_once_is_waited_for_whatever_it_says_then(make, log, monkeypatch):
    """Over its rate, it answers with something that has no score in it; and one that is away was never a mistake."""
    waits: list[float] = []
    monkeypatch.setattr("evoalign.tasks.isolated.task.time.sleep", waits.append)
    judge = make("looks_up", retries=2)
    assert judge.rewards(["a"], [row(log, answer="4")]) == [1.0]
    refused(judge, ["a"], row(log), "3 attempts")
    assert waits == [1.0, 2.0]
    refused(make("raises", retries=2), ["bomb"], row(log), "3 attempts")
    assert waits == [1.0, 2.0, 1.0, 2.0]


def test_in_this_process_the_line_is_told_too(tmp_path):
    source = tmp_path / "mine.py"
    source.write_text(
        "def simple(text, example):\n    return helper(example)\n\n\n"
        "def helper(example):\n    return float(example['anwser'])\n\n\n"
        "async def late(completions, **columns):\n    return columns['anwser']\n"
    )
    for name, line in (("simple", 6), ("late", 10)):
        task = tasks.create(TaskConfig(name="custom", rewards=[f"{source}:{name}"]))
        with pytest.raises(
            RewardError, match=f"KeyError: 'anwser' in mine.py line {line}; the data has the columns pro"
        ):
            task.rewards(["a"], [{"prompt": "b", "answer": "c"}])


@pytest.mark.slow
def test_the_function_that_hangs_is_the_one_named(make, log):
    task = make("good", "sleeps", "raises", retries=0, timeout=1.0)
    assert refused(task, ["bomb"], row(log))["told"].startswith("reward function sleeps hung")


@both
def test_a_worker_that_dies_between_calls_is_no_failure(make, log):
    task = make("good", retries=0)
    assert task.rewards(["abc"], [row(log)]) == [3.0]
    os.kill(pids(log)[0], signal.SIGKILL)
    assert_gone(pids(log))
    assert task.rewards(["abcd"], [row(log)]) == [4.0]
    first, second = pids(log)
    assert first != second


# --- wrong values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message", "completion"),
    [
        ([1.0, "nan"], "returned nan for the completion 'two'", "two"),
        (["-inf", 1.0], "returned -inf for the completion 'one'", "one"),
        ([1.0, True], "returned True for the completion 'two'", "two"),
        ([1.0, [2.0]], "for the completion 'two'", "two"), ([1.0], "returned 1 values for 2 completions", None),
        ([1.0, 2.0, 3.0], "returned 3 values for 2 completions", None),
        ([None, 1.0], "returned None for the completion 'one'", "one"),
    ],
)  # fmt: skip
def test_a_wrong_value_stops_at_once(make, log, values, message, completion):
    task = make("wrong", retries=3)
    kept = {"reason": "value", "function": "wrong", "completion": completion, "attempts": 1}
    refused(task, ["one", "two"], row(log, values=values), message, **kept)
    assert task.rewards(["one"], [row(log, values=[2.0])]) == [2.0]
    first, second = pids(log)
    assert first == second  # asked once, and the worker lives on


def test_a_long_value_is_told_in_short(make, log):
    task = make("odd")
    for kind in ("text", "texts", "lines", "huge", "beyond"):
        assert len(refused(task, ["one"], row(log, kind=kind), reason="value")["told"]) < 300


def test_a_batch_that_fails_as_one_is_kept_in_part(make, log):
    texts = [str(i) for i in range(25)]
    refused(make("wrong"), texts, row(log, values=[1.0]), completions=texts[:20], count=25)


# --- what would end this process ------------------------------------------------------------------------------------


LEAVING = ("sys.exit()", "sys.exit(3)", "raise asyncio.CancelledError", "raise OSError('a\\nb')", "def broken(:",
           "raise RuntimeError('no licence')", "import not_a_module_at_all", "raise KeyboardInterrupt")  # fmt: skip


@pytest.mark.parametrize("source", LEAVING)
def test_a_module_that_fails_or_leaves_ends_nothing_except_by_ctrl_c(source, tmp_path, monkeypatch):
    path = tmp_path / "module_that_leaves.py"
    path.write_text(f"import asyncio, sys\n{source}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    raises = KeyboardInterrupt if "Keyboard" in source else ConfigError
    for named in (f"{path}:f", "module_that_leaves:f"):
        with pytest.raises(raises) as caught:
            load_object(named, "task.rewards")
        message = r"task.rewards: (\S+ fails to import: \w+|no module named 'not_a_module_at_all')[^\n]*$"
        assert raises is KeyboardInterrupt or re.match(message, str(caught.value))
        assert raises is KeyboardInterrupt or named[0] != "/" or "fails to import" in str(caught.value)


class Own(Task):
    """Scores as a function says."""

    name = "own"

    def __init__(self, score: Callable[[], float]) -> None:
        super().__init__(TaskConfig(name="own"))
        self.score = score

    def load_data(self, seed: int) -> Data:
        return Data([{}], [{}])

    def prompt(self, example: Example) -> Prompt:
        return "?"

    def compute_reward(self, text: str, example: Example) -> float:
        return self.score()


def ways(error: BaseException) -> list[Task]:
    """Rewards of every form that raise it, in this process."""

    def plain(completions: list[str]) -> list[float]:
        raise error

    async def waits(completions: list[str]) -> list[float]:
        raise error

    async def simple(text: str, example: Example) -> float:
        raise error

    def score() -> float:
        raise error

    return [*(tasks.create(TaskConfig(name="custom"), [f]) for f in (plain, waits, simple)), Own(score)]


@pytest.mark.parametrize(
    "error", [SystemExit(), SystemExit(0), asyncio.CancelledError(), ValueError("a\nb"), KeyboardInterrupt()]
)
def test_a_reward_that_leaves_does_not_end_the_run_except_by_ctrl_c(error):
    message = rf"failed[^\n]*: {type(error).__name__}[^\n]*; fix it$"
    raises, match = (KeyboardInterrupt, None) if isinstance(error, KeyboardInterrupt) else (RewardError, message)
    for task in ways(error):
        with pytest.raises(raises, match=match):
            rollouts.rewards_of(task, ["a", "b"], [{"prompt": "?"}] * 2)


@pytest.mark.parametrize(
    "value",
    [10**400, pytest.param(10**5000, id="beyond"), float("nan"), None, pytest.param("x" * 1000, id="long"), True],
)
def test_a_task_with_a_wrong_value_is_told(value):
    with pytest.raises(RewardError, match=r"task own returned .{1,60} as the reward of 'a'"):
        rollouts.rewards_of(Own(lambda: value), ["a"], [{}])


# --- no orphans -----------------------------------------------------------------------------------------------------


@both
def test_the_worker_is_kept_and_closing_ends_it(make, log):
    task = make("good")
    for _ in range(3):
        task.rewards(["a"], [row(log)])
    (pid,) = set(pids(log))
    assert pid != os.getpid()
    members = group_of(pid)
    assert len(members) == 2  # the worker and its guard
    task.close()
    assert_gone(members)


@both
def test_grandchildren_end_with_an_idle_worker(make, log):
    task = make("leaves_a_child")
    task.rewards(["a"], [row(log)])
    worker, child = pids(log)
    assert is_running(child)
    task.close()
    assert_gone([worker, child])


@pytest.mark.slow
@linux
@both
@pytest.mark.last("fresh")
@pytest.mark.parametrize("text", ["a", "bomb", "exit"])
def test_sessions_of_their_own_end_with_the_worker(make, log, text):
    task = make("escapes", retries=0, timeout=3.0)
    if text == "a":
        task.rewards([text], [row(log)])
        assert all(map(is_running, pids(log)))
        task.close()
    else:
        refused(task, [text], row(log))
    assert len(pids(log)) % 3 == 0
    assert_gone(pids(log))


def test_the_worker_ends_with_the_task_object(make, tmp_path, log):
    rewards = [load_object(f"{tmp_path / 'graders.py'}:good", "rewards")]
    task = tasks.isolate(tasks.create(TaskConfig(name="custom"), rewards), GraderConfig())
    task.rewards(["a"], [row(log)])
    del task
    with pytest.raises(ProcessLookupError):  # not even a zombie
        os.kill(pids(log)[0], 0)


TRAINER = """
import os, signal, sys, time
from evoalign import tasks
from evoalign.config import GraderConfig, TaskConfig
from evoalign.plugins import load_object

source, kind, name, text, log, then = sys.argv[1:]
path = f"{source}:{name}"
config = TaskConfig(name="custom", rewards=[path] if kind == "fresh" else [])
task = tasks.create(config, None if kind == "fresh" else [load_object(path, "rewards")])
task = tasks.isolate(task, GraderConfig())
row = {"prompt": "?", "log": log}
try:
    task.rewards([text], [row])
    if then == "exit":
        sys.exit()
    if then == "fork" and os.fork() == 0:
        time.sleep(1000)  # a child that holds all the trainer's files open, as engines have them
    print("idle", flush=True)
    time.sleep(1000)
except KeyboardInterrupt:
    print(task.rewards(["abc"], [row]), flush=True)
"""


def trainer(tmp_path: Path, kind: str, name: str, text: str, log: Path, then: str) -> "subprocess.Popen[str]":
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER, encoding="utf-8")
    (tmp_path / "graders.py").write_text(GRADERS, encoding="utf-8")
    return subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "graders.py"), kind, name, text, str(log), then],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.last("-fork-fresh", "-wait-fresh", "escapes-bomb---fresh", "holds_the_gil")
@pytest.mark.parametrize("kind", ["fork", "fresh"])
@pytest.mark.parametrize(
    ("name", "text", "then"),
    [("leaves_a_child", "bomb", "-"), ("holds_the_gil", "bomb", "-"),  # in the middle of a call
     ("leaves_a_child", "a", "wait"), ("leaves_a_child", "a", "fork"),  # between calls
     pytest.param("escapes", "bomb", "-", marks=linux), pytest.param("escapes", "a", "wait", marks=linux)],
)  # fmt: skip
def test_kill_9_of_the_trainer_leaves_nothing(tmp_path, log, kind, name, text, then):
    process = trainer(tmp_path, kind, name, text, log, then)
    try:
        wait_until(log.exists, 120)
        wait_until(lambda: len(pids(log)) >= {"leaves_a_child": 2, "escapes": 3}.get(name, 1), 120)
        started = pids(log)
        if then != "-":
            assert process.stdout is not None
            assert process.stdout.readline() == "idle\n"
        members = group_of(started[0])
        assert set(started[:1] if name == "escapes" else started) < set(members)  # and the guard
    finally:
        process.kill()
        process.wait()
    try:
        assert_gone([*members, *started])
    finally:
        for pid in group_of(process.pid):  # the trainer's own fork
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.last("fresh")
@pytest.mark.parametrize("kind", ["fork", "fresh"])
def test_the_worker_ends_with_a_trainer_that_exits(tmp_path, log, kind):
    process = trainer(tmp_path, kind, "leaves_a_child", "a", log, "exit")
    assert process.wait(timeout=120) == 0
    assert_gone(pids(log))


@pytest.mark.slow
@pytest.mark.last("fresh")
@pytest.mark.parametrize("kind", ["fork", "fresh"])
def test_ctrl_c_reaches_the_trainer_and_not_the_worker(tmp_path, log, kind):
    process = trainer(tmp_path, kind, "good", "a", log, "wait")
    assert process.stdout is not None
    assert process.stdout.readline() == "idle\n"
    os.killpg(process.pid, signal.SIGINT)  # what a terminal sends: to the whole foreground group
    assert process.stdout.readline() == "[3.0]\n"
    assert process.wait(timeout=60) == 0
    first, second = pids(log)
    assert first == second
    assert_gone([first])


def _pooled(completions: list[str], **_: Any) -> list[float]:
    with multiprocessing.get_context("fork").Pool(2) as pool:  # ended by SIGTERM
        return [float(size) for size in pool.map(len, completions)]


def _ended_at_once(completions: list[str], **_: Any) -> list[float]:
    for _ in range(20):
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        os.kill(child, signal.SIGTERM)  # before the child has run a line
        os.waitpid(child, 0)
    return [float(len(c)) for c in completions]


def _left_in_a_fork(completions: list[str], **_: Any) -> list[float]:
    child = os.fork()
    if not child:
        sys.exit(0)
    os.waitpid(child, 0)
    return [float(len(c)) for c in completions]


def _returned_in_a_fork(completions: list[str], **_: Any) -> list[float]:
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    return [float(len(c)) for c in completions]


def _slowly_measured(text: str) -> int:
    time.sleep(0.3)
    return len(text)


def _interrupted(completions: list[str], **_: Any) -> list[float]:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        sizes = pool.map_async(_slowly_measured, completions)
        time.sleep(0.1)
        os.killpg(0, signal.SIGINT)  # as a terminal sends it, to the pool too
        return [float(size) for size in sizes.get(60)]


def _train_in_place(reward: Callable[..., list[float]], run: Path) -> None:
    os.setpgid(0, 0)
    rows = run.with_suffix(".jsonl")
    rows.write_text("".join(json.dumps({"prompt": f"What is {a} + 1?"}) + "\n" for a in range(8)), encoding="utf-8")
    tree = {"output_dir": str(run), "lora": {"rank": 1, "target_layers": [3]}, "grader": {"isolated": False},
            "task": {"name": "custom", "train_data": str(rows)}, "evaluation": {"max_tokens": 4}, "report": False,
            "checkpoint": {"every": 1}, "checks": UNCHECKED,
            "es": {"sigma": 0.05, "num_generations": 2, "population_size": 2}}  # fmt: skip
    try:
        evoalign.train(tree, reward=reward, console=Console(file=io.StringIO()))
    except StoppedError:
        os._exit(130)


@pytest.mark.parametrize(
    ("reward", "code"),
    [(_pooled, 0), (_ended_at_once, 0), (_left_in_a_fork, 0), (_returned_in_a_fork, 0), (_interrupted, 130)],
)
def test_a_reward_that_forks_this_process_neither_hangs_nor_ends_the_run(reward, code, tmp_path):
    process = kill_points.PROCESSES.Process(target=_train_in_place, args=(reward, tmp_path / "run"))
    process.start()
    process.join(90)
    if process.is_alive():
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.join()
    assert process.exitcode == code
    assert code or len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 2
