"""Re-emits the scalar operations of a linalg region on lanes: values of type T, or vector<N x T>.

    ^bb0(%x: f32, %m: f32):                     %x: vector<8xf32>, %m: f32 (the same for all lanes)
      %d = arith.subf %x, %m : f32       ->       %m8 = vector.broadcast %m
      %e = math.exp %d : f32                      %d = arith.subf %x, %m8 : vector<8xf32>
      linalg.yield %e : f32                       vmath.exp(%d)

Operands may mix scalars and vectors. Values that depend on scalars only stay scalar, and are widened where they meet
a vector; with `hoist_uniform` they are emitted once, before the loop over lanes. Arithmetic on bf16 and f16 is done
in f32 and rounded after every operation, which is what the types say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nova.cpu import philox
from nova.errors import CompileError
from nova.lowering import lanes as ln
from nova.lowering import vmath
from nova.lowering.lanes import Value
from nova.mlir import ir

Environment = dict[Any, Any]  # value of the region -> value emitted; (_ROUND_KEYS, seed) -> round keys
_ROUND_KEYS = "philox round keys"
Emitter = Callable[[ir.Operation, list[Value]], Value]


class Hooks:
    """What a region needs from the loops around it. Subclass it; each method is optional unless the region uses it."""

    lanes = 0  # lanes to widen scalars to where a vector is asked for

    def index(self, dim: int) -> Value:
        """Value of loop `dim` of the generic (linalg.index): an index, or a vector of them."""
        raise CompileError("linalg.index is not available here")

    def is_uniform_index(self, dim: int) -> bool:
        """Whether loop `dim` has one value in all lanes."""
        return True

    def extract(self, op: ir.Operation, indices: list[Value], env: Environment) -> Value:
        """tensor.extract: the element at `indices` of the tensor operand of `op`."""
        raise CompileError("tensor.extract is not available here")

    def check(self, bad: Value, value: Value) -> None:
        """nova.check: reports `value` where `bad`."""
        raise CompileError("nova.check is not available here")

    def outer(self, value: Value) -> Value:
        """A value defined outside the region; constants are re-emitted."""
        owner = value.owner
        if isinstance(owner, ir.Block) or owner.name != "arith.constant":
            raise CompileError(f"a region uses a value from outside that is not a constant: {value}")
        return _constant(owner)


def _constant(op: ir.Operation) -> Value:
    return ln.create("arith.constant", op.results[0].type, [], {"value": op.attributes["value"]})


def emit_region(
    block: ir.Block, operands: Sequence[Value], hooks: Hooks | None = None, env: Environment | None = None
) -> list[Value]:
    """Emits `block`'s operations on `operands` (one per block argument) at the insertion point; returns the yield's.

    `env` holds values computed before (see `hoist_uniform`); it is not changed. A result is scalar if it depends on
    scalars only.
    """
    hooks = hooks or Hooks()
    scope: Environment = dict(env) if env else {}
    scope.update(zip(block.arguments, operands, strict=True))
    for view in block.operations:
        op = view.operation
        if op.name == "linalg.yield":
            return [_lookup(value, scope, hooks) for value in op.operands]
        if len(op.results) == 0 or op.results[0] not in scope:
            _emit_op(op, scope, hooks)
    raise CompileError("a region without linalg.yield")


def hoist_uniform(block: ir.Block, operands: Sequence[Value | None], hooks: Hooks | None = None) -> Environment:
    """Emits the operations that depend only on the operands given (None: varies along the lanes), and constants.

    Returns their values for `emit_region(env=...)`. Call it in front of the loop over lanes.
    """
    hooks = hooks or Hooks()
    scope: Environment = {}
    for argument, operand in zip(block.arguments, operands, strict=True):
        if operand is not None:
            scope[argument] = operand
    arguments = set(block.arguments)
    local = {result for view in block.operations for result in view.operation.results}
    for view in block.operations:
        op = view.operation
        if op.name == "linalg.yield" or len(op.results) != 1:
            continue
        if op.name == "linalg.index" and not hooks.is_uniform_index(ir.IntegerAttr(op.attributes["dim"]).value):
            continue
        if all(v in scope or (v not in arguments and v not in local) for v in op.operands):
            _emit_op(op, scope, hooks)
        elif op.name == "nova.philox" and op.operands[0] in scope:
            seed = scope[op.operands[0]]
            if (_ROUND_KEYS, seed) not in scope:
                scope[_ROUND_KEYS, seed] = philox.round_keys(seed)
    return {value: emitted for value, emitted in scope.items() if value not in arguments}


def _lookup(value: Value, scope: Environment, hooks: Hooks) -> Value:
    found = scope.get(value)
    if found is None:
        found = scope[value] = hooks.outer(value)
    return found


def _emit_op(op: ir.Operation, scope: Environment, hooks: Hooks) -> None:
    name = op.name
    if name == "arith.constant":
        scope[op.results[0]] = _constant(op)
        return
    if name == "linalg.index":
        scope[op.results[0]] = hooks.index(ir.IntegerAttr(op.attributes["dim"]).value)
        return
    if name == "tensor.extract":
        indices = [_lookup(value, scope, hooks) for value in list(op.operands)[1:]]
        scope[op.results[0]] = hooks.extract(op, indices, scope)
        return
    operands = [_lookup(value, scope, hooks) for value in op.operands]
    if name == "nova.check":
        hooks.check(*operands)
        return
    if name == "nova.philox":
        seed, element = operands
        keys = scope.get((_ROUND_KEYS, seed)) or philox.round_keys(seed)
        scope[op.results[0]] = philox.words(keys, element, ir.IntegerAttr(op.attributes["stream"]).value)
        return
    lanes = max((ln.lanes_of(value.type) for value in operands), default=0)
    operands = [ln.splat(value, lanes) for value in operands]
    emitter = EMITTERS.get(name)
    if emitter is None:
        if not name.startswith(("arith.", "math.")):
            raise CompileError(f"{name} in a kernel's region has no CPU code")
        emitter = _same_op
    scope[op.results[0]] = emitter(op, operands)


def _result_element(op: ir.Operation) -> ir.Type:
    return ln.register_type(op.results[0].type)


def _same_op(op: ir.Operation, operands: list[Value]) -> Value:
    """The same operation on lanes; in f32, rounded after, where the type has 16 bits."""
    result = _result_element(op)
    narrow_operands = ln.is_narrow_float(ln.element_of(operands[0].type)) and not op.name.endswith("cast")
    if narrow_operands:
        operands = [ln.extend(x) if ln.is_narrow_float(ln.element_of(x.type)) else x for x in operands]
    computed = ln.f32() if narrow_operands and ln.is_narrow_float(result) else result
    value = ln.create(op.name, ln.like(operands[0], computed), operands, {a.name: a.attr for a in _attributes(op)})
    return ln.narrow(value, result) if computed != result else value


def _attributes(op: ir.Operation) -> list[ir.NamedAttribute]:
    return [op.attributes[i] for i in range(len(op.attributes))]


def _float_op(function: Callable[..., Value]) -> Emitter:
    """An operation on floats of one type given as a function of f32/f64 lanes."""

    def emit(op: ir.Operation, operands: list[Value]) -> Value:
        element = ln.element_of(operands[0].type)
        if ln.is_narrow_float(element):
            return ln.narrow(function(*(ln.extend(x) for x in operands)), element)
        return function(*operands)

    return emit


def _extremum(function: Callable[..., Value]) -> Emitter:
    """maximumf and minimumf. `ln.maximum` tests its first operand for NaN beside the chain of an accumulator, so an
    accumulator, which is a block argument that feeds the yield, goes second."""

    def emit(op: ir.Operation, operands: list[Value]) -> Value:
        left, right = op.operands
        left_number, right_number = (
            value.arg_number if isinstance(value.owner, ir.Block) else -1 for value in (left, right)
        )
        if left_number > right_number:  # outputs are the last arguments
            operands = operands[::-1]
        return _float_op(function)(op, operands)

    return emit


def _select(op: ir.Operation, operands: list[Value]) -> Value:
    return ln.select(*operands)


def _extf(op: ir.Operation, operands: list[Value]) -> Value:
    (value,), result = operands, _result_element(op)
    if not ln.is_narrow_float(ln.element_of(value.type)):
        return ln.cast("extf", value, result)
    value = ln.extend(value)
    return value if result == ln.f32() else ln.cast("extf", value, result)


def _truncf(op: ir.Operation, operands: list[Value]) -> Value:
    result = _result_element(op)
    return ln.narrow(operands[0], result) if ln.is_narrow_float(result) else ln.cast("truncf", operands[0], result)


def _int_to_float(op: ir.Operation, operands: list[Value]) -> Value:
    result = _result_element(op)
    name = op.name.removeprefix("arith.")
    if not ln.is_narrow_float(result):
        return ln.cast(name, operands[0], result)
    return ln.narrow(ln.cast(name, operands[0], ln.f32()), result)


def _float_to_int(op: ir.Operation, operands: list[Value]) -> Value:
    value = operands[0]
    if ln.is_narrow_float(ln.element_of(value.type)):
        value = ln.extend(value)
    return ln.cast(op.name.removeprefix("arith."), value, _result_element(op))


def _reinterpret(op: ir.Operation, operands: list[Value]) -> Value:
    """unrealized_conversion_cast between ui8 and i8: registers know no sign."""
    if ln.element_of(operands[0].type) != _result_element(op):
        raise CompileError(f"cannot reinterpret {operands[0].type} as {op.results[0].type}")
    return operands[0]


def _powf(op: ir.Operation, operands: list[Value]) -> Value:
    exponent = op.operands[1].owner
    if not isinstance(exponent, ir.Block) and exponent.name == "arith.constant":
        base, element = operands[0], ln.element_of(operands[0].type)
        narrow = ln.is_narrow_float(element)
        value = vmath.pow_constant(
            ln.extend(base) if narrow else base, ir.FloatAttr(exponent.attributes["value"]).value
        )
        if value is not None:
            return ln.narrow(value, element) if narrow else value
    return vmath.powf(*operands)


def combine(name: str, a: Value, b: Value) -> Value:
    """One application of a combining operation (arith.addf, arith.maximumf, ...) to lanes of one type."""
    function = FLOAT_FUNCTIONS.get(name)
    if not ln.is_narrow_float(ln.element_of(a.type)):
        return function(a, b) if function else ln.create(name, a.type, [a, b])
    wide = ln.extend(a), ln.extend(b)
    return ln.narrow(function(*wide) if function else ln.create(name, wide[0].type, wide), ln.element_of(a.type))


# operations on floats of one type, as functions of f32 or f64 lanes
FLOAT_FUNCTIONS: dict[str, Callable[..., Value]] = {
    "arith.maximumf": ln.maximum,
    "arith.minimumf": ln.minimum,
    "arith.maxnumf": ln.maximum_number,
    "arith.minnumf": ln.minimum_number,
    "math.roundeven": ln.roundeven,
    **{name: function for name, function in vmath.FUNCTIONS.items() if name != "math.powf"},
}

EMITTERS: dict[str, Emitter] = {
    "arith.select": _select,
    "arith.extf": _extf,
    "arith.truncf": _truncf,
    "arith.sitofp": _int_to_float,
    "arith.uitofp": _int_to_float,
    "arith.fptosi": _float_to_int,
    "arith.fptoui": _float_to_int,
    "math.powf": _powf,
    "builtin.unrealized_conversion_cast": _reinterpret,
}
EMITTERS.update({name: _float_op(function) for name, function in FLOAT_FUNCTIONS.items()})
EMITTERS["arith.maximumf"] = _extremum(ln.maximum)
EMITTERS["arith.minimumf"] = _extremum(ln.minimum)
