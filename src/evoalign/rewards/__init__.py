# SPDX-License-Identifier: Apache-2.0
"""Reward functions: how the user's own are called, and arithmetic that is graded safely."""
