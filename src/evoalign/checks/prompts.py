# SPDX-License-Identifier: Apache-2.0
"""Check before a run that the model can take all prompts: each token has an embedding, each completion has room."""

from __future__ import annotations

from heapq import nlargest

from evoalign.config import Config
from evoalign.errors import ConfigError, ModelError, shown
from evoalign.models.layers import positions
from evoalign.models.origin import model_config
from evoalign.rollouts import EARLY, batch
from evoalign.tasks import Data, Split, Task
from evoalign.tasks.joint import Settings
from evoalign.tokens import Tokens
from evoalign.types import text_of

LONGEST = 1000
"""Number of prompts, those with the most characters, that are tokenised of a larger split. All are if the tokenizer has
tokens without an embedding."""


def check(config: Config, tokens: Tokens, task: Task, data: Data, longest: int | None = None) -> str:
    """Return the longest prompt and its limit. Raises ModelError, ConfigError for a prompt that the model cannot take.

    `longest` is the most tokens of a completion of GRPO; None: ES, whose training rows that are never drawn are left
    out. Prompts are those of the first options of `task.settings` and of the longest ones.
    """
    found, settings = max(_lengths(config, tokens, task, data, longest)), Settings.of(config)
    *_, split, row = found
    number = settings.longest(
        lambda k: len(tokens.encode(task.prompt(settings.under(data.of(split), k)[row]), task.tools))
    )
    if number:
        found = max(found, *_lengths(config, tokens, task, settings.split(data, number), longest))
    total, length, setting, room, *_ = found
    limit, whose = _limit(config, longest is not None)
    detail = f"longest prompt {length} tokens and {setting} {room}"
    if limit is not None and total > limit:
        long = settings.chosen(number).items() if number else ()
        texts = "".join(f", or task.settings.{n} {shown(o)}" for n, o in long if o != settings.settings[n].options[0])
        raise ConfigError(f"{detail} exceed {whose}; lower {setting}, or shorten the prompts{texts}")
    return f"{detail} fit {whose}"


def _lengths(
    config: Config, tokens: Tokens, task: Task, data: Data, longest: int | None
) -> list[tuple[int, int, str, int, Split, int]]:
    """Return, of each prompt, its tokens with those of a completion, its tokens, the setting that limits the
    completion, its value, the split and the row."""
    trained = ("sampling.max_tokens" if longest is None else "grpo.max_completion_length", longest)
    tested = ("evaluation.max_tokens", config.evaluation.max_tokens)
    found: list[tuple[int, int, str, int, Split, int]] = []
    splits: tuple[Split, ...] = ("train", "validation", "test")
    for split in splits:
        setting, most = trained if split == "train" else tested
        room = config.sampling.max_tokens if most is None else most
        rows, examples = range(len(data.of(split))), data.of(split)
        drawn = config.es.num_generations * (config.task.batch_size or len(rows)) if longest is None else len(rows)
        rows = batch(len(rows), drawn, config.seed, 0) if split == "train" else rows
        if len(rows) > EARLY and not tokens.has_more_tokens:
            rows = nlargest(LONGEST, rows, key=lambda row, of=examples: len(text_of(task.prompt(of[row]))))
        for row in rows:
            try:
                length = len(tokens.encode(task.prompt(examples[row]), task.tools))
            except ModelError as error:
                raise ModelError(f"{split} row {row}: {error}") from error
            found.append((length + room, length, setting, room, split, row))
    return found


def _limit(config: Config, trains_here: bool) -> tuple[int | None, str]:
    """Return the most tokens of prompt and completion, by the model or by the engine, and what limits them."""
    model = model_config(config.model)
    limit, whose = positions(model)
    if not (trains_here or config.engine.serves_here):
        limit, whose = getattr(model.get_text_config(), "max_position_embeddings", None), "the model's {} positions"
    own = config.engine.limit()
    if own is not None and (limit is None or own[1] < limit):
        return own[1], f"{own[0]} {own[1]}"
    return limit, whose.format(limit or "unbounded")
