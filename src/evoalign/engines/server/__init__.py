# SPDX-License-Identifier: Apache-2.0
"""Engines over HTTP servers of SGLang and vLLM."""
