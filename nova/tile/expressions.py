"""Expression trees of kernel bodies -> operations on tiles.

    domain = Domain(program, layout)                     the tile's dimensions, e.g. (rows, groups, vector)
    values = Evaluator(domain, sources).emit([expr, ..])
    program.store(domain.whole(values[0]), ...)

Every value is a `Part`: it varies along some of the domain's dimensions only, and is computed there. A row's
1 / sqrt(var + eps) is computed once a row and then repeated along the columns, which moves nothing; what is the same
everywhere stays a scalar. Arithmetic on bf16 and f16 is done in f32 and rounded after every operation, which is what
the types say. Values of type `index` are i32 where their bounds allow it, else i64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from nova.errors import CompileError
from nova.fusion.kernel import Expr, Index, Linear, Tensor, const, expr, rewrite, walk
from nova.fusion.layout import row_major
from nova.lowering.constants import LOG2_E
from nova.tile import philox
from nova.tile.builder import Program
from nova.tile.layout import NestedLayout
from nova.tile.text import BITS, FLOATS, Operand, Value
from nova.tile.widths import position_type

NARROW = ("bf16", "f16")
INT32, INT64 = (-(1 << 31), (1 << 31) - 1), (-(1 << 63), (1 << 63) - 1)
APPROXIMATE = "fastmath = #arith.fastmath<afn>"  # of a node whose attr is "afn"
CONTRACT = "fastmath = #arith.fastmath<contract>"  # a product and a sum may be one fma, as CUDA compilers have it
CONTRACTS = frozenset({"arith.addf", "arith.subf", "arith.mulf"})
Bounds = tuple[int, int]


class Part(NamedTuple):
    """A value over some of a domain's dimensions: a tile of those, or a scalar (a Python number if it is known)."""

    value: Operand
    dims: tuple[int, ...]
    element: str


class Domain:
    """The dimensions of the tiles that a body is evaluated on."""

    def __init__(self, program: Program, layout: NestedLayout):
        self.program, self.layout = program, layout
        self.every = tuple(
            dim for dim, size in enumerate(layout.shape) if size > 1
        )  # dimensions of one element are none
        self._iotas: dict[tuple[int, str], Part] = {}

    def at(self, dims: Sequence[int]) -> NestedLayout:
        """How a part over `dims` is held."""
        return self.layout.project([d for d in range(self.layout.rank) if d not in dims])

    def iota(self, dim: int, element: str = "i32") -> Part:
        """The coordinate along `dim`."""
        found = self._iotas.get((dim, element))
        if found is None:
            if self.layout.shape[dim] == 1:
                return Part(0, (), element)
            value = self.program.iota(0, self.at((dim,)))
            found = self._iotas[dim, element] = Part(self.program.convert(value, element), (dim,), element)
        return found

    def scalar(self, part: Part) -> Value:
        """The SSA value of a part that is the same everywhere."""
        assert not part.dims
        return self.program.scalar(part.value, part.element)

    def value(self, part: Part) -> Value:
        return self.program.scalar(part.value, part.element)

    def widen(self, part: Part, dims: tuple[int, ...]) -> Value:
        """The part as a tile over `dims`, or a scalar if either is one: arithmetic splats scalars itself."""
        value = self.value(part)
        if part.dims == dims or not part.dims:
            return value
        missing = [place for place, dim in enumerate(dims) if dim not in part.dims]
        return self.program.expand(value, missing, self.at(dims))

    def whole(self, part: Part, dims: tuple[int, ...] | None = None) -> Value:
        """The part as a tile with a layout over `dims` (all of them by default)."""
        dims = self.every if dims is None else dims
        value = self.widen(part, dims)
        if value.is_tile and value.layout is not None:
            return value
        layout = self.at(dims)
        return self.program.splat(value, layout.shape, value.element, layout) if dims else value

    def union(self, parts: Sequence[Part]) -> tuple[int, ...]:
        return tuple(sorted({dim for part in parts for dim in part.dims}))

    def apply(self, make: Callable[..., Value], parts: Sequence[Part]) -> Part:
        """`make` of the parts, over the dimensions that any of them has."""
        dims = self.union(parts)
        result = make(*(self.widen(part, dims) for part in parts))
        return Part(result, dims, result.element)

    # --- integers that fold ---

    def add(self, a: Part, b: Part) -> Part:
        if not a.dims and not b.dims:
            return Part(self.program.add(a.value, b.value), (), a.element)
        for x, y in ((a, b), (b, a)):
            if isinstance(x.value, int) and x.value == 0:
                return y
        return self.apply(lambda x, y: self.program.binary("arith.addi", x, y), (a, b))

    def scale(self, a: Part, factor: int) -> Part:
        if factor == 1:
            return a
        if not a.dims:
            return Part(self.program.mul(a.value, factor), (), a.element)
        return self.apply(lambda x: self.program.binary("arith.muli", x, factor), (a,))

    def total(self, parts: Sequence[Part], element: str = "i32") -> Part:
        """The sum; what varies along few dimensions is added first."""
        by_dims: dict[tuple[int, ...], Part] = {}
        for part in parts:
            part = self.convert(part, element)
            by_dims[part.dims] = self.add(by_dims[part.dims], part) if part.dims in by_dims else part
        result = Part(0, (), element)
        for dims in sorted(by_dims, key=lambda d: (len(d), d)):
            result = self.add(result, by_dims[dims])
        return result

    def divide(self, a: Part, by: int) -> Part:
        """Of what is not negative, rounded down."""
        if by == 1:
            return a
        if not a.dims:
            return Part(self.program.div(a.value, by), (), a.element)
        return self.apply(lambda x: self.program.binary("arith.divui", x, by), (a,))

    def remainder(self, a: Part, by: int) -> Part:
        if not a.dims:
            return Part(self.program.rem(a.value, by), (), a.element)
        return self.apply(lambda x: self.program.binary("arith.remui", x, by), (a,))

    def convert(self, part: Part, element: str, signed: bool = True) -> Part:
        if part.element == element:
            return part
        if isinstance(part.value, int | float) and element not in FLOATS:
            return Part(part.value, part.dims, element)
        value = self.program.convert(self.value(part), element, signed)
        return Part(value, part.dims, element)


