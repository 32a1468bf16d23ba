# SPDX-License-Identifier: Apache-2.0
"""SGLang on the CPU, as a server process; nothing here is collected where SGLang is not installed."""

import importlib.util
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["*"]
else:
    import interpreted  # noqa: F401  before anything that imports Triton
    import pytest
    from served import KEY, config

    from evoalign import engines
    from evoalign.testing.engines import started

    @pytest.fixture(scope="session")
    def launched():
        """An engine that launched a server for 30 members of rank 8 and the mean. A test that moves the mean restores
        it."""
        with started(engines.create, config("lowrank")) as bench:
            yield bench

    @pytest.fixture(scope="session")
    def url(launched):
        """The address of that server, for all tests that move no weights."""
        client = launched.engine.connection.client
        os.environ[KEY] = client.key
        return client.url
