"""Argument binding in native code: which tensors moved since the last call, and only those pointers patched.

`torch.Tensor.data_ptr` costs 0.13 us a tensor, 80 us for a GPT-2's 592. Reading the same three words in native
code costs 3 ns. Where PyTorch keeps them is not an interface, so nothing is assumed: the offsets are found at
run time by looking for known values (`Tensor._cdata` and the storage's own `_cdata` are addresses, odd sizes and
offsets are recognisable), and then checked against PyTorch's answers on other tensors. If anything fails to
agree, binding falls back to `data_ptr`, which is slower and always right.

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

_TYPE = 8  # ob_type in a CPython object header, checked by `_find_layout`
_WORD = 8
_INLINE_DIMS = 5  # sizes and strides of up to five dimensions lie inside the TensorImpl


@dataclass(frozen=True)
class TensorLayout:
    """Byte offsets: in the Python object, in the TensorImpl and in the StorageImpl."""

    impl: int  # in the Python object: TensorImpl*
    storage: int  # in the TensorImpl: StorageImpl*
    offset: int  # in the TensorImpl: storage offset, in elements
    dtype: int  # in the TensorImpl: 16-bit type index
    dim: int  # in the TensorImpl: number of dimensions; then five sizes, then five strides, or one pointer to both
    data: int  # in the StorageImpl: void*


def _words(address: int, count: int) -> list[int]:
    return list((ctypes.c_uint64 * count).from_address(address))


def _find_layout() -> TensorLayout | None:
    probe = torch.empty(4000)[1234:].as_strided((3, 5, 7), (71, 11, 1))
    if _words(id(probe) + _TYPE, 1)[0] != id(type(probe)):
        return None
    impl_address, storage_address = probe._cdata, probe.untyped_storage()._cdata
    data_address = probe.untyped_storage().data_ptr()
    impl_words, impl_size = _words(impl_address, 24), 24
    geometry = [3, 3, 5, 7]

    def unique(found: list[int]) -> int | None:
        return found[0] * _WORD if len(found) == 1 else None

    impl = unique([i for i, word in enumerate(_words(id(probe), 4)) if word == impl_address])
    storage = unique([i for i, word in enumerate(impl_words) if word == storage_address])
    offset = unique([i for i, word in enumerate(impl_words) if word == 1234])
    dim = unique([
        i for i in range(impl_size - 11)
        if impl_words[i : i + 4] == geometry and impl_words[i + 6 : i + 9] == [71, 11, 1]
    ])  # fmt: skip
    # The address also appears as the allocation's context; the first is the data pointer.
    data = next((i * _WORD for i, word in enumerate(_words(storage_address, 5)) if word == data_address), None)
    if impl is None or storage is None or offset is None or dim is None or data is None:
        return None
    # The type index: the one 16-bit field that differs between dtypes and agrees within one.
    kinds = [torch.float32, torch.int64, torch.bfloat16, torch.bool]
    samples = [[torch.empty((2, 3), dtype=kind) for _ in range(2)] for kind in kinds]
    fields = []
    for at in range(offset + 2 * _WORD, offset + 4 * _WORD, 2):
        read = [[ctypes.c_uint16.from_address(t._cdata + at).value for t in pair] for pair in samples]
        if all(a == b for a, b in read) and len({a for a, _ in read}) == len(kinds):
            fields.append(at)
    return TensorLayout(impl, storage, offset, fields[0], dim, data) if fields else None


def _read(layout: TensorLayout, tensor: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Data pointer, sizes and strides as the native code reads them."""
    impl = _words(id(tensor) + layout.impl, 1)[0]
    storage, offset = _words(impl + layout.storage, 1)[0], _words(impl + layout.offset, 1)[0]
    data = _words(storage + layout.data, 1)[0]
    dim = _words(impl + layout.dim, 1)[0]
    base, stride = impl + layout.dim + _WORD, _INLINE_DIMS
    if dim > _INLINE_DIMS:
        base, stride = _words(base, 1)[0], dim
    pointer = data + offset * tensor.itemsize if data else 0
    return pointer, tuple(_words(base, dim)), tuple(_words(base + stride * _WORD, dim))


