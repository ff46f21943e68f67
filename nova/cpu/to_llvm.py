"""From MLIR in scf/vector/arith/math/memref/llvm to an object file for one CPU.

    scf.for, vector.fma, memref.load   ->   llvm dialect   ->   LLVM IR text   ->   ELF object

No LLVM IR optimisation pipeline runs: the emitters write what the pipeline would find (unrolled, vectorised, hoisted),
and on register-tiled kernels it costs three times the rest of the compile and buys nothing. Instruction selection and
register allocation run at -O2.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import llvmlite.binding as llvm

from nova import mlir
from nova.errors import CompileError

if TYPE_CHECKING:
    from nova.mlir import ir
    from nova.schedule.target import CpuTarget

# Vector conversions come before the catch-all `convert-to-llvm`; math goes to LLVM intrinsics where there is one
# (fma, sqrt, floor, ...) and to libm only for what is left, since libm first would turn every fma into a call.
PASSES = (
    "convert-scf-to-cf",
    "convert-vector-to-llvm",
    "convert-math-to-llvm",
    "convert-math-to-libm",
    "convert-to-llvm",
    "reconcile-unrealized-casts",
)
# Passes that only some emitters need, by a marker in the operations they act on.
PASSES_FOR = {"memref.subview": "expand-strided-metadata", "affine.": "lower-affine"}


@functools.cache
def _pass_manager(extra: tuple[str, ...]) -> mlir.passmanager.PassManager:
    with mlir.context():
        manager = mlir.passmanager.PassManager.parse(f"builtin.module({','.join([*extra, *PASSES])})")
        manager.enable_verifier(False)  # half of the passes' time; LLVM verifies what comes out
    return manager


def lower_to_llvm_ir(module: ir.Module) -> str:
    """Lowers `module` in place to the llvm dialect and returns LLVM IR text."""
    names = _operation_names(module)
    extra = tuple(p for marker, p in PASSES_FOR.items() if any(name.startswith(marker) for name in names))
    with mlir.context():
        _pass_manager(extra).run(module.operation)
    return mlir.to_llvm_ir(module)


def _operation_names(module: ir.Module) -> set[str]:
    names: set[str] = set()

    def visit(op: ir.Operation) -> ir.WalkResult:
        names.add(op.name)
        return mlir.ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return names


@functools.cache
def _initialize() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    # Loop strength reduction is two thirds of the time LLVM spends on an unrolled register tile, and x86's addressing
    # modes leave it nothing to win there: measured equal with and without.
    llvm.set_option("nova", "-disable-lsr")


@functools.cache
def target_machine(cpu: str, features: str, opt: int = 2) -> llvm.TargetMachine:
    """The process-wide target machine; position-independent so that an object can be cached and linked anywhere."""
    _initialize()
    triple = llvm.Target.from_triple(llvm.get_process_triple())
    return triple.create_target_machine(cpu=cpu, features=features, opt=opt, reloc="pic", codemodel="small")


def compile_object(llvm_ir: str, target: CpuTarget) -> bytes:
    """Object code of an LLVM IR module."""
    machine = target_machine(target.llvm_cpu, target.llvm_features)
    try:
        module = llvm.parse_assembly(llvm_ir)
    except RuntimeError as error:
        raise CompileError(f"LLVM refused the module: {error}") from error
    module.triple = machine.triple
    module.data_layout = str(machine.target_data)
    return machine.emit_object(module)
