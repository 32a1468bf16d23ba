# SPDX-License-Identifier: Apache-2.0
"""What may go wrong between this process and a server."""

from __future__ import annotations

from evoalign.errors import EvoalignError, ModelError


class RefusedError(ModelError):
    """The server understood, and says no: an adapter that it does not know, a setting that it lacks."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class LostError(EvoalignError):
    """The server is not there, does not answer in time, or answers what is no answer. Nothing of it is scored."""
