# SPDX-License-Identifier: Apache-2.0
"""Checks before a training: `evoalign doctor` and `evoalign probe`."""
