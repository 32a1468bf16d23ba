# SPDX-License-Identifier: Apache-2.0
"""vLLM in Ray actors generates the same as without them, and leaves nothing behind."""

import pytest
import replicated
from served import config

from evoalign.testing.answers import same_up_to_ties


@pytest.mark.parametrize("space, lose", [pytest.param("lora", True, marks=pytest.mark.long), ("lowrank", False)])
def test_two_replicas_are_one_engine(space, lose):
    replicated.check_life(config(space), replicated.equal, lose)


@pytest.mark.long
def test_each_replica_launches_a_server_at_a_separate_port():
    replicated.check_life(config(name="vllm-server"), same_up_to_ties, lose=True)
