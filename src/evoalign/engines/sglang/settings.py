# SPDX-License-Identifier: Apache-2.0
"""The settings of SGLang, and what follows from them. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from evoalign.config.base import Count, Word
from evoalign.config.outside import INSIDE
from evoalign.engines.server.settings import ServerSettings


class SglangConfig(ServerSettings):
    """An SGLang server: 0.5.17 and later. One that is started here needs the extra `sglang`, in this environment or in
    that of `python`."""

    name: Literal["sglang"]  # pyright: ignore[reportIncompatibleVariableOverride]
    api: Literal["generate", "chat"] = "generate"
    """The route of completions: SGLang's own, with up to `batch` prompts a request, or OpenAI's chat completions, one
    each. Prompts go as token ids by both, so that both mean the same."""
    transport: Literal["auto", "files", "tensors"] = "auto"
    """How adapters reach the server. `files`: in `adapter_folder`, which both see. `tensors`: within the request, with
    the checksum of each; the server unpickles them, so it has to trust this process. auto: files for a server that is
    started here or at an address of this machine, tensors for others, which take 14 times as long (rank 8, SmolLM2)."""
    attention_backend: Annotated[Word | None, INSIDE] = None
    """One of SGLang's, such as triton or fa3; None leaves its own choice, on a CPU torch_native."""
    sampling_backend: Annotated[Word | None, INSIDE] = None
    """pytorch or flashinfer; None leaves SGLang's own choice, on a CPU pytorch."""
    lora_backend: Annotated[Word | None, INSIDE] = None
    """csgmv or triton; None leaves SGLang's own choice, on a CPU torch_native."""
    max_total_tokens: Count | None = None
    """Tokens in the cache; None: what `memory_fraction` leaves, on a CPU 65,536."""
    cuda_graph: bool = True
    """false: a faster start and slower steps."""
    deterministic_inference: bool = False
    """SGLang's batch-invariant kernels, and draws with seeds, which all members then share. Not on a CPU, and its LoRA
    kernels are not batch-invariant."""
    load_format: Literal["auto", "dummy"] = "auto"
    """dummy: random weights of the model's shapes, to measure with."""

    path = "evoalign.engines.sglang.engine:SglangEngine"
    serves = "SGLang"
    resources = ServerSettings.resources | {
        "api", "transport", "attention_backend", "sampling_backend", "lora_backend", "max_total_tokens", "cuda_graph",
    }  # fmt: skip