class Sources:
    """What bodies need from the kernel around them. Subclass it; a method is only needed if a body uses it."""

    sizes: Sequence[int] = ()  # of the kernel's loops

    def load(self, tensor: Tensor, index: Index) -> Part:
        """tensor[index], loaded or computed before."""
        raise CompileError(f"a load of {tensor} is not available here")

    def made_by(self, tensor: Tensor, index: Index) -> Expr | None:
        """The expression behind tensor[index], if the kernel computed it before."""
        return None

    def loop(self, loop: int) -> list[Part]:
        """The loop's index as a sum of i32 parts; the last one is the vector dimension's if there is one."""
        raise CompileError(f"the index of loop {loop} is not available here")

    def pointer(self, tensor: Tensor) -> Value:
        """Of an argument that bodies read at places of their own choice."""
        raise CompileError(f"elements of {tensor} are not available here")

    def mask(self, dims: tuple[int, ...]) -> Part | None:
        """Where the tile lies inside the loops, over `dims` or fewer; None: everywhere."""
        return None

    def record(self) -> Value:
        """The error record."""
        raise CompileError("nova.check is not available here")

    def accumulator(self, number: int) -> Part:
        raise CompileError("an accumulator is not available here")


class Evaluator:
    """Emits expressions; equal nodes once."""

    def __init__(self, domain: Domain, sources: Sources):
        self.domain, self.sources, self.program = domain, sources, domain.program
        self.known: dict[Expr, Part] = {}
        self.ranges: dict[Expr, Bounds] = {}
        self.wide: dict[tuple[int, ...], Part] = {}
        self.keys: dict[Expr, philox.Keys] = {}

    def emit(self, roots: Sequence[Expr]) -> list[Part]:
        for node in walk(roots):
            if node not in self.known:
                self.known[node] = self._node(node)
        return [self.known[root] for root in roots]

    def check(self, node: Expr) -> None:
        """A nova.check: the error record is written where its condition holds inside the loops."""
        bad, value = self.emit(node.args)
        mask = self.sources.mask(bad.dims)
        if mask is not None:
            bad = self.domain.apply(lambda x, y: self.program.binary("arith.andi", x, y), (bad, mask))
        dims = self.domain.union((bad, value))
        if not dims:
            self.program.check(self.domain.value(bad), self.domain.value(value), self.sources.record())
            return
        flags, values = (self.domain.whole(part, dims) for part in (bad, value))
        self.program.check(flags, values, self.sources.record())

    # --- nodes ---

    def _node(self, node: Expr) -> Part:
        op, domain = node.op, self.domain
        if op == "const":
            return Part(node.attr, (), self.element(node))
        if op == "load":
            return self.sources.load(*node.attr)
        if op == "linear":
            return self.linear(node.attr, self.element(node))
        if op == "acc":
            return self.sources.accumulator(node.attr)
        args = [self.known[arg] for arg in node.args]
        if op == "tensor.extract":
            return self._extract(node, args)
        if op == "nova.philox":
            return self._philox(node, args)
        if op in _CASTS:
            return self._cast(node, args[0])
        if op == "arith.cmpi" and node.attr in ("eq", "ne"):
            args = self._narrow_equality(node, args)
        if op in ("arith.cmpi", "arith.cmpf"):
            narrow = op == "arith.cmpi" and not node.attr.startswith("u") and all(map(self.fits_32, node.args))
            narrow = narrow or {arg.element for arg in args} == {"i32"}
            args = self._same(args, "i32" if narrow and args[0].element != "i1" else None)
            return domain.apply(lambda x, y: self.program.cmp(node.attr, x, y), args)
        if op == "arith.select":
            a, b = self._same(args[1:], self.element(node))
            return domain.apply(self.program.select, (args[0], a, b))
        if not op.startswith(("arith.", "math.")):
            raise CompileError(f"{op} in a kernel's body has no GPU code")
        return self._arith(node, args)

    def _narrow_equality(self, node: Expr, args: list[Part]) -> list[Part]:
        """An index against a 64-bit value that varies along fewer dimensions (a row's label): compared in 32 bits.

        The value is made -1, which no such index is, where it does not fit; that costs once a row, not once an element.
        """
        for a, b in ((0, 1), (1, 0)):
            low, high = self.bounds(node.args[a])
            wide = args[b]
            if wide.element == "i64" and low >= 0 and high <= INT32[1] and set(wide.dims) < set(args[a].dims):
                index, value = self.domain.convert(args[a], "i32"), self.domain.apply(self._fit_32, (wide,))
                return [index, value] if a == 0 else [value, index]
        return args

    def _fit_32(self, x: Value) -> Value:
        program = self.program
        fits = program.cmp("ule", x, program.constant(INT32[1], "i64"))
        return program.select(fits, program.convert(x, "i32"), program.constant(-1, "i32"))

    def _arith(self, node: Expr, args: list[Part]) -> Part:
        result = self.element(node)
        computed = "f32" if result in NARROW else result
        if node.op != "math.fpowi" and node.op not in ("arith.bitcast",):
            args = [self.domain.convert(arg, computed) if arg.element in FLOATS else arg for arg in args]
            if result not in FLOATS:
                args = self._same(args, computed)

        def make(*operands: Value) -> Value:
            shape = next((v.shape for v in operands if v.is_tile), None)
            if shape is not None:
                operands = tuple(v if v.is_tile else self.program.splat(v, shape, v.element) for v in operands)
            layout = next((v.layout for v in operands if v.layout is not None), None)
            attrs = APPROXIMATE if node.attr == "afn" else CONTRACT if node.op in CONTRACTS else ""
            return self.program.op(node.op, operands, computed, shape, attrs, layout)

        return self.domain.convert(self.domain.apply(make, args), result)

    def _cast(self, node: Expr, a: Part) -> Part:
        op, result = node.op, self.element(node)
        if op == "builtin.unrealized_conversion_cast" or (op == "arith.bitcast" and a.element == result):
            return a
        if op == "arith.bitcast":
            return self.domain.apply(lambda x: self.program.unary(op, x, result), (a,))
        if op in ("arith.fptosi", "arith.fptoui") and a.element in NARROW:
            a = self.domain.convert(a, "f32")
        signed = op not in ("arith.extui", "arith.uitofp", "arith.fptoui", "arith.index_castui")
        if result in NARROW and a.element not in FLOATS:  # as PyTorch: through float, which is what rounds
            a = self.domain.convert(a, "f32", signed)
        if (op == "arith.fptosi" and result == "i1") or (op == "arith.fptoui" and result == "i1"):
            raise CompileError(f"{op} to i1: compare with zero instead")
        return self.domain.convert(a, result, signed)

    def _same(self, args: Sequence[Part], element: str | None = None) -> list[Part]:
        """Index values, which may be of 32 or 64 bits, made alike; floats of 16 bits as f32."""
        if element is None:
            element = max((arg.element for arg in args), key=lambda e: BITS[e])
            element = "f32" if element in NARROW else element
        return [self.domain.convert(arg, element) for arg in args]

    def linear(self, item: Linear, element: str = "i32") -> Part:
        """The value of a linear expression of loops."""
        parts = [Part(item.const, (), element)]
        for loop, coefficient in item.terms:
            for part in self.sources.loop(loop):
                parts.append(self.domain.scale(self.domain.convert(part, element), coefficient))
        return self.domain.total(parts, element)

    # --- memory at computed places ---

    def _extract(self, node: Expr, args: list[Part]) -> Part:
        tensor: Tensor = node.attr
        element = position_type(tensor.numel)
        strides = row_major(tensor.shape)
        parts = [
            self.domain.scale(self.domain.convert(arg, element), stride)
            for arg, stride in zip(args, strides, strict=True)
        ]
        if parts and node.args[-1].op == "linear":  # add the vector dimension last: one index a run
            parts[-1:] = self._split(node.args[-1].attr, element)
        index = self.domain.total(parts, element)
        return self.gather(tensor, index, self._run(node, strides))

    def _split(self, item: Linear, element: str) -> list[Part]:
        parts = [Part(item.const, (), element)]
        for loop, coefficient in item.terms:
            parts += [
                self.domain.scale(self.domain.convert(part, element), coefficient) for part in self.sources.loop(loop)
            ]
        return parts

    def _run(self, node: Expr, strides: Sequence[int]) -> int:
        """Neighbouring elements that one access may read: the whole vector dimension, or 1."""
        vector_dim = self.domain.layout.rank - 1
        run = self.domain.layout.shape[vector_dim]
        last = node.args[-1] if node.args else None
        if run == 1 or last is None or last.op != "linear" or self.domain.layout.element[vector_dim] != run:
            return 1
        others = [self.known[arg] for arg in node.args[:-1]]
        if any(vector_dim in part.dims for part in others) or any(s % run for s in strides[:-1]):
            return 1
        return run if self.is_run(last.attr, run) else 1

    def is_run(self, item: Linear, run: int) -> bool:
        """Whether the expression counts up by one along the vector dimension, from multiples of `run`."""
        vector_dim, seen = self.domain.layout.rank - 1, 0
        for loop, coefficient in item.terms:
            parts = self.sources.loop(loop)
            if any(vector_dim in part.dims for part in parts):
                seen += 1
                if coefficient != 1:
                    return False
            elif coefficient % run:
                return False
        return seen == 1 and item.const % run == 0

    def gather(self, tensor: Tensor, index: Part, vector: int = 1) -> Part:
        """tensor's flat element at `index`, inside the loops."""
        memory = memory_element(tensor.dtype)
        mask = self.sources.mask(index.dims)
        dims = index.dims if mask is None else self.domain.union((index, mask))
        vector = vector if dims and dims[-1] == self.domain.layout.rank - 1 else 1
        if not dims:
            base = self.domain.value(self.domain.convert(index, "i64"))
            return Part(self.program.load_scalar(self.sources.pointer(tensor), base, memory), (), memory)
        place = self.domain.whole(index, dims)
        inside = None if mask is None else self.domain.whole(mask, dims)
        return Part(
            self.program.gather(self.sources.pointer(tensor), place, memory, inside, vector=vector), dims, memory
        )

    # --- random words ---

    def _philox(self, node: Expr, args: list[Part]) -> Part:
        seed, element = args
        run = self.domain.layout.shape[-1] if self.domain.layout.rank else 1
        place = _strip(node.args[1])
        keys: philox.Keys = self.keys.get(node.args[0]) or philox.round_keys(self.domain, seed)
        if not seed.dims:
            self.keys[node.args[0]] = keys
        if run % 4 == 0 and place.op == "linear" and self.is_run(place.attr, run):
            first = self._split(place.attr, "i64")
            vector_dim = self.domain.layout.rank - 1
            base = self.domain.total([part for part in first if vector_dim not in part.dims], "i64")
            return philox.run(self.domain, keys, base, run, node.attr)
        return philox.any_elements(self.domain, keys, self.domain.convert(element, "i64"), node.attr)

    # --- types ---

    def element(self, node: Expr) -> str:
        if node.type != "index":
            return memory_element(node.type)
        return "i32" if self.fits_32(node) else "i64"

    def fits_32(self, node: Expr) -> bool:
        low, high = self.bounds(node)
        return low >= INT32[0] and high <= INT32[1]

    def bounds(self, node: Expr) -> Bounds:
        """Of an integer, as far as its own operands tell."""
        for below in walk([node]):
            if below not in self.ranges:
                self.ranges[below] = self._bounds(below)
        return self.ranges[node]

    def _bounds(self, node: Expr) -> Bounds:
        limits = _LIMITS.get(node.type, INT64)
        if node.type in FLOATS or node.type == "check":
            return INT64
        if node.op == "const":
            return int(node.attr), int(node.attr)
        if node.op == "linear":
            ends = [(c * (max(self.sources.sizes[loop], 1) - 1)) for loop, c in node.attr.terms]
            return node.attr.const + sum(min(e, 0) for e in ends), node.attr.const + sum(max(e, 0) for e in ends)
        if node.op == "load":
            value = self.sources.made_by(*node.attr)
            return limits if value is None else self.bounds(value)
        args = [self.ranges[arg] for arg in node.args]
        found = _combine_bounds(node, args)
        return found if found is not None and found[0] >= limits[0] and found[1] <= limits[1] else limits


