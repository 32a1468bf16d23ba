# SPDX-License-Identifier: Apache-2.0
"""A judge in this process: a model's folder, asked greedily, one question after another."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from evoalign import tokens
from evoalign.analysis.judge.base import NoRoomError, Reply
from evoalign.config import ModelConfig, from_dict
from evoalign.models.files import check_weights, load_whole, refuse_pickles, set_by
from evoalign.models.origin import described, empty_model, model_path

OPTION = "--judge-model"


def check(name: str) -> tuple[ModelConfig, tokens.Tokens]:
    """A model's settings and tokenizer. Raises ModelError where it would not load, as far as that is known without its
    weights."""
    config = from_dict({"model": {"name": name}}, needs_es=False).model
    with set_by(OPTION):
        found = tokens.load(config)
        empty_model(config)
        path, revision = described(config)
        refuse_pickles(path, revision)
        if Path(path).is_dir():  # of the hub's, looking for weights would fetch them
            check_weights(path, revision, path)
    return config, found


class Local:
    """A model on the GPU where there is one. Raises ModelError where it does not load."""

    concurrency = 1

    def __init__(self, name: str, *, max_tokens: int) -> None:
        from transformers import GenerationConfig

        self.name, self._max_tokens = name, max_tokens
        config, self._tokens = check(name)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = getattr(torch, config.served_dtype(on_gpu=device.type == "cuda"))
        with set_by(OPTION):
            self._model: Any = load_whole(model_path(config), None, dtype, name).to(device)
        self._room: int | None = getattr(self._model.config, "max_position_embeddings", None)
        marks = [str(t) for t in self._tokens.tokenizer.added_tokens_decoder.values() if t.special and len(str(t)) > 1]
        self._special = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or r"(?!)")
        """What would end the turn or begin another, were it read in an answer as it stands: a space comes into it."""
        self._model.generation_config = GenerationConfig(
            do_sample=False, max_new_tokens=max_tokens, eos_token_id=list(self._tokens.stop_ids) or None,
            pad_token_id=self._tokens.pad_id,
        )  # fmt: skip

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[None]:
        """It is there from the start."""
        yield

    async def ask(self, prompt: str) -> Reply:
        """Raises NoRoomError for a question that the model has no room for."""
        content = self._special.sub(lambda found: f"{found[0][0]} {found[0][1:]}", prompt)
        ids = self._tokens.encode([{"role": "user", "content": content}])
        if self._room is not None and len(ids) + self._max_tokens > self._room:
            raise NoRoomError(
                f"the question has {len(ids)} tokens and the reply may have {self._max_tokens}; the judge has room for "
                f"{self._room}"
            )
        given = torch.tensor([ids], device=self._model.device)
        with torch.inference_mode():
            out = self._model.generate(given, attention_mask=torch.ones_like(given))
        said: list[int] = out[0, len(ids) :].tolist()
        ended = bool(said) and said[-1] in self._tokens.stop_ids
        return Reply(self._tokens.decode(said), not ended)

    def hidden(self, text: str) -> str:
        """It knows no key."""
        return text
