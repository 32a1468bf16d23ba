# SPDX-License-Identifier: Apache-2.0
"""Weight changes of runs and of models of others compared by the command, beside placebos, and cut and asked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import Run
from families import build
from perturbed import MODEL, base, changed, measured
from safetensors.torch import load_file, save_file

import evoalign
from evoalign.analysis import weights
from evoalign.analysis.similarity.measures import total
from evoalign.analysis.targets import locate
from evoalign.config import load
from evoalign.errors import ConfigError
from evoalign.models import tiny
from evoalign.training.replay import replay


def test_runs_and_their_placebos(trained: Path, analyze: Any) -> None:
    names = [str(trained / name) for name in ("lora", "lora2", "full")]
    _, numbers = analyze("similarity", *names, "--set", "placebos=2", "--set", "spectrum=false")
    assert [t["method"] for t in numbers["targets"]] == ["es"] * 3
    (group,) = numbers["groups"]
    assert group["seeds"] == [1, 2] and group["halves"]["why"] == "2 seeds: no interval"
    (pair,) = (p["cosines"]["all"] for p in numbers["pairs"] if [p["a"], p["b"]] == names[:2])
    assert pair["value"] == pytest.approx(group["cosine"]["mean"])
    for seed in range(4):  # as `evoalign replay --counterfactual shuffle` makes them
        replay(names[seed // 2], to=f"p{seed}", counterfactual="shuffle", seed=seed)
    whole = total(measured([Path(f"p{i}") for i in range(4)]), base())
    assert pair["placebos"] == pytest.approx([whole.cosines[0, 2], whole.cosines[1, 3]], abs=1e-9)
    assert pair["p"] in (1 / 3, 2 / 3, 1.0)


def test_what_drew_the_same_noise_is_no_common_direction(trained: Path, analyze: Any) -> None:
    """A run and its own placebo, an earlier mean, and a copy of it."""
    replay(trained / "lora", to="placebo", counterfactual="shuffle", seed=0)
    replay(trained / "lora", to="earlier", generation=1)
    shutil.copytree(trained / "lora", "again")
    targets = (trained / "lora", trained / "lora2", "placebo", "earlier", "again")
    sets = ("--config", trained / "lora/config.yaml", "--set", "spectrum=false")
    out, numbers = analyze("similarity", *targets, *sets)
    same = {(Path(p["a"]).name, Path(p["b"]).name): p["same_noise"] for p in numbers["pairs"]}
    assert same["lora", "placebo"] and same["lora", "earlier"] and same["lora", "again"]
    assert not same["lora", "lora2"] and not same["lora2", "placebo"]
    lines = [line for line in out.splitlines() if "lora and placebo" in line or "lora and again" in line]
    assert len(lines) == 2 and all("both drew the same noise" in line for line in lines)
    assert not any("a common direction" in line for line in lines)
    assert "without placebos signal and random walk" in out


def test_a_run_whose_rewards_are_code_is_compared_by_the_config_that_is_given(tmp_path: Path, run: Run) -> None:
    """Its weights alone are asked: nothing of the code is run, and the advice to give a config is not repeated."""
    (tmp_path / "own.py").write_text("def brief(text, example):\n    return -float(len(text))\n")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"What is {i}?"}) + "\n" for i in range(8)))
    evoalign.train({
        "output_dir": "coded", "seed": 1, "space": "lora", "evaluation": {"max_tokens": 4},
        "task": {"name": "custom", "train_data": "rows.jsonl", "rewards": ["own.py:brief"]},
        "grader": {"isolated": False},
        "es": {"sigma": 0.02, "learning_rate": 0.02, "num_generations": 1, "population_size": 2},
        "checks": {"placebo": 0, "control_every": 0},
    })  # fmt: skip
    assert "task.rewards to 'own.py:brief'" in run("analyze", "similarity", "coded").err
    done = run("analyze", "similarity", "coded", "--config", "coded/config.yaml", "--set", "spectrum=false")
    assert (done.code, done.err) == (0, "") and "norm of the change" in done.out


@pytest.mark.slow
def test_the_gain_kept_is_that_of_the_saved_models(trained: Path, analyze: Any) -> None:
    """The run's own evaluation, and that of its placebo, saved; an adapter of rank 8 loses nothing at rank 8."""
    run = trained / "lora"
    _, numbers = analyze("similarity", run, "--set", "placebos=1", "--set", "ranks=[1, 8]")
    kept = numbers["targets"][0]["gain_kept"]
    (placebo,) = kept["placebos"]
    replay(run, to="shuffled", counterfactual="shuffle", seed=0)
    for own, model in ((kept, run), (placebo, "shuffled")):
        found = evoalign.evaluate(model, config=load(run / "config.yaml"), split="test").measures["reward"]
        assert own["after"] == pytest.approx(found, abs=1e-9) == own["cuts"][1]["reward"]
        assert own["before"] == kept["before"]
    assert placebo["after"] != kept["after"]


