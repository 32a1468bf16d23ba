# SPDX-License-Identifier: Apache-2.0
"""How much a model's text differs from that of its base model."""
