"""Small rewrites of single ops, run over the step in order: what `simplify` is made of.

A rule looks at one op and returns the Value that replaces its result, or None. Rules are registered by op name:

    @rule("neg")
    def double_negation(it: Site) -> Value | None:
        inner = it.defined_by(0, "neg")
        return inner.operand(0) if inner else None

A rule must be exact: the replacement has the same bits for every input, NaN and infinities included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nova.dialect.base import REGISTRY, attribute_value, defining_op
from nova.dialect.build import Builder, Number, Value, wrap
from nova.dialect.types import describe
from nova.mlir import ir


class Site:
    """One op under rewriting: its operands, attributes and the ops that define its operands."""

    __slots__ = ("b", "count", "op", "owners", "values")

    def __init__(self, op: ir.Operation, builder: Builder):
        self.op, self.b = op, builder
        self.values = list(op.operands)
        self.count = len(self.values)
        self.owners: list[tuple[str, ir.Operation | None]] | None = None

    def owner(self, position: int) -> tuple[str, ir.Operation | None]:
        """Name and op that define an operand; ("", None) for an argument."""
        if self.owners is None:
            self.owners = [_owner(value) for value in self.values]
        return self.owners[position]

    @property
    def name(self) -> str:
        """The op's name without the dialect."""
        return self.op.name[5:]

    @property
    def result(self) -> Value:
        """The op's only result."""
        return wrap(self.op.result)

    def operand(self, position: int) -> Value:
        """One operand."""
        return wrap(self.values[position])

    def operands(self) -> list[Value]:
        """All operands."""
        return [wrap(v) for v in self.values]

    def attr(self, name: str) -> Any:
        """An attribute as a Python value."""
        return attribute_value(self.op.attributes[name])

    def attrs(self) -> dict[str, Any]:
        """All attributes as Python values."""
        attributes = self.op.attributes
        return {name: attribute_value(attributes[name]) for name in REGISTRY[self.name].attrs}

    def defined_by(self, position: int, *names: str) -> Site | None:
        """The op that defines an operand, if it is one of `names`."""
        name, op = self.owner(position)
        return Site(op, self.b) if name[5:] in names and op is not None else None

    def number(self, position: int) -> Number | None:
        """The repeated number that an operand holds, if it is a constant."""
        return splat_number(*self.owner(position))

    def used_once(self) -> bool:
        """The result has one use."""
        uses = iter(self.op.result.uses)
        return next(uses, None) is not None and next(uses, None) is None


def _owner(value: ir.Value) -> tuple[str, ir.Operation | None]:
    op = defining_op(value)
    return ("", None) if op is None else (op.name, op)


_TRANSPARENT = ("nova.broadcast", "nova.reshape", "nova.transpose")  # of a repeated number they are that number


def splat_number(name: str, op: ir.Operation | None) -> Number | None:
    """The number that a splat constant repeats, seen through broadcasts, reshapes and transposes."""
    while op is not None:
        if name == "nova.constant":
            attr = op.attributes["value"]
            if not attr.is_splat or describe(op.result.type).dtype in ("c64", "c128"):
                return None
            return attr.get_splat_value().value
        if name not in _TRANSPARENT:
            return None
        name, op = _owner(op.operands[0])
    return None


Rule = Callable[[Site], Value | None]
RULES: dict[str, list[Rule]] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for ops."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES.setdefault(f"nova.{name}", []).append(function)
        return function

    return register


def apply_rules(block: ir.Block) -> int:
    """Applies every rule to every op of a block once, in order; the number of ops replaced (they are left unused)."""
    changed = 0
    builder = Builder()
    for op in block.operations:
        operation = op.operation
        rules = RULES.get(operation.name)
        if rules is None:
            continue
        builder.point = ir.InsertionPoint(operation)
        builder.loc = operation.location
        builder.forget_constants()
        site = Site(operation, builder)
        for function in rules:
            replacement = function(site)
            if replacement is not None:
                operation.result.replace_all_uses_with(replacement.ir)
                changed += 1
                break
    return changed
