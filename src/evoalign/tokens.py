# SPDX-License-Identifier: Apache-2.0
"""Prompts to token ids and back. Done once, outside the engines, so that all of them see the same ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evoalign.config import ModelConfig
from evoalign.errors import ModelError
from evoalign.models import tiny
from evoalign.types import Prompt


def model_path(config: ModelConfig) -> str:
    """A folder or a hub name; `tiny` is the model that comes with the package. Raises ModelError."""
    name = config.name
    if name == "tiny":
        return str(tiny())
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    path = Path(name).expanduser()
    if looks_local and not path.is_dir():
        raise ModelError(f"model.name: no folder {name}")
    return str(path) if path.is_dir() else name


class Tokens:
    """A tokenizer, its chat template and its stop tokens."""

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.stop_ids = tuple(sorted(set(stop_ids)))
        pad = tokenizer.pad_token_id
        self.pad_id: int = int(pad) if pad is not None else (self.stop_ids[0] if self.stop_ids else 0)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt. Messages go through the chat template; without one, their texts are joined."""
        if isinstance(prompt, str):
            ids = self.tokenizer(prompt)["input_ids"]
        elif self.tokenizer.chat_template:
            # A last assistant message is a beginning for the model to go on from.
            opened = prompt[-1]["role"] == "assistant"
            text = self.tokenizer.apply_chat_template(
                prompt, tokenize=False, add_generation_prompt=not opened, continue_final_message=opened
            )
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = self.tokenizer("\n".join(m["content"] for m in prompt))["input_ids"]
        if not ids:
            raise ModelError(f"the prompt {prompt!r} has no tokens; mend the row")
        return tuple(int(i) for i in ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a completion, special tokens left out, spaces as they are."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def load(config: ModelConfig) -> Tokens:
    """The tokenizer of a model and its stop tokens. Raises ModelError."""
    from transformers import AutoTokenizer, GenerationConfig

    path = model_path(config)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, revision=config.revision, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model {config.name} has no tokenizer that loads: {_first_line(error)}") from error
    if not len(tokenizer):
        raise ModelError(f"model {config.name} has an empty tokenizer; its tokenizer files are missing")
    stop: set[int] = set()
    try:
        eos = GenerationConfig.from_pretrained(path, revision=config.revision or "main").eos_token_id
        stop.update([eos] if isinstance(eos, int) else eos or [])
    except OSError:
        pass  # a model without a generation config stops at the tokenizer's own end
    if tokenizer.eos_token_id is not None:
        stop.add(int(tokenizer.eos_token_id))
    return Tokens(tokenizer, sorted(stop))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
