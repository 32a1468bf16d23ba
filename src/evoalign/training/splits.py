# SPDX-License-Identifier: Apache-2.0
"""What a run says of its splits before it starts: what is chosen by which, and whether they share prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from evoalign.config import Config
from evoalign.tasks import Data, Split, Task
from evoalign.types import Example

WORDS: dict[Split, str] = {"train": "training", "validation": "validation", "test": "test"}
SHARING: tuple[tuple[Split, Split, str], ...] = (
    ("test", "train", "the test split then says little of new prompts"),
    ("validation", "train", "what is chosen by them favours what was learnt by heart"),
    ("test", "validation", "what is chosen is then chosen on the test split too, whose reward is optimistic"),
)
"""Of which split prompts are counted that are in which other one, and what that means."""
NO_VALIDATION = (
    "validation none: checkpoint.keep_best is off and the last mean is kept, since nothing is chosen by the test split"
    "; task.validation_size sets rows aside to choose by"
)


def lines(config: Config, task: Task, data: Data) -> list[str]:
    """What a run tells, and a dry run."""
    return [_form_line(config, task, data), *task.notes, *shared_lines(task, data), *_chosen_lines(config, data)]


def _form_line(config: Config, task: Task, data: Data) -> str:
    """In which form the model reads the training prompts: raw text is often a slip where it was trained to chat."""
    raw, count = sum(isinstance(task.prompt(example), str) for example in data.train), len(data.train)
    form = config.task.prompt
    asked = "task.prompt is not set: the task's own form" if form is None else f"task.prompt: {form}"
    if raw == count:
        return f"prompts are {task.text_form}, without the model's chat template ({asked})"
    some = f"; {raw:,} of {count:,} are {task.text_form}" if raw else ""
    return f"prompts are messages for the model's chat template{some} ({asked})"


def shared_lines(task: Task, data: Data) -> list[str]:
    """A warning for each two splits that share prompts, with how many."""
    prompts = {split: _prompts(task, data.of(split)) for split in WORDS}
    found: list[str] = []
    for split, other, means in SHARING:
        count = int(np.isin(prompts[split], prompts[other]).sum())
        if count:
            total = len(prompts[split])
            found.append(
                f"warning: {count:,} of {total:,} {WORDS[split]} prompts are {WORDS[other]} prompts too; {means}"
            )
    return found


def keeps_best(config: Config, data: Data | None) -> bool:
    """Whether the best mean on the way is looked for. `data` None: its splits are not known."""
    return config.checkpoint.keep_best and (data is None or bool(data.validation))


def _prompts(task: Task, examples: Sequence[Example]) -> npt.NDArray[np.int64]:
    """A number for each; rows of other columns may still ask the same.

    Python's hash of 64 bits, as the texts of many rows fill the memory. That two of a million prompts have one by
    chance happens once in tens of millions of runs.
    """
    return np.fromiter((hash(json.dumps(task.prompt(example))) for example in examples), np.int64, len(examples))


def _chosen_lines(config: Config, data: Data) -> list[str]:
    every, count = config.evaluation.every, len(data.validation)
    if not count:
        return [NO_VALIDATION] if config.checkpoint.keep_best else []
    when = f", and after every {every}" if every else ""
    kept = "; the best mean by them is kept too" if every and config.checkpoint.keep_best else ""
    return [f"validation {count:,} examples, evaluated at the start and at the end{when}{kept}"]
