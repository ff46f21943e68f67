"""Element types by their short names: size in memory, PyTorch's name, MLIR's spelling."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# name: (bytes an element, torch attribute, MLIR element type). A bool is a byte 0/1 in memory.
TABLE: dict[str, tuple[int, str, str]] = {
    "f64": (8, "float64", "f64"),
    "f32": (4, "float32", "f32"),
    "bf16": (2, "bfloat16", "bf16"),
    "f16": (2, "float16", "f16"),
    "i64": (8, "int64", "i64"),
    "i32": (4, "int32", "i32"),
    "i16": (2, "int16", "i16"),
    "i8": (1, "int8", "i8"),
    "u8": (1, "uint8", "ui8"),
    "bool": (1, "bool", "i1"),
    "c64": (8, "complex64", "complex<f32>"),
    "c128": (16, "complex128", "complex<f64>"),
}
FROM_MLIR = {mlir: name for name, (_, _, mlir) in TABLE.items()}


def itemsize(name: str) -> int:
    return TABLE[name][0]


def torch_dtype(name: str) -> torch.dtype:
    import torch

    return getattr(torch, TABLE[name][1])


def numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides as PyTorch counts them (a zero size counts as one)."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
