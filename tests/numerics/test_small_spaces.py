# SPDX-License-Identifier: Apache-2.0
"""Spaces of few numbers: what they can reach, and what is saved of them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plain_adapters import adapter
from small_runs import UNCHECKED

import evoalign
from evoalign import spaces
from evoalign.config import from_dict
from evoalign.errors import CheckpointError, ConfigError, ModelError
from evoalign.rundir import checkpoint, journal
from evoalign.spaces.lora import factors_of
from evoalign.spaces.singular import _decomposed, _rows_decomposed
from evoalign.testing.spaces import SPECS
from evoalign.training import weights
from evoalign.types import Update, population

CONSTRAINTS = 8
SMALL = {
    "norms": {"space": "norms", "es": {"sigma": 0.5}},
    "subspace": {"space": {"name": "subspace", "dimension": 30}},
    "singular": {"space": "singular"},
    "steering": {"space": "steering", "es": {"sigma": 0.5, "optimizer": "momentum"}},
}


def run(space, folder, generations=3, optimizer="adam", **more):
    tree = {
        "model": {"name": "tiny"}, "task": {"name": "conciseness"}, "checks": UNCHECKED, "output_dir": str(folder),
        "es": {"sigma": 0.02, "learning_rate": 0.02, "num_generations": 3, "population_size": 4},
        "sampling": {"max_tokens": 4}, "evaluation": {"max_tokens": 4}, "checkpoint": {"every": 1},
    }  # fmt: skip
    own = SMALL[space]
    tree |= own | {"es": tree["es"] | own.get("es", {}) | {"num_generations": generations}}
    tree["es"]["optimizer"] = optimizer
    if optimizer in ("cma", "sep_cma"):
        del tree["es"]["learning_rate"]
    if space == "singular":
        shapes = {f"model.layers.{i}.mlp.up_proj.weight": tiny_shape() for i in range(4)}
        tree["model"] = {"name": str(adapter(folder.with_name("adapter"), shapes)), "base": "tiny"}
    return evoalign.train(tree, **more)


def tiny_shape():
    from evoalign.engines.specs import specs_of_config

    specs = specs_of_config(from_dict({"model": {"name": "tiny"}}))
    return next(s.shape for s in specs if s.name == "model.layers.0.mlp.up_proj.weight")


@pytest.mark.first("subspace-adam", "subspace-cma", "singular-momentum", "norms-sep_cma", "steering-adam")
@pytest.mark.parametrize(("space", "optimizer"), [
    *(("subspace", optimizer) for optimizer in ("adam", "momentum", "cma", "sep_cma")), ("norms", "adam"),
    ("norms", "sep_cma"), ("singular", "momentum"), ("singular", "cma"), ("steering", "adam"), ("steering", "cma"),
])  # fmt: skip
def test_a_run_resumes_to_the_bit_and_is_what_its_journal_says(space, optimizer, tmp_path):
    whole = run(space, tmp_path / "whole", optimizer=optimizer)
    run(space, tmp_path / "cut", generations=2, optimizer=optimizer)
    resumed = run(space, tmp_path / "cut", optimizer=optimizer, resume=True)
    hashes = [checkpoint.mark_of(Path(result.saved)).weights_hash for result in (whole, resumed)]
    assert hashes[0] == hashes[1] == evoalign.replay(tmp_path / "whole")
    log = journal.read(tmp_path / "whole" / "journal.jsonl")
    assert len({g.weights_hash for g in log.generations} | {log.header.weights_hash}) == 4, "each generation moves it"
    assert log.header.sums == ("own" if "cma" in optimizer else "ordered")
    assert ("cmaes" in log.header.versions) == ("cma" in optimizer)


@pytest.mark.parametrize("space", ["subspace", "singular"])
def test_a_saved_adapter_has_the_factors_of_its_mean(space, tmp_path):
    saved = Path(run(space, tmp_path / "run").saved)
    config = evoalign.load_config(tmp_path / "run" / "config.yaml")
    weights.check(saved, checkpoint.mark_of(saved), config)
    factors = checkpoint.load_adapter(saved)
    assert any(bool(tensor.any()) for name, tensor in factors.items() if "lora_B" in name)
    altered = {checkpoint.PEFT_PREFIX + name: tensor + 1 for name, tensor in factors.items()}
    from safetensors.torch import save_file

    save_file(altered, str(saved / checkpoint.ADAPTER))
    with pytest.raises(CheckpointError, match="factors"):
        weights.check(saved, checkpoint.mark_of(saved), config)


def reached(dimension, generations=100):
    """Return the share of a planted score that ES reaches. As in Li et al., sums of B's elements have targets."""
    tree = {"seed": 1, "space": {"name": "subspace", "dimension": dimension}, "es": {"sigma": 0.1}}
    space = spaces.create(from_dict(tree))
    layout = space.layout([replace(SPECS[1], shape=(384, 16))], torch.float32)
    mean = {t.name: space.start(layout, t.name, "cpu") for t in (*layout.tensors, *layout.frozen)}
    signs = torch.sign(torch.randn(10_000, generator=torch.Generator().manual_seed(0)))

    def score(vector):
        found = dict(factors_of(space, layout, (mean | {"subspace": vector}).items()))
        elements = torch.cat([t.flatten() for name, t in found.items() if "lora_B" in name])
        groups = (elements * signs[: len(elements)])[: len(elements) // CONSTRAINTS * CONSTRAINTS]
        sums = groups.view(CONSTRAINTS, -1).sum(1)
        return float(torch.exp(-((sums - 10 * torch.arange(1, CONSTRAINTS + 1)) ** 2).mean() / 1000))

    members = population(20, antithetic=True)
    for generation in range(generations):
        eps = space.noise(layout, "subspace", generation, [m.noise for m in members])
        scores = torch.tensor([score(mean["subspace"] + 0.1 * m.sign * e) for m, e in zip(members, eps, strict=True)])
        coefficients = tuple(((scores - scores.mean()) / (scores.std() + 1e-12)).tolist())
        update = Update(generation, generation, members, coefficients, 0.1, 0.3)
        space.accumulate(layout, mean["subspace"], "subspace", (slice(0, dimension),), update)
    return score(mean["subspace"])


def test_a_planted_intrinsic_dimension_is_found():
    """Eight sums have targets: fewer numbers cannot meet them all, a few more can."""
    few, enough = reached(CONSTRAINTS // 2), reached(3 * CONSTRAINTS)
    assert few < 0.9 < enough, (few, enough)


@pytest.mark.parametrize("rank", [1, 3, 16])
def test_the_decomposition_is_that_of_lapack(rank):
    draw = torch.Generator().manual_seed(rank)
    a, b = torch.randn(rank, 40, generator=draw), torch.randn(50, rank, generator=draw)
    parts = _decomposed(a, b)
    assert torch.allclose(parts["left"] @ parts["middle"] @ parts["right"], b @ a, atol=1e-4)
    for rows in (parts["left"].T, parts["right"]):
        assert torch.allclose(rows @ rows.T, torch.eye(rank), atol=1e-5)
    _, sizes, _ = _rows_decomposed(a.double().numpy())
    assert sizes == pytest.approx(torch.linalg.svdvals(a.double()).numpy(), rel=1e-9)


def test_singular_values_of_both_factors_change(tmp_path):
    """Against LAPACK: B' A' - B A, where the primed factors have other singular values."""
    name = "model.layers.0.mlp.up_proj.weight"
    folder = adapter(tmp_path / "a", {name: (20, 16)})
    tree = {"space": "singular", "model": {"name": str(folder), "base": "tiny"}, "es": {"sigma": 0.1}}
    space = spaces.create(from_dict(tree))
    layout = space.layout(SPECS, torch.float32)
    mean = {t.name: space.start(layout, t.name, "cpu") for t in (*layout.tensors, *layout.frozen)}
    change = {"A": torch.tensor([0.5, -0.2, 0.3]), "B": torch.tensor([-0.4, 0.1, 0.7])}
    mean |= {f"{name.removesuffix('.weight')}.singular_{factor}": z for factor, z in change.items()}
    state, whole = checkpoint.load_adapter(folder), {}
    for factor, z in change.items():
        u, sizes, v = torch.linalg.svd(state[name.replace("weight", f"lora_{factor}.weight")], full_matrices=False)
        whole[factor] = (u * sizes @ v, u * (sizes * (1 + z)) @ v)
    a, b = (found for _, found in factors_of(space, layout, mean.items()))
    assert torch.allclose(b @ a, whole["B"][1] @ whole["A"][1] - whole["B"][0] @ whole["A"][0], atol=1e-4)
    assert space.scaling == 2


def test_elements_of_a_subspace_are_signed_copies():
    space = spaces.create(from_dict({"space": {"name": "subspace", "dimension": 5}, "es": {"sigma": 0.1}}))
    layout = space.layout(SPECS, torch.float32)
    mean = {t.name: space.start(layout, t.name, "cpu") for t in (*layout.tensors, *layout.frozen)}
    mean["subspace"] = torch.arange(1.0, 6.0)
    found = torch.cat([b.flatten() for name, b in factors_of(space, layout, mean.items()) if "lora_B" in name])
    counts = torch.stack([(found == value).sum() for value in (*range(-5, 0), *range(1, 6))])
    assert counts.sum() == len(found) and counts.min() > len(found) / 30


def test_subspace_without_a_matrix_has_nothing_to_evolve():
    space = spaces.create(from_dict({"space": {"name": "subspace", "dimension": 3}, "es": {"sigma": 0.1}}))
    assert not space.layout([s for s in SPECS if s.kind != "linear"], torch.float32).tensors


def test_singular_needs_a_plain_adapter(tmp_path):
    with pytest.raises(ConfigError, match="singular values of an adapter"):
        spaces.create(from_dict({"space": "singular", "es": {"sigma": 0.1}})).layout(SPECS, torch.float32)
    folder = adapter(tmp_path / "a", {"model.layers.0.mlp.up_proj.weight": (20, 16)})
    text = (folder / "adapter_config.json").read_text()
    (folder / "adapter_config.json").write_text(text.replace("{", '{"use_dora": true, ', 1))
    tree = {"space": "singular", "model": {"name": str(folder), "base": "tiny"}, "es": {"sigma": 0.1}}
    with pytest.raises(ModelError, match="plain LoRA"):
        spaces.create(from_dict(tree)).layout(SPECS, torch.float32)
