# SPDX-License-Identifier: Apache-2.0
"""Countdown: make a target from given numbers, each used exactly once (Qiu et al., arXiv 2509.24372, section 4.1).

    reward = 0.1 * format + answer, from 0 to 1.1

The rules are those of the published graders, computed without regular expressions that back-track and without
running what the model wrote. Two deviations, both on purpose: `**`, `//` and signs are refused (the published graders
paid for `3**4` and `7//2`), and negative or fractional targets are graded as any other. With `task.grading: lenient` an
answer may be written as models write, too; the numbers and the value count as before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, cast

from evoalign.config import TaskConfig
from evoalign.errors import ConfigError, DataError
from evoalign.rewards.arithmetic import ExpressionError, evaluate
from evoalign.rewards.notation import evaluate_written
from evoalign.tasks import data
from evoalign.tasks.base import Data, Task
from evoalign.types import Example, Prompt

MAX_RESPONSE = 500_000
"""Characters of a cleaned response. A longer one earns 0: a hundred thousand tokens, where an answer takes hundreds."""
TOLERANCE = Fraction(1, 100_000)
"""Targets of the published data are decimal strings such as 266.6666666666667."""
FORMAT_WEIGHT = 0.1
DATA = "data/tasks/countdown/countdown.json"

THINK, END_THINK = "<think>", "</think>"
ANSWER, END_ANSWER = "<answer>", "</answer>"
BRIDGE = f"{END_THINK}\n{ANSWER}"

SYSTEM = (
    "You are a helpful assistant. You first think about the reasoning process in your mind and then provide the user "
    "with the answer."
)
USER = (
    "Using the numbers {numbers}, create an equation that equals {target}. You can use basic arithmetic operations "
    "(+, -, *, /) and each number can only be used once. Show your work in <think> </think> tags. And return the final "
    "answer in <answer> </answer> tags, for example <answer> (1 + 2) / 3 </answer>."
)
OPENING = f"Let me solve this step by step.\n{THINK}"
"""How the answer of `chat_opened` begins, as the replications have it."""
_TARGET = re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,18})?")


class Countdown(Task):
    """Rows of {id, context, numbers, target, solution}.

    Forms of the prompt:

    - `raw` (default): the row's `context` as it is, which ends in "<think>";
    - `short`: `Use [44 19 35] to make 98. <think>`;
    - `chat`: a system and a user message, numbers as a Python list; `task.system_prompt` takes the former's place;
    - `chat_opened`: the same, and the beginning of the answer, `OPENING`, which the model goes on with.

    Where the prompt ends in "<think>" the model's text continues the block, so the format is graded on "<think>" +
    response. In `chat` the response has to open the block itself and is graded as it is.
    """

    name = "countdown"
    shipped = (DATA, None)
    per_call = 16
    gradings = ("strict", "lenient")
    max_reward = FORMAT_WEIGHT * 1.0 + 1.0
    graded_text = END_ANSWER
    takes_system_prompt = True

    def __init__(self, config: TaskConfig) -> None:
        super().__init__(config)
        if config.prompt == "conversation":
            raise ConfigError("task.prompt: countdown has raw, short, chat and chat_opened, not conversation")
        if config.system_prompt is not None and config.prompt is None:
            raise ConfigError("task.system_prompt: countdown's prompt is raw, without messages; set task.prompt: chat")

    def load_data(self, seed: int) -> Data:
        return data.load(self.config, seed, self._check, self.shipped)

    def prompt(self, example: Example) -> Prompt:
        numbers, target = cast("list[int]", example["numbers"]), str(example["target"])
        if self.config.prompt == "short":
            return f"Use [{' '.join(map(str, numbers))}] to make {target}. {THINK}"
        if self.config.prompt in ("chat", "chat_opened"):
            question = USER.format(numbers=list(numbers), target=target)
            system = self.config.system_prompt or SYSTEM
            chat = [{"role": "system", "content": system}, {"role": "user", "content": question}]
            opened = self.config.prompt == "chat_opened"
            return [*chat, {"role": "assistant", "content": OPENING}] if opened else chat
        return cast(str, example["context"])

    def compute_reward(self, text: str, example: Example) -> float:
        form, answer = self._parts(text, example)
        return FORMAT_WEIGHT * form + answer

    def gold(self, example: Example) -> str | None:
        """The stored solution in the shortest full format."""
        solution = example.get("solution")
        if not isinstance(solution, str):
            return None
        opening = "" if self._opened(example) else THINK
        return f"{opening}{BRIDGE}{solution}{END_ANSWER}"

    def is_right(self, text: str, example: Example) -> bool:
        """Whether the answer comes to the target: there are many, and the stored solution is one of them."""
        return self._parts(text, example)[1] > 0

    def measures(self, text: str, example: Example) -> Mapping[str, float]:
        """`accuracy` is the answer alone, whatever the format; `high_reward` a total of at least 1."""
        form, answer = self._parts(text, example)
        return {
            "accuracy": float(answer > 0),
            "format": form,
            "answer_reward": answer,
            "high_reward": float(FORMAT_WEIGHT * form + answer >= 1.0),
        }

    def _parts(self, text: str, example: Example) -> tuple[float, float]:
        if len(text) > MAX_RESPONSE:
            return 0.0, 0.0
        opening = THINK if self._opened(example) else ""
        numbers, lenient = tuple(cast("list[int]", example["numbers"])), self.config.grading == "lenient"
        return format_reward(opening + text), _answer_reward(text, numbers, example["target"], lenient)

    def _opened(self, example: Example) -> bool:
        """Whether the prompt has opened the think block already."""
        if self.config.prompt == "chat":
            return False
        return self.config.prompt in ("short", "chat_opened") or cast(str, example["context"]).rstrip().endswith(THINK)

    def _check(self, where: str, row: dict[str, Any]) -> Example:
        wanted = ("numbers", "target", *(("context",) if "context" in self.config.columns else ()))
        if missing := [name for name in wanted if name not in row]:
            raise data.lacking(where, row, self.config, f"no {' and no '.join(missing)}", *wanted)
        check_row(where, row)
        context = row.get("context")
        if self.config.prompt in (None, "raw") and not (isinstance(context, str) and context):
            raise DataError(
                f"{where}: context is {context!r}; expected the prompt, or task.prompt: short, chat, chat_opened"
            )
        return row


def format_reward(response: str) -> float:
    """1.0 for `<think>..</think>`, one newline, `<answer>..</answer>` and no more; else .1 and .5 for either block.

    The regular expressions of the published graders, `^<think>.*?</think>\\n<answer>.*?</answer>$` and
    `<tag>.*?</tag>` (DOTALL), in linear time: one newline may follow, and text or further tags may stand inside.
    """
    if _is_full(response):
        return 1.0
    return 0.1 * _has_block(response, THINK, END_THINK) + 0.5 * _has_block(response, ANSWER, END_ANSWER)


def answer_reward(response: str, numbers: Sequence[int], target: str | int | float, *, lenient: bool = False) -> float:
    """1.0 where the last answer block uses each number exactly once and comes to the target, else 0.0.

    `lenient` reads what `rewards.notation` reads: other signs, LaTeX, markdown, a result after `=`.
    """
    answer = last_answer(response)
    if answer is None:
        return 0.0
    try:
        expression = (evaluate_written if lenient else evaluate)(answer)
    except ExpressionError:
        return 0.0
    correct = expression.numbers == tuple(sorted(numbers)) and abs(expression.value - Fraction(str(target))) < TOLERANCE
    return float(correct)


@lru_cache(2048)
def _answer_reward(response: str, numbers: tuple[int, ...], target: str | int | float, lenient: bool) -> float:
    """The same of what members and checks ask again and again."""
    return answer_reward(response, numbers, target, lenient=lenient)


def last_answer(response: str) -> str | None:
    """What stands in the last `<answer>..</answer>`: the last match of `<answer>(.*?)</answer>`, from left to right.

    A match ends at the first closing tag after an opening one and begins at the first opening tag after the closing
    tag before; so it is found with five searches, whatever the text.
    """
    last_close = response.rfind(END_ANSWER)
    last_open = response.rfind(ANSWER, 0, max(last_close, 0))
    if last_open < 0:
        return None
    end = response.find(END_ANSWER, last_open)
    close_before = response.rfind(END_ANSWER, 0, last_open)
    start = response.find(ANSWER, max(close_before, 0))
    return response[start + len(ANSWER) : end]


def check_row(where: str, row: Mapping[str, Any]) -> None:
    """Numbers and target are what they should be. Raises DataError naming `where`."""
    numbers: object = row.get("numbers")
    if not isinstance(numbers, list) or not numbers or not all(map(_is_number, cast("list[object]", numbers))):
        raise DataError(f"{where}: numbers is {numbers!r}; expected a list of integers from 0 up")
    target: object = row.get("target")
    if isinstance(target, bool) or not isinstance(target, str | int | float) or not _TARGET.fullmatch(str(target)):
        raise DataError(
            f"{where}: target is {target!r}; expected a decimal number as a string, such as '98' or '-27.4'"
        )
    if not isinstance(row.get("solution", ""), str | None):
        raise DataError(f"{where}: solution is {row['solution']!r}; expected a string such as '((44 + 19) + 35)'")


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_full(response: str) -> bool:
    bridge = response.find(BRIDGE, len(THINK))
    end = len(response) - response.endswith("\n") - len(END_ANSWER)
    whole = response.startswith(THINK) and 0 <= bridge <= end - len(BRIDGE)
    return whole and response.startswith(END_ANSWER, end)


def _has_block(response: str, opening: str, closing: str) -> bool:
    start = response.find(opening)
    return start >= 0 and response.find(closing, start + len(opening)) >= 0
