"""The state of lowering one kernel from `nova` ops to structured ops: loops, tensors, and how values are read.

`to_linalg` drives it; `to_linalg_elementwise`, `_reduction`, `_contraction` and `_movement` hold the rules, one an op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from nova.fusion import inplace, roles, scalars
from nova.fusion.kernel import Expr, Index, Kernel, Linear, Out, Structured, Tensor, const, expr, linear, load
from nova.fusion.records import Function, Op, Value
from nova.fusion.rules import CONTRACTIONS
from nova.fusion.space import Atom, Dims, Instance, Space

Rule = Callable[["Lowering", Op, list[Instance]], None]
RULES: dict[str, Rule] = {}


def lowers(*names: str) -> Callable[[Rule], Rule]:
    """Registers a lowering rule for ops."""

    def register(rule: Rule) -> Rule:
        for name in names:
            RULES[name] = rule
        return rule

    return register


class Lowering:
    """One kernel being lowered."""

    def __init__(self, function: Function, kind: str):
        self.function, self.kind = function, kind
        self.space: Space = inplace.build_space(function)
        self.numbers: dict[Atom, int] = {}
        self.kernel = Kernel(function.name, kind, [], [], [], [], [])
        self.tensors: dict[Value, Tensor] = {}  # arguments and results
        self.places: dict[Value, tuple[Tensor, Index]] = {}  # computed values
        self._number_loops()
        self._make_tensors()

    # --- loops ------------------------------------------------------------------------------------------------------

    def _number_loops(self) -> None:
        """Numbers the loops: rows outermost, then the order in which the largest value lies in memory."""
        space = self.space
        self.roles = roles.Roles() if self.kind == "contraction" else roles.find(space)
        orders: list[list[Atom]] = []
        for op, operands in space.inside.items():
            orders += [space.loops(space.outputs[value].dims) for value in op.results]
            orders += [space.loops(instance.dims) for instance in operands]
        for reduction in space.reductions:
            orders.append([leaf for atoms in reduction.over for leaf in space.leaves(atoms)])
        orders.sort(key=len, reverse=True)
        ranking: dict[Atom, None] = {}
        if self.kind == "contraction":
            reduction = next(r for r in space.reductions if r.op.name in CONTRACTIONS)
            orders.insert(0, [leaf for atoms in reduction.over for leaf in space.leaves(atoms)])
        main = orders[0] if orders else []
        ranking.update(dict.fromkeys(atom for atom in main if atom in self.roles.rows))
        ranking.update(dict.fromkeys(self.roles.rows))
        for order in orders:
            ranking.update(dict.fromkeys(order))
        self.numbers = {atom: number for number, atom in enumerate(ranking)}
        self.kernel.loops = [atom.size for atom in ranking]
        if self.kind == "loops":
            self.kernel.rows = sorted(self.numbers[atom] for atom in self.roles.rows)

    def loop_numbers(self, atoms: Iterable[Atom]) -> list[int]:
        return sorted(self.numbers[atom] for atom in atoms)

    def loops_of(self, dims: Dims) -> list[int]:
        """Loops that walk a value, in nesting order."""
        return self.loop_numbers(self.space.loops(dims))

    def leaves(self, parts: Iterable[Sequence[Atom]]) -> list[Atom]:
        return [leaf for atoms in parts for leaf in self.space.leaves(atoms)]

    def count(self, atoms: Iterable[Atom]) -> int:
        total = 1
        for atom in atoms:
            total *= atom.size
        return total

    # --- tensors ----------------------------------------------------------------------------------------------------

    def _make_tensors(self) -> None:
        kernel = self.kernel
        for position, value in enumerate(self.function.args):
            mark = self.function.arg_attrs[position].strip("{}") if self.function.arg_attrs else ""
            tensor = Tensor("arg", value.shape, scalars.element_type(value.dtype), list_=mark)
            self.tensors[value] = tensor
            kernel.args.append(tensor)
        for position, value in enumerate(self.function.outputs):
            mark = self.function.res_attrs[position].strip("{}") if self.function.res_attrs else ""
            tensor = Tensor("out", value.shape, scalars.element_type(value.dtype), list_=mark)
            kernel.outs.append(tensor)
            if value in self.places:  # returned twice
                raise AssertionError(f"kernel @{self.function.name} returns one value twice")
            instance = self.space.outputs.get(value)
            if instance is None:
                raise AssertionError(f"kernel @{self.function.name} returns a value it does not compute")
            self.places[value] = (tensor, (self.flat(inplace.row_major(self.space, instance)),))

    def flat(self, strides: dict[Atom, int], offset: int = 0) -> Linear:
        return Linear.of(
            {self.numbers[atom]: stride for atom, stride in strides.items() if atom in self.numbers}, offset
        )

    def local(self, loops: Sequence[int], dtype: str) -> tuple[Tensor, Index]:
        """A tensor that lives inside the kernel, indexed by `loops`."""
        shape = tuple(self.kernel.loops[loop] for loop in loops)
        return Tensor("local", shape, dtype), tuple(Linear(0, ((loop, 1),)) for loop in loops)

    def place(self, value: Value) -> tuple[Tensor, Index]:
        """Where the op that computes `value` puts it."""
        if value not in self.places:
            dims = self.space.outputs[value].dims
            self.places[value] = self.local(self.loops_of(dims), scalars.element_type(value.dtype))
        return self.places[value]

    # --- reading ----------------------------------------------------------------------------------------------------

    def read(self, value: Value, instance: Instance) -> Expr:
        """The element of an operand at the current loops."""
        if instance.formula is not None:
            return self.formula(*instance.formula)
        if instance.base is not None:
            tensor = self.tensors[instance.base]
            return load(tensor, (self.flat(self.space.final_strides(instance), instance.offset),))
        while value not in self.places:
            assert value.op is not None
            value = value.op.operands[0]  # a view of a computed value: same element
        return load(*self.places[value])

    def wide(self, value: Value, instance: Instance) -> Expr:
        """The element in the type that ops on it compute in."""
        from nova.fusion.kernel import convert_float

        element = self.read(value, instance)
        return convert_float(element, "f32") if element.type in ("bf16", "f16") else element

    def formula(self, op: Op, dims: Dims) -> Expr:
        value = op.results[0]
        type_ = scalars.element_type(value.dtype)
        if op.name == "constant":
            return const(splat(op), type_)
        index = expr("arith.index_cast", (self.position(dims[op.attrs["dim"]]),), "i64")
        return scalars.cast(index, "i64", value.dtype)

    def position(self, atoms: Sequence[Atom]) -> Expr:
        """The index along a dimension, of type index."""
        terms: dict[int, int] = {}
        stride = 1
        for leaf in reversed(self.space.leaves(atoms)):
            terms[self.numbers[leaf]] = stride
            stride *= leaf.size
        return linear(terms)

    # --- writing ----------------------------------------------------------------------------------------------------

    def emit(
        self, loops: Iterable[int], outs: list[Out], reduced: Iterable[int] = (), checks: Sequence[Expr] = ()
    ) -> Structured:
        op = Structured(tuple(sorted(set(loops))), frozenset(reduced), outs, list(checks))
        self.kernel.ops.append(op)
        return op

    def write(self, value: Value, element: Expr) -> None:
        """An elementwise op that computes `value`."""
        tensor, index = self.place(value)
        self.emit(self.loops_of(self.space.outputs[value].dims), [Out(tensor, index, element)])

    def scratch(self, loops: Sequence[int], element: Expr) -> Expr:
        """An elementwise op into a local; returns how to read it."""
        tensor, index = self.local(sorted(loops), element.type)
        self.emit(loops, [Out(tensor, index, element)])
        return load(tensor, index)

    def reduce(self, loops: Sequence[int], reduced: Iterable[int], element: Expr, combine: str, init: float) -> Expr:
        """A reduction into a local; splits it at the rows if it goes over both row and inner loops."""
        reduced = set(reduced)
        rows = set(self.kernel.rows)
        inner = reduced - rows
        if inner and reduced & rows:
            element = self._reduce_once(loops, inner, element, combine, init)
            loops = [loop for loop in loops if loop not in inner]
            reduced &= rows
        return self._reduce_once(loops, reduced, element, combine, init)

    def _reduce_once(self, loops: Sequence[int], reduced: set[int], element: Expr, combine: str, init: float) -> Expr:
        if not reduced:
            return self.scratch(loops, element)
        tensor, index = self.local(sorted(set(loops) - reduced), element.type)
        self.emit(loops, [Out(tensor, index, element, combine, init)], reduced)
        return load(tensor, index)


def splat(op: Op) -> float | int:
    """The number that a splat constant holds."""
    from nova.mlir import ir

    attribute = op.attrs["value"]
    element = attribute.get_splat_value()
    if isinstance(element, ir.BoolAttr):
        return int(element.value)
    number = ir.FloatAttr(element).value if isinstance(element, ir.FloatAttr) else ir.IntegerAttr(element).value
    return number
