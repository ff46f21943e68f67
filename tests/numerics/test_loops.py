"""Kernels of kind "loops" against float64 references: every shape of loop, ragged tails, dtypes, determinism.

Kernels are written through `Kernel`, a thin text builder for the level-2 form that fusion makes. Outputs and workspace
start out poisoned; every kernel runs with one and two threads, and both must give the same bits.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field

import pytest
import torch

from nova.capture import philox
from tests.kernels import DTYPES, poisoned
from tests.kernels import load_kernel as load


@dataclass
class Kernel:
    """Text of one kernel function. Values are (name, type) pairs."""

    dims: list[int]
    rows: list[int]
    attrs: str = ""
    args: list[tuple[str, str]] = field(default_factory=list)
    outs: list[tuple[str, str]] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    returned: list[tuple[str, str]] = field(default_factory=list)
    types: dict[str, str] = field(default_factory=dict)
    count: int = 0

    def arg(self, shape, dtype="f32") -> str:
        return self._declare(self.args, "a", shape, dtype)

    def out(self, shape, dtype="f32") -> str:
        return self._declare(self.outs, "o", shape, dtype)

    def _declare(self, where, letter, shape, dtype) -> str:
        name = f"%{letter}{len(where)}"
        self.types[name] = tensor(shape, dtype)
        where.append((name, self.types[name]))
        return name

    def line(self, text: str, *results: tuple[str, str]) -> str:
        self.body.append("    " + text)
        for name, type_ in results:
            self.types[name] = type_
        return results[0][0] if results else ""

    def fresh(self) -> str:
        self.count += 1
        return f"%v{self.count}"

    def empty(self, shape, dtype="f32") -> str:
        name = self.fresh()
        return self.line(f"{name} = tensor.empty() : {tensor(shape, dtype)}", (name, tensor(shape, dtype)))

    def fill(self, into: str, number: str) -> str:
        constant, name, type_ = self.fresh(), self.fresh(), self.types[into]
        element = type_[:-1].split("x")[-1].removeprefix("tensor<")
        self.line(f"{constant} = arith.constant {number} : {element}")
        return self.line(
            f"{name} = linalg.fill ins({constant} : {element}) outs({into} : {type_}) -> {type_}", (name, type_)
        )

    def slice(self, source: str, offsets, sizes, strides, shape, insert: str | None = None) -> str:
        name = self.fresh()
        element = self.types[source][:-1].split("x")[-1]
        where = f"{list(offsets)} {list(sizes)} {list(strides)}"
        if insert is None:
            result = tensor(shape, element)
            return self.line(
                f"{name} = tensor.extract_slice {source}{where} : {self.types[source]} to {result}", (name, result)
            )
        types = f"{self.types[insert]} into {self.types[source]}"
        return self.line(
            f"{name} = tensor.insert_slice {insert} into {source}{where} : {types}", (name, self.types[source])
        )

    def generic(self, dims, reduced, ins, outs, text: str, yields: str) -> list[str]:
        """ins/outs: (value, index text such as "d0, d1"). `text` sees %i0.. and %x0.. (outs); `yields` are names."""
        letters = ", ".join(f"d{i}" for i in range(len(dims)))
        maps = ", ".join(f"affine_map<({letters}) -> ({index})>" for _, index in [*ins, *outs])
        kinds = ", ".join(f'"{"reduction" if d in reduced else "parallel"}"' for d in dims)
        in_names = ", ".join(v for v, _ in ins)
        in_types = ", ".join(self.types[v] for v, _ in ins)
        out_names = ", ".join(v for v, _ in outs)
        out_types = [self.types[v] for v, _ in outs]
        base = self.fresh()
        args = [f"%i{k}: {element(self.types[v])}" for k, (v, _) in enumerate(ins)]
        args += [f"%x{k}: {element(self.types[v])}" for k, (v, _) in enumerate(outs)]
        yield_types = ", ".join(element(t) for t in out_types)
        result_types = out_types[0] if len(outs) == 1 else "(" + ", ".join(out_types) + ")"
        count = f":{len(outs)}" if len(outs) > 1 else ""
        ins_text = f"ins({in_names} : {in_types}) " if ins else ""
        self.line(
            f"{base}{count} = linalg.generic {{indexing_maps = [{maps}], iterator_types = [{kinds}]}} {ins_text}"
            f"outs({out_names} : {', '.join(out_types)}) attrs = {{dims = array<i64{': ' if dims else ''}"
            f"{', '.join(map(str, dims))}>}} {{\n    ^bb0({', '.join(args)}):\n      {text}\n"
            f"      linalg.yield {yields} : {yield_types}\n    }} -> {result_types}"
        )
        names = [base] if len(outs) == 1 else [f"{base}#{k}" for k in range(len(outs))]
        for name, type_ in zip(names, out_types, strict=True):
            self.types[name] = type_
        return names

    def text(self, *returned: str) -> str:
        args = ", ".join([f"{n}: {t}" for n, t in self.args] + [f"{n}: {t} {{nova.out}}" for n, t in self.outs])
        types = ", ".join(t for _, t in self.outs)
        rows, dims = ", ".join(map(str, self.rows)), ", ".join(map(str, self.dims))
        attrs = (
            f'nova.kernel = "loops", nova.dims = array<i64{": " if dims else ""}{dims}>, '
            f"nova.rows = array<i64{': ' if rows else ''}{rows}>"
        )
        attrs += f", {self.attrs}" if self.attrs else ""
        if "lowering_config" not in attrs:  # so that kernels this small fork
            attrs += ", lowering_config = {threads = 2 : i64}"
        body = "\n".join(self.body)
        return (
            f"module {{\n  func.func private @k({args}) -> ({types}) attributes {{{attrs}}} {{\n{body}\n"
            f"    return {', '.join(returned)} : {types}\n  }}\n}}\n"
        )


def tensor(shape, dtype: str) -> str:
    return f"tensor<{'x'.join([*map(str, shape), dtype])}>"


def element(type_: str) -> str:
    return type_[7:-1].rsplit("x", maxsplit=1)[-1]


def run(text: str, inputs: list[torch.Tensor], outputs: list[tuple[list[int], str]]) -> list[torch.Tensor]:
    """Runs with 1 and 2 threads; both must agree bit by bit."""
    kernel = load(text)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            outs = [poisoned(shape, DTYPES[dtype]) for shape, dtype in outputs]
            kernel.workspace.fill_(0xFF)
            kernel.call([x.contiguous() for x in inputs], outs)
            results.append(outs)
    finally:
        torch.set_num_threads(before)
    for one, two in zip(*results, strict=True):
        assert torch.equal(
            one.view(torch.uint8) if one.dim() else one, two.view(torch.uint8) if two.dim() else two
        ) or (one.isnan().any() and torch.equal(one.nan_to_num(), two.nan_to_num()))
    return results[0]


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-6) -> None:
    """Relative norm of the error."""
    assert got.shape == want.shape
    error = (got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)
    assert error <= tolerance, f"relative error {error:.2e}"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# --- elementwise -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 7, 8, 9, 16, 31, 33, 100, 4097, 40001])
def test_elementwise_one_dim(n: int) -> None:
    k = Kernel([n], [0])
    a, b, o = k.arg([n]), k.arg([n]), k.out([n])
    text = "%p = arith.mulf %i0, %i1 : f32\n %q = math.exp %p : f32"
    (r,) = k.generic([0], [], [(a, "d0"), (b, "d0")], [(o, "d0")], text, "%q")
    x, y = torch.randn(n), torch.randn(n)
    (got,) = run(k.text(r), [x, y], [([n], "f32")])
    close(got, (x.double() * y.double()).exp())


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "f16", "i64", "i32", "i16", "i8"])
def test_elementwise_dtypes(dtype: str) -> None:
    shape = [5, 37]
    k = Kernel(shape, [0, 1])
    a, b, o = k.arg(shape, dtype), k.arg([37], dtype), k.out(shape, dtype)
    op = "addf" if "f" in dtype else "addi"
    (r,) = k.generic(
        [0, 1], [], [(a, "d0, d1"), (b, "d1")], [(o, "d0, d1")], f"%p = arith.{op} %i0, %i1 : {dtype}", "%p"
    )
    kind = DTYPES[dtype]
    x = torch.randn(shape).to(kind) if kind.is_floating_point else torch.randint(-50, 50, shape).to(kind)
    y = torch.randn(37).to(kind) if kind.is_floating_point else torch.randint(-50, 50, [37]).to(kind)
    (got,) = run(k.text(r), [x, y], [(shape, dtype)])
    assert torch.equal(got, x + y)


CASTS = {
    ("f32", "bf16"): "arith.truncf", ("bf16", "f32"): "arith.extf", ("f32", "f16"): "arith.truncf",
    ("f16", "f64"): "arith.extf", ("f64", "bf16"): "arith.truncf", ("f64", "f32"): "arith.truncf",
    ("i64", "f32"): "arith.sitofp", ("i32", "f64"): "arith.sitofp", ("i8", "bf16"): "arith.sitofp",
    ("f32", "i64"): "arith.fptosi", ("bf16", "i32"): "arith.fptosi", ("i64", "i32"): "arith.trunci",
    ("i16", "i64"): "arith.extsi", ("i1", "f32"): "arith.uitofp", ("i1", "i64"): "arith.extui",
}  # fmt: skip


@pytest.mark.parametrize("source,target", CASTS)
def test_casts(source: str, target: str) -> None:
    n = 77
    k = Kernel([n], [0])
    a, o = k.arg([n], source), k.out([n], target)
    (r,) = k.generic(
        [0], [], [(a, "d0")], [(o, "d0")], f"%p = {CASTS[source, target]} %i0 : {source} to {target}", "%p"
    )
    x = torch.randint(0, 2, [n]).bool() if source == "i1" else (torch.randn(n) * 30).to(DTYPES[source])
    (got,) = run(k.text(r), [x], [([n], target)])
    assert torch.equal(got, x.to(DTYPES[target]))


def test_bf16_rounding_is_to_nearest_even_and_keeps_nan() -> None:
    bits = torch.randint(-(2**31), 2**31, [100000], dtype=torch.int64).to(torch.int32)
    bits[:8] = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800000, 0x7F800001, -1, 0x00000001])
    x = bits.view(torch.float32)
    k = Kernel([len(x)], [0])
    a, o = k.arg([len(x)]), k.out([len(x)], "bf16")
    (r,) = k.generic([0], [], [(a, "d0")], [(o, "d0")], "%p = arith.truncf %i0 : f32 to bf16", "%p")
    (got,) = run(k.text(r), [x], [([len(x)], "bf16")])
    want = x.bfloat16()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())


def test_comparison_select_and_bool_tensors() -> None:
    shape = [3, 19]
    k = Kernel(shape, [0, 1])
    a, m, o, p = k.arg(shape), k.arg(shape, "i1"), k.out(shape), k.out(shape, "i1")
    text = (
        "%z = arith.constant 0.0 : f32\n %c = arith.cmpf ogt, %i0, %z : f32\n %b = arith.andi %c, %i1 : i1\n"
        "%s = arith.select %b, %i0, %z : f32"
    )
    r, q = k.generic([0, 1], [], [(a, "d0, d1"), (m, "d0, d1")], [(o, "d0, d1"), (p, "d0, d1")], text, "%s, %b")
    x, mask = torch.randn(shape), torch.rand(shape) > 0.5
    got, flags = run(k.text(r, q), [x, mask], [(shape, "f32"), (shape, "i1")])
    assert torch.equal(flags, (x > 0) & mask)
    assert torch.equal(got, torch.where((x > 0) & mask, x, torch.zeros(())))


@pytest.mark.parametrize("op", ["maximumf", "minimumf", "maxnumf", "minnumf"])
def test_nan_in_minimum_and_maximum(op: str) -> None:
    values = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 1.5, -2.0])
    x, y = (t.flatten().contiguous() for t in torch.meshgrid(values, values, indexing="ij"))
    n = len(x)
    k = Kernel([n], [0])
    a, b, o = k.arg([n]), k.arg([n]), k.out([n])
    (r,) = k.generic([0], [], [(a, "d0"), (b, "d0")], [(o, "d0")], f"%p = arith.{op} %i0, %i1 : f32", "%p")
    (got,) = run(k.text(r), [x, y], [([n], "f32")])
    torch_name = {"maximumf": "maximum", "minimumf": "minimum", "maxnumf": "fmax", "minnumf": "fmin"}[op]
    assert torch.equal(got.nan_to_num(7e7), getattr(torch, torch_name)(x, y).nan_to_num(7e7))


@pytest.mark.parametrize("shape", [[2, 3, 4], [5, 1, 17], [3, 7, 40], [1, 1, 1], [4, 0, 3], [0]])
def test_transposes_and_zero_sizes(shape: list[int]) -> None:
    rank = len(shape)
    k = Kernel(shape, list(range(rank)))
    index = ", ".join(f"d{i}" for i in range(rank))
    back = ", ".join(f"d{i}" for i in reversed(range(rank)))
    a, o = k.arg(shape), k.out(shape[::-1])
    (r,) = k.generic(list(range(rank)), [], [(a, index)], [(o, back)], "%p = arith.negf %i0 : f32", "%p")
    x = torch.randn(shape)
    (got,) = run(k.text(r), [x], [(shape[::-1], "f32")])
    assert torch.equal(got, -x.permute(*reversed(range(rank))))


@pytest.mark.parametrize("shape", [[2, 64, 128], [1, 100, 130], [3, 8, 200], [2, 1030, 9]])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "i1", "i64"])
def test_large_transposes_go_through_tiles(shape: list[int], dtype: str) -> None:
    """out[b, j, i] = f(x[b, i, j], y[b, j, i], z[j]), with an index so that coordinates inside a tile show."""
    b, m, n = shape
    k = Kernel(shape, [0, 1, 2])
    x, y, z = k.arg([b, m, n], dtype), k.arg([b, n, m]), k.arg([n])
    o, p = k.out([b, n, m], dtype), k.out([b, n, m])
    text = (
        "%r = linalg.index 1 : index\n %q = arith.index_cast %r : index to i64\n %f = arith.sitofp %q : i64 to f32\n"
        "%s = arith.addf %i1, %i2 : f32\n %t = arith.addf %s, %f : f32"
    )
    ins = [(x, "d0, d1, d2"), (y, "d0, d2, d1"), (z, "d2")]
    outs = [(o, "d0, d2, d1"), (p, "d0, d2, d1")]
    r, q = k.generic([0, 1, 2], [], ins, outs, text, "%i0, %t")
    a, c, d = sample([b, m, n], dtype), torch.randn(b, n, m), torch.randn(n)
    got, other = run(k.text(r, q), [a, c, d], [([b, n, m], dtype), ([b, n, m], "f32")])
    assert torch.equal(got, a.transpose(1, 2))
    assert torch.equal(other, c + d[:, None] + torch.arange(m).float())


def test_few_long_rows_are_cut_into_blocks() -> None:
    """out = a + b[:, None], a column sum and a whole sum over 3 rows: the lane loop is cut, whatever the rows are."""
    shape = [3, 40003]
    k = Kernel(shape, [0])
    a, b, o, c, w = k.arg(shape), k.arg([3]), k.out(shape), k.out([shape[1]]), k.out([])
    (r,) = k.generic([0, 1], [], [(a, "d0, d1"), (b, "d0")], [(o, "d0, d1")], "%p = arith.addf %i0, %i1 : f32", "%p")
    add = "%p = arith.addf %x0, %i0 : f32"
    (s,) = k.generic([0, 1], [0], [(r, "d0, d1")], [(k.fill(c, "0.0"), "d1")], add, "%p")
    (t,) = k.generic([0, 1], [0, 1], [(r, "d0, d1")], [(k.fill(w, "0.0"), "")], add, "%p")
    x, y = torch.randn(shape), torch.randn(3)
    outs = [(shape, "f32"), ([shape[1]], "f32"), ([], "f32")]
    got, columns, total = run(k.text(r, s, t), [x, y], outs)
    assert torch.equal(got, x + y[:, None])
    close(columns, got.double().sum(0))
    close(total, got.double().sum(), 1e-5)


def test_scalar_kernel() -> None:
    k = Kernel([], [])
    a, b, o = k.arg([], "f64"), k.arg([]), k.out([])
    text = "%t = arith.truncf %i0 : f64 to f32\n %p = arith.mulf %t, %i1 : f32"
    (r,) = k.generic([], [], [(a, ""), (b, "")], [(o, "")], text, "%p")
    (got,) = run(k.text(r), [torch.tensor(3.5, dtype=torch.float64), torch.tensor(2.0)], [([], "f32")])
    assert got.item() == 7.0


def test_index_values() -> None:
    shape = [6, 21]
    k = Kernel(shape, [0, 1])
    o = k.out(shape, "i64")
    text = (
        "%i = linalg.index 0 : index\n %j = linalg.index 1 : index\n %c = arith.constant 100 : index\n"
        "%m = arith.muli %i, %c : index\n %s = arith.addi %m, %j : index\n %p = arith.index_cast %s : index to i64"
    )
    (r,) = k.generic([0, 1], [], [], [(o, "d0, d1")], text, "%p")
    (got,) = run(k.text(r), [], [(shape, "i64")])
    assert torch.equal(got, torch.arange(6)[:, None] * 100 + torch.arange(21))


# --- reductions along rows -------------------------------------------------------------------------------------------

FOLDS = {
    "sum": ("addf", "0.0", "f32", lambda x, d: x.double().sum(d)),
    "prod": ("mulf", "1.0", "f32", lambda x, d: x.double().prod(d)),
    "max": ("maximumf", "0xFF800000", "f32", lambda x, d: x.amax(d)),
    "min": ("minimumf", "0x7F800000", "f32", lambda x, d: x.amin(d)),
    "isum": ("addi", "0", "i64", lambda x, d: x.sum(d)),
    "imax": ("maxsi", "-9223372036854775808", "i64", lambda x, d: x.amax(d)),
    "any": ("ori", "0", "i1", lambda x, d: x.any(d)),
    "all": ("andi", "1", "i1", lambda x, d: x.all(d)),
    "i8max": ("maxsi", "-128", "i8", lambda x, d: x.amax(d)),
}


def sample(shape: list[int], dtype: str) -> torch.Tensor:
    kind = DTYPES[dtype]
    if kind == torch.bool:
        return torch.rand(shape) > 0.1
    return torch.randn(shape).to(kind) if kind.is_floating_point else torch.randint(-100, 100, shape).to(kind)


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("n", [1, 5, 8, 29, 32, 70, 1000])
def test_row_reduction(fold: str, n: int) -> None:
    op, start, dtype, reference = FOLDS[fold]
    rows = 13
    k = Kernel([rows, n], [0])
    a, o = k.arg([rows, n], dtype), k.out([rows], dtype)
    f = k.fill(o, start)
    (r,) = k.generic([0, 1], [1], [(a, "d0, d1")], [(f, "d0")], f"%p = arith.{op} %x0, %i0 : {dtype}", "%p")
    x = sample([rows, n], dtype)
    (got,) = run(k.text(r), [x], [([rows], dtype)])
    if fold in ("sum", "prod"):
        close(got, reference(x, 1))
    else:
        assert torch.equal(got, reference(x, 1))


def test_row_maximum_keeps_nan() -> None:
    k = Kernel([9, 50], [0])
    a, o = k.arg([9, 50]), k.out([9])
    f = k.fill(o, "0xFF800000")
    (r,) = k.generic([0, 1], [1], [(a, "d0, d1")], [(f, "d0")], "%p = arith.maximumf %x0, %i0 : f32", "%p")
    x = torch.randn(9, 50)
    x[torch.arange(9), torch.tensor([0, 1, 8, 31, 32, 47, 48, 49, 40])] = math.nan
    x[3] = -math.inf
    (got,) = run(k.text(r), [x], [([9], "f32")])
    assert torch.equal(got.isnan(), x.isnan().any(1))
    assert got[3] == -math.inf


def test_long_row_sum_is_as_accurate_as_pytorch() -> None:
    n = 300001
    k = Kernel([2, n], [0])
    a, o = k.arg([2, n]), k.out([2])
    f = k.fill(o, "0.0")
    (r,) = k.generic([0, 1], [1], [(a, "d0, d1")], [(f, "d0")], "%p = arith.addf %x0, %i0 : f32", "%p")
    x = torch.rand(2, n)
    (got,) = run(k.text(r), [x], [([2], "f32")])
    exact = x.double().sum(1)
    assert (got - exact).abs().max() <= max(2 * (x.sum(1) - exact).abs().max(), 1e-6 * exact.max())


@pytest.mark.parametrize("shape", [[3, 5, 7], [2, 100, 33], [4, 1, 8], [5, 9, 1]])
@pytest.mark.parametrize("start", ["0.0", "2.5"])
def test_reduction_of_a_middle_dim(shape: list[int], start: str) -> None:
    k = Kernel(shape, [0])
    a, o = k.arg(shape), k.out([shape[0], shape[2]])
    f = k.fill(o, start)
    (r,) = k.generic([0, 1, 2], [1], [(a, "d0, d1, d2")], [(f, "d0, d2")], "%p = arith.addf %x0, %i0 : f32", "%p")
    x = torch.randn(shape)
    (got,) = run(k.text(r), [x], [([shape[0], shape[2]], "f32")])
    close(got, x.double().sum(1) + float(start))


def test_reduction_that_keeps_an_outer_inner_dim() -> None:
    shape = [3, 4, 5, 37]  # rows 0, keeps 1, reduces 2 and 3
    k = Kernel(shape, [0])
    a, o = k.arg(shape), k.out([3, 4])
    f = k.fill(o, "1.0")
    (r,) = k.generic(
        [0, 1, 2, 3], [2, 3], [(a, "d0, d1, d2, d3")], [(f, "d0, d1")], "%p = arith.addf %x0, %i0 : f32", "%p"
    )
    x = torch.randn(shape)
    (got,) = run(k.text(r), [x], [([3, 4], "f32")])
    close(got, x.double().sum((2, 3)) + 1)


def test_argmax_takes_the_first_of_equals() -> None:
    shape = [7, 45]
    k = Kernel(shape, [0])
    a, o = k.arg(shape), k.out([7], "i64")
    best = k.fill(k.empty([7]), "0xFF800000")
    at = k.fill(o, "0")
    text = (
        "%j = linalg.index 1 : index\n %k = arith.index_cast %j : index to i64\n %g = arith.cmpf ogt, %i0, %x0 : f32\n"
        "%v = arith.select %g, %i0, %x0 : f32\n %w = arith.select %g, %k, %x1 : i64"
    )
    _, r = k.generic([0, 1], [1], [(a, "d0, d1")], [(best, "d0"), (at, "d0")], text, "%v, %w")
    x = torch.randint(0, 9, shape).float()
    (got,) = run(k.text(r), [x], [([7], "i64")])
    first = (x == x.amax(1, keepdim=True)).float().argmax(1)
    assert torch.equal(got, first)


def test_batch_norm_statistics_and_normalisation() -> None:
    n, c, s = 3, 5, 43  # rows: channels; inner: images and pixels
    k = Kernel([n, c, s], [1])
    a, y, mean = k.arg([n, c, s]), k.out([n, c, s]), k.out([c])
    every = "d0, d1, d2"
    f = k.fill(k.empty([c]), "0.0")
    (total,) = k.generic([0, 1, 2], [0, 2], [(a, every)], [(f, "d1")], "%p = arith.addf %x0, %i0 : f32", "%p")
    text = f"%n = arith.constant {float(n * s)} : f32\n %p = arith.divf %i0, %n : f32"
    (m,) = k.generic([1], [], [(total, "d0")], [(mean, "d0")], text, "%p")
    g = k.fill(k.empty([c]), "0.0")
    text = "%d = arith.subf %i0, %i1 : f32\n %q = arith.mulf %d, %d : f32\n %p = arith.addf %x0, %q : f32"
    (sq,) = k.generic([0, 1, 2], [0, 2], [(a, every), (m, "d1")], [(g, "d1")], text, "%p")
    text = (
        f"%n = arith.constant {float(n * s)} : f32\n %v = arith.divf %i2, %n : f32\n %r = math.rsqrt %v : f32\n"
        "%d = arith.subf %i0, %i1 : f32\n %p = arith.mulf %d, %r : f32"
    )
    (r,) = k.generic([0, 1, 2], [], [(a, every), (m, "d1"), (sq, "d1")], [(y, every)], text, "%p")
    x = torch.randn(n, c, s) + 3
    got, got_mean = run(k.text(r, m), [x], [([n, c, s], "f32"), ([c], "f32")])
    xd = x.double()
    close(got_mean, xd.mean((0, 2)))
    close(got, (xd - xd.mean((0, 2), keepdim=True)) / xd.var((0, 2), correction=0, keepdim=True).sqrt())


def softmax(rows: int, n: int, inplace: str = "") -> str:
    """exp stored once in scratch, read by the sum and by the quotient."""
    k = Kernel([rows, n], [0], inplace)
    a, o = k.arg([rows, n]), k.out([rows, n])
    f = k.fill(k.empty([rows]), "0xFF800000")
    (m,) = k.generic([0, 1], [1], [(a, "d0, d1")], [(f, "d0")], "%p = arith.maximumf %x0, %i0 : f32", "%p")
    text = "%d = arith.subf %i0, %i1 : f32\n %p = math.exp %d : f32"
    (e,) = k.generic([0, 1], [], [(a, "d0, d1"), (m, "d0")], [(k.empty([rows, n]), "d0, d1")], text, "%p")
    g = k.fill(k.empty([rows]), "0.0")
    (s,) = k.generic([0, 1], [1], [(e, "d0, d1")], [(g, "d0")], "%p = arith.addf %x0, %i0 : f32", "%p")
    (r,) = k.generic([0, 1], [], [(e, "d0, d1"), (s, "d0")], [(o, "d0, d1")], "%p = arith.divf %i0, %i1 : f32", "%p")
    return k.text(r)


@pytest.mark.parametrize("rows,n", [(1, 1), (5, 17), (64, 300), (3, 5001)])
def test_softmax(rows: int, n: int) -> None:
    x = torch.randn(rows, n) * 5
    x[0, 0] = -math.inf if n > 1 else 0.0
    (got,) = run(softmax(rows, n), [x], [([rows, n], "f32")])
    close(got, x.double().softmax(1))


def test_softmax_in_place() -> None:
    text = softmax(40, 77, "nova.inplace = [array<i64: 0, 0>]")
    x = torch.randn(40, 77)
    kernel, buffer = load(text), x.clone()
    kernel.call([buffer], [buffer])
    close(buffer, x.double().softmax(1))


# --- reductions across rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fold,shape", [
    (fold, shape) for shape in ([1, 1], [3, 5], [65, 40], [700, 19], [1000, 1030]) for fold in FOLDS
    if shape[0] <= 100 or fold != "prod"  # (long products underflow)
])  # fmt: skip
def test_column_reduction(fold: str, shape: list[int]) -> None:
    op, start, dtype, reference = FOLDS[fold]
    k = Kernel(shape, [0])
    a, o = k.arg(shape, dtype), k.out([shape[1]], dtype)
    f = k.fill(o, start)
    (r,) = k.generic([0, 1], [0], [(a, "d0, d1")], [(f, "d1")], f"%p = arith.{op} %x0, %i0 : {dtype}", "%p")
    x = sample(shape, dtype)
    (got,) = run(k.text(r), [x], [([shape[1]], dtype)])
    if fold in ("sum", "prod"):
        close(got, reference(x, 0))
    else:
        assert torch.equal(got, reference(x, 0))


@pytest.mark.parametrize("shape", [[1], [9], [5000], [300000], [70, 33], [3, 0], [200, 3, 41]])
def test_whole_sum(shape: list[int]) -> None:
    rank = len(shape)
    k = Kernel(shape, list(range(rank)))
    a, o = k.arg(shape), k.out([])
    f = k.fill(o, "0.5")
    index = ", ".join(f"d{i}" for i in range(rank))
    (r,) = k.generic(
        list(range(rank)), list(range(rank)), [(a, index)], [(f, "")], "%p = arith.addf %x0, %i0 : f32", "%p"
    )
    x = torch.rand(shape)
    (got,) = run(k.text(r), [x], [([], "f32")])
    exact = x.double().sum() + 0.5
    assert abs(got.item() - exact) <= max(2 * abs((x.sum() + 0.5).double() - exact), 3e-7 * exact)


def test_column_sum_accumulates_onto_a_tensor() -> None:
    shape = [130, 21]
    k = Kernel(shape, [0], "nova.inplace = [array<i64: 1, 0>]")
    a, start = k.arg(shape), k.arg([21])
    k.out([21])
    (r,) = k.generic([0, 1], [0], [(a, "d0, d1")], [(start, "d1")], "%p = arith.addf %x0, %i0 : f32", "%p")
    x, y = torch.randn(shape), torch.randn(21)
    (got,) = run(k.text(r), [x, y], [([21], "f32")])
    close(got, x.double().sum(0) + y)
    buffer = y.clone()
    load(k.text(r)).call([x, buffer], [buffer])
    assert torch.equal(buffer, got)


def test_rows_columns_and_what_follows() -> None:
    """Row sums, column sums, a whole sum, an output per element and generics after the merge, in one kernel."""
    shape = [150, 67]
    k = Kernel(shape, [0])
    a, y, row, col, mean = k.arg(shape), k.out(shape), k.out([150]), k.out([67], "bf16"), k.out([])
    add = "%p = arith.addf %x0, %i0 : f32"
    f = k.fill(row, "0.0")
    (s,) = k.generic([0, 1], [1], [(a, "d0, d1")], [(f, "d0")], add, "%p")
    (o,) = k.generic([0, 1], [], [(a, "d0, d1"), (s, "d0")], [(y, "d0, d1")], "%p = arith.mulf %i0, %i1 : f32", "%p")
    g = k.fill(k.empty([67]), "0.0")
    (c,) = k.generic([0, 1], [0], [(o, "d0, d1")], [(g, "d1")], add, "%p")
    h = k.fill(k.empty([]), "0.0")
    (t,) = k.generic([0], [0], [(s, "d0")], [(h, "")], add, "%p")
    (cb,) = k.generic([1], [], [(c, "d0")], [(col, "d0")], "%p = arith.truncf %i0 : f32 to bf16", "%p")
    text = "%n = arith.constant 10050.0 : f32\n %p = arith.divf %i0, %n : f32"
    (m,) = k.generic([], [], [(t, "")], [(mean, "")], text, "%p")
    x = torch.randn(shape)
    outs = [(shape, "f32"), ([150], "f32"), ([67], "bf16"), ([], "f32")]
    got_y, got_row, got_col, got_mean = run(k.text(o, s, cb, m), [x], outs)
    xd = x.double()
    close(got_row, xd.sum(1))
    close(got_y, xd * xd.sum(1, keepdim=True))
    close(got_col, (xd * xd.sum(1, keepdim=True)).sum(0), 4e-3)
    close(got_mean, xd.mean(), 1e-4)


def test_in_place_result_with_later_readers() -> None:
    """dx may share dy's buffer although the column sum over dy stands after it."""
    shape = [70, 50]
    k = Kernel(shape, [0], "nova.inplace = [array<i64: 0, 0>]")
    dy, x, dx, dw = k.arg(shape), k.arg(shape), k.out(shape), k.out([50])
    f = k.fill(k.empty([70]), "0.0")
    text = "%q = arith.mulf %i0, %i1 : f32\n %p = arith.addf %x0, %q : f32"
    (s,) = k.generic([0, 1], [1], [(dy, "d0, d1"), (x, "d0, d1")], [(f, "d0")], text, "%p")
    (o,) = k.generic([0, 1], [], [(dy, "d0, d1"), (s, "d0")], [(dx, "d0, d1")], "%p = arith.mulf %i0, %i1 : f32", "%p")
    g = k.fill(dw, "0.0")
    (c,) = k.generic([0, 1], [0], [(dy, "d0, d1"), (x, "d0, d1")], [(g, "d1")], text, "%p")
    a, b = torch.randn(shape), torch.randn(shape)
    want_dx = a.double() * (a.double() * b.double()).sum(1, keepdim=True)
    kernel = load(k.text(o, c))
    for share in (False, True):
        first = a.clone()
        target = first if share else poisoned(shape, torch.float32)
        sums = poisoned([50], torch.float32)
        kernel.call([first, b], [target, sums])
        close(target, want_dx)
        close(sums, (a.double() * b.double()).sum(0))


