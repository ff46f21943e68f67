"""Elementwise ops: arith and math on scalars, on tiles, and on tiles that stay scalars because all elements agree.

Arithmetic of bf16 and f16 is done in f32 and rounded after each op, as eager PyTorch does.
"""

from __future__ import annotations

from typing import Any

from nova.errors import CompileError
from nova.gpu.distribute import Distributor, Op, is_tile, lowers
from nova.mlir import ir
from nova.tile.text import Value

HALVES = frozenset({"bf16", "f16"})
DEFAULTS = frozenset({"#arith.fastmath<none>", "#arith.overflow<none>", "#arith.rounding_mode<to_nearest_even>"})
_MOVES = frozenset({"arith.select", "arith.bitcast", "arith.extf", "arith.truncf"})


@lowers("arith.constant")
def constant(it: Distributor, op: Op) -> None:
    attribute = op.attributes["value"]
    if isinstance(attribute, ir.DenseElementsAttr):
        if not attribute.is_splat:
            raise CompileError("distribute: a constant tile must have equal elements; use iota and arithmetic")
        attribute = attribute.get_splat_value()
    element = "i1" if isinstance(attribute, ir.BoolAttr) else str(attribute.type)
    it.set(op.results[0], it.constant(attribute.value, element))


@lowers("vector.broadcast")
def broadcast(it: Distributor, op: Op) -> None:
    """A splat: stays a scalar."""
    it.set(op.results[0], it.scalar_of(op.operands[0]))


@lowers("nova_tile.splat")
def splat(it: Distributor, op: Op) -> None:
    """A splat that is registers at once, because a loop will carry it."""
    layout = op["layout"]
    it.set(op.results[0], it.broadcast(it.scalar_of(op.operands[0]), layout.registers, layout))


@lowers("arith", "math")
def elementwise(it: Distributor, op: Op) -> None:
    operands = [it.of(v) for v in op.operands]
    tile = next((v for v in operands if v.shape is not None), None)
    if tile is not None:
        operands = [it.tile(v, tile.layout) if is_tile(v) else it.scalar_of(v) for v in op.operands]
    layout, shape = (None, None) if tile is None else (tile.layout, tile.shape)
    made = _several(it, op, operands) if len(op.results) > 1 else [_emit(it, op, operands, _element(op), shape)]
    for result, value in zip(op.results, made, strict=True):
        it.set(result, Value(value.name, value.element, value.shape, layout))


def _element(op: Op) -> str:
    result = op.results[0].type
    return str(ir.VectorType(result).element_type) if is_tile(op.results[0]) else str(result)


def _several(it: Distributor, op: Op, operands: list[Value]) -> list[Value]:
    """An op whose results all have the operands' type, such as arith.mului_extended."""
    first = operands[0]
    results = [Value(it.fresh(), first.element, first.shape) for _ in op.results]
    left, types = (", ".join(getattr(r, field) for r in results) for field in ("name", "type"))
    it.line(f"{left} = {it.generic(op.name, operands, _attributes(op))} -> ({types})")
    return results


def _emit(it: Distributor, op: Op, operands: list[Value], element: str, shape: Any) -> Value:
    """The op itself, by way of f32 where the hardware has no such arithmetic or eager PyTorch rounds twice."""
    name, attrs = op.name, _attributes(op)
    if name == "arith.truncf" and element in HALVES and operands[0].element == "f64":
        return it.convert("arith.truncf", it.convert("arith.truncf", operands[0], "f32"), element)
    if name == "arith.extf" and element == "f64" and operands[0].element in HALVES:
        return it.convert("arith.extf", it.convert("arith.extf", operands[0], "f32"), element)
    if name in _MOVES:
        return it.op(name, operands, element, shape, attrs)
    operands = [it.convert("arith.extf", v, "f32") if v.element in HALVES else v for v in operands]
    if element in HALVES:
        return it.convert("arith.truncf", it.op(name, operands, "f32", shape, attrs), element)
    return it.op(name, operands, element, shape, attrs)


def _attributes(op: Op) -> str:
    """The attributes as text, without those that say nothing."""
    found = []
    for named in op.attributes:
        name, attribute = (named.name, named.attr) if hasattr(named, "attr") else (named, op.attributes[named])
        text = str(attribute)
        if text not in DEFAULTS:
            found.append(f"{name} = {text}")
    return ", ".join(found)
