# SPDX-License-Identifier: Apache-2.0
"""The sections `task` and `grader`: data, prompts, rewards, and how user reward functions run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import date
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from evoalign.config.base import Count, Gib, Place, Section, Texts, named
from evoalign.config.joint import SettingsConfig
from evoalign.config.outside import CODE, DATA, INSIDE, PROGRAM, SCRIPT
from evoalign.errors import shown

Weight = Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)]


class ObjectiveConfig(BaseModel):
    """Objective: `weighted_sum`, or `package.module:Class` or `file.py:Class` with its settings."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: Annotated[str, CODE]

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the objective."""
        return dict(self.model_extra or {})


RENDERING = frozenset({
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "max_length", "messages",
    "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs",
    "truncation",
})  # fmt: skip
"""Arguments of `apply_chat_template` that evoalign sets."""


def _of_template(value: object) -> object:
    """Write dates, as YAML reads them, as text. Raises ValueError for names and values that a template cannot get."""
    if not isinstance(value, Mapping):
        return value
    found = {name: str(item) if type(item) is date else item for name, item in value.items()}
    for name, item in found.items():
        if not isinstance(name, str) or not name.isidentifier() or name in RENDERING:
            raise ValueError(f"{shown(name)} is not a variable of a chat template that can be set; remove it")
        try:
            json.dumps(item, allow_nan=False)
            if name == "strftime_now":
                date.fromisoformat(item)
        except (TypeError, ValueError):
            kind = (
                "a date, YYYY-MM-DD" if name == "strftime_now" else "text, a number, true, false, a list or a mapping"
            )
            raise ValueError(f"{name} is {shown(item)}; expected {kind}") from None
    return found


TASKS = {
    "conciseness": "evoalign.tasks.conciseness:Conciseness",
    "constraints": "evoalign.tasks.constraints:Constraints",
    "countdown": "evoalign.tasks.countdown:Countdown",
    "custom": "evoalign.tasks.custom:Custom",
    "environment": "evoalign.tasks.environment:Environment",
    "harness": "evoalign.tasks.harness:Harness",
    "gsm8k": "evoalign.tasks.mathematics:Gsm8k",
    "guess": "evoalign.tasks.guess:Guess",
    "likelihood": "evoalign.tasks.likelihood:Likelihood",
    "math": "evoalign.tasks.mathematics:Math",
    "safety": "evoalign.tasks.safety:Safety",
    "shopping": "evoalign.tasks.shopping:Shopping",
    "sums": "evoalign.tasks.sums:Sums",
    "tool_calls": "evoalign.tasks.tool_calls:ToolCalls",
    "word_problems": "evoalign.tasks.word_problems:WordProblems",
}
"""Built-in tasks and their classes."""
WITH_SETTINGS = frozenset({"safety"})
"""Built-in tasks with additional settings, which their classes validate."""
OBJECTIVES = {
    "lagrangian": "evoalign.tasks.safety:Lagrangian",
    "weighted_sum": "evoalign.rewards.objective:WeightedSum",
}
"""Built-in objectives and their classes."""


class EpisodeConfig(Section):
    """Limits of one episode, for tasks of several turns."""

    turns: Annotated[int, Field(ge=1, le=10**6)] = 8
    """Most completions of the model. The episode then ends, with the replies to the last one."""
    tokens: Count | None = None
    """Most tokens of all completions: no further turn begins once they are reached. None: turns x max_tokens."""
    seconds: Annotated[float, Field(ge=1e-3, le=1e7, allow_inf_nan=False)] = 600.0
    """For `harness`: most seconds of an episode, after which its processes are killed."""
    concurrency: Annotated[int, Field(ge=1, le=10**4)] = 64
    """For `harness`: most episodes at a time."""
    at_limit: Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)] | None = None
    """For `harness`: reward of an episode that ends at a limit without a score. None: it is a failure, which is
    retried and then stops the run."""


class TaskConfig(Section):
    """Task: data, prompts and rewards. `name` may be `package.module:Class`, with additional settings."""

    model_config = ConfigDict(extra="allow")
    name: Annotated[str, CODE] = "conciseness"
    train_data: Annotated[Place | None, DATA] = None
    test_data: Annotated[Place | None, DATA] = None
    """A JSON, JSONL, CSV, TSV or parquet file, a folder of such files or of `save_to_disk` (`FOLDER:SPLIT`), or a hub
    data set as `hub:NAME`, `hub:NAME:SPLIT` or `hub:NAME:CONFIG:SPLIT`."""
    columns: Annotated[dict[str, str], INSIDE] = Field(default_factory=dict, exclude_if=lambda value: not value)
    """Columns to rename: with `{prompt: question}` the file's `question` is the task's `prompt`. Recorded only if
    set."""
    split: Literal["seeded", "first_last"] = "seeded"
    """How to split one file without `test_data`: a seeded 80/20, or first `train_size`, last `test_size` rows."""
    train_size: Count | None = None
    test_size: Count | None = None
    validation_data: Annotated[Place | None, DATA] = Field(default=None, exclude_if=lambda value: value is None)
    """Validation data: a file or a hub data set as for `test_data`. The best checkpoint and the settings of a search
    are selected on it, never on the test split. Recorded only if set."""
    validation_size: Count | None = Field(default=None, exclude_if=lambda value: value is None)
    """Number of validation rows: the first ones of `validation_data`; without it, rows of the training split that are
    then not trained on: those after the first `train_size`, or else the last. Recorded only if set."""
    prompt: Literal["raw", "chat", "short", "chat_opened", "conversation"] | None = None
    """Form of the prompt; None: the default of the task. For `custom`, a new run then takes and records `chat` if the
    tokenizer has a chat template; otherwise text prompts are `raw`. `chat_opened` (`countdown`) is `chat` with the
    beginning of the assistant message; `conversation` (`safety`) is plain text with the words USER and ASSISTANT. `raw`
    has no messages, and so no `system_prompt`."""
    system_prompt: Annotated[str | None, INSIDE] = Field(
        default=None, min_length=1, exclude_if=lambda value: value is None
    )
    """System message of chat prompts without one. Recorded only if set."""
    template_kwargs: Annotated[dict[str, Any], BeforeValidator(_of_template), INSIDE] = Field(
        default_factory=dict, exclude_if=lambda value: not value
    )
    """Variables for the chat template, such as `{enable_thinking: false}` or `{date_string: "26 Jul 2024"}`, in
    training (also GRPO), evaluation and analysis alike. A template that prints today's date (`strftime_now`) gets
    2024-07-26 on every day; `{strftime_now: 2026-11-27}` sets another date. Recorded only if set."""
    batch_size: Count | None = None
    """Training examples per generation; None: all."""
    samples: Count | None = Field(default=None, exclude_if=lambda value: value is None)
    """Completions per member and training example, for example for pass@k in `fitness`; None: 1. More need
    `sampling.temperature` above 0. GRPO has `grpo.num_generations`. Recorded only if set."""
    settings: Annotated[SettingsConfig, INSIDE] = Field(default_factory=dict, exclude_if=lambda value: not value)
    """Discrete settings that ES searches together with the weights, by name: a list of options, `{ordinal: [...]}` or
    `{text: [...]}`. Each member draws one option of each; the mean has the likeliest. `max_tokens`, `temperature` and
    `top_p` set the sampling, a text setting the form of the prompt, and all are columns for prompt and rewards. The
    first option is the start. Recorded only if set."""
    strip: bool = True
    """Strip white space around a completion before scoring it."""
    grading: Literal["strict", "lenient"] = Field(default="strict", exclude_if=lambda value: value == "strict")
    """For `countdown`: accepted notation. `strict` accepts what the published graders accept; `lenient` also accepts
    other signs, LaTeX, markdown and a result after `=`. Recorded only if lenient."""
    rewards: Annotated[Texts, SCRIPT] = Field(default_factory=list)
    """For `custom`: import paths `package.module:function` or `file.py:function` of reward functions, and paths of
    scripts: executable files that read JSON lines and print numbers. A single one needs no list."""
    reward_weights: list[Weight] | None = None
    gold: Annotated[str | None, INSIDE] = Field(default=None, min_length=1, exclude_if=lambda value: value is None)
    """For `custom`: column with a right answer. It detects rewards that wrong answers earn, and does not affect scores.
    Recorded only if set."""
    environment: Annotated[str | None, SCRIPT] = Field(
        default=None, min_length=1, exclude_if=lambda value: value is None
    )
    """For `environment`: import path `package.module:Class` or `file.py:Class` of an environment class as TRL's
    `environment_factory` takes it. Recorded only if set."""
    command: Annotated[str | None, PROGRAM] = Field(default=None, min_length=1, exclude_if=lambda value: value is None)
    """For `harness`: the command that runs one episode, such as `./my_eval.sh {base_url} {api_key} {example}`, or the
    import path `my_eval.py:function` of a function that takes these three. Recorded only if set."""
    score: Literal["stdout", "file", "post"] = Field(default="stdout", exclude_if=lambda value: value == "stdout")
    """For `harness`: where it reports the score of an episode: `stdout`, the last line; `file`, $EVOALIGN_SCORE;
    `post`, {base_url}/score with its key. The other two are ignored, so that a model with a shell cannot use them.
    Recorded only if it is not `stdout`."""
    episode: EpisodeConfig | None = Field(default=None, exclude_if=lambda value: value is None)
    """Limits of an episode, for a task of several turns; None: the defaults. Recorded only if set."""
    objective: Annotated[
        ObjectiveConfig | None, BeforeValidator(named, json_schema_input_type=str | ObjectiveConfig | None)
    ] = Field(default=None, exclude_if=lambda value: value is None)
    """Objective; None: the default of the task, usually the weighted sum. Recorded only if set."""

    fitness: Annotated[str | None, SCRIPT] = Field(default=None, min_length=1, exclude_if=lambda value: value is None)
    """Short form of an objective: import path `package.module:function` or `file.py:function` of a function that
    returns one number for all completions of a member. It replaces the mean of the rewards. Recorded only if set."""

    @property
    def files(self) -> tuple[str | None, ...]:
        """Training, test and validation data."""
        return self.train_data, self.test_data, self.validation_data

    def asked(self, examples: int) -> int:
        """Return the number of completions per member and generation, given the number of training examples."""
        return min(self.batch_size or examples, examples) * (self.samples or 1)

    @property
    def limits(self) -> EpisodeConfig:
        """Limits of an episode."""
        return self.episode or EpisodeConfig()

    @property
    def options(self) -> dict[str, Any]:
        """Settings that only this task has."""
        return dict(self.model_extra or {})

    @field_validator("columns")
    @classmethod
    def _once(cls, columns: dict[str, str]) -> dict[str, str]:
        for there in columns.values():
            names = [name for name, column in columns.items() if column == there]
            if len(names) > 1:
                raise ValueError(f"{' and '.join(names)} both rename the column {there}; rename it once")
        return columns

    @model_validator(mode="after")
    def _known(self) -> TaskConfig:
        if self.name in TASKS.keys() - WITH_SETTINGS and self.options:
            raise ValidationError.from_exception_data(
                "task", [{"type": "extra_forbidden", "loc": (k,), "input": v} for k, v in self.options.items()]
            )
        if self.fitness is not None and self.objective is not None:
            raise ValueError("task.fitness and task.objective both set the objective; set one of them")
        if self.fitness is not None and self.settings:
            raise ValueError("task.fitness scores rows without task.settings; use reward functions, or remove settings")
        if self.fitness is not None and ":" not in self.fitness:
            raise ValueError(f"task.fitness {shown(self.fitness)}: write package.module:function or file.py:function")
        return self


class GraderConfig(Section):
    """How user reward functions run. Most built-in tasks score in the trainer's process."""

    isolated: bool = True
    """Run in a worker process that can be killed. false: run in this process, without a time limit."""
    timeout: Annotated[float, Field(ge=1e-3, le=1e7, allow_inf_nan=False)] = 60.0
    """Maximum seconds for one call of the reward functions."""
    retries: Annotated[int, Field(ge=0, le=10**6)] = 2
    """Retries of a call that timed out, died or raised, before the run stops."""
    batch: Count | None = Field(default=None, exclude_if=lambda value: value is None)
    """Completions per call, scored while others are decoded. Only for functions that score each completion alone: it
    can change results and is part of the run. None: all completions of a generation, after decoding. Recorded only if
    set."""
    memory_gib: Gib | None = None
    """GiB that the worker, and each process that it starts, may allocate in addition to its memory at the start; None:
    half of the machine's memory. A call that needs more fails. Linux only."""
