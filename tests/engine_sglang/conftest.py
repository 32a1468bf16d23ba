# SPDX-License-Identifier: Apache-2.0
"""SGLang on the CPU, as a server of its own; nothing here is collected where SGLang is not installed."""

from __future__ import annotations

import importlib.util
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["*"]
else:
    from collections.abc import Iterator

    import pytest
    from served import KEY, config

    from evoalign import engines, tokens

    @pytest.fixture(scope="session")
    def url() -> Iterator[str]:
        """A server for all tests that move no weights, with room for 30 members of rank 8 and the mean."""
        settings = config()
        engine = engines.create(settings, tokens.load(settings.model))
        try:
            client = engine._there()
            os.environ[KEY] = client._key
            yield client.url
        finally:
            engine.close()
