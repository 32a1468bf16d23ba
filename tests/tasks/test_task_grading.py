# SPDX-License-Identifier: Apache-2.0
"""Scoring while others are decoded: the same columns and errors in pieces as in one call, whenever completions come."""

import json
import os
import random
import threading
import time
from contextlib import closing
from itertools import pairwise
from typing import cast

import pytest
from own_task import Vowels

from evoalign import tasks
from evoalign.config import GraderConfig, TaskConfig, from_dict
from evoalign.engines import Engine
from evoalign.errors import RewardError
from evoalign.rollouts import collect, columns_of
from evoalign.rundir.identity import differences
from evoalign.tasks.conciseness import Conciseness
from evoalign.tasks.grading import Grading
from evoalign.types import Plan, Request, Rollout, Sampling, population

pytestmark = [pytest.mark.skipif(not hasattr(os, "fork"), reason="no process to isolate in"), pytest.mark.timeout(120)]

SOURCE = """
import json, os, time
from pathlib import Path

HERE = Path(__file__).parent

def length(completions, **columns):
    return [float(len(c)) for c in completions]

def odd(text, example):
    return None if len(text) % 2 else -0.0

def seen(completions, **columns):
    with (HERE / "seen").open("a") as file:
        file.write(json.dumps(completions) + "\\n")
    return [1.0 for _ in completions]

def signs(completions, **columns):
    (HERE / "began").write_text(str(os.getpid()))
    return [1.0 for _ in completions]

def sleeps(completions, **columns):
    (HERE / "began").write_text(str(os.getpid()))
    time.sleep(1000 if "3.1" in completions else 0)
    return [1.0 for _ in completions]

def breaks(completions, **columns):
    for c in completions:
        if c in ("1.0", "3.1"):
            raise OSError(f"no judge for {c}")
    return [1.0 for _ in completions]

def nan(completions, **columns):
    return [float("nan") if c in ("1.0", "3.1") else 1.0 for c in completions]
"""
ROWS = [{"prompt": f"row {i}"} for i in range(3)]
MEMBERS = population(4)
REQUESTS = [Request(i, (1,), Sampling(1)) for i in range(3)]
TEXTS = [f"{m}.{r}" for m in range(4) for r in range(3)]
"""Completions of members in canonical order."""


@pytest.fixture
def make(tmp_path):
    """Reward functions of `SOURCE`, isolated by default."""
    (tmp_path / "own.py").write_text(SOURCE)
    made = []

    def make(*names, **grader):
        config = TaskConfig(name="custom", rewards=[f"{tmp_path / 'own.py'}:{name}" for name in names])
        made.append(tasks.isolate(tasks.create(config), GraderConfig(**{"retries": 0, **grader})))
        return made[-1]

    yield make
    for task in made:
        task.close()


