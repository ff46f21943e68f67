"""Reads a level-2 "contraction" kernel into the form its code generator works on.

    linalg.generic {nova.contraction} over (b, h, t, s, d)      batch = (b, h)   m = (t)   n = (s)   k = (d)
      ins(%q: (b, t, h, d), %k: (b, s, h, d))              ->   lhs: 0 + 589824 b + 64 h + 2304 t + 1 d
    linalg.generic (scale, bias, ...)                           rhs, outputs and every epilogue operand likewise

`n` is the side along which the first result is contiguous, so that it can be the vector dimension: operands swap sides
if need be. Neighbouring dimensions that every access walks as one are merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from nova.errors import CompileError
from nova.fusion import access as ac
from nova.fusion.access import Access
from nova.mlir import int_array, ir
from nova.schedule.contraction import ContractionProblem, Operand
from nova.schedule.target import ELEMENT_BYTES


@dataclass
class Dims:
    """The kernel's dimensions by role, as merged; `sizes` is indexed by dimension."""

    sizes: list[int]
    batch: tuple[int, ...] = ()
    m: tuple[int, ...] = ()
    n: tuple[int, ...] = ()
    k: tuple[int, ...] = ()

    def extent(self, dims: Sequence[int]) -> int:
        product = 1
        for d in dims:
            product *= self.sizes[d]
        return product


@dataclass
class Generic:
    """One linalg.generic: its kernel-wide loop ids, the maps of its operands (ins then outs), and the operation."""

    op: ir.Operation
    dims: tuple[int, ...]
    maps: list[ir.AffineMap]
    inputs: int

    tile: int = 0  # NT, if this is a reduction over N tiles

    @property
    def block(self) -> ir.Block:
        return self.op.regions[0].blocks[0]

    @property
    def operands(self) -> list[ir.Value]:
        return list(self.op.operands)

    @property
    def factors(self) -> list[int]:
        """The operands that a core multiplies: one if it squares a tensor. (Others only give loops their sizes.)"""
        return [number for number in range(self.inputs) if self.reads(number)]

    def reads(self, number: int) -> bool:
        """Whether the region uses operand `number`: most destinations are only written."""
        return next(iter(self.block.arguments[number].uses), None) is not None


@dataclass
class Contraction:
    """The kernel: roles, accesses, where the accumulator starts, and what is stored."""

    name: str
    buffers: list[ir.Type]
    aliased: tuple[int, ...]
    dims: Dims
    lhs: Access
    rhs: Access
    core: Generic
    accumulator: ir.Type
    init: ir.Value  # tensor the accumulation starts from
    outputs: list[tuple[ir.Value, Access]]
    generics: dict[ir.Value, tuple[Generic, int]]  # result value -> its generic and result number
    accesses: dict[tuple[ir.Operation, int], Access]  # (generic op, operand number) -> access of a kernel buffer
    factors: tuple[int, ...] = (0, 1)  # the core's operands that are multiplied
    tf32: bool = False  # float32 operands may be rounded to TF32
    indexed: set[int] = field(default_factory=set)  # dimensions that a region asks for with linalg.index

    @property
    def m(self) -> int:
        return self.dims.extent(self.dims.m)

    @property
    def n(self) -> int:
        return self.dims.extent(self.dims.n)

    @property
    def k(self) -> int:
        return self.dims.extent(self.dims.k)

    @property
    def batch(self) -> int:
        return self.dims.extent(self.dims.batch)

    @property
    def tile(self) -> int:
        """Columns of the tiles that the kernel reduces over; 0 if it doesn't."""
        return max(generic.tile for generic, _ in self.generics.values())

    @property
    def tile_dim(self) -> int:
        """The number of the N tile, as a dimension of accesses."""
        return len(self.dims.sizes)

    def plane_reads(self) -> list[Access]:
        """What the epilogue reads for each (m, n), and what the accumulation starts from."""
        factors = [(self.core.op, number) for number in self.factors]
        return [access for key, access in self.accesses.items() if key not in factors]

    def all_accesses(self) -> Iterator[Access]:
        yield self.lhs
        yield self.rhs
        yield from self.accesses.values()
        yield from (access for _, access in self.outputs)


