"""The iteration space of a group of ops: which dimensions of which tensors are walked by the same loop.

Every dimension of every tensor in a group is a list of *atoms*. An elementwise op makes the atoms of its operands and
result equal; a reshape makes two lists equal as a whole, which may split an atom in two (768 becomes 12 x 64); a
transpose permutes lists. What is left at the end are the group's loops, and every tensor that is not computed in the
group is read at `offset + sum of loop * stride` of its buffer. Views thus cost nothing, and where an op does not fit
(a reshape that does not nest, `x + x.T` on a value computed in the group) `add` says so and leaves the space as it
was.

Pure Python: imports neither MLIR nor torch.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from nova.fusion.records import Op, Value

VIEWS = frozenset({"reshape", "transpose", "broadcast", "slice", "as_strided"})
GENERATORS = frozenset({"iota"})
STEP = "nova.step"  # attribute of a constant that lies in memory, for an op that wants a whole tensor


_births = itertools.count()


class Atom:
    """An indivisible dimension, until it is split or joined with an equal one. `born` orders atoms by age."""

    __slots__ = ("born", "forward", "size", "split")

    def __init__(self, size: int):
        self.size = size
        self.born = next(_births)
        self.forward: Atom | None = None
        self.split: tuple[Atom, Atom] | None = None


Dims = list[list[Atom]]


class Instance:
    """A value as one op reads it: its dimensions' atoms and, if it lies in memory, where its elements are."""

    __slots__ = ("base", "dims", "formula", "offset", "strides")

    def __init__(
        self,
        dims: Dims,
        base: Value | None = None,
        offset: int = 0,
        strides: list[tuple[Atom, int]] | None = None,
        formula: tuple[Op, Dims] | None = None,
    ):
        self.dims, self.base, self.offset = dims, base, offset
        self.strides = strides or []
        self.formula = formula  # the generator that computes it from its own dimensions

    def viewed(self, dims: Dims) -> Instance:
        """The same elements under other dimensions."""
        return Instance(dims, self.base, self.offset, self.strides, self.formula)


class Reduction:
    """Atoms that an op sums away, of a value walked in the order `over`."""

    __slots__ = ("kept", "op", "over", "reduced")

    def __init__(self, op: Op, over: list[list[Atom]], reduced: list[list[Atom]], kept: list[list[Atom]]):
        self.op, self.over, self.reduced, self.kept = op, over, reduced, kept


class Mismatch(Exception):
    """An op does not fit into the space; the text says why."""


