# SPDX-License-Identifier: Apache-2.0
"""The journals under engines/: each space on each engine that carries it, made once, and never made again.

    python tests/golden/make_journals.py FOLDER ENGINE        # in an environment that has the engine

They replay on the engine `transformers`, whatever made them: what an engine adds to the weights is in its coefficients.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

import evoalign

REPLICA = {"name": "transformers", "device": "cpu", "threads": 1}
ENGINES: dict[str, dict[str, Any]] = {
    "transformers": {"name": "transformers", "device": "cpu", "threads": 1, "decoder": "library"},
    "static": {"name": "transformers", "device": "cpu", "threads": 1, "decoder": "static"},
    "ray": {"name": "ray", "replicas": 2, "chunk": 2, "replica": REPLICA},
    "vllm": {"name": "vllm", "kv_cache_gib": 0.125, "max_num_seqs": 96, "max_model_len": 256},
    "vllm-server": {"name": "vllm-server", "kv_cache_gib": 0.125, "max_running": 64, "context_length": 256},
    "sglang": {"name": "sglang", "context_length": 512, "max_total_tokens": 32_768},
}
SPACES: dict[str, dict[str, Any]] = {
    "lora": {"space": "lora", "lora": {"rank": 8, "target_layers": [3], "target_modules": ["down_proj"]}},
    "lora_ab": {
        "space": "lora",
        "lora": {"rank": 8, "target_layers": [3], "target_modules": ["q_proj"], "evolve": "ab"},
    },
    "lowrank": {"space": "lowrank", "lowrank": {"rank": 8}},
    "full": {"space": "full"},
}
CARRIED = {"vllm-server": ("lora", "lora_ab"), "sglang": ("lora", "lowrank")}
"""The spaces of engines that do not carry all."""


def make(engine: str, space: str, to: Path) -> None:
    """Train for 3 generations and keep the journal."""
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "seed": 11, "output_dir": f"{folder}/run", "model": {"name": "tiny", "dtype": "float32"},
            "task": {"name": "conciseness", "test_size": 2}, "engine": ENGINES[engine],
            "es": {"sigma": 0.05, "learning_rate": 0.02, "num_generations": 3, "population_size": 4,
                   "antithetic": space != "lora_ab", "decay": 0.01},
            "evaluation": {"max_tokens": 16}, "checks": {"placebo": 0, "perplexity": False}, "report": False,
            **SPACES[space],
        }  # fmt: skip
        evoalign.train(config, console=Console(file=io.StringIO()))
        shutil.copy(f"{folder}/run/journal.jsonl", to / f"{engine}-{space}.jsonl")


if __name__ == "__main__":
    for name in CARRIED.get(sys.argv[2], tuple(SPACES)):
        make(sys.argv[2], name, Path(sys.argv[1]))
