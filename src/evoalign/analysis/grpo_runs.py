# SPDX-License-Identifier: Apache-2.0
"""GRPO with a page for its run. Apart from `runs`, since a run of ES does not need what trains by gradients."""

from evoalign.analysis.runs import with_page
from evoalign.baselines.train import grpo as core_grpo

grpo = with_page(core_grpo)
