"""What one process can say about itself: its memory, and whether it was asked to stop."""

import signal
from collections.abc import Iterable


def proportional_bytes() -> int:
    """Proportional set size: the process's own memory and its share of what others also map."""
    with open("/proc/self/smaps_rollup") as rollup:
        for line in rollup:
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    raise OSError("/proc/self/smaps_rollup has no line Pss")


class StopRequest:
    """Becomes true when a signal asks the process to end, so that it can end between two steps."""

    def __init__(self, signals: Iterable[signal.Signals] = (signal.SIGINT, signal.SIGTERM)):
        self.received = False
        for number in signals:
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: object) -> None:
        self.received = True

    def __bool__(self) -> bool:
        return self.received
