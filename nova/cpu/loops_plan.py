"""Decides how the generics of a loops kernel become loop nests: rows, steps within a row, lanes, buffers, tasks.

A Nest is one fork-join. Its tasks are ranges of rows; a row runs the nest's steps in order; a step is one loop over
the inner dims (vectorised along one of them) that several generics share, or scalar code per row.

    layer norm, rows (0), inner (1):    step 0  loop  sum += x             reads the row from memory
                                        step 1  row   mean = sum / n
                                        step 2  loop  sq += (x - mean)^2   reads it from L1
                                        step 3  row   rstd
                                        step 4  loop  y = ...

Sums across rows get one partial a task (the split into tasks depends on shapes only, so results don't depend on the
thread count), merged in order by a second phase; generics that use them form nests of their own after it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from nova.cpu.loops_ir import Access, Argument, Generic, Index, Kernel, Output, Result
from nova.errors import CompileError
from nova.lowering import lanes as ln
from nova.schedule.target import CpuTarget

BLOCK = 4096  # elements of a one-dimensional loop that make a "row"
TILE_WIDTH = 64  # elements of a tile along the loop in lanes
TILE_SMALL = 1024  # elements of the two loops below which loads a lane are as good
PARTIAL_BUDGET = 2 << 20  # bytes of partials a cross-row reduction may write


@dataclass
class Step:
    """Generics that run together: in one loop over `inner` (the last one in lanes), or once per row if it is empty."""

    inner: tuple[int, ...]
    sequential: bool  # scalar, in order: a reduction whose combining operation is not known to be associative
    generics: list[Generic] = field(default_factory=list)


@dataclass
class Cross:
    """A reduction across rows: its partials are `size` elements a task."""

    generic: Generic
    number: int
    size: int

    @property
    def key(self) -> tuple[int, int]:
        return self.generic.number, self.number

    @property
    def output(self) -> Output:
        return self.generic.outputs[self.number]


@dataclass
class Nest:
    generics: list[Generic]
    rows: list[tuple[int, int]]  # (dim, extent); the dim of a split lane loop stands for its blocks
    split: int | None  # dim whose loop is cut into blocks of BLOCK, one a row
    steps: list[Step] = field(default_factory=list)
    cross: list[Cross] = field(default_factory=list)
    rows_per_task: int = 1
    threads: int = 1
    nontemporal: bool = False
    prefetch: bool = False
    tile: tuple[int, list[Access]] | None = None  # (row dim cut into tiles, operands turned over): loops_tile

    @property
    def row_count(self) -> int:
        return math.prod(extent for _, extent in self.rows)

    @property
    def tasks(self) -> int:
        count = -(-self.row_count // self.rows_per_task)
        return max(count, 1) if self.cross else count

    def row_dims(self) -> set[int]:
        dims = {dim for dim, _ in self.rows} - {self.split}
        return dims - {self.steps[0].inner[0]} if self.tile else dims


def plan(kernel: Kernel, target: CpuTarget) -> list[Nest]:
    """The nests of a kernel, in order."""
    return [_plan_nest(kernel, generics, rows, target) for generics, rows in _groups(kernel)]


def _groups(kernel: Kernel) -> list[tuple[list[Generic], tuple[int, ...]]]:
    """(generics, row dims) of each nest: what stands alone first, the rows, then what uses whole results."""
    rows = set(kernel.rows)
    before: list[list[Generic]] = []
    main: list[Generic] = []
    after: list[list[Generic]] = []
    late: set[int] = set()  # generics whose results are complete only after all rows
    for generic in kernel.generics:
        pieces = _writers(kernel, generic)
        sources = pieces | {a.source.generic for a in _reads(generic) if isinstance(a.source, Result)}
        across = any(kernel.generics[w] in main and not _row_by_row(kernel, generic, w, rows) for w in pieces)
        if sources & late or across:
            _join(after, generic, sources, pieces)
            late.add(generic.number)
        elif rows and rows <= set(generic.dims):
            main.append(generic)
            if rows & generic.reduced:
                if not rows <= generic.reduced:
                    raise CompileError(f"generic {generic.number} reduces some of the rows {kernel.rows} only")
                late.add(generic.number)
        elif any(kernel.generics[s] in main for s in sources):
            _join(after, generic, sources, pieces)
            late.add(generic.number)
        else:
            _join(before, generic, sources, pieces)
    groups = [(g, _common_parallel(g)) for g in before]
    if main:
        groups.append((main, kernel.rows))
    return groups + [(g, _common_parallel(g)) for g in after]


def _writers(kernel: Kernel, generic: Generic) -> set[int]:
    """Generics in front of this one that write, piece by piece, a buffer which it reads as a whole."""
    read = {access.source for access in _reads(generic)} | set(generic.captured)
    earlier = [g for g in kernel.generics if g.number < generic.number]
    return {g.number for g in earlier for o in g.outputs for s in o.stores if s.source in read and _is_out(kernel, s)}


def _is_out(kernel: Kernel, access: Access) -> bool:
    inputs = len(kernel.types) - kernel.outputs
    return isinstance(access.source, Argument) and access.source.position >= inputs


def _row_by_row(kernel: Kernel, generic: Generic, writer: int, rows: set[int]) -> bool:
    """Whether it reads of the pieces only those of the row that it makes itself."""

    def along_rows(access: Access) -> dict[int, int]:
        return {dim: step for dim, step in access.linear().terms if dim in rows}

    stores = [s for o in kernel.generics[writer].outputs for s in o.stores]
    reads = [a for a in _reads(generic) if a.source in {s.source for s in stores}]
    captured = any(s.source in generic.captured for s in stores)
    return not captured and all(along_rows(a) == along_rows(s) for a in reads for s in stores if s.source == a.source)


def _join(groups: list[list[Generic]], generic: Generic, sources: set[int], pieces: set[int]) -> None:
    """Adds a generic to the first group of the same loops that is not in front of one it depends on, and behind those
    that write the `pieces` of what it reads."""
    first = max((i for i, g in enumerate(groups) if any(x.number in sources for x in g)), default=0)
    first = max([first, *(i + 1 for i, g in enumerate(groups) if any(x.number in pieces for x in g))])
    for group in groups[first:]:
        if set(group[0].dims) == set(generic.dims):
            group.append(generic)
            return
    groups.append([generic])


def _common_parallel(generics: list[Generic]) -> tuple[int, ...]:
    return tuple(d for d in generics[0].dims if all(d not in g.reduced for g in generics))


def _reads(generic: Generic) -> list[Access]:
    inits = [o.init.access for o in generic.outputs if o.init.access is not None and (o.reads_init or o.combiner)]
    return [*generic.inputs, *inits]


def _plan_nest(kernel: Kernel, generics: list[Generic], rows: tuple[int, ...], target: CpuTarget) -> Nest:
    sizes = kernel.sizes
    row_list = list(rows)
    if rows and all(set(g.dims) <= set(rows) for g in generics):
        row_list.remove(_lane_dim(kernel, generics, rows))  # rows only: one of them runs in lanes
    nest = Nest(generics, [(d, sizes[d]) for d in row_list], None)
    schedule_steps(kernel, nest)
    for generic in generics:
        if set(rows) & generic.reduced:
            for number, output in enumerate(generic.outputs):
                nest.cross.append(Cross(generic, number, math.prod(output.shape)))
    _tile_or_split(kernel, nest, target)
    _choose_tasks(kernel, nest, target)
    return nest


def _tile_or_split(kernel: Kernel, nest: Nest, target: CpuTarget) -> None:
    """Cuts the loops of a nest of a single step: into tiles that are turned over, or the lane loop into blocks."""
    sizes, lanes = kernel.sizes, target.lanes("f32")
    if len(nest.steps) != 1 or len(nest.steps[0].inner) != 1 or nest.steps[0].sequential:
        return
    lane_dim = nest.steps[0].inner[0]
    nest.tile = find_tile(nest, sizes, lanes)
    if nest.tile:
        dim = nest.tile[0]
        nest.rows = [(d, n) for d, n in nest.rows if d != dim]
        nest.rows.append((dim, -(-sizes[dim] // lanes)))
        nest.rows.append((lane_dim, -(-sizes[lane_dim] // TILE_WIDTH)))
        return
    across = {c.generic.number for c in nest.cross}
    few = nest.row_count < 8 * target.cores and sizes[lane_dim] > (BLOCK if not nest.rows else 4 * BLOCK)
    if few and all(not g.is_reduction or g.number in across for g in nest.generics):
        nest.split = lane_dim
        nest.rows.append((lane_dim, -(-sizes[lane_dim] // BLOCK)))


def _lane_dim(kernel: Kernel, generics: list[Generic], candidates: tuple[int, ...]) -> int:
    """The dim to vectorise: unit stride in most accesses (stores count twice), and long."""

    def score(dim: int) -> tuple[float, int]:
        total = 0
        for generic in generics:
            if dim not in generic.dims:
                continue
            for access in generic.inputs:
                total += dict(access.linear().terms).get(dim) == 1
            for output in generic.outputs:
                for store in output.stores:
                    total += 2 * (dict(store.linear().terms).get(dim) == 1)
                if not output.stores and output.access_indices and output.access_indices[-1].plain_dim() == dim:
                    total += 1
        return total * min(kernel.sizes[dim], 32), candidates.index(dim)

    return max(candidates, key=score)


# --- steps -----------------------------------------------------------------------------------------------------------


def schedule_steps(kernel: Kernel, nest: Nest) -> None:
    """Puts every generic into the first step that may hold it; moves in-place writers behind their readers."""
    row_dims = nest.row_dims()
    inner_of = {g.number: _inner_order(kernel, nest, g, row_dims) for g in nest.generics}
    pieces = {g.number: _writers(kernel, g) for g in nest.generics}
    earliest: dict[int, int] = {}
    for _ in range(len(nest.generics) + 2):
        placed = _place(nest, inner_of, pieces, earliest)
        hazard = _find_hazard(kernel, nest, placed)
        if hazard is None:
            break
        writer, step = hazard
        earliest[writer] = step
    else:
        raise CompileError(f"kernel @{kernel.name}: an in-place result is written before its operand was last read")
    nest.steps = [s for s in nest.steps if s.generics]


def _inner_order(kernel: Kernel, nest: Nest, generic: Generic, row_dims: set[int]) -> tuple[int, ...]:
    """The generic's loops inside a row, the one in lanes last."""
    inner = tuple(d for d in generic.dims if d not in row_dims)
    if len(inner) < 2 or _is_sequential(generic, inner):
        return inner
    same = [g for g in nest.generics if {d for d in g.dims if d not in row_dims} == set(inner)]
    lane = _lane_dim(kernel, same, tuple(sorted(inner)))
    return (*sorted(d for d in inner if d != lane), lane)