class Saying:
    """Engine that completes in a given order, and calls a hook before each completion."""

    def __init__(self, order=None, before=None):
        self.order, self.before = order or range(12), before or {}

    def rollout(self, plan, asked):
        for count, place in enumerate(self.order):
            self.before.get(count, lambda: None)()
            yield Rollout(plan.members[place // 3], place % 3, (1,), TEXTS[place], "stop")


def columns(task, engine=None):
    """Of all completions, as they come."""
    with Grading(task, ROWS) as begun:
        answers = begun.of([0, 1, 2] * 4)
        collect(cast(Engine, engine or Saying()), Plan(0, 0.1, MEMBERS), REQUESTS, answers.take)
        return answers.columns()


def shuffled(seed):
    return random.Random(seed).sample(range(12), 12)


def until(there):
    """Wait for what another process or thread does; the time limit of the test is the only clock."""
    while not there():
        time.sleep(0.01)


@pytest.mark.parametrize("isolated", [True, False])
def test_pieces_give_the_result_of_one_call(make, isolated):
    whole = columns_of(make("length", "odd", isolated=False), TEXTS, ROWS * 4)
    assert set(whole) == {"length", "odd"} and whole["odd"][0] is None
    task = make("length", "odd", isolated=isolated)
    assert columns_of(task, TEXTS, ROWS * 4) == whole
    for task.per_call in (1, 5, 100):
        for seed in range(2):
            found = columns(task, Saying(shuffled(seed)))
            assert list(found) == list(whole) and repr(found) == repr(whole), "to the bit: -0.0 is not 0.0"
        assert columns_of(task, TEXTS, ROWS * 4) == whole


def test_pieces_do_not_depend_on_arrival_order(make, tmp_path):
    task = make("seen", batch=5)
    assert task.per_call == 5
    for task.per_call, cuts in ((5, (0, 5, 10, 12)), (None, (0, 12))):
        wanted = sorted(json.dumps(TEXTS[start:end]) for start, end in pairwise(cuts))
        for seed in range(3):
            columns(task, Saying(shuffled(seed)))
            assert sorted((tmp_path / "seen").read_text().splitlines()) == wanted
            (tmp_path / "seen").unlink()


def test_pieces_are_scored_during_decoding_but_whole_generations_and_forks_wait(make, tmp_path):
    task, began = make("signs", batch=4), tmp_path / "began"
    engine = Saying([4, 5, 6, 7, 0, 1, 2, 3, 8, 9, 10, 11], {4: lambda: until(began.exists)})  # else this never ends
    assert columns(task, engine) == {"signs": [1.0] * 12}
    absent = []
    engine = Saying(before={11: lambda: absent.append(not began.exists())})
    began.unlink()
    task.per_call = None
    columns(task, engine)
    began.unlink()

    def signs(completions):
        began.touch()
        return [1.0 for _ in completions]

    with closing(tasks.isolate(tasks.create(TaskConfig(name="custom"), [signs]), GraderConfig(batch=1))) as forked:
        assert columns(forked, engine) == {"signs": [1.0] * 12}
    assert absent == [True, True] and began.exists()


def test_a_task_of_this_process_scores_pieces_as_they_arrive():
    class Seen(Vowels):
        per_call, texts = 5, list[str]()

        def columns(self, texts, examples):
            self.texts += texts
            return {"one": [1.0 for _ in texts]}

    task, absent = Seen(), []
    order = [*range(5, 12), *range(5)]
    columns(task, Saying(order, {7: lambda: absent.append(sorted(task.texts) == sorted(TEXTS[5:]))}))
    assert absent == [True] and len(task.texts) == 12
    task.per_call, task.texts = None, []
    columns(task, Saying(order, {11: lambda: absent.append(not task.texts)}))
    assert absent == [True, True] and len(task.texts) == 12


@pytest.mark.parametrize("isolated", [True, False])
@pytest.mark.parametrize(("name", "message"), [("breaks", "no judge for 1.0"), ("nan", "for the completion '1.0'")])
def test_the_first_error_in_order_is_raised(make, name, message, isolated):
    task = make(name, isolated=isolated)
    for task.per_call in (None, 2):
        with pytest.raises(RewardError, match=message) as caught:
            columns(task, Saying([*range(9, 12), *range(9)]))  # the last come first
        assert caught.value.failed is not None
        if isolated or name == "nan":
            assert caught.value.failed["completion"] == "1.0" and caught.value.failed["example"] == ROWS[0]


class Pieces(Vowels):
    """Scores pieces of two in this process, and raises an error for some texts."""

    per_call = 2

    def __init__(self, error: BaseException, *texts: str) -> None:
        super().__init__()
        self.error, self.texts, self.seen = error, texts, list[str]()

    def compute_reward(self, text, example):
        self.seen.append(text)
        if text in self.texts:
            raise type(self.error)(f"{self.error} {text}")
        return 1.0


def test_the_first_error_in_order_is_raised_by_a_task_that_scores_while_others_are_decoded():
    order = [*reversed(range(12))]
    task = Pieces(ValueError("no vowels in"), "1.0", "2.0")
    with pytest.raises(RewardError, match=r"no vowels in 1\.0"):
        columns(task, Saying(order))
    assert task.seen.count("1.0") == 1, "a piece is scored once"
    early = Pieces(ValueError("no vowels in"), "0.1", "2.0")
    with pytest.raises(RewardError, match=r"no vowels in 0\.1"):
        columns(early, Saying())
    assert early.seen == ["0.0", "0.1"], "later pieces are left out"


def test_an_interrupt_while_a_piece_is_scored_ends_the_rollout():
    task, taken = Pieces(KeyboardInterrupt(), "0.1"), []
    with pytest.raises(KeyboardInterrupt):
        columns(task, Saying(before={place: lambda: taken.append(1) for place in range(12)}))
    assert len(taken) == 2


def test_an_interrupt_does_not_wait_for_a_thread(make, tmp_path):
    task = make("sleeps", batch=3, timeout=1000)
    pids = []

    def interrupt():
        until((tmp_path / "began").exists)
        pids.append(int((tmp_path / "began").read_text()))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        columns(task, Saying([9, 10, 11, *range(9)], {3: interrupt}))
    assert [t.name for t in threading.enumerate() if t.name.startswith("evoalign-grading")] == []
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
    assert task.rewards(["a"], ROWS[:1]) == [1.0], "and another worker scores what comes next"


class Whole(Conciseness):
    """Looks at all completions together, whatever its base does."""

    def rewards(self, texts, examples):
        return [float(len(texts))] * len(texts)


class Shifty(Vowels):
    per_call = 2

    def columns(self, texts, examples):
        return {"first" if "One" in texts else "other": [1.0] * len(texts)}


def test_pieces_need_the_same_columns():
    with pytest.raises(RewardError, match="returned the columns first for some completions and other for others"):
        columns_of(Shifty(), ["One", "Two", "Three"], [{}] * 3)


def test_per_call_cuts_only_tasks_that_score_each_completion_alone():
    assert tasks.create(TaskConfig(name="countdown")).per_call
    whole = Whole(TaskConfig())
    assert whole.per_call is None
    assert columns_of(whole, TEXTS, ROWS * 4) == {"reward": [12.0] * 12}
    cut = tasks.isolate(whole, GraderConfig(batch=4, isolated=False))
    assert columns_of(cut, TEXTS, ROWS * 4) == {"reward": [4.0] * 12}
    assert tasks.isolate(tasks.create(TaskConfig(name="safety")), GraderConfig(batch=4)).per_call is None


class Partly(Whole):
    def measures(self, text, example):
        return {"words": len(text.split()), "accuracy": None}


@pytest.mark.parametrize("isolated", [True, False])
def test_measures_may_not_apply(isolated):
    with closing(tasks.isolate(Partly(TaskConfig()), GraderConfig(isolated=isolated))) as task:
        assert task.measures("two words", {"prompt": "p"}) == {"words": 2.0, "accuracy": None}


def test_grader_batch_is_part_of_the_run():
    one, other = (from_dict({"es": {"sigma": 0.1}, "grader": grader}) for grader in ({}, {"batch": 4, "timeout": 5}))
    assert differences(one, other) == (["grader.batch is 4 in the run and None now"], [])
    assert differences(other, one) == (["grader.batch is None in the run and 4 now"], [])
    assert differences(other, other) == ([], [])