# --- slices, concatenation, padding, gathers -------------------------------------------------------------------------


def test_concat_and_pad() -> None:
    k = Kernel([6, 9, 20], [0])
    a, b, o = k.arg([6, 9]), k.arg([6, 20]), k.out([6, 35])
    base = k.fill(o, "7.0")
    d0 = k.slice(base, [0, 2], [6, 9], [1, 1], [6, 9])
    (p0,) = k.generic([0, 1], [], [(a, "d0, d1")], [(d0, "d0, d1")], "%p = arith.negf %i0 : f32", "%p")
    o0 = k.slice(base, [0, 2], [6, 9], [1, 1], None, insert=p0)
    d1 = k.slice(o0, [0, 13], [6, 20], [1, 1], [6, 20])
    (p1,) = k.generic([0, 2], [], [(b, "d0, d1")], [(d1, "d0, d1")], "%p = arith.negf %i0 : f32", "%p")
    o1 = k.slice(o0, [0, 13], [6, 20], [1, 1], None, insert=p1)
    x, y = torch.randn(6, 9), torch.randn(6, 20)
    (got,) = run(k.text(o1), [x, y], [([6, 35], "f32")])
    want = torch.full((6, 35), 7.0)
    want[:, 2:11], want[:, 13:33] = -x, -y
    assert torch.equal(got, want)


