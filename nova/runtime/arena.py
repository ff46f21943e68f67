"""One arena for all executables of the process: nothing in it outlives a call, so steps that take turns can share.

A step that is captured several times (first and later micro-batches, a short last batch, evaluation) would otherwise
hold one arena each. The largest arena is *current*; an executable moves to it on its next call. Only weak
references are kept here: memory is PyTorch's again when the last executable that used it is dropped. Steps that run at
the same time in several threads get arenas of their own.
"""

from __future__ import annotations

import threading
import weakref

import torch

from nova.runtime.packing import ALIGNMENT


class Arena:
    """A block of memory. `busy` is held while a step runs in it."""

    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        raw = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device="cpu")
        shift = -raw.data_ptr() % ALIGNMENT
        self.tensor = raw[shift : shift + nbytes]
        self.address = self.tensor.data_ptr()
        self.busy = threading.Lock()
        self.superseded = False  # a larger one took its place


_guard = threading.Lock()
_current: weakref.ref[Arena] | None = None


def acquire(nbytes: int) -> Arena:
    """An arena of at least `nbytes` with `busy` held: the current one where it is free and large enough."""
    global _current
    with _guard:
        current = _current() if _current is not None else None
        if current is not None and current.nbytes >= nbytes and current.busy.acquire(blocking=False):
            return current
        arena = Arena(nbytes)
        arena.busy.acquire()
        if current is None or nbytes > current.nbytes:
            if current is not None:
                current.superseded = True
            _current = weakref.ref(arena)
        return arena
