# SPDX-License-Identifier: Apache-2.0
"""How much noise survives rounding, compared with the weights that an engine serves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import Bench, make_config

from evoalign.cost import rounding
from evoalign.preflight import work
from evoalign.preflight.plan import Case
from evoalign.tokens import load
from evoalign.training.train import dry_run
from evoalign.types import Plan

SIGMAS = (1e-2, 1e-4)


def tree(sigma: float, space: str = "full", dtype: str = "bfloat16", **es: Any) -> Any:
    return make_config("tiny", space, model={"dtype": dtype}, es={"sigma": sigma, "learning_rate": sigma / 2, **es})


def served(bench: Bench, sigma: float) -> tuple[float, float]:
    """Return the share of weights that member 0 moves, and the correlation with its noise."""
    parameters = dict(bench.model.named_parameters())
    mean = {t.name: parameters[t.name].double().flatten() for t in bench.layout.tensors}
    engine: Any = bench.engine
    engine._serve(Plan(0, sigma, bench.members), bench.members[0])
    moved = torch.cat([parameters[n].double().flatten() - w for n, w in mean.items()])
    engine._serve(Plan(0, sigma, bench.members), None)
    noise = torch.cat([bench.space.noise(bench.layout, n, 0, [0])[0].double().flatten() for n in mean])  # type: ignore[index]
    return float((moved != 0).double().mean()), float(torch.corrcoef(torch.stack([moved, noise]))[0, 1])


@pytest.mark.first("files", others="slow")
@pytest.mark.parametrize("where", ["engine", "files"])
def test_survival_agrees_with_served_members(where: str) -> None:
    with Bench(tree(SIGMAS[0])) as bench:
        for sigma in SIGMAS:
            source = bench.engine if where == "engine" else bench.config.model
            weights = getattr(rounding, f"weights_of_{where}")(source, bench.layout)
            told = rounding.survival(bench.space, bench.layout, sigma, torch.bfloat16, weights)
            moved, correlation = served(bench, sigma)
            assert told is not None
            assert told.moved == pytest.approx(moved, abs=0.03)
            assert told.correlation == pytest.approx(correlation, abs=0.02)
        assert told.least[1] < told.correlation < 0.9 and moved < 0.7, "the last sigma is hardly there"


def rounded_lines(config: Any) -> list[str]:
    return [line for line in dry_run(config) if "rounding" in line]


def test_dry_run_warns_of_little_noise(tmp_path: Any) -> None:
    wide, narrow = (rounded_lines(tree(sigma)) for sigma in (SIGMAS[0], SIGMAS[-1]))
    assert len(wide) == 1 and wide[0].startswith("rounding to bfloat16: the noise moves ")
    assert len(narrow) == 1 and narrow[0].startswith("warning: rounding to bfloat16")
    assert narrow[0].endswith("; raise es.sigma, or use model.dtype float32 or space lora")
    es = {"noise_multiplier": 1e-3, "learning_rate": 0.5}
    (scaled,) = rounded_lines(make_config("tiny", "full", model={"dtype": "float16"}, es=es))
    assert scaled == "rounding to float16: how much noise survives is known once the weights are loaded"
    for space, dtype in (("lora", "bfloat16"), ("lowrank", "bfloat16"), ("full", "float32")):
        assert rounded_lines(tree(SIGMAS[-1], space, dtype)) == []


def test_doctor_warns_of_rounding() -> None:
    found = []
    for sigma in (SIGMAS[0], SIGMAS[-1]):
        case = Case(tree(sigma))
        case.tokens = load(case.config.model)
        case.planned = object()  # type: ignore[assignment]
        found.append(work.check_engine(case))
        case.close()
    assert [f.status for f in found] == ["ok", "warning"]
    assert "rounding to bfloat16" in found[0].detail and "rounding to bfloat16" in found[1].detail
    assert found[1].fix == "raise es.sigma, or use model.dtype float32 or space lora"


def test_missing_or_broken_files_have_no_samples(tmp_path: Any) -> None:
    away = make_config("nobody/has_this", "full", model={"dtype": "bfloat16"})
    with Bench(tree(SIGMAS[0])) as bench:
        assert list(rounding.weights_of_files(away.model, bench.layout)) == []
        (tmp_path / "model.safetensors").write_bytes(b"not a tensor")
        broken = make_config(tmp_path, "full", model={"dtype": "bfloat16"})
        assert list(rounding.weights_of_files(broken.model, bench.layout)) == []


@pytest.mark.parametrize("shape", [(7,), (40, 30), (3, 20, 30), (1,)])
@pytest.mark.parametrize("count", [1, 5, 64, 10**6])
def test_block_is_inside_the_tensor(shape: tuple[int, ...], count: int) -> None:
    block = rounding._block(shape, count)
    taken = torch.zeros(shape)[block].numel()
    assert 1 <= taken <= min(count, torch.zeros(shape).numel())
