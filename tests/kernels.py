"""Runs one level-2 kernel, or one hand-made module, on NumPy arrays or tensors: for the numerics tests.

Outputs and workspace start out poisoned (NaN, or a large odd integer), so an element that a kernel forgets to write,
or scratch that it reads before writing, shows.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Sequence
from pathlib import Path

import llvmlite.binding as llvm
import torch

from nova import mlir
from nova.cpu import to_llvm
from nova.cpu.compile import KernelObject, compile_kernel, find_kernel
from nova.cpu.parallel import RUNTIME_SYMBOLS
from nova.mlir import ir
from nova.schedule import target as targets

DTYPES = {
    "f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16, "i64": torch.int64,
    "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "ui8": torch.uint8, "i1": torch.bool,
    "complex<f32>": torch.complex64,
}  # fmt: skip


@functools.cache
def _gomp() -> ctypes.CDLL:
    """The libgomp that PyTorch loaded, so that kernels share its thread pool."""
    paths = re.findall(r"(/\S*libgomp[^\s/]*\.so\S*)", Path("/proc/self/maps").read_text())
    return ctypes.CDLL(paths[0])


@functools.cache
def _jit() -> llvm.LLJIT:
    to_llvm._initialize()
    return llvm.create_lljit_compiler(to_llvm.target_machine("", ""))


class Loaded:
    """A kernel in this process. `call(inputs, outputs)` runs it on tensors in place."""

    _count = 0

    def __init__(self, kernel: KernelObject):
        self.kernel = kernel
        Loaded._count += 1
        builder = llvm.JITLibraryBuilder().add_object_img(kernel.object_code)
        for symbol in RUNTIME_SYMBOLS:
            builder.import_symbol(symbol, ctypes.cast(getattr(_gomp(), symbol), ctypes.c_void_p).value)
        builder.add_current_process()
        builder.export_symbol(kernel.entry)
        self.library = builder.link(_jit(), f"kernel_{Loaded._count}")
        self.function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.library[kernel.entry])
        self.workspace = torch.full((kernel.workspace + 64,), 0xFF, dtype=torch.uint8)  # 0xFF.. is NaN in every float

    def pointers(self, tensors: Sequence[torch.Tensor]) -> ctypes.Array:
        base = self.workspace.data_ptr()
        return (ctypes.c_void_p * (len(tensors) + 1))(*[t.data_ptr() for t in tensors], (base + 63) // 64 * 64)

    def call(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        pointers = self.pointers([*inputs, *outputs])  # named: the call must not outlive it
        self.function(ctypes.addressof(pointers))


def poisoned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full(tuple(shape), float("nan"), dtype=dtype)
    return torch.full(tuple(shape), 1 if dtype == torch.bool else 85, dtype=dtype)


def output_types(mlir_text: str) -> list[tuple[list[int], torch.dtype]]:
    """Shape and dtype of each result of the kernel in `mlir_text`."""
    module = mlir.parse(mlir_text)
    with mlir.context():
        results = ir.FunctionType(ir.TypeAttr(find_kernel(module).attributes["function_type"]).value).results
        tensors = [ir.RankedTensorType(r) for r in results]
        return [(list(t.shape), DTYPES[str(t.element_type)]) for t in tensors]


def load_kernel(mlir_text: str, target: targets.CpuTarget | None = None) -> Loaded:
    return Loaded(compile_kernel(mlir_text, target or targets.host()))


def run_kernel(
    mlir_text: str, inputs: Sequence[object], target: targets.CpuTarget | None = None, threads: int | None = None
) -> list[torch.Tensor]:
    """Compiles the one kernel in `mlir_text`, runs it on `inputs` (arrays or tensors), returns its results."""
    tensors = [torch.as_tensor(x).contiguous() for x in inputs]
    outputs = [poisoned(shape, dtype) for shape, dtype in output_types(mlir_text)]
    loaded = load_kernel(mlir_text, target)
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        loaded.call(tensors, outputs)
    finally:
        torch.set_num_threads(before)
    return outputs


def load_module(module: ir.Module, entry: str, workspace: int = 0, target: targets.CpuTarget | None = None) -> Loaded:
    """The same for a module already in memref/vector/scf: what an emitter's own unit tests use."""
    llvm_ir = to_llvm.lower_to_llvm_ir(module)
    code = to_llvm.compile_object(llvm_ir, target or targets.host())
    return Loaded(KernelObject(entry, entry, code, workspace, llvm_ir))
