"""Who touched global memory in a launch: blocks run in any order, so what one writes no other may read or write.

Within a block a barrier orders its threads; between blocks nothing does but the end of the launch. For every few bytes
there is a stamp of the last write and one of the last read: block << 32 | barrier interval << 16 | thread, blocks from
1 on. Atomic operations are not looked at, nor are error records, which any thread may write. That one thread of a block
overwrites what others have read is not an error: all of them read a scalar of which only the first needs the value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from nova.gpu.simulate_memory import Access
    from nova.gpu.simulate_values import Array

_BLOCK, _INTERVAL = 32, 16
_SEVERAL_BLOCKS = ((1 << 31) - 1) << _BLOCK


class GlobalOrder:
    """The stamps of one launch. `granule`: bytes that share a stamp, the smallest access of the kernel."""

    def __init__(self, granule: int):
        self.granule = granule
        self.writers: dict[int, Array] = {}  # by the memory's identity
        self.readers: dict[int, Array] = {}
        self.block = 0
        self.interval = 0

    def start_block(self) -> None:
        self.block += 1
        self.interval = 0

    def barrier(self) -> None:
        self.interval += 1

    @property
    def _now(self) -> int:
        return self.block << _BLOCK | (self.interval & 0xFFFF) << _INTERVAL

    def _granules(self, offsets: Array, size: int) -> Array:
        return (offsets // self.granule)[:, None] + np.arange(-(-size // self.granule))

    def _conflicts(self, stamps: Array, mine: Array) -> Array:
        """Stamps of other blocks, or of other threads since the last barrier."""
        foreign = stamps >> _BLOCK != self.block
        unordered = (stamps >> _INTERVAL == self._now >> _INTERVAL) & (stamps != mine)
        return (stamps != 0) & (foreign | unordered)

    def note_read(self, access: Access, data: Array, offsets: Array, threads: Array) -> None:
        granules, mine = self._granules(offsets, access.size), self._now | threads[:, None]
        writers = self.writers.get(id(data))
        if writers is not None:
            self._refuse(access, writers[granules], mine, "reads what {other} has written{since}", granules)
        readers = self.readers.setdefault(id(data), np.zeros(len(data) // self.granule + 1, np.int64))
        old = readers[granules]
        readers[granules] = np.where((old == 0) | (old >> _BLOCK == self.block), mine, _SEVERAL_BLOCKS)

    def note_write(self, access: Access, data: Array, offsets: Array, threads: Array) -> None:
        granules, mine = self._granules(offsets, access.size), self._now | threads[:, None]
        writers = self.writers.setdefault(id(data), np.zeros(len(data) // self.granule + 1, np.int64))
        self._refuse(access, writers[granules], mine, "writes what {other} has written{since}", granules)
        readers = self.readers.get(id(data))
        if readers is not None:
            stamps = readers[granules]
            foreign = (stamps != 0) & (stamps >> _BLOCK != self.block)
            if foreign.any():
                self._fail(access, granules, foreign, stamps, "writes what {other} has read{since}")
        mine = np.broadcast_to(mine, granules.shape)
        writers[granules] = mine
        clash = writers[granules] != mine
        if clash.any():
            self._fail(access, granules, clash, writers[granules], "writes what {other} has written{since}")

    def _refuse(self, access: Access, stamps: Array, mine: Array, what: str, granules: Array) -> None:
        bad = self._conflicts(stamps, mine)
        if bad.any():
            self._fail(access, granules, bad, stamps, what)

    def _fail(self, access: Access, granules: Array, bad: Array, stamps: Array, what: str) -> None:
        lane, column = np.argwhere(bad)[0]
        stamp = int(stamps[lane, column])
        if stamp >> _BLOCK == self.block:
            other, since = f"thread {stamp & 0xFFFF}", " since the last barrier"
        else:
            other, since = "another block", " in the same launch"
        where = f" (a race), at byte {int(granules[lane, column]) * self.granule} of its buffer in global memory"
        raise access.fail(int(lane), what.format(other=other, since=since) + where)
