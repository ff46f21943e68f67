"""Computing a value again where it is read, instead of storing it: where, from what, and at what price."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nova.fusion import costs
from nova.fusion.groups import Group
from nova.fusion.kinds import ALONE, STEP_OPS
from nova.fusion.records import Op, Value
from nova.fusion.rules import CONTRACTIONS, ELEMENTWISE
from nova.fusion.space import VIEWS, is_generator

if TYPE_CHECKING:
    from nova.fusion.former import Former

MAX_CHAIN = 4  # ops computed again for one operand


def recompute(former: Former, group: Group, op: Op) -> None:
    """Replaces operands that come through memory by computing them again, where that is cheaper."""
    for operand in dict.fromkeys(op.operands):
        base = former.base(operand)
        other = former.home.get(base)
        if other is None or other is group or base.op is None or base.op.name not in ELEMENTWISE:
            continue
        chain, leaves = chain_of(former, base, other, op)
        if not chain or is_stored(former, base, group):
            continue
        have = {former.base(v) for member in group.ops for v in member.operands}
        extra = sum(min(leaf.bytes, base.bytes) for leaf in leaves if leaf not in have)
        extra += sum(leaf.bytes for leaf in leaves if would_be_stored_for(former, leaf, other, op))
        pays, text = costs.recompute_pays(base, chain, extra)
        if not pays:
            former.report.add("refused", op, base.op.name, f"{text}, so the value is stored")
            continue
        clone(former, group, op, base, chain, text)


def is_stored(former: Former, value: Value, group: Group) -> bool:
    """Whether the value goes to memory anyway."""
    if value in former.outputs:
        return True
    home = former.home[value]
    for reader in former.readers[home]:
        if (
            reader is not group
            and not reader.dead
            and any(former.base(v) is value for member in reader.ops for v in member.operands)
        ):
            return True
    return any(forces(former, user) for user in value.users)


def forces(former: Former, user: Op) -> bool:
    """Whether `user` can only read its operands from memory."""
    if user.name in VIEWS:
        return any(forces(former, u) for u in user.results[0].users) or user.results[0] in former.outputs
    return user.name in CONTRACTIONS or user.name in ALONE or user.name in STEP_OPS


def would_be_stored_for(former: Former, leaf: Value, group: Group, reader: Op) -> bool:
    """Whether a value of `group` would have to be written only so that a chain can start from it."""
    inside = former.home.get(leaf) is group
    return inside and not is_read(former, leaf, group) and not is_wanted_later(former, leaf, reader)


def is_wanted_later(former: Former, value: Value, now: Op) -> bool:
    """Whether ops that come after `now` read the value too, so that it will be in memory most likely."""
    users = list(value.users)
    for user in users:
        if user.name in VIEWS:
            users += user.results[0].users
        elif user.order > now.order:
            return True
    return value in former.outputs or any(forces(former, user) for user in value.users)


def chain_of(former: Former, value: Value, group: Group, reader: Op) -> tuple[list[Op], list[Value]]:
    """The elementwise ops of `group` that compute `value` from values in memory, and these values."""
    ops: list[Op] = []
    leaves: list[Value] = []
    stack = [value]
    while stack:
        current = stack.pop()
        op = current.op
        inside = op is not None and former.home.get(current) is group and op.name in ELEMENTWISE
        if current is not value and (
            not inside
            or current.bytes * 8 <= value.bytes
            or is_read(former, current, group)
            or is_wanted_later(former, current, reader)
        ):
            if op is None or not is_generator(op):
                leaves.append(current)
            continue
        if op is None or not inside or len(ops) == MAX_CHAIN:
            return [], []
        if op not in ops:
            ops.append(op)
            stack += [former.base(v) for v in op.operands]
    return sorted(ops, key=lambda o: o.order), list(dict.fromkeys(leaves))


def is_read(former: Former, value: Value, group: Group) -> bool:
    """Whether a kernel other than its own reads `value`, or the step returns it: it is in memory."""
    if value in former.outputs:
        return True
    return any(
        not reader.dead and any(former.base(v) is value for member in reader.ops for v in member.operands)
        for reader in former.readers[group]
    )


def clone(former: Former, group: Group, op: Op, value: Value, chain: list[Op], text: str) -> None:
    """Copies `chain` into `group` for all its ops that read `value`."""
    copies: dict[Value, Value] = {}
    clones: list[Op] = []
    for number, source in enumerate(chain):
        copied = Op(source.name, [rebase(former, v, copies) for v in source.operands], source.attrs, source.location)
        first = min(member.order for member in group.ops)
        copied.order = min(first, op.order) - 1 + number / (len(chain) + 1)
        for result in source.results:
            copies[result] = copied.result(result.shape, result.dtype)
        clones.append(copied)
    before = {member: list(member.operands) for member in group.ops}
    for member in group.ops:
        member.operands = [rebase(former, v, copies) if former.base(v) is value else v for v in member.operands]
    reason = former.rebuild(group, [*clones, *group.ops], group.clones | set(clones))
    if reason is not None:
        for member, operands in before.items():
            member.operands = operands
        former.report.add("refused", op, value.op.name if value.op else "", f"cannot be computed again: {reason}")
        return
    former.report.add("recomputed", op, value.op.name if value.op else "", text)
    home = former.home[value]
    former.readers[home].discard(group)
    for member in group.ops:
        former.own(group, member)
        former.read_by(group, member)


def rebase(former: Former, value: Value, copies: dict[Value, Value]) -> Value:
    """`value`, with the views it looks through moved onto the copy of its base."""
    if value in copies:
        return copies[value]
    if (
        value.op is None
        or value.op.name not in VIEWS
        or value in former.materialised
        or former.base(value) not in copies
    ):
        return value
    view = value.op
    inner = rebase(former, view.operands[0], copies)
    moved = Op(view.name, [inner], view.attrs, view.location, view.order)
    copies[value] = moved.result(value.shape, value.dtype)
    return copies[value]


# --- optimizers -------------------------------------------------------------------------------------------------
