"""Rewrites of a kernel's structured ops that `fuse-elementwise` and `fold-epilogue` are made of.

All keep the order of execution valid: an op only reads what ops before it have written.
"""

from __future__ import annotations

from nova.fusion.kernel import Expr, Index, Kernel, Out, Structured, Tensor, load

# cost of one element, in vector adds; what is not listed costs 1
_UNITS = {
    "load": 0.0, "const": 0.0, "linear": 0.0, "arith.extf": 0.5, "arith.truncf": 0.5, "arith.select": 0.5,
    "arith.divf": 4.0, "arith.remf": 20.0, "math.sqrt": 4.0, "math.rsqrt": 5.0, "math.absf": 0.5,
    "arith.negf": 0.5, "tensor.extract": 6.0, "nova.philox": 12.0, "arith.divsi": 10.0, "arith.remsi": 10.0,
    "arith.floordivsi": 12.0, "math.roundeven": 1.0, "math.floor": 1.0, "math.ceil": 1.0,
    "math.trunc": 1.0, "math.copysign": 1.0,
}  # fmt: skip
_TRANSCENDENTAL = 14.0
MAX_RESULTS = 12  # results of one op
CHEAP = 8.0  # an element is computed again rather than kept in a row of scratch up to this cost


def units(op: Structured) -> float:
    """Cost of one element of an op."""
    total = 0.0
    for node in op.nodes():
        total += _UNITS.get(node.op, _TRANSCENDENTAL if node.op.startswith("math.") else 1.0)
    return total


def is_elementwise(op: Structured) -> bool:
    return not op.reduced and not op.contraction


def substitute(op: Structured, table: dict[tuple[Tensor, Index], Expr]) -> None:
    """Replaces loads by expressions."""
    op.map(lambda node: table.get(node.attr) if node.op == "load" else None)


def remove_unused(kernel: Kernel) -> None:
    """Drops ops whose results nobody reads."""
    while True:
        read = {tensor for op in kernel.ops for tensor in op.reads()}
        kept = []
        for op in kernel.ops:
            outs = [out for out in op.outs if out.tensor.kind == "out" or out.tensor in read]
            if outs or op.checks:
                if outs and len(outs) < len(op.outs):
                    op.outs = outs
                kept.append(op)
        if len(kept) == len(kernel.ops):
            return
        kernel.ops = kept


def inline(kernel: Kernel) -> None:
    """Inlines elementwise producers of locals into what reads them.

    Always if one op reads the value and walks the same loops; if several do, where the value is cheap. A value with
    fewer loops than its reader (a row's mean) stays, so that it is computed once; unless it lacks the rows, and would
    have no place to stay.
    """
    changed = True
    while changed:
        changed = False
        readers = kernel.readers()
        for op in list(kernel.ops):
            if not is_elementwise(op) or op.checks or len(op.outs) != 1 or op.outs[0].tensor.kind != "local":
                continue
            out = op.outs[0]
            users = readers.get(out.tensor, [])
            if not users or any(user.contraction for user in users):
                continue
            if not _may_inline(kernel, op, users) or any(
                _reads_overwritten(kernel, user, op.reads()) for user in users
            ):
                continue
            for user in users:
                substitute(user, {(out.tensor, out.index): out.value})
            if all(out.tensor not in user.reads() for user in users):
                kernel.ops.remove(op)
                changed = True
                break


def _may_inline(kernel: Kernel, op: Structured, users: list[Structured]) -> bool:
    trivial = op.outs[0].value.op in ("load", "const", "linear")
    if trivial:
        return True
    if any(set(user.loops) != set(op.loops) for user in users):
        rows = set(kernel.rows)
        homeless = kernel.kind == "contraction" or (
            bool(rows) and not rows <= set(op.loops) and not _is_after(kernel, op)
        )
        return homeless and all(set(op.loops) <= set(user.loops) for user in users)
    return len(users) == 1 or units(op) <= CHEAP


def _is_after(kernel: Kernel, op: Structured) -> bool:
    """Whether an op uses the result of a cross-row reduction."""
    after: set[Tensor] = set()
    rows = set(kernel.rows)
    for other in kernel.ops:
        if other.reduced & rows or any(tensor in after for tensor in other.reads()):
            after |= other.writes()
        if other is op:
            return any(tensor in after for tensor in other.reads())
    return False


def write_directly(kernel: Kernel) -> None:
    """A local that is only copied to a result is written there in the first place."""
    for op in list(kernel.ops):
        if not is_elementwise(op) or op.checks:
            continue
        for out in list(op.outs):
            if out.value.op != "load" or out.tensor.kind != "out":
                continue
            tensor, index = out.value.attr
            if tensor.kind != "local" or tensor.dtype != out.tensor.dtype:
                continue
            writers = [o for o in kernel.ops if tensor in o.writes()]
            if len(writers) != 1 or writers[0] is op:
                continue
            if not set(op.loops) <= set(writers[0].loops) - set(writers[0].reduced):
                continue  # the copy repeats the value along loops that its writer does not walk
            source = next(o for o in writers[0].outs if o.tensor is tensor)
            if source.index != index or sum(out.tensor in o.writes() for o in kernel.ops) != 1:
                continue
            source.tensor, source.index = out.tensor, out.index
            op.outs.remove(out)
            if not op.outs:
                kernel.ops.remove(op)
            replacement = {(tensor, index): load(out.tensor, out.index)}
            for other in kernel.ops:
                substitute(other, replacement)


