"""Level-5 kernels of one operation each, and their run on the simulator."""

from __future__ import annotations

import numpy as np

from nova import mlir
from nova.gpu import math as gpu_math
from nova.gpu.simulate import run
from nova.mlir import ir

THREADS = 256
ELEMENTS = {np.dtype(np.float32): "f32", np.dtype(np.float64): "f64", np.dtype(np.int32): "i32"}
WIDTHS = {"f32": 4, "f64": 8, "i32": 4, "bf16": 2, "f16": 2}


def module(op: str, element: str, lanes: int, operands: int, attributes: str = "") -> str:
    """`op` on vectors of `lanes` elements a thread (0: scalars), all of them loaded and the result stored."""
    type_ = f"vector<{lanes}x{element}>" if lanes else element
    array = f"!llvm.array<{max(lanes, 1)} x {element}>"
    arguments = ", ".join(f"%a{k}: !llvm.ptr<1>" for k in range(operands))
    align = f"{{alignment = {WIDTHS[element]} : i64}}"
    loads = "\n".join(
        f"""    %p{k} = llvm.getelementptr %a{k}[%i] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, {array}
    %x{k} = llvm.load %p{k} {align} : !llvm.ptr<1> -> {type_}"""
        for k in range(operands)
    )
    names = ", ".join(f"%x{k}" for k in range(operands))
    return f"""
module {{
  llvm.func @k({arguments}, %out: !llvm.ptr<1>) attributes {{gpu.kernel, nvvm.kernel, nvvm.reqntid = array<i32: {THREADS}>}} {{
    %tid = nvvm.read.ptx.sreg.tid.x : i32
    %block = nvvm.read.ptx.sreg.ctaid.x : i32
    %threads = arith.constant {THREADS} : i32
    %first = arith.muli %block, %threads : i32
    %i = arith.addi %first, %tid : i32
{loads}
    %y = {op} {names} {attributes}: {type_}
    %q = llvm.getelementptr %out[%i] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, {array}
    llvm.store %y, %q {align} : {type_}, !llvm.ptr<1>
    llvm.return
  }}
}}"""


def expanded(text: str) -> str:
    """The module after math's expansion."""
    with mlir.context(), ir.Location.unknown():
        parsed = ir.Module.parse(text)
        gpu_math.expand(parsed)
        assert parsed.operation.verify()
        return str(parsed)


def evaluate(op: str, *operands: np.ndarray, lanes: int = 4, attributes: str = "") -> np.ndarray:
    """`op` of f32 or f64 arrays, expanded and simulated."""
    element = ELEMENTS[operands[0].dtype]
    size = len(operands[0])
    blocks = -(-size // (THREADS * max(lanes, 1)))
    padded = [np.resize(x, blocks * THREADS * max(lanes, 1)).copy() for x in operands]
    out = np.zeros_like(padded[0])
    text = expanded(module(op, element, lanes, len(operands), attributes))
    run(text, [*padded, out], grid=(blocks, 1, 1))
    return out[:size]


def ulps(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Distance from the (wider) true values in units of the last place; infinite where NaN or infinity disagree."""
    with np.errstate(all="ignore"):
        rounded = want.astype(got.dtype)
        unit = np.spacing(np.maximum(np.abs(rounded), np.finfo(got.dtype).tiny)).astype(np.longdouble)
        distance = np.abs(got.astype(np.longdouble) - want) / unit
    same = (got == rounded) | (np.isnan(got) & np.isnan(want))
    distance = np.where(same & ~np.isfinite(rounded), 0, distance)
    return np.where(np.isnan(distance), np.inf, distance)
