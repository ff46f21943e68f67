"""How an op of the `nova` dialect is declared: one function, whose body is the verifier and docstring the definition.

    @op("matmul", operands="a b", results="c")
    def matmul(it: Instance) -> None:
        \"\"\"c[..,m,n] = sum over k of a[..,m,k] * b[..,k,n]. ...\"\"\"
        ...check(...)

The decorator makes an `ext.Operation` class from the declaration, so the op is real IRDL: its text parses, and
`operation.verify()` (also run by the parser) calls the function. Rules common to all ops:

 - values are static ranked tensors, with value semantics; result types are always explicit;
 - attributes are always present (IRDL knows no optional ones), with a fixed kind each: see ATTRIBUTE_KINDS;
 - optional operands come last, in one variadic group; `has_*` attributes say which ones are there.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nova.dialect.types import Described, broadcast_shapes, describe
from nova.mlir import ext, ir


class Nova(ext.Dialect, name="nova"):
    """The device-independent dialect of whole training steps."""


class Pure(ir.MemoryEffectsOpInterface):
    """No effects: C++ passes may merge equal ops and drop unused ones."""

    @staticmethod
    def get_effects(op: Any, effects: Any) -> None:
        pass


class VerifyError(Exception):
    """Raised by a verifier; becomes an MLIR diagnostic at the op's location."""


ATTRIBUTE_KINDS: dict[str, tuple[type, ...]] = {
    "int": (ir.IntegerAttr,),
    "float": (ir.FloatAttr,),
    "bool": (ir.BoolAttr,),
    "str": (ir.StringAttr,),
    "ints": (ir.DenseI64ArrayAttr,),
    "dense": (ir.DenseElementsAttr, ir.DenseFPElementsAttr, ir.DenseIntElementsAttr),
}


@dataclass(frozen=True)
class OpSpec:
    """The declaration of one op. `variadic`/`variadic_result` name a trailing group of any length."""

    name: str
    operands: tuple[str, ...]
    variadic: str | None
    attrs: dict[str, str]
    results: tuple[str, ...]
    variadic_result: str | None
    verify: Callable[[Instance], None]
    pure: bool
    doc: str


REGISTRY: dict[str, OpSpec] = {}


class Instance:
    """What a verifier sees: descriptions of operands and results, and attributes as Python values."""

    __slots__ = ("_attributes", "ins", "outs", "spec")

    def __init__(self, spec: OpSpec, operation: Any):
        self.spec = spec
        self.ins: list[Described] = [describe(v.type) for v in operation.operands]
        self.outs: list[Described] = [describe(v.type) for v in operation.results]
        self._attributes = operation.attributes

    def __getitem__(self, name: str) -> Any:
        return attribute_value(self._attributes[name])

    def optional(self) -> list[Described]:
        """The operands of the trailing variadic group."""
        return self.ins[len(self.spec.operands) :]


_values: dict[ir.Attribute, Any] = {}


def attribute_value(attribute: ir.Attribute) -> Any:
    """The Python value of a scalar, string or integer-array attribute; dense attributes come back as they are."""
    found = _values.get(attribute)
    if found is None:
        if isinstance(attribute, (ir.BoolAttr, ir.IntegerAttr, ir.FloatAttr, ir.StringAttr)):
            found = attribute.value
        elif isinstance(attribute, ir.DenseI64ArrayAttr):
            found = tuple(attribute)
        else:
            return attribute
        _values[attribute] = found
    return found


def check(condition: bool, message: str, *operands: Any) -> None:
    """Fails verification with `message`, whose {} are filled only then."""
    if not condition:
        raise VerifyError(message.format(*operands))


def check_broadcast(it: Instance, operands: Sequence[Described], result: Described) -> None:
    """`result` must be the NumPy broadcast of `operands`."""
    try:
        shape = broadcast_shapes(*(o.shape for o in operands))
    except ValueError as error:
        raise VerifyError(str(error)) from None
    check(result.shape == shape, "result {} is not the broadcast of {}", result, ", ".join(map(str, operands)))


