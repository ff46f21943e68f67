"""Attention writes its results where they are read: heads back beside one another, gradients into one packed buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nova.fusion.groups import Group
from nova.fusion.records import Op, Value, make

if TYPE_CHECKING:
    from nova.fusion.former import Former


def store_head_major(former: Former, group: Group, value: Value) -> None:
    """Lets attention write a result as its transpose, where somebody reads it so: then no kernel repacks heads.

    Other readers see it through the inverse view. A gradient that only goes into a concatenation stays as it is:
    `absorb_concat` lets attention write that.
    """
    transposes = [user for user in value.users if user.name == "transpose"]
    if not transposes or value in former.outputs:
        return
    if len(value.users) == 1 and concat_of(former, value) is not None:
        return
    first = transposes[0]
    permutation = first.attrs["permutation"]
    swapped = make("transpose", [value], first.results[0].shape, value.dtype, first, permutation=permutation)
    copy = make("copy", [swapped.results[0]], first.results[0].shape, value.dtype, first)
    stored = copy.results[0]
    group.ops.append(copy)
    former.own(group, copy)
    inverse = tuple(permutation.index(axis) for axis in range(len(permutation)))
    view = make("transpose", [stored], value.shape, value.dtype, first, permutation=inverse)
    former.replaced[value] = view.results[0]
    for user in transposes:
        if user.attrs["permutation"] == permutation:
            former.replaced[user.results[0]] = stored
    stored.users = list(first.results[0].users)
    view.results[0].users = [user for user in value.users if user is not first]


def concat_of(former: Former, value: Value) -> Op | None:
    """The concatenation that is the only reader of a value, through transposes and reshapes."""
    while len(value.users) == 1 and value not in former.outputs:
        user = value.users[0]
        if user.name == "concat":
            return user if user.operands.count(value) == 1 else None
        if user.name not in ("transpose", "reshape"):
            return None
        value = user.results[0]
    return None


def absorb_concat(former: Former, op: Op) -> bool:
    """Lets attention's backward write its gradients into the packed buffer that a concatenation of them makes."""
    sources = [former.base(value) for value in op.operands]
    homes = {former.home.get(source) for source in sources}
    group = next(iter(homes)) if len(homes) == 1 else None
    if group is None or group.kind != "attention_backward" or len(set(sources)) != len(sources):
        return False
    if any(source.op is None or concat_of(former, source) is not op for source in sources):
        return False
    group.ops.append(op)
    former.own(group, op)
    former.report.add("fused", op, group.name, "its gradients are written where the concatenation puts them")
    return True
