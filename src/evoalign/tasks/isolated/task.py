# SPDX-License-Identifier: Apache-2.0
"""Tasks whose scoring is the user's own code, or can hang by what a model says, run in a process that can be killed.

A call that hangs, dies or raises is made again `grader.retries` times, in a new worker where the old one is gone; then
RewardError stops the run and names the completion that does it. A wrong value (NaN, the wrong length) is a mistake of
the function and stops at once; so does an error such as KeyError that comes twice before anything was ever scored.
Nothing of this is ever a score.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from evoalign.config import GraderConfig
from evoalign.errors import DataError, EvoalignError, RewardError
from evoalign.rewards.functions import failure
from evoalign.rewards.objective import Columns, Objective
from evoalign.tasks.base import Data, Task
from evoalign.tasks.custom import Custom
from evoalign.tasks.data.spool import Spooled, held
from evoalign.tasks.exact import is_exact
from evoalign.tasks.isolated.connection import START_LIMIT, NoAnswerError, Worker
from evoalign.types import Example, Prompt

logger = logging.getLogger("evoalign.grader")

NO_MEMORY = re.compile("MemoryError|allocate memory|killed by SIG(KILL|ABRT)")
"""What is said where memory ran out: by Python, by torch, or by nobody any more."""
MISTAKES = frozenset(("KeyError", "IndexError", "TypeError", "ValueError", "AttributeError", "NameError",
                      "UnboundLocalError", "ZeroDivisionError", "ImportError", "ModuleNotFoundError",
                      "AssertionError", "NotImplementedError"))  # fmt: skip
"""What code raises that is wrong. What a judge behind an address answers may make it raise one of them, too: one that
has answered once is waited for."""
ASKED_ALONE = 20
"""Completions that are asked alone, at most, to tell whether all of them raise."""
SUPPORTED = hasattr(os, "fork")
"""Everywhere but on Windows."""


class Isolated(Task):
    """A task that scores in a worker process. `load_data` starts it: call that before the engine is loaded.

    Data and prompts are made here, as before. `close` it; it also ends with the object, and with this process.
    """

    def __init__(self, task: Task, grader: GraderConfig) -> None:
        self.config, self.name = task.config, task.name
        self.from_config = task.from_config
        self.task = task
        self.weighted = task.weighted
        own = task.set_objective
        self.set_objective = None if own is None else own.evaluated_by(self._set_values)
        self.text_form, self.commands = task.text_form, task.commands
        self._grader = grader
        self.per_call = task.per_call
        # Where the worker dies, a thread starts another: no fork, while this process decodes.
        self.scores_elsewhere = task.from_config
        self._worker = Worker(task, grader.memory_gib)
        self._lock = threading.Lock()
        self._place: dict[int, tuple[str, int]] = {}
        self._answered: set[str] = set()
        weakref.finalize(self, self._worker.close)

    def __getattr__(self, name: str) -> Any:
        if name == "task":  # asked by copy, before there is one
            raise AttributeError(name)
        return getattr(self.task, name)

    @property
    def max_reward(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride] (here it is only read)
        """The task's own, which it may learn from its data."""
        return self.task.max_reward

    @property
    def notes(self) -> Sequence[str]:  # pyright: ignore[reportIncompatibleVariableOverride] (here it is only read)
        """The task's own, which it learns from its data."""
        return self.task.notes

    def load_data(self, seed: int) -> Data:
        """The task's own, in this process, as lists: a row has to stay the same object. Starts the worker.

        Many rows stay in their file, and those of them that do not fit JSON are objects in memory.
        """
        loaded = self.task.load_data(seed)
        data = Data(_lasting(loaded.train), _lasting(loaded.test), _lasting(loaded.validation) or ())
        splits = (("train", data.train), ("test", data.test), ("validation", data.validation))
        self._place = {id(row): (split, i) for split, rows in splits for i, row in held(rows)}
        # A Task may keep what it loads, and some rows do not fit JSON: then the worker loads the data as well.
        wanted = type(self.task) is not Custom or any(
            len(_exact_columns(row)) < len(row) for _, rows in splits for _, row in held(rows)
        )
        self._worker.load(data, seed if wanted else None)
        return data

    def prompt(self, example: Example) -> Prompt:
        return self.task.prompt(example)

    def compute_reward(self, text: str, example: Example) -> float:
        return self._ask("compute_reward", [text], [example])

    def rewards(self, texts: Sequence[str], examples: Sequence[Example]) -> list[float]:
        """All completions in one call in the worker. Raises RewardError."""
        return self._ask("rewards", texts, examples)

    def columns(self, texts: Sequence[str], examples: Sequence[Example]) -> Columns:
        """All completions in one call in the worker. Raises RewardError."""
        return self._ask("columns", texts, examples)

    def handed(self, example: Example) -> Example:
        """The row itself, by which its place is known. The worker makes the copies."""
        return example

    def objective(self) -> Objective:
        """The task's own, in this process: it sees numbers, and its state has to outlive a worker."""
        return self.set_objective or self.task.objective()

    def _set_values(
        self, texts: Sequence[str], examples: Sequence[Example], sets: Sequence[Sequence[int]]
    ) -> list[float]:
        """All sets in one call in the worker. Raises RewardError."""
        return self._ask("fitness", texts, examples, sets=[list(one) for one in sets])

    def gold(self, example: Example) -> str | None:
        return self._ask("gold", [""], [example]) if self._defines("gold") else self.task.gold(example)

    def is_right(self, text: str, example: Example) -> bool | None:
        return (
            self._ask("is_right", [text], [example]) if self._defines("is_right") else super().is_right(text, example)
        )

    def measures(self, text: str, example: Example) -> Mapping[str, float]:
        return (
            self._ask("measures", [text], [example]) if self._defines("measures") else super().measures(text, example)
        )

    def judged(self, rewards: Mapping[str, float | None]) -> Mapping[str, float]:
        """The task's own, in this process, as the objective is: it sees numbers alone."""
        return self.task.judged(rewards)

    def point(self, text: str, example: Example, rewards: Mapping[str, float | None]) -> Mapping[str, Any] | None:
        if not self._defines("point"):
            return super().point(text, example, rewards)
        return self._ask("point", [text], [example], rewards=dict(rewards))

    def clean(self, text: str) -> str:
        return self._ask("clean", [text], []) if self._defines("clean") else super().clean(text)

    def self_check(self, examples: Sequence[Example]) -> None:
        """The task's own in one call, where it defines one; else each example's gold and reward are calls."""
        if self._defines("self_check"):
            self._ask("self_check", [], examples, max(START_LIMIT, self._grader.timeout))
        else:
            super().self_check(examples)

    def scorer_digest(self) -> str | None:
        return self.task.scorer_digest()

    def close(self) -> None:
        """End the worker. Scoring again would start another."""
        with self._lock:
            self._worker.close()
        self.task.close()

    def _defines(self, method: str) -> bool:
        """Whether it is the user's own code that would be called."""
        return getattr(type(self.task), method) not in (getattr(Task, method), getattr(Custom, method))

    def _ask(
        self,
        op: str,
        texts: Sequence[str],
        examples: Sequence[Example],
        limit: float | None = None,
        **more: Any,
    ) -> Any:
        """What the task's method gives, after at most `grader.retries` further attempts. Raises EvoalignError.

        `more` goes with the request. With `sets`, completions are scored together: none is to blame alone, and none is
        looked for.
        """
        limit = self._grader.timeout if limit is None else limit
        started = time.monotonic()
        attempt, before = 0, ""
        with self._lock:
            while True:
                attempt += 1
                try:
                    value = self._attempt(op, limit, texts, examples, **more)
                    self._answered.add(op)
                    return value
                except RewardError as error:  # a wrong value: no use to ask again
                    error.failed = (error.failed or {}) | _effort(attempt, started)
                    raise
                except NoAnswerError as problem:
                    mistake = op not in self._answered and _is_mistake(problem)
                    if attempt > self._grader.retries or (mistake and str(problem) == before):
                        effort = _effort(attempt, started)
                        alone = partial(self._attempt, op, limit)
                        self._refuse(problem, effort, None if "sets" in more else alone, texts, examples)
                    before, total = str(problem), self._grader.retries + 1
                    logger.warning("%s; attempt %d of %d failed, asking again", problem, attempt, total)
                    if problem.reason == "raised" and not mistake:
                        self._pause(min(2.0 ** (attempt - 1), 30.0))  # a judge over HTTP may come back

    def _pause(self, seconds: float) -> None:
        if self.stopping is None:
            time.sleep(seconds)
        else:
            self.stopping.wait(seconds)

    def _attempt(
        self,
        op: str,
        limit: float,
        texts: Sequence[str],
        examples: Sequence[Example],
        **more: Any,
    ) -> Any:
        unique = {id(example): example for example in examples}
        number = {key: i for i, key in enumerate(unique)}
        request = {
            "op": op,
            "texts": list(texts),
            "rows": [self._sent(row) for row in unique.values()],
            "row_of": [number[id(example)] for example in examples],
            **more,
        }
        who = self.set_objective.name if "sets" in more and self.set_objective is not None else None
        return self._worker.ask(request, limit, who, self.stopping)

    def _sent(self, example: Example) -> dict[str, Any]:
        """An example as JSON has it, or its place in the data where JSON would change it. Raises DataError."""
        exact = _exact_columns(example)
        if len(exact) == len(example):
            return {"columns": exact}
        if id(example) in self._place:
            return {"at": self._place[id(example)], "columns": exact}
        column, value = next(item for item in example.items() if item[0] not in exact)
        raise DataError(
            f"column {column!r} holds a {type(value).__name__}, which cannot be sent to the reward's own process; "
            "score rows that load_data gave, convert the column, or set grader.isolated to false"
        )

    def _refuse(
        self,
        problem: NoAnswerError,
        effort: dict[str, Any],
        attempt: Callable[[Sequence[str], Sequence[Example]], Any] | None,
        texts: Sequence[str],
        examples: Sequence[Example],
    ) -> NoReturn:
        """Find the completion that does it, where `attempt` can ask for some of them alone, and stop."""
        if attempt is not None and len(texts) > 1:
            logger.warning("%s; looking for the completion among %d that does it", problem, len(texts))
        if attempt is None or problem.function is None or not texts:
            blame, where = "", None
        elif (found := culprit(problem, attempt, texts, examples)) is None:
            blame, where = f"; none of the {len(texts)} completions does it alone, only the batch as a whole", None
        else:
            row, problem, blame = found
            example = examples[row] if examples else {}
            where = (self.task.prompt(example) if examples else "", texts[row], example)
        tries = "1 attempt" if effort["attempts"] == 1 else f"{effort['attempts']} attempts"
        asked = texts if problem.function else ()
        failed = failure(problem.reason, problem.function or "worker", where, problem.trace, asked) | effort
        fix = " or raise grader.timeout" if problem.reason == "hung" else ""
        if NO_MEMORY.search(str(problem)):
            fix = " or raise grader.memory_gib"
        if not self.from_config:
            fix += ", or let it run in this process with grader.isolated: false"
        raise RewardError(f"{problem} ({tries}, {effort['seconds']:.0f} s waited){blame}; fix it{fix}", failed)


