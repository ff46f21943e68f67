"""Values that are guarded by what is in them: NumPy's, other number types, raw memory.

    np.float32(0.5)                ("content", ("numpy.float32", "", "()", <digest>))
    bytearray(b"ab")               ("content", ("builtins.bytearray", "", "", <digest>))

They are compared by a digest, which another process finds equal too. Large ones are compared byte for byte with a copy,
which takes a tenth of the time (`Kept`).

A step may also write to them. `Memory` keeps what they held, says what is different, and puts it back.

    stats[0] += 1                  Difference((0,), 0.0, 1.0)
"""

from __future__ import annotations

import array
import collections
import ctypes
import datetime
import decimal
import fractions
import hashlib
import weakref
from collections.abc import Collection, Iterable
from operator import is_
from typing import Any, NamedTuple

import numpy as np

LARGE_BYTES = 1 << 20
MEMORY_LIMIT = 256 << 20  # bytes of arrays that are copied for one capture
_NUMBERS = (decimal.Decimal, fractions.Fraction, datetime.date, datetime.time, datetime.timedelta)
_SIMPLE: Any = ctypes.c_int.__mro__[1]  # the base of ctypes' numbers
_STRUCTURES = (ctypes.Array, ctypes.Structure, ctypes.Union)
_BUFFERS = (bytearray, array.array, memoryview, *_STRUCTURES)
CONTENTS = (np.ndarray, np.generic, *_NUMBERS, *_BUFFERS, _SIMPLE)

_CONTAINERS = (list, tuple, dict, collections.deque)  # of plain values, where they are many

Content = tuple[str, ...]


def is_large(obj: Any) -> bool:
    return nbytes(obj) > LARGE_BYTES


def nbytes(obj: Any) -> int:
    """The size of a block of memory; 0 for other values."""
    if isinstance(obj, (np.ndarray, memoryview)):
        return obj.nbytes
    if isinstance(obj, _STRUCTURES):
        return ctypes.sizeof(obj)
    if isinstance(obj, (bytearray, array.array)):
        return len(obj) * getattr(obj, "itemsize", 1)
    return 0


def content(obj: Any) -> Content:
    """What distinguishes a value from others."""
    name, kind, shape = f"{type(obj).__module__}.{type(obj).__qualname__}", "", ""
    if isinstance(obj, (np.ndarray, np.generic)):
        kind, shape = str(obj.dtype), str(obj.shape)
        data = repr(obj.tolist()).encode() if obj.dtype.hasobject else obj.tobytes()
    elif isinstance(obj, _BUFFERS):
        kind, data = getattr(obj, "typecode", getattr(obj, "format", "")), bytes(obj)
    else:
        data = repr(obj).encode()
    return name, kind, shape, hashlib.sha256(data).hexdigest()


def same_content(obj: Any, was: Content) -> bool:
    return isinstance(obj, (*CONTENTS, *_CONTAINERS)) and not is_large(obj) and content(obj) == was


class Kept:
    """A large block of memory: the same object, holding what a copy holds. Reads about 10 GB/s on every call."""

    def __init__(self, obj: Any):
        self.obj, self.was = obj, _bytes_of(obj).copy()

    def holds(self, obj: Any) -> bool:
        if obj is not self.obj:
            return False
        now = _bytes_of(obj)
        return now.size == self.was.size and _memcmp(now.ctypes.data, self.was.ctypes.data, now.size) == 0


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def _bytes_of(obj: Any) -> np.ndarray:
    """The elements in their order, of memory with gaps a copy."""
    if isinstance(obj, np.ndarray):
        return np.ascontiguousarray(obj).reshape(-1).view(np.uint8)
    return np.frombuffer(memoryview(obj).cast("B") if memoryview(obj).contiguous else bytes(obj), np.uint8)


class Entries:
    """The entries of a container that are too many to be described, by identity. Holds weakly what allows it."""

    def __init__(self, items: Collection[Any]):
        self._references = [_reference(item) for item in _entries(items)]

    def are(self, items: Collection[Any]) -> bool:
        known = [reference() for reference in self._references]
        if isinstance(items, (set, frozenset)):
            return set(map(id, known)) == set(map(id, items))
        found = _entries(items)
        return len(found) == len(known) and all(map(is_, found, known))


def _entries(items: Collection[Any]) -> Collection[Any]:
    """Of a dictionary its keys, and then its values."""
    return (*items, *items.values()) if isinstance(items, dict) else items


_GONE = object()  # in place of an entry that died: None may be an entry