def _is_sequential(generic: Generic, inner: tuple[int, ...]) -> bool:
    return bool(generic.reduced & set(inner)) and any(o.combiner is None for o in generic.outputs)


def _place(
    nest: Nest, inner_of: dict[int, tuple[int, ...]], pieces: dict[int, set[int]], earliest: dict[int, int]
) -> dict[int, int]:
    """Fills nest.steps; returns the step of each generic. `pieces`: who writes the pieces of what each reads."""
    nest.steps = []
    placed: dict[int, int] = {}
    outputs = {g.number: g for g in nest.generics}
    for generic in nest.generics:
        inner = inner_of[generic.number]
        bound = earliest.get(generic.number, 0)
        for access in _reads(generic):
            if isinstance(access.source, Result) and access.source.generic in placed:
                producer = outputs[access.source.generic]
                output = producer.outputs[access.source.number]
                in_registers = (
                    not producer.is_reduction
                    and inner_of[producer.number] == inner
                    and access.indices == output.access_indices
                )
                bound = max(bound, placed[producer.number] + (0 if in_registers else 1))
        bound = max([bound, *(placed[w] + 1 for w in pieces[generic.number] if w in placed)])
        sequential = _is_sequential(generic, inner)
        for number in range(bound, len(nest.steps)):
            step = nest.steps[number]
            if step.inner == inner and not step.sequential and not sequential:
                break
        else:
            while len(nest.steps) < bound:
                nest.steps.append(Step((), True))  # an empty step: removed later, keeps the numbering
            number = len(nest.steps)
            nest.steps.append(Step(inner, sequential))
        nest.steps[number].generics.append(generic)
        placed[generic.number] = number
    return placed


