# SPDX-License-Identifier: Apache-2.0
"""Small models of several families with random weights, and engines over them; no download.

The weights are scaled so that greedy texts do not repeat one token and a small change of a weight changes them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from evoalign import engines, optimizer, spaces, tokens
from evoalign.config import Config, from_dict
from evoalign.engines import Engine
from evoalign.engines.base import pairs_of
from evoalign.engines.transformers import TransformersEngine
from evoalign.models import tiny
from evoalign.spaces import Space
from evoalign.tokens import Tokens
from evoalign.types import Layout, Plan, Request, Rollout, Sampling, Update, population

VOCABULARY = 1024
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_HASHES = ("config_hash", "noise_table", "tokenizer_hash", "data_hash", "model_hash", "weights_hash")
_CONFIG = {"model": {"name": "Zoë"}}
JOURNAL_HEADER: dict[str, Any] = {
    **{name: f"{i:064x}" for i, name in enumerate(_HASHES)},
    "config_hash": hashlib.sha256(json.dumps(_CONFIG, sort_keys=True).encode()).hexdigest(),
    "versions": {"evoalign": "0.1.0"}, "device": "cpu", "dtype": "float32", "config": _CONFIG, "given_as": None,
    "space": "lora", "evolved_parameters": 8,
}  # fmt: skip
WINDOW = 6
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "gpt_neox": ("GPTNeoX", {"num_key_value_heads": ...}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "qwen2_windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "gemma2": ("Gemma2", {"sliding_window": WINDOW, "head_dim": 8, "tie_word_embeddings": False}),
    "opt": ("OPT", {"intermediate_size": ..., "num_key_value_heads": ..., "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "mpt": ("Mpt", {
        **dict.fromkeys(("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"), ...),
        **dict.fromkeys(("num_hidden_layers", "max_position_embeddings"), ...),
        "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 256, "expansion_ratio": 2,
    }),
}  # fmt: skip
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
}
"""Mixtures of experts, which transformers keeps fused."""
_SOME = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DENSE = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
OTHER_MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "flex_olmo": ("FlexOlmo", {"num_experts": 4, "num_experts_per_tok": 2}),
    "hunyuan_v1_moe": ("HunYuanMoEV1", {"num_experts": 4, "moe_topk": 2, "head_dim": 8}),
    "glm4_moe": ("Glm4Moe", {**_DENSE, **_SOME, "head_dim": 8}),
    "dots1": ("Dots1", {**_DENSE, **_SOME, "head_dim": 8}),
    "deepseek_v3": ("DeepseekV3", {**_DENSE, **_SOME, **_LATENT, "num_key_value_heads": 4}),
    "ernie4_5_moe": ("Ernie4_5_Moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16,
                                      "moe_layer_start_index": 1, "moe_num_shared_experts": 1}),
    "qwen2_moe": ("Qwen2Moe", {"num_experts": 4, "shared_expert_intermediate_size": 16, **_SOME}),
    "gpt_oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
}  # fmt: skip
"""Others, with dense layers, shared experts, or fused in another form."""


def unfused(model: Any) -> dict[str, torch.Tensor]:
    """A model's parameters by their names in checkpoints; those of experts as views of the fused ones."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        layer, is_fused, kind = name.partition(".mlp.experts.")
        if not is_fused:
            found[name] = parameter
            continue
        old = model.config.model_type == "mixtral"
        place = f"{layer}.block_sparse_moe.experts" if old else f"{layer}.mlp.experts"
        for e, matrix in enumerate(parameter.data):
            if kind == "down_proj":
                found[f"{place}.{e}.{'w2' if old else kind}.weight"] = matrix
            else:
                rows = len(matrix) // 2
                found[f"{place}.{e}.{'w1' if old else 'gate_proj'}.weight"] = matrix[:rows]
                found[f"{place}.{e}.{'w3' if old else 'up_proj'}.weight"] = matrix[rows:]
    return found