class Space:
    """The loops of one group. `inside` are the ops computed by it; anything else is read from memory."""

    def __init__(self, materialised: frozenset[Value] | set[Value] = frozenset()):
        self.materialised = materialised  # views and generators that have a buffer of their own
        self.inside: dict[Op, list[Instance]] = {}
        self.outputs: dict[Value, Instance] = {}  # of ops inside
        self.reductions: list[Reduction] = []
        self.inputs: dict[Value, Instance] = {}  # shared instances of what is read
        self.views: dict[Value, Instance] = {}
        self.all_inputs: list[Instance] = []
        self.restrided: list[Instance] = []  # views of them that are walked by loops of their own
        self._trail: list[Callable[[], object]] = []
        self._start = 0  # atoms born before belong to ops added earlier
        self._joined = False  # whether two of them became one loop

    # --- atoms ------------------------------------------------------------------------------------------------------

    def leaves(self, atoms: Sequence[Atom]) -> list[Atom]:
        """The final atoms that a list stands for, outermost first."""
        if not atoms:
            return []
        if len(atoms) == 1:
            (only,) = atoms
            while only.forward is not None:
                only = only.forward
            if only.split is None:
                return [only]
            atoms = only.split
        result: list[Atom] = []
        stack = list(reversed(atoms))
        while stack:
            atom = stack.pop()
            while atom.forward is not None:
                atom = atom.forward
            if atom.split is not None:
                stack += (atom.split[1], atom.split[0])
            else:
                result.append(atom)
        return result

    def _split(self, atom: Atom, outer: int) -> tuple[Atom, Atom]:
        parts = (Atom(outer), Atom(atom.size // outer))
        parts[0].born = parts[1].born = atom.born
        atom.split = parts
        self._trail.append(lambda: setattr(atom, "split", None))
        return parts

    def unify(self, a: Sequence[Atom], b: Sequence[Atom]) -> None:
        """Makes two lists the same loops; raises Mismatch where the factors do not nest."""
        left, right = self.leaves(a)[::-1], self.leaves(b)[::-1]
        while left and right:
            x, y = left.pop(), right.pop()
            if x.forward is not None or x.split is not None:
                left += self.leaves([x])[::-1]
                right.append(y)
            elif y.forward is not None or y.split is not None:
                right += self.leaves([y])[::-1]
                left.append(x)
            elif x is y:
                continue
            elif x.size == y.size:
                if x.born < self._start and y.born < self._start:
                    self._joined = True
                x.forward = y
                self._trail.append(functools.partial(setattr, x, "forward", None))
            elif x.size > y.size > 0 and x.size % y.size == 0:
                outer, inner = self._split(x, y.size)
                left += (inner, outer)
                right.append(y)
            elif y.size > x.size > 0 and y.size % x.size == 0:
                outer, inner = self._split(y, x.size)
                right += (inner, outer)
                left.append(x)
            else:
                raise Mismatch(f"extents {x.size} and {y.size} do not nest")
        if left or right:
            raise Mismatch("extents differ")

    def loops(self, dims: Dims) -> list[Atom]:
        """The distinct loops of a value, in order."""
        return list(dict.fromkeys(leaf for atoms in dims for leaf in self.leaves(atoms)))

    # --- instances --------------------------------------------------------------------------------------------------

    def _dense(self, value: Value) -> tuple[Dims, list[tuple[Atom, int]]]:
        """Loops over a row-major buffer of the value's shape, and their strides."""
        dims: Dims = [[Atom(n)] if n != 1 else [] for n in value.shape]
        strides, stride = [], 1
        for size, atoms in zip(reversed(value.shape), reversed(dims), strict=True):
            if atoms:
                strides.append((atoms[0], stride))
            stride *= size
        return dims, strides

    def _is_whole(self, value: Value, x: Instance) -> bool:
        """Whether the value is the buffer behind `x`, perhaps under another shape."""
        while value is not x.base:
            if value.op is None or value.op.name != "reshape" or value in self.materialised:
                return False
            value = value.op.operands[0]
        return True

    def _fresh(self, value: Value) -> Instance:
        dims, strides = self._dense(value)
        instance = Instance(dims, value, 0, strides)
        self.all_inputs.append(instance)
        self._trail.append(self.all_inputs.pop)
        return instance

    def use(self, value: Value, fresh: bool = False) -> Instance:
        """The instance of `value` for an op that reads it. `fresh`: not shared with earlier readers."""
        if value in self.outputs:
            return self.outputs[value]
        if not fresh and value in self.views:
            return self.views[value]
        op = value.op
        if op is not None and value not in self.materialised:
            if op.name in VIEWS:
                instance = self._view(op, self.use(op.operands[0], fresh))
                self._remember(self.views, value, instance)
                return instance
            if is_generator(op):
                dims: Dims = [[Atom(n)] if n != 1 else [] for n in value.shape]
                return Instance(dims, formula=(op, dims))
        if fresh or value not in self.inputs:
            instance = self._fresh(value)
            if not fresh:
                self._remember(self.inputs, value, instance)
            return instance
        return self.inputs[value]

    def _remember(self, table: dict[Any, Any], key: Any, item: Any) -> None:
        if key in table:
            return
        table[key] = item
        self._trail.append(lambda: table.pop(key))

    def _view(self, op: Op, x: Instance) -> Instance:
        value = op.results[0]
        if op.name == "transpose":
            return x.viewed([x.dims[axis] for axis in op.attrs["permutation"]])
        if op.name == "broadcast":
            dims: Dims = [[Atom(n)] if n != 1 else [] for n in value.shape]
            for axis, dim in enumerate(op.attrs["dims"]):
                if x.dims[axis] or value.shape[dim] == 1:
                    dims[dim] = x.dims[axis]
            return x.viewed(dims)
        if op.name == "reshape":
            try:
                return x.viewed(self._reshape(x.dims, value.shape))
            except Mismatch:
                if not self._is_whole(op.operands[0], x):
                    raise
                dims, strides = self._dense(value)  # a buffer walked by loops of its own
                return self._restride(Instance(dims, x.base, 0, strides))
        if op.name == "as_strided":
            return self._as_strided(op, x)
        return self._slice(op, x)

    def _reshape(self, dims: Dims, shape: Sequence[int]) -> Dims:
        """Regroups the atoms of `dims` to `shape`, splitting where a new dimension ends inside an atom."""
        rest = [leaf for atoms in dims for leaf in self.leaves(atoms)][::-1]
        result: Dims = []
        for size in shape:
            group: list[Atom] = []
            needed = size
            while needed != 1:
                if not rest:
                    raise Mismatch(f"cannot walk the reshape to {list(shape)} with common loops")
                atom = rest.pop()
                if atom.size and needed % atom.size == 0 and not (needed == 0 and atom.size != 0):
                    group.append(atom)
                    needed //= atom.size
                elif needed == atom.size == 0:
                    group.append(atom)
                    needed = 1
                elif needed and atom.size % needed == 0:
                    outer, inner = self._split(atom, needed)
                    group.append(outer)
                    rest.append(inner)
                    needed = 1
                else:
                    raise Mismatch(f"the reshape to {list(shape)} splits an extent of {atom.size} unevenly")
            result.append(group)
        if rest:
            raise Mismatch(f"cannot walk the reshape to {list(shape)} with common loops")
        return result

    def stride_of(self, instance: Instance, atoms: Sequence[Atom]) -> int:
        """Distance in memory of two neighbours along a dimension; Mismatch if it is not the same everywhere."""
        strides = self.final_strides(instance)
        leaves = self.leaves(atoms)
        if not leaves:
            return 0
        stride = strides.get(leaves[-1], 0)
        inner = 1
        for leaf in reversed(leaves):
            if strides.get(leaf, 0) != stride * inner:
                raise Mismatch("slices a dimension that is not evenly spaced in memory")
            inner *= leaf.size
        return stride

    def _slice(self, op: Op, x: Instance) -> Instance:
        if x.base is None:
            raise Mismatch("slices a value computed in the same kernel")
        starts, steps = op.attrs["starts"], op.attrs["strides"]
        source, target = op.operands[0].shape, op.results[0].shape
        dims, strides, offset = list(x.dims), list(x.strides), x.offset
        for axis, atoms in enumerate(x.dims):
            if (source[axis] == target[axis] and steps[axis] == 1) or not atoms:
                continue
            stride = self.stride_of(x, atoms)
            offset += starts[axis] * stride
            dims[axis] = [Atom(target[axis])] if target[axis] != 1 else []
            if dims[axis]:
                strides.append((dims[axis][0], stride * steps[axis]))
        return self._restride(Instance(dims, x.base, offset, strides))

    def _restride(self, instance: Instance) -> Instance:
        self.restrided.append(instance)
        self._trail.append(self.restrided.pop)
        return instance

    def _as_strided(self, op: Op, x: Instance) -> Instance:
        if x.base is None:
            raise Mismatch("restrides a value computed in the same kernel")
        flat = [leaf for atoms in x.dims for leaf in self.leaves(atoms)]
        if (flat and self.stride_of(x, flat) != 1) or x.offset:
            raise Mismatch("restrides a view")
        dims: Dims = [[Atom(n)] if n != 1 else [] for n in op.attrs["size"]]
        strides = [(a[0], s) for a, s in zip(dims, op.attrs["stride"], strict=True) if a]
        return self._restride(Instance(dims, x.base, op.attrs["offset"], strides))

    def final_strides(self, instance: Instance) -> dict[Atom, int]:
        """Stride of each loop in the instance's buffer, after all splits so far."""
        result: dict[Atom, int] = {}
        for atom, stride in instance.strides:
            step = stride
            for leaf in reversed(self.leaves([atom])):
                result[leaf] = step
                step *= leaf.size
        used = set(self.loops(instance.dims))
        return {leaf: stride for leaf, stride in result.items() if leaf in used}

    # --- adding ops -------------------------------------------------------------------------------------------------

    def add(self, op: Op) -> str | None:
        """Adds `op`. Returns None, or the reason why it does not fit; then nothing has changed."""
        reason = self._try(op, fresh=False)
        if reason is not None and any(value not in self.outputs for value in op.operands):
            reason = self._try(op, fresh=True)
        return reason

    def join(self, a: Dims, b: Dims) -> str | None:
        """Walks two values of one shape by the same loops; None, or why that cannot be (the caller rolls back)."""
        try:
            for left, right in zip(a, b, strict=True):
                self.unify(left, right)
            self._joined = True
            self._check_distinct([])
        except Mismatch as mismatch:
            return str(mismatch)
        return None

    def mark(self) -> int:
        """A point to `rollback` to."""
        return len(self._trail)

    def rollback(self, mark: int) -> None:
        while len(self._trail) > mark:
            self._trail.pop()()

    def _try(self, op: Op, fresh: bool) -> str | None:
        from nova.fusion.rules import RULES

        mark = self.mark()
        self._start, self._joined = next(_births), False
        try:
            operands = [self.use(value, fresh) for value in op.operands]
            rule = RULES.get(op.name)
            if rule is None:
                raise Mismatch(f"nova.{op.name} has no loops of its own")
            results = rule(self, op, operands)
            self._remember(self.inside, op, operands)
            for value, dims in zip(op.results, results, strict=True):
                self._remember(self.outputs, value, Instance(dims))
            self._check_distinct([*operands, *(self.outputs[value] for value in op.results)])
        except Mismatch as mismatch:
            self.rollback(mark)
            return str(mismatch)
        return None

    def _check_distinct(self, touched: list[Instance]) -> None:
        """No value may be walked along its diagonal. Joining old loops can break that for any earlier value too."""
        instances = touched
        if self._joined:
            read = itertools.chain.from_iterable(self.inside.values())  # views too: a window on a flat buffer has loops
            instances = [*touched, *self.outputs.values(), *self.all_inputs, *read]
        for instance in instances:
            if len(instance.dims) < 2:
                continue
            leaves = [leaf for atoms in instance.dims for leaf in self.leaves(atoms)]
            if len(leaves) != len(set(leaves)):
                raise Mismatch("reads one value at two different places (a transpose of itself)")

    def reduce(self, op: Op, over: Dims, axes: Sequence[int]) -> None:
        """Records that `op` reduces `axes` of a value walked as `over`."""
        reduced = [over[axis] for axis in axes]
        kept = [atoms for axis, atoms in enumerate(over) if axis not in axes]
        self.reductions.append(Reduction(op, over, reduced, kept))
        self._trail.append(self.reductions.pop)


def is_generator(op: Op) -> bool:
    """Whether the op's value is a formula of the index alone, and is never read from memory."""
    if op.name in GENERATORS:
        return True
    if op.name != "constant" or STEP in op.attrs:
        return False
    value = op.attrs["value"]
    return not op.results[0].shape or bool(getattr(value, "is_splat", False))