def _find_hazard(kernel: Kernel, nest: Nest, placed: dict[int, int]) -> tuple[int, int] | None:
    """(writer, first step it may stand in) of an in-place write that comes before a read of the same buffer.

    In one step, a read of the very element that is written is safe: loads stand before stores.
    """
    for operand, result in kernel.inplace:
        for writer in nest.generics:
            stores = {s.linear() for o in writer.outputs for s in o.stores if s.source == Argument(result)}
            if not stores:
                continue
            for reader in nest.generics:
                reads = {a.linear() for a in _reads(reader) if a.source == Argument(operand)}
                bound = placed[reader.number]
                if Argument(operand) in reader.captured or (reads and reads != stores):
                    bound += 1
                elif not reads:
                    continue
                if placed[writer.number] < bound:
                    return writer.number, bound
    return None


# --- tasks -----------------------------------------------------------------------------------------------------------


def _choose_tasks(kernel: Kernel, nest: Nest, target: CpuTarget) -> None:
    rows = nest.row_count
    cost = sum(_generic_seconds(kernel, g) for g in nest.generics)
    config = kernel.config
    wanted = config.get("threads", target.cores if cost > 8 * target.fork_seconds else 1)
    if nest.cross:
        nest.rows_per_task = _rows_per_partial(nest, rows)
    elif nest.split is None and rows:
        nest.rows_per_task = 1
    nest.threads = max(1, min(wanted, nest.tasks, target.cores))
    nest.nontemporal = bool(config.get("nontemporal", False))  # (schedule/bandwidth.streams)
    nest.prefetch = bool(config.get("prefetch", nest.nontemporal and nest.split is None and len(nest.steps) > 1))


