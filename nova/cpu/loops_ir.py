"""Reads a level-2 kernel function into plain data: its generics, and what memory each operand touches.

    %a = tensor.extract_slice %x[0, 4] [8, 4] [1, 2] : tensor<8x16xf32> to tensor<8x4xf32>
    %g = linalg.generic {indexing_maps = [(i, j) -> (i, j), (i, j) -> (i)], dims = [0, 3]} ins(%a) outs(%fill) {...}

becomes Generic(dims=(0, 3), inputs=[Access(Argument 0, axes (d0), (2*d3 + 4))], inits=[constant], ...): slices,
fills, empties and insertions are gone, and every index is an affine expression in the kernel-wide dims.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nova.errors import CompileError
from nova.lowering import lanes as ln
from nova.mlir import int_array, ir

COMBINERS = {
    "arith.addf", "arith.mulf", "arith.maximumf", "arith.minimumf", "arith.maxnumf", "arith.minnumf", "arith.addi",
    "arith.muli", "arith.maxsi", "arith.minsi", "arith.maxui", "arith.minui", "arith.ori", "arith.andi", "arith.xori",
}  # fmt: skip


@dataclass(frozen=True)
class Index:
    """An affine expression of kernel dims: constant + sum of coefficient * dim."""

    constant: int = 0
    terms: tuple[tuple[int, int], ...] = ()  # (dim, coefficient), sorted, coefficients not 0

    @staticmethod
    def of(constant: int, terms: Mapping[int, int]) -> Index:
        return Index(constant, tuple(sorted((d, c) for d, c in terms.items() if c)))

    def scaled(self, factor: int, shift: int) -> Index:
        return Index.of(self.constant * factor + shift, {d: c * factor for d, c in self.terms})

    def plain_dim(self) -> int | None:
        """The dim this is, if it is nothing but one dim."""
        return self.terms[0][0] if self.constant == 0 and len(self.terms) == 1 and self.terms[0][1] == 1 else None


@dataclass(frozen=True)
class Argument:
    """A buffer passed to the kernel, dense and row-major."""

    position: int


@dataclass(frozen=True)
class Result:
    """A result of one of the kernel's own generics."""

    generic: int
    number: int


@dataclass(frozen=True)
class Access:
    """One element of a tensor, as a function of the kernel dims: an index for each axis of the whole source."""

    source: Argument | Result
    shape: tuple[int, ...]
    element: ir.Type
    indices: tuple[Index, ...]

    def linear(self) -> Index:
        """Element offset in a dense row-major buffer of `shape`."""
        terms: dict[int, int] = {}
        constant, stride = 0, 1
        for extent, index in zip(reversed(self.shape), reversed(self.indices), strict=True):
            constant += index.constant * stride
            for dim, coefficient in index.terms:
                terms[dim] = terms.get(dim, 0) + coefficient * stride
            stride *= extent
        return Index.of(constant, terms)

    def dims(self) -> set[int]:
        return {dim for index in self.indices for dim, _ in index.terms}


@dataclass(frozen=True)
class Init:
    """What an `outs` operand holds before: a number, the contents of a tensor, or nothing that matters."""

    number: ir.Attribute | None = None
    access: Access | None = None


@dataclass
class Output:
    """One result of a generic: where it goes, what was there, and how a reduction combines."""

    access_indices: tuple[Index, ...]  # of the result itself, in kernel dims
    shape: tuple[int, ...]
    element: ir.Type
    init: Init
    reads_init: bool  # the region uses the out argument
    combiner: str | None  # arith op, when the region is `combine(accumulator, f(inputs))`
    contribution: ir.Value | None  # f(inputs)
    stores: list[Access] = field(default_factory=list)  # buffers of the caller it is written to


@dataclass
class Generic:
    """A linalg.generic over kernel dims, or a fill (no block, no inputs)."""

    number: int
    dims: tuple[int, ...]
    reduced: frozenset[int]
    block: ir.Block | None
    operands: list[Access | None]  # one an input of the region; None if the region does not use it
    outputs: list[Output]
    constant: ir.Attribute | None = None  # of a fill
    captured: list[Argument] = field(default_factory=list)  # buffers its region reads at places of its own choice
    consumers: set[int] = field(default_factory=set)

    @property
    def inputs(self) -> list[Access]:
        """The operands that are read."""
        return [access for access in self.operands if access is not None]

    @property
    def is_reduction(self) -> bool:
        return bool(self.reduced)


@dataclass
class Kernel:
    """A whole kernel function. `sizes` holds the extent of every kernel dim."""

    name: str
    types: list[ir.Type]
    outputs: int  # trailing arguments that are destinations
    inplace: list[tuple[int, int]]  # (operand position, argument position of the result) that may be one buffer
    sizes: dict[int, int]
    rows: tuple[int, ...]
    generics: list[Generic]
    raises: bool
    config: dict[str, int]
    views: dict[ir.Value, View] = field(default_factory=dict)  # whole-tensor operands that regions capture


