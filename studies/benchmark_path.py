# SPDX-License-Identifier: Apache-2.0
"""Importing this module puts benchmarks/ on sys.path, so that studies can use study_runs and vllm_shapes."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