def culprit(
    problem: NoAnswerError,
    attempt: Callable[[Sequence[str], Sequence[Example]], Any],
    texts: Sequence[str],
    examples: Sequence[Example],
) -> tuple[int, NoAnswerError, str] | None:
    """A completion that fails alone, how it did, and the words that blame it; None where only the whole does.

    Halves the batch that failed, so it takes at most two calls a halving, each under the time limit. Where it raises,
    which costs no time limit and no new worker, as many as `ASKED_ALONE` are asked alone.
    """

    def failing(rows: Sequence[int]) -> NoAnswerError | None:
        try:
            attempt([texts[i] for i in rows], [examples[i] for i in rows if examples])
        except NoAnswerError as found:
            return found
        except EvoalignError:
            return None
        return None

    suspects = range(len(texts))
    while len(suspects) > 1:
        half = len(suspects) // 2
        for part in (suspects[:half], suspects[half:]):
            if found := failing(part):
                suspects, problem = part, found
                break
        else:
            return None
    rest = [i for i in range(len(texts)) if i != suspects[0]]
    said = repr(texts[suspects[0]][:80])
    if not rest or failing(rest) is None:
        return suspects[0], problem, f"; the completion {said} does it alone"
    some = rest[:: -(-len(rest) // ASKED_ALONE)]
    if problem.reason != "raised" or any(failing([i]) is None for i in some):
        return suspects[0], problem, f"; the completion {said} does it alone, and so do others"
    alone = "" if some == rest else f" that were asked alone, {len(some) + 1} of {len(texts)},"
    return suspects[0], problem, f"; all completions{alone} do it, {said} for one"


def _is_mistake(problem: NoAnswerError) -> bool:
    """Whether it raised what a mistake in code raises, by the last line of its traceback."""
    last = (problem.trace or "").rstrip().rpartition("\n")[2]
    return problem.reason == "raised" and last.partition(":")[0] in MISTAKES


def _lasting(rows: Sequence[Example]) -> Sequence[Example]:
    return rows if isinstance(rows, Spooled) else list(rows)


def _exact_columns(example: Example) -> dict[str, Any]:
    return {name: value for name, value in example.items() if is_exact(name) and is_exact(value)}


def _effort(attempts: int, started: float) -> dict[str, Any]:
    return {"attempts": attempts, "seconds": time.monotonic() - started}
