# SPDX-License-Identifier: Apache-2.0
"""vLLM in this process, on the CPU; nothing here is collected where vLLM is not installed."""

import importlib.util
import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# evoalign disables vLLM's torch.compile, but vLLM still compiles a sum of its sampler, for a minute in each process.
# `make test-vllm-long` keeps that.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

spec = importlib.util.find_spec("vllm")
if spec is None or spec.origin is None:  # without one, a folder named vllm would count as the package
    collect_ignore_glob = ["*"]


def pytest_collection_finish():
    """Inspect models in this process: vLLM starts one for each kind of model, which imports it all for ten seconds."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()
