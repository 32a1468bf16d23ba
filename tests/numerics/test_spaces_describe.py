# SPDX-License-Identifier: Apache-2.0
"""What a space says of itself, and that all ask it: one of one's own has its own answers, from one file outside."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_adapters import adapter
from rich.console import Console
from small_runs import UNCHECKED

import evoalign
from evoalign import evolve, spaces
from evoalign.config import SPACES, Config, from_dict
from evoalign.cost import estimate
from evoalign.engines.specs import specs_of_config
from evoalign.errors import ConfigError, ModelError
from evoalign.preflight import doctor, plan, probe
from evoalign.preflight.plan import Case
from evoalign.rundir import journal
from evoalign.rundir.directory import saved_folders
from evoalign.setup import layout_of, start
from evoalign.training import saving, train

MODEL = {"name": "tiny", "dtype": "float32"}
OWN = '''
from pydantic import PositiveFloat
from evoalign.config import Section
from evoalign.spaces.lora import Lora


class Settings(Section):
    first: PositiveFloat = 3.0
    every: int = 2


class Own(Lora):
    """A LoRA that answers otherwise, wherever it is asked."""

    name = "own"
    settings = Settings
    smaller = "evolve fewer numbers"
    has_pairs = False
    default_save_every = property(lambda self: self.options.every)

    def width_factor(self, generation):
        return self.options.first if generation == 1 else 1.0

    def refusal(self, es):
        return "no momentum here" if es.optimizer.name == "momentum" else None

    def effective(self, layout):
        return f"{layout.parameters} numbers of width {self.widths(layout)}"

    def left_out(self, specs, layout):
        return f"{len(specs)} tensors stand aside"

    def mean_bytes(self, layout, dtype):
        return 5 << 20

    def checkpoint_bytes(self, specs, layout, dtype, slots):
        return 7 << 20
'''


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path / 'own.py'}:Own"


def tree(space: Any, output: Path | None = None, **es: Any) -> dict[str, Any]:
    widths = {"sigma": 0.1, "learning_rate": 0.1, "num_generations": 3, "population_size": 4, **es}
    where = {} if output is None else {"output_dir": str(output)}
    return {"space": space, "model": MODEL, "es": widths, "evaluation": {"max_tokens": 4},
            "task": {"train_size": 2, "test_size": 2}, "checks": UNCHECKED, "engine": {"device": "cpu"},
            **where}  # fmt: skip


def whole(space: str, folder: Path) -> dict[str, Any]:
    """Return a config with the settings that a shipped space needs."""
    if space == "subspace":
        return tree({"name": space, "dimension": 20})
    if space == "singular":
        shapes = {
            s.name: s.shape for s in specs_of_config(from_dict(tree("lora"))) if s.name.endswith("up_proj.weight")
        }
        return {**tree(space), "model": {"name": str(adapter(folder, shapes)), "base": "tiny", "dtype": "float32"}}
    return tree(space)


def generations(run: Path) -> Any:
    return journal.read(run / "journal.jsonl").generations


def quietly(config: Mapping[str, Any], **more: Any) -> Any:
    return evoalign.train(config, console=Console(file=io.StringIO(), width=100), **more)


def test_a_space_of_ones_own_trains_and_resumes_as_it_says(own: str, tmp_path: Path) -> None:
    config = tree({"name": own, "first": 5.0}, tmp_path / "run", num_generations=2)
    run = quietly(config)
    sigmas = [g.update.sigma for g in generations(run.path)]
    assert sigmas == pytest.approx([0.1, 0.5])
    assert [f.name for f in saved_folders(run.path)] == ["generation_0002"]
    longer = quietly(tree({"name": own, "first": 5.0}, tmp_path / "run", num_generations=3), resume=True)
    whole = quietly(tree({"name": own, "first": 5.0}, tmp_path / "whole", num_generations=3))
    assert [g.weights_hash for g in generations(longer.path)] == [g.weights_hash for g in generations(whole.path)]
    assert [f.name for f in saved_folders(whole.path)] == ["generation_0002", "generation_0003"]


def test_its_estimates_and_its_limits_are_its_own(own: str, tmp_path: Path) -> None:
    told = "\n".join(train.dry_run(tree({"name": own}, tmp_path / "run")))
    assert "numbers of width 0.1" in told and "tensors stand aside" in told and "master 5.0 MiB" in told
    case = Case(from_dict(tree({"name": own}, tmp_path / "run")))
    plan.check_targets(case)
    assert "checkpoints of 7.0 MiB" in plan.check_disk(case).detail
    with pytest.raises(ConfigError, match="no momentum here"):
        spaces.create(from_dict(tree({"name": own}, optimizer="momentum")))

    class Small:
        dtype = torch.float32

        def specs(self) -> Any:
            return [replace(spec, mean_abs=1.0) for spec in specs_of_config(from_dict(tree({"name": own})))]

        def start(self, *_: Any) -> Any:
            raise MemoryError

    with pytest.raises(ModelError, match="do not fit the memory; evolve fewer numbers"):
        start(from_dict(tree({"name": own})), Small())  # type: ignore[arg-type]


def test_it_is_probed_without_pairs(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    population = probe.population

    def seen(size: int, *, antithetic: bool) -> Any:
        asked.append(antithetic)
        return population(size, antithetic=antithetic)

    monkeypatch.setattr(probe, "population", seen)
    config = tree({"name": own})
    assert probe.probe(config, sigmas=[0.1, 0.2], members=4, examples=1).completions == (2 * 4 + 2)
    probe.probe({**config, "space": "lora"}, sigmas=[0.1, 0.2], members=4, examples=1)
    assert asked == [False, True]


def test_its_settings_are_checked_by_its_own_model(own: str) -> None:
    made = spaces.create(from_dict(tree({"name": own, "first": "4"})))
    assert (made.options.first, made.options.every) == (4.0, 2)
    with pytest.raises(ConfigError, match=r"unknown setting space\.frist; did you mean space\.first\?"):
        spaces.create(from_dict(tree({"name": own, "frist": 4})))
    with pytest.raises(ConfigError, match=r"space\.first: Input should be greater than 0"):
        spaces.create(from_dict(tree({"name": own, "first": -1})))


class Plain(spaces.Lora):
    """A space without a model of its settings."""


def test_settings_without_a_model_are_unchanged() -> None:
    config = from_dict(tree({"name": f"{__name__}:Plain", "anything": [1, 2]}))
    assert Plain(config).options == {"anything": [1, 2]}


SAID: dict[str, dict[str, Any]] = {
    "lora": {"has_pairs": True, "rank": 2, "scaling": 4.0, "has_mean_adapter": True, "default_save_every": 10,
             "evolves_model": False, "smaller": "lower lora.rank or lora.target_layers"},
    "lowrank": {"has_pairs": True, "rank": 3, "scaling": 1.0, "has_mean_adapter": False, "default_save_every": 0,
                "evolves_model": True, "smaller": "lower lowrank.rank or lowrank.target_layers"},
    "full": {"has_pairs": True, "has_mean_adapter": False, "default_save_every": 0, "evolves_model": True,
             "smaller": "use space lora"},
    "norms": {"has_pairs": True, "has_mean_adapter": False, "default_save_every": 0, "evolves_model": True,
              "smaller": "use space lora"},
    "singular": {"has_pairs": False, "rank": 3, "scaling": 2.0, "has_mean_adapter": True, "default_save_every": 10,
                 "evolves_model": False, "smaller": "lower space.share"},
    "subspace": {"has_pairs": True, "rank": 2, "scaling": 4.0, "has_mean_adapter": True, "default_save_every": 10,
                 "evolves_model": False, "smaller": "lower lora.rank or lora.target_layers"},
    "steering": {"has_pairs": True, "rank": 1, "scaling": 1.0, "has_mean_adapter": True, "default_save_every": 10,
                 "evolves_model": False, "smaller": "lower lora.target_layers"},
}  # fmt: skip


@pytest.mark.parametrize("space", SAID)
def test_what_a_shipped_space_says(space: str, tmp_path: Path) -> None:
    config = from_dict({**whole(space, tmp_path), "lora": {"rank": 2, "alpha": 8}, "lowrank": {"rank": 3}})
    made = spaces.create(config)
    assert {name: getattr(made, name) for name in SAID[space]} == SAID[space]
    assert made.evolves_model == config.section.evolves_model, "the config and the class have it from one place"
    assert saving.every(config) == SAID[space]["default_save_every"]
    assert list(SAID) == list(SPACES) == list(spaces.SPACES)


@pytest.mark.parametrize(("space", "dtype", "copies"), [
    ("lora", torch.float32, 1), ("lora", torch.bfloat16, 1), ("lowrank", torch.float32, 0),
    ("lowrank", torch.bfloat16, 1), ("full", torch.float32, 1), ("full", torch.bfloat16, 1),
])  # fmt: skip
def test_bytes_of_the_mean_and_of_a_checkpoint(space: str, dtype: torch.dtype, copies: int) -> None:
    config = from_dict(tree(space))
    made, specs = spaces.create(config), specs_of_config(config)
    layout = layout_of(made, specs, dtype)
    whole = 4 * sum(torch.Size(t.shape).numel() for t in (*layout.tensors, *layout.frozen))
    model = sum(torch.Size(s.shape).numel() for s in specs) * dtype.itemsize
    assert made.mean_bytes(layout, dtype) == copies * whole == estimate.memory(config, specs, layout, dtype).master
    saved = made.checkpoint_bytes(specs, layout, dtype, 2)
    beside = 0 if dtype == torch.float32 else whole
    own = whole if space == "lora" else model + beside
    assert saved == own + 2 * 4 * layout.parameters


def test_ab_has_no_pairs_and_a_first_width() -> None:
    config = from_dict({**tree("lora"), "lora": {"evolve": "ab", "init_scale": 4}})
    made = spaces.create(config)
    assert not made.has_pairs and not config.section.has_pairs
    assert [made.width_factor(g) for g in range(3)] == [4.0, 1.0, 1.0]
    assert [evolve.sigma_at(config, g) for g in range(2)] == [4 * 0.1, 0.1]
    assert from_dict({**tree("full"), "lora": {"evolve": "ab", "init_scale": 4}}).section.has_pairs
    assert evolve.sigma_at(from_dict({**tree("full"), "lora": {"evolve": "ab", "init_scale": 4}}), 0) == 0.1


@pytest.mark.parametrize("space", SPACES)
def test_a_model_is_served_without_a_section_es(space: str, tmp_path: Path) -> None:
    config = Config.model_validate({k: v for k, v in whole(space, tmp_path).items() if k != "es"})
    assert config.es_ is None and not config.decays
    with pytest.raises(ConfigError, match="missing setting es"):
        _ = config.es
    layout = layout_of(spaces.create(config), specs_of_config(config), torch.float32)
    assert {t.scale for t in (*layout.tensors, *layout.frozen)} == {1.0}
    assert estimate.memory(config, specs_of_config(config), layout, torch.float32).start == 0


def test_a_model_is_evaluated_without_a_section_es(tmp_path: Path) -> None:
    sections = {k: v for k, v in tree("lora").items() if k not in ("es", "model")}
    found = evoalign.evaluate("tiny", config=sections)
    given = evoalign.evaluate("tiny", config={**sections, "es": {"sigma": 7.0, "population_size": 2}})
    assert found == given and len(found.completions) == 2
    with pytest.raises(ConfigError, match="missing setting es"):
        quietly({**sections, "output_dir": str(tmp_path / "run")})


def test_the_doctor_without_a_config_makes_up_no_es(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Config] = []
    monkeypatch.setattr(doctor, "CHECKS", (("canary", lambda case: seen.append(case.config)),))
    doctor.doctor(None)
    assert seen[0].es_ is None
