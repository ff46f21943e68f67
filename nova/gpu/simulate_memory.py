"""Memory of the simulator: global buffers with their bounds, and shared memory that knows who touched what since when.

A global pointer is a number whose upper bits name the buffer it was made from, so that an access out of bounds is seen
however far it strays. Shared memory keeps, for every few bytes, the thread that last wrote them and the one that last
read them, each with the barrier interval in which it did: two threads that meet in one interval, at least one of them
writing, race. No warp runs in lockstep as far as this is concerned.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nova.errors import NovaError
from nova.gpu import simulate_threads as who
from nova.gpu.simulate_order import GlobalOrder
from nova.gpu.simulate_values import Array
from nova.mlir import ir

WARP = 32
SECTOR = 32  # bytes of global memory that move together
BANKS = 32  # of four bytes each

_SHIFT = 50  # a pointer: buffer number + 1 above this bit, below it the offset, counted from the middle
_MIDDLE = 1 << 49
_PADDING = 64  # bytes after a buffer, so that any element type may view it


class SimulationError(NovaError):
    """A kernel did what the hardware would punish: by a wrong result, a fault, or a different result each time."""


def pointer(buffer: int) -> int:
    """The address that the simulator gives the start of buffer number `buffer`."""
    return ((buffer + 1) << _SHIFT) + _MIDDLE


@dataclass(frozen=True)
class Where:
    """An operation, for messages. Its text is only made when asked for: MLIR numbers the whole function for it."""

    kernel: str
    op: ir.Operation

    def __str__(self) -> str:
        if len(self.op.regions):
            return f"{self.kernel}: {self.op.name}"
        text = str(self.op).strip()
        return f"{self.kernel}: {text if len(text) < 300 else text[:297] + '...'}"


@dataclass
class Traffic:
    """Accesses of one kind. `requests` are warp instructions; bytes are what the threads asked for."""

    requests: int = 0
    bytes: int = 0
    sectors: int = 0  # global memory: 32-byte sectors touched
    wavefronts: int = 0  # shared memory: passes over the banks
    ideal: int = 0  # shared memory: passes without any conflict

    @property
    def conflicts(self) -> int:
        return self.wavefronts - self.ideal

    def add(self, other: Traffic) -> None:
        for name in ("requests", "bytes", "sectors", "wavefronts", "ideal"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass
class Access:
    """One instruction's accesses: the threads that take part, an address and a size for each."""

    where: Where  # the operation, for messages
    threads: Array
    address: Array
    size: int  # bytes a thread
    align: int = 1
    block: tuple[int, ...] = ()

    def fail(self, lane: int, what: str) -> SimulationError:
        block = f", block {self.block}" if self.block else ""
        return SimulationError(f"{self.where}\n  thread {int(self.threads[lane])}{block}: {what}")

    def check_alignment(self) -> None:
        if self.align > 1 and (wrong := (self.address & (self.align - 1)) != 0).any():
            lane = int(np.argmax(wrong))
            offset = int(self.address[lane]) & ((1 << _SHIFT) - 1)
            offset -= _MIDDLE if int(self.address[lane]) >> _SHIFT else 0
            raise self.fail(lane, f"expected an address aligned to {self.align} bytes, got offset {offset}")


def _start(buffer: Array) -> int:
    """Where an array lies; an empty one, or one with gaps, is alone."""
    return buffer.ctypes.data if buffer.nbytes and buffer.flags.c_contiguous else -id(buffer)


def view_dtype(size: int) -> Any:
    """The unsigned type of so many bytes (1, 2, 4, 8)."""
    return np.dtype(f"u{size}")


# --- global memory ---------------------------------------------------------------------------------------------------


