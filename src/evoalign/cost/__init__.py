# SPDX-License-Identifier: Apache-2.0
"""What a run takes: FLOPs by formula, budgets as measured, estimates before it starts."""
