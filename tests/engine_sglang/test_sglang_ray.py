# SPDX-License-Identifier: Apache-2.0
"""SGLang servers of Ray actors generate the same as without Ray, and leave nothing behind."""

import pytest
import replicated
from served import config

from evoalign.testing.answers import same_up_to_ties


@pytest.mark.long
def test_two_servers_match_one_engine():
    replicated.check_life(config(), same_up_to_ties, lose=True)
