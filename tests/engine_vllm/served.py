# SPDX-License-Identifier: Apache-2.0
"""Configs for vLLM in these tests, and its completions."""

from plain_adapters import over

from evoalign.config import from_dict

CMA = {"sigma": 0.05, "optimizer": "cma", "population_size": 4}
SPACES = {
    "lora": {},
    "lora, ab": {"lora": {"rank": 2, "evolve": "ab", "alpha": 32}, "engine": {"population": "generic"}},
    "lowrank": {"lowrank": {"rank": 2}},
    "lowrank, stock": {"lowrank": {"rank": 9}, "engine": {"population": "stock"}},
    "full": {},
    "norms": {},
    "subspace": {"space": {"name": "subspace", "dimension": 300}},
    "singular": {},
    "subspace, cma": {"space": {"name": "subspace", "dimension": 8}, "es": CMA},
    "subspace, sep_cma": {"space": {"name": "subspace", "dimension": 300}, "es": {**CMA, "optimizer": "sep_cma"}},
}

LENGTHS = {
    "vllm": {"max_num_seqs": 96, "max_model_len": 256},
    "vllm-server": {"max_running": 64, "context_length": 256, "timeout": 60.0},
}


def config(variant="lora", name="vllm", **more):
    sections = {**SPACES.get(variant, {}), **more}
    own = {"kv_cache_gib": 0.125, **LENGTHS.get(name, {}), **sections.pop("engine", {})}
    model = str(over("tiny")) if variant == "singular" else "tiny"
    tree = {
        "seed": 5, "space": variant.partition(",")[0], "model": {"name": model, "dtype": "float32"},
        "engine": {"name": name, **(own if name in LENGTHS else {"device": "cpu"})},
        "es": {"sigma": 0.05, "learning_rate": 0.02, "population_size": 30}, **sections,
    }  # fmt: skip
    return from_dict(tree)


def answers(engine, plan, requests):
    return {(r.member.index, r.request): r for r in engine.rollout(plan, requests)}
