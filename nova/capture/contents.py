"""Values that are guarded by what is in them: NumPy's, other number types, raw memory.

    np.float32(0.5)                ("content", ("numpy.float32", "", "()", <digest>))
    bytearray(b"ab")               ("content", ("builtins.bytearray", "", "", <digest>))

They are compared by a digest, which another process finds equal too. What takes longer to read than a call may last
is compared by identity.
"""

from __future__ import annotations

import array
import collections
import ctypes
import datetime
import decimal
import fractions
import hashlib
from typing import Any

import numpy as np

LARGE_BYTES = 1 << 20
_NUMBERS = (decimal.Decimal, fractions.Fraction, datetime.date, datetime.time, datetime.timedelta)
_SIMPLE: type = ctypes.c_int.__mro__[1]  # the base of ctypes' numbers
_BUFFERS = (bytearray, array.array, memoryview)
_MEMORY = (ctypes.Structure, ctypes.Union, ctypes.Array)
CONTENTS = (np.ndarray, np.generic, *_NUMBERS, *_BUFFERS, *_MEMORY, _SIMPLE)

_CONTAINERS = (list, tuple, dict, collections.deque)  # of plain values, where they are many

Content = tuple[str, ...]


def is_large(obj: Any) -> bool:
    return (isinstance(obj, (np.ndarray, memoryview)) and obj.nbytes > LARGE_BYTES) or (
        isinstance(obj, (bytearray, array.array)) and len(obj) > LARGE_BYTES
    )


def content(obj: Any) -> Content:
    """What distinguishes a value from others."""
    name, kind, shape = f"{type(obj).__module__}.{type(obj).__qualname__}", "", ""
    if isinstance(obj, (np.ndarray, np.generic)):
        kind, shape = str(obj.dtype), str(obj.shape)
        data = repr(obj.tolist()).encode() if obj.dtype.hasobject else obj.tobytes()
    elif isinstance(obj, _MEMORY):
        data = bytes(obj)
    elif isinstance(obj, _BUFFERS):
        kind, data = getattr(obj, "typecode", getattr(obj, "format", "")), bytes(obj)
    else:
        data = repr(obj).encode()
    return name, kind, shape, hashlib.sha256(data).hexdigest()


def same_content(obj: Any, was: Content) -> bool:
    return isinstance(obj, (*CONTENTS, *_CONTAINERS)) and not is_large(obj) and content(obj) == was


def address(obj: Any) -> int:
    """Where an array's elements are: a tensor may be made of the same memory."""
    return obj.ctypes.data if isinstance(obj, np.ndarray) else 0
