"""SIGINT and SIGTERM as a request to stop that a loop can check."""

from __future__ import annotations

import signal
import threading
from typing import Any


class Signals:
    """Turns the first SIGINT or SIGTERM into a request to stop; a second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def reason(self) -> str | None:
        return signal.Signals(self.received).name if self.received else None

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: object) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number