def _agrees(layout: TensorLayout) -> bool:
    """Whether reading through the layout gives PyTorch's answers on tensors of every kind we bind."""
    base = torch.arange(5000, dtype=torch.float64)
    grown = torch.zeros(2, 2)
    grown.resize_(9, 11)
    swapped = torch.nn.Parameter(torch.randn(4, 4))
    swapped.data = torch.randn(4, 4)[1:]
    optimizer_state = torch.zeros(2, 3, 4, 5, 6, 7)
    samples = [
        base, base[17:], base[100:160].view(3, 4, 5), base[::2], torch.randn(3, 4).t(), grown, swapped, optimizer_state,
        torch.zeros(()), torch.zeros(0, 3), torch.nn.Parameter(torch.randn(7)), torch.randn(5, requires_grad=True) * 2,
        torch.ones(4, dtype=torch.bool), torch.ones(3, dtype=torch.bfloat16)[1:], torch.zeros(3, dtype=torch.complex64),
        torch.nn.Linear(3, 3).weight, torch.zeros(1, 1, 1, 1, 1), torch.zeros(1, 2, 1, 3, 1, 2, 1),
    ]  # fmt: skip
    return all(_read(layout, t) == (t.data_ptr(), tuple(t.shape), t.stride()) for t in samples)


@cache
def tensor_layout() -> TensorLayout | None:
    """Where PyTorch keeps a tensor's pointer and geometry; None where that could not be established."""
    with torch.device("cpu"):  # whatever the user's default device
        layout = _find_layout()
        return layout if layout is not None and _agrees(layout) else None


def _address(name: str) -> int:
    """Of a function of Python's C interface."""
    return ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value or 0


# Kinds of word in a tensor's record, in order: Python class, dtype index, element size, dim, sizes, strides.
_RECORD_HEAD = 4