def read(kernel: ir.OpView) -> Contraction:
    """Analyses the function of a contraction kernel."""
    function = kernel.operation
    block = function.regions[0].blocks[0]
    arguments = list(block.arguments)
    position = {argument: i for i, argument in enumerate(arguments)}
    name = ir.StringAttr(function.attributes["sym_name"]).value
    sizes = int_array(function.attributes["nova.dims"])
    generics: dict[ir.Value, tuple[Generic, int]] = {}
    cores: list[Generic] = []
    for view in block.operations:
        op = view.operation
        if op.name == "linalg.generic":
            generic = _generic(op)
            if "nova.contraction" in op.attributes:
                cores.append(generic)
            generics.update({result: (generic, i) for i, result in enumerate(op.results)})
    if len(cores) != 1:
        raise CompileError(f"kernel @{name}: expected one nova.contraction, got {len(cores)}")
    core = cores[0]
    _check_body(core, name)
    rank = len(sizes)
    accesses: dict[tuple[ir.Operation, int], Access] = {}
    for generic, _ in generics.values():
        for number, operand in enumerate(generic.operands):
            window = ac.view_of(operand, position)
            if window is not None and (generic is core or generic.reads(number)):
                accesses[generic.op, number] = ac.access_of(window, generic.maps[number], generic.dims, rank)
    terminator = block.operations[len(block.operations) - 1].operation
    outputs = _outputs(terminator, arguments, position, generics, rank)
    contraction = Contraction(
        name=name,
        buffers=[argument.type for argument in arguments],
        aliased=_aliased(function, len(arguments) - len(terminator.operands)),
        dims=Dims(sizes),
        lhs=accesses[core.op, core.factors[0]],
        rhs=accesses[core.op, core.factors[-1]],
        core=core,
        accumulator=ir.RankedTensorType(core.op.results[0].type).element_type,
        init=core.operands[core.inputs],
        outputs=outputs,
        generics=generics,
        accesses=accesses,
        factors=tuple(core.factors),
        tf32="nova.tf32" in function.attributes or "nova.tf32" in core.op.attributes,
        indexed=set(_indexed(generics)),
    )
    _assign_roles(contraction)
    _merge(contraction)
    return contraction


def _generic(op: ir.Operation) -> Generic:
    segments = [int(x) for x in op.attributes["operandSegmentSizes"]]
    maps = [attribute.value for attribute in op.attributes["indexing_maps"]]
    tiles = [tile[1] for m in maps[segments[0] :] for e in m.results if (tile := ac.tile_of(e))]
    return Generic(op, tuple(int(d) for d in op.attributes["dims"]), maps, segments[0], tiles[0] if tiles else 0)


def _check_body(core: Generic, name: str) -> None:
    """The core's region must be a plain multiply-accumulate; anything else belongs in the epilogue."""
    names = [view.operation.name for view in core.block.operations]
    plain = [n for n in names if n not in ("arith.extf", "linalg.yield")]
    if plain != ["arith.mulf", "arith.addf"] or len(core.factors) not in (1, 2):
        raise CompileError(f"kernel @{name}: a contraction's body is mulf and addf on two operands, got {names}")


def _indexed(generics: dict[ir.Value, tuple[Generic, int]]) -> Iterator[int]:
    for generic, _ in generics.values():
        for view in generic.block.operations:
            if view.operation.name == "linalg.index":
                yield generic.dims[ir.IntegerAttr(view.operation.attributes["dim"]).value]


def _aliased(function: ir.Operation, operands: int) -> tuple[int, ...]:
    """Buffers that an in-place pair [operand, result] may make share memory."""
    if "nova.inplace" not in function.attributes:
        return ()
    pairs = [int_array(pair) for pair in function.attributes["nova.inplace"]]
    return tuple(i for operand, result in pairs for i in (operand, operands + result))


def _outputs(
    terminator: ir.Operation,
    arguments: Sequence[ir.Value],
    position: dict[ir.Value, int],
    generics: dict[ir.Value, tuple[Generic, int]],
    rank: int,
) -> list[tuple[ir.Value, Access]]:
    """What is stored where: each returned tensor goes to its destination argument, through insert_slice if any."""
    first = len(arguments) - len(terminator.operands)
    found = []
    for number, returned in enumerate(terminator.operands):
        window = ac.view_of(arguments[first + number], position)
        assert window is not None
        value = returned
        while value not in generics:
            owner = value.owner
            if isinstance(owner, ir.Block) or owner.name != "tensor.insert_slice":
                raise CompileError(f"result {number} of a contraction kernel is not computed by a generic: {value}")
            window = ac.sliced(window, owner, list(ir.RankedTensorType(owner.operands[0].type).shape))
            value = owner.operands[0]
        generic, result = generics[value]
        found.append((value, ac.access_of(window, generic.maps[generic.inputs + result], generic.dims, rank)))
    return found


