"""Reads a level-2 function back into a `Kernel`: what `kernel_text` prints, and what a test or a person writes in that
form."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nova.errors import CompileError
from nova.fusion.kernel import Expr, Index, Kernel, Linear, Out, Structured, Tensor, const, expr, load
from nova.mlir import ir

_FLOAT_PREDICATES = (
    "false", "oeq", "ogt", "oge", "olt", "ole", "one", "ord", "ueq", "ugt", "uge", "ult", "ule", "une", "uno", "true",
)  # fmt: skip
_INT_PREDICATES = ("eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge")
_COMBINES = frozenset({
    "arith.addf", "arith.mulf", "arith.maximumf", "arith.minimumf", "arith.addi", "arith.muli", "arith.maxsi",
    "arith.minsi", "arith.maxui", "arith.minui", "arith.andi", "arith.ori",
})  # fmt: skip


@dataclass
class _View:
    """A tensor value: a tensor, from `offsets`; `axes` are the dimensions that are left (rank-reduced slices drop
    some)."""

    tensor: Tensor | None
    offsets: tuple[int, ...] = ()
    axes: tuple[int, ...] = ()
    init: float | int | None = None


_maps: dict[str, tuple[tuple[int, dict[int, int]], ...]] = {}


def parse_map(text: str) -> tuple[tuple[int, dict[int, int]], ...]:
    """Results of an affine map as (const, {dim: coefficient})."""
    found = _maps.get(text)
    if found is None:
        inner = re.search(r"->\s*\((.*)\)\s*>?$", text.strip())
        if inner is None:
            raise CompileError(f"not an affine map: {text}")
        found = _maps[text] = tuple(_parse_linear(part) for part in inner[1].split(",") if part.strip())
    return found


def _parse_linear(text: str) -> tuple[int, dict[int, int]]:
    constant, terms = 0, {}
    for sign, part in re.findall(r"([+-]?)\s*([^+-]+)", text):
        factor = -1 if sign == "-" else 1
        part = part.strip()
        tiled = re.fullmatch(r"d(\d+) floordiv (\d+)", part)
        if tiled:  # the tile's number: a dimension of its own, told apart by a negative key
            terms[-1 - int(tiled[1]) - (int(tiled[2]) << 16)] = 1
            continue
        match = re.fullmatch(r"d(\d+)(?:\s*\*\s*(-?\d+))?", part)
        if match:
            dim = int(match[1])
            terms[dim] = terms.get(dim, 0) + factor * int(match[2] or 1)
        elif re.fullmatch(r"\d+", part):
            constant += factor * int(part)
        else:
            raise CompileError(f"map result {text!r} is not linear")
    return constant, terms


def read(function_op: ir.OpView) -> Kernel:
    """The kernel that a level-2 function describes."""
    return _Reader(function_op).run()


class _Reader:
    def __init__(self, function_op: ir.OpView):
        self.function = function_op
        attrs = dict(function_op.attributes.items())
        self.kernel = Kernel(
            ir.StringAttr(attrs["sym_name"]).value,
            ir.StringAttr(attrs["nova.kernel"]).value,
            [n if n >= 0 else -1 for n in _ints(attrs["nova.dims"])],
            list(_ints(attrs["nova.rows"])) if "nova.rows" in attrs else [],
            [],
            [],
            [],
        )
        self.kernel.inplace = [tuple(_ints(pair)) for pair in ir.ArrayAttr(attrs["nova.inplace"])]  # type: ignore[misc]
        known = {"sym_name", "sym_visibility", "function_type", "arg_attrs", "res_attrs", "nova.kernel", "nova.dims"}
        known |= {"nova.rows", "nova.inplace"}
        self.kernel.attrs = {name: str(attribute) for name, attribute in attrs.items() if name not in known}
        self.views: dict[ir.Value, _View] = {}
        self.scalars: dict[ir.Value, Expr] = {}

    def run(self) -> Kernel:
        block = self.function.regions[0].blocks[0]
        marks = ir.ArrayAttr(self.function.attributes["arg_attrs"]) if "arg_attrs" in self.function.attributes else None
        for position, argument in enumerate(block.arguments):
            type_ = ir.RankedTensorType(argument.type)
            attrs = ir.DictAttr(marks[position]) if marks is not None else {}
            mark = next((name for name in ("nova.list", "nova.element") if name in attrs), "")
            kind = "out" if "nova.out" in attrs else "arg"
            tensor = Tensor(kind, _shape(type_), str(type_.element_type), f"arg{position}", mark)
            (self.kernel.outs if kind == "out" else self.kernel.args).append(tensor)
            self.views[argument] = _whole(tensor)
        for view in block.operations:
            self.op(view.operation)
        return self.kernel

    def op(self, op: ir.Operation) -> None:
        name = op.name
        if name == "arith.constant":
            self.scalars[op.results[0]] = _constant(op)
        elif name == "tensor.empty":
            self.views[op.results[0]] = _View(None)
        elif name == "linalg.fill":
            source = self.views[op.operands[1]]
            self.views[op.results[0]] = _View(
                source.tensor, source.offsets, source.axes, self.scalars[op.operands[0]].attr
            )
        elif name == "tensor.extract_slice":
            self.views[op.results[0]] = self.slice(op)
        elif name == "tensor.insert_slice":
            self.views[op.results[0]] = self.views[op.operands[1]]
        elif name == "linalg.generic":
            self.generic(op)
        elif name not in ("func.return", "tensor.dim"):
            raise CompileError(f"kernel @{self.kernel.name}: {name} is not part of a level-2 kernel")

    def slice(self, op: ir.Operation) -> _View:
        source = self.views[op.operands[0]]
        offsets = _ints(op.attributes["static_offsets"])
        sizes = _ints(op.attributes["static_sizes"])
        rank = ir.RankedTensorType(op.results[0].type).rank
        kept = list(range(len(sizes)))
        for axis in range(len(sizes)):  # drop unit dimensions from the front until the rank fits, as MLIR does
            if len(kept) == rank:
                break
            if sizes[axis] == 1:
                kept.remove(axis)
        total = list(source.offsets)
        for axis, offset in zip(source.axes, offsets, strict=True):
            total[axis] += offset
        return _View(source.tensor, tuple(total), tuple(source.axes[axis] for axis in kept))

    def generic(self, op: ir.Operation) -> None:
        loops = tuple(_ints(op.attributes["dims"]))
        maps = [parse_map(str(m)) for m in ir.ArrayAttr(op.attributes["indexing_maps"])]
        kinds = [str(kind) for kind in ir.ArrayAttr(op.attributes["iterator_types"])]
        reduced = frozenset(loop for loop, kind in zip(loops, kinds, strict=True) if "reduction" in kind)
        count = _ints(op.attributes["operandSegmentSizes"])[0]
        block = op.regions[0].blocks[0]
        env: dict[ir.Value, Expr] = {}
        operands = list(op.operands)
        for operand, map_, argument in zip(operands[:count], maps, block.arguments, strict=False):
            view = self.views[operand]
            if view.tensor is None:
                continue  # only there for the extents of loops
            env[argument] = load(view.tensor, self.index(view, map_, loops))
        outs: list[Out] = []
        accumulators = list(block.arguments)[count:]
        for operand, map_, argument in zip(operands[count:], maps[count:], accumulators, strict=True):
            view = self.views[operand]
            tensor = view.tensor
            if tensor is None:
                tensor = Tensor("local", _shape(ir.RankedTensorType(operand.type)), str(argument.type))
                index: Index = tuple(self.linear(c, t, loops) for c, t in map_)
            else:
                index = self.index(view, map_, loops)
            outs.append(Out(tensor, index, const(0, "i1"), None, view.init or 0))
        structured = Structured(loops, reduced, outs)
        structured.contraction = "nova.contraction" in op.attributes
        self.region(block, env, accumulators, structured)
        self.kernel.ops.append(structured)
        for result, out, operand in zip(op.results, outs, operands[count:], strict=True):
            view = self.views[operand]
            self.views[result] = (
                _whole(out.tensor) if view.tensor is None else _View(out.tensor, view.offsets, view.axes)
            )

    def index(self, view: _View, map_: tuple[tuple[int, dict[int, int]], ...], loops: tuple[int, ...]) -> Index:
        items = [Linear(offset, ()) for offset in view.offsets]
        for axis, (constant, terms) in zip(view.axes, map_, strict=True):
            items[axis] = self.linear(constant + view.offsets[axis], terms, loops)
        return tuple(items)

    def linear(self, constant: int, terms: dict[int, int], loops: tuple[int, ...]) -> Linear:
        return Linear.of({self.loop(dim, loops): c for dim, c in terms.items()}, constant)

    def loop(self, dim: int, loops: tuple[int, ...]) -> int:
        """The kernel's loop behind a map's dimension, or the derived loop of a tile's number."""
        if dim >= 0:
            return loops[dim]
        code = -1 - dim
        key = (loops[code & 0xFFFF], code >> 16)
        for loop, pair in self.kernel.tiles.items():
            if pair == key:
                return loop
        self.kernel.tiles[len(self.kernel.loops)] = key
        self.kernel.loops.append(-(-self.kernel.loops[key[0]] // key[1]))
        return len(self.kernel.loops) - 1

    def region(
        self, block: ir.Block, env: dict[ir.Value, Expr], accumulators: list[ir.Value], into: Structured
    ) -> None:
        combined: dict[ir.Value, tuple[str, Expr, int]] = {}
        places = {value: number for number, value in enumerate(accumulators)}
        for view in block.operations:
            op = view.operation
            if op.name == "linalg.yield":
                for number, value in enumerate(op.operands):
                    out = into.outs[number]
                    if value in combined and combined[value][2] == number:
                        out.combine, out.value = combined[value][:2]
                    else:
                        out.value = self.scalar(value, env)
                return
            used = [places[v] for v in op.operands if v in places]
            if used:
                rest = [v for v in op.operands if v not in places]
                if op.name not in _COMBINES or len(rest) != 1:
                    raise CompileError(f"kernel @{self.kernel.name}: an accumulator is used by {op.name}")
                combined[op.results[0]] = (op.name, self.scalar(rest[0], env), used[0])
                continue
            node = self.node(op, env, into)
            if op.name == "nova.check":
                into.checks.append(node)
            else:
                env[op.results[0]] = node

    def scalar(self, value: ir.Value, env: dict[ir.Value, Expr]) -> Expr:
        return env[value] if value in env else self.scalars[value]

    def node(self, op: ir.Operation, env: dict[ir.Value, Expr], into: Structured) -> Expr:
        name = op.name
        if name == "arith.constant":
            return _constant(op)
        if name == "linalg.index":
            loop = into.loops[ir.IntegerAttr(op.attributes["dim"]).value]
            return expr("linear", (), "index", Linear(0, ((loop, 1),)))
        if name == "tensor.extract":
            indices = [self.scalar(v, env) for v in list(op.operands)[1:]]
            view = self.views[op.operands[0]]
            assert view.tensor is not None
            return expr("tensor.extract", indices, str(op.results[0].type), view.tensor)
        args = [self.scalar(v, env) for v in op.operands]
        if name == "nova.check":
            return expr(name, args, "check")
        type_ = str(op.results[0].type)
        if name == "arith.cmpf":
            return expr(name, args, type_, _FLOAT_PREDICATES[ir.IntegerAttr(op.attributes["predicate"]).value])
        if name == "arith.cmpi":
            return expr(name, args, type_, _INT_PREDICATES[ir.IntegerAttr(op.attributes["predicate"]).value])
        if name == "nova.philox":
            return expr(name, args, type_, ir.IntegerAttr(op.attributes["stream"]).value)
        folded = _fold_index(name, args, type_)
        return folded if folded is not None else expr(name, args, type_)


def _fold_index(name: str, args: list[Expr], type_: str) -> Expr | None:
    """Sums and constant multiples of loop indices stay linear expressions."""
    if type_ != "index" or name not in ("arith.addi", "arith.muli"):
        return None
    parts = [Linear(int(a.attr), ()) if a.op == "const" else a.attr if a.op == "linear" else None for a in args]
    left, right = parts
    if left is None or right is None:
        return None
    if name == "arith.addi":
        terms = dict(left.terms)
        for loop, coefficient in right.terms:
            terms[loop] = terms.get(loop, 0) + coefficient
        return expr("linear", (), "index", Linear.of(terms, left.const + right.const))
    if left.terms and right.terms:
        return None
    scale, other = (right.const, left) if left.terms or not right.terms else (left.const, right)
    return expr("linear", (), "index", Linear.of({loop: c * scale for loop, c in other.terms}, other.const * scale))


def _whole(tensor: Tensor) -> _View:
    return _View(tensor, (0,) * len(tensor.shape), tuple(range(len(tensor.shape))))


def _shape(type_: ir.RankedTensorType) -> tuple[int, ...]:
    return tuple(-1 if type_.is_dynamic_dim(axis) else type_.shape[axis] for axis in range(type_.rank))


def _ints(attribute: ir.Attribute) -> list[int]:
    if isinstance(attribute, ir.DenseI32ArrayAttr):
        return list(ir.DenseI32ArrayAttr(attribute))
    return list(ir.DenseI64ArrayAttr(attribute))


def _constant(op: ir.Operation) -> Expr:
    type_, value = str(op.results[0].type), op.attributes["value"]
    if isinstance(value, ir.FloatAttr):
        return const(value.value, type_)
    if isinstance(value, ir.BoolAttr):
        return const(int(value.value), type_)
    return const(ir.IntegerAttr(value).value, type_)