_CASTS = frozenset({
    "arith.extf", "arith.truncf", "arith.sitofp", "arith.uitofp", "arith.fptosi", "arith.fptoui", "arith.extsi",
    "arith.extui", "arith.trunci", "arith.index_cast", "arith.index_castui", "arith.bitcast",
    "builtin.unrealized_conversion_cast",
})  # fmt: skip
_LIMITS: dict[str, Bounds] = {"i1": (0, 1), "i8": (-128, 255), "i16": (-(1 << 15), (1 << 16) - 1), "i32": INT32}


def _combine_bounds(node: Expr, args: list[Bounds]) -> Bounds | None:
    op = node.op
    if op in ("arith.index_cast", "arith.extsi", "arith.trunci"):
        return args[0]
    if op == "arith.select":
        return min(args[1][0], args[2][0]), max(args[1][1], args[2][1])
    if len(args) != 2 or op in ("arith.cmpi", "arith.cmpf"):
        return None
    (a, b), (c, d) = args
    if op == "arith.addi":
        return a + c, b + d
    if op == "arith.subi":
        return a - d, b - c
    if op == "arith.muli":
        products = (a * c, a * d, b * c, b * d)
        return min(products), max(products)
    if op == "arith.maxsi":
        return max(a, c), max(b, d)
    if op == "arith.minsi":
        return min(a, c), min(b, d)
    if op in ("arith.divsi", "arith.divui", "arith.floordivsi") and c > 0 and a >= 0:
        return a // d, b // c
    if op in ("arith.remsi", "arith.remui") and c > 0 and a >= 0:
        return 0, min(b, d - 1)
    return None


def _strip(node: Expr) -> Expr:
    """The value under casts between integer types."""
    while node.op in ("arith.index_cast", "arith.extsi", "arith.extui"):
        node = node.args[0]
    return node


def memory_element(dtype: str) -> str:
    """The element type of tiles of a tensor type: registers know no sign."""
    element = "i" + dtype[2:] if dtype.startswith("ui") else dtype
    if element not in BITS and element != "index":
        raise CompileError(f"values of type {dtype} have no GPU code")
    return element


def approximate_exponentials(root: Expr) -> Expr:
    """exp(a - b) in float32 as one approximate exp2: for sums of exponentials whose largest is 1.

    The relative error of a term is about |a - b| 2^-24, and its weight in the sum falls faster.
    """

    def change(node: Expr) -> Expr | None:
        if node.op != "math.exp" or node.type != "f32" or node.args[0].op != "arith.subf":
            return None
        scaled = expr("arith.mulf", (node.args[0], const(LOG2_E, "f32")), "f32")
        return expr("math.exp2", (scaled,), "f32", "afn")

    return rewrite(root, change)
