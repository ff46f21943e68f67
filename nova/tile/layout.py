"""Which thread holds which elements of a tile: `NestedLayout`, pure maths (paper section 4.5).

A dimension of size n is cut five times, n = subgroup x batch x outer x thread x element:

    index = (((s * batch + b) * outer + o) * thread + t) * element + e

    s, t    which warp and which lane hold it        s = warp // subgroup_stride % subgroup, t likewise from the lane
    b, o, e which of the thread's registers          the thread's registers are ordered by (b0, b1, ..; o0, ..; e0, ..)

An accumulator of mma.sync.m16n8 over 32 x 16 elements, one warp:

    rows    batch 2  outer 2  thread 8 (stride 4)  element 1      lane 5 = 1 * 4 + 1 holds rows 1, 9, 17, 25
    columns batch 2  outer 1  thread 4 (stride 1)  element 2      and of each columns 2, 3, 10, 11

A stride of 0 (or a count of 1) means that the dimension is not distributed over lanes or warps: they hold copies. So
the layout of a row statistic is the tile's layout without the column dimension, and broadcasting it back moves nothing.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

WARP = 32
Dims = tuple[int, ...]


@dataclass(frozen=True)
class NestedLayout:
    """Tile sizes and strides, one entry a dimension. Equal layouts place equal elements in equal registers."""

    subgroup: Dims
    batch: Dims
    outer: Dims
    thread: Dims
    element: Dims
    subgroup_strides: Dims
    thread_strides: Dims

    def __post_init__(self) -> None:
        if len({len(getattr(self, field.name)) for field in fields(self)}) != 1:
            raise ValueError(f"a layout needs one entry a dimension in every field, got {self.text()}")
        for counts, strides in ((self.subgroup, "subgroup_strides"), (self.thread, "thread_strides")):
            kept = tuple(s if n > 1 else 0 for n, s in zip(counts, getattr(self, strides), strict=True))
            object.__setattr__(self, strides, kept)  # one spelling: what is not distributed has stride 0
            if any(n > 1 and s == 0 for n, s in zip(counts, kept, strict=True)):
                raise ValueError(f"a distributed dimension needs a stride: {self.text()}")

    @property
    def rank(self) -> int:
        return len(self.batch)

    @property
    def shape(self) -> Dims:
        parts = (self.subgroup, self.batch, self.outer, self.thread, self.element)
        return tuple(math.prod(sizes) for sizes in zip(*parts, strict=True))

    @property
    def registers(self) -> int:
        """Values of the tile that one thread holds."""
        return math.prod(self.batch) * math.prod(self.outer) * math.prod(self.element)

    @property
    def register_shape(self) -> Dims:
        return (*self.batch, *self.outer, *self.element)

    @property
    def warps(self) -> int:
        """Warps that hold different elements."""
        return math.prod(self.subgroup)

    def thread_part(self, dim: int) -> tuple[tuple[str, int, int, int], ...]:
        """(of "warp" or "lane", stride, count, step of the index along `dim`) for what depends on the thread."""
        step = self.element[dim]
        parts = [("lane", self.thread_strides[dim], self.thread[dim], step)]
        step *= self.thread[dim] * self.outer[dim] * self.batch[dim]
        parts.append(("warp", self.subgroup_strides[dim], self.subgroup[dim], step))
        return tuple(part for part in parts if part[2] > 1)

    def register_part(self, dim: int) -> np.ndarray:
        """int64[registers]: what each register adds to the index along `dim`."""
        sizes = self.register_shape
        grid = np.indices(sizes).reshape(len(sizes), -1) if sizes else np.zeros((0, 1), np.int64)
        b, o, e = (grid[k * self.rank + dim] for k in range(3))
        return (b * self.outer[dim] + o) * self.thread[dim] * self.element[dim] + e

    def indices(self, threads: int) -> np.ndarray:
        """int64[threads, registers, rank]: the element in each register of each thread."""
        return _indices(self, threads)

    def index(self, warp: int, lane: int, register: int) -> Dims:
        return tuple(int(i) for i in self.indices((warp + 1) * WARP)[warp * WARP + lane, register])

    def is_first_copy(self, warp: int, lane: int) -> bool:
        """Whether the thread is the one among its copies that stores."""
        return self._rest(lane, self.thread_strides, self.thread) == 0 and (
            self._rest(warp, self.subgroup_strides, self.subgroup) == 0
        )

    @staticmethod
    def _rest(number: int, strides: Dims, counts: Dims) -> int:
        return number - sum(number // s % n * s for s, n in zip(strides, counts, strict=True) if n > 1)

    def project(self, dims: Sequence[int]) -> NestedLayout:
        """The layout of what is left when `dims` are reduced."""
        gone = {d % self.rank for d in dims}
        return self._pick([d for d in range(self.rank) if d not in gone])

    def permute(self, permutation: Sequence[int]) -> NestedLayout:
        """Dimension i of the result is dimension `permutation[i]` of this."""
        return self._pick(permutation)

    def _pick(self, dims: Sequence[int]) -> NestedLayout:
        return NestedLayout(*(tuple(getattr(self, field.name)[d] for d in dims) for field in fields(self)))

    def text(self) -> str:
        """As the dictionary attribute that tile programs print."""
        parts = []
        for field in fields(self):
            numbers = ", ".join(map(str, getattr(self, field.name)))
            parts.append(f"{field.name} = array<i64{': ' if numbers else ''}{numbers}>")
        return "{" + ", ".join(parts) + "}"

    @staticmethod
    def parse(attribute: Any) -> NestedLayout:
        """From the attribute or its text."""
        return _parse(str(attribute))


_ARRAY = re.compile(r"(\w+) = array<i64(?:: ([-\d, ]+))?>")


@functools.lru_cache(maxsize=4096)
def _parse(text: str) -> NestedLayout:
    found = {
        name: tuple(int(n) for n in (numbers or "").split(",") if n.strip()) for name, numbers in _ARRAY.findall(text)
    }
    names = [field.name for field in fields(NestedLayout)]
    if set(found) != set(names):
        raise ValueError(f"a nested layout has the fields {', '.join(names)}; got {text}")
    return NestedLayout(**found)


@functools.lru_cache(maxsize=512)
def _indices(layout: NestedLayout, threads: int) -> np.ndarray:
    thread = np.arange(threads)
    ids = {"lane": thread % WARP, "warp": thread // WARP}
    columns = []
    for dim in range(layout.rank):
        own = np.zeros(threads, np.int64)
        for which, stride, count, step in layout.thread_part(dim):
            own += ids[which] // stride % count * step
        columns.append(own[:, None] + layout.register_part(dim)[None, :])
    if not columns:
        return np.zeros((threads, 1, 0), np.int64)
    return np.stack(columns, axis=-1)


# --- constructors -----------------------------------------------------------------------------------------------------


def blocked(shape: Sequence[int], warps: Sequence[int], lanes: Sequence[int], vector: int = 1) -> NestedLayout:
    """Warps and lanes in row-major order over the tile; runs of `vector` elements along the last dimension.

    The rest of each dimension is `batch`: a warp's accesses of one register are contiguous along the last dimension.
    """
    rank = len(shape)
    element = (1,) * (rank - 1) + (vector,)
    batch = []
    for size, w, t, e in zip(shape, warps, lanes, element, strict=True):
        if size % (w * t * e):
            raise ValueError(
                f"a tile of {list(shape)} is not cut by {list(warps)} warps of {list(lanes)} lanes x {vector}"
            )
        batch.append(size // (w * t * e))
    return NestedLayout(
        tuple(warps), tuple(batch), (1,) * rank, tuple(lanes), element, row_major(warps), row_major(lanes)
    )  # fmt: skip


def row_major(counts: Sequence[int]) -> Dims:
    """Strides of a grid of ids whose last dimension is fastest."""
    strides, step = [], 1
    for count in reversed(counts):
        strides.append(step)
        step *= count
    return tuple(reversed(strides))


def scattered(layout: NestedLayout, dim: int, copies: int) -> NestedLayout:
    """The same tile with `copies` times as many threads along `dim` and the last dimension, each with a share of what
    one held: of its batch first, then of its runs, so that accesses stay wide and neighbours in memory neighbours.

    Threads lie along these two dimensions only; `copies` is a power of two. What cannot be shared out, is held by
    several threads still.
    """
    last = layout.rank - 1
    of_batch = math.gcd(layout.batch[dim], copies)
    of_run = math.gcd(layout.element[last], copies // of_batch)
    threads = layout.thread[dim] * layout.subgroup[dim] * of_batch
    lanes = min(WARP // of_run, threads)

    def at(values: Dims, **new: int) -> Dims:
        return tuple(new.get({dim: "dim", last: "last"}.get(d, ""), value) for d, value in enumerate(values))

    return NestedLayout(
        at(layout.subgroup, dim=threads // lanes), at(layout.batch, dim=layout.batch[dim] // of_batch), layout.outer,
        at(layout.thread, dim=lanes, last=of_run), at(layout.element, last=layout.element[last] // of_run),
        at(layout.subgroup_strides, dim=1), at(layout.thread_strides, dim=of_run, last=1),
    )  # fmt: skip


def mma_accumulator(m: int, n: int, warps: tuple[int, int]) -> NestedLayout:
    """C and D of mma.sync.m16n8k*: float32 (PTX ISA, "Matrix fragments for mma.m16n8k16")."""
    wm, wn = warps
    return NestedLayout(
        (wm, wn), (_cut(m, 16 * wm), _cut(n, 8 * wn)), (2, 1), (8, 4), (1, 2), (wn, 1), (4, 1)
    )  # fmt: skip


def mma_lhs(m: int, k: int, warps: tuple[int, int], bits: int, paired_k: bool = False) -> NestedLayout:
    """A of mma.sync (m16k16 for 16-bit operands, m16k8 for TF32).

    `paired_k` renames TF32's k so that a lane's two values are neighbours (columns 2t, 2t+1 instead of t, t+4): then an
    accumulator is an operand without moving anything. Both operands must be paired or neither.
    """
    batch, outer, element = _k_fragment(k, bits, paired_k)
    return NestedLayout(
        (warps[0], 1), (_cut(m, 16 * warps[0]), batch), (2, outer), (8, 4), (1, element), (warps[1], 0), (4, 1)
    )  # fmt: skip


def mma_rhs(k: int, n: int, warps: tuple[int, int], bits: int, paired_k: bool = False) -> NestedLayout:
    """B of mma.sync (k16n8 or k8n8)."""
    batch, outer, element = _k_fragment(k, bits, paired_k)
    return NestedLayout(
        (1, warps[1]), (batch, _cut(n, 8 * warps[1])), (outer, 1), (4, 8), (element, 1), (0, 1), (1, 4)
    )  # fmt: skip


def _k_fragment(k: int, bits: int, paired: bool) -> tuple[int, int, int]:
    """(batch, outer, element) along k: an instruction takes 32 bytes of k."""
    if paired and bits != 32:
        raise ValueError("only 32-bit operands can be paired: 16-bit ones already are")
    element = 32 // bits
    return _cut(k, 256 // bits), 1 if paired else 2, 2 if paired else element


def _cut(size: int, unit: int) -> int:
    if size % unit:
        raise ValueError(f"{size} is not a multiple of {unit}")
    return size // unit


def register_permutation(source: NestedLayout, target: NestedLayout, threads: int) -> np.ndarray | None:
    """For each register of `target` the register of `source` that holds the same element in every thread, if any."""
    a, b = source.indices(threads), target.indices(threads)
    shape = source.shape
    if shape != target.shape:
        raise ValueError(f"layouts of different tiles: {shape} and {target.shape}")
    flat_a, flat_b = (np.ravel_multi_index(np.moveaxis(x, -1, 0), shape) for x in (a, b))
    order = np.argsort(flat_a, axis=1, kind="stable")
    sorted_a = np.take_along_axis(flat_a, order, axis=1)
    found = np.empty(b.shape[1], np.int64)
    place = np.array([np.searchsorted(sorted_a[0], value) for value in flat_b[0]])
    if (place >= sorted_a.shape[1]).any():
        return None
    found = order[0][place]
    return found if (flat_a[:, found] == flat_b).all() else None
