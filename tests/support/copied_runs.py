# SPDX-License-Identifier: Apache-2.0
"""Copies of one real run with other seeds, settings, costs and rewards: what a comparison is tested on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from chains import digest, relinked

from evoalign.config import load
from evoalign.cost.budget import Cost
from evoalign.rundir.identity import config_hash, identity
from evoalign.rundir.method import method_of

Tree = dict[str, Any]
Copy = Callable[..., Path]
"""Copies a run into a folder of that name, changed as `copy_run` does."""
STEPS = 6
"""Of the run that is copied."""
DATA = Path(__file__).parents[2] / "data" / "tasks" / "conciseness"


def step_cost(step: int, factor: float = 1.0) -> Cost:
    return Cost(
        prompts=2, completions=round(12 * factor), prompt_tokens=round(400 * factor),
        generated_tokens=round(300 * factor), forward_flops=1e9 * factor, backward_flops=0.0,
        wall_seconds=0.5 * factor, device_seconds=0.5 * factor, peak_memory_bytes=2**28,
    )  # fmt: skip


def copy_run(
    source: Path,
    to: Path,
    *,
    seed: int = 0,
    method: str = "es",
    sets: Tree | None = None,
    cost: Callable[[int], Cost | None] = step_cost,
    reward: Callable[[int], float] | None = None,
) -> Path:
    """A run like `source`, changed: `reward` gives the test reward after so many steps, 0 being the start."""
    shutil.copytree(source, to)
    config: Tree = yaml.safe_load((to / "config.yaml").read_text())
    config |= {"seed": seed, "output_dir": str(to)}
    for key, value in (sets or {}).items():
        section, _, leaf = key.partition(".")
        if leaf:
            config[section] = {**(config.get(section) or {}), leaf: value}
        else:
            config[section] = value
    if method == "grpo":
        config["grpo"] = {**config.get("grpo", {}), "max_steps": config["es"]["num_generations"]}
        (to / "journal.jsonl").unlink()
        edit(to / "manifest.json", lambda tree: {**tree, "method": "grpo"})
    (to / "config.yaml").write_text(yaml.safe_dump(config))
    rebind(to)
    rows = [json.loads(line) for line in (to / "metrics.jsonl").read_text().splitlines()]
    for step, row in enumerate(rows, start=1):
        spent = cost(step)
        row["budget"] = None if spent is None else spent.as_dict()
        if row["evaluation"]:
            row["divergence"] = dict.fromkeys(("k1", "k2", "k3"), 0.01 * step) | {"exact": 0.02 * step, "tokens": 100}
            if reward:
                row["evaluation"]["reward"] = reward(step)
    (to / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if (to / "results/evaluation.json").is_file():
        edit(to / "results/evaluation.json", lambda tree: _ended(tree, reward))
    return to


def rebind(run: Path) -> None:
    """Make journal, checkpoints and manifest record the settings in config.yaml, as if the run was made with them."""
    config, journal = load([run / "config.yaml"]), run / "journal.jsonl"
    (run / "SHA256SUMS").unlink(missing_ok=True)
    if journal.is_file():
        header, *lines = map(json.loads, journal.read_bytes().splitlines())
        text = relinked([header | {"config": identity(config), "config_hash": config_hash(config)}, *lines])
        new = {old["hash"]: json.loads(line)["hash"] for old, line in zip(lines, text.splitlines()[1:], strict=True)}
        journal.write_text(text)
        for file in (*run.glob("loras/*/evoalign.json"), *run.glob("checkpoints/*/evoalign.json")):
            record = {k: new.get(v, v) if k == "journal" else v for k, v in json.loads(file.read_text()).items()}
            record["hash"] = digest({k: v for k, v in record.items() if k != "hash"})
            file.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
    made = config_hash(config, method_of(run) or "es")
    edit(run / "manifest.json", lambda tree: {**tree, "config_hash": made})


def _ended(tree: Tree, reward: Callable[[int], float] | None) -> Tree:
    if reward:
        tree["before"]["reward"], tree["after"]["reward"] = reward(0), reward(tree["generation"])
    tree["distance"] = {"l2": 1.5, "relative": 0.01}
    tree["divergence"] = {"k1": 0.1, "k2": 0.1, "k3": 0.1, "exact": 0.2, "tokens": 100}
    return tree


def edit(file: Path, change: Callable[[Tree], Tree]) -> None:
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


def real_run(folder: Path, *, steps: int, every: int) -> Path:
    import evoalign

    evoalign.train(
        {
            "output_dir": str(folder),
            "task": {"name": "conciseness", "train_data": str(DATA / "conciseness_train.json"),
                     "test_data": str(DATA / "conciseness_test.json")},
            "lora": {"rank": 1, "target_layers": [3], "target_modules": ["down_proj"]},
            "es": {"num_generations": steps, "population_size": 4, "sigma": 0.05, "learning_rate": 0.025},
            "engine": {"threads": 1},
            "evaluation": {"max_tokens": 12, "every": every},
            "checks": {"control_every": 0, "canary_every": 0},
        }
    )  # fmt: skip
    return folder
