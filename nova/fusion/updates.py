"""Many small ops on different tensors as one kernel: optimizer updates with equal hyperparameters, with what only
scales their gradients, and the casts of parameters that autocast puts in front of contractions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nova.fusion.groups import Group
from nova.fusion.kinds import OPTIMIZERS
from nova.fusion.records import Op, Value
from nova.fusion.rules import CONTRACTIONS
from nova.fusion.space import VIEWS

if TYPE_CHECKING:
    from nova.fusion.former import Former

MOST = 1 << 15  # ops of one kernel


def is_prologue(former: Former, op: Op) -> bool:
    """Whether `op` only scales the gradient of one optimizer op: it is computed in that op's kernel."""
    if op.name not in ("mul", "div") or len(op.results[0].users) != 1 or op.results[0] in former.outputs:
        return False
    user = op.results[0].users[0]
    scalars = [v for v in op.operands if not v.shape or v.bytes <= 8]
    tensors = [v for v in op.operands if v.shape == op.results[0].shape]
    if not scalars or not tensors or len(op.operands) != 2:
        return False
    if user.name in OPTIMIZERS:
        return user.operands[1] is op.results[0] and op.results[0] not in user.operands[2:]
    return is_prologue(former, user)


def place_optimizer(former: Former, op: Op) -> None:
    """One kernel for all updates with the same hyperparameters."""
    chain = [op]
    while (source := chain[-1].operands[1 if len(chain) == 1 else 0].op) is not None and is_prologue(former, source):
        if source.operands[0].shape != source.results[0].shape:
            if source.name == "div":
                break
            source.operands.reverse()
        chain.append(source)
    chain.reverse()
    for member in chain:
        member.operands = [former.materialise(v, "is read by an optimizer", op) for v in member.operands]
    key = batch_key(chain)
    group = former.batches.get(key)
    reason = "has other hyperparameters" if group is None else full(group) or order_chain(former, group, chain)
    if group is None or reason is not None:
        if group is not None:
            former.report.add("refused", op, group.name, str(reason))
        group = former.new_group("multi_tensor")
        group.root = op
        former.batches[key] = group
    else:
        former.report.add("batched", op, group.name, "same update, same hyperparameters")
    for member in chain:
        group.ops.append(member)
        former.read_by(group, member)
        former.own(group, member)


def is_operand_cast(former: Former, op: Op) -> bool:
    """Whether `op` casts an argument of the step, and only contractions read the result.

    Their operands come from memory anyhow, so a cast has no reader to fuse with, and a model has dozens.
    """
    if op.name != "cast" or op.results[0] in former.outputs:
        return False
    source = op.operands[0]
    return source.op is None and bool(source.shape) and _only_contractions_read(op.results[0])


def _only_contractions_read(value: Value) -> bool:
    return bool(value.users) and all(
        user.name in CONTRACTIONS or (user.name in VIEWS and _only_contractions_read(user.results[0]))
        for user in value.users
    )


def place_cast(former: Former, op: Op) -> None:
    """One kernel for all casts of arguments between the same types: it can run as early as the first is needed."""
    key = ("cast", op.operands[0].dtype, op.results[0].dtype)
    group = former.batches.get(key)
    if group is None or full(group):
        group = former.batches[key] = former.new_group("multi_tensor")
        group.root = op
    else:
        former.report.add("batched", op, group.name, "casts another argument between the same types")
    group.ops.append(op)
    former.read_by(group, op)
    former.own(group, op)


def full(group: Group) -> str | None:
    """Kernels keep what they know of each tensor in a workspace whose size does not depend on how many there are."""
    return f"has {len(group.ops)} updates already" if len(group.ops) >= MOST else None


def order_chain(former: Former, group: Group, chain: list[Op]) -> str | None:
    """Makes sure that a chain can join a group; None, or why not."""
    if any(former.home.get(former.base(value)) is group for member in chain for value in member.operands):
        return "updates again what that kernel updates"
    for member in chain:
        reason = former.order(group, member)
        if reason is not None:
            return reason
    return None


def batch_key(chain: list[Op]) -> object:
    """What updates must have in common to share a kernel: everything but the tensors themselves."""
    parts: list[object] = []
    inside = {value: (position, i) for position, op in enumerate(chain) for i, value in enumerate(op.results)}
    for op in chain:
        wiring: list[tuple[object, ...]] = []
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
    """Whether an operand of an optimizer, or of an op in front of it, is one tensor of the list, not shared by all."""
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
    return not (op.name == "sgd" and op.attrs["has_first"] and position == last - bool(op.attrs["has_found_inf"]))
