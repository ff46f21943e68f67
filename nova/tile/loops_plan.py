"""Decides how the ops of a loops kernel become nests and launches on a GPU.

A nest is a set of ops that run on the same tiles: its loops are rows (independent, or summed over at the end) and
columns (what a row holds). Nests that need each other's results stand in different launches; others share one.

    layer norm backward     nest 0  rows (0), columns (1): sums over rows and columns, the gradient of x    launch 0
                            nest 1  columns (1): merges nest 0's partial sums over its blocks               launch 1

Ops join a nest if they have its loops, or its rows alone (a value a row), and read what its other ops make at exactly
the place where they make it. Totals over the rows are complete only in the merging nest, which later ops may join.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from nova.errors import CompileError
from nova.fusion.kernel import Index, Kernel, Linear, Out, Structured, Tensor, const
from nova.fusion.layout import row_major

Key = tuple[Tensor, Index]


@dataclass(eq=False)
class Total:
    """An out summed over the rows of a nest's blocks; `partial[p, columns..]` holds each block's share."""

    op: Structured
    out: Out
    keeps: bool  # one for each column; otherwise a scalar
    partial: Tensor | None = None
    loop: int = -1  # that numbers the shares
    columns: tuple[int, ...] = ()  # kept, in the order of the shares


@dataclass(eq=False)
class Nest:
    """Ops on the same tiles."""

    ops: list[Structured]
    full: frozenset[int]  # loops of its largest op
    rows: frozenset[int] | None = None  # None: all ops are elementwise so far
    small: set[frozenset[int]] = field(default_factory=set)  # loops of its smaller ops
    totals: list[Total] = field(default_factory=list)  # that it starts
    merges: list[Total] = field(default_factory=list)  # that it finishes: its columns are theirs
    level: int = 0
    row_order: tuple[int, ...] = ()
    column_order: tuple[int, ...] = ()

    def reduces(self, op: Structured) -> bool:
        """Whether op is a reduction along the columns."""
        return bool(op.reduced) and not any(total.op is op for total in self.totals)

    def is_row(self, op: Structured) -> bool:
        """Whether op has a value a row only."""
        return frozenset(op.loops) != self.full

    def keys(self) -> dict[Key, Structured]:
        """What its ops make, at which place."""
        return {(out.tensor, out.index): op for op in self.ops for out in op.outs}


def rounds(nest: Nest) -> list[tuple[list[Structured], list[Structured]]]:
    """The ops but for totals, as (elementwise, reductions) that need no reduction but those of the rounds before.

    So the threads of a row come together once a round, however many values they reduce.
    """
    totals = {total.op for total in nest.totals}
    makers = nest.keys()
    found: list[tuple[list[Structured], list[Structured]]] = []
    number: dict[Structured, int] = {}
    for op in nest.ops:
        if op in totals:
            continue
        needs = [makers[t, i] for t, i in reads_of(op) if i is not None and (t, i) in makers]
        number[op] = max((number[m] + bool(m.reduced) for m in needs if m in number), default=0)
        while len(found) <= number[op]:
            found.append(([], []))
        found[number[op]][bool(op.reduced)].append(op)
    return found


def reads_of(op: Structured) -> Iterator[tuple[Tensor, Index | None]]:
    """Tensors that an op reads; without an index if at places of its own choice."""
    for node in op.nodes():
        if node.op == "load":
            yield node.attr
        elif node.op == "tensor.extract":
            yield node.attr, None


def simplify(kernel: Kernel) -> None:
    """Drops ops without points; a reduction of nothing is its initial value."""
    kept = []
    for op in kernel.ops:
        parallel = [loop for loop in op.loops if loop not in op.reduced]
        if any(kernel.loops[loop] == 0 for loop in parallel):
            continue
        if any(kernel.loops[loop] == 0 for loop in op.reduced):
            outs = [Out(o.tensor, o.index, const(o.init, o.tensor.dtype)) for o in op.outs]
            op = Structured(tuple(parallel), frozenset(), outs)
        kept.append(op)
    kernel.ops = kept


class Planner:
    """Puts ops, in order, into nests."""

    def __init__(self, kernel: Kernel, apart: bool = False, alone: Collection[Structured] = ()):
        """`apart`: totals over the rows that need every element don't share a nest with reductions along the rows.
        `alone`: ops that don't share a nest with ops of other loops."""
        self.kernel, self.apart, self.alone = kernel, apart, alone
        self.nests: list[Nest] = []
        self.home: dict[Structured, Nest] = {}
        self.writers: dict[Tensor, list[tuple[Structured, Out]]] = {}
        self.merging: dict[tuple[Tensor, Index], Nest] = {}  # totals -> where they are complete
        self.before: dict[Nest, set[Nest]] = {}
        self.readers: dict[Tensor, set[Nest]] = {}  # of arguments
        arguments = [*kernel.args, *kernel.outs]
        self.pairs = [(arguments[a], kernel.outs[r]) for a, r in kernel.inplace]

    def run(self) -> list[Nest]:
        for op in self.kernel.ops:
            if op.reduced and any(out.combine is None for out in op.outs):
                raise CompileError(f"kernel @{self.kernel.name}: a reduction without a combining operation")
            self.place(op)
        for nest in self.nests:
            self._level(nest, ())
        return self.nests

    def _level(self, nest: Nest, path: tuple[Nest, ...]) -> int:
        if nest in path:
            raise CompileError(f"kernel @{self.kernel.name}: its loops wait for each other")
        nest.level = max((self._level(other, (*path, nest)) + 1 for other in self.before[nest]), default=0)
        return nest.level

    # --- one op ---

    def place(self, op: Structured) -> None:
        needs = self.needs(op)
        for nest in reversed(self.nests):
            if self.shape_fits(op, nest) and self.data_fits(op, nest, needs):
                break
        else:
            nest = Nest([], frozenset(op.loops))
            self.nests.append(nest)
            self.before[nest] = set()
        self.before[nest] |= {other for other in needs | self.hazards(op) if other is not nest}
        self.join(op, nest)

    def needs(self, op: Structured) -> set[Nest]:
        """Nests whose results an op reads."""
        found = set()
        for tensor, index in reads_of(op):
            for writer, out in self.writers.get(tensor, ()):
                found.add(self.merging.get((out.tensor, out.index), self.home[writer]))
            del index
        return found

    def hazards(self, op: Structured) -> set[Nest]:
        """Nests that read an operand whose place this op writes."""
        written = op.writes()
        return {nest for a, r in self.pairs if r in written for nest in self.readers.get(a, ())}

    def join(self, op: Structured, nest: Nest) -> None:
        loops = frozenset(op.loops)
        nest.ops.append(op)
        self.home[op] = nest
        if loops > nest.full:
            nest.small.add(nest.full)
            nest.full = loops
        elif loops != nest.full:
            nest.small.add(loops)
        if op.reduced and nest.rows is None:
            nest.rows = self.rows_for(op, nest)
        for out in op.outs:
            self.writers.setdefault(out.tensor, []).append((op, out))
            if op.reduced and self.is_total(op, nest):
                self.start_total(op, out, nest)
        for tensor, _ in reads_of(op):
            self.readers.setdefault(tensor, set()).add(nest)

    # --- shapes ---

    def rows_for(self, op: Structured, nest: Nest) -> frozenset[int] | None:
        """The rows of a nest that a reduction joins first; None if it doesn't fit what is there."""
        loops = frozenset(op.loops)
        parallel = loops - op.reduced
        if any(not small <= loops for small in nest.small):
            return None
        if op.reduced == loops:
            wanted = frozenset() if nest.full == loops else loops
        elif frozenset(self.kernel.rows) == op.reduced:
            wanted = op.reduced
        else:
            wanted = parallel
        return wanted if all(small <= wanted or small == nest.full for small in nest.small) else None

    def is_total(self, op: Structured, nest: Nest) -> bool:
        assert nest.rows is not None
        return op.reduced >= nest.rows and (bool(nest.rows) or op.reduced == frozenset(op.loops))

    def shape_fits(self, op: Structured, nest: Nest) -> bool:
        loops, full = frozenset(op.loops), nest.full
        if loops != full and any(one in self.alone for one in (op, *nest.ops)):
            return False
        if nest.merges:
            return loops == full and not op.reduced
        rows = nest.rows
        if rows is None and not op.reduced:
            return self.elementwise_fits(op, nest, loops)
        if rows is None:
            if not (full <= loops or loops <= full):
                return False
            bigger = Nest([], full | loops, None, set(nest.small) | ({full} if loops > full else set()))
            rows = self.rows_for(op, bigger)
            if rows is None or (loops < full and loops != rows):
                return False
            full = full | loops
        if not op.reduced:
            if loops in (full, rows):
                return True
            return loops < rows and not self.stores(op)
        columns = full - rows
        if self.apart and loops == full and self._mixes(op, nest, rows):
            return False
        kept = [frozenset(loop for loop, _ in item.terms) for out in op.outs for item in out.index]
        kept_loops = frozenset().union(*kept) if kept else frozenset()
        if loops not in (full, rows):
            return False
        if op.reduced == columns and rows and loops == full:
            return True
        return op.reduced >= rows and kept_loops == loops - op.reduced and kept_loops in (columns, frozenset())

    def _mixes(self, op: Structured, nest: Nest, rows: frozenset[int]) -> bool:
        """Whether ops of the full loops would be reduced along the rows, over them, and over everything in one nest."""
        full = [other for other in (op, *nest.ops) if other.reduced and frozenset(other.loops) == nest.full]
        return len({(rows <= other.reduced, other.reduced == nest.full) for other in full}) > 1

    def elementwise_fits(self, op: Structured, nest: Nest, loops: frozenset[int]) -> bool:
        if loops == nest.full:
            return True
        smaller = set(nest.small) | {min(loops, nest.full, key=len)}
        if not (loops < nest.full or loops > nest.full):
            return False
        rows = frozenset().union(*smaller)
        if rows == nest.full | loops or (loops < nest.full and loops < rows and self.stores(op)):
            return False
        if loops > nest.full and any(self.stores(o) and frozenset(o.loops) < rows for o in nest.ops):
            return False
        connected = any(self.home.get(w) is nest for t, _ in reads_of(op) for w, _ in self.writers.get(t, ()))
        return connected

    @staticmethod
    def stores(op: Structured) -> bool:
        return any(out.tensor.kind != "local" for out in op.outs)

    # --- data ---

    def data_fits(self, op: Structured, nest: Nest, needs: set[Nest]) -> bool:
        made = nest.keys()
        merged = {(total.out.tensor, total.out.index) for total in nest.merges}
        for tensor, index in reads_of(op):
            inside = [out for writer, out in self.writers.get(tensor, ()) if self.home[writer] is nest]
            inside += [total.out for total in nest.merges if total.out.tensor is tensor]
            if not inside:
                continue
            if index is None or ((tensor, index) not in made and (tensor, index) not in merged):
                return False
            if (tensor, index) in self.merging and self.merging[tensor, index] is not nest:
                return False
            if len(self.writers[tensor]) > 1 and not self._one_piece(tensor, index, nest):
                return False
        return not any(self.reaches(nest, other) for other in (needs | self.hazards(op)) - {nest})

    def _one_piece(self, tensor: Tensor, index: Index, nest: Nest) -> bool:
        """Whether the place is written by an op of the nest only, of all that write pieces of the tensor."""
        same = [writer for writer, out in self.writers[tensor] if out.index == index]
        return len(same) == 1 and self.home[same[0]] is nest

    def reaches(self, first: Nest, other: Nest) -> bool:
        """Whether `first` comes before `other`."""
        stack, seen = [other], set()
        while stack:
            nest = stack.pop()
            if nest is first:
                return True
            if nest not in seen:
                seen.add(nest)
                stack += self.before[nest]
        return False

    # --- totals ---

    def start_total(self, op: Structured, out: Out, nest: Nest) -> None:
        kept = frozenset(loop for item in out.index for loop, _ in item.terms)
        total = Total(op, out, bool(kept))
        nest.totals.append(total)
        for other in self.nests:
            if other.merges and other.full == kept and self.before[other] == {nest} and not other.ops:
                break
        else:
            other = Nest([], kept)
            self.nests.append(other)
            self.before[other] = {nest}
        other.merges.append(total)
        self.merging[out.tensor, out.index] = other


