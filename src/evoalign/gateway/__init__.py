# SPDX-License-Identifier: Apache-2.0
"""An HTTP server through which unmodified harnesses reach a population, in the APIs of OpenAI and Anthropic."""
