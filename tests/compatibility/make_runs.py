# SPDX-License-Identifier: Apache-2.0
"""The run directories under half_done/: made once by release 0.1.0, half done, and never made again.

    python tests/compatibility/make_runs.py FOLDER

Paths in them are relative; where and on what they were made is taken out of their manifests.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

import evoalign
from evoalign.errors import StoppedError

GENERATIONS, HALF = 4, 2
ES: dict[str, dict[str, Any]] = {
    "lora_adam": {"space": "lora", "es": {"optimizer": "adam"}, "lora": {"rank": 1, "target_layers": [3]}},
    "full_bfloat16": {
        "space": "full", "model": {"name": "tiny", "dtype": "bfloat16"},
        "full": {"exclude": [r"embed", r"layers\.[012]\.", r"lm_head", r"mlp"]},
    },
    "lowrank": {"space": "lowrank", "lowrank": {"rank": 2}, "es": {"antithetic": True}},
}  # fmt: skip
BASE: dict[str, Any] = {
    "seed": 5, "deterministic": True, "task": {"name": "conciseness"}, "engine": {"threads": 1},
    "evaluation": {"max_tokens": 16, "every": 2}, "checkpoint": {"every": 2, "keep_last": 1, "keep_best": False},
    "checks": {"canary_every": 0, "control_every": 2},
}  # fmt: skip
SETTINGS = {"sigma": 0.05, "learning_rate": 0.02, "num_generations": GENERATIONS, "population_size": 4, "decay": 0.01}
GRPO = {
    "tune": "lora", "max_steps": HALF, "num_generations": 4, "per_device_train_batch_size": 8, "learning_rate": 3e-4,
    "lr_scheduler_type": "constant", "rollouts": "engine",
}  # fmt: skip


def make(name: str) -> None:
    """One run, in the folder of its name."""
    silent = Console(file=io.StringIO())
    if name == "grpo_lora":
        lora = {"rank": 1, "target_modules": ["q_proj"], "target_layers": [3]}
        evoalign.grpo({**BASE, "grpo": GRPO, "lora": lora, "output_dir": name}, console=silent)
        return
    own = ES[name]
    with contextlib.suppress(StoppedError):
        es = SETTINGS | own.get("es", {})
        evoalign.train({**BASE, **own, "es": es, "output_dir": name}, on_generation=_stop, console=silent)


def scrub(run: Path) -> None:
    """Take out of the manifest what tells of the machine."""
    manifest = json.loads((run / "manifest.json").read_text())
    manifest |= {"command": ["evoalign"], "hardware": {}, "git": None}
    (run / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")


def _stop(generation: Any) -> None:
    if generation.index + 1 == HALF:
        signal.raise_signal(signal.SIGINT)


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    os.chdir(folder)
    for name in (*ES, "grpo_lora"):
        make(name)
        scrub(Path(name))


if __name__ == "__main__":
    main()