def build(family: str, folder: Path, **changes: Any) -> Path:
    """A random model of a family with the tiny model's tokenizer, as a folder."""
    import transformers

    name, own = {**FAMILIES, **MIXTURES, **OTHER_MIXTURES}[family]
    settings = {k: v for k, v in {**COMMON, **own, **changes}.items() if v is not ...}
    torch.manual_seed(7)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**settings))
    for key, parameter in model.named_parameters():
        if "norm" not in key:
            torch.nn.init.normal_(parameter, std=1.0 if "embed" in key else 0.3)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny() / file, folder)
    return folder


def make_config(path: str | Path = "tiny", space: str = "lora", /, **tree: Any) -> Config:
    """A config with the width of noise that changes greedy texts of these models, overridden by sections of `tree`."""
    sections: dict[str, Any] = {
        "seed": 5,
        "space": space,
        "model": {"name": str(path), "dtype": "float32"},  # as on a CPU where a GPU is
        "es": {"sigma": 0.05, "learning_rate": 0.025, "population_size": 30},
    }
    for name, section in tree.items():
        old = sections.get(name, {})
        sections[name] = {**old, **section} if isinstance(section, Mapping) and isinstance(old, dict) else section
    if "noise_multiplier" in sections["es"]:
        sections["es"].pop("sigma", None)
    return from_dict(sections)


class ByLibrary(TransformersEngine):
    """The library decodes, into whose layers adapters are put: what tests replace of that shows."""

    def __init__(self, config: Config, tokens: Tokens) -> None:
        engine = config.engine.model_copy(update={"decoder": "library"})
        super().__init__(config.model_copy(update={"engine": engine}), tokens)


class Bench:
    """An engine that has started, with what it was started with; a context manager."""

    def __init__(self, config: Config, stop_ids: Sequence[int] | None = None) -> None:
        self.config = config
        loaded = tokens.load(config.model)
        self.tokens = loaded if stop_ids is None else Tokens(loaded.tokenizer, stop_ids)
        self.engine: Engine = engines.create(config, self.tokens)
        self.space: Space = spaces.create(config)
        self.layout: Layout = self.space.layout(self.engine.specs(), self.engine.dtype)
        made = optimizer.create(config.es, self.layout)
        self.space = spaces.adapted(self.space, made)
        self.facts = self.engine.start(self.space, self.layout, made, config.es.decay > 0)
        self.members = population(config.es.population_size, antithetic=config.es.antithetic)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exception: object) -> None:
        self.engine.close()

    @property
    def model(self) -> Any:
        return self.engine.model  # type: ignore[attr-defined]

    def plan(self, generation: int = 1) -> Plan:
        return Plan(generation, self.config.es.width, self.members)

    def move(self) -> Update:
        """Apply one update with made-up coefficients, so that the mean is not the start; returns it."""
        generator = torch.Generator().manual_seed(3)
        coefficients = torch.randn(len(self.members), generator=generator, dtype=torch.float64).tolist()
        width = self.config.es.width
        update = Update(0, 0, self.members, tuple(coefficients), width, self.config.es.eta * width)
        self.engine.apply(update)
        return update

    def ask(self, plan: Plan, requests: Sequence[Request]) -> dict[tuple[int, int], Rollout]:
        rollouts = list(self.engine.rollout(plan, requests))
        cells = {(r.member.index, r.request): r for r in rollouts}
        assert len(cells) == len(rollouts) == len(pairs_of(plan.members, requests))
        return cells


def ids(count: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(20, VOCABULARY, (count,), generator=generator).tolist())


PREFIX = ids(9, 1)
PROMPTS: dict[str, tuple[tuple[int, ...], ...]] = {
    "apart": (ids(5, 2), ids(11, 3), ids(8, 4)),
    "shared": (PREFIX + ids(2, 5), PREFIX + ids(9, 6), PREFIX + ids(4, 7)),
}
"""Prompts of different lengths, without and with tokens that all begin with."""


def requests(prompts: Sequence[tuple[int, ...]], sampling: Sampling, **fields: Any) -> list[Request]:
    return [Request(i, p, sampling, 100 + i, **fields) for i, p in enumerate(prompts)]


@torch.inference_mode()
def next_logits(model: Any, prompt: Sequence[int], completion: Sequence[int]) -> torch.Tensor:
    """Logits [T, V] before each token of a completion: one plain forward, no cache, no padding."""
    whole = torch.tensor([[*prompt, *completion]])
    return model(input_ids=whole, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
