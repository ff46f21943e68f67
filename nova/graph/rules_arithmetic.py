"""Rules for arithmetic: only identities that hold for every bit pattern. x + 0.0 is not one (-0.0), x - 0.0 is."""

from __future__ import annotations

import math

import torch

from nova.dialect import reference
from nova.dialect.build import Value
from nova.dialect.elementwise import ELEMENTWISE_OPS
from nova.dialect.emit import TORCH_DTYPES
from nova.dialect.types import FLOATS, INTEGERS
from nova.graph.rewriting import Site, rule

# dtypes that hold every value of the key exactly
EXACT = {
    "bool": frozenset(TORCH_DTYPES),
    "bf16": frozenset({"f32", "f64"}),
    "f16": frozenset({"f32", "f64"}),
    "f32": frozenset({"f64"}),
    "f64": frozenset(),
    "u8": frozenset({"i16", "i32", "i64", "f16", "bf16", "f32", "f64"}),
    "i8": frozenset({"i16", "i32", "i64", "f16", "bf16", "f32", "f64"}),
    "i16": frozenset({"i32", "i64", "f32", "f64"}),
    "i32": frozenset({"i64", "f64"}),
    "i64": frozenset(),
    "c64": frozenset({"c128"}),
    "c128": frozenset(),
}


@rule("cast")
def cast(it: Site) -> Value | None:
    """cast(cast(x)) = cast(x) where the inner cast loses nothing. A rounding cast always stays."""
    x, y = it.operand(0), it.result
    if x.dtype == y.dtype:
        return x
    inner = it.defined_by(0, "cast")
    if inner is None:
        return None
    source = inner.operand(0)
    return it.b.cast(source, y.dtype) if x.dtype in EXACT[source.dtype] else None


def _negative_zero(number: float) -> bool:
    return number == 0 and math.copysign(1.0, number) < 0


@rule("mul", "div", "add", "sub", "maximum", "minimum", "logical_and", "logical_or", "bitwise_or", "pow")
def neutral_element(it: Site) -> Value | None:
    """x*1, x/1, x-0, x+(-0.0), max(x, -inf), x and true, x or false, x**1; integers also x+0."""
    for position in (1, 0):
        number = it.number(position)
        if number is None:
            continue
        name, result = it.name, it.result
        other = it.operand(1 - position)
        if other.shape == result.shape and _is_neutral(name, number, result.dtype, right=position == 1):
            return other
    return None


def _is_neutral(name: str, number: float, dtype: str, right: bool) -> bool:
    if name == "mul":
        return number == 1
    if name in ("div", "pow"):
        return right and number == 1
    if name == "sub":
        return right and number == 0 and not _negative_zero(number)
    if name == "add":
        return number == 0 and (dtype in INTEGERS or _negative_zero(number))
    if name in ("maximum", "minimum"):
        return dtype in FLOATS and number == (-math.inf if name == "maximum" else math.inf)
    if name == "logical_and":
        return bool(number)
    return name in ("logical_or", "bitwise_or") and number == 0


@rule("div")
def division_by_power_of_two(it: Site) -> Value | None:
    """x / 2**k = x * 2**-k: both round the same real number once."""
    number, x = it.number(1), it.operand(0)
    if number is None or x.dtype not in ("f32", "f64") or not number or not math.isfinite(number):
        return None
    mantissa, exponent = math.frexp(number)
    if abs(mantissa) != 0.5 or abs(exponent) > 100:
        return None
    return it.b.create("mul", [x, it.b.constant(1.0 / number, x.dtype)], [(it.result.shape, x.dtype)])


@rule("neg", "logical_not", "bitwise_not")
def involution(it: Site) -> Value | None:
    """-(-x) = x, not not x = x."""
    inner = it.defined_by(0, it.name)
    return inner.operand(0) if inner else None


@rule("where")
def where(it: Site) -> Value | None:
    """where(c, x, x) = x; where(true, x, y) = x; where(false, x, y) = y."""
    _, a, b = it.operands()
    number = it.number(0)
    chosen = a if a.ir == b.ir or number == 1 else b if number == 0 else None
    return chosen if chosen is not None and chosen.shape == it.result.shape else None


@rule("reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_any", "reduce_all")
def reduce_over_ones(it: Site) -> Value | None:
    """Reducing dims of size 1 changes nothing but the shape. (PyTorch adds to 0: its sum of a single -0.0 is 0.0.)"""
    x, dims = it.operand(0), it.attr("dims")
    left = [d for d in dims if x.shape[d] != 1]
    if len(left) == len(dims):
        return None
    name = it.name.removeprefix("reduce_")
    return it.b.reshape(it.b.reduce(name, x, left, keepdim=it.attr("keepdim")), it.result.shape)


@rule(*sorted(ELEMENTWISE_OPS))
def fold_constants(it: Site) -> Value | None:
    """An op on repeated numbers is a repeated number, by the op's reference meaning."""
    found = [it.number(0)]
    if found[0] is None:
        return None
    found += [it.number(position) for position in range(1, it.count)]
    if None in found:
        return None
    numbers = [torch.tensor(n, dtype=TORCH_DTYPES[v.dtype]) for n, v in zip(found, it.operands(), strict=True)]
    reference.load()
    result = it.result
    folded = reference.evaluate(it.op, numbers).to(TORCH_DTYPES[result.dtype])
    return it.b.full(result.shape, folded.item(), result.dtype)
