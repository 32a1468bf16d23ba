# SPDX-License-Identifier: Apache-2.0
"""Runs held against each other at equal budgets."""