def _native_text(layout: TensorLayout) -> str:
    """The native part.

    `nova_bind(sequence, getter, count, first, binder)`: -1 - i where tensor i's metadata differs, else how many moved.
    `nova_run(inputs, getter, count, outputs, fresh, binder, step)`: binds both, then runs the step without the GIL;
    -1 where something must be bound in Python first, else what the step returned.
    """
    return f"""
%binder = type {{ ptr, ptr, ptr, ptr, ptr, ptr }} ; records, record starts, bases, relocation starts, relocations, table

define i64 @nova_bind(ptr %sequence, ptr %getter, i64 %count, i64 %first, ptr %binder) {{
entry:
  %f0 = load ptr, ptr %binder
  %p1 = getelementptr %binder, ptr %binder, i32 0, i32 1
  %starts = load ptr, ptr %p1
  %p2 = getelementptr %binder, ptr %binder, i32 0, i32 2
  %bases = load ptr, ptr %p2
  %p3 = getelementptr %binder, ptr %binder, i32 0, i32 3
  %relocation_starts = load ptr, ptr %p3
  %p4 = getelementptr %binder, ptr %binder, i32 0, i32 4
  %relocations = load ptr, ptr %p4
  %p5 = getelementptr %binder, ptr %binder, i32 0, i32 5
  %table = load ptr, ptr %p5
  %none = icmp eq i64 %count, 0
  br i1 %none, label %done, label %tensor

tensor:
  %i = phi i64 [0, %entry], [%i_next, %next]
  %moves = phi i64 [0, %entry], [%moves_next, %next]
  %object = call ptr %getter(ptr %sequence, i64 %i)
  %slot = add i64 %i, %first
  %start_p = getelementptr i64, ptr %starts, i64 %slot
  %start = load i64, ptr %start_p
  %record = getelementptr i64, ptr %f0, i64 %start
  %class_p = getelementptr i8, ptr %object, i64 {_TYPE}
  %class = load i64, ptr %class_p
  %want_class = load i64, ptr %record
  %same_class = icmp eq i64 %class, %want_class
  br i1 %same_class, label %geometry, label %differs

geometry:
  %impl_p = getelementptr i8, ptr %object, i64 {layout.impl}
  %impl = load ptr, ptr %impl_p
  %dtype_p = getelementptr i8, ptr %impl, i64 {layout.dtype}
  %dtype16 = load i16, ptr %dtype_p
  %dtype = zext i16 %dtype16 to i64
  %r1 = getelementptr i64, ptr %record, i64 1
  %want_dtype = load i64, ptr %r1
  %r2 = getelementptr i64, ptr %record, i64 2
  %itemsize = load i64, ptr %r2
  %r3 = getelementptr i64, ptr %record, i64 3
  %want_dim = load i64, ptr %r3
  %dim_p = getelementptr i8, ptr %impl, i64 {layout.dim}
  %dim = load i64, ptr %dim_p
  %same_dtype = icmp eq i64 %dtype, %want_dtype
  %same_dim = icmp eq i64 %dim, %want_dim
  %same_head = and i1 %same_dtype, %same_dim
  br i1 %same_head, label %place, label %differs

place:
  %inline = getelementptr i8, ptr %dim_p, i64 {_WORD}
  %is_inline = icmp ule i64 %dim, {_INLINE_DIMS}
  br i1 %is_inline, label %compare, label %outside

outside:
  %heap = load ptr, ptr %inline
  br label %compare

compare:
  %sizes = phi ptr [%inline, %place], [%heap, %outside]
  %stride_at = phi i64 [{_INLINE_DIMS}, %place], [%dim, %outside]
  %strides = getelementptr i64, ptr %sizes, i64 %stride_at
  %want_sizes = getelementptr i64, ptr %record, i64 {_RECORD_HEAD}
  %want_strides = getelementptr i64, ptr %want_sizes, i64 %dim
  %scalar = icmp eq i64 %dim, 0
  br i1 %scalar, label %pointer, label %axis

axis:
  %d = phi i64 [0, %compare], [%d_next, %axis_next]
  %size_p = getelementptr i64, ptr %sizes, i64 %d
  %size = load i64, ptr %size_p
  %want_size_p = getelementptr i64, ptr %want_sizes, i64 %d
  %want_size = load i64, ptr %want_size_p
  %stride_p = getelementptr i64, ptr %strides, i64 %d
  %stride = load i64, ptr %stride_p
  %want_stride_p = getelementptr i64, ptr %want_strides, i64 %d
  %want_stride = load i64, ptr %want_stride_p
  %same_size = icmp eq i64 %size, %want_size
  %same_stride = icmp eq i64 %stride, %want_stride
  %same_axis = and i1 %same_size, %same_stride
  br i1 %same_axis, label %axis_next, label %differs

axis_next:
  %d_next = add i64 %d, 1
  %more_axes = icmp ult i64 %d_next, %dim
  br i1 %more_axes, label %axis, label %pointer

pointer:
  %storage_p = getelementptr i8, ptr %impl, i64 {layout.storage}
  %storage = load ptr, ptr %storage_p
  %data_p = getelementptr i8, ptr %storage, i64 {layout.data}
  %data = load i64, ptr %data_p
  %offset_p = getelementptr i8, ptr %impl, i64 {layout.offset}
  %offset = load i64, ptr %offset_p
  %bytes = mul i64 %offset, %itemsize
  %moved_to = add i64 %data, %bytes
  %null = icmp eq i64 %data, 0
  %now = select i1 %null, i64 0, i64 %moved_to
  %base_p = getelementptr i64, ptr %bases, i64 %slot
  %before = load i64, ptr %base_p
  %unchanged = icmp eq i64 %now, %before
  br i1 %unchanged, label %next, label %patch

patch:
  store i64 %now, ptr %base_p
  %low_p = getelementptr i64, ptr %relocation_starts, i64 %slot
  %low = load i64, ptr %low_p
  %high_p = getelementptr i64, ptr %low_p, i64 1
  %high = load i64, ptr %high_p
  %unused = icmp eq i64 %low, %high
  br i1 %unused, label %patched, label %relocate

relocate:
  %r = phi i64 [%low, %patch], [%r_next, %relocate]
  %entry_p = getelementptr {{i64, i64}}, ptr %relocations, i64 %r
  %where = load i64, ptr %entry_p
  %addend_p = getelementptr i64, ptr %entry_p, i64 1
  %addend = load i64, ptr %addend_p
  %value = add i64 %now, %addend
  %where_p = getelementptr i64, ptr %table, i64 %where
  store i64 %value, ptr %where_p
  %r_next = add i64 %r, 1
  %more = icmp ult i64 %r_next, %high
  br i1 %more, label %relocate, label %patched

patched:
  %moves_one = add i64 %moves, 1
  br label %next

next:
  %moves_next = phi i64 [%moves, %pointer], [%moves_one, %patched]
  %i_next = add i64 %i, 1
  %again = icmp ult i64 %i_next, %count
  br i1 %again, label %tensor, label %done

differs:
  %which = xor i64 %i, -1 ; -1 - i
  ret i64 %which

done:
  %result = phi i64 [0, %entry], [%moves_next, %next]
  ret i64 %result
}}

declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)

define i64 @nova_run(ptr %inputs, ptr %getter, i64 %count, ptr %outputs, i64 %fresh, ptr %binder, ptr %step) {{
entry:
  %a = call i64 @nova_bind(ptr %inputs, ptr %getter, i64 %count, i64 0, ptr %binder)
  %a_bad = icmp slt i64 %a, 0
  br i1 %a_bad, label %rebind, label %bind_outputs
bind_outputs:
  %b = call i64 @nova_bind(ptr %outputs, ptr @PyList_GetItem, i64 %fresh, i64 %count, ptr %binder)
  %b_bad = icmp slt i64 %b, 0
  br i1 %b_bad, label %rebind, label %go
rebind:
  ret i64 -1
go:
  %table_p = getelementptr %binder, ptr %binder, i32 0, i32 5
  %table = load ptr, ptr %table_p
  %thread = call ptr @PyEval_SaveThread()
  %stopped = call i64 %step(ptr %table)
  call void @PyEval_RestoreThread(ptr %thread)
  ret i64 %stopped
}}

declare ptr @PyList_GetItem(ptr, i64)
"""


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
    library = orc.load(orc.compile_ir(_native_text(layout)), ["nova_bind", "nova_run"], imports)
    word, pointer, thing = ctypes.c_int64, ctypes.c_void_p, ctypes.py_object
    # PYFUNCTYPE: called with the GIL held, since it reads Python objects.
    bind = ctypes.PYFUNCTYPE(word, thing, pointer, word, word, pointer)(library["nova_bind"])
    run = ctypes.PYFUNCTYPE(word, thing, pointer, word, thing, word, pointer, pointer)(library["nova_run"])
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
        self._binder = (ctypes.c_void_p * len(arrays))(*[ctypes.addressof(a) for a in arrays])
        self._binder_address = ctypes.addressof(self._binder)

    def base(self, index: int) -> int:
        return self._bases[index]

    def set_base(self, index: int, address: int) -> None:
        if self._bases[index] != address:
            self._bases[index] = address
            if self._relocations[index]:
                slots, offsets = np.array(self._relocations[index], dtype=np.int64).T
                np.frombuffer(self.table, dtype=np.int64)[slots] = offsets + address

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

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        outputs: list[torch.Tensor],
        expected: tuple[Sequence[Expected], Sequence[Expected]],
        step: int,
        call: Callable[[int], int],
    ) -> int:
        """Binds inputs to the first bases and outputs to the next, then runs the step; `step` is its address and
        `call` the same as a Python callable. Returns what it returns."""
        count = len(inputs)
        if self._native is not None:
            getter = _GETTERS.get(type(inputs))
            if getter is None:
                inputs, getter = tuple(inputs), _GETTERS[tuple]
            stopped = self._native.run(inputs, getter, count, outputs, len(outputs), self._binder_address, step)
            if stopped >= 0:
                return stopped
        self.bind(inputs, 0, expected[0])
        self.bind(outputs, count, expected[1])
        return call(self.address)

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

    def check(self, tensor: torch.Tensor) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"input {self.name} of the compiled step must be a tensor, not {type(tensor).__name__}")
        if tensor.dtype != self.dtype or tuple(tensor.shape) != self.shape or tensor.device.type != "cpu":
            raise ValueError(
                f"input {self.name} of the compiled step is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; "
                f"the step was compiled for {self.dtype} {list(self.shape)} on cpu"
            )
        if tensor.is_conj() or tensor.is_neg():
            raise ValueError(f"input {self.name} of the compiled step is a lazy conjugate or negative")
        dense = all(s == w or n <= 1 for n, s, w in zip(tensor.shape, tensor.stride(), self.strides, strict=True))
        if not dense and tensor.numel():
            raise ValueError(
                f"input {self.name} of the compiled step has strides {tensor.stride()}, want {self.strides}"
            )
