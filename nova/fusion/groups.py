"""A dispatch group: ops that become one kernel, with the loops they share."""

from __future__ import annotations

from nova.fusion import roles as roles_module
from nova.fusion.records import Op
from nova.fusion.roles import Roles
from nova.fusion.rules import PIECEWISE
from nova.fusion.space import Atom, Space

MAX_OPS = 64  # ops in one kernel: bounds compile time and live registers
MAX_TENSORS = 28  # tensors read and written by one kernel


class Group:
    """Ops of one kernel. `position` orders the kernels of the step; `consumed` = read by a kernel placed already."""

    __slots__ = ("clones", "consumed", "dead", "kind", "ops", "position", "roles", "root", "space")

    def __init__(self, kind: str, position: float, space: Space):
        self.kind, self.position, self.space = kind, position, space
        self.ops: list[Op] = []
        self.clones: set[Op] = set()  # ops computed again here
        self.root: Op | None = None  # the contraction
        self.consumed = False
        self.dead = False  # merged into another group
        self.roles = Roles()

    @property
    def name(self) -> str:
        """A readable name from the most telling op."""
        return (self.root or self.ops[0]).name

    def fits(self, op: Op, clone: bool = False) -> str | None:
        """Adds `op` if it can be computed here; otherwise the reason why not, and nothing has changed."""
        if len(self.ops) >= MAX_OPS:
            return "the kernel has enough ops"
        if len(self.space.all_inputs) > MAX_TENSORS:
            return "the kernel reads enough tensors"
        mark = self.space.mark()
        reason = self.space.add(op)
        if reason is None:
            reason = self._check_contraction(op) if self.kind == "contraction" else self._check_loops(op, clone)
        if reason is not None:
            self.space.rollback(mark)
            return reason
        self.ops.append(op)
        if clone:
            self.clones.add(op)
        return None

    def take(self, ops: list[Op], clones: set[Op]) -> str | None:
        """Fills an empty group with ops that only fit together as a whole; None, or why they do not."""
        if len(ops) > MAX_OPS:
            return "the kernels have too many ops together"
        self.clones = clones
        for op in ops:
            reason = self.space.add(op)
            if reason is not None:
                return reason
            self.ops.append(op)
        if len(self.space.all_inputs) > MAX_TENSORS:
            return "the kernels read too many tensors together"
        if self.kind == "contraction":
            return next((reason for op in ops if (reason := self._check_contraction(op)) is not None), None)
        if not self.space.reductions and not any(op.name in PIECEWISE for op in ops):
            main = next((op for op in ops if op not in clones), ops[0])
            for op in ops:
                reason = None if op in clones or self._loops(op) == self._loops(main) else self._align(op, main)
                if reason is not None:
                    return reason
        roles = roles_module.find(self.space, clones)
        self.roles = roles
        return roles.reason or self._check_access(roles)

    def _check_loops(self, op: Op, clone: bool) -> str | None:
        if not self.space.reductions and self.ops and not clone and not self.clones:
            first = self.ops[0]
            # elementwise so far: all loops are shared
            if not any(member.name in PIECEWISE for member in [op, *self.ops]):
                return None if self._loops(op) == self._loops(first) else self._align(op, first)
        roles = roles_module.find(self.space, self.clones | {op} if clone else self.clones)
        if roles.reason is None and self.ops:
            roles.reason = self._check_access(roles)
        if roles.reason is None:
            self.roles = roles
        return roles.reason

    def _align(self, op: Op, first: Op) -> str | None:
        """Lets ops on different tensors of one shape share their loops."""
        if op.results[0].shape != first.results[0].shape:
            return "has other loops"
        return self.space.join(self.space.outputs[op.results[0]].dims, self.space.outputs[first.results[0]].dims)

    def _loops(self, op: Op) -> set[Atom]:
        space = self.space
        return {leaf for value in op.results for leaf in space.loops(space.outputs[value].dims)}

    def _check_access(self, roles: Roles) -> str | None:
        """Refuses what would make a reduction read memory with long strides, or too many tensors at once."""
        space = self.space
        for reduction in space.reductions:
            order = [leaf for atoms in reduction.over for leaf in space.leaves(atoms)]
            if not order or order[-1].size < 8 or order[-1] in roles.rows:
                continue
            for instance in space.all_inputs:
                if space.final_strides(instance).get(order[-1], 0) > 1:
                    return "would make the reduction read a transposed operand"
        return None

    def _check_contraction(self, op: Op) -> str | None:
        """An epilogue op runs over exactly the tile that the contraction makes."""
        if op is self.root:
            return None
        if op.name == "sce_partials":
            return self._check_partials(op)
        loops = self._loops(op)
        if self.space.reductions[-1].op is op:
            return "is a reduction; only elementwise ops follow a contraction in its kernel"
        if loops != self.tile():
            return "runs over other loops than the contraction's result"
        return None

    def _check_partials(self, op: Op) -> str | None:
        """The loss head's partials reduce over the columns of the contraction's tile."""
        loops = set(self.space.loops(self.space.inside[op][0].dims))
        return None if loops == self.tile() else "runs over other loops than the contraction's result"

    def tile(self) -> set[Atom]:
        """The parallel loops of the contraction."""
        assert self.root is not None
        return self._loops(self.root)