@dataclass(frozen=True)
class View:
    """A tensor value as a window of a source: source axis = offset + multiplier * view axis."""

    source: Argument | Result
    shape: tuple[int, ...]  # of the source
    element: ir.Type
    offsets: tuple[int, ...]  # a source axis each
    axes: tuple[tuple[int, int], ...]  # a view axis each: (source axis, multiplier)

    @staticmethod
    def whole(source: Argument | Result, shape: Sequence[int], element: ir.Type) -> View:
        rank = len(shape)
        return View(source, tuple(shape), element, (0,) * rank, tuple((axis, 1) for axis in range(rank)))

    def window(self, offsets: Sequence[int], strides: Sequence[int], kept: Sequence[int]) -> View:
        """A slice of this view; `kept` are the axes that remain axes."""
        new_offsets = list(self.offsets)
        for (axis, multiplier), offset in zip(self.axes, offsets, strict=True):
            new_offsets[axis] += multiplier * offset
        axes = [(self.axes[k][0], self.axes[k][1] * strides[k]) for k in kept]
        return View(self.source, self.shape, self.element, tuple(new_offsets), tuple(axes))

    def access(self, indices: Sequence[Index]) -> Access:
        """The element at `indices` (one a view axis)."""
        full = [Index(offset) for offset in self.offsets]
        for (axis, multiplier), index in zip(self.axes, indices, strict=True):
            full[axis] = index.scaled(multiplier, self.offsets[axis])
        return Access(self.source, self.shape, self.element, tuple(full))


@dataclass(frozen=True)
class _Empty:
    pass


@dataclass(frozen=True)
class _Filled:
    number: ir.Attribute
    below: View | None  # what was filled; None = a tensor.empty


_Tensor = View | _Empty | _Filled


def read_kernel(op: ir.OpView) -> Kernel:
    """Reads `func.func @kernel` with kind "loops" or "multi_tensor"."""
    return _Reader(op).read()


