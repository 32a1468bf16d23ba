# SPDX-License-Identifier: Apache-2.0
"""Reward against KL from the base model, over the means that runs saved on their way."""