def check_like(value: Described, other: Described, what: str, other_name: str = "operand") -> None:
    """`value` must have the shape and dtype of `other`."""
    check(value == other, "{} {} differs from {} {}", what, value, other_name, other)


def check_axis(axis: int, rank: int, what: str = "dim") -> None:
    """0 <= axis < rank."""
    check(0 <= axis < rank, "{} {} is out of range for rank {}", what, axis, rank)


def op(
    name: str,
    operands: str = "",
    results: str = "y",
    attrs: str = "",
    *,
    pure: bool = True,
) -> Callable[[Callable[[Instance], None]], Callable[[Instance], None]]:
    """Declares `nova.<name>`. Names are space separated; `*name` is a trailing variadic; attrs are `name:kind`."""

    def declare(verify: Callable[[Instance], None]) -> Callable[[Instance], None]:
        fixed, variadic = _split(operands)
        fixed_results, variadic_result = _split(results)
        kinds = dict(item.split(":") for item in attrs.split())
        doc = verify.__doc__ or ""
        spec = OpSpec(name, fixed, variadic, kinds, fixed_results, variadic_result, verify, pure, doc)
        REGISTRY[name] = spec
        _make_class(spec)
        return verify

    return declare


def _split(names: str) -> tuple[tuple[str, ...], str | None]:
    parts = names.split()
    variadic = parts.pop()[1:] if parts and parts[-1].startswith("*") else None
    return tuple(parts), variadic


def _make_class(spec: OpSpec) -> None:
    tensor = ir.RankedTensorType

    def verify_invariants(operation: Any) -> bool:
        try:
            for key, kind in spec.attrs.items():
                check(key in operation.attributes, "attribute {} is missing", key)
                attribute = operation.attributes[key]
                expected = ATTRIBUTE_KINDS[kind]
                check(isinstance(attribute, expected), "attribute {} must be of kind {}, got {}", key, kind, attribute)
            spec.verify(Instance(spec, operation))
        except (VerifyError, ValueError, IndexError) as error:
            operation.location.emit_error(f"nova.{spec.name}: {error}")
            return False
        return True

    def body(namespace: dict[str, Any]) -> None:
        annotations: dict[str, Any] = dict.fromkeys(spec.operands, ext.Operand[tensor])
        if spec.variadic:
            annotations[spec.variadic] = Sequence[ext.Operand[tensor]]
        if clash := annotations.keys() & spec.attrs.keys():
            raise TypeError(f"nova.{spec.name}: {clash} name both an operand and an attribute")
        annotations.update(dict.fromkeys(spec.attrs, Any))
        # field names only have to differ from each other: "y" may be operand and result of one op
        annotations.update({f"result_{n}": ext.Result[tensor] for n in spec.results})
        if spec.variadic_result:
            annotations[f"result_{spec.variadic_result}"] = Sequence[ext.Result[tensor]]
        namespace["__annotations__"] = annotations
        namespace["__doc__"] = spec.doc
        namespace["verify_invariants"] = staticmethod(verify_invariants)

    class_name = "".join(part.capitalize() for part in spec.name.split("_")) + "Op"
    types.new_class(class_name, (Nova.Operation,), {"name": spec.name}, body)


def load() -> None:
    """Loads every op declared so far into the current context."""
    # The bindings try to import `<their package>.dialects.nova` on each look-up of an op class, 75 us an op while
    # that fails; an empty module in its place makes walks 40 times faster.
    package = ir.__name__.rsplit(".", 1)[0]
    for prefix in {package, "numba_cuda_mlir._mlir"}:
        module = f"{prefix}.dialects.nova"
        sys.modules.setdefault(module, types.ModuleType(module))
    Nova.load()
    for name, spec in REGISTRY.items():
        if spec.pure:
            Pure.attach(f"nova.{name}")
