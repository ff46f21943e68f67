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

# `convert-to-llvm` knows arith, math's LLVM intrinsics, func, memref, cf and vector's plain operations. The others run
# before it, only where an operation of theirs occurs. Math goes to intrinsics (fma, sqrt, floor, ...) before libm takes
# what is left, since libm first would turn every fma into a call.
REMEMBERING = "convert-math-to-funcs"  # keeps what it made in one module for the next, where that is gone
PASSES = ("convert-scf-to-cf", "convert-to-llvm", "reconcile-unrealized-casts")
PASSES_FOR = {
    "affine.": ("lower-affine",),
    "memref.subview": ("expand-strided-metadata",),
    "vector.": ("convert-vector-to-llvm",),
    "math.ipowi": (REMEMBERING,),  # integer powers become a loop in a function of the module
    "math.": ("convert-math-to-llvm", "convert-math-to-libm"),
}
PLAIN_VECTOR = ("load", "store", "broadcast", "fma", "shuffle", "extract", "insert", "from_elements")


def _pass_manager(extra: tuple[str, ...]) -> mlir.passmanager.PassManager:
    return _new_pass_manager(extra) if REMEMBERING in extra else _kept_pass_manager(extra)


@functools.cache
def _kept_pass_manager(extra: tuple[str, ...]) -> mlir.passmanager.PassManager:
    return _new_pass_manager(extra)


def _new_pass_manager(extra: tuple[str, ...]) -> mlir.passmanager.PassManager:
    with mlir.context():
        passes = [PASSES[0], *extra, *PASSES[1:]]
        manager = mlir.passmanager.PassManager.parse(f"builtin.module({','.join(passes)})")
        manager.enable_verifier(False)  # half of the passes' time; LLVM verifies what comes out
    return manager


def lower_to_llvm_ir(module: ir.Module) -> str:
    """Lowers `module` in place to the llvm dialect and returns LLVM IR text."""
    try:  # the one check of what an emitter made; translation aborts the process on some invalid IR
        module.operation.verify()
    except mlir.ir.MLIRError as error:
        raise CompileError(f"an emitter made IR that does not verify: {error}") from error
    names = _operation_names(module) - {f"vector.{op}" for op in PLAIN_VECTOR}
    wanted = [passes for marker, passes in PASSES_FOR.items() if any(name.startswith(marker) for name in names)]
    extra = tuple(dict.fromkeys(p for passes in wanted for p in passes))
    with mlir.context():
        try:
            _pass_manager(extra).run(module.operation)
        except mlir.ir.MLIRError as error:
            raise CompileError(f"a kernel does not lower to LLVM: {error}") from error
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
