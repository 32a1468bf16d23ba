# SPDX-License-Identifier: Apache-2.0
"""SGLang's servers, each of one of Ray's actors, answer as one does without them, and leave nothing behind."""

from __future__ import annotations

import pytest
from served import config

import replicated
from evoalign.testing.answers import same_up_to_ties


@pytest.mark.long
def test_two_servers_are_one_engine() -> None:
    replicated.check_life(config(), same_up_to_ties, lose=True)
