# SPDX-License-Identifier: Apache-2.0
"""Comparison of runs at equal budgets."""
