"""How an op of the `nova` dialect is declared: one function, whose body is the verifier and docstring the definition.

    @op("matmul", operands="a b", results="c")
    def matmul(it: Instance) -> None:
        \"\"\"c[..,m,n] = sum over k of a[..,m,k] * b[..,k,n]. ...\"\"\"
        ...check(...)

The decorator makes an `ext.Operation` class from the declaration, so the op is real IRDL: its text parses, and
`operation.verify()` (also run by the parser) calls the function. Rules common to all ops:

 - values are static ranked tensors, with value semantics; result types are always explicit;
 - attributes are always present (IRDL knows no optional ones), with a fixed kind each: see ATTRIBUTE_KINDS;
 - optional operands come last, and an attribute says whether each is there.

An IRDL constraint binds once an op, so all operands of one variadic group must have the same type. Ops that take
tensors of several types ("*xs/16") therefore have that many groups, and one group holds a run of operands of one type:

    "nova.concat"(%a, %b, %c) {operandSegmentSizes = array<i32: 2, 1, 0, ..>} : (tensor<3xf32>, tensor<3xf32>,
        tensor<5xf32>) -> ..
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from nova import mlir
from nova.dialect.types import Described, broadcast_shapes, describe
from nova.mlir import ext, ir


class Nova(ext.Dialect, name="nova"):  # type: ignore[call-arg]  # the bindings are untyped
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
class Values:
    """The operands or results of an op: fixed ones, then optional ones or a list of any length."""

    fixed: tuple[str, ...]
    optional: tuple[tuple[str, str], ...] = ()  # (name, attribute that says whether it is there)
    variadic: str | None = None
    runs: int = 1  # groups of the variadic; a group holds values of one type

    @staticmethod
    def parse(text: str) -> Values:
        """From "a b", "a b?has_b", "a *rest" (one type) or "a *rest/16" (up to 16 runs of one type each)."""
        fixed, optional, variadic, runs = [], [], None, 1
        for token in text.split():
            if token.startswith("*"):
                variadic, _, count = token[1:].partition("/")
                runs = int(count or 1)
            elif "?" in token:
                name, _, flag = token.partition("?")
                optional.append((name, flag))
            else:
                fixed.append(token)
        return Values(tuple(fixed), tuple(optional), variadic, runs)

    def segments(self, values: Sequence[Any], attrs: Mapping[str, Any]) -> list[int] | None:
        """Segment sizes for values (or their types) in order; None where the op needs none."""
        if len(self.optional) + (self.runs if self.variadic else 0) < 2:
            return None
        if self.optional:
            return [1] * len(self.fixed) + [int(attrs[flag]) for _, flag in self.optional]
        counts = [len(list(run)) for _, run in groupby(values[len(self.fixed) :])]
        if len(counts) > self.runs:
            raise ValueError(f"{len(counts)} runs of values of one type, at most {self.runs} fit")
        return [1] * len(self.fixed) + counts + [0] * (self.runs - len(counts))

    def describe(self) -> str:
        """For the manual."""
        names = [*self.fixed, *(f"[{name}]" for name, _ in self.optional)]
        return ", ".join([*names, f"*{self.variadic}"] if self.variadic else names)


@dataclass(frozen=True)
class OpSpec:
    """The declaration of one op."""

    name: str
    operands: Values
    attrs: dict[str, str]
    results: Values
    verify: Callable[[Instance], None]
    pure: bool
    doc: str


REGISTRY: dict[str, OpSpec] = {}
SEGMENT_SIZES = ("operandSegmentSizes", "resultSegmentSizes")  # follow from the operands: see Values.segments


def segment_texts(name: str, operands: Sequence[Any], results: Sequence[Any], attrs: Mapping[str, Any]) -> list[str]:
    """The segment attributes of `nova.<name>` as text, for values given by their types; none where it needs none."""
    spec = REGISTRY.get(name)
    if spec is None:
        return []
    sizes = spec.operands.segments(operands, attrs), spec.results.segments(results, attrs)
    return [
        f"{key} = array<i32: {', '.join(map(str, listed))}>"
        for key, listed in zip(SEGMENT_SIZES, sizes, strict=True)
        if listed is not None
    ]


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
        """The operands after the fixed ones: optional ones that are there, or the variadic list."""
        return self.ins[len(self.spec.operands.fixed) :]


def defining_op(value: ir.Value) -> ir.Operation | None:
    """The op that defines a value; None for an argument."""
    owner = value.owner
    return None if isinstance(owner, ir.Block) else owner.operation


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
    """Declares `nova.<name>`: operands and results as in `Values.parse`, attributes as "name:kind"."""

    def declare(verify: Callable[[Instance], None]) -> Callable[[Instance], None]:
        kinds = dict(item.split(":") for item in attrs.split())
        spec = OpSpec(name, Values.parse(operands), kinds, Values.parse(results), verify, pure, verify.__doc__ or "")
        REGISTRY[name] = spec
        _make_class(spec)
        return verify

    return declare


def _fields(values: Values, annotation: Any, prefix: str) -> dict[str, Any]:
    fields: dict[str, Any] = {f"{prefix}{name}": annotation for name in values.fixed}
    fields.update({f"{prefix}{name}": annotation | None for name, _ in values.optional})
    if values.variadic:
        names = [values.variadic] if values.runs == 1 else [f"{values.variadic}_{i}" for i in range(values.runs)]
        fields.update({f"{prefix}{name}": Sequence[annotation] for name in names})
    return fields


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
        annotations = _fields(spec.operands, ext.Operand[tensor], "")
        if clash := annotations.keys() & spec.attrs.keys():
            raise TypeError(f"nova.{spec.name}: {clash} name both an operand and an attribute")
        annotations.update(dict.fromkeys(spec.attrs, Any))
        # field names only have to differ from each other: "y" may be operand and result of one op
        annotations.update(_fields(spec.results, ext.Result[tensor], "result_"))
        namespace["__annotations__"] = annotations
        namespace["__doc__"] = spec.doc
        namespace["verify_invariants"] = staticmethod(verify_invariants)

    class_name = "".join(part.capitalize() for part in spec.name.split("_")) + "Op"
    types.new_class(class_name, (Nova.Operation,), {"name": spec.name}, body)


def load() -> None:
    """Loads every op declared so far into the current context."""
    mlir.stand_in_for_bindings("nova")
    Nova.load()
    for name, spec in REGISTRY.items():
        if spec.pure:
            Pure.attach(f"nova.{name}")
