# SPDX-License-Identifier: Apache-2.0
"""Files that appear whole or not at all: text, PEFT adapters, Hugging Face checkpoints. Safetensors and JSON only."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from evoalign.config import Config
from evoalign.errors import ModelError
from evoalign.types import Layout

PEFT_PREFIX = "base_model.model."


def write_text(path: Path, text: str) -> None:
    """Write, flush to disk, then rename into place."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def save_adapter(folder: Path, config: Config, layout: Layout, base: str, state: Mapping[str, torch.Tensor]) -> None:
    """A plain PEFT adapter in float32, as `PeftModel.from_pretrained` loads it."""
    from peft import LoraConfig, TaskType
    from safetensors.torch import save_file

    modules = [t.module.removesuffix(".weight") for t in layout.tensors]
    peft_config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        inference_mode=True,
        r=layout.rank,
        lora_alpha=layout.scaling * layout.rank,  # pyright: ignore[reportArgumentType]  # PEFT accepts a float
        target_modules=sorted({m.rsplit(".", 1)[-1] for m in modules}),
        layers_to_transform=config.lora.target_layers,
        base_model_name_or_path=base,
        revision=config.model.revision,
    )
    with _whole(folder) as temporary:
        peft_config.save_pretrained(str(temporary))
        tensors = {PEFT_PREFIX + name: tensor.contiguous() for name, tensor in state.items()}
        save_file(tensors, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
        (temporary / "adapter_model.safetensors").chmod(0o644)  # a server under another user reads it too


def load_adapter(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a PEFT adapter under evoalign's names. Raises ModelError naming a file that does not load."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = folder / "adapter_model.safetensors"
    try:
        return {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in load_file(file).items()}
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} does not load: {error}") from error


def save_model(
    folder: Path, base: str, revision: str | None, dtype: torch.dtype, state: Mapping[str, torch.Tensor]
) -> None:
    """The base model with the evolved tensors in place, in the served dtype, with its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(base, revision=revision, dtype=dtype, trust_remote_code=False)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in state.items():
            parameters[name].copy_(tensor)
    tokenizer: Any = AutoTokenizer.from_pretrained(base, revision=revision, trust_remote_code=False)
    with _whole(folder) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)


class _whole:  # noqa: N801  # reads as a verb at the `with`
    """A folder that is filled under another name and renamed when it is complete."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._temporary = folder.with_name(f".{folder.name}.tmp")

    def __enter__(self) -> Path:
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir(parents=True)
        return self._temporary

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            return
        _sync(self._temporary.rglob("*"))
        shutil.rmtree(self._folder, ignore_errors=True)
        self._temporary.replace(self._folder)


def _sync(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