class _Reader:
    def __init__(self, op: ir.OpView):
        self.op = op.operation
        self.block = op.operation.regions[0].blocks[0]
        self.tensors: dict[ir.Value, _Tensor] = {}
        self.numbers: dict[ir.Value, ir.Attribute] = {}  # scalar constants of the function's body
        self.generics: list[Generic] = []
        self.sizes: dict[int, int] = {}
        self.views: dict[ir.Value, View] = {}
        self.wanted: dict[ir.Value, list[View]] = {}  # value -> caller's buffers it must end up in

    def read(self) -> Kernel:
        attributes = self.op.attributes
        arguments = list(self.block.arguments)
        returned = list(list(self.block.operations)[-1].operation.operands)
        for position, argument in enumerate(arguments):
            type_ = ir.RankedTensorType(argument.type)
            self.tensors[argument] = View.whole(Argument(position), type_.shape, ln.register_type(type_.element_type))
        sizes = int_array(attributes["nova.dims"])
        self.sizes = dict(enumerate(sizes))
        first_output = len(arguments) - len(returned)
        for number, value in enumerate(returned):
            destination = self.tensors[arguments[first_output + number]]
            assert isinstance(destination, View)
            if value not in self.tensors:  # an argument returned as it is needs nothing
                self._want(value, destination)
        for view in self.block.operations:
            self._read_op(view.operation)
        inplace = []
        if "nova.inplace" in attributes:
            for pair in ir.ArrayAttr(attributes["nova.inplace"]):
                operand, result = int_array(pair)
                inplace.append((operand, first_output + result))
        rows = tuple(int_array(attributes["nova.rows"])) if "nova.rows" in attributes else ()
        config = {}
        if "lowering_config" in attributes:
            for item in ir.DictAttr(attributes["lowering_config"]):
                if isinstance(item.attr, (ir.IntegerAttr, ir.BoolAttr)):
                    config[item.name] = int(item.attr.value)
        return Kernel(
            ir.StringAttr(attributes["sym_name"]).value, [a.type for a in arguments], len(returned), inplace,
            self.sizes, rows, self.generics, "nova.raises" in attributes, config, self.views,
        )  # fmt: skip

    def _want(self, value: ir.Value, destination: View) -> None:
        """Records, back through the insertions that made `value`, that it must end up in `destination`."""
        self.wanted.setdefault(value, []).append(destination)
        owner = value.owner
        if isinstance(owner, ir.Block):
            return
        if owner.name == "tensor.insert_slice":
            source, into = list(owner.operands)[:2]
            offsets, strides, kept = _slice(owner, ir.RankedTensorType(source.type))
            self._want(source, destination.window(offsets, strides, kept))
            self._want(into, destination)

    def _read_op(self, op: ir.Operation) -> None:
        name = op.name
        if name == "func.return":
            return
        if name == "arith.constant":
            self.numbers[op.results[0]] = op.attributes["value"]
        elif name == "tensor.empty":
            wanted = self.wanted.get(op.results[0])
            self.tensors[op.results[0]] = wanted[0] if wanted else _Empty()
        elif name == "linalg.fill":
            self._read_fill(op)
        elif name == "tensor.extract_slice":
            base = self.tensors[op.operands[0]]
            if isinstance(base, _Filled):
                base = self._materialise(base)
            if isinstance(base, View):
                base = base.window(*_slice(op, ir.RankedTensorType(op.results[0].type)))
            self.tensors[op.results[0]] = base
        elif name == "tensor.insert_slice":
            self._read_insert(op)
        elif name == "linalg.generic":
            self._read_generic(op)
        else:
            raise CompileError(f"{name} in a kernel of kind loops has no CPU code")

    def _read_fill(self, op: ir.Operation) -> None:
        number = self.numbers[op.operands[0]]
        below = self.tensors[op.operands[1]]
        result = op.results[0]
        filled = _Filled(number, below if isinstance(below, View) else None)
        if isinstance(below, _Filled):
            filled = _Filled(number, below.below)
        wanted = self.wanted.get(result)
        if wanted:
            self.tensors[result] = self._materialise(_Filled(number, wanted[0]))
        else:
            self.tensors[result] = filled

    def _materialise(self, filled: _Filled) -> View:
        """A fill whose contents are looked at as memory: a generic without a region that stores a number."""
        view = filled.below
        if view is None:
            raise CompileError("a filled tensor.empty is read as a tensor; only reductions may start from one")
        dims = []
        for axis, _ in view.axes:
            dim = len(self.sizes)
            self.sizes[dim] = view.shape[axis]
            dims.append(dim)
        indices = tuple(Index(0, ((dim, 1),)) for dim in dims)
        shape = tuple(self.sizes[dim] for dim in dims)
        output = Output(indices, shape, view.element, Init(), False, None, None, [view.access(indices)])
        self.generics.append(Generic(len(self.generics), tuple(dims), frozenset(), None, [], [output], filled.number))
        return view

    def _read_insert(self, op: ir.Operation) -> None:
        source, into = list(op.operands)[:2]
        base = self.tensors[into]
        if isinstance(base, _Filled):
            base = self._materialise(base)
        if not isinstance(base, View):
            raise CompileError("tensor.insert_slice into a tensor that is no buffer of the kernel")
        target = base.window(*_slice(op, ir.RankedTensorType(source.type)))
        value = self.tensors[source]
        # usual case: the generic wrote the slice itself
        if isinstance(value, View) and isinstance(value.source, Result):
            output = self.generics[value.source.generic].outputs[value.source.number]
            access = target.access(output.access_indices)
            if access not in output.stores:
                output.stores.append(access)
        elif value != target:
            raise CompileError("tensor.insert_slice of a tensor that no generic of the kernel made")
        self.tensors[op.results[0]] = base

    def _read_generic(self, op: ir.Operation) -> None:
        attributes = op.attributes
        dims = tuple(int_array(attributes["dims"]))
        maps = [ir.AffineMapAttr(m).value for m in ir.ArrayAttr(attributes["indexing_maps"])]
        kinds = [str(kind) for kind in ir.ArrayAttr(attributes["iterator_types"])]
        reduced = frozenset(d for d, kind in zip(dims, kinds, strict=True) if "reduction" in kind)
        operands = list(op.operands)
        outputs_count = len(op.results)
        inputs_count = len(operands) - outputs_count
        block = op.regions[0].blocks[0]
        number = len(self.generics)
        generic = Generic(number, dims, reduced, block, [], [])
        for operand, map_, argument in zip(operands[:inputs_count], maps, block.arguments, strict=False):
            view = self.tensors[operand]
            if not any(True for _ in argument.uses):  # it only gives a loop its extent
                generic.operands.append(None)
            elif isinstance(view, View):
                generic.operands.append(view.access(_indices(map_, dims)))
            else:
                raise CompileError("a generic reads a tensor that nothing wrote")
        yielded = list(list(block.operations)[-1].operation.operands)
        for k in range(outputs_count):
            indices = _indices(maps[inputs_count + k], dims)
            argument = block.arguments[inputs_count + k]
            value = self.tensors[operands[inputs_count + k]]
            init = Init()
            if isinstance(value, _Filled):
                init = Init(number=value.number)
            elif isinstance(value, View):
                init = Init(access=value.access(indices))
            type_ = ir.RankedTensorType(op.results[k].type)
            combiner, contribution = _combiner(yielded[k], argument) if reduced else (None, None)
            output = Output(
                indices, tuple(type_.shape), ln.register_type(type_.element_type), init,
                any(True for _ in argument.uses), combiner, contribution,
            )  # fmt: skip
            below = value.below if isinstance(value, _Filled) else value
            if isinstance(below, View) and self._is_output(below):
                output.stores.append(below.access(indices))
            for view in self.wanted.get(op.results[k], []):
                access = view.access(indices)
                if access not in output.stores:
                    output.stores.append(access)
            generic.outputs.append(output)
            result = View.whole(Result(number, k), output.shape, output.element)
            self.tensors[op.results[k]] = result
        generic.captured = self._find_captures(block)
        self.generics.append(generic)
        for access in (*generic.inputs, *(o.init.access for o in generic.outputs if o.init.access)):
            if isinstance(access.source, Result):
                self.generics[access.source.generic].consumers.add(number)

    def _is_output(self, view: View) -> bool:
        returned = len(list(self.block.operations)[-1].operation.operands)
        first = len(self.block.arguments) - returned
        return isinstance(view.source, Argument) and view.source.position >= first

    def _find_captures(self, block: ir.Block) -> list[Argument]:
        found = []
        for view in block.operations:
            op = view.operation
            if op.name == "tensor.extract":
                tensor = self.tensors[op.operands[0]]
                if not isinstance(tensor, View) or not isinstance(tensor.source, Argument):
                    raise CompileError("tensor.extract reads arguments of the kernel only, not what it makes itself")
                self.views[op.operands[0]] = tensor
                found.append(tensor.source)
        return found


