# SPDX-License-Identifier: Apache-2.0
"""vLLM's worker on a CPU."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from evoalign.engines.vllm.worker import EvolvingWorker


class CpuWorker(EvolvingWorker, CPUWorker):
    """See `EvolvingWorker`."""