def _assign_roles(c: Contraction) -> None:
    kinds = [str(attribute) for attribute in c.core.op.attributes["iterator_types"]]
    reduced = {d for d, kind in zip(c.core.dims, kinds, strict=True) if "reduction" in kind}
    parallel = [d for d in c.core.dims if d not in reduced]
    out = next((a for _, a in c.outputs if not a.coefficients[c.tile_dim]), c.outputs[0][1])

    def order(dims: Sequence[int], access: Access) -> tuple[int, ...]:
        return tuple(sorted(dims, key=lambda d: -abs(access.coefficients[d])))

    def only(a: Access, b: Access) -> list[int]:
        return [d for d in parallel if a.coefficients[d] and not b.coefficients[d] and c.dims.sizes[d] > 1]

    left, right = only(c.lhs, c.rhs), only(c.rhs, c.lhs)
    unit = min((d for d in left + right), key=lambda d: abs(out.coefficients[d]) or 1 << 62, default=None)
    swap = (unit in left and c.dims.extent(left) > 1) or (not right and left)
    if c.tile:
        swap = bool(set(_tiled_dims(c)) & set(left))
    if swap:
        left, right, c.lhs, c.rhs = right, left, c.rhs, c.lhs
    rest = [d for d in parallel if d not in left and d not in right and c.dims.sizes[d] != 1]
    c.dims.m, c.dims.n, c.dims.batch = order(left, out), order(right, out), order(rest, out)
    c.dims.k = order([d for d in c.core.dims if d in reduced and c.dims.sizes[d] != 1], c.rhs)
    if c.tile and (len(c.dims.n) != 1 or set(_tiled_dims(c)) != set(c.dims.n)):
        raise CompileError(f"kernel @{c.name}: a reduction over tiles needs one N dimension, the tiled one")


def _tiled_dims(c: Contraction) -> Iterator[int]:
    """Dimensions whose tiles are reduced over."""
    for generic, _ in c.generics.values():
        for affine_map in generic.maps:
            for expression in affine_map.results:
                tile = ac.tile_of(expression)
                if tile:
                    if tile[1] != c.tile:
                        raise CompileError(f"kernel @{c.name} has tiles of {tile[1]} and of {c.tile} columns")
                    yield generic.dims[tile[0]]


def _merge(c: Contraction) -> None:
    """Makes one dimension of two neighbours wherever every access walks them as one.

    The inner dimension stays and grows; coefficients don't change. A dimension that a region reads the index of stays.
    """
    accesses = list(c.all_accesses())
    c.indexed |= set(_tiled_dims(c)) if c.tile else set()  # a tiled dimension stays what it is

    def merged(dims: tuple[int, ...]) -> tuple[int, ...]:
        kept: list[int] = []
        for d in reversed(dims):
            if kept and d not in c.indexed and kept[-1] not in c.indexed:
                inner = kept[-1]
                size = c.dims.sizes[inner]
                if all(a.coefficients[d] == a.coefficients[inner] * size for a in accesses):
                    c.dims.sizes[inner] *= c.dims.sizes[d]
                    c.dims.sizes[d] = 1
                    continue
            kept.append(d)
        return tuple(reversed(kept))

    c.dims.batch, c.dims.m, c.dims.n, c.dims.k = (merged(dims) for dims in (c.dims.batch, c.dims.m, c.dims.n, c.dims.k))


def operation_count(c: Contraction) -> int:
    """Scalar operations of all epilogue regions: what decides between registers and a row loop."""
    seen: dict[int, Generic] = {id(g): g for g, _ in c.generics.values() if g is not c.core}
    return sum(len(g.block.operations) - 1 for g in seen.values())


def bytes_of(element: ir.Type) -> int:
    return ELEMENT_BYTES.get(str(element).replace("ui", "i"), 4)


def problem_of(c: Contraction) -> ContractionProblem:
    """What the configurator needs to know of a kernel."""

    def operand(access: Access, dims: tuple[int, ...]) -> Operand:
        across, length = ac.contiguous_run(access, dims, c.dims.sizes)
        k_stride, k_length = ac.contiguous_run(access, c.dims.k, c.dims.sizes)
        return Operand(
            str(access.element),
            across if length == c.dims.extent(dims) else None,
            k_stride if k_length == c.k else None,
        )

    reads = [a for a in c.plane_reads() if a.touches(c.dims.m) and a.touches(c.dims.n)]
    return ContractionProblem(
        c.m, c.n, c.k, c.batch, operand(c.lhs, c.dims.m), operand(c.rhs, c.dims.n), str(c.accumulator),
        output_bytes=sum(bytes_of(access.element) for _, access in c.outputs),
        epilogue_bytes=sum(bytes_of(access.element) for access in reads),
        epilogue_operations=operation_count(c),
        compute="tf32" if c.tf32 and str(c.lhs.element) == str(c.rhs.element) == "f32" else "",
        n_tile_limit=c.tile,
    )  # fmt: skip