def test_strided_slices_in_and_out() -> None:
    k = Kernel([4, 11], [0, 1])
    a, base, o = k.arg([8, 3, 30]), k.arg([4, 40]), k.out([4, 40])
    text = "%p = arith.addf %i0, %i0 : f32"
    source = k.slice(a, [1, 2, 3], [4, 1, 11], [2, 1, 2], [4, 11])
    n = 40
    k.dims += [n]
    (copy,) = k.generic([0, 2], [], [(base, "d0, d1")], [(o, "d0, d1")], "%c = arith.constant 0.0 : f32", "%i0")
    target = k.slice(copy, [0, 5], [4, 11], [1, 3], [4, 11])
    (r,) = k.generic([0, 1], [], [(source, "d0, d1")], [(target, "d0, d1")], text, "%p")
    out = k.slice(copy, [0, 5], [4, 11], [1, 3], None, insert=r)
    k.rows = [0]
    x, y = torch.randn(8, 3, 30), torch.randn(4, 40)
    (got,) = run(k.text(out), [x, y], [([4, 40], "f32")])
    want = y.clone()
    want[:, 5:38:3] = 2 * x[1::2, 2, 3:25:2]
    assert torch.equal(got, want)


def test_gather_rows_and_report_bad_indices() -> None:
    v, n, d = 10, 21, 35
    k = Kernel([n, d], [0], f'nova.raises = "IndexError: index {{value}} is out of range [0, {v})"')
    table, ids, o = k.arg([v, d]), k.arg([n], "i64"), k.out([n, d])
    text = (
        f"%lo = arith.constant 0 : i64\n %n = arith.constant {v} : i64\n %hi = arith.constant {v - 1} : i64\n"
        '%bad = arith.cmpi uge, %i0, %n : i64\n "nova.check"(%bad, %i0) : (i1, i64) -> ()\n'
        "%c = arith.maxsi %i0, %lo : i64\n %p = arith.minsi %c, %hi : i64"
    )
    (safe,) = k.generic([0], [], [(ids, "d0")], [(k.empty([n], "i64"), "d0")], text, "%p")
    text = (
        f"%r = arith.index_cast %i0 : i64 to index\n %c = linalg.index 1 : index\n"
        f"%p = tensor.extract {table}[%r, %c] : {tensor([v, d], 'f32')}"
    )
    (r,) = k.generic([0, 1], [], [(safe, "d0")], [(o, "d0, d1")], text, "%p")
    x, i = torch.randn(v, d), torch.randint(0, v, [n])
    kernel, error = load(k.text(r)), torch.zeros(2, dtype=torch.int64)
    for bad in (None, -3, v, 10**12):
        ids_ = i.clone()
        if bad is not None:
            ids_[4] = bad
        error.zero_()
        got = poisoned([n, d], torch.float32)
        pointers = (ctypes.c_void_p * 5)(*kernel.pointers([x, ids_, got]), error.data_ptr())
        kernel.function(ctypes.addressof(pointers))
        assert error.tolist() == ([0, 0] if bad is None else [1, bad])
        good = torch.arange(n) != 4
        assert torch.equal(got[good], x[i[good]])
        if bad is None:
            assert torch.equal(got, x[i])


