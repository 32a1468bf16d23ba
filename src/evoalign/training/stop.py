# SPDX-License-Identifier: Apache-2.0
"""Signals: the first SIGINT or SIGTERM requests an orderly stop, a second one stops at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

TELL = b"\nstopping after this generation; once more to stop at once\n"
NOW = b"\nstopped at once; --resume continues after the last whole generation\n"
SAME_SECONDS = 0.02
"""A second SIGTERM within this time is ignored: `timeout` sends it to the process and to its group."""


class Stop:
    """Context manager in which a signal sets `asked` to its number. A second signal raises KeyboardInterrupt, or
    SystemExit for SIGTERM. Signals arrive in the main thread only."""

    def __init__(self) -> None:
        self.asked: int | None = None
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None:
            if number == signal.SIGTERM and time.monotonic() - self._since < SAME_SECONDS:
                return
            os.write(2, NOW)
            if number == signal.SIGTERM:
                raise SystemExit(128 + number)
            raise KeyboardInterrupt
        self.asked, self._since = number, time.monotonic()
        os.write(2, TELL)  # a console may be in the middle of a line of its own
