"""Whether joining a kernel that an op could join saves memory traffic, or only moves it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nova.fusion import recomputation
from nova.fusion.groups import Group
from nova.fusion.records import Op, Value
from nova.fusion.rules import CONTRACTIONS, ELEMENTWISE
from nova.fusion.space import VIEWS, is_generator

if TYPE_CHECKING:
    from nova.fusion.former import Former

FAR = 48  # ops between a kernel and an op that would lengthen the life of a value by joining it
LARGE_READ = 64 << 20  # bytes that a kernel reads, beside which a launch more is nothing
NEGLIGIBLE = 1 / 64  # of what a kernel reads
MAX_LOOK = 10  # elementwise ops looked ahead for something that stores their result


def epilogue_pays(former: Former, group: Group, op: Op) -> str | None:
    """Why `op` should not join a contraction although it could: its result would be stored beside the value it reads,
    only for kernels that can compute it themselves."""
    if group.kind != "contraction" or op.name in ("copy", "sce_partials"):
        return None
    read = {base for value in op.operands if former.home.get(base := former.base(value)) is group}
    if all(len(readers_of(former, value)) == 1 for value in read) or reaches_memory(former, op, group, op, MAX_LOOK):
        return None
    return "would be stored beside the value it reads, for readers that can compute it"


def keeps_long(former: Former, group: Group, op: Op) -> str | None:
    """Why `op` should not run in a kernel far in front of where it stands: what it makes would occupy memory from
    there, beside the values it is made of if these are kept anyway."""
    if op.order - group.ops[-1].order <= FAR:
        return None
    read = [base for value in op.operands if former.home.get(base := former.base(value)) is group or base.op is None]
    if not any(recomputation.is_stored(former, base, group) if base in former.home else True for base in read):
        return None
    if sum(value.bytes for value in op.results) * 8 <= max((value.bytes for value in op.operands), default=0):
        return None
    return "would be kept in memory from that kernel on"


def waits_for_little(former: Former, group: Group, op: Op) -> str | None:
    """Why `op` should not join a kernel of which it needs nothing: what both read is a trifle of what that kernel
    moves, and all of that would stand between `op` and its readers. (A mean divides by a count of labels.)"""
    bases = {former.base(value) for value in op.operands}
    if any(former.home.get(base) is group for base in bases):
        return None
    read = {former.base(value) for member in group.ops for value in member.operands}
    most, shared = max((value.bytes for value in read), default=0), sum(value.bytes for value in bases & read)
    if most < LARGE_READ or shared > NEGLIGIBLE * most:
        return None
    return f"shares {shared} B with a kernel that reads {most} B, and its readers would wait for that"


def needs_own_buffer(former: Former, group: Group, op: Op) -> str | None:
    """Why a gradient should not be made in the kernel of its loss: that kernel reads labels' logits from anywhere in
    a row, so that the gradient could not take the place of logits that nobody else needs."""
    if op.name != "sce_backward":
        return None
    logits = former.base(op.operands[1])
    if logits.op is None or not any(member.name == "sce" for member in group.ops) or logits in former.outputs:
        return None
    if any(reader.order > op.order for reader in readers_of(former, logits)):
        return None
    return "would no longer be written in the place of its logits"


def readers_of(former: Former, value: Value) -> list[Op]:
    """Ops that read a value, through views."""
    found: list[Op] = []
    for user in value.users:
        found += readers_of(former, user.results[0]) if user.name in VIEWS else [user]
    return found


def reaches_memory(former: Former, op: Op, group: Group, now: Op, depth: int) -> bool:
    """Whether elementwise ops that could all be in `group` lead from `op` to a value that must be stored."""
    result = op.results[0]
    if result in former.outputs:
        return True
    for user in readers_of(former, result):
        if user.name == "sce_partials":  # they end in this kernel
            return True
        if recomputation.forces(former, user) or any(value in former.outputs for value in user.results):
            return True
        if user.name not in ELEMENTWISE or depth == 0:
            continue
        others = [former.base(value) for value in user.operands]
        if any(is_other_tile(former, value, group) for value in others):
            return True
        fits = all(value is result or is_available(former, value, group, depth - 1) for value in others)
        if fits and reaches_memory(former, user, group, now, depth - 1):
            return True
    return False


def is_other_tile(former: Former, value: Value, group: Group) -> bool:
    """Whether a value is computed with another contraction, so that what combines the two reads one from memory."""
    home = former.home.get(value)
    if home is not None:
        return home is not group and home.kind == "contraction"
    return value.op is not None and value.op.name in CONTRACTIONS


def is_available(former: Former, value: Value, group: Group, depth: int) -> bool:
    """Whether `group` can read or compute a value where it stands."""
    op = value.op
    home = former.home.get(value)
    if op is None or home is group or is_generator(op):
        return True
    if home is not None:
        return home.position < group.position
    if op.name not in ELEMENTWISE or depth <= 0:
        return False
    return all(is_available(former, former.base(v), group, depth - 1) for v in op.operands)
