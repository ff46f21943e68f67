"""Where PyTorch keeps a tensor's pointer and geometry, found at run time.

It is not an interface, so nothing is assumed: the offsets are found by looking for known values (`Tensor._cdata` and
the storage's own `_cdata` are addresses; odd sizes and offsets are recognisable) and then checked against PyTorch's
answers on tensors of every kind that a step binds. Where anything fails to agree there is no layout, and callers
use `data_ptr`, which is slower and always right.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch

TYPE = 8  # ob_type in a CPython object header, checked by `_find_layout`
WORD = 8
INLINE_DIMS = 5  # sizes and strides of up to five dimensions lie inside the TensorImpl


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
    if _words(id(probe) + TYPE, 1)[0] != id(type(probe)):
        return None
    impl_address, storage_address = probe._cdata, probe.untyped_storage()._cdata
    data_address = probe.untyped_storage().data_ptr()
    impl_words, impl_size = _words(impl_address, 24), 24
    geometry = [3, 3, 5, 7]

    def unique(found: list[int]) -> int | None:
        return found[0] * WORD if len(found) == 1 else None

    impl = unique([i for i, word in enumerate(_words(id(probe), 4)) if word == impl_address])
    storage = unique([i for i, word in enumerate(impl_words) if word == storage_address])
    offset = unique([i for i, word in enumerate(impl_words) if word == 1234])
    dim = unique([
        i for i in range(impl_size - 11)
        if impl_words[i : i + 4] == geometry and impl_words[i + 6 : i + 9] == [71, 11, 1]
    ])  # fmt: skip
    # The address also appears as the allocation's context; the first is the data pointer.
    data = next((i * WORD for i, word in enumerate(_words(storage_address, 5)) if word == data_address), None)
    if impl is None or storage is None or offset is None or dim is None or data is None:
        return None
    # The type index: the one 16-bit field that differs between dtypes and agrees within one.
    kinds = [torch.float32, torch.int64, torch.bfloat16, torch.bool]
    samples = [[torch.empty((2, 3), dtype=kind) for _ in range(2)] for kind in kinds]
    fields = []
    for at in range(offset + 2 * WORD, offset + 4 * WORD, 2):
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
    base, stride = impl + layout.dim + WORD, INLINE_DIMS
    if dim > INLINE_DIMS:
        base, stride = _words(base, 1)[0], dim
    pointer = data + offset * tensor.itemsize if data else 0
    return pointer, tuple(_words(base, dim)), tuple(_words(base + stride * WORD, dim))


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
    # Whatever the user's default device and grad mode are, and without touching the random generator.
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.inference_mode(False):
        layout = _find_layout()
        return layout if layout is not None and _agrees(layout) else None
