"""What a user sees while a step compiles: one line that moves, then one line that stays.

    nova: train_step  kernels 14/31                      (moving; only on a terminal)
    nova: train_step  captured and compiled in 6.2 s (capture 1.9 s, 31 kernels)

On a terminal the moving line is drawn by rich; elsewhere nothing is printed unless NOVA_DEBUG is 1 or more.
"""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from nova.config import knobs


class Progress(AbstractContextManager["Progress"]):
    """Call it with (stage, done, total); total 0 means that the stage has no count."""

    def __init__(self, name: str):
        self.name = name
        self.started = time.perf_counter()
        self.seconds: dict[str, float] = {}
        self.counts: dict[str, int] = {}
        self._stage, self._since = "", self.started
        self._status: Any = None
        self._terminal = sys.stderr.isatty()

    def __call__(self, stage: str, done: int = 0, total: int = 0) -> None:
        now = time.perf_counter()
        if stage != self._stage:
            self._close(now)
            self._stage, self._since = stage, now
        if total:
            self.counts[stage] = total
        # A line that flashes by helps nobody, and importing rich takes 0.1 s.
        if self._terminal and now - self.started > 0.3:
            text = f"nova: {self.name}  {stage}" + (f" {done}/{total}" if total else "")
            if self._status is None:
                from rich.console import Console

                self._status = Console(stderr=True).status(text)
                self._status.start()
            self._status.update(text)

    def _close(self, now: float) -> None:
        if self._stage:
            self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + now - self._since

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(time.perf_counter())
        self._stage = ""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def summary(self, text: str) -> None:
        """The line that stays."""
        if self._terminal or knobs.debug >= 1:
            print(f"nova: {self.name}  {text}", file=sys.stderr)

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.started


def notice(text: str) -> None:
    """Something the user should know, said once where it happens."""
    print(f"nova: {text}", file=sys.stderr)
