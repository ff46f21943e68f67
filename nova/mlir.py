"""The only door to the MLIR bindings.

The bindings come from the `numba-cuda-mlir` wheel, whose top-level package wants CUDA at import; an empty
package with the same path takes its place so that the bindings load on any machine. A dialect defined in
Python binds to one context a process, so there is exactly one context here, and everything uses it.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager

if "numba_cuda_mlir" not in sys.modules:
    _spec = importlib.util.find_spec("numba_cuda_mlir")
    if _spec is None or _spec.submodule_search_locations is None:
        raise ImportError("Nova needs the MLIR bindings: pip install numba-cuda-mlir")
    _package = types.ModuleType("numba_cuda_mlir")
    _package.__path__ = list(_spec.submodule_search_locations)
    sys.modules["numba_cuda_mlir"] = _package

from numba_cuda_mlir._mlir import ir, passmanager
from numba_cuda_mlir._mlir.dialects import (
    arith,
    builtin,
    ext,
    func,
    gpu,
    irdl,
    linalg,
    llvm,
    math,
    memref,
    scf,
    tensor,
    vector,
)

__all__ = [
    "arith", "builtin", "context", "ext", "func", "gpu", "int_array", "ir", "irdl", "leaves", "linalg", "llvm", "math",
    "memref", "no_collection", "parse", "passmanager", "run_passes", "scf", "stand_in_for_bindings", "tensor",
    "to_llvm_ir", "vector",
]  # fmt: skip

_context: ir.Context | None = None


def stand_in_for_bindings(dialect: str) -> None:
    """Puts an empty module where the bindings look for generated op classes of `dialect`.

    They try to import `<their package>.dialects.<dialect>` on each look-up of an op class, 75 us an op while that
    fails; the empty module makes walks 40 times faster.
    """
    package = ir.__name__.rsplit(".", 1)[0]
    for prefix in {package, "numba_cuda_mlir._mlir"}:
        module = f"{prefix}.dialects.{dialect}"
        sys.modules.setdefault(module, types.ModuleType(module))


def context() -> ir.Context:
    """The process-wide context, with the `nova` and `nova_tile` dialects loaded. Enter it with `with context():`."""
    global _context
    if _context is None:
        _context = ir.Context()
        # Verifiers of `nova` ops are Python; MLIR's threads would wait for the lock that the parsing thread holds.
        _context.enable_multithreading(False)
        with _context, ir.Location.unknown():
            from nova.dialect import ops
            from nova.tile import dialect as tiles

            ops.load()
            tiles.load()
    return _context


@contextmanager
def no_collection() -> Iterator[None]:
    """Emitters make many small objects and no cycles; a collection walks PyTorch's whole heap for nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def int_array(attribute: ir.Attribute) -> list[int]:
    """Integers of `array<i64: ...>` or `[...]`."""
    if isinstance(attribute, ir.ArrayAttr):
        return [ir.IntegerAttr(item).value for item in attribute]
    return list(ir.DenseI64ArrayAttr(attribute))


def leaves(op: ir.Operation) -> Iterator[ir.Operation]:
    """The operations without regions below `op`, in order of the text."""
    for region in op.regions:
        for block in region:
            for child in block:
                if len(child.operation.regions):
                    yield from leaves(child.operation)
                else:
                    yield child.operation


def replace_each(
    module: ir.Module, names: str | tuple[str, ...], make: Callable[[ir.Operation], ir.Value | None]
) -> None:
    """Puts what `make` builds in the place of each operation without regions whose name begins with one of `names`;
    None leaves it. It builds in front of the operation; the module's context and a location must be current."""
    for op in [op for op in leaves(module.operation) if op.name.startswith(names)]:
        with ir.InsertionPoint(op):
            made = make(op)
        if made is not None:
            op.results[0].replace_all_uses_with(made)
            op.erase()


def parse(text: str) -> ir.Module:
    """Parses and verifies a module."""
    with context():
        return ir.Module.parse(text)


def run_passes(module: ir.Module, pipeline: str, verify: bool = True) -> ir.Module:
    """Runs a C++ pass pipeline, e.g. "convert-scf-to-cf,convert-to-llvm", in place.

    verify=False leaves out the verification after each pass, which costs more than a light pass on `nova` ops.
    """
    with context():
        manager = passmanager.PassManager.parse(f"builtin.module({pipeline})")
        manager.enable_verifier(verify)
        manager.run(module.operation)
    return module


def to_llvm_ir(module: ir.Module) -> str:
    """LLVM IR text of a module that is wholly in the `llvm` dialect."""
    with context():
        return llvm.translate_module_to_llvmir(module.operation)
