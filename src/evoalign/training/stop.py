# SPDX-License-Identifier: Apache-2.0
"""The first SIGINT or SIGTERM asks for an orderly stop; a second SIGINT stops at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

TELL = b"\nstopping after this generation; once more to stop at once\n"
NOW = b"\nstopped at once; --resume continues after the last whole generation\n"


class Stop:
    """While entered, `asked` becomes the number of the signal that came. Only the main thread can hear signals."""

    def __init__(self) -> None:
        self.asked: int | None = None
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
        if self.asked is not None and number == signal.SIGINT:
            os.write(2, NOW)
            raise KeyboardInterrupt
        self.asked = number
        os.write(2, TELL)  # a console may be in the middle of a line of its own
