# SPDX-License-Identifier: Apache-2.0
"""The engine on vLLM: all members of a population in one batch of a serving engine."""
