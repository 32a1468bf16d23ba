# SPDX-License-Identifier: Apache-2.0
"""Runs of training without what takes a fifth of their time and is looked at in few of these tests."""

import interpreted  # noqa: F401  before anything that imports Triton
import pytest

from evoalign.report import figures

DRAWN = ("test_api_train", "test_heading", "test_resume", "test_result", "test_published_model")
"""Tests that look at figures."""


@pytest.fixture(scope="module", autouse=True)
def undrawn(request):
    with pytest.MonkeyPatch.context() as patch:
        for name in ("evolution", "time_breakdown", "named", "divergence"):
            if request.path.stem not in DRAWN:
                patch.setattr(figures, name, lambda *rows, **labels: None)
        yield
