"""Placing ops into groups: the algorithm behind `form-dispatches`.

Ops are placed in program order. Every group has a position, and reads only groups with smaller positions, so the kernels
can always run in order of position and no cycle can arise. An op may join a group if everything else it reads comes
earlier than that group; or if nobody has read the group yet, the group moves behind everything placed so far.

Where an op cannot join the group of one of its operands, that operand goes through memory, unless computing it again
is cheaper (`costs.recompute_pays`).
"""

from __future__ import annotations

from nova.fusion import costs
from nova.fusion.attention import dense_strides, reshaped_strides
from nova.fusion.decisions import Report
from nova.fusion.groups import Group
from nova.fusion.records import Function, Op, Value, make
from nova.fusion.rules import CONTRACTIONS, ELEMENTWISE, RULES
from nova.fusion.space import STEP, VIEWS, Space, is_generator

OPTIMIZERS = frozenset({"sgd", "adam", "adagrad", "rmsprop"})
ATTENTION = frozenset({"attention", "attention_backward"})
ALONE = {
    "attention": "attention_forward", "attention_backward": "attention_backward", "take_backward": "scatter",
    "scatter": "scatter", "index_put": "scatter", "as_strided_scatter": "scatter", "max_pool2d_backward": "scatter",
    "cumsum": "scan", "cumprod": "scan", "foreach_norm": "multi_tensor",
}  # fmt: skip
STEP_OPS = frozenset({"aten_call", "bucket_ready", "func.call"})
MAX_CHAIN = 4  # ops computed again for one operand
MAX_CONSTANT = 4096  # bytes of a splat that is kept as data rather than filled by a kernel
NEAR = 16  # ops of the step between a value that is computed again and the kernel that may do it
AGAIN = "nova.again"  # set by nova.graph.remat
FAR = 48  # ops between a kernel and an op that would lengthen the life of a value by joining it
MAX_LOOK = 10  # elementwise ops looked ahead for something that stores their result
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

    # --- values -----------------------------------------------------------------------------------------------------

    def base(self, value: Value) -> Value:
        """The value in memory that a view reads."""
        while value.op is not None and value.op.name in VIEWS and value not in self.materialised:
            value = value.op.operands[0]
        return value

    def in_memory(self, value: Value) -> bool:
        """Whether the value is a whole buffer, perhaps under another shape."""
        while value.op is not None and value not in self.materialised:
            if value.op.name == "reshape":
                value = value.op.operands[0]
            else:
                return value.op.name not in VIEWS and not is_generator(value.op)
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

    # --- groups -----------------------------------------------------------------------------------------------------

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
            self.place_optimizer(op)
        elif self.is_prologue(op):
            return
        elif op.name in CONTRACTIONS:
            self.place_contraction(op)
        elif op.name == "concat" and self.absorb_concat(op):
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
                self.store_head_major(group, value)

    def store_head_major(self, group: Group, value: Value) -> None:
        """Lets attention write a result as its transpose, where somebody reads it so: then no kernel repacks heads.

        Other readers see it through the inverse view. A gradient that only goes into a concatenation stays as it is:
        `absorb_concat` lets attention write that.
        """
        transposes = [user for user in value.users if user.name == "transpose"]
        if not transposes or value in self.outputs:
            return
        if len(value.users) == 1 and self.concat_of(value) is not None:
            return
        first = transposes[0]
        permutation = first.attrs["permutation"]
        swapped = make("transpose", [value], first.results[0].shape, value.dtype, first, permutation=permutation)
        copy = make("copy", [swapped.results[0]], first.results[0].shape, value.dtype, first)
        stored = copy.results[0]
        group.ops.append(copy)
        self.own(group, copy)
        inverse = tuple(permutation.index(axis) for axis in range(len(permutation)))
        view = make("transpose", [stored], value.shape, value.dtype, first, permutation=inverse)
        self.replaced[value] = view.results[0]
        for user in transposes:
            if user.attrs["permutation"] == permutation:
                self.replaced[user.results[0]] = stored
        stored.users = [user for user in first.results[0].users]
        view.results[0].users = [user for user in value.users if user is not first]

    def concat_of(self, value: Value) -> Op | None:
        """The concatenation that is the only reader of a value, through transposes and reshapes."""
        while len(value.users) == 1 and value not in self.outputs:
            user = value.users[0]
            if user.name == "concat":
                return user if user.operands.count(value) == 1 else None
            if user.name not in ("transpose", "reshape"):
                return None
            value = user.results[0]
        return None

    def absorb_concat(self, op: Op) -> bool:
        """Lets attention's backward write its gradients into the packed buffer that a concatenation of them makes."""
        sources = [self.base(value) for value in op.operands]
        homes = {self.home.get(source) for source in sources}
        group = next(iter(homes)) if len(homes) == 1 else None
        if group is None or group.kind != "attention_backward" or len(set(sources)) != len(sources):
            return False
        if any(source.op is None or self.concat_of(source) is not op for source in sources):
            return False
        group.ops.append(op)
        self.own(group, op)
        self.report.add("fused", op, group.name, "its gradients are written where the concatenation puts them")
        return True

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

    # --- elementwise ops, reductions --------------------------------------------------------------------------------

    def place_loops(self, op: Op) -> None:
        for group in self.candidates(op):
            reason = (
                self.epilogue_pays(group, op) or self.keeps_long(group, op) or self.order(group, op) or group.fits(op)
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
        self.recompute(group, op)

    def candidates(self, op: Op) -> list[Group]:
        """Groups that `op` may join: those computing its operands, latest first, then recent readers of its operands."""
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

    def epilogue_pays(self, group: Group, op: Op) -> str | None:
        """Why `op` should not join a contraction although it could: its result would be stored beside the value it reads,
        only for kernels that can compute it themselves."""
        if group.kind != "contraction" or op.name in ("copy", "sce_partials"):
            return None
        read = {base for value in op.operands if self.home.get(base := self.base(value)) is group}
        if all(len(self.readers_of(value)) == 1 for value in read) or self.reaches_memory(op, group, op, MAX_LOOK):
            return None
        return "would be stored beside the value it reads, for readers that can compute it"

    def keeps_long(self, group: Group, op: Op) -> str | None:
        """Why `op` should not run in a kernel far in front of where it stands: what it makes would occupy memory from
        there, beside the values it is made of if these are kept anyway."""
        if op.order - group.ops[-1].order <= FAR:
            return None
        read = [base for value in op.operands if self.home.get(base := self.base(value)) is group or base.op is None]
        if not any(self.is_stored(base, group) if base in self.home else True for base in read):
            return None
        if sum(value.bytes for value in op.results) * 8 <= max((value.bytes for value in op.operands), default=0):
            return None
        return "would be kept in memory from that kernel on"

    def readers_of(self, value: Value) -> list[Op]:
        """Ops that read a value, through views."""
        found: list[Op] = []
        for user in value.users:
            found += self.readers_of(user.results[0]) if user.name in VIEWS else [user]
        return found

    def reaches_memory(self, op: Op, group: Group, now: Op, depth: int) -> bool:
        """Whether elementwise ops that could all be in `group` lead from `op` to a value that must be stored."""
        result = op.results[0]
        if result in self.outputs:
            return True
        for user in self.readers_of(result):
            if self.forces(user) or any(value in self.outputs for value in user.results):
                return True
            if user.name not in ELEMENTWISE or depth == 0:
                continue
            others = [self.base(value) for value in user.operands]
            if any(self.is_other_tile(value, group) for value in others):
                return True
            fits = all(value is result or self.is_available(value, group, depth - 1) for value in others)
            if fits and self.reaches_memory(user, group, now, depth - 1):
                return True
        return False

    def is_other_tile(self, value: Value, group: Group) -> bool:
        """Whether a value is computed with another contraction, so that what combines the two reads one from memory."""
        home = self.home.get(value)
        if home is not None:
            return home is not group and home.kind == "contraction"
        return value.op is not None and value.op.name in CONTRACTIONS

    def is_available(self, value: Value, group: Group, depth: int) -> bool:
        """Whether `group` can read or compute a value where it stands."""
        op = value.op
        home = self.home.get(value)
        if op is None or home is group or is_generator(op):
            return True
        if home is not None:
            return home.position < group.position
        if op.name not in ELEMENTWISE or depth <= 0:
            return False
        return all(self.is_available(self.base(v), group, depth - 1) for v in op.operands)

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
            if any(value in self.outputs for member in other.ops for value in member.results) and group.kind != "loops":
                continue
            reason = self.rebuild(group, [*other.ops, *group.ops], other.clones | group.clones)
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

    # --- computing again --------------------------------------------------------------------------------------------

    def recompute(self, group: Group, op: Op) -> None:
        """Replaces operands that come through memory by computing them again, where that is cheaper."""
        for operand in dict.fromkeys(op.operands):
            base = self.base(operand)
            other = self.home.get(base)
            if other is None or other is group or base.op is None or base.op.name not in ELEMENTWISE:
                continue
            chain, leaves = self.chain(base, other, op)
            if not chain or self.is_stored(base, group):
                continue
            have = {self.base(v) for member in group.ops for v in member.operands}
            extra = sum(min(leaf.bytes, base.bytes) for leaf in leaves if leaf not in have)
            extra += sum(leaf.bytes for leaf in leaves if self.would_be_stored_for(leaf, other, op))
            pays, text = costs.recompute_pays(base, chain, extra)
            if not pays:
                self.report.add("refused", op, base.op.name, f"{text}, so the value is stored")
                continue
            self.clone(group, op, base, chain, text)

    def is_stored(self, value: Value, group: Group) -> bool:
        """Whether the value goes to memory anyway."""
        if value in self.outputs:
            return True
        home = self.home[value]
        for reader in self.readers[home]:
            if (
                reader is not group
                and not reader.dead
                and any(self.base(v) is value for member in reader.ops for v in member.operands)
            ):
                return True
        return any(self.forces(user) for user in value.users)

    def forces(self, user: Op) -> bool:
        """Whether `user` can only read its operands from memory."""
        if user.name in VIEWS:
            return any(self.forces(u) for u in user.results[0].users) or user.results[0] in self.outputs
        return user.name in CONTRACTIONS or user.name in ALONE or user.name in STEP_OPS

    def would_be_stored_for(self, leaf: Value, group: Group, reader: Op) -> bool:
        """Whether a value of `group` would have to be written only so that a chain can start from it."""
        inside = self.home.get(leaf) is group
        return inside and not self.is_read(leaf, group) and not self.is_wanted_later(leaf, reader)

    def is_wanted_later(self, value: Value, now: Op) -> bool:
        """Whether ops that come after `now` read the value too, so that it will be in memory most likely."""
        users = list(value.users)
        for user in users:
            if user.name in VIEWS:
                users += user.results[0].users
            elif user.order > now.order:
                return True
        return value in self.outputs or any(self.forces(user) for user in value.users)

    def chain(self, value: Value, group: Group, reader: Op) -> tuple[list[Op], list[Value]]:
        """The elementwise ops of `group` that compute `value` from values in memory, and these values."""
        ops: list[Op] = []
        leaves: list[Value] = []
        stack = [value]
        while stack:
            current = stack.pop()
            op = current.op
            inside = op is not None and self.home.get(current) is group and op.name in ELEMENTWISE
            if current is not value and (
                not inside
                or current.bytes * 8 <= value.bytes
                or self.is_read(current, group)
                or self.is_wanted_later(current, reader)
            ):
                if op is None or not is_generator(op):
                    leaves.append(current)
                continue
            if op is None or not inside or len(ops) == MAX_CHAIN:
                return [], []
            if op not in ops:
                ops.append(op)
                stack += [self.base(v) for v in op.operands]
        return sorted(ops, key=lambda o: o.order), list(dict.fromkeys(leaves))

    def is_read(self, value: Value, group: Group) -> bool:
        """Whether a kernel other than its own reads `value`, or the step returns it: it is in memory."""
        if value in self.outputs:
            return True
        return any(
            not reader.dead and any(self.base(v) is value for member in reader.ops for v in member.operands)
            for reader in self.readers[group]
        )

    def clone(self, group: Group, op: Op, value: Value, chain: list[Op], text: str) -> None:
        """Copies `chain` into `group` for all its ops that read `value`."""
        copies: dict[Value, Value] = {}
        clones: list[Op] = []
        for number, source in enumerate(chain):
            copied = Op(source.name, [self.rebase(v, copies) for v in source.operands], source.attrs, source.location)
            first = min(member.order for member in group.ops)
            copied.order = min(first, op.order) - 1 + number / (len(chain) + 1)
            for result in source.results:
                copies[result] = copied.result(result.shape, result.dtype)
            clones.append(copied)
        before = {member: list(member.operands) for member in group.ops}
        for member in group.ops:
            member.operands = [self.rebase(v, copies) if self.base(v) is value else v for v in member.operands]
        reason = self.rebuild(group, [*clones, *group.ops], group.clones | set(clones))
        if reason is not None:
            for member, operands in before.items():
                member.operands = operands
            self.report.add("refused", op, value.op.name if value.op else "", f"cannot be computed again: {reason}")
            return
        self.report.add("recomputed", op, value.op.name if value.op else "", text)
        home = self.home[value]
        self.readers[home].discard(group)
        for member in group.ops:
            self.own(group, member)
            self.read_by(group, member)

    def rebase(self, value: Value, copies: dict[Value, Value]) -> Value:
        """`value`, with the views it looks through moved onto the copy of its base."""
        if value in copies:
            return copies[value]
        if (
            value.op is None
            or value.op.name not in VIEWS
            or value in self.materialised
            or self.base(value) not in copies
        ):
            return value
        view = value.op
        inner = self.rebase(view.operands[0], copies)
        moved = Op(view.name, [inner], view.attrs, view.location, view.order)
        copies[value] = moved.result(value.shape, value.dtype)
        return copies[value]

    # --- optimizers -------------------------------------------------------------------------------------------------

    def is_prologue(self, op: Op) -> bool:
        """Whether `op` only scales the gradient of one optimizer op: it is computed in that op's kernel."""
        if op.name not in ("mul", "div") or len(op.results[0].users) != 1 or op.results[0] in self.outputs:
            return False
        user = op.results[0].users[0]
        scalars = [v for v in op.operands if not v.shape or v.bytes <= 8]
        tensors = [v for v in op.operands if v.shape == op.results[0].shape]
        if not scalars or not tensors or len(op.operands) != 2:
            return False
        if user.name in OPTIMIZERS:
            return user.operands[1] is op.results[0] and op.results[0] not in user.operands[2:]
        return self.is_prologue(user)

    def place_optimizer(self, op: Op) -> None:
        """One kernel for all updates with the same hyperparameters."""
        chain = [op]
        while (source := chain[-1].operands[1 if len(chain) == 1 else 0].op) is not None and self.is_prologue(source):
            if source.operands[0].shape != source.results[0].shape:
                if source.name == "div":
                    break
                source.operands.reverse()
            chain.append(source)
        chain.reverse()
        for member in chain:
            member.operands = [self.materialise(v, "is read by an optimizer", op) for v in member.operands]
        key = batch_key(chain)
        group = self.batches.get(key)
        reason = "has other hyperparameters" if group is None else self.order_chain(group, chain)
        if group is None or reason is not None:
            if group is not None:
                self.report.add("refused", op, group.name, str(reason))
            group = self.new_group("multi_tensor")
            group.root = op
            self.batches[key] = group
        else:
            self.report.add("batched", op, group.name, "same update, same hyperparameters")
        for member in chain:
            group.ops.append(member)
            self.read_by(group, member)
            self.own(group, member)

    def order_chain(self, group: Group, chain: list[Op]) -> str | None:
        for member in chain:
            reason = self.order(group, member)
            if reason is not None:
                return reason
        return None


def batch_key(chain: list[Op]) -> object:
    """What updates must have in common to share a kernel: everything but the tensors themselves."""
    parts: list[object] = []
    inside = {value: (position, i) for position, op in enumerate(chain) for i, value in enumerate(op.results)}
    for op in chain:
        wiring = []
        for operand in op.operands:
            if operand in inside:
                wiring.append(("inside", inside[operand]))
            elif is_list_operand(op, operand):
                wiring.append(("list", operand.dtype, len(operand.shape) == 0))
            else:
                wiring.append(("shared", operand))
        parts.append((op.name, tuple(sorted(op.attrs.items())), tuple(wiring), tuple(v.dtype for v in op.results)))
    return tuple(parts)


def is_list_operand(op: Op, operand: Value) -> bool:
    """Whether an operand of an optimizer (or of the ops in front of it) is one tensor of the list, not shared by all."""
    if op.name in OPTIMIZERS:
        positions = [i for i, v in enumerate(op.operands) if v is operand]
        return any(i in STEP_POSITIONS.get(op.name, ()) or operand.shape != () or is_state(op, i) for i in positions)
    return operand is op.operands[0]


# position of the step count, a 0-d tensor that every parameter has one of
STEP_POSITIONS = {"adam": (4,), "adagrad": (3,), "rmsprop": (3,)}
_SCALARS = {"sgd": range(2, 6), "adam": range(5, 10), "adagrad": range(4, 8), "rmsprop": range(4, 9)}


def is_state(op: Op, position: int) -> bool:
    """Whether operand `position` belongs to the parameter, though it may be 0-d like a hyperparameter."""
    if position in _SCALARS[op.name]:
        return False
    last = len(op.operands) - 1
    if op.attrs["has_found_inf"] and position == last:
        return False
    if op.name == "sgd" and op.attrs["has_first"] and position == last - bool(op.attrs["has_found_inf"]):
        return False
    return True