def _reference(obj: Any) -> Any:
    try:
        reference = weakref.ref(obj)
    except TypeError:
        return lambda: obj
    return lambda: _GONE if (found := reference()) is None else found


def address(obj: Any) -> int:
    """Where an array's elements are: a tensor may be made of the same memory."""
    return obj.ctypes.data if isinstance(obj, np.ndarray) else 0


# ---- memory that a step may write to

Range = tuple[int, int]  # first address, and the one after the last


class Difference(NamedTuple):
    """The first element that changed; `at` is None where the size did."""

    at: tuple[int, ...] | None
    before: Any
    after: Any


def elements(obj: Any) -> np.ndarray | None:
    """The elements of a block of memory as an array on it, if it may be written to. Drop it soon: while it exists a
    bytearray cannot be resized."""
    try:
        if isinstance(obj, np.ndarray):
            found = np.asarray(obj)
        elif isinstance(obj, (ctypes.Structure, ctypes.Union)):
            found = np.frombuffer(memoryview(obj), np.uint8)
        elif isinstance(obj, (*_BUFFERS, _SIMPLE)):
            found = _array_on(memoryview(obj))
        else:
            return None
    except (TypeError, ValueError, BufferError, NotImplementedError):  # released, or without a meaning for NumPy
        return None
    return found if found.flags.writeable else None


def _array_on(view: memoryview) -> np.ndarray:
    try:
        return np.asarray(view)
    except (ValueError, NotImplementedError, RuntimeError):  # a format that NumPy does not know
        return np.asarray(view.cast("B"))


class Memory:
    """What one block of memory held."""

    def __init__(self, obj: Any, found: np.ndarray):
        self.obj, self.was = obj, found.copy()

    def overlaps(self, ranges: Iterable[Range]) -> bool:
        found = elements(self.obj)
        if found is None or found.size == 0:
            return False
        spans = [(size - 1) * stride for size, stride in zip(found.shape, found.strides, strict=True)]
        start = found.__array_interface__["data"][0]
        first, last = start + sum(min(span, 0) for span in spans), start + sum(max(span, 0) for span in spans)
        return any(first < high and low < last + found.itemsize for low, high in ranges)

    def difference(self, elsewhere: Iterable[Range] = ()) -> Difference | None:
        """What is not as it was, apart from elements in these ranges of addresses."""
        now, was = elements(self.obj), self.was
        if now is None:
            return None
        if now.shape != was.shape or now.dtype != was.dtype:
            return Difference(None, was.size, now.size)
        changed = _changed(was, now)
        if not changed.any():
            return None
        where = np.argwhere(changed)
        places = now.__array_interface__["data"][0] + where @ np.array(now.strides, np.int64)
        mine = np.ones(len(where), bool)
        for low, high in elsewhere:
            mine &= (places < low) | (places >= high)
        if not mine.any():
            return None
        index = tuple(where[np.argmax(mine)].tolist())
        return Difference(index, _plain(was[index]), _plain(now[index]))

    def step(self, index: tuple[int, ...] | None) -> tuple[str, Any]:
        """The step of a path (sources.py) to an element."""
        if index is None:
            return "length", ""
        if not index and isinstance(self.obj, _SIMPLE):
            return "attr", "value"
        return "item", index[0] if len(index) == 1 else index

    def restore(self) -> None:
        obj, was = self.obj, self.was
        if isinstance(obj, (bytearray, array.array)):
            if len(obj) != was.size:
                del obj[:]
                obj.extend(was.tobytes()) if isinstance(obj, bytearray) else obj.frombytes(was.tobytes())
        elif isinstance(obj, np.ndarray) and obj.shape != was.shape:
            obj.resize(was.shape, refcheck=False)
        now = elements(obj)
        if now is not None and now.shape == was.shape and now.dtype == was.dtype and _changed(was, now).any():
            np.copyto(now, was)


def _changed(was: np.ndarray, now: np.ndarray) -> np.ndarray:
    """Which elements are not the same, bit for bit."""
    if was.dtype.hasobject:
        pairs = zip(was.ravel(), now.ravel(), strict=True)
        return np.fromiter((a is not b for a, b in pairs), bool, was.size).reshape(was.shape)
    if was.size == 0 or was.itemsize == 0:
        return np.zeros(was.shape, bool)
    a, b = (np.ascontiguousarray(found).reshape(-1).view(np.uint8) for found in (was, now))
    if np.array_equal(a, b):
        return np.zeros(was.shape, bool)
    return (a.reshape(was.size, -1) != b.reshape(was.size, -1)).any(axis=1).reshape(was.shape)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
