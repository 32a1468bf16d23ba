# SPDX-License-Identifier: Apache-2.0
"""An HTTP server through which unmodified harnesses reach a population, in the APIs of OpenAI and Anthropic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from evoalign.errors import ConfigError
from evoalign.version import install

if TYPE_CHECKING:
    from evoalign.gateway.chat import Backend
    from evoalign.gateway.server import Server


def open_server(backend: Backend, what: str, *given: Any, **settings: Any) -> Server:
    """Return a server of a backend, for `what`. Raises ConfigError if its extra is not installed."""
    try:
        from evoalign.gateway.server import Server
    except ImportError as error:
        raise ConfigError(f"{what} needs the extra gateway ({error}): {install('gateway')}") from None
    return Server(backend, *given, **settings)
