"""Memory that inputs of a step share, judged by addresses: two storages may lie over the same memory.

    a, b = torch.from_numpy(n), torch.from_numpy(n[2:])      different storages, one buffer

A captured step reads each input's region at its start and writes new contents at its end. That is right as long as

    no region that the step changes overlaps another      (source, first byte, size, whether it changes)
    windows on one input lie as far apart as they did     [(window, distance in bytes from the first), ...]

`ApartFrom` answers for a few tensors that come anew on every call, beside the many that stay.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from torch import Tensor

from nova.capture.signature import InputSpec, Source
from nova.capture.views import DTYPES

Region = tuple[Source, int, int, bool]  # source, bytes from its first element to the start, size in bytes, changes
Group = list[tuple[Source, int]]  # windows on one input, and their distances in bytes from the first
Span = tuple[int, int, bool]  # first address, the one after the last, changes


def region_of(spec: InputSpec, changes: bool) -> Region:
    """What a tensor input reads, and writes if it changes."""
    size = DTYPES[spec.type.dtype].itemsize
    count = 1
    for length in spec.type.shape:
        count *= length
    return spec.source, spec.span_offset * size, count * size, changes


def span_of(tensor: Tensor, region: Region) -> Span:
    start = tensor.data_ptr()
    if not start:
        return 0, 0, region[3]  # empty, or its memory was given back
    start += region[1]
    return start, start + region[2], region[3]


def covers(tensor: Tensor, region: Region) -> bool:
    """Whether one storage holds the whole region: what lies between windows of two storages is somebody else's."""
    if region[1] == 0 and region[2] == tensor.nbytes:
        return True
    memory, (start, stop, _) = tensor.untyped_storage(), span_of(tensor, region)
    return memory.data_ptr() <= start and stop <= memory.data_ptr() + memory.nbytes()


def distance(tensor: Tensor, first: Tensor) -> int:
    """Bytes between the first elements; an empty tensor is nowhere."""
    a, b = tensor.data_ptr(), first.data_ptr()
    return a - b if a and b else 0


def overlap(spans: Sequence[Span]) -> tuple[int, int] | None:
    """Two spans that overlap of which one changes, by their positions."""
    any_stop = any_at = changed_stop = changed_at = -1
    for at in sorted(range(len(spans)), key=spans.__getitem__):
        start, stop, changes = spans[at]
        if start >= stop:
            continue
        if start < changed_stop:
            return changed_at, at
        if changes and start < any_stop:
            return any_at, at
        if stop > any_stop:
            any_stop, any_at = stop, at
        if changes:
            changed_stop, changed_at = stop, at
    return None


class ApartFrom:
    """Spans in order, to look up whether another one overlaps them."""

    def __init__(self, spans: Iterable[Span]):
        known = [span for span in spans if span[0] < span[1]]
        self._all, self._changed = _merged(known), _merged(span for span in known if span[2])

    def holds(self, start: int, stop: int, changes: bool) -> bool:
        """Whether [start, stop) is apart from what changes, and from everything if it changes itself."""
        starts, stops = self._all if changes else self._changed
        before = bisect_left(starts, stop)
        return start >= stop or not before or stops[before - 1] <= start


def _merged(spans: Iterable[Span]) -> tuple[list[int], list[int]]:
    """First and last addresses of the memory that spans cover, in order."""
    starts: list[int] = []
    stops: list[int] = []
    for start, stop, _ in sorted(spans):
        if stops and start < stops[-1]:
            stops[-1] = max(stops[-1], stop)
        else:
            starts.append(start)
            stops.append(stop)
    return starts, stops
