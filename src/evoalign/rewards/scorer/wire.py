# SPDX-License-Identifier: Apache-2.0
"""What the service and its client have to call by the same name."""

from __future__ import annotations

DIGEST = "X-Scorer-Digest"
"""The header of each answer with the digest of all that its scores depend on."""
