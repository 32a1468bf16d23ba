# SPDX-License-Identifier: Apache-2.0
"""GRPO with a report page, in its own module so that a run of ES does not import TRL."""

from evoalign.analysis.runs import with_page
from evoalign.baselines.train import grpo as core_grpo

grpo = with_page(core_grpo)
