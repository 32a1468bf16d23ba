# SPDX-License-Identifier: Apache-2.0
"""Tasks that score in a worker process: user code, and grading that a completion can hang.

A call that hangs, dies or raises is repeated `grader.retries` times, in a new worker if the old one is gone. Then a
RewardError stops the run and names the completion that causes it. A wrong value (NaN, the wrong length) is a bug of the
function and stops at once, and so does an error such as KeyError that occurs twice before any success. A failure is
never a score.
"""

from __future__ import annotations

import copy
import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, NoReturn

from evoalign.config import GraderConfig
from evoalign.errors import DataError, EvoalignError, RewardError
from evoalign.rewards.functions import failure, fresh
from evoalign.rewards.objective import Columns, Objective
from evoalign.tasks.base import Data, Task
from evoalign.tasks.custom import Custom
from evoalign.tasks.data.spool import Spooled, held, is_exact
from evoalign.tasks.environment import Environment
from evoalign.tasks.isolated.connection import START_LIMIT, NoAnswerError, Worker
from evoalign.tasks.isolated.worker import work
from evoalign.transcripts import Message
from evoalign.types import Example, Messages, Prompt

logger = logging.getLogger("evoalign.grader")

NO_MEMORY = re.compile("MemoryError|allocate memory|killed by SIG(KILL|ABRT)")
"""Messages that indicate out of memory (Python, torch, or a killed process)."""
MISTAKES = re.compile(
    "(Key|Index|Type|Value|Attribute|Name|UnboundLocal|ZeroDivision|Import|ModuleNotFound|Assertion|NotImplemented)Error"
)
"""Exceptions that indicate a bug. The reply of a remote judge may cause one too, so that after a first success they are
retried like others."""
ASKED_ALONE = 20
"""Maximum number of completions that are scored alone to find out whether all of them raise."""
SUPPORTED = hasattr(os, "fork")
"""Whether the system can fork: not Windows."""


