"""What follows a contraction, on a tile of its result: every expression, read, store and reduction of the kernel.

    sums     [rows, columns] of accumulators, from wherever they come (shared memory, partial sums in the workspace)
    reads    windows of memory, once a row or once a column where they only depend on that
    stores   windows, or computed places where the result's dimensions split the flat row or column
    reductions over an N tile (the loss head): a row of a block holds the whole tile, so they end in this block

The arithmetic itself is nova.tile.expressions'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nova.errors import CompileError
from nova.fusion.access import Access
from nova.fusion.kernel import Index, Linear, Out, Structured, Tensor
from nova.fusion.layout import row_major
from nova.tile.contraction_frame import (
    Frame,
    Plan,
    alignment,
    base_of,
    digits_of,
    linear_of,
    step_along,
    uniform,
    vector_along,
)  # fmt: skip
from nova.tile.expressions import (
    Domain,
    Evaluator,
    Part,
    Sources,
    approximate_exponentials,
    memory_element,
)
from nova.tile.text import Operand, Value
from nova.tile.widths import is_wide, position_type

_IDENTITY = {"addf": 0.0, "mulf": 1.0, "maximumf": float("-inf"), "minimumf": float("inf"), "addi": 0, "ori": 0}


@dataclass(frozen=True)
class Result:
    """What goes to memory: result `number` of a structured op, and where."""

    op: Structured
    number: int
    access: Access


class Epilogue:
    """The kernel's epilogue, ready to be written on any tile."""

    def __init__(self, plan: Plan):
        self.plan, form = plan, plan.form
        generics = list(dict.fromkeys(id(generic.op) for generic, _ in form.generics.values()))
        by_op = dict(zip(generics, plan.kernel.ops, strict=True))
        self.core = by_op[id(form.core.op)]
        self.results = [
            Result(by_op[id(form.generics[value][0].op)], form.generics[value][1], access)
            for value, access in form.outputs
        ]
        self.start = form.accesses.get((form.core.op, form.core.inputs))
        self.checks = [check for op in plan.kernel.ops for check in op.checks]

    def side_bytes(self) -> int:
        """Read from memory for each place of the result."""
        return sum(4 for access in self.plan.form.plane_reads() if access.touches(self.plan.form.dims.n))


