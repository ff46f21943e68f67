"""Placing ops into groups: the algorithm behind `form-dispatches`.

Ops are placed in program order. Every group has a position, and reads only groups with smaller positions, so the
kernels can always run in order of position and no cycle can arise. An op may join a group if everything else it reads
comes earlier than that group; or if nobody has read the group yet, the group moves behind everything placed so far.

Where an op cannot join the group of one of its operands, that operand goes through memory, unless computing it again
is cheaper (`costs.recompute_pays`).
"""

from __future__ import annotations

from nova.fusion import head_major, profit, recomputation, updates
from nova.fusion.attention import dense_strides, reshaped_strides
from nova.fusion.decisions import Report
from nova.fusion.groups import Group
from nova.fusion.kinds import ALONE, ATTENTION, OPTIMIZERS, STEP_OPS
from nova.fusion.records import Function, Op, Value, make
from nova.fusion.rules import CONTRACTIONS, ELEMENTWISE, RULES
from nova.fusion.space import STEP, VIEWS, Space, is_generator

MAX_CONSTANT = 4096  # bytes of a splat that is kept as data rather than filled by a kernel
NEAR = 16  # ops of the step between a value that is computed again and the kernel that may do it
AGAIN = "nova.again"  # set by nova.graph.remat
SIBLINGS = 4  # recent readers of a tensor that an op may join


