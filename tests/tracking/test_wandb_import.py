# SPDX-License-Identifier: Apache-2.0
"""wandb is imported only where a tracker asks for it: its import makes temporary folders, which a killed run leaves."""

import importlib.util
import sys

import pytest

from evoalign.tracking import wandb


def test_wandb_is_hidden_from_other_libraries():
    if "wandb" in sys.modules:
        pytest.skip("another test has imported it")
    with wandb.hidden():
        assert importlib.util.find_spec("wandb") is None
        with pytest.raises(ImportError):
            importlib.import_module("wandb")
    assert "wandb" not in sys.modules
