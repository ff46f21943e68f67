"""Which operand of a kernel may share its buffer with which result.

The memory plan reads the pairs from the step module, before any kernel is lowered, so they are decided on the `nova`
ops; `fuse-elementwise` then orders a kernel's loops so that they hold: an operand is never read after its place was
written.

A pair (operand, result) needs: equal element sizes, every read of the operand at exactly the result's place, and
nothing that comes after the result (because it uses it) reading the operand again, directly or through cheap
elementwise ops.
"""

from __future__ import annotations

from nova.dialect.types import BYTES
from nova.fusion import roles
from nova.fusion.records import Function, Op, Value
from nova.fusion.rules import CONTRACTIONS, ELEMENTWISE, GATHERS, PIECEWISE, POOLS, RULES
from nova.fusion.space import VIEWS, Atom, Instance, Space, is_generator

Place = dict[Atom, int]
TINY = 64  # bytes below which sharing a buffer saves nothing


def build_space(function: Function) -> Space:
    """The loops of a kernel function; its ops were grouped because they fit."""
    space = Space()
    ops = [op for op in function.ops if op.name not in VIEWS and not is_generator(op)]
    root = next((op for op in ops if op.name in CONTRACTIONS), None)
    for op in sorted(ops, key=lambda o: o is not root):
        reason = space.add(op)
        if reason is not None:
            raise AssertionError(f"kernel @{function.name}: {op} does not fit: {reason}")
    return space


def row_major(space: Space, instance: Instance) -> Place:
    """Stride of each loop in a row-major buffer with the instance's dimensions."""
    result: Place = {}
    stride = 1
    for atoms in reversed(instance.dims):
        for leaf in reversed(space.leaves(atoms)):
            result[leaf] = stride
            stride *= leaf.size
    return result


def pairs(function: Function, kind: str = "loops") -> list[tuple[int, int]]:
    """The in-place pairs of a loops or contraction kernel, by operand and result number."""
    if any(
        op.name in PIECEWISE or (op.name not in RULES and op.name not in VIEWS and not is_generator(op))
        for op in function.ops
    ):
        return []
    space = build_space(function)
    captured = {
        value for op in function.ops if op.name in GATHERS or op.name in POOLS for value in (_root(op.operands[0]),)
    }
    captured |= {_root(v) for op in function.ops if op.name in CONTRACTIONS for v in op.operands[:2]}
    captured |= {_root(op.operands[0]) for op in function.ops if op.name == "sce"}
    captured |= {_root(op.operands[2]) for op in function.ops if op.name == "sce_merge"}
    found = []
    late = roles.find(space).after if kind == "loops" else set()
    for number, value in enumerate(function.args):
        if value in captured or value.bytes <= TINY:
            continue
        instances = [i for i in (*space.all_inputs, *space.restrided) if i.base is value]
        places = [space.final_strides(i) for i in instances]
        if not places or any(i.offset for i in instances) or any(p != places[0] for p in places):
            continue
        for result, output in enumerate(function.outputs):
            if BYTES[output.dtype] != BYTES[value.dtype] or output.bytes != value.bytes:
                continue
            instance = space.outputs.get(output)
            if instance is None or row_major(space, instance) != places[0]:
                continue
            if output in late and any(v not in late for op in _readers(function, value) for v in op.results):
                continue  # the sums grow while rows are still read
            if not _reads_after(function, value, output):
                found.append((number, result))
    while not _orderable(function, found):
        last = max(result for _, result in found)
        found = [pair for pair in found if pair[1] != last]
    return found


def _readers(function: Function, operand: Value) -> list[Op]:
    """Ops that read an operand, directly or through elementwise ops that may be inlined into them."""
    tainted = {operand}
    readers = []
    for op in function.ops:
        if not any(v in tainted for v in op.operands):
            continue
        if op.name not in VIEWS:
            readers.append(op)
        if op.name in ELEMENTWISE or op.name in VIEWS or op.name == "copy":
            tainted.update(op.results)
    return readers


def _orderable(function: Function, found: list[tuple[int, int]]) -> bool:
    """Whether one order of the ops lets all pairs hold at once: each result written after all reads of its operands."""
    if len({result for _, result in found}) < 2:
        return True
    after: dict[Op, set[Op]] = {op: set() for op in function.ops}  # op -> ops that come before it
    for op in function.ops:
        after[op].update(v.op for v in op.operands if v.op is not None)
    for operand, result in found:
        output = function.outputs[result]
        writer = output.op
        assert writer is not None
        behind = {writer}  # what uses the result reads it, not the operand
        for op in function.ops:
            if any(v.op in behind for v in op.operands):
                behind.add(op)
        after[writer].update(op for op in _readers(function, function.args[operand]) if op not in behind)
    done: set[Op] = set()
    waiting = list(function.ops)
    while waiting:
        ready = [op for op in waiting if after[op] <= done | {op}]
        if not ready:
            return False
        done.update(ready)
        waiting = [op for op in waiting if op not in done]
    return True


def _root(value: Value) -> Value:
    while value.op is not None and value.op.name in VIEWS:
        value = value.op.operands[0]
    return value


def _reads_after(function: Function, operand: Value, output: Value) -> bool:
    """Whether an op that depends on `output` also reads `operand`, or something computed elementwise from it.

    What else the op of `output` makes may depend on it too: a normalisation's variance needs its mean.
    """
    after: set[Value] = set(output.op.results if output.op is not None else ())
    tainted: set[Value] = {operand}
    for op in function.ops:
        depends = any(v in after for v in op.operands)
        if depends and any(v in tainted and v not in after for v in op.operands):
            return True
        if depends:
            after.update(op.results)
        elif (op.name in ELEMENTWISE or op.name in VIEWS or op.name == "copy") and any(
            v in tainted for v in op.operands
        ):
            tainted.update(v for v in op.results if v not in after)
    return _reads_in_other_order(function, operand, output)


def _reads_in_other_order(function: Function, operand: Value, output: Value) -> bool:
    """Whether a normalisation writes `output` early and reads `operand` afterwards."""
    op: Op | None = output.op
    if op is None or not op.results or output is op.results[0]:
        return False
    return any(_root(v) is operand for v in op.operands)
