"""Shows how a training run goes: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from typing import Any

REFRESH_S = 0.2  # between two drawings of the bar, which cost the training time
LINE_S = 5.0  # between two lines where there is no terminal


class Lines:
    """Plain lines, for logs and pipes."""

    def __init__(self, name: str, first_step: int, n_steps: int):
        self._name, self._n_steps = name, n_steps
        self._next = 0.0

    def show(self, step: int, text: str) -> None:
        now = time.monotonic()
        if now >= self._next or step + 1 == self._n_steps:
            self._next = now + LINE_S
            print(f"{self._name}: step {step + 1}/{self._n_steps}  {text}", flush=True)

    def close(self) -> None:
        pass


class Bar:
    """A progress bar, drawn by the training loop itself: a thread would take its processor."""

    def __init__(self, name: str, first_step: int, n_steps: int):
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            auto_refresh=False,
        )
        self._task = self._progress.add_task(name, total=n_steps, completed=first_step, text="")
        self._progress.start()
        self._next = 0.0

    def show(self, step: int, text: str) -> None:
        now = time.monotonic()
        self._progress.update(self._task, completed=step + 1, text=text)
        if now >= self._next:
            self._next = now + REFRESH_S
            self._progress.refresh()

    def close(self) -> None:
        self._progress.refresh()
        self._progress.stop()


def open_progress(name: str, first_step: int, n_steps: int) -> Any:
    """The bar if somebody looks at it and rich is there, else lines."""
    if sys.stdout.isatty():
        try:
            return Bar(name, first_step, n_steps)
        except ImportError:
            pass
    return Lines(name, first_step, n_steps)