def _rows_per_partial(nest: Nest, rows: int) -> int:
    """Short chains of roundings: 32 rows a partial, more where partials would take too much memory."""
    if rows <= 32 or any(c.output.combiner is None for c in nest.cross):
        return max(rows, 1)
    size = sum(c.size * ln.bytes_of(c.output.element) for c in nest.cross)
    most = max(16, PARTIAL_BUDGET // max(size, 64))
    return max(32, math.isqrt(rows), -(-rows // most))


def _generic_seconds(kernel: Kernel, generic: Generic) -> float:
    """A rough serial time: a quarter of a nanosecond an element and operation that is not free."""
    points = math.prod(kernel.sizes[d] for d in generic.dims)
    work = 1.0 + len(generic.inputs)
    for view in generic.block.operations if generic.block is not None else ():
        work += 4.0 if view.operation.name.startswith("math.") else 0.25
    return points * work * 0.12e-9


# --- indices ---------------------------------------------------------------------------------------------------------


def local_index(access: Access, row_dims: set[int], sizes: dict[int, int], output: Output) -> Index:
    """Offset of a per-row value in its row's scratch: the axes that are rows drop out."""
    terms: dict[int, int] = {}
    constant, stride = 0, 1
    axes = zip(reversed(access.indices), reversed(output.access_indices), reversed(output.shape), strict=True)
    for index, own, extent in axes:
        if own.plain_dim() is None:
            raise CompileError("a value inside a kernel must be indexed by plain dims")
        if own.plain_dim() in row_dims:
            if index.plain_dim() != own.plain_dim():
                raise CompileError("a row of a kernel uses another row's value")
            continue
        constant += index.constant * stride
        for dim, coefficient in index.terms:
            terms[dim] = terms.get(dim, 0) + coefficient * stride
        stride *= extent
    return Index.of(constant, terms)


def local_size(output: Output, row_dims: set[int]) -> int:
    extents = zip(output.access_indices, output.shape, strict=True)
    return math.prod(extent for index, extent in extents if index.plain_dim() not in row_dims)


def find_tile(nest: Nest, sizes: dict[int, int], lanes: int) -> tuple[int, list[Access]] | None:
    """(row dim to tile, operands to turn over), if the nest, of one step, is elementwise and reads across rows."""
    lane_dim = nest.steps[0].inner[0]
    crossed: dict[int, list[Access]] = {}
    for generic in nest.generics:
        if generic.is_reduction:
            return None
        for access in generic.inputs:
            terms = dict(access.linear().terms)
            if not isinstance(access.source, Argument) or terms.get(lane_dim, 0) in (0, 1):
                continue
            for dim, _ in nest.rows:
                if terms.get(dim) == 1 and sizes[dim] >= lanes and sizes[dim] * sizes[lane_dim] >= TILE_SMALL:
                    crossed.setdefault(dim, []).append(access)
    if not crossed or sizes[lane_dim] < lanes:
        return None
    dim = max(crossed, key=lambda d: len(crossed[d]))
    return dim, list(dict.fromkeys(crossed[dim]))
