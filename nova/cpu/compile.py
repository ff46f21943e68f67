"""One kernel from level 2 to object code: parse, lower by kind, convert to LLVM, emit.

    func.func private @k(...) attributes {nova.kernel = "contraction"}   ->   ELF object with entry `void k(void **)`

Pure and self-contained (text in, bytes out), because it runs in worker processes and its result is cached on disk.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nova import mlir
from nova.cpu import to_llvm
from nova.errors import CompileError
from nova.mlir import ir

if TYPE_CHECKING:
    from nova.schedule.target import CpuTarget

# kind (the func's `nova.kernel`) -> module with `lower(func_op, target) -> (ir.Module, workspace bytes)`
EMITTERS = {
    "loops": "nova.cpu.loops",
    "contraction": "nova.cpu.contraction",
    "attention_forward": "nova.cpu.attention",
    "attention_backward": "nova.cpu.attention",
    "scatter": "nova.cpu.scatter",
    "scan": "nova.cpu.scan",
    "multi_tensor": "nova.cpu.multi_tensor",
}


@dataclass(frozen=True)
class KernelObject:
    """A compiled kernel: what the JIT links, and what its caller must provide."""

    name: str
    entry: str  # symbol of `void entry(void **args)`
    object_code: bytes
    workspace: int  # bytes, 64-byte aligned, passed after the results; 0 = may be null
    llvm_ir: str = ""


def find_kernel(module: ir.Module) -> ir.OpView:
    """The one function with a body that carries `nova.kernel`, in the module or in its nested `@kernels`."""
    functions = list(module.body)
    for op in module.body:
        if op.operation.name == "builtin.module":
            functions += op.operation.regions[0].blocks[0]
    kernels = [op for op in functions if "nova.kernel" in op.attributes and len(op.operation.regions[0].blocks)]
    if len(kernels) != 1:
        raise CompileError(f"expected one function with nova.kernel, got {len(kernels)}")
    return kernels[0]


def lower_kernel(module: ir.Module, target: CpuTarget) -> tuple[ir.Module, int]:
    """The kernel as loops over memrefs and vectors, and its workspace in bytes."""
    kernel = find_kernel(module)
    kind = ir.StringAttr(kernel.attributes["nova.kernel"]).value
    if kind not in EMITTERS:
        raise CompileError(f"kernel @{kernel.name.value}: unknown kind {kind!r}; known: {', '.join(EMITTERS)}")
    return importlib.import_module(EMITTERS[kind]).lower(kernel, target)


def compile_kernel(mlir_text: str, target: CpuTarget) -> KernelObject:
    """Compiles the one kernel in `mlir_text`."""
    module = mlir.parse(mlir_text)
    with mlir.context(), ir.Location.unknown(), mlir.no_collection():
        name = ir.StringAttr(find_kernel(module).attributes["sym_name"]).value
        lowered, workspace = lower_kernel(module, target)
    llvm_ir = to_llvm.lower_to_llvm_ir(lowered)
    return KernelObject(name, name, to_llvm.compile_object(llvm_ir, target), workspace, llvm_ir)
