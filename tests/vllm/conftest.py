# SPDX-License-Identifier: Apache-2.0
"""vLLM in this process, on the CPU; nothing here runs where vLLM is not installed."""

import os

import pytest

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest.importorskip("vllm")
