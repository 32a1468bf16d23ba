# SPDX-License-Identifier: Apache-2.0
"""Runs killed at every instant, and runs damaged at random: the claims of the README.

    OMP_NUM_THREADS=1 python benchmarks/endurance.py kill_points  # 120 kills, 0 mismatches
    OMP_NUM_THREADS=1 python benchmarks/endurance.py random_kills --count 200  # any command, any phase, at random
    OMP_NUM_THREADS=1 python benchmarks/endurance.py corruption --count 1000  # 1,000 corruptions

The harness is in tests/support.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
    if len(sys.argv) < 2 or sys.argv[1] not in ("kill_points", "random_kills", "corruption"):
        sys.exit(__doc__)
    importlib.import_module(sys.argv.pop(1)).main()