# --- orders of loops --------------------------------------------------------------------------------------------------


def flat(tensor: Tensor, index: Index) -> Linear:
    """The element's offset in the tensor's dense buffer."""
    terms: dict[int, int] = {}
    constant = 0
    for item, stride in zip(index, row_major(tensor.shape), strict=True):
        constant += item.const * stride
        for loop, coefficient in item.terms:
            terms[loop] = terms.get(loop, 0) + coefficient * stride
    return Linear.of(terms, constant)


def accesses(nest: Nest) -> list[tuple[Tensor, Linear, bool]]:
    """(tensor, offset, whether it is written) of every access to memory, with the full loops' in front."""
    found: dict[tuple[Tensor, Index, bool], None] = {}
    made = nest.keys()
    for op in nest.ops:
        for tensor, index in op.loads():
            if (tensor, index) not in made:
                found[tensor, index, False] = None
        for out in op.outs:
            if out.tensor.kind != "local":
                found[out.tensor, out.index, True] = None
    return [(tensor, flat(tensor, index), written) for tensor, index, written in found]


def unit_score(kernel: Kernel, nest: Nest, loop: int) -> float:
    """How much is neighbouring in memory along a loop; stores count twice, short loops little."""
    total = 0.0
    for _, linear, written in accesses(nest):
        if dict(linear.terms).get(loop) == 1:
            total += (2 if written else 1) * len(linear.terms)
    return total * min(kernel.loops[loop], 32)