class GlobalMemory:
    """The buffers behind a launch's pointer arguments, and further arrays that tables of addresses point into.

    Kernels work on copies; `write_back` updates the originals. Arguments that are the same memory stay the same.
    """

    def __init__(self, buffers: Sequence[Any], memory: Sequence[Array] = ()):
        self.originals = [b if isinstance(b, np.ndarray) else None for b in (*buffers, *memory)]
        self.order: GlobalOrder | None = None
        self.sizes: list[int] = []
        self.data: list[Array] = []
        largest: dict[int, Array] = {}  # by where an array starts
        for array in sorted((b for b in self.originals if b is not None), key=lambda b: b.nbytes):
            largest[_start(array)] = array
        copies = {start: self._copy(array, array.nbytes) for start, array in largest.items()}
        for buffer in self.originals:
            self.sizes.append(buffer.nbytes if buffer is not None else 0)
            self.data.append(copies[_start(buffer)] if buffer is not None else self._copy(None, 0))
        self.ranges = sorted((start, start + b.nbytes, self._number_of(b)) for start, b in largest.items() if b.nbytes)
        for (_, end, a), (start, _, b) in itertools.pairwise(self.ranges):
            if end > start:
                raise NotImplementedError(f"the simulator wants buffers {a} and {b} equal or apart, not overlapping")

    def _number_of(self, buffer: Array) -> int:
        return next(i for i, other in enumerate(self.originals) if other is buffer)

    def _translate(self, access: Access) -> None:
        """Real addresses, as tables of words hold them, to the simulator's own."""
        starts = np.array([start for start, _, _ in self.ranges], np.int64)
        real = np.flatnonzero(access.address >> _SHIFT == 0)
        place = np.searchsorted(starts, access.address[real], "right") - 1
        for lane, index in zip(real, place, strict=True):
            address = int(access.address[lane])
            start, end, _ = self.ranges[index] if index >= 0 else (0, 0, 0)
            if not start <= address < end:
                raise access.fail(int(lane), f"the address {address:#x} is in no buffer (a null pointer?)")
        bases = np.array([pointer(number) - start for start, _, number in self.ranges], np.int64)
        access.address = access.address.copy()
        access.address[real] += bases[place]

    @staticmethod
    def _copy(buffer: Array | None, size: int) -> Array:
        copy = np.zeros((size + _PADDING + 7) // 8 * 8, np.uint8)
        if buffer is not None and size:
            copy[:size] = np.ascontiguousarray(buffer).reshape(-1).view(np.uint8)
        return copy

    def add(self, buffer: Array) -> int:
        """One more buffer, e.g. a table of constants; returns its address."""
        self.originals.append(None)
        self.sizes.append(buffer.nbytes)
        self.data.append(self._copy(buffer, buffer.nbytes))
        return pointer(len(self.data) - 1)

    def write_back(self) -> None:
        for original, size, data in zip(self.originals, self.sizes, self.data, strict=True):
            if original is not None and original.flags.writeable and size:
                original[...] = data[:size].view(original.dtype).reshape(original.shape)

    def parts(self, access: Access) -> list[tuple[int, Array, Array | slice]]:
        """(buffer, offsets, lanes) for each buffer that the access touches, within bounds."""
        if not len(access.address):
            return []
        low, high = int(access.address.min()), int(access.address.max())
        if not low >> _SHIFT:
            self._translate(access)
            low, high = int(access.address.min()), int(access.address.max())
        access.check_alignment()
        if low >> _SHIFT == high >> _SHIFT:
            return [(*self._one(access, low, high, slice(None)),)]
        numbers = access.address >> _SHIFT
        found = []
        for number in np.unique(numbers):
            lanes = np.flatnonzero(numbers == number)
            addresses = access.address[lanes]
            found.append(self._one(access, int(addresses.min()), int(addresses.max()), lanes))
        return found

    def _one(self, access: Access, low: int, high: int, lanes: Array | slice) -> tuple[int, Array, Array | slice]:
        number = (low >> _SHIFT) - 1
        addresses = access.address[lanes]
        base = pointer(number)
        if not 0 <= number < len(self.data):
            raise access.fail(_lane(lanes, 0), f"the address {low:#x} is in no buffer (a null pointer?)")
        if low < base or high - base + access.size > self.sizes[number]:
            outside = (addresses < base) | (addresses - base + access.size > self.sizes[number])
            worst = int(np.argmax(outside))
            offset = int(addresses[worst]) - base
            size = self.sizes[number]
            text = f"{access.size} bytes at offset {offset} of argument {number}, which has {size} bytes"
            raise access.fail(_lane(lanes, worst), f"out of bounds: {text}")
        return number, addresses - base, lanes

    def load(self, access: Access, dtype: Any, count: int) -> Array:
        """[threads, count] elements as unsigned integers of the element's size."""
        width = np.dtype(dtype).itemsize
        result = np.zeros((len(access.address), count), view_dtype(width))
        for number, offsets, lanes in self.parts(access):
            if self.order is not None and not self._is_error_record(number):
                self.order.note_read(access, self.data[number], offsets, access.threads[lanes])
            memory = self.data[number].view(view_dtype(width))
            result[lanes] = memory[_elements(offsets, width, count)]
        return result

    def store(self, access: Access, values: Array) -> None:
        """`values`: [threads, count] unsigned integers."""
        width, count = values.dtype.itemsize, values.shape[1]
        for number, offsets, lanes in self.parts(access):
            if self.order is not None and not self._is_error_record(number):
                self.order.note_write(access, self.data[number], offsets, access.threads[lanes])
            memory = self.data[number].view(view_dtype(width))
            memory[_elements(offsets, width, count)] = values[lanes]

    def _is_error_record(self, number: int) -> bool:
        """Two words, flag and value, which any thread may write."""
        original = self.originals[number]
        return original is not None and original.dtype == np.int64 and original.size == 2

    def update(self, access: Access, values: Array, dtype: Any, combine: Any) -> Array:
        """Read-modify-write one lane after another; returns the old values."""
        old = np.zeros(len(values), dtype)
        for number, offsets, lanes in self.parts(access):
            memory = self.data[number].view(dtype)
            for lane, offset in zip(np.arange(len(values))[lanes], offsets, strict=True):
                slot = int(offset) // memory.dtype.itemsize
                old[lane] = memory[slot]
                memory[slot] = combine(memory[slot : slot + 1], values[lane : lane + 1])[0]
        return old


def _lane(lanes: Array | slice, position: int) -> int:
    return position if isinstance(lanes, slice) else int(lanes[position])


def _elements(offsets: Array, width: int, count: int) -> Array:
    """Element numbers [threads, count] of accesses at byte offsets."""
    first = offsets // width
    return first[:, None] + np.arange(count) if count > 1 else first[:, None]


def global_traffic(access: Access) -> Traffic:
    """What an access to global memory moves: sectors are counted once a warp."""
    if not len(access.address):
        return Traffic()
    warp = access.threads // WARP
    first, last = access.address // SECTOR, (access.address + access.size - 1) // SECTOR
    if (first == last).all():
        pairs = _distinct(warp, first)
    else:
        pairs = _distinct(np.concatenate([warp, warp]), np.concatenate([first, last]))
    return Traffic(len(np.unique(warp)), access.size * len(access.address), pairs)


def _distinct(a: Array, b: Array) -> int:
    """How many distinct pairs there are."""
    order = np.lexsort((b, a))
    a, b = a[order], b[order]
    return 1 + int(np.count_nonzero((a[1:] != a[:-1]) | (b[1:] != b[:-1])))


# --- shared memory ---------------------------------------------------------------------------------------------------

_STEP = 1 << 16
_CODE = _STEP - 1


@dataclass
class CopyGroup:
    """Asynchronous copies between two commits: which granules, by which threads."""

    granules: list[Array] = field(default_factory=list)
    threads: list[Array] = field(default_factory=list)


class SharedMemory:
    """One block's shared memory. Stamps are barrier interval << 16 | who (`simulate_threads`); an interval starts at
    each barrier of the whole block."""

    def __init__(self, size: int, granule: int):
        self.size = size
        self.granule = granule
        self.data = np.zeros((size + 15) // 16 * 16, np.uint8)
        granules = len(self.data) // granule + 1
        self.writer = np.zeros(granules, np.int64)
        self.reader = np.zeros(granules, np.int64)
        self.in_flight = np.zeros(granules, np.int32)  # thread + 1 of an asynchronous copy not yet waited for
        self.interval = _STEP
        self.open = CopyGroup()
        self.committed: list[CopyGroup] = []
        self.numbered: dict[int, int] = {}  # barriers used since the last one of the whole block, and for how many

    def barrier(self) -> None:
        self.interval += _STEP
        self.numbered.clear()

    def meet(self, number: int, threads: int) -> bool:
        """Whether threads that wait at a numbered barrier meet only each other there: groups that do not wait for
        each other may come to it at once, if it serves groups of two sizes."""
        return self.numbered.setdefault(number, threads) == threads

    def group_barrier(self, level: int) -> None:
        """Threads of each group of 2**level warps see what its other threads did so far."""
        for stamps in (self.writer, self.reader):
            recent = stamps >= self.interval
            stamps[recent] = self.interval | who.synchronised(stamps[recent] & _CODE, level)

    @staticmethod
    def _ordered(access: Access, stamps: Array) -> Array:
        """Which recent stamps are of threads that the accessing ones have synchronised with."""
        return who.ordered(stamps & _CODE, access.threads[:, None])

    # -- what an access means for the stamps

    def _granules(self, access: Access) -> tuple[Array, Array]:
        """(granule numbers [threads, n], stamps of the reading or writing thread [threads, 1])."""
        access.check_alignment()
        if len(access.address) and (access.address.min() < 0 or access.address.max() + access.size > self.size):
            outside = (access.address < 0) | (access.address + access.size > self.size)
            lane = int(np.argmax(outside))
            offset = int(access.address[lane])
            raise access.fail(
                lane, f"out of bounds: {access.size} bytes at offset {offset} of {self.size} bytes of shared memory"
            )
        first = access.address // self.granule
        count = max(access.size // self.granule, 1)
        return first[:, None] + np.arange(count), self.interval | access.threads[:, None]

    def _complain(self, access: Access, granules: Array, bad: Array, what: str) -> SimulationError:
        lane, column = np.argwhere(bad)[0]
        granule = int(granules[lane, column])
        stamp = int(self.writer[granule] if "written" in what else self.reader[granule])
        offset = granule * self.granule
        return access.fail(int(lane), f"{what.format(other=who.text(stamp & _CODE))} at byte {offset} of shared memory")

    def _check_flight(self, access: Access, granules: Array, what: str) -> None:
        if self.committed or self.open.granules:
            flying = self.in_flight[granules]
            if flying.any():
                lane, column = np.argwhere(flying)[0]
                thread = int(flying[lane, column]) - 1
                offset = int(granules[lane, column]) * self.granule
                text = f"{what} byte {offset} of shared memory, which thread {thread}'s asynchronous copy still fills"
                raise access.fail(int(lane), f"{text} (no cp.async.wait_group since)")

    def note_read(self, access: Access, whole_warp: bool = False) -> None:
        """Checks and records a read. `whole_warp`: the data goes to other threads of the warp too."""
        granules, mine = self._granules(access)
        if not granules.size:
            return
        self._check_flight(access, granules, "reads")
        if whole_warp:
            mine = np.full_like(mine, self.interval | who.MANY)
        writer = self.writer[granules]
        if (writer < _STEP).any():
            bad = writer < _STEP
            raise self._complain(access, granules, bad, "reads what nothing has written (uninitialised),")
        race = (writer >= self.interval) & (writer != mine) & ~self._ordered(access, writer)
        if race.any():
            raise self._complain(
                access, granules, race, "reads what {other} has written since the last barrier (a race),"
            )
        self._stamp_readers(granules, mine)

    def _stamp_readers(self, granules: Array, mine: Array) -> None:
        """Adds readers; several of a granule in one instruction come one after the other."""
        mine = np.broadcast_to(mine, granules.shape)
        while granules.size:
            reader = self.reader[granules]
            known = who.join(reader & _CODE, mine & _CODE) | self.interval
            self.reader[granules] = np.where(reader < self.interval, mine, known)
            after = self.reader[granules]
            missing = (who.join(after & _CODE, mine & _CODE) | self.interval) != after
            granules, mine = granules[missing], mine[missing]

    def note_write(self, access: Access) -> tuple[Array, Array]:
        """Checks and records a write. Returns (granules, stamps)."""
        granules, mine = self._granules(access)
        if not granules.size:
            return granules, mine
        self._check_flight(access, granules, "writes")
        for stamps, what in (
            (self.writer, "writes what {other} has written since the last barrier (a race),"),
            (self.reader, "writes what {other} has read since the last barrier (a race),"),
        ):
            found = stamps[granules]
            race = (found >= self.interval) & (found != mine) & ~self._ordered(access, found)
            if race.any():
                raise self._complain(access, granules, race, what)
        mine = np.broadcast_to(mine, granules.shape)
        self.writer[granules] = mine
        clash = self.writer[granules] != mine
        if clash.any():
            raise self._complain(access, granules, clash, "writes what {other} has written in the same instruction,")
        return granules, mine

    # -- data

    def read(self, access: Access, dtype: Any, count: int) -> Array:
        width = np.dtype(dtype).itemsize
        return self.data.view(view_dtype(width))[_elements(access.address, width, count)]

    def write(self, access: Access, values: Array) -> None:
        width, count = values.dtype.itemsize, values.shape[1]
        self.data.view(view_dtype(width))[_elements(access.address, width, count)] = values

    # -- asynchronous copies

    def start_copy(self, access: Access, values: Array) -> None:
        """cp.async: the bytes are in flight until the group that they join has been waited for."""
        granules, mine = self.note_write(access)
        self.write(access, values)
        self.in_flight[granules] = np.broadcast_to(access.threads[:, None] + 1, granules.shape)
        self.open.granules.append(granules)
        self.open.threads.append(mine & _CODE)

    def commit(self) -> None:
        self.committed.append(self.open)
        self.open = CopyGroup()

    def wait(self, pending: int) -> None:
        """All but the last `pending` groups are there: visible to the thread that copied, to others at a barrier."""
        done = self.committed[: len(self.committed) - pending] if pending else self.committed
        self.committed = self.committed[len(done) :]
        for group in done:
            for granules, threads in zip(group.granules, group.threads, strict=True):
                self.in_flight[granules] = 0
                self.writer[granules] = self.interval | threads


def shared_traffic(access: Access) -> Traffic:
    """Passes over the banks: 4-byte accesses go warp by warp, 8-byte ones by half, 16-byte ones by quarter warps."""
    if not len(access.address):
        return Traffic()
    warp = access.threads // WARP
    words = max(access.size // 4, 1)
    phase = access.threads // (WARP // words)
    word = (access.address[:, None] // 4 + np.arange(words)).ravel()
    distinct = np.unique(np.repeat(phase, words) * (1 << 32) + word)
    bank = (distinct >> 32) * BANKS + distinct % BANKS
    names, counts = np.unique(bank, return_counts=True)
    phases, starts = np.unique(names // BANKS, return_index=True)
    wavefronts = int(np.maximum.reduceat(counts, starts).sum())
    return Traffic(len(np.unique(warp)), access.size * len(access.address), 0, wavefronts, len(phases))
