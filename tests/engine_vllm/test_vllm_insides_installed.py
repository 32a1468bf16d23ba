# SPDX-License-Identifier: Apache-2.0
"""The installed vLLM has what the engine takes of it, looked at without starting one."""

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
from evoalign.engines.vllm.rows import Rows
from evoalign.errors import EngineError


@pytest.mark.releases
def test_the_installed_release_has_all_of_it():
    assert list(unmet(by_import)) == []


@pytest.mark.releases
def test_each_name_is_really_looked_for():
    doctored = [inside._replace(name=f"{inside.name}_gone") for inside in INSIDES]
    assert len(list(unmet(by_import, doctored))) == len(INSIDES)
    called = [inside for inside in INSIDES if inside.parameters]
    other = [inside._replace(parameters=("gone", *inside.parameters)) for inside in called]
    assert len(list(unmet(by_import, other))) == len(called) > 20


@pytest.mark.releases
def test_the_stand_in_for_its_lora_kernels_has_all_their_methods():
    """One that is missing would stop a run where vLLM first asks for it."""
    asked = {name for name, _ in inspect.getmembers(PunicaWrapperBase, inspect.isfunction) if name[0] != "_"}
    assert asked <= set(dir(population.Terms))


def test_a_runner_without_the_method_is_refused_and_left_alone():
    runner = SimpleNamespace(set_active_loras=lambda input_batch, num_scheduled_tokens: None)
    runner.maybe_setup_dummy_loras = runner.maybe_remove_all_loras = lambda: None
    with pytest.raises(EngineError, match=r"has no SimpleNamespace\._set_active_loras"):
        population.replace_step(runner, Rows(4, 2, torch.device("cpu")))


@pytest.mark.long
def test_its_source_says_what_its_import_says():
    """So that a release which can only be read is read rightly."""
    root = Path(vllm.__file__).parents[1]
    script = Path(__file__).parents[2] / "scripts" / "check_vllm_releases.py"
    reader = runpy.run_path(str(script))["Reader"](root)
    assert list(unmet(reader)) == []
    assert len(list(unmet(reader, [inside._replace(name=f"{inside.name}_gone") for inside in INSIDES]))) == len(INSIDES)
