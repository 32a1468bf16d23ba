# SPDX-License-Identifier: Apache-2.0
"""vLLM in this process, on the CPU; nothing here is collected where vLLM is not installed."""

import importlib.util
import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")

spec = importlib.util.find_spec("vllm")
if spec is None or spec.origin is None:  # without one, this very folder passes for a package called vllm
    collect_ignore_glob = ["*"]
