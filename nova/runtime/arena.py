"""One arena a device for all executables of the process: nothing in it outlives a call, so steps that take turns share.

A step that is captured several times (first and later micro-batches, a short last batch, evaluation) would otherwise
hold one arena each. The largest arena is *current*; an executable moves to it on its next call. Only weak
references are kept here: memory is PyTorch's again when the last executable that used it is dropped. Steps that run at
the same time in several threads get arenas of their own.
"""

from __future__ import annotations

import threading
import weakref

import torch

from nova.errors import DeviceError
from nova.runtime.packing import ALIGNMENT

_CPU = torch.device("cpu")  # said explicitly: `torch.set_default_device` may say otherwise


class OutOfMemoryError(DeviceError, torch.OutOfMemoryError):
    """There is no room for what a compiled step needs. PyTorch's error too, so that handlers of that one see it."""


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an allocator of PyTorch's raised this; the CPU's has no class of its own."""
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)


class Arena:
    """A block of memory. `busy` is held while a step runs in it, or is being launched."""

    def __init__(self, nbytes: int, device: torch.device = _CPU):
        self.nbytes = nbytes
        raw = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device=device)
        shift = -raw.data_ptr() % ALIGNMENT
        self.tensor = raw[shift : shift + nbytes]
        self.address = self.tensor.data_ptr()
        self.busy = threading.Lock()
        self.superseded = False  # a larger one took its place
        self.stream: int | None = None  # of a GPU: the stream of the last step; `event` follows that step
        self.event: object = None


_guard = threading.Lock()
_current: dict[torch.device, weakref.ref[Arena]] = {}


def acquire(nbytes: int, device: torch.device = _CPU) -> Arena:
    """An arena of at least `nbytes` with `busy` held: the current one where it is free and large enough."""
    with _guard:
        known = _current.get(device)
        current = known() if known is not None else None
        if current is not None and current.nbytes >= nbytes and current.busy.acquire(blocking=False):
            return current
        arena = Arena(nbytes, device)
        arena.busy.acquire()
        if current is None or nbytes > current.nbytes:
            if current is not None:
                current.superseded = True
            _current[device] = weakref.ref(arena)
        return arena
