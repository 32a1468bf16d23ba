# SPDX-License-Identifier: Apache-2.0
"""The in-process engine on Hugging Face transformers."""

from evoalign.engines.transformers.engine import TransformersEngine

__all__ = ["TransformersEngine"]
