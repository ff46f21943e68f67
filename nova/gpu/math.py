"""Level 5 to level 5: math operations without an NVPTX instruction of their own become arithmetic.

    %y = math.exp %x : vector<8xf32>     ->     fma, fma, nvvm.ex2, shli, mulf, ...

f32 has its own versions (nova/gpu/math_f32.py), f64 too (math_f64.py); bf16 and f16 are computed in f32 and rounded
once. sqrt, floor, ceil, trunc, roundeven, absf, fma and copysign stay: they have instructions. `arith.divf` stays the
exact division; with `fastmath<arcp>` it becomes a reciprocal and a correction (1 ulp, for divisors of ordinary size).
`arith.remf` becomes exact: LLVM's own expansion loses the remainder of large quotients. `math.exp2` with
`fastmath<afn>` is one instruction, for which results below 2^-126 are zero. Integer powers and divisions that round
down or up are in nova/gpu/math_int.py. Where nothing but 16 bits of a result is kept, math_narrow.py has cheaper ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from nova import mlir
from nova.gpu import math_f32, math_f64, math_int, math_narrow
from nova.gpu.remainder import remainder
from nova.lowering import lanes as ln
from nova.lowering.lanes import Value
from nova.mlir import ir

NAMES = sorted(set(math_f32.FUNCTIONS) | set(math_f64.FUNCTIONS) | {"arith.remf"} | set(math_int.FUNCTIONS))
_PREFIXES = ("math.", "arith.divf", "arith.remf", *math_int.FUNCTIONS)
_PATTERN = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in NAMES) + r"|fastmath<[^>]*\barcp\b")


def needs_expansion(text: str) -> bool:
    """Whether a module's text holds an operation that `expand` rewrites."""
    return _PATTERN.search(text) is not None


def expand(module: ir.Module) -> None:
    """Rewrites the operations in place. The module's context and a location must be current."""

    def expanded(op: ir.Operation) -> Value | None:
        function = _expansion(op)
        return None if function is None else function(*op.operands)

    mlir.replace_each(module, _PREFIXES, expanded)


def _expansion(op: ir.Operation) -> Callable[..., Value] | None:
    """What replaces an operation, on its own operands; None if it stays."""
    name, element = op.name, ln.element_of(op.results[0].type)
    if name in math_int.FUNCTIONS:
        return math_int.FUNCTIONS[name]
    if name == "arith.divf":
        return math_f32.divide if element == ln.f32() and _allows(op, "arcp") else None
    if name == "math.exp2" and element == ln.f32() and _allows(op, "afn"):
        return math_f32.ex2
    if name == "arith.remf":
        return _in_f32(remainder, element) if ln.is_narrow_float(element) else remainder
    if element == ln.f64():
        return math_f64.FUNCTIONS.get(name)
    function = math_f32.FUNCTIONS.get(name)
    if element == ln.f32():
        return math_narrow.choose(op) or function
    if function is None:
        return None
    return _in_f32(math_narrow.RELATIVE.get(name, function), element)


def _allows(op: ir.Operation, flag: str) -> bool:
    """Whether the operation's fast-math flags hold `flag`."""
    return (
        "fastmath" in op.attributes and re.search(rf"\b({flag}|fast)\b", str(op.attributes["fastmath"])[1:]) is not None
    )


def _in_f32(function: Callable[..., Value], element: ir.Type) -> Callable[..., Value]:
    def narrow(*operands: Value) -> Value:
        wide = function(*(ln.cast("extf", x, ln.f32()) for x in operands))
        return ln.cast("truncf", wide, element)

    return narrow