def merge_alike(kernel: Kernel) -> None:
    """Merges elementwise ops over the same loops, and reductions over the same loops, into ops with several results."""
    merged = True
    while merged:
        merged = False
        for first in range(len(kernel.ops)):
            for second in range(first + 1, len(kernel.ops)):
                if _try_merge(kernel, first, second):
                    merged = True
                    break
            if merged:
                break


def _try_merge(kernel: Kernel, first: int, second: int) -> bool:
    a, b = kernel.ops[first], kernel.ops[second]
    if set(a.loops) != set(b.loops) or a.reduced != b.reduced or a.contraction or b.contraction:
        return False
    depends = bool(b.reads() & a.writes())
    if depends and (a.reduced or any(out.combine for out in a.outs)):
        return False
    if depends and not _reads_where_written(a, b):
        return False
    if any(out.tensor in a.writes() and out.tensor.kind == "local" for out in b.outs):
        return False
    between = kernel.ops[first + 1 : second]
    written = set().union(*(op.writes() for op in between)) if between else set()
    if not (b.reads() & written):
        place, other = first, second  # b moves up
    elif not any(op.reads() & a.writes() for op in between):
        place, other = second, first  # a moves down
    else:
        return False
    if len(a.outs) + len(b.outs) > MAX_RESULTS:
        return False
    own = a.writes() | b.writes()
    if _reads_overwritten(kernel, b, a.reads(), own) or _reads_overwritten(kernel, a, b.reads() - a.writes(), own):
        return False
    if _overwrites_early(kernel, a, b):
        return False
    table = {(out.tensor, out.index): out.value for out in a.outs}
    substitute(b, table)
    joined = Structured(a.loops, a.reduced, [*a.outs, *b.outs], [*a.checks, *b.checks])
    kernel.ops[place] = joined
    del kernel.ops[other]
    return True


def _reads_overwritten(
    kernel: Kernel, op: Structured, reads: set[Tensor], own: set[Tensor] | frozenset[Tensor] = frozenset()
) -> bool:
    """Whether `op` runs after an in-place result was written, so that it must not read the operand in its place.

    A result in `own` is written by the op itself, element by element after reading.
    """
    for operand, result in kernel.inplace:
        source, target = kernel.args[operand], kernel.outs[result]
        if source not in reads or target in own:
            continue
        known: set[Tensor] = {target}  # what is there only once the result is
        for other in kernel.ops:
            depends = bool(other.reads() & known)
            if depends and other is op:
                return True
            if depends or target in other.writes():
                known |= other.writes()
    return False


def _overwrites_early(kernel: Kernel, a: Structured, b: Structured) -> bool:
    """Whether merging would put the write of an in-place result in front of an op that still reads the operand."""
    own = a.writes() | b.writes()
    for operand, result in kernel.inplace:
        if kernel.outs[result] not in own:
            continue
        known = set(own)
        for other in kernel.ops:
            if other is not a and other is not b and other.reads() & known:
                if kernel.args[operand] in other.reads():
                    return True
                known |= other.writes()
    return False


def _reads_where_written(a: Structured, b: Structured) -> bool:
    written = {(out.tensor, out.index) for out in a.outs}
    tensors = a.writes()
    return all(access in written for access in b.loads() if access[0] in tensors) and not any(
        node.op == "tensor.extract" and node.attr in tensors for node in b.nodes()
    )


def order_for_inplace(kernel: Kernel) -> None:
    """Moves every op that overwrites an operand behind all ops that still read it."""
    for operand, result in kernel.inplace:
        source, target = kernel.args[operand], kernel.outs[result]
        for _ in range(len(kernel.ops)):
            places = [n for n, op in enumerate(kernel.ops) if target in op.writes()]
            last = max((n for n, op in enumerate(kernel.ops) if source in op.reads()), default=-1)
            if not places or last <= places[0]:
                break
            if not _move_down(kernel, places[0], last):
                raise AssertionError(
                    f"kernel @{kernel.name}: result {result} cannot replace operand {operand}: it is read afterwards"
                )


def _move_down(kernel: Kernel, place: int, last: int) -> bool:
    """Moves the op at `place`, with what depends on it, behind `last`; False if `last` depends on it."""
    op = kernel.ops[place]
    moved, rest, written = [op], [], set(op.writes())
    for other in kernel.ops[place + 1 : last + 1]:
        if other.reads() & written:
            moved.append(other)
            written |= other.writes()
        else:
            rest.append(other)
    if moved[-1] is kernel.ops[last]:
        return False
    kernel.ops[place : last + 1] = rest + moved
    return True


def outs_of(kernel: Kernel) -> list[Out]:
    return [out for op in kernel.ops for out in op.outs]
