# SPDX-License-Identifier: Apache-2.0
"""Small random models of every causal language model of transformers, made from one table of settings."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

from evoalign.models import tiny

SETTINGS: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "intermediate_size_mlp"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 512),
    **dict.fromkeys(("sliding_window", "attention_window", "attention_chunk_size", "window_size"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_key_value_heads", "eos_token_id"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_intermediate_size"), 32),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "head_dim", "v_head_dim", "query_pre_attn_scalar"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    **dict.fromkeys(("initializer_range", "init_std"), 0.2),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 1024),
    "pad_token_id": 0, "bos_token_id": None, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 0,
    "shared_intermediate_size": 32, "layer_types": None,
}  # fmt: skip
_BASE = {"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "eos_token_id": 2}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "num_hidden_layers": 2, "num_key_value_heads": 2}
_LATENT = {"num_key_value_heads": 4, "head_dim": 8}
_BLT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
_BLT_PART = {**_BLT, "vocab_size": 260, "cross_attn_k": 1, "hidden_size_global": 64}
MORE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu"), _LATENT
    ),
    "gemma4_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 32},
}
"""Settings of some families besides those of the table."""
WHOLE: dict[str, dict[str, Any]] = {
    "bamba": {**_BASE, **_MAMBA, "mamba_n_groups": 1, "attn_layer_indices": [1]},
    "falcon_h1": {**_BASE, **_MAMBA, "head_dim": 16, "mamba_d_ssm": 128},
    "zamba2": {**_BASE, "num_hidden_layers": 3, "num_key_value_heads": 4, "n_mamba_heads": 4, "mamba_d_state": 16,
               "mamba_ngroups": 1, "layers_block_type": ["mamba", "mamba", "hybrid"], "hybrid_layer_ids": [2],
               "num_mem_blocks": 1},
    "recurrent_gemma": {**_BASE, "num_hidden_layers": 3, "num_key_value_heads": 1, "lru_width": 64,
                        "attention_window_size": 8},
    "nemotron_h": {**_BASE, "num_key_value_heads": 2, "head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 32,
                   "ssm_state_size": 16, "n_groups": 1, "layers_block_type": ["mamba", "mlp", "attention", "mlp"]},
    "mamba2": {"vocab_size": 1024, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 32,
               "state_size": 16, "n_groups": 1, "eos_token_id": 2},
    "dbrx": {"vocab_size": 1024, "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256, "eos_token_id": 2,
             "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
             "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64}},
    "lfm2_moe": {**_BASE, "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 2,
                 "num_experts": 4, "num_experts_per_tok": 2, "num_dense_layers": 1,
                 "layer_types": ["conv", "full_attention"]},
    "blt": {"vocab_size": 260, "encoder_hash_byte_group_vocab": 500, "encoder_hash_byte_group_size": [3],
            "patcher_config": {**_BLT, "vocab_size": 260}, "encoder_config": _BLT_PART, "decoder_config": _BLT_PART,
            "global_config": _BLT},
    "reformer": {"vocab_size": 1024, "hidden_size": 64, "is_decoder": True, "num_attention_heads": 4,
                 "attention_head_size": 16, "attn_layers": ["local", "lsh"], "axial_pos_embds": False,
                 "max_position_embeddings": 256, "feed_forward_size": 96, "eos_token_id": 2},
}  # fmt: skip
"""Settings of families that the table does not fit."""


def build(kind: str, folder: Path, **changes: Any) -> Path:
    """Save a random model of a `model_type`, with the tiny model's tokenizer, as a folder."""
    made = CONFIG_MAPPING[kind]
    if kind in WHOLE:
        settings = WHOLE[kind]
    else:
        default = made()
        known = {*default.to_dict(), *getattr(default, "attribute_map", {}), *getattr(made, "__annotations__", {})}
        settings = {k: v for k, v in SETTINGS.items() if k in known and (v is not None or k == "layer_types")}
        settings |= MORE.get(kind, {})
    name = NAMES[kind]
    torch.manual_seed(0)
    model = getattr(transformers, name if isinstance(name, str) else name[0])(made(**{**settings, **changes}))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2 and float(parameter.std()) < 0.15:
                parameter.normal_(0, 0.2, generator=generator)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny() / file, folder)
    return folder