class Isolated(Task):
    """Holds a task and scores with it: in a worker process, or in this one if `grader.isolated` is false.

    `load_data` starts the worker; call that before loading the engine. Data and prompts are made in this process.
    `close` it; the worker also ends with the object and with this process.
    """

    def __init__(self, task: Task, grader: GraderConfig) -> None:
        self.task, self._grader = task, grader
        self.config, self.name, self.from_config = task.config, task.name, task.from_config
        self.weighted, self.text_form, self.commands = task.weighted, task.text_form, task.commands
        self.correctness, self.tools = task.correctness, task.tools
        self.per_call = task.per_call or grader.batch
        self.set_objective = copy.copy(task.set_objective)
        if self.set_objective is not None:
            self.set_objective.values = partial(self._ask, "fitness")
        self._worker = Worker(task, grader.memory_gib) if grader.isolated else None
        # If the worker dies, a thread starts another; it must not fork while this process decodes.
        self.scores_in_thread = grader.isolated and task.from_config
        self.stopping: Event | None = None
        """Set to cancel: `columns` then raises CancelledError."""
        self._lock = threading.Lock()
        self._place: dict[int, tuple[str, int]] = {}
        self._answered: set[str] = set()
        if self._worker is not None:
            weakref.finalize(self, self._worker.close)

    def __getattr__(self, name: str) -> Any:
        if name == "task":  # copy.copy looks it up before it is set
            raise AttributeError(name)
        return getattr(self.task, name)

    @property
    def max_reward(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride] (here it is only read)
        """Maximum reward, which the task may learn from its data."""
        return self.task.max_reward

    @property
    def notes(self) -> Sequence[str]:  # pyright: ignore[reportIncompatibleVariableOverride] (here it is only read)
        """Notes, which the task learns from its data."""
        return self.task.notes

    def load_data(self, seed: int) -> Data:
        """Load the data in this process, as lists, since rows are identified by object. Starts the worker.

        Rows of large data sets stay in their file, except those that JSON cannot represent.
        """
        loaded = self.task.load_data(seed)
        if self._worker is None:
            return loaded
        train, test, validation = (
            rows if isinstance(rows, Spooled) else list(rows) for rows in (loaded.train, loaded.test, loaded.validation)
        )
        data = Data(train, test, validation or ())
        splits = (("train", train), ("test", test), ("validation", validation))
        in_memory = [(split, i, row) for split, rows in splits for i, row in held(rows)]
        self._place = {id(row): (split, i) for split, i, row in in_memory}
        # A task may keep what it loads, and JSON cannot represent all rows: then the worker loads the data too.
        loads = type(self.task) is not Custom or not all(is_exact(row) for _, _, row in in_memory)
        self._worker.load(data, seed if loads else None)
        return data

    def prompt(self, example: Example) -> Prompt:
        """Make the prompt in this process, except for one that an environment writes."""
        is_written = isinstance(self.task, Environment)
        return self._ask("prompt", [""], [example]) if is_written else self.task.prompt(example)

    @property
    def player(self) -> str:
        return self.task.player

    @property
    def inside(self) -> Task:
        return self.task

    def environment_factory(self) -> type[Any] | None:
        return self.task.environment_factory()

    def before_reset(self, example: Example) -> Prompt:
        return self.task.before_reset(example)

    def keep_episodes(self, path: Path) -> None:
        self.task.keep_episodes(path)

    def reply(self, example: Example, transcript: Messages) -> str | None:
        return self.task.reply(example, transcript)

    def replies(self, texts: Sequence[str], examples: Sequence[Example]) -> list[list[Message] | None]:
        """Reply to all episodes in one call to the worker. Raises RewardError."""
        return self._ask("replies", texts, examples)

    def compute_reward(self, text: str, example: Example) -> float:
        return self._ask("compute_reward", [text], [example])

    def rewards(self, texts: Sequence[str], examples: Sequence[Example]) -> list[float]:
        """Score all completions in one call to the worker. Raises RewardError."""
        return self._ask("rewards", texts, examples)

    def columns(self, texts: Sequence[str], examples: Sequence[Example]) -> Columns:
        """Score all completions in one call to the worker. Raises RewardError."""
        return self._ask("columns", texts, examples)

    def parts(self, texts: Sequence[str], examples: Sequence[Example]) -> Columns:
        """Score all completions in one call to the worker, if the task has parts. Only a report: it is not retried."""
        return self._ask("parts", texts, examples) if self._defines("parts") else {}

    def handed(self, example: Example) -> Example:
        """Return the row itself, which identifies its index. The worker makes the copies."""
        return example

    def objective(self) -> Objective:
        """Return the task's objective, which runs in this process: its state has to outlive a worker."""
        return self.set_objective or self.task.objective()

    def gold(self, example: Example) -> str | None:
        return self._ask("gold", [""], [example]) if self._defines("gold") else self.task.gold(example)

    def is_right(self, text: str, example: Example) -> bool | None:
        is_own = self._defines("is_right")
        return self._ask("is_right", [text], [example]) if is_own else super().is_right(text, example)

    def final_answer(self, text: str, example: Example) -> str | None:
        if not self._defines("final_answer"):
            return super().final_answer(text, example)
        found = self._ask("final_answer", [text], [example])
        return None if found is None else str(found)

    def measures(self, text: str, example: Example) -> Mapping[str, float | None]:
        return self._ask("measures", [text], [example]) if self._defines("measures") else {}

    def judged(self, rewards: Mapping[str, float | None]) -> Mapping[str, float]:
        """Call the task in this process, since it only sees numbers."""
        return self.task.judged(rewards)

    def point(self, text: str, example: Example, rewards: Mapping[str, float | None]) -> Mapping[str, Any] | None:
        return self._ask("point", [text], [example], dict(rewards)) if self._defines("point") else None

    def clean(self, text: str) -> str:
        return self._ask("clean", [text], []) if self._defines("clean") else super().clean(text)

    def self_check(self, examples: Sequence[Example]) -> None:
        """Check in one call to the worker if the task defines its own check; else one call per gold and reward."""
        if self._defines("self_check"):
            self._ask("self_check", [], examples, limit=max(START_LIMIT, self._grader.timeout))
        else:
            super().self_check(examples)

    def scorer_digest(self) -> str | None:
        return self.task.scorer_digest()

    def close(self) -> None:
        """End the worker. Scoring again starts another."""
        if self._worker is not None:
            with self._lock:
                self._worker.close()
        self.task.close()

    def _defines(self, method: str) -> bool:
        """Return whether the method is user code."""
        return getattr(type(self.task), method) not in (getattr(Task, method), getattr(Custom, method))

    def _ask(
        self,
        op: str,
        texts: Sequence[str],
        examples: Sequence[Example],
        more: Any = None,
        *,
        limit: float | None = None,
    ) -> Any:
        """Call the task's method in the worker, with up to `grader.retries` retries. Raises EvoalignError.

        `more` is its third argument: the columns of a point, or the sets of completions that the fitness scores.
        """
        if self._worker is None:
            pid = os.getpid()
            try:
                return work(self.task, op, texts, [fresh(example) for example in examples], more)
            finally:
                if os.getpid() != pid:  # user code forked and returned in the child, which must not end this run
                    os._exit(1)
        if op == "fitness":
            more = [list(one) for one in more]
        ask = partial(self._attempt, self._worker, op, more, self._grader.timeout if limit is None else limit)
        whole = op in ("fitness", "parts")  # no completion is blamed alone: a set is scored together; parts only report
        retries = 0 if op == "parts" else self._grader.retries
        started, attempt, before = time.monotonic(), 0, ""
        with self._lock:
            while True:
                attempt += 1
                try:
                    value = ask(texts, examples)
                    self._answered.add(op)
                    return value
                except RewardError as error:  # a wrong value: a retry would not help
                    error.failed = (error.failed or {}) | _effort(attempt, started)
                    raise
                except NoAnswerError as problem:
                    # The exception's type is in the last line of the traceback.
                    kind = (problem.trace or "").rstrip().rpartition("\n")[2].partition(":")[0]
                    mistake = op not in self._answered and problem.reason == "raised" and MISTAKES.fullmatch(kind)
                    if attempt > retries or (mistake and str(problem) == before):
                        self._refuse(problem, _effort(attempt, started), None if whole else ask, texts, examples)
                    before, total = str(problem), retries + 1
                    logger.warning("%s; attempt %d of %d failed, retrying", problem, attempt, total)
                    if problem.reason == "raised" and not mistake:  # a remote judge may recover
                        (time.sleep if self.stopping is None else self.stopping.wait)(min(2.0 ** (attempt - 1), 30.0))

    def _attempt(
        self, worker: Worker, op: str, more: Any, limit: float, texts: Sequence[str], examples: Sequence[Example]
    ) -> Any:
        unique = {id(example): example for example in examples}
        number = {key: i for i, key in enumerate(unique)}
        request = {
            "op": op,
            "texts": list(texts),
            "rows": [self._sent(row) for row in unique.values()],
            "row_of": [number[id(example)] for example in examples],
            "more": more,
        }
        who = self.set_objective.name if op == "fitness" and self.set_objective is not None else None
        return worker.ask(request, limit, who, self.stopping)

    def _sent(self, example: Example) -> dict[str, Any]:
        """Return the row as JSON, or its index if JSON would change it. Raises DataError."""
        exact = {name: value for name, value in example.items() if is_exact(name) and is_exact(value)}
        if len(exact) == len(example):
            return {"columns": exact}
        if id(example) in self._place:
            return {"at": self._place[id(example)], "columns": exact}
        column, value = next(item for item in example.items() if item[0] not in exact)
        raise DataError(
            f"column {column!r} has a {type(value).__name__}, which cannot be sent to the worker process: rows that "
            "load_data does not return, or that task.settings change, are sent as JSON; return a list, text or number "
            "in that column, or set grader.isolated: false"
        )

    def _refuse(
        self,
        problem: NoAnswerError,
        effort: dict[str, Any],
        attempt: Callable[[Sequence[str], Sequence[Example]], Any] | None,
        texts: Sequence[str],
        examples: Sequence[Example],
    ) -> NoReturn:
        """Raise RewardError naming the completion that fails, if `attempt` can score a part of the batch."""
        if attempt is not None and len(texts) > 1:
            logger.warning("%s; searching %d completions for the one that causes it", problem, len(texts))
        if attempt is None or problem.function is None or not texts:
            blame, where = "", None
        elif (found := culprit(problem, attempt, texts, examples)) is None:
            blame, where = f"; none of the {len(texts)} completions causes it alone, only the whole batch", None
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
            fix += ", or run it in this process with grader.isolated: false"
        raise RewardError(f"{problem} ({tries}, {effort['seconds']:.0f} s waited){blame}; fix it{fix}", failed)