def order_loops(kernel: Kernel, nest: Nest) -> None:
    """Chooses rows and columns of an elementwise nest, and the order of both."""
    largest = next((op for op in nest.ops if frozenset(op.loops) == nest.full), None)
    loops = largest.loops if largest is not None else tuple(sorted(nest.full))
    if nest.rows is not None or nest.merges:
        rows = nest.rows or frozenset()
        nest.row_order = _lane_last(kernel, nest, tuple(d for d in loops if d in rows))
        nest.column_order = _lane_last(kernel, nest, tuple(d for d in loops if d not in rows))
        if not nest.column_order and not nest.totals and not nest.merges:
            nest.row_order, nest.column_order = (), nest.row_order
        return
    fixed = frozenset().union(*nest.small) if nest.small else frozenset()
    free = tuple(d for d in loops if d not in fixed)
    if not free:
        return
    free = _lane_last(kernel, nest, free)
    columns = [free[-1]]
    rest = [d for d in loops if d not in columns]
    while rest and rest[-1] in free and _collapses(kernel, nest, rest[-1], columns):
        columns.insert(0, rest.pop())
    nest.row_order, nest.column_order = tuple(rest), tuple(columns)


def _lane_last(kernel: Kernel, nest: Nest, loops: tuple[int, ...]) -> tuple[int, ...]:
    if len(loops) < 2:
        return loops
    lane = max(loops, key=lambda d: (unit_score(kernel, nest, d), loops.index(d)))
    return (*(d for d in loops if d != lane), lane)


def _collapses(kernel: Kernel, nest: Nest, loop: int, columns: list[int]) -> bool:
    """Whether `loop` and the columns are one longer loop for every access and index value of the nest."""
    step = math.prod(kernel.loops[d] for d in columns)

    def one(terms: dict[int, int]) -> bool:
        inner = [terms.get(d, 0) for d in columns]
        steps = [math.prod(kernel.loops[e] for e in columns[place + 1 :]) for place in range(len(columns))]
        unit = inner[-1]
        return all(c == unit * s for c, s in zip(inner, steps, strict=True)) and terms.get(loop, 0) == unit * step

    if any(loop not in op.loops for op in nest.ops if set(columns) & set(op.loops)):
        return False
    linears = [node.attr for op in nest.ops for node in op.nodes() if node.op == "linear"]
    linears += [linear for _, linear, _ in accesses(nest)]
    for op in nest.ops:
        linears += [flat(t, i) for t, i in op.loads() if t.kind == "local"]
    return all(one(dict(linear.terms)) for linear in linears)


def numel(kernel: Kernel, loops: tuple[int, ...]) -> int:
    return math.prod(kernel.loops[loop] for loop in loops)
