# SPDX-License-Identifier: Apache-2.0
"""Checks of a run: canary, A/A control, divergence, distance, diagnosis and signs of hacking."""
