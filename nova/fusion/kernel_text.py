"""Prints a `Kernel` as a level-2 function: linalg.generic ops in destination-passing style.

The form is described by tests/ir/fusion/examples: every generic carries `dims`, the kernel's loop behind each of its
own; fixed or shifted indices become tensor.extract_slice in front of it; results are written through the trailing
arguments.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field

from nova.fusion.kernel import Expr, Index, Kernel, Linear, Out, Structured, Tensor, walk


def float_literal(number: float, type_: str) -> str:
    """A literal of a float type that parses back to exactly `number` rounded to it."""
    if type_ == "f64":
        return f"0x{struct.unpack('>Q', struct.pack('>d', number))[0]:016X}"
    if type_ == "f32":
        try:
            packed = struct.pack(">f", number)
        except OverflowError:
            packed = struct.pack(">f", float("inf") if number > 0 else float("-inf"))
        return f"0x{struct.unpack('>I', packed)[0]:08X}"
    if not math.isfinite(number):
        bits = {"bf16": (0x7FC0, 0x7F80, 0xFF80), "f16": (0x7E00, 0x7C00, 0xFC00)}[type_]
        return f"0x{bits[0] if math.isnan(number) else bits[1] if number > 0 else bits[2]:04X}"
    return f"{number:.9e}"


def constant_text(number: float | int, type_: str) -> str:
    """`<literal> : <type>` for arith.constant; readable where the short decimal is exact."""
    if type_ in ("f32", "f64"):
        short = f"{number:.6e}"
        exact = math.isfinite(number) and _rounded(float(short), type_) == _rounded(number, type_)
        negative_zero = number == 0 and struct.pack("d", number) != struct.pack("d", 0.0)
        return f"{short if exact and not negative_zero else float_literal(number, type_)} : {type_}"
    if type_ in ("bf16", "f16"):
        return f"{float_literal(number, type_)} : {type_}"
    if type_ == "i1":
        return "true" if number else "false"
    return f"{int(number)} : {type_}"


def _rounded(number: float, type_: str) -> float:
    if type_ == "f64":
        return number
    try:
        return struct.unpack("f", struct.pack("f", number))[0]
    except OverflowError:
        return float("inf") if number > 0 else float("-inf")


def tensor_text(shape: tuple[int, ...], dtype: str) -> str:
    return "tensor<" + "".join(f"{'?' if n < 0 else n}x" for n in shape) + dtype + ">"


def map_text(op_loops: tuple[int, ...], index: Index, tiles: dict[int, tuple[int, int]] | None = None) -> str:
    """The affine map of an access; constants are gone (they became slices)."""
    names = {loop: f"d{position}" for position, loop in enumerate(op_loops)}
    dims = ", ".join(names.values())
    for loop, (tiled, size) in (tiles or {}).items():
        if tiled in names:
            names[loop] = f"{names[tiled]} floordiv {size}"

    def item(linear: Linear) -> str:
        parts = [names[loop] if c == 1 else f"{names[loop]} * {c}" for loop, c in linear.terms]
        return " + ".join(parts) or "0"

    return f"affine_map<({dims}) -> ({', '.join(map(item, index))})>"


@dataclass
class _Printer:
    kernel: Kernel
    lines: list[str] = field(default_factory=list)
    current: dict[Tensor, str] = field(default_factory=dict)  # SSA name of a tensor's value now
    count: int = 0
    scalars: dict[tuple[str, str], str] = field(default_factory=dict)

    def name(self) -> str:
        self.count += 1
        return f"%{self.count - 1}"

    def line(self, text: str) -> None:
        self.lines.append(f"  {text}")

    def scalar(self, number: float | int, type_: str) -> str:
        """A scalar constant outside the regions."""
        text = constant_text(number, type_)
        if (text, type_) not in self.scalars:
            name = self.scalars[text, type_] = self.name()
            self.line(f"{name} = arith.constant {text}")
        return self.scalars[text, type_]

    def extent(self) -> str:
        """The number of elements of the tensor that a multi-tensor kernel works on."""
        source = next(tensor for tensor in self.kernel.args if -1 in tensor.shape)
        zero, name = self.name(), self.name()
        self.line(f"{zero} = arith.constant 0 : index")
        self.line(f"{name} = tensor.dim {self.current[source]}, {zero} : {tensor_text(source.shape, source.dtype)}")
        return name

    def sliced(self, tensor: Tensor, index: Index) -> tuple[Index, tuple[int, ...], tuple[str, str] | None]:
        """The map, the shape it applies to, and (offsets, sizes) text of the slice in front, if one is needed."""
        sizes = self.kernel.loops
        if -1 in tensor.shape:
            return index, tensor.shape, None
        offsets, extents, kept, shape = [], [], [], []
        for item in index:
            assert all(c > 0 for _, c in item.terms), "negative steps are read through tensor.extract"
            extent = max(0, sum(c * (sizes[loop] - 1) for loop, c in item.terms) + 1) if item.terms else 1
            if any(sizes[loop] == 0 for loop, _ in item.terms):
                extent = 0
            offsets.append(item.const)
            extents.append(extent)
            if item.terms:
                kept.append(Linear(0, item.terms))
                shape.append(extent)
        if len(kept) == len(index) and not any(offsets) and tuple(extents) == tensor.shape:
            return index, tensor.shape, None
        return tuple(kept), tuple(shape), (", ".join(map(str, offsets)), ", ".join(map(str, extents)))

    def slice(self, tensor: Tensor, shape: tuple[int, ...], part: tuple[str, str]) -> str:
        name = self.name()
        ones = ", ".join("1" for _ in tensor.shape)
        self.line(
            f"{name} = tensor.extract_slice {self.current[tensor]}[{part[0]}] [{part[1]}] [{ones}] : "
            f"{tensor_text(tensor.shape, tensor.dtype)} to {tensor_text(shape, tensor.dtype)}"
        )
        return name

    def operand(self, op: Structured, tensor: Tensor, index: Index) -> tuple[str, str, str]:
        """(SSA name, type, map) of an access."""
        index, shape, part = self.sliced(tensor, index)
        name = self.current[tensor] if part is None else self.slice(tensor, shape, part)
        return name, tensor_text(shape, tensor.dtype), map_text(op.loops, index, self.kernel.tiles)

    def structured(self, op: Structured) -> None:
        loads = list(dict.fromkeys(op.loads()))
        operands = [self.operand(op, tensor, index) for tensor, index in loads]
        inputs = [f"%a{n}: {tensor.dtype}" for n, (tensor, _) in enumerate(loads)]
        covered = {
            item.terms[0][0] for _, index in loads for item in index if len(item.terms) == 1 and item.terms[0][1] == 1
        }
        covered |= {
            item.terms[0][0] for out in op.outs for item in out.index if len(item.terms) == 1 and item.terms[0][1] == 1
        }
        missing = [loop for loop in op.loops if loop not in covered]
        if missing:  # linalg wants every loop to be an extent of some operand
            shape = tuple(self.kernel.loops[loop] for loop in missing)
            name = self.name()
            self.line(f"{name} = tensor.empty() : {tensor_text(shape, 'i1')}")
            index = tuple(Linear.of({loop: 1}) for loop in missing)
            operands.append((name, tensor_text(shape, "i1"), map_text(op.loops, index, self.kernel.tiles)))
            inputs.append("%window: i1")
        outs, whole = [], []
        for number, out in enumerate(op.outs):
            index, shape, part = self.sliced(out.tensor, out.index)
            if out.tensor not in self.current:
                extent = self.extent() if -1 in out.tensor.shape else ""
                name = self.current[out.tensor] = self.name()
                self.line(f"{name} = tensor.empty({extent}) : {tensor_text(out.tensor.shape, out.tensor.dtype)}")
            name = self.current[out.tensor] if part is None else self.slice(out.tensor, shape, part)
            type_ = tensor_text(shape, out.tensor.dtype)
            if out.combine is not None:
                scalar = self.scalar(out.init, out.tensor.dtype)
                filled = self.name()
                self.line(
                    f"{filled} = linalg.fill ins({scalar} : {out.tensor.dtype}) outs({name} : {type_}) -> {type_}"
                )
                name = filled
            outs.append((name, type_, map_text(op.loops, index, self.kernel.tiles)))
            whole.append((out, shape, part))
            inputs.append(f"%o{number}: {out.tensor.dtype}")
        body = _Body(op, {access: f"%a{n}" for n, access in enumerate(loads)}, self.current)
        yields = body.emit()
        result = self.name()
        many = len(outs) > 1
        maps = ", ".join(m for _, _, m in (*operands, *outs))
        kinds = ", ".join('"reduction"' if loop in op.reduced else '"parallel"' for loop in op.loops)
        ins = (
            f" ins({', '.join(n for n, _, _ in operands)} : {', '.join(t for _, t, _ in operands)})" if operands else ""
        )
        dims = f"dims = array<i64{': ' if op.loops else ''}{', '.join(map(str, op.loops))}>"
        tag = ", nova.contraction" if op.contraction else ""
        types = ", ".join(t for _, t, _ in outs)
        self.line(
            f"{result}{f':{len(outs)}' if many else ''} = linalg.generic "
            f"{{indexing_maps = [{maps}], iterator_types = [{kinds}]}}"
            f"{ins} outs({', '.join(n for n, _, _ in outs)} : {types}) attrs = {{{dims}{tag}}} {{"
        )
        self.line(f"^bb0({', '.join(inputs)}):")
        for text in body.lines:
            self.line("  " + text)
        element_types = ", ".join(out.tensor.dtype for out in op.outs)
        self.line(f"  linalg.yield {', '.join(yields)} : {element_types}")
        self.line(f"}} -> {f'({types})' if many else types}")
        for number, (out, shape, part) in enumerate(whole):
            name = f"{result}#{number}" if many else result
            if part is None:
                self.current[out.tensor] = name
                continue
            ones = ", ".join("1" for _ in out.tensor.shape)
            inserted = self.name()
            self.line(
                f"{inserted} = tensor.insert_slice {name} into {self.current[out.tensor]}"
                f"[{part[0]}] [{part[1]}] [{ones}] : "
                f"{tensor_text(shape, out.tensor.dtype)} into {tensor_text(out.tensor.shape, out.tensor.dtype)}"
            )
            self.current[out.tensor] = inserted


class _Body:
    """The region of one generic."""

    def __init__(self, op: Structured, operands: dict[tuple[Tensor, Index], str], tensors: dict[Tensor, str]):
        self.op, self.operands, self.tensors = op, operands, tensors
        self.lines: list[str] = []
        self.names: dict[Expr, str] = {}
        self.indices: dict[int, str] = {}

    def fresh(self) -> str:
        return f"%b{len(self.lines)}"

    def emit(self) -> list[str]:
        nodes = walk(self.op.roots())
        for node in nodes:
            self.names[node] = self.node(node)
        return [self.finish(number, out) for number, out in enumerate(self.op.outs)]

    def finish(self, number: int, out: Out) -> str:
        value = self.names[out.value]
        if out.combine is None:
            return value
        name = self.fresh()
        self.lines.append(f"{name} = {out.combine} %o{number}, {value} : {out.tensor.dtype}")
        return name

    def index(self, loop: int) -> str:
        if loop not in self.indices:
            name = self.indices[loop] = self.fresh()
            self.lines.append(f"{name} = linalg.index {self.op.loops.index(loop)} : index")
        return self.indices[loop]

    def linear(self, item: Linear) -> str:
        """An index value computed from loops."""
        total = None
        for loop, coefficient in item.terms:
            part = self.index(loop)
            if coefficient != 1:
                part = self.arith("arith.muli", part, self.index_constant(coefficient))
            total = part if total is None else self.arith("arith.addi", total, part)
        if total is None:
            return self.index_constant(item.const)
        return self.arith("arith.addi", total, self.index_constant(item.const)) if item.const else total

    def index_constant(self, number: int) -> str:
        name = self.fresh()
        self.lines.append(f"{name} = arith.constant {number} : index")
        return name

    def arith(self, op: str, a: str, b: str) -> str:
        name = self.fresh()
        self.lines.append(f"{name} = {op} {a}, {b} : index")
        return name

    def node(self, node: Expr) -> str:
        if node.op == "load":
            return self.operands[node.attr]
        if node.op == "linear":
            return self.linear(node.attr)
        args = [self.names[arg] for arg in node.args]
        name = self.fresh()
        self.lines.append(f"{name} = {self.text(node, args)}")
        if node.op == "nova.check":
            self.lines[-1] = self.text(node, args)
            return ""
        return name

    def text(self, node: Expr, args: list[str]) -> str:
        op, type_ = node.op, node.type
        if op == "const":
            return f"arith.constant {constant_text(node.attr, type_)}"
        if op in ("arith.cmpf", "arith.cmpi"):
            return f"{op} {node.attr}, {args[0]}, {args[1]} : {node.args[0].type}"
        if op == "arith.select":
            return f"arith.select {', '.join(args)} : {type_}"
        if op == "tensor.extract":
            tensor: Tensor = node.attr
            return (
                f"tensor.extract {self.tensors[tensor]}[{', '.join(args)}] : {tensor_text(tensor.shape, tensor.dtype)}"
            )
        if op == "nova.check":
            return f'"nova.check"({args[0]}, {args[1]}) : (i1, i64) -> ()'
        if op == "nova.philox":
            return f'"nova.philox"({args[0]}, {args[1]}) {{stream = {node.attr} : i64}} : (i64, i64) -> i32'
        if node.args[0].type != type_:
            return f"{op} {args[0]} : {node.args[0].type} to {type_}"
        if op == "math.fpowi":
            return f"{op} {args[0]}, {args[1]} : {type_}, {node.args[1].type}"
        return f"{op} {', '.join(args)} : {type_}"


def kernel_text(kernel: Kernel, visibility: str = "private ") -> str:
    """The text of the function."""
    printer = _Printer(kernel)
    for number, tensor in enumerate([*kernel.args, *kernel.outs]):
        tensor.name = f"arg{number}"
        printer.current[tensor] = f"%arg{number}"
    for op in kernel.ops:
        printer.structured(op)
    arguments = []
    for tensor in (*kernel.args, *kernel.outs):
        attrs = [f"{tensor.list_}"] if tensor.list_ else []
        if tensor.kind == "out":
            attrs.insert(0, "nova.out")
        suffix = f" {{{', '.join(attrs)}}}" if attrs else ""
        arguments.append(f"%{tensor.name}: {tensor_text(tensor.shape, tensor.dtype)}{suffix}")
    types = ", ".join(tensor_text(t.shape, t.dtype) for t in kernel.outs)
    pairs = ", ".join(f"array<i64: {a}, {b}>" for a, b in kernel.inplace)
    own = [n for loop, n in enumerate(kernel.loops) if loop not in kernel.tiles]
    loops = ", ".join(str(n) if n >= 0 else str(-(1 << 63)) for n in own)
    attrs = [f'nova.kernel = "{kernel.kind}"', f"nova.dims = array<i64{': ' if loops else ''}{loops}>"]
    if kernel.kind == "loops":
        rows = ", ".join(map(str, kernel.rows))
        attrs.append(f"nova.rows = array<i64{': ' if rows else ''}{rows}>")
    attrs.append(f"nova.inplace = [{pairs}]")
    attrs += [f"{key} = {text}" for key, text in kernel.attrs.items()]
    returned = ", ".join(printer.current[t] for t in kernel.outs)
    body = "\n".join(printer.lines)
    return (
        f"func.func {visibility}@{kernel.name}({', '.join(arguments)}) -> ({types}) "
        f"attributes {{{', '.join(attrs)}}} {{\n{body}\n  return {returned}{' : ' + types if types else ''}\n}}"
    )
