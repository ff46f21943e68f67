"""Interval packing: offsets in one arena for buffers whose lifetimes are known.

The problem is two-dimensional strip packing with one axis (time) fixed. Largest-first with best fit is
within a few per cent of the lower bound on training steps; when it is not, three more orders are tried.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

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


def pack(intervals: Sequence[Interval], slack: float = 0.02) -> tuple[list[int], int]:
    """Offsets and the size of the arena. Stops at the first order within `slack` of the lower bound."""
    bound = peak_live_bytes(intervals)
    ids = range(len(intervals))
    orders = (
        lambda i: (-intervals[i].nbytes, intervals[i].start),
        lambda i: (-(intervals[i].end - intervals[i].start), -intervals[i].nbytes),
        lambda i: (-(intervals[i].end - intervals[i].start + 1) * intervals[i].nbytes, intervals[i].start),
        lambda i: (intervals[i].start, -intervals[i].nbytes),
    )
    best: tuple[list[int], int] | None = None
    for order in orders:
        candidate = _place(intervals, sorted(ids, key=order))
        if best is None or candidate[1] < best[1]:
            best = candidate
        if best[1] <= bound * (1 + slack):
            break
    assert best is not None
    return best
