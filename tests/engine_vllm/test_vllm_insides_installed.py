# SPDX-License-Identifier: Apache-2.0
"""The installed vLLM has every name that the engine uses, checked without starting an engine."""

import inspect
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import vllm
from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase

from evoalign.engines.vllm import population
from evoalign.engines.vllm.insides import INSIDES, by_import, unmet
from evoalign.errors import EngineError


@pytest.mark.releases
def test_installed_release_meets_the_list():
    assert list(unmet(by_import)) == []


@pytest.mark.releases
def test_unmet_reports_every_name_that_is_changed():
    doctored = [inside._replace(name=f"{inside.name}_gone") for inside in INSIDES]
    assert len(list(unmet(by_import, doctored))) == len(INSIDES)
    called = [inside for inside in INSIDES if inside.parameters]
    other = [inside._replace(parameters=("gone", *inside.parameters)) for inside in called]
    assert len(list(unmet(by_import, other))) == len(called) > 20


@pytest.mark.releases
def test_terms_has_every_method_of_the_wrapper_it_replaces():
    """A missing one would stop a run when vLLM first calls it."""
    methods = {name for name, _ in inspect.getmembers(PunicaWrapperBase, inspect.isfunction) if name[0] != "_"}
    assert methods <= set(dir(population.Terms))


def test_replace_step_refuses_a_runner_without_the_method():
    runner = SimpleNamespace(set_active_loras=lambda input_batch, num_scheduled_tokens: None)
    runner.maybe_setup_dummy_loras = runner.maybe_remove_all_loras = lambda: None
    with pytest.raises(EngineError, match=r"has no SimpleNamespace\._set_active_loras"):
        population.replace_step(runner, population.Rows(4, 2, torch.device("cpu")))


@pytest.mark.long
def test_reading_the_source_agrees_with_importing():
    """So that a release that cannot be imported is checked correctly."""
    root = Path(vllm.__file__).parents[1]
    script = Path(__file__).parents[2] / "scripts" / "check_vllm_releases.py"
    reader = runpy.run_path(str(script))["Reader"](root)
    assert list(unmet(reader)) == []
    assert len(list(unmet(reader, [inside._replace(name=f"{inside.name}_gone") for inside in INSIDES]))) == len(INSIDES)
