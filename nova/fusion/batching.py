"""Multi-tensor kernels: many equal updates of different tensors as one body and one call.

    adam(p0, g0, m0, v0, s0, lr, ..), adam(p1, g1, ..), ..   ->   body: adam(%p, %g, %m, %v, %s, %lr, ..) of one tensor
                                                                call: (p0, p1, .., g0, g1, .., s0, s1, .., lr, ..)

Arguments of the body marked `nova.list` have one tensor per update; the others are shared by all. The body's tensors
are 1-d with ANY elements, a stand-in for any shape until `nova-to-linalg` makes them dynamic: the code depends neither
on shapes nor on how many tensors there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from nova.fusion.kinds import OPTIMIZERS
from nova.fusion.records import Function, Op, Value
from nova.fusion.updates import batch_key, is_list_operand

ANY = 2  # elements of the stand-in tensors


@dataclass
class Batch:
    """The body of a multi-tensor kernel, and the operands and results of one call."""

    body: Function
    count: int
    inputs: list[Value]
    outputs: list[Value]
    key: object
    inplace: list[tuple[int, int]] = field(default_factory=list)

    def attributes(self) -> list[str]:
        pairs = ", ".join(f"array<i64: {a}, {b}>" for a, b in self.inplace)
        return ['nova.kernel = "multi_tensor"', f"nova.inplace = [{pairs}]"]

    def step_attributes(self) -> list[str]:
        """For the declaration: in-place pairs of the flattened operands and results."""
        lists = [bool(text != "{}") for text in self.body.arg_attrs]
        starts, position = [], 0
        for is_list in lists:
            starts.append(position)
            position += self.count if is_list else 1
        pairs = [
            f"array<i64: {starts[a] + i}, {b * self.count + i}>" for a, b in self.inplace for i in range(self.count)
        ]
        return [
            'nova.kernel = "multi_tensor"',
            f"nova.inplace = [{', '.join(pairs)}]",
            f"nova.count = {self.count} : i64",
        ]


def split(ops: Sequence[Op], outputs: Sequence[Value]) -> Batch:
    """The batch made of `ops`: chains that end in an optimizer op, casts, or one foreach_norm."""
    if ops[0].name == "foreach_norm":
        return _norms(ops[0])
    if ops[0].name == "cast":
        return _casts(ops)
    chains: list[list[Op]] = [[]]
    for op in ops:
        chains[-1].append(op)
        if op.name in OPTIMIZERS:
            chains.append([])
    return _updates(chains[:-1])


def _stand_in(value: Value) -> tuple[int, ...]:
    return (ANY,) if value.shape else ()


def _updates(chains: list[list[Op]]) -> Batch:
    """Every chain has the structure of the first (`former.batch_key`)."""
    body = Function("")
    lists: list[list[Value]] = []
    shared: list[Value] = []
    copies: dict[Value, Value] = {}
    list_args: list[Value] = []
    shared_args: list[Value] = []
    places: list[tuple[int, int, int]] = []  # chain op, operand -> list number
    for number, op in enumerate(chains[0]):
        for position, operand in enumerate(op.operands):
            inside = operand.op in chains[0]
            if inside:
                continue
            if is_list_operand(op, operand):
                # a tensor list is one argument even if the first chain happens to pass one tensor twice
                argument = Value(_stand_in(operand), operand.dtype)
                list_args.append(argument)
                places.append((number, position, len(lists)))
                lists.append([chain[number].operands[position] for chain in chains])
            elif operand not in copies:
                copies[operand] = Value(operand.shape, operand.dtype)
                shared_args.append(copies[operand])
                shared.append(operand)
    by_place = {(number, position): list_args[which] for number, position, which in places}
    for number, op in enumerate(chains[0]):
        operands = [by_place.get((number, position)) or copies[v] for position, v in enumerate(op.operands)]
        copied = Op(op.name, operands, op.attrs)
        for result in op.results:
            copies[result] = copied.result(_stand_in(result), result.dtype)
        body.ops.append(copied)
    body.args = [*list_args, *shared_args]
    body.arg_attrs = ["{nova.list}"] * len(list_args) + ["{}"] * len(shared_args)
    last = body.ops[-1]
    body.outputs = list(last.results)
    body.res_attrs = ["{nova.list}"] * len(body.outputs)
    body.link()
    inputs = [value for values in lists for value in values] + shared
    outputs = [chain[-1].results[i] for i in range(len(last.results)) for chain in chains]
    return Batch(body, len(chains), inputs, outputs, _key(chains[0]), _pairs(last, list_args))


# result number -> operand number of the state it replaces; optional state follows in the order of both lists
_STATE = {"sgd": {0: 0}, "adam": {0: 0, 1: 2, 2: 3, 3: 4}, "adagrad": {0: 0, 1: 2, 2: 3}, "rmsprop": {0: 0, 1: 2, 2: 3}}
_FIRST_OPTIONAL = {"sgd": (6, 1), "adam": (10, 4), "adagrad": (8, 3), "rmsprop": (9, 3)}


def _pairs(op: Op, list_args: list[Value]) -> list[tuple[int, int]]:
    """State is updated in place: (argument, result)."""
    states = dict(_STATE[op.name])
    operand, result = _FIRST_OPTIONAL[op.name]
    for number in range(result, len(op.results)):
        states[number] = operand + number - result
    numbers = {value: number for number, value in enumerate(list_args)}
    return [(numbers[op.operands[a]], b) for b, a in states.items() if op.operands[a] in numbers]


def _key(chain: list[Op]) -> object:
    """Like `batch_key`, but without the identity of shared operands: equal kernels of different calls are one."""
    names: dict[object, object] = {}

    def forget(item: object) -> object:
        if isinstance(item, tuple):
            if len(item) == 2 and item[0] == "shared":
                value = item[1]
                return names.setdefault(value, ("shared", len(names), value.dtype, value.shape))
            return tuple(forget(part) for part in item)
        return item

    return forget(batch_key(chain))


def _casts(ops: Sequence[Op]) -> Batch:
    """Casts between the same types, of tensors that have nothing else in common."""
    body = Function("")
    argument = Value((ANY,), ops[0].operands[0].dtype)
    copied = Op("cast", [argument], ops[0].attrs)
    result = copied.result((ANY,), ops[0].results[0].dtype)
    body.args, body.arg_attrs = [argument], ["{nova.list}"]
    body.ops, body.outputs, body.res_attrs = [copied], [result], ["{nova.list}"]
    body.link()
    key = ("cast", argument.dtype, result.dtype)
    return Batch(body, len(ops), [op.operands[0] for op in ops], [op.results[0] for op in ops], key)


def _norms(op: Op) -> Batch:
    """foreach_norm: each tensor's norm is one element of the result."""
    body = Function("")
    dtype = op.operands[0].dtype
    argument = Value((ANY,), dtype)
    copied = Op(op.name, [argument], op.attrs)
    result = copied.result((1,), op.results[0].dtype)
    body.args, body.arg_attrs = [argument], ["{nova.list}"]
    body.ops, body.outputs, body.res_attrs = [copied], [result], ["{nova.element}"]
    body.link()
    key = ("foreach_norm", tuple(op.attrs.items()), dtype, op.results[0].dtype)
    return Batch(body, len(op.operands), list(op.operands), list(op.results), key)
