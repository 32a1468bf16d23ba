# SPDX-License-Identifier: Apache-2.0
"""Compare the members of a mixture whose experts evolve on engines vllm and transformers, on a GPU.

    python benchmarks/mixture_members.py --models runs/mixtures

Makes a small Qwen3-MoE with random weights in bfloat16, and packs it to W4A16. 30 members and the mean generate the
first token of each prompt on engines vllm (`population: stock`) and transformers. Written are, over the rows in which
both chose the same token, the median and largest absolute difference of its log-probability; and over all rows of vLLM
the median of the difference between a member's log-probability, of the token that it chose, and the mean's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import vllm_shapes as v

MEMBERS = 30
EXPERTS = ("gate_proj", "up_proj", "down_proj")
SHAPE = {
    "vocab_size": 1024, "hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 256, "num_experts": 16,
    "num_experts_per_tok": 4, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 64, "max_position_embeddings": 512, "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": None,
}  # fmt: skip


def make(folder: Path) -> None:
    """Write `bf16` and `w4a16`: weights so large that members choose different tokens."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from evoalign.models import tiny

    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE))
    for name, p in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(p, std=1.0 if "embed" in name else 1.5 / p.shape[-1] ** 0.5)
    model.bfloat16().save_pretrained(folder / "bf16")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(tiny()) / file, folder / "bf16")
    shutil.copytree(folder / "bf16", folder / "w4a16")
    tensors = load_file(folder / "bf16/model.safetensors")
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        weight = tensors.pop(name).float()
        groups = weight.view(len(weight), -1, v.GROUP)
        scale = (groups.abs().amax(-1) / 7).bfloat16()
        numbers = ((groups / scale.float()[..., None]).round().clamp(-8, 7) + 8).flatten(1).long()
        words = (numbers.view(len(weight), -1, 8) << (torch.arange(8) * 4)).sum(-1)
        packed = torch.where(words >= 2**31, words - 2**32, words).int().contiguous()
        tensors |= {f"{name}_packed": packed, f"{name}_scale": scale, f"{name}_shape": torch.tensor(weight.shape)}
    save_file(tensors, folder / "w4a16/model.safetensors", metadata={"format": "pt"})
    config = folder / "w4a16/config.json"
    tree = json.loads(config.read_text(encoding="utf-8")) | {"quantization_config": v.QUANTISED["w4a16"]}
    config.write_text(json.dumps(tree), encoding="utf-8")


def rollouts(model: Path, engine: str, targets: tuple[str, ...] | None) -> dict[tuple[int, int], Any]:
    """Return each member's rollout of each prompt, by the index of both."""
    from evoalign import engines
    from evoalign.config import from_dict
    from evoalign.testing import engines as contract
    from evoalign.types import MEAN, population

    room = {"max_model_len": 256, "max_num_seqs": 128, "kv_cache_gib": 1, "gpu_memory_utilization": 0.3}
    own = {"population": "stock", **room} if engine == "vllm" else {"device": "cuda"}
    config = from_dict({
        "seed": 5, "space": "lora", "lora": {"rank": 2, "target_modules": targets and list(targets)},
        "model": {"name": str(model), "dtype": "bfloat16"}, "engine": {"name": engine, **own},
        "es": {"sigma": 0.1, "learning_rate": 0.02, "population_size": MEMBERS},
    })  # fmt: skip
    with contract.started(engines.create, config) as bench:
        requests = [replace(request, logprobs=True) for request in bench.requests]
        found = list(bench.engine.rollout(bench.plan((*population(MEMBERS), MEAN)), requests))
        v.say(f"{model.name} {engine}: {len(bench.layout.modules)} matrices; {bench.facts.note}")
        return {(one.member.index, one.request): one for one in found}


def main() -> None:
    from evoalign.types import MEAN

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("runs/mixtures"))
    parser.add_argument("--json", dest="file", default="runs/mixture_members.jsonl")
    options = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if not (options.models / "w4a16").exists():
        make(options.models)
    for form in ("bf16", "w4a16"):
        for targets in (None, EXPERTS):
            theirs, ours = (rollouts(options.models / form, name, targets) for name in ("vllm", "transformers"))
            same = [key for key, one in ours.items() if one.token_ids[0] == theirs[key].token_ids[0]]
            apart = [abs(theirs[key].logprobs[0] - ours[key].logprobs[0]) for key in same]
            moved = [
                abs(one.logprobs[0] - theirs[MEAN.index, request].logprobs[0])
                for (member, request), one in theirs.items()
                if member != MEAN.index
            ]
            v.emit(
                options.file, benchmark="mixture_members", form=form, targets=targets or "all", rows=len(ours),
                same_first_token=len(same), median_apart=median(apart), largest_apart=max(apart),
                median_members_move=median(moved),
            )  # fmt: skip


if __name__ == "__main__":
    main()
