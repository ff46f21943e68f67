"""Argument binding in native code: which tensors moved since the last call, and only those pointers patched.

`torch.Tensor.data_ptr` costs 0.13 us a tensor, 80 us for a GPT-2's 592; reading the same words in native code costs a
tenth of that (`binding_native`, at the offsets that `tensor_layout` finds). Where the offsets cannot be found, binding
falls back to `data_ptr`.

Four cases a tensor, cheapest last (graduated binding):
    first bind          the Python class, dtype, sizes and strides are checked in Python and recorded
    metadata changed    the same again; a mismatch with the plan raises
    pointer changed     the kernel argument slots that hold it are patched
    unchanged           three loads and a compare
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from nova.runtime import orc
from nova.runtime.binding_native import native_text
from nova.runtime.tensor_layout import TensorLayout, tensor_layout

__all__ = ["Expected", "PointerTable", "TensorLayout", "tensor_layout"]


def _address(name: str) -> int:
    """Of a function of Python's C interface."""
    return ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value or 0


class _Native(NamedTuple):
    bind: Callable[..., int]
    run: Callable[..., int]
    library: orc.Library


@cache
def _native() -> _Native | None:
    """The native binder, or None where the layout is unknown."""
    layout = tensor_layout()
    if layout is None:
        return None
    imports = {name: _address(name) for name in ("PyEval_SaveThread", "PyEval_RestoreThread", "PyList_GetItem")}
    library = orc.load(orc.compile_ir(native_text(layout)), ["nova_bind", "nova_run"], imports)
    word, pointer, thing = ctypes.c_int64, ctypes.c_void_p, ctypes.py_object
    # PYFUNCTYPE: called with the GIL held, since it reads Python objects.
    bind = ctypes.PYFUNCTYPE(word, thing, pointer, word, word, pointer)(library["nova_bind"])
    run = ctypes.PYFUNCTYPE(word, pointer, pointer, thing, thing)(library["nova_run"])
    return _Native(bind, run, library)


_GETTERS = {tuple: _address("PyTuple_GetItem"), list: _address("PyList_GetItem")}


