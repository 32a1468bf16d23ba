# SPDX-License-Identifier: Apache-2.0
"""A judge in this process: a local model with greedy decoding, one prompt at a time."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from evoalign import tokens
from evoalign.analysis.judge.judges import NoRoomError, Reply
from evoalign.config import ModelConfig, from_dict
from evoalign.models.files import check_weights, load_whole, refuse_pickles, set_by
from evoalign.models.origin import described, empty_model, model_path

OPTION = "--judge-model"


def check(name: str) -> tuple[ModelConfig, tokens.Tokens]:
    """Return a model's settings and tokenizer. Raises ModelError if it cannot load, without reading its weights."""
    config = from_dict({"model": {"name": name}}).model
    with set_by(OPTION):
        tokenizer = tokens.load(config)
        empty_model(config)
        path, revision = described(config)
        refuse_pickles(path, revision)
        if Path(path).is_dir():  # checking a model of the hub would download it
            check_weights(path, revision, path)
    return config, tokenizer


class Local:
    """A model in this process, on the GPU if there is one. Raises ModelError if it does not load."""

    concurrency = 1

    def __init__(self, name: str, *, max_tokens: int) -> None:
        from transformers import GenerationConfig

        self.name, self._max_tokens = name, max_tokens
        config, self._tokens = check(name)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = getattr(torch, config.served_dtype(on_gpu=device.type == "cuda"))
        with set_by(OPTION):
            self._model: Any = load_whole(model_path(config), None, dtype, name).to(device)
        self._context: int | None = getattr(self._model.config, "max_position_embeddings", None)
        marks = [str(t) for t in self._tokens.tokenizer.added_tokens_decoder.values() if t.special and len(str(t)) > 1]
        self._special = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or r"(?!)")
        """Special tokens: `ask` inserts a space into each, so that an answer cannot end the turn."""
        self._model.generation_config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=list(self._tokens.stop_ids) or None,
            pad_token_id=self._tokens.pad_id,
        )

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[None]:
        """Do nothing: the model is loaded already."""
        yield

    async def ask(self, prompt: str) -> Reply:
        """Generate greedily. Raises NoRoomError if prompt and reply do not fit into the context."""
        content = self._special.sub(lambda found: f"{found[0][0]} {found[0][1:]}", prompt)
        chats = bool(self._tokens.tokenizer.chat_template)  # a model without a chat template continues the text
        ids = self._tokens.encode([{"role": "user", "content": content}] if chats else content)
        if self._context is not None and len(ids) + self._max_tokens > self._context:
            raise NoRoomError(
                f"the prompt has {len(ids)} tokens and the reply up to {self._max_tokens}; the judge's context is "
                f"{self._context}"
            )
        given = torch.tensor([ids], device=self._model.device)
        with torch.inference_mode():
            out = self._model.generate(given, attention_mask=torch.ones_like(given))
        new: list[int] = out[0, len(ids) :].tolist()
        stopped = bool(new) and new[-1] in self._tokens.stop_ids
        return Reply(self._tokens.decode(new), not stopped)

    def redacted(self, text: str) -> str:
        """Return the text unchanged: a local model has no key."""
        return text