class Place(Sources):
    """The epilogue's values on one tile."""

    def __init__(self, epilogue: Epilogue, frame: Frame, domain: Domain, sums: Callable[[], Value]):
        self.epilogue, self.frame, self.domain, self.sums = epilogue, frame, domain, sums
        self.plan, self.program = frame.plan, frame.program
        self.sizes = self.plan.kernel.loops
        self.values: dict[tuple[int, int], Part] = {}
        self.loaded: dict[tuple[int, Linear], Part] = {}
        self.loops: dict[int, Part] = {}
        self.evaluator = Evaluator(domain, self)

    def prefetch(self) -> None:
        """Issues all reads of memory."""
        for op in self.plan.kernel.ops:
            if op is not self.epilogue.core:
                for tensor, index in op.loads():
                    if self._maker(tensor) is None:
                        self._read(int(tensor.name[3:]), tensor.dtype, flat(index, tensor.shape))
        if self.epilogue.start is not None:
            self._start(self.epilogue.start)

    def finish(self) -> None:
        """Computes and stores everything."""
        for check in self.epilogue.checks:
            self.evaluator.check(check)
        for result in self.epilogue.results:
            self.store(result.access, self.value(result.op, result.number))

    # --- values of the kernel's ops ---

    def value(self, op: Structured, number: int) -> Part:
        key = (id(op), number)
        if key not in self.values:
            if op is self.epilogue.core:
                self.values[key] = self._total()
            elif op.reduced:
                self.values[key] = self._reduced(op, op.outs[number])
            else:
                self.values[key] = self.evaluator.emit([op.outs[number].value])[0]
        return self.values[key]

    def _total(self) -> Part:
        """The accumulators, plus what the accumulation starts from."""
        sums = self.sums()
        every = self.domain.every
        total = Part(sums, every, sums.element)
        start = self.epilogue.start
        if start is None:
            return total
        read = self.domain.convert(self._start(start), sums.element)
        return self.domain.apply(lambda a, b: self.program.binary("arith.addf", a, b), (read, total))

    def _start(self, start: Access) -> Part:
        return self._read(start.buffer, str(start.element), linear_of(start))

    def _reduced(self, op: Structured, out: Out) -> Part:
        """A reduction over the columns of the tile, one value a row."""
        if out.combine is None:
            raise CompileError("a reduction over tiles combines nothing")
        kind = out.combine.removeprefix("arith.")
        value = approximate_exponentials(out.value) if kind == "addf" else out.value
        part = self.evaluator.emit([value])[0]
        element = part.element
        neutral = _IDENTITY.get(kind, out.init)
        tile = self.domain.whole(part)
        inside = self._inside((1,))
        if inside is not None:
            tile = self.program.select(
                self.domain.widen(inside, self.domain.every), tile, self._scalar(neutral, element)
            )
        row = Part(self.program.reduce(tile, [1], kind), (0,), element)
        if out.init == neutral:
            return row
        first = Part(self._scalar(out.init, element), (), element)
        return self.domain.apply(lambda a, b: self.program.binary(out.combine or "", a, b), (first, row))

    def _scalar(self, number: float, element: str) -> Value:
        return self.program.constant(number, element)

    # --- what bodies ask for ---

    def load(self, tensor: Tensor, index: Index) -> Part:
        maker = self._maker(tensor)
        if maker is not None:
            return self.value(*maker)
        if not tensor.name.startswith("arg"):
            raise CompileError(f"kernel @{self.plan.form.name}: {tensor} is read and never made")
        return self._read(int(tensor.name[3:]), tensor.dtype, flat(index, tensor.shape))

    def _maker(self, tensor: Tensor) -> tuple[Structured, int] | None:
        """The op of this kernel whose result a tensor is, and the result's number."""
        for op in reversed(self.plan.kernel.ops):
            for number, out in enumerate(op.outs):
                if out.tensor is tensor:
                    return op, number
        return None

    def loop(self, loop: int) -> list[Part]:
        if loop not in self.loops:
            form, tiling = self.plan.form, self.plan.tiling
            if loop == form.tile_dim:
                self.loops[loop] = uniform(self.frame.tile_number)
            for dim, (role, start) in enumerate(((tiling.m, self.frame.row), (tiling.n, self.frame.column))):
                if loop in role.tile:
                    found = self.domain.add(self.domain.iota(dim), uniform(start))
                    self.loops.update(digits_of(self.domain, found, role, tiling.sizes))
            if loop not in self.loops:
                self.loops[loop] = uniform(self.frame.places.get(loop, 0))
        return [self.loops[loop]]

    def pointer(self, tensor: Tensor) -> Value:
        return self.program.args[int(tensor.name[3:])]

    def record(self) -> Value:
        return self.program.args[self.plan.workspace + 1]

    def mask(self, dims: tuple[int, ...]) -> Part | None:
        return self._inside(dims)

    def _inside(self, dims: Sequence[int]) -> Part | None:
        """Whether a place lies in the result, where the tile hangs over it."""
        tests = []
        for dim in dims:
            extent, start = self._edge(dim)
            if extent >= 0:
                here = self.domain.add(self.domain.iota(dim), uniform(start))
                tests.append(self.domain.apply(lambda x, n=extent: self.program.cmp("slt", x, n), (here,)))
        if not tests:
            return None
        if len(tests) == 1:
            return tests[0]
        return self.domain.apply(lambda a, b: self.program.binary("arith.andi", a, b), tests)

    def _edge(self, dim: int) -> tuple[int, Operand]:
        """(extent or -1 if tiles end with it, where this tile starts) along a dimension of the tile."""
        role = self.plan.tiling.m if dim == 0 else self.plan.tiling.n
        start = self.frame.row if dim == 0 else self.frame.column
        size = self.domain.layout.shape[dim]
        block = self.frame.block[dim]
        return (-1 if role.extent % block == 0 and block % size == 0 else role.extent), start

    # --- memory ---

    def _read(self, buffer: int, dtype: str, item: Linear) -> Part:
        key = (buffer, item)
        found = self.loaded.get(key) or self.frame.at_column.get(key)
        if found is None:
            found = self._load(buffer, memory_element(dtype), item)
            kept = self.frame.at_column if 0 not in found.dims else self.loaded
            kept[key] = found  # type: ignore[index]
        return found

    def _window(self, item: Linear) -> tuple[tuple[int, ...], list[int], int] | None:
        """(dims that matter, steps along them, vector) of a window; None if it is not one."""
        tiling = self.plan.tiling
        steps = [step_along(tiling, role, item) for role in (tiling.m, tiling.n)]
        if None in steps:
            return None
        dims = tuple(d for d in (0, 1) if steps[d])
        own = {*tiling.m.tile, *tiling.n.tile}
        others = [item.const, *(c for loop, c in item.terms if loop not in own and self._varies(loop))]
        return dims, [s for s in steps if s], self._vector(dims, steps[1] or 0, others, steps[0] or 0)

    def _varies(self, loop: int) -> bool:
        return loop >= len(self.plan.tiling.sizes) or self.plan.tiling.sizes[loop] != 1

    def _vector(self, dims: Sequence[int], step: int, others: Sequence[int], across: int) -> int:
        if not dims or dims[-1] != 1:
            return 1
        numbers = [n for n in (*others, across) if n]
        return vector_along(self.plan.tiling.n.extent, step, numbers, self.domain.layout.element[1])

    def _load(self, buffer: int, element: str, item: Linear) -> Part:
        program, pointer = self.program, self.program.args[buffer]
        window = self._window(item)
        base = base_of(self.frame, item)
        if window is None:
            index, mask, vector = self._scattered(item)
            value = program.gather(pointer, index, element, mask, vector=vector)
            return Part(value, self.domain.every, element)
        dims, steps, vector = window
        if not dims:
            return Part(program.load_scalar(pointer, base, element), (), element)
        edges = [self._edge(d) for d in dims]
        value = program.load(
            pointer, base, [start for _, start in edges], element, self.domain.at(dims), strides=steps,
            extents=[extent for extent, _ in edges], vector=vector, wide=self._is_wide(item),
        )  # fmt: skip
        return Part(value, dims, element)

    def store(self, access: Access, part: Part) -> None:
        """Writes a value to a result; what does not depend on the column, once a row."""
        program, pointer, item = self.program, self.program.args[access.buffer], linear_of(access)
        element = memory_element(str(access.element))
        window = self._window(item)
        if window is None:
            index, mask, vector = self._scattered(item)
            program.scatter(self.domain.whole(part), pointer, index, mask, vector=vector)
            return
        dims, steps, vector = window
        dims, steps = self._widened(dims, steps, part)
        edges = [self._edge(d) for d in dims]
        program.store(
            self._as(self.domain.whole(part, dims), element), pointer, base_of(self.frame, item),
            [start for _, start in edges], strides=steps, extents=[extent for extent, _ in edges], vector=vector,
            wide=self._is_wide(item),
        )  # fmt: skip

    def _as(self, value: Value, element: str) -> Value:
        if value.element != element:
            raise CompileError(f"kernel @{self.plan.form.name}: stores {value.element} to a result of {element}")
        return value

    def _is_wide(self, item: Linear) -> bool:
        """Whether places within the plane are further apart than 32 bits say."""
        own = {*self.plan.tiling.m.tile, *self.plan.tiling.n.tile}
        return is_wide(sum(abs(c) * self.plan.tiling.sizes[loop] for loop, c in item.terms if loop in own))

    def _widened(self, dims: tuple[int, ...], steps: list[int], part: Part) -> tuple[tuple[int, ...], list[int]]:
        """A dimension of one element has no step, but the value may have it."""
        every = [d for d in (0, 1) if d in dims or d in part.dims]
        by_dim = dict(zip(dims, steps, strict=True))
        return tuple(every) or (0,), [by_dim.get(d, 0) for d in (every or [0])]

    def _scattered(self, item: Linear) -> tuple[Value, Value | None, int]:
        """(index of each element, mask, vector) of an access whose dimensions split the row or the column."""
        tiling, domain = self.plan.tiling, self.domain
        numel = item.const + sum(
            abs(c) * max(self.sizes[loop] - 1, 0) for loop, c in item.terms if loop < len(self.sizes)
        )
        element = position_type(numel)
        own = {*tiling.m.tile, *tiling.n.tile}
        rest = Linear(item.const, tuple((loop, c) for loop, c in item.terms if loop not in own))
        base = base_of(self.frame, rest)
        parts = [uniform(self.program.cast(base, element), element)]
        for loop, coefficient in item.terms:
            if loop in own:
                parts += [domain.scale(domain.convert(p, element), coefficient) for p in self.loop(loop)]
        index = domain.whole(domain.total(parts, element))
        inside = self._inside(domain.every)
        mask = None if inside is None else domain.whole(inside)
        return index, mask, self._scatter_vector(item)

    def _scatter_vector(self, item: Linear) -> int:
        """Runs of the layout that stay in one run of the innermost dimension of N."""
        tiling = self.plan.tiling
        coefficients = dict(item.terms)
        if not tiling.n.tile or coefficients.get(tiling.n.tile[-1]) != 1:
            return 1
        inner = tiling.n.tile[-1]
        numbers = [item.const, tiling.sizes[inner], tiling.n.extent]
        numbers += [c for loop, c in item.terms if loop != inner and self._varies(loop)]
        run = self.domain.layout.element[1]
        return run if alignment([n for n in numbers if n]) >= run else 1


def flat(index: Index, shape: Sequence[int]) -> Linear:
    """A tensor's index as one linear expression into its buffer."""
    const, terms = 0, dict[int, int]()
    for item, stride in zip(index, row_major(shape), strict=True):
        const += item.const * stride
        for loop, coefficient in item.terms:
            terms[loop] = terms.get(loop, 0) + coefficient * stride
    return Linear.of(terms, const)