class PointerTable:
    """Kernel argument slots, and for each base pointer (tensor or block of memory) the slots that hold it.

    `relocations[b]` lists (slot, byte offset) for base b. `expected[b]` is (shape, dtype, name) for the bases that
    tensors bind to; bases after them are set with `set_base`.
    """

    def __init__(self, slots: int, relocations: Sequence[Sequence[tuple[int, int]]], native: bool = True):
        self.table = (ctypes.c_int64 * max(slots, 1))()
        self.address = ctypes.addressof(self.table)
        self._relocations = [list(entries) for entries in relocations]
        count = len(relocations)
        self._bases = (ctypes.c_int64 * max(count, 1))(*([-1] * count))
        starts: list[int] = [0]
        flat: list[int] = []
        for entries in relocations:
            for slot, offset in entries:
                flat += [slot, offset]
            starts.append(len(flat) // 2)
        self._relocation_starts = (ctypes.c_int64 * len(starts))(*starts)
        self._flat = (ctypes.c_int64 * max(len(flat), 1))(*flat)
        self._records: list[list[int]] = [[0] for _ in range(count)]  # class 0 matches no tensor: first bind
        self._classes: set[type] = set()  # kept alive, so that a recorded address stays that class
        self._native = _native() if native else None
        self._binder = (ctypes.c_int64 * 10)()
        self._prepare: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]] | None = None
        self._binder_address = ctypes.addressof(self._binder)
        self._pack_records()

    def _pack_records(self) -> None:
        starts: list[int] = []
        flat: list[int] = []
        for record in self._records:
            starts.append(len(flat))
            flat += record
        self._record_words = (ctypes.c_int64 * max(len(flat), 1))(*flat)
        self._record_starts = (ctypes.c_int64 * max(len(starts), 1))(*starts)
        arrays = (self._record_words, self._record_starts, self._bases,
                  self._relocation_starts, self._flat, self.table)  # fmt: skip
        self._binder[: len(arrays)] = [ctypes.addressof(array) for array in arrays]

    def attach(
        self, inputs: Sequence[Expected], outputs: Sequence[Expected], step: int, call: Callable[[int], int]
    ) -> None:
        """What `run` binds and runs: `step` is the address of the step, `call` the same as a Python callable."""
        self._inputs, self._outputs, self._call = inputs, outputs, call
        self._binder[6], self._binder[7], self._binder[8] = len(inputs), len(outputs), step

    def require_alignment(
        self, nbytes: int, prepare: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
    ) -> None:
        """From now on `run` binds addresses that are multiples of `nbytes` only; where an input may have another one,
        what is bound is `prepare(inputs)`."""
        self._binder[9], self._prepare = nbytes - 1, prepare

    def base(self, index: int) -> int:
        return self._bases[index]

    def set_base(self, index: int, address: int) -> None:
        if self._bases[index] != address:
            self._bases[index] = address
            if self._relocations[index]:
                slots, offsets = np.array(self._relocations[index], dtype=np.int64).T
                np.ctypeslib.as_array(self.table)[slots] = offsets + address

    def bind(self, tensors: Sequence[torch.Tensor], first: int, expected: Sequence[Expected]) -> int:
        """Points bases `first`, `first + 1`, ... at the tensors. Returns how many moved since the last call."""
        if self._native is None:
            return self._bind_slow(tensors, first, expected, check_all=False)
        getter = _GETTERS.get(type(tensors))
        if getter is None:
            tensors, getter = tuple(tensors), _GETTERS[tuple]
        moved = self._native.bind(tensors, getter, len(tensors), first, self._binder_address)
        if moved >= 0:
            return moved
        moved = self._bind_slow(tensors, first, expected)
        self._record(tensors, first)
        return moved

    def run(self, inputs: Sequence[torch.Tensor], outputs: list[torch.Tensor]) -> int:
        """Binds inputs to the first bases and outputs to the next, runs the step, and returns what it returns."""
        native = self._native
        if native is not None:
            getter = _GETTERS.get(type(inputs))
            if getter is None:
                inputs, getter = tuple(inputs), _GETTERS[tuple]
            stopped = native.run(self._binder_address, getter, inputs, outputs)
            if stopped >= 0:
                return stopped
        if self._prepare is not None:
            inputs = self._prepare(inputs)
        self.bind(inputs, 0, self._inputs)
        self.bind(outputs, len(inputs), self._outputs)
        return self._call(self.address)

    def _bind_slow(
        self, tensors: Sequence[torch.Tensor], first: int, expected: Sequence[Expected], check_all: bool = True
    ) -> int:
        """Binding through `data_ptr`. Without native code only tensors that moved are checked again."""
        moved = 0
        for index, (tensor, want) in enumerate(zip(tensors, expected, strict=True)):
            if check_all or not isinstance(tensor, torch.Tensor):
                want.check(tensor)
            pointer = torch.Tensor.data_ptr(tensor)
            if self._bases[first + index] != pointer:
                want.check(tensor)
                self.set_base(first + index, pointer)
                moved += 1
        return moved

    def _record(self, tensors: Sequence[torch.Tensor], first: int) -> None:
        layout = tensor_layout()
        assert layout is not None
        for index, tensor in enumerate(tensors, first):
            dtype = ctypes.c_uint16.from_address(tensor._cdata + layout.dtype).value
            self._classes.add(type(tensor))
            record = [id(type(tensor)), dtype, tensor.itemsize, tensor.dim(), *tensor.shape, *tensor.stride()]
            self._records[index] = record
        self._pack_records()


@dataclass(frozen=True)
class Expected:
    """What the plan was made for. The caller's guards keep to it; this is the last check before native code."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...]
    device: str = "cpu"

    def check(self, tensor: torch.Tensor) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"input {self.name} of the compiled step must be a tensor, not {type(tensor).__name__}")
        if tensor.dtype != self.dtype or tuple(tensor.shape) != self.shape or str(tensor.device) != self.device:
            raise ValueError(
                f"input {self.name} of the compiled step is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; "
                f"the step was compiled for {self.dtype} {list(self.shape)} on {self.device}"
            )
        if tensor.is_conj() or tensor.is_neg():
            kind = "conj" if tensor.is_conj() else "neg"
            raise ValueError(
                f"input {self.name} of the compiled step is a lazy {'conjugate' if kind == 'conj' else 'negative'}, "
                f"whose memory holds other values; pass {self.name}.resolve_{kind}()"
            )
        dense = all(s == w or n <= 1 for n, s, w in zip(tensor.shape, tensor.stride(), self.strides, strict=True))
        if not dense and tensor.numel():
            raise ValueError(
                f"input {self.name} of the compiled step has strides {tensor.stride()}, want {self.strides}"
            )
