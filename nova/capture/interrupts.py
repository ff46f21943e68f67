"""Ctrl-C while a step is recorded: raised in the user's code, never between two of the changes made around it.

with Interrupts() as interrupts:      PyTorch is patched, modes are entered
    with interrupts.allowed():        the step runs: KeyboardInterrupt comes at once
        step(...)
                                      everything is put back; an interrupt that came meanwhile is raised now
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Interrupts:
    def __init__(self) -> None:
        self._allowed = False
        self._pending: Any = None
        self._previous: Any = None

    def __enter__(self) -> Interrupts:
        previous = signal.getsignal(signal.SIGINT)
        if callable(previous) and threading.current_thread() is threading.main_thread():
            self._previous = previous
            signal.signal(signal.SIGINT, self._interrupted)
        return self

    def __exit__(self, *error: object) -> None:
        if self._previous is not None:
            if signal.getsignal(signal.SIGINT) == self._interrupted:  # else the step has set one of its own
                signal.signal(signal.SIGINT, self._previous)
            if self._pending is not None:
                self._previous(*self._pending)

    def _interrupted(self, number: int, frame: Any) -> None:
        if self._allowed:
            self._previous(number, frame)
        else:
            self._pending = number, frame

    @contextmanager
    def allowed(self) -> Iterator[None]:
        self._allowed = True
        try:
            if self._pending is not None:
                found, self._pending = self._pending, None
                self._previous(*found)
            yield
        finally:
            self._allowed = False
