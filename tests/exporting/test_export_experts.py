# SPDX-License-Identifier: Apache-2.0
"""Runs of mixtures of experts: replayed and resumed to the same hash, exported as plain transformers and PEFT load."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from families import PROMPTS, Bench, build, make_config, next_logits, requests
from peft import PeftModel
from rich.console import Console
from safetensors import safe_open
from small_runs import UNCHECKED
from transformers import AutoModelForCausalLM

import evoalign
from evoalign.config import load
from evoalign.exporting.export import export
from evoalign.models.tensors import PEFT_TYPES
from evoalign.rundir import checkpoint, journal
from evoalign.rundir.directory import saved_folders
from evoalign.types import MEAN_PLAN, Sampling

Run = tuple[str, str, dict[str, Any]]
TOKENS = 8
CASES = [
    ("qwen3_moe", "lora"),
    ("mixtral", "lowrank"),
    pytest.param(("mixtral", "lora"), marks=pytest.mark.slow),
    pytest.param(("qwen3_moe", "full"), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Family, space and config of a run of two generations."""
    family, space = request.param
    place = tmp_path_factory.mktemp(f"{family}-{space}")
    tree: dict[str, Any] = {
        "output_dir": str(place / "run"), "seed": 1, "space": space,
        "model": {"name": str(build(family, place / "base"))},
        "es": {"sigma": 0.05, "learning_rate": 0.05, "num_generations": 2, "population_size": 6},
        "evaluation": {"max_tokens": TOKENS}, "checkpoint": {"every": 2}, "checks": UNCHECKED,
    }  # fmt: skip
    screen = io.StringIO()
    evoalign.train(tree, console=Console(file=screen, width=200))
    second = screen.getvalue().splitlines()[1]
    assert " % of the weights: " in second and "experts." in second
    return family, space, tree


def said(run: Run) -> tuple[Any, ...]:
    """Greedy completions of the run's own engine with its last mean, with their log-probabilities."""
    path = Path(run[2]["output_dir"])
    with Bench(load([path / "config.yaml"])) as bench:
        state, _ = checkpoint.load(saved_folders(path)[-1], bench.layout)
        bench.engine.load(state)
        cells = bench.ask(MEAN_PLAN, requests(PROMPTS["apart"], Sampling(TOKENS), logprobs=True))
    return tuple(cells[-1, i] for i in range(len(PROMPTS["apart"])))


def check(model: Any, run: Run) -> None:
    """The model gives the log-probabilities of the run's own engine."""
    same(model, said(run))


def same(model: Any, cells: Sequence[Any]) -> None:
    for prompt, got in zip(PROMPTS["apart"], cells, strict=True):
        logits = next_logits(model.eval(), prompt, got.token_ids).log_softmax(-1)
        want = logits.gather(1, torch.tensor(got.token_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(got.logprobs), want, atol=1e-4)


def test_a_run_is_replayed_and_resumed(run: Run) -> None:
    tree = run[2]
    path = Path(tree["output_dir"])
    log = journal.read(path / "journal.jsonl")
    assert log.generations[0].weights_hash != log.header.weights_hash
    assert evoalign.replay(path) == log.generations[-1].weights_hash
    more = {**tree, "es": {**tree["es"], "num_generations": 3}}
    evoalign.train(more, resume=True, console=Console(file=io.StringIO()))
    assert evoalign.replay(path) == journal.read(path / "journal.jsonl").generations[-1].weights_hash


def test_an_export_is_what_plain_libraries_load(run: Run, tmp_path: Path) -> None:
    family, space, tree = run
    export(tree["output_dir"], tmp_path / "out")
    if space == "lora":
        base = AutoModelForCausalLM.from_pretrained(tree["model"]["name"])
        check(PeftModel.from_pretrained(base, str(tmp_path / "out")), run)
        export(tree["output_dir"], tmp_path / "merged", merge=True)
    whole = tmp_path / ("merged" if space == "lora" else "out")
    check(AutoModelForCausalLM.from_pretrained(whole), run)
    assert names(whole) == names(Path(tree["model"]["name"])), "the names of the checkpoint it came from"
    assert any(name.endswith("experts.3.w1.weight" if family == "mixtral" else "experts.3.gate_proj.weight")
               for name in names(whole))  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(PEFT_TYPES | {"qwen2_moe"}))
def test_peft_loads_the_adapter_of_every_mixture_that_it_is_said_to_know(family: str, tmp_path: Path) -> None:
    """With dense layers and shared experts beside the experts; of another mixture, one without experts."""
    base = build(family, tmp_path / "base")
    config = make_config(base, "lora", lora={"rank": 2, "alpha": 6}, es={"population_size": 4})
    with Bench(config) as bench:
        bench.move()
        mark = checkpoint.Mark(1, bench.engine.fingerprint(), "0" * 64)
        checkpoint.save(tmp_path / "out", mark, config, bench.layout, str(base), bench.engine.state)
        cells = bench.ask(MEAN_PLAN, requests(PROMPTS["apart"], Sampling(TOKENS), logprobs=True))
        assert any(".experts." in t.name for t in bench.layout.tensors) == (family in PEFT_TYPES)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(tmp_path / "out"))
    same(model, [cells[-1, i] for i in range(len(PROMPTS["apart"]))])


def names(folder: Path) -> set[str]:
    found: set[str] = set()
    for file in folder.glob("model*.safetensors"):
        with safe_open(file, "pt") as opened:
            found.update(opened.keys())
    return found
