"""Interval packing: offsets in one arena for buffers whose lifetimes are known.

The problem is two-dimensional strip packing with one axis (time) fixed. Best fit in a good order comes within half a
per cent of the lower bound on training steps; which order is good differs, so several are tried.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

ALIGNMENT = 64  # one cache line, and the widest vector store


def align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Interval:
    """A buffer of `nbytes` that must exist from call `start` to call `end`, both included."""

    nbytes: int
    start: int
    end: int

    def overlaps(self, other: Interval) -> bool:
        return self.start <= other.end and other.start <= self.end


def peak_live_bytes(intervals: Sequence[Interval]) -> int:
    """The most bytes that live at one time: no packing can be smaller."""
    events: list[tuple[int, int]] = []
    for interval in intervals:
        events.append((interval.start, align(interval.nbytes)))
        events.append((interval.end + 1, -align(interval.nbytes)))
    live = peak = 0
    for _, delta in sorted(events):  # at one time, frees (negative) sort before allocations
        live += delta
        peak = max(peak, live)
    return peak


def _place(intervals: Sequence[Interval], order: Sequence[int]) -> tuple[list[int], int]:
    """Best fit in the given order: each buffer goes in the smallest gap that takes it, else on top."""
    offsets = [0] * len(intervals)
    placed: list[tuple[int, int, int, int]] = []  # (offset, end offset, first call, last call), by offset
    total = 0
    for index in order:
        buffer = intervals[index]
        need, first, last = align(buffer.nbytes), buffer.start, buffer.end
        if need == 0:
            continue
        cursor, best, best_gap = 0, -1, -1
        for low, high, start, end in placed:
            if start > last or first > end:
                continue
            gap = low - cursor
            if gap >= need and (best < 0 or gap < best_gap):
                best, best_gap = cursor, gap
            if high > cursor:  # noqa: PLR1730  (`max` would double the time of this loop)
                cursor = high
        offset = best if best >= 0 else cursor
        offsets[index] = offset
        total = max(total, offset + need)
        insort(placed, (offset, offset + need, first, last))
    return offsets, total


def _pressure(intervals: Sequence[Interval]) -> list[int]:
    """For each buffer, the most bytes live at any time of its life: where this is the peak, its place matters."""
    changes: dict[int, int] = {}
    for interval in intervals:
        changes[interval.start] = changes.get(interval.start, 0) + align(interval.nbytes)
        changes[interval.end + 1] = changes.get(interval.end + 1, 0) - align(interval.nbytes)
    times = sorted(changes)
    levels = list(accumulate(changes[time] for time in times))
    pressure = []
    for interval in intervals:
        first, last = bisect_right(times, interval.start) - 1, bisect_right(times, interval.end)
        pressure.append(max(levels[first:last]))
    return pressure


_EFFORT = 4_000_000  # pairs of buffers compared in all: about a second of Python in the worst case


def pack(intervals: Sequence[Interval], slack: float = 0.005) -> tuple[list[int], int]:
    """Offsets and the size of the arena.

    Orders are tried until one is within `slack` of the lower bound: largest first; those that live at the peak first,
    by area or by length; then the last of these again and again, with the buffers that stick out on top moved first.
    """
    bound = peak_live_bytes(intervals)
    ids = range(len(intervals))
    pressure = _pressure(intervals)
    length = [interval.end - interval.start + 1 for interval in intervals]
    keys: list[Callable[[int], tuple[int, int]]] = [
        lambda i: (-intervals[i].nbytes, intervals[i].start),
        lambda i: (-pressure[i], -length[i] * intervals[i].nbytes),
        lambda i: (-pressure[i], -length[i]),
    ]
    rounds = min(24, max(len(keys), 2 * _EFFORT // (len(intervals) ** 2 + 1)))
    best: tuple[list[int], int] | None = None
    order: list[int] = []
    for turn in range(rounds):
        if turn < len(keys):
            order = sorted(ids, key=keys[turn])
        offsets, total = _place(intervals, order)
        if best is None or total < best[1]:
            best = offsets, total
        if best[1] <= bound * (1 + slack):
            break
        top = {i for i in order if offsets[i] + align(intervals[i].nbytes) >= total}
        order = [i for i in order if i in top] + [i for i in order if i not in top]
    assert best is not None
    return best
