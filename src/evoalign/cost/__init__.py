# SPDX-License-Identifier: Apache-2.0
"""Costs of a run: FLOPs by formula, measured budgets, and estimates before it starts."""
