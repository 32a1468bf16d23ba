# SPDX-License-Identifier: Apache-2.0
"""A run that waits in each generation until a file is there: `python -m followed CONFIG FILE`."""

import sys
import time
from pathlib import Path

import evoalign


def wait(_: object) -> None:
    while not Path(sys.argv[2]).exists():  # until the page is open
        time.sleep(0.1)
    time.sleep(1)


if __name__ == "__main__":
    evoalign.train(sys.argv[1], on_generation=wait)