def culprit(
    problem: NoAnswerError,
    attempt: Callable[[Sequence[str], Sequence[Example]], Any],
    texts: Sequence[str],
    examples: Sequence[Example],
) -> tuple[int, NoAnswerError, str] | None:
    """Find a completion that fails alone: its index, its failure and a sentence for the error. None if only the batch
    fails.

    Bisects the failing batch, with at most two calls per step. If the calls raise, which is fast, up to `ASKED_ALONE`
    completions are also scored alone.
    """

    def failing(rows: Sequence[int]) -> NoAnswerError | None:
        try:
            attempt([texts[i] for i in rows], [examples[i] for i in rows if examples])
        except NoAnswerError as found:
            return found
        except EvoalignError:
            pass
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
    text = repr(texts[suspects[0]][:80])
    if not rest or failing(rest) is None:
        return suspects[0], problem, f"; the completion {text} causes it alone"
    some = rest[:: -(-len(rest) // ASKED_ALONE)]
    if problem.reason != "raised" or any(failing([i]) is None for i in some):
        return suspects[0], problem, f"; the completion {text} causes it alone, and so do others"
    alone = "" if some == rest else f" that were scored alone, {len(some) + 1} of {len(texts)},"
    return suspects[0], problem, f"; all completions{alone} cause it, such as {text}"


def _effort(attempts: int, started: float) -> dict[str, Any]:
    return {"attempts": attempts, "seconds": time.monotonic() - started}