def _slice(op: ir.Operation, small: ir.RankedTensorType) -> tuple[list[int], list[int], list[int]]:
    """(offsets, strides, axes kept) of a static extract_slice or insert_slice; `small` is the slice's type."""
    offsets, sizes, strides = (
        list(ir.DenseI64ArrayAttr(op.attributes[f"static_{part}"])) for part in ("offsets", "sizes", "strides")
    )
    shape = list(small.shape)
    kept: list[int] = []
    for axis, size in enumerate(sizes):
        # unit axes may be dropped: match from the left, dropping a 1 only where the type has no place for it
        remaining = len(sizes) - axis
        if len(kept) < len(shape) and size == shape[len(kept)] and (size != 1 or remaining >= 1):
            if size == 1 and _droppable(sizes[axis:], shape[len(kept) :]):
                continue
            kept.append(axis)
        elif size != 1:
            raise CompileError(f"slice of sizes {sizes} does not give the shape {shape}")
    if len(kept) != len(shape):
        raise CompileError(f"slice of sizes {sizes} does not give the shape {shape}")
    return offsets, strides, kept


def _droppable(sizes: list[int], shape: list[int]) -> bool:
    """Whether the unit axis in front of `sizes` must be dropped for the rest to give `shape`."""
    return sizes[1:].count(1) >= shape.count(1) and [s for s in sizes[1:] if s != 1] == [s for s in shape if s != 1]


def _indices(map_: ir.AffineMap, dims: Sequence[int]) -> tuple[Index, ...]:
    return tuple(_affine(expression, dims) for expression in map_.results)


def _affine(expression: ir.AffineExpr, dims: Sequence[int]) -> Index:
    if isinstance(expression, ir.AffineDimExpr):
        return Index(0, ((dims[expression.position], 1),))
    if isinstance(expression, ir.AffineConstantExpr):
        return Index(expression.value)
    if isinstance(expression, ir.AffineAddExpr):
        left, right = _affine(expression.lhs, dims), _affine(expression.rhs, dims)
        terms = dict(left.terms)
        for dim, coefficient in right.terms:
            terms[dim] = terms.get(dim, 0) + coefficient
        return Index.of(left.constant + right.constant, terms)
    if isinstance(expression, ir.AffineMulExpr):
        left, right = _affine(expression.lhs, dims), _affine(expression.rhs, dims)
        if not right.terms:
            return left.scaled(right.constant, 0)
        if not left.terms:
            return right.scaled(left.constant, 0)
    raise CompileError(f"indexing expression {expression} is not affine")


def _combiner(yielded: ir.Value, accumulator: ir.Value) -> tuple[str | None, ir.Value | None]:
    """(combining op, contribution) of a region that yields `combine(accumulator, contribution)`."""
    owner = yielded.owner
    if isinstance(owner, ir.Block) or owner.name not in COMBINERS or len(list(accumulator.uses)) != 1:
        return None, None
    left, right = owner.operands
    if left == accumulator:
        return owner.name, right
    if right == accumulator:
        return owner.name, left
    return None, None
