"""nova-to-linalg: elementwise ops and random numbers."""

from __future__ import annotations

import math

from nova.dialect.elementwise import ELEMENTWISE_OPS
from nova.fusion import scalars
from nova.fusion.kernel import Expr, binary, compare, const, convert_float, expr, linear, select, unary
from nova.fusion.lowering import Lowering, lowers
from nova.fusion.records import Op
from nova.fusion.space import Instance

_DIVISIONS = frozenset({"floordiv", "truncdiv", "rem", "fmod"})


@lowers("copy", *sorted(ELEMENTWISE_OPS))
def _elementwise(low: Lowering, op: Op, operands: list[Instance]) -> None:
    args = [low.read(value, instance) for value, instance in zip(op.operands, operands, strict=True)]
    result = op.results[0]
    checks: list[Expr] = []
    if op.name in _DIVISIONS and args[1].type not in ("f32", "f64", "bf16", "f16"):
        zero = compare("eq", args[1], const(0, args[1].type))
        checks = [expr("nova.check", (zero, const(0, "i64")), "check")]
        args[1] = select(zero, const(1, args[1].type), args[1])
    if op.name == "probability":
        inside = binary(
            "arith.andi",
            compare("oge", args[0], const(0, args[0].type)),
            compare("ole", args[0], const(1, args[0].type)),
        )
        bad = select(inside, const(0, "i1"), const(1, "i1"))
        checks = [expr("nova.check", (bad, const(0, "i64")), "check")]
    element = scalars.emit(op, args)
    if checks:
        from nova.fusion.kernel import Out

        tensor, index = low.place(result)
        low.emit(low.loops_of(low.space.outputs[result].dims), [Out(tensor, index, element)], checks=checks)
    else:
        low.write(result, element)


def _word(low: Lowering, op: Op, operands: list[Instance], element: Expr) -> Expr:
    """The random word of an element."""
    seed = low.read(op.operands[0], operands[0])
    return expr("nova.philox", (seed, element), "i32", op.attrs["stream"])


def _element_number(low: Lowering, op: Op) -> Expr:
    """The element's number in the row-major result, i64."""
    terms: dict[int, int] = {}
    stride = 1
    for atoms in reversed(low.space.outputs[op.results[0]].dims):
        for leaf in reversed(low.space.leaves(atoms)):
            terms[low.numbers[leaf]] = stride
            stride *= leaf.size
    return expr("arith.index_cast", (linear(terms),), "i64")


def _unit(word: Expr) -> Expr:
    """(word >> 8) * 2**-24, in [0, 1)."""
    bits = binary("arith.shrui", word, const(8, "i32"))
    return binary("arith.mulf", unary("arith.uitofp", bits, "f32"), const(2.0**-24, "f32"))


@lowers("uniform")
def _uniform(low: Lowering, op: Op, operands: list[Instance]) -> None:
    element = _unit(_word(low, op, operands, _element_number(low, op)))
    low.write(op.results[0], convert_float(element, scalars.element_type(op.results[0].dtype)))


@lowers("normal")
def _normal(low: Lowering, op: Op, operands: list[Instance]) -> None:
    """Box-Muller on the words (2k, 2k+1) of a pair: the even element is the cosine, the odd one the sine."""
    number = _element_number(low, op)
    first_number = binary("arith.andi", number, const(-2, "i64"))
    odd = compare("ne", binary("arith.andi", number, const(1, "i64")), const(0, "i64"))
    first = _unit(_word(low, op, operands, first_number))
    second = _unit(_word(low, op, operands, binary("arith.ori", number, const(1, "i64"))))
    # 1 - u is in (0, 1], so that the logarithm is finite
    radius = scalars.sqrt(
        binary("arith.mulf", const(-2.0, "f32"), scalars.log(binary("arith.subf", const(1.0, "f32"), first)))
    )
    angle = binary("arith.mulf", const(2 * math.pi, "f32"), second)
    value = binary("arith.mulf", radius, select(odd, unary("math.sin", angle), unary("math.cos", angle)))
    low.write(op.results[0], convert_float(value, scalars.element_type(op.results[0].dtype)))


@lowers("randint")
def _randint(low: Lowering, op: Op, operands: list[Instance]) -> None:
    """low + floor(word * (high - low) / 2**32), with the product in 64 bits."""
    word = unary("arith.extui", _word(low, op, operands, _element_number(low, op)), "i64")
    span = const(op.attrs["high"] - op.attrs["low"], "i64")
    scaled = binary("arith.shrui", binary("arith.muli", word, span), const(32, "i64"))
    value = binary("arith.addi", scaled, const(op.attrs["low"], "i64"))
    low.write(op.results[0], scalars.cast(value, "i64", op.results[0].dtype))