def test_an_adapter_and_its_merged_checkpoint_are_one(trained: Path, analyze: Any, capsys: Any) -> None:
    """One stays in its factors, the other is dense."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    adapter = sorted((trained / "lora/loras").glob("generation_*"))[-1]
    whole: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny(), dtype=torch.float32), adapter)
    whole.merge_and_unload().save_pretrained("merged")
    capsys.readouterr()  # of transformers
    _, numbers = analyze("similarity", trained / "lora", "merged", "--set", "base=tiny")
    (pair,) = numbers["pairs"]
    assert pair["cosines"]["all"]["value"] == pytest.approx(1, abs=1e-6)
    common = pair["overlaps"]["all"]["1"]  # the adapter has no four directions
    assert [common[side]["value"] for side in ("left", "right")] == pytest.approx([1, 1], abs=1e-4)
    factors, dense = (t["where"]["all"] for t in numbers["targets"])
    assert dense["norm"] == pytest.approx(factors["norm"], rel=1e-5)
    assert dense["participation_rank"] == pytest.approx(factors["participation_rank"], rel=1e-4)


def test_an_unembedding_of_its_own(tmp_path: Path) -> None:
    model, new = build("llama", tmp_path / "base"), tmp_path / "new"
    state = load_file(shutil.copytree(model, new) / MODEL)
    state["lm_head.weight"] += 0.5
    save_file(state, new / MODEL, metadata={"format": "pt"})
    (own,) = weights.read([locate(str(new), None, str(model))])
    assert (own.unembedding, own.tied) == ("lm_head.weight", False)
    norm = total(measured([new], str(model)), own.parts["unembedding"]).norms[0]
    assert norm == pytest.approx(0.5 * np.sqrt(1024 * 32))


@pytest.mark.parametrize("family", ["qwen3_moe", "opt", "gpt_neox"])
def test_each_tensor_has_one_part(family: str, tmp_path: Path) -> None:
    model = build(family, tmp_path / "base")
    (own,) = weights.read([locate(str(model), None, str(model))])
    kinds = [part for part in own.parts if part != "all" and not part.startswith("layer ")]
    assert sum(len(own.parts[part]) for part in kinds) == len(own.base.specs) == len(own.parts["all"])
    assert all(name in own.parts[own.part_of(name)] for name in own.base.specs)
    assert own.tied == ("unembedding" not in own.parts) == (own.unembedding in own.parts["embeddings"])


def test_one_that_did_not_change(tmp_path: Path, analyze: Any) -> None:
    changed(tmp_path / "a", 1)
    shutil.copytree(tiny(), tmp_path / "still")
    out, numbers = analyze("similarity", "a", "still", "--set", "base=tiny", "--set", "relative=[]")
    assert "unknown, since one of them did not change" in out and "unchanged numbers 100.0%" in out
    assert numbers["pairs"][0]["cosines"]["all"]["value"] is None


def test_changes_from_two_bases_are_not_compared(tmp_path: Path, random_qwen2: Path) -> None:
    here = locate(str(changed(tmp_path / "a", 1)), None, "tiny")
    with pytest.raises(ConfigError, match="different base models, tiny and"):
        weights.read([here, locate(str(random_qwen2), None, str(random_qwen2))])
    assert len(weights.read([here, locate(str(tmp_path / "a"), None, str(tiny()))])) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("a",), "set its base model and task with --config"),
        (("a", "--set", "base=nowhere/at/all"), "no folder nowhere/at/all"),
        (("a", "--set", "base=tiny", "--set", "ranks=[0]"), "ranks.0"),
        ((str(tiny()), "--set", "base=tiny"), "no change"),
    ],
)
def test_an_error_is_one_line(words: tuple[str, ...], said: str, tmp_path: Path, run: Run) -> None:
    changed(tmp_path / "a", 1)
    done = run("analyze", "similarity", *words)
    assert done.code == 2 and done.err.startswith("error: ") and said in done.err


@pytest.mark.slow
def test_a_model_whose_change_is_of_rank_two_keeps_all_at_rank_two(tmp_path: Path, analyze: Any) -> None:
    """Whatever the change does to the reward: a cut to its own rank does the same, and to less something else."""
    changed(tmp_path / "a", 1, rank=2, width=0.02)
    (tmp_path / "c.yaml").write_text("model: {name: tiny}\nevaluation: {max_tokens: 8}\n")
    out, numbers = analyze("similarity", "a", "-c", "c.yaml", "--set", "ranks=[1, 2]")
    kept = numbers["targets"][0]["gain_kept"]
    one, two = (c["reward"] for c in kept["cuts"])
    assert two == pytest.approx(kept["after"], abs=1e-9) and one != pytest.approx(two, abs=1e-3)
    assert kept["before"] != pytest.approx(kept["after"], abs=1e-3)
    assert "rank" in out and kept["placebos"] == []