def test_gather_per_element() -> None:
    n, d = 13, 40
    k = Kernel([n, d], [0, 1])
    a, ids, o = k.arg([n, 50]), k.arg([n, d], "i64"), k.out([n, d])
    text = (
        "%r = linalg.index 0 : index\n %c = arith.index_cast %i0 : i64 to index\n"
        f"%p = tensor.extract {a}[%r, %c] : {tensor([n, 50], 'f32')}"
    )
    (r,) = k.generic([0, 1], [], [(ids, "d0, d1")], [(o, "d0, d1")], text, "%p")
    x, i = torch.randn(n, 50), torch.randint(0, 50, [n, d])
    (got,) = run(k.text(r), [x, i], [([n, d], "f32")])
    assert torch.equal(got, x.gather(1, i))


def test_streaming_stores_need_no_alignment() -> None:
    """Nontemporal kernels fall back to ordinary stores for a buffer that is not aligned."""
    shape = [40, 64]
    k = Kernel(shape, [0], "lowering_config = {nontemporal = true, prefetch = true}")
    a, o = k.arg(shape), k.out(shape)
    f = k.fill(k.empty([40]), "0.0")
    (s,) = k.generic([0, 1], [1], [(a, "d0, d1")], [(f, "d0")], "%p = arith.addf %x0, %i0 : f32", "%p")
    (r,) = k.generic([0, 1], [], [(a, "d0, d1"), (s, "d0")], [(o, "d0, d1")], "%p = arith.subf %i0, %i1 : f32", "%p")
    kernel, x = load(k.text(r)), torch.randn(shape)
    want = x.double() - x.double().sum(1, keepdim=True)
    for shift in (0, 1):
        out = torch.full((40 * 64 + 16,), math.nan)
        start = (-out.data_ptr() // 4) % 16 + shift
        view = out[start : start + 40 * 64] if start + 40 * 64 <= len(out) else out[shift : shift + 40 * 64]
        kernel.call([x], [view])
        close(view.view(shape), want)


# --- random numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [[1], [37], [5000], [3, 4, 40], [2, 7, 33], [4, 5, 6]])
@pytest.mark.parametrize("seed", [0, -1, 2**62 + 12345])
def test_dropout_draws_the_reference_words(shape: list[int], seed: int) -> None:
    rank = len(shape)
    k = Kernel(shape, list(range(rank)))
    x, s, o, u = k.arg(shape), k.arg([], "i64"), k.out(shape), k.out(shape)
    lines = ["%e0 = arith.constant 0 : index"]
    for axis, extent in enumerate(shape):
        lines += [
            f"%s{axis} = arith.constant {extent} : index",
            f"%m{axis} = arith.muli %e{axis}, %s{axis} : index",
            f"%d{axis} = linalg.index {axis} : index",
            f"%e{axis + 1} = arith.addi %m{axis}, %d{axis} : index",
        ]
    lines += [
        f"%e = arith.index_cast %e{rank} : index to i64",
        '%w = "nova.philox"(%i1, %e) {stream = 5 : i64} : (i64, i64) -> i32',
        "%c8 = arith.constant 8 : i32",
        "%h = arith.shrui %w, %c8 : i32",
        "%f = arith.uitofp %h : i32 to f32",
        "%q = arith.constant 5.9604644775390625e-8 : f32",
        "%u = arith.mulf %f, %q : f32",
        "%p = arith.constant 0.75 : f32",
        "%keep = arith.cmpf olt, %u, %p : f32",
        "%z = arith.constant 0.0 : f32",
        "%y = arith.select %keep, %i0, %z : f32",
    ]
    index = ", ".join(f"d{i}" for i in range(rank))
    r, q = k.generic(
        list(range(rank)), [], [(x, index), (s, "")], [(o, index), (u, index)], "\n ".join(lines), "%y, %u"
    )
    a = torch.randn(shape)
    got, draws = run(k.text(r, q), [a, torch.tensor(seed)], [(shape, "f32")] * 2)
    want = philox.uniform(seed, 5, shape)
    assert torch.equal(draws, want)
    assert torch.equal(got, torch.where(want < 0.75, a, torch.zeros(())))
