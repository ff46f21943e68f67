"""A level-2 kernel as plain Python: loops, tensors, and structured ops with expression trees for bodies.

    Kernel(loops=[8192, 768], rows=[0])
      Structured(loops=(0, 1), reduced={1}, outs=[Out(sum, (0,), load(x, ..), "arith.addf", 0.0)])     sum[i] += x[i, j]
      Structured(loops=(0, 1), reduced={},  outs=[Out(y, .., subf(load(x, ..), divf(load(sum, ..), 768)))])

The passes of this level rewrite these records; `text` prints them as `linalg.generic` ops and `readback` reads them.
All ops of a kernel share its numbered loops, so composing the indexing maps of a producer and its consumer is
substitution: inlining replaces `load(local)` by the local's own expression.

A memory tensor is indexed by one linear expression into its flat buffer until `layout.assign_shapes` gives it a shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Linear(NamedTuple):
    """`const + sum of coefficient * loop`; terms sorted by loop, no zero coefficients."""

    const: int
    terms: tuple[tuple[int, int], ...]  # (loop, coefficient)

    @staticmethod
    def of(terms: dict[int, int], const: int = 0) -> Linear:
        return Linear(const, tuple(sorted((loop, c) for loop, c in terms.items() if c)))

    def single(self) -> int | None:
        """The loop, if the expression is just one loop."""
        if self.const == 0 and len(self.terms) == 1 and self.terms[0][1] == 1:
            return self.terms[0][0]
        return None


Index = tuple[Linear, ...]


class Tensor:
    """A tensor of a kernel: an argument, a destination ("out"), or a local that never reaches memory as a whole."""

    __slots__ = ("dtype", "kind", "list_", "name", "numel", "shape")

    def __init__(self, kind: str, shape: tuple[int, ...], dtype: str, name: str = "", list_: str = ""):
        self.kind, self.shape, self.dtype, self.name = kind, shape, dtype, name
        self.list_ = list_  # "nova.list" or "nova.element" in multi-tensor kernels
        self.numel = 1
        for size in shape:
            self.numel *= size

    def __repr__(self) -> str:
        return f"{self.kind}:{self.name}<{'x'.join(map(str, self.shape))}x{self.dtype}>"


class Expr:
    """A node of a body: an operation on scalars, made by `expr` (equal nodes are one object).

    op is an MLIR op name, or: "load" (attr = (tensor, index)), "const" (attr = number), "linear" (attr = Linear, type
    index), "acc" (the accumulator; attr = number of the out).
    """

    __slots__ = ("args", "attr", "op", "type")

    def __init__(self, op: str, args: tuple[Expr, ...], type_: str, attr: Any):
        self.op, self.args, self.type, self.attr = op, args, type_, attr

    def __repr__(self) -> str:
        attr = "" if self.attr is None else f" {self.attr}"
        return f"{self.op}({', '.join(map(repr, self.args))}{attr}):{self.type}"


_interned: dict[tuple[Any, ...], Expr] = {}


def expr(op: str, args: Iterable[Expr] = (), type_: str = "", attr: Any = None) -> Expr:
    """The node for an operation on `args`."""
    args = tuple(args)
    key_attr = (repr(attr), type(attr)) if isinstance(attr, float) else attr  # 0.0 and -0.0 differ, nan equals itself
    key = (op, tuple(map(id, args)), type_, key_attr)
    found = _interned.get(key)
    if found is None:
        found = _interned[key] = Expr(op, args, type_, attr)
    return found


def forget_expressions() -> None:
    """Drops the table of interned nodes: between kernels, so that a long-lived worker does not grow."""
    _interned.clear()


def load(tensor: Tensor, index: Index) -> Expr:
    return expr("load", (), tensor.dtype, (tensor, index))


def walk(roots: Iterable[Expr]) -> list[Expr]:
    """All nodes under `roots`, operands before users, each once."""
    seen: dict[Expr, None] = {}
    stack: list[tuple[Expr, bool]] = [(root, False) for root in reversed(list(roots))]
    while stack:
        node, done = stack.pop()
        if done:
            seen[node] = None
        elif node not in seen:
            stack.append((node, True))
            stack += [(arg, False) for arg in reversed(node.args) if arg not in seen]
    return list(seen)


def rewrite(root: Expr, change: Callable[[Expr], Expr | None], memo: dict[Expr, Expr] | None = None) -> Expr:
    """`root` with every node for which `change` returns one replaced (bottom up)."""
    memo = {} if memo is None else memo
    for node in walk([root]):
        if node in memo:
            continue
        args = tuple(memo[arg] for arg in node.args)
        same = all(a is b for a, b in zip(args, node.args, strict=True))
        rebuilt = node if same else expr(node.op, args, node.type, node.attr)
        changed = change(rebuilt)
        memo[node] = rebuilt if changed is None else changed
    return memo[root]


@dataclass
class Out:
    """A result of a structured op: `tensor[index] = value`, or with `combine` `tensor[index] = combine(.., value)`."""

    tensor: Tensor
    index: Index
    value: Expr
    combine: str | None = None
    init: float | int = 0


@dataclass(eq=False)
class Structured:
    """One linalg.generic: `loops` in order, of which `reduced` are reductions."""

    loops: tuple[int, ...]
    reduced: frozenset[int]
    outs: list[Out]
    checks: list[Expr] = field(default_factory=list)  # nova.check nodes
    contraction: bool = False

    def roots(self) -> list[Expr]:
        return [*(out.value for out in self.outs), *self.checks]

    def nodes(self) -> list[Expr]:
        return walk(self.roots())

    def loads(self) -> list[tuple[Tensor, Index]]:
        return [node.attr for node in self.nodes() if node.op == "load"]

    def reads(self) -> set[Tensor]:
        """Tensors read, by element or as a whole."""
        found = {tensor for tensor, _ in self.loads()}
        found.update(node.attr for node in self.nodes() if node.op == "tensor.extract")
        return found

    def writes(self) -> set[Tensor]:
        return {out.tensor for out in self.outs}

    def map(self, change: Callable[[Expr], Expr | None]) -> None:
        """Rewrites all expressions."""
        memo: dict[Expr, Expr] = {}
        for out in self.outs:
            out.value = rewrite(out.value, change, memo)
        self.checks = [rewrite(check, change, memo) for check in self.checks]


@dataclass
class Kernel:
    """A kernel function. `loops` are sizes by number; `ops` in order of execution."""

    name: str
    kind: str
    loops: list[int]
    rows: list[int]
    args: list[Tensor]
    outs: list[Tensor]
    ops: list[Structured]
    inplace: list[tuple[int, int]] = field(default_factory=list)
    tiles: dict[int, tuple[int, int]] = field(default_factory=dict)  # loop -> (n, size): it is n floordiv size
    attrs: dict[str, str] = field(default_factory=dict)  # further function attributes, as text

    def readers(self) -> dict[Tensor, list[Structured]]:
        """Ops that read each tensor."""
        found: dict[Tensor, list[Structured]] = {}
        for op in self.ops:
            for tensor in op.reads():
                found.setdefault(tensor, []).append(op)
        return found

    def writer(self, tensor: Tensor) -> Structured | None:
        """The op that writes a tensor; the last one if it is written in pieces."""
        for op in reversed(self.ops):
            if tensor in op.writes():
                return op
        return None


# --- small expression builders ----------------------------------------------------------------------------------------


def const(number: float | int, type_: str) -> Expr:
    if type_ in ("f32", "f64", "bf16", "f16"):
        return expr("const", (), type_, float(number))
    return expr("const", (), type_, int(number))


def linear(terms: dict[int, int], offset: int = 0) -> Expr:
    """An index value: a linear expression of loops."""
    return expr("linear", (), "index", Linear.of(terms, offset))


def unary(op: str, a: Expr, type_: str | None = None) -> Expr:
    return expr(op, (a,), type_ or a.type)


def binary(op: str, a: Expr, b: Expr) -> Expr:
    return expr(op, (a, b), a.type)


def compare(predicate: str, a: Expr, b: Expr) -> Expr:
    """arith.cmpf or arith.cmpi by type; the predicate is spelled as in MLIR."""
    return expr("arith.cmpf" if a.type in ("f32", "f64", "bf16", "f16") else "arith.cmpi", (a, b), "i1", predicate)


def select(condition: Expr, a: Expr, b: Expr) -> Expr:
    if condition.op == "const":
        return a if condition.attr else b
    return expr("arith.select", (condition, a, b), a.type)


WIDTHS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64}
FLOAT_TYPES = ("f32", "f64", "bf16", "f16")


def convert_float(a: Expr, type_: str) -> Expr:
    """Between float types: exact when widening, rounded when narrowing. bf16 and f16 convert through f32."""
    if a.type == type_:
        return a
    if a.op == "const" and type_ in ("f32", "f64") and a.type in ("f32", "f64"):
        return const(a.attr, type_)
    if WIDTHS[type_] == 16 and WIDTHS[a.type] != 32:  # as PyTorch: float is the only type that rounds to them
        return convert_float(convert_float(a, "f32"), type_)
    return unary("arith.extf" if WIDTHS[type_] > WIDTHS[a.type] else "arith.truncf", a, type_)