class Former:
    """Groups the ops of one function. After `run`, `groups` holds the kernels and the step's own ops, by position."""

    def __init__(self, function: Function, report: Report):
        self.function, self.report = function, report
        self.materialised: set[Value] = set()
        self.home: dict[Value, Group] = {}
        self.readers: dict[Group, set[Group]] = {}
        self.nearby: dict[Value, list[Group]] = {}
        self.replaced: dict[Value, Value] = {}
        self.groups: list[Group] = []
        self.batches: dict[object, Group] = {}
        self.outputs = set(function.outputs)
        self.now = 0.0
        self.barrier = 0.0  # kernels before it stay there: a bucket's gradients must be complete at its marker

    def run(self) -> list[Group]:
        for op in self.function.ops:
            self.place(op)
        self.function.outputs = [self.output(value) for value in self.function.outputs]
        return sorted((g for g in self.groups if not g.dead and g.ops), key=lambda g: g.position)

    def base(self, value: Value) -> Value:
        """The value in memory that a view reads."""
        while value.op is not None and value.op.name in VIEWS and value not in self.materialised:
            value = value.op.operands[0]
        return value

    def in_memory(self, value: Value) -> bool:
        """Whether the value is a whole buffer, perhaps under another shape."""
        while (op := value.op) is not None and value not in self.materialised:
            if op.name != "reshape":
                return op.name not in VIEWS and not is_generator(op)
            value = op.operands[0]
        return True

    def strides(self, value: Value) -> tuple[int, ...] | None:
        """The strides with which a value is read from a buffer; None if views of the buffer don't make it."""
        if value.op is None or value.op.name not in VIEWS or value in self.materialised:
            return dense_strides(value.shape) if self.in_memory(value) else None
        source, attrs = value.op.operands[0], value.op.attrs
        below = self.strides(source)
        if below is None:
            return None
        if value.op.name == "reshape":
            return reshaped_strides(source.shape, below, value.shape)
        if value.op.name == "transpose":
            return tuple(below[axis] for axis in attrs["permutation"])
        if value.op.name == "slice":
            return tuple(stride * step for stride, step in zip(below, attrs["strides"], strict=True))
        if value.op.name == "as_strided":
            return tuple(attrs["stride"]) if self.in_memory(source) else None
        repeated = [0] * len(value.shape)
        for axis, dim in enumerate(attrs["dims"]):
            repeated[dim] = below[axis] if source.shape[axis] == value.shape[dim] else 0
        return tuple(repeated)

    def materialise(self, value: Value, why: str, op: Op) -> Value:
        """A value with the same elements in a buffer of its own."""
        value = self.replaced.get(value, value)
        if self.in_memory(value):
            return value
        source = value
        if value.op is not None and value.op.name == "constant" and value.bytes <= MAX_CONSTANT:
            constant = make("constant", [], value.shape, value.dtype, value.op, **value.op.attrs, **{STEP: True})
            self.place_alone(constant)
            return constant.results[0]
        if value.op is not None and value.op.name == "reshape":
            inner = self.materialise(value.op.operands[0], why, op)
            reshape = make("reshape", [inner], value.shape, value.dtype, value.op)
            self.replaced[value] = reshape.results[0]
            return reshape.results[0]
        copy = make("copy", [source], value.shape, value.dtype, value.op)
        reason = Space(self.materialised).add(copy)
        if reason is not None:  # not even a copy can read through these views at once
            assert value.op is not None and value.op.name in VIEWS, f"{value}: {reason}"
            inner = self.materialise(value.op.operands[0], reason, op)
            view = make(value.op.name, [inner], value.shape, value.dtype, value.op, **value.op.attrs)
            self.replaced[value] = self.materialise(view.results[0], why, op)
            return self.replaced[value]
        self.report.add("materialised", op, source.op.name if source.op else "", why)
        self.replaced[value] = copy.results[0]
        self.place_loops(copy)
        return copy.results[0]

    def output(self, value: Value) -> Value:
        """What the step returns for `value`: something in memory."""
        value = self.replaced.get(value, value)
        if value.op is not None and not self.in_memory(value):
            return self.materialise(value, "is an output of the step", value.op)
        return value

    def new_group(self, kind: str) -> Group:
        self.now += 1.0
        group = Group(kind, self.now, Space(self.materialised))
        self.groups.append(group)
        self.readers[group] = set()
        return group

    def read_by(self, group: Group, op: Op) -> None:
        """Records that `group` reads the operands of `op`."""
        for operand in op.operands:
            base = self.base(operand)
            home = self.home.get(base)
            if home is not None and home is not group:
                self.readers[home].add(group)
            near = self.nearby.setdefault(base, [])
            if group not in near:
                near.append(group)
                del near[:-SIBLINGS]

    def own(self, group: Group, op: Op) -> None:
        for value in op.results:
            self.home[value] = group

    def place(self, op: Op) -> None:
        if self.replaced:
            op.operands = [self.replaced.get(value, value) for value in op.operands]
        if op.name in VIEWS or is_generator(op):
            return
        if op.name in STEP_OPS or op.name in ALONE:
            self.place_alone(op)
        elif op.name in OPTIMIZERS:
            updates.place_optimizer(self, op)
        elif updates.is_prologue(self, op):
            return
        elif updates.is_operand_cast(self, op):
            updates.place_cast(self, op)
        elif op.name in CONTRACTIONS:
            self.place_contraction(op)
        elif op.name == "concat" and head_major.absorb_concat(self, op):
            return
        elif op.name in RULES:
            self.place_loops(op)
        elif op.name == "constant":
            self.place_alone(op)
        else:
            raise NotImplementedError(f"nova.{op.name} has no kernel")

    def place_alone(self, op: Op) -> None:
        """An op that is a kernel by itself, or stays in the step."""
        why = "is read by an op that wants whole tensors"
        op.operands = [
            value if op.name in ATTENTION and self.strides(value) is not None else self.materialise(value, why, op)
            for value in op.operands
        ]
        group = self.new_group(ALONE.get(op.name, "step"))
        if op.name == "bucket_ready":
            self.barrier = group.position
        group.ops.append(op)
        self.read_by(group, op)
        self.own(group, op)
        if op.name in ATTENTION:
            for value in op.results:
                head_major.store_head_major(self, group, value)

    def place_contraction(self, op: Op) -> None:
        """A new kernel; operands computed elsewhere come from memory, views of them fold into its access."""
        for position, operand in enumerate(op.operands):
            source = self.base(operand)
            if source.op is not None and is_generator(source.op):
                op.operands[position] = self.materialise(operand, "operand of a contraction", op)
        group = self.new_group("contraction")
        group.root = op
        reason = group.fits(op)
        if reason is not None:
            self.report.add("refused", op, "", f"a view of its operands cannot fold into its access: {reason}")
            op.operands = [self.materialise(value, "operand of a contraction", op) for value in op.operands]
            reason = group.fits(op)
            assert reason is None, reason
            self.now += 1.0
            group.position = self.now  # behind the copies made for it
        self.read_by(group, op)
        self.own(group, op)

    def place_loops(self, op: Op) -> None:
        for group in self.candidates(op):
            reason = (
                profit.epilogue_pays(self, group, op)
                or profit.keeps_long(self, group, op)
                or profit.waits_for_little(self, group, op)
                or profit.needs_own_buffer(self, group, op)
                or self.order(group, op)
                or group.fits(op)
            )
            if reason is None:
                self.report.add("fused", op, group.name, "shares its loops")
                break
            self.report.add("refused", op, group.name, reason)
        else:
            group = self.new_group("loops")
            reason = group.fits(op)
            if reason is not None:
                self.report.add("refused", op, "", f"a view of its operands cannot fold into its access: {reason}")
                op.operands = [self.materialise(value, "cannot be read through its view", op) for value in op.operands]
                reason = group.fits(op)
                assert reason is None, f"{op}: {reason}"
                self.now += 1.0
                group.position = self.now
        self.read_by(group, op)
        self.own(group, op)
        self.absorb(group, op)
        recomputation.recompute(self, group, op)

    def candidates(self, op: Op) -> list[Group]:
        """Groups that `op` may join: those computing its operands, latest first, then recent readers of them."""
        bases = [self.base(value) for value in op.operands]
        homes = {self.home[b] for b in bases if b in self.home}
        found = sorted(homes, key=lambda g: -g.position)
        for base in bases:
            if base.bytes * 2 >= max((value.bytes for value in op.results), default=0) and base.bytes > 64:
                found += [g for g in reversed(self.nearby.get(base, [])) if g.kind == "loops" and g not in found]
        elementwise = op.name in ELEMENTWISE or op.name in ("copy", "sce_partials")
        if AGAIN in op.attrs:  # computed again to be short-lived: only with ops that stand near it
            near = [
                g for base in bases for g in self.nearby.get(base, []) if g.kind == "contraction" and g not in found
            ]
            recent = [g for g in [*found, *near] if g.ops and g.ops[-1].order >= op.order - NEAR]
            return [g for g in recent if not g.dead and (g.kind == "loops" or elementwise)]
        return [
            g
            for g in found
            if not g.dead and (g.kind == "loops" or (g.kind == "contraction" and elementwise and g in homes))
        ]

    def order(self, group: Group, op: Op) -> str | None:
        """Makes sure that everything `op` reads is there when `group` runs; None, or why that cannot be."""
        latest = 0.0
        for operand in op.operands:
            home = self.home.get(self.base(operand))
            if home is not None and home is not group:
                latest = max(latest, home.position)
        if latest < group.position:
            return None
        if group.position <= self.barrier:
            return "would move behind the marker of a gradient bucket"
        if any(not reader.dead for reader in self.readers[group]):
            return "needs a value computed after a reader of that kernel"
        self.now += 1.0
        group.position = self.now
        return None

    def absorb(self, group: Group, op: Op) -> None:
        """Moves the other producers of `op` that nobody else reads into its group."""
        for operand in op.operands:
            base = self.base(operand)
            other = self.home.get(base)
            if other is None or other is group or other.kind != "loops" or other.dead:
                continue
            if any(reader is not group and not reader.dead for reader in self.readers[other]):
                continue
            if other.position <= self.barrier < group.position:
                continue
            if group.root is not None and any(self.home.get(self.base(v)) is other for v in group.root.operands):
                continue  # what a contraction multiplies must be there before its kernel runs
            if any(value in self.outputs for member in other.ops for value in member.results) and group.kind != "loops":
                continue
            reason = profit.needs_own_buffer(self, other, op) or self.rebuild(
                group, [*other.ops, *group.ops], other.clones | group.clones
            )
            if reason is not None:
                self.report.add("refused", op, other.name, reason)
                continue
            self.report.add("fused", op, other.name, "its producers have no other reader")
            self.merge(group, other)

    def merge(self, group: Group, other: Group) -> None:
        other.dead = True
        for member in other.ops:
            self.own(group, member)
            self.read_by(group, member)
        for readers in self.readers.values():
            readers.discard(other)
        other.ops = []

    def rebuild(self, group: Group, ops: list[Op], clones: set[Op]) -> str | None:
        """Gives `group` exactly `ops` if they fit together."""
        trial = Group(group.kind, group.position, Space(self.materialised))
        trial.root = group.root
        ordered = sorted(ops, key=lambda o: (o is not group.root, o.order))
        reason = trial.take(ordered, clones)
        if reason is not None:
            return reason
        group.ops, group.clones, group.space, group.roles = trial.ops, trial.clones, trial.space, trial.roles
        return None
