"""Static addresses in a block's shared memory, and where barriers must stand before an address is used again.

Buffers live from their allocation to the last top-level op that touches them; scratch lives within one op. An area that
threads may still be reading is *busy*: whoever writes there next needs a barrier first, so new areas go where nothing
is busy as long as that costs no memory. At the top of a loop is busy what the iteration before was reading at its end,
which is known once the body has been walked; until then, everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass

ALIGNMENT = 128
SMALL = 4096  # bytes that scratch may always spread over rather than wait for a barrier,
PLENTY = 48 << 10  # as long as a block needs no more than this


@dataclass(frozen=True)
class Area:
    """Bytes [start, end) of the block's shared memory."""

    start: int
    end: int

    def meets(self, other: Area) -> bool:
        return self.start < other.end and other.start < self.end


State = tuple[tuple[Area, ...], bool]  # busy areas, and whether everything is


class Arena:
    """Where everything is. `total`: bytes needed so far."""

    def __init__(self) -> None:
        self.live: list[Area] = []
        self.busy: list[Area] = []
        self.everything_busy = False
        self.total = 0
        self.uses = 0
        self.blind = 0  # uses that had to wait because everything was busy

    def copy(self) -> Arena:
        """One that goes on from here by itself."""
        other = copy(self)
        other.live, other.busy = list(self.live), list(self.busy)
        return other

    def take(self, size: int, alignment: int = ALIGNMENT) -> tuple[Area, bool]:
        """A live area of `size` bytes, and whether a barrier must come before writing to it."""
        self.uses += 1
        self.blind += self.everything_busy
        size = -(-size // ALIGNMENT) * ALIGNMENT
        anywhere = self._first_fit(size, alignment, self.live)
        quiet = self._first_fit(size, alignment, [*self.live, *self.busy])
        above = min(max((a.end for a in self.live), default=0) + SMALL, PLENTY)
        affordable = quiet.end <= max(self.total, anywhere.end, above)
        area = quiet if affordable and not self.everything_busy else anywhere
        self.live.append(area)
        self.total = max(self.total, area.end)
        return area, self.everything_busy or any(area.meets(b) for b in self.busy)

    def release(self, area: Area) -> None:
        """Nobody will touch it after what is being read now."""
        self.live.remove(area)
        self.busy.append(area)

    def synchronised(self) -> None:
        """A barrier was emitted."""
        self.busy.clear()
        self.everything_busy = False

    def state(self) -> State:
        """What is busy."""
        return tuple(self.busy), self.everything_busy

    def restore(self, *states: State) -> None:
        """After paths that met: busy is what any of them left busy."""
        self.busy = list(dict.fromkeys(area for busy, _ in states for area in busy))
        self.everything_busy = any(everything for _, everything in states)

    @contextmanager
    def repeated(self, reading: Iterable[Area] | None = None) -> Iterator[None]:
        """Around the body of a loop, which may also run not at all. `reading`: what is busy when its end is reached."""
        before, uses = self.state(), self.uses
        if reading is None:
            self.everything_busy = True
        else:
            self.busy = list(dict.fromkeys([*self.busy, *reading]))
        yield
        if self.uses == uses:  # what barriers the body holds cannot be counted on: it may not run
            self.restore(before)
        else:
            self.restore(before, self.state())

    def _first_fit(self, size: int, alignment: int, taken: list[Area]) -> Area:
        start = 0
        for other in sorted(taken, key=lambda a: a.start):
            if start + size <= other.start:
                break
            start = max(start, -(-other.end // alignment) * alignment)
        return Area(start, start + size)
