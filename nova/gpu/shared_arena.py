"""Static addresses in a block's shared memory, and where barriers must stand before an address is used again.

Buffers live from their allocation to the last top-level op that touches them; scratch lives within one op. An area that
threads may still be reading is *busy*: whoever writes there next needs a barrier first, so new areas go where nothing
is busy as long as that costs no memory. At the top of a loop is busy what the iteration before was reading at its end,
which is known once the body has been walked; until then, everything.

An area may be cut into equal pieces of which each group of warps uses its own. A barrier of each group by itself then
leaves the area *settled*: whoever cuts it in the same way may write there, anybody else needs a barrier of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace

ALIGNMENT = 128
SMALL = 4096  # bytes that scratch may always spread over rather than wait for a barrier,
PLENTY = 48 << 10  # as long as a block needs no more than this


@dataclass(frozen=True)
class Cut:
    """How an area is divided: each `warps` neighbouring warps have a piece of their own, all pieces `size` bytes."""

    warps: int
    size: int


@dataclass(frozen=True)
class Area:
    """Bytes [start, end) of the block's shared memory."""

    start: int
    end: int
    cut: Cut | None = None

    def meets(self, other: Area) -> bool:
        return self.start < other.end and other.start < self.end


@dataclass(frozen=True)
class State:
    """Which areas are busy, or whether everything is, and which are settled."""

    busy: tuple[Area, ...] = ()
    everything: bool = False
    settled: tuple[Area, ...] = ()

    def within(self, other: State) -> bool:
        """Whether code that is right after `other` is right after this."""
        if self.everything:
            return other.everything
        return other.everything or (
            set(self.busy) <= set(other.busy) and set(self.settled) <= {*other.settled, *other.busy}
        )


class Arena:
    """Where everything is. `total`: bytes needed so far."""

    def __init__(self) -> None:
        self.live: list[Area] = []
        self.busy: list[Area] = []
        self.settled: list[Area] = []
        self.everything_busy = False
        self.total = 0
        self.uses = 0
        self.blind = 0  # uses that had to wait because everything was busy

    def copy(self) -> Arena:
        """One that goes on from here by itself."""
        other = copy(self)
        other.live, other.busy, other.settled = list(self.live), list(self.busy), list(self.settled)
        return other

    def take(self, size: int, alignment: int = ALIGNMENT, cut: Cut | None = None) -> tuple[Area, bool]:
        """A live area of `size` bytes, and whether a barrier must come before writing to it."""
        self.uses += 1
        self.blind += self.everything_busy
        size = -(-size // ALIGNMENT) * ALIGNMENT
        area = self._settled(size, cut) or self._place(size, alignment, cut)
        others = [a for a in (*self.busy, *self.settled) if a != area]
        wait = self.everything_busy or area in self.busy or any(area.meets(b) for b in others)
        self.settled = [a for a in self.settled if a != area]
        self.live.append(area)
        self.total = max(self.total, area.end)
        return area, wait

    def _settled(self, size: int, cut: Cut | None) -> Area | None:
        """An area that was cut like this and may be written again."""
        if cut is None or self.everything_busy:
            return None
        return next((a for a in self.settled if a.cut == cut and a.end - a.start == size), None)

    def _place(self, size: int, alignment: int, cut: Cut | None) -> Area:
        anywhere = self._first_fit(size, alignment, self.live)
        quiet = self._first_fit(size, alignment, [*self.live, *self.busy, *self.settled])
        above = min(max((a.end for a in self.live), default=0) + SMALL, PLENTY)
        affordable = quiet.end <= max(self.total, anywhere.end, above)
        return replace(quiet if affordable and not self.everything_busy else anywhere, cut=cut)

    def release(self, area: Area) -> None:
        """Nobody will touch it after what is being read now."""
        self.live.remove(area)
        self.busy.append(area)

    def synchronised(self, warps: int = 0) -> None:
        """A barrier was emitted: of all threads, or of each group of so many warps by itself."""
        if not warps:
            self.busy.clear()
            self.settled.clear()
            self.everything_busy = False
            return
        own = [area for area in self.busy if area.cut is not None and area.cut.warps == warps]
        self.busy = [area for area in self.busy if area not in own]
        self.settled = list(dict.fromkeys([*self.settled, *own]))

    def state(self) -> State:
        """What is busy, and what is settled."""
        return State(tuple(self.busy), self.everything_busy, tuple(self.settled))

    def restore(self, *states: State) -> None:
        """After paths that met: busy is what any of them left busy."""
        self.busy = list(dict.fromkeys(area for state in states for area in state.busy))
        self.settled = list(dict.fromkeys(a for state in states for a in state.settled if a not in self.busy))
        self.everything_busy = any(state.everything for state in states)

    @contextmanager
    def repeated(self, reading: State | None = None) -> Iterator[None]:
        """Around the body of a loop, which may also run not at all. `reading`: how things are at its end."""
        before, uses = self.state(), self.uses
        if reading is None:
            self.everything_busy = True
        else:
            self.restore(before, reading)
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
