# SPDX-License-Identifier: Apache-2.0
"""GRPO on the same tasks and in the same run directories as ES. Only `trainer` imports TRL."""
