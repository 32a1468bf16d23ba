# SPDX-License-Identifier: Apache-2.0
"""Small random models by family, built when first used."""

import interpreted  # noqa: F401  before anything that imports Triton
import pytest
from families import build


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    class Built(dict):
        def __missing__(self, family):
            self[family] = build(family, tmp_path_factory.mktemp("models") / family)
            return self[family]

    return Built()


@pytest.fixture(scope="session")
def folder(folders):
    """A model of the family Qwen2."""
    return folders["qwen2"]
