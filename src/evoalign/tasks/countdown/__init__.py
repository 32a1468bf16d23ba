# SPDX-License-Identifier: Apache-2.0
"""Countdown: reach a target with given numbers."""

from evoalign.tasks.countdown.task import Countdown

__all__ = ["Countdown"]
