"""Level 5 to PTX, by the NVPTX back end inside the MLIR bindings: no CUDA toolkit, 10 to 50 ms a kernel.

    module {                                            .version 8.6
      llvm.func @k(%a: !llvm.ptr<1>) attributes {       .target sm_90a
          gpu.kernel, nvvm.kernel, ...} {         ->    .visible .entry k(.param .u64 .ptr .global k_param_0)
        ...arith, math, vector, scf, nvvm...            { ... }

Every function of the module comes out in one PTX text. Math operations without an instruction of their own are
expanded first (nova/gpu/math.py).
"""

from __future__ import annotations

import re

from nova import mlir
from nova.errors import CompileError
from nova.mlir import ir

# PTX ISA by architecture: what has the instructions used here, and is old enough for the drivers in the field
# (12.6 understands 8.5 and 8.6 is 12.7).
PTX_VERSIONS = {"sm_80": 80, "sm_86": 80, "sm_89": 80, "sm_90a": 86}

LOWERING = (
    "convert-scf-to-cf,convert-vector-to-llvm,convert-math-to-llvm,"
    "convert-arith-to-llvm,convert-nvvm-to-llvm,convert-ub-to-llvm,convert-cf-to-llvm,reconcile-unrealized-casts"
)
"""Level 5 to the `llvm` dialect."""


def to_ptx(module: ir.Module | str, arch: str, opt_level: int = 3) -> str:
    """PTX of every function of a level-5 module, for `arch` such as "sm_90a". The module itself is left as it was.

    Raises CompileError with MLIR's or LLVM's message.
    """
    if arch not in PTX_VERSIONS:
        raise CompileError(f"to-ptx: expected an architecture of {', '.join(PTX_VERSIONS)}, got {arch!r}")
    text = module if isinstance(module, str) else str(module)
    with mlir.context(), ir.Location.unknown():
        try:
            wrapped = _wrap(ir.Module.parse(text), arch, opt_level)
            _expand_math(wrapped, text)
            mlir.run_passes(wrapped, LOWERING, verify=False)
            mlir.run_passes(wrapped, "gpu-module-to-binary{format=isa}", verify=False)
        except (ir.MLIRError, ValueError, RuntimeError) as error:
            raise CompileError(f"to-ptx for {arch}: {error}") from error
        return _assembly(wrapped)


def entry_names(ptx: str) -> list[str]:
    """The kernels of a PTX text, in order."""
    return re.findall(r"^\.visible \.entry (\w+)\(", ptx, re.MULTILINE)


def _wrap(module: ir.Module, arch: str, opt_level: int) -> ir.Module:
    """The operations of `module` inside a gpu.module whose target is `arch`."""
    target = f'#nvvm.target<O={opt_level}, chip="{arch}", features="+ptx{PTX_VERSIONS[arch]}">'
    outer = ir.Module.parse(f"module {{ gpu.module @nova [{target}] {{}} }}")
    body = outer.body.operations[0].regions[0].blocks[0]
    for op in list(module.body.operations):
        body.append(op)
    return outer


def _expand_math(module: ir.Module, text: str) -> None:
    """Expands math operations, if the text holds any that need it; then conversions to and from 16 bits go in pairs."""
    from nova.gpu import math, pack_halves, widen_halves

    if math.needs_expansion(text):
        math.expand(module)
    if "arith.truncf" in text:
        pack_halves.run(module)
    if "arith.extf" in text:
        widen_halves.run(module)


def _assembly(module: ir.Module) -> str:
    """The PTX that the gpu.binary of `module` holds."""
    (binary,) = module.body.operations
    return mlir.gpu.ObjectAttr(binary.attributes["objects"][0]).object.decode()
