"""Attention kernels built from `nova.attention` text, and what they must compute in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nova import mlir  # noqa: I001
from nova.capture import philox
from nova.dialect.ops import REGISTRY
from nova.fusion import attention as pass_
from nova.schedule import target as targets
from tests.kernels import DTYPES, Loaded, load_kernel, poisoned

TORCH = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16}


@dataclass(frozen=True)
class Case:
    """One attention problem. `layout`: plain [B,H,T,D]; heads_last [B,T,H*D]; packed: q, k, v in one [B,T,3*H*D]."""

    batch: int = 2
    heads: int = 2
    kv_heads: int = 2
    queries: int = 37
    keys: int = 37
    dim: int = 24
    value_dim: int = 24
    dtype: str = "f32"
    causal: bool = False
    mask: str = ""  # "", "bool" or "float", then the broadcast dims: "bool:b1tS" = [B,1,T,S]
    dropout: float = 0.0
    layout: str = "plain"
    scale: float | None = None
    stream: int = 5

    @property
    def factor(self) -> float:
        return self.scale if self.scale is not None else 1 / math.sqrt(self.dim)

    @property
    def shapes(self) -> dict[str, list[int]]:
        b, h, g, t, s = self.batch, self.heads, self.kv_heads, self.queries, self.keys
        return {
            "q": [b, h, t, self.dim], "k": [b, g, s, self.dim], "v": [b, g, s, self.value_dim],
            "out": [b, h, t, self.value_dim], "lse": [b, h, t], "dout": [b, h, t, self.value_dim],
        }  # fmt: skip

    @property
    def mask_shape(self) -> list[int]:
        full = {"b": self.batch, "h": self.heads, "t": self.queries, "s": self.keys}
        return [full.get(letter, 1) for letter in self.mask.split(":")[1]]

    @property
    def statistic(self) -> str:
        return "f64" if self.dtype == "f64" else "f32"


def tensor(shape: list[int], dtype: str) -> str:
    return "tensor<" + "".join(f"{n}x" for n in shape) + dtype + ">"


def ints(values: list[int]) -> str:
    return f"array<i64: {', '.join(map(str, values))}>"


class Text:
    """A kernel function of nova ops, written line by line."""

    def __init__(self) -> None:
        self.args: list[tuple[str, str]] = []
        self.lines: list[str] = []

    def arg(self, name: str, type_: str) -> str:
        if (f"%{name}", type_) not in self.args:
            self.args.append((f"%{name}", type_))
        return f"%{name}"

    def op(
        self, result: str, name: str, operands: list[tuple[str, str]], type_: str, attributes: str = "", **flags: bool
    ) -> str:
        """`flags` are the attributes that say which optional operands are there."""
        values = ", ".join(value for value, _ in operands)
        types = ", ".join(t for _, t in operands)
        segments = REGISTRY[name].operands.segments([t for _, t in operands], flags)
        if segments:
            attributes += f", operandSegmentSizes = array<i32: {', '.join(map(str, segments))}>"
        self.lines.append(f'{result} = "nova.{name}"({values}) {{{attributes}}} : ({types}) -> {type_}')
        return result

    def function(self, returned: list[tuple[str, str]]) -> str:
        args = ", ".join(f"{name}: {type_}" for name, type_ in self.args)
        types = ", ".join(t for _, t in returned)
        values = ", ".join(v for v, _ in returned)
        body = "\n  ".join([*self.lines, f"return {values} : {types}"])
        return f"func.func private @attention({args}) -> ({types}) {{\n  {body}\n}}"


def operand(text: Text, case: Case, name: str) -> tuple[str, str]:
    """The value `name` ([B,H,T,D]-shaped), behind the views of the case's layout."""
    b, h, t, d = case.shapes[name]
    type_ = tensor([b, h, t, d], case.dtype)
    if case.layout == "plain":
        return text.arg(name, type_), type_
    flat = tensor([b, t, h * d], case.dtype)
    if case.layout == "packed" and name in "qkv":
        packed = tensor([b, t, 3 * h * d], case.dtype)
        base, at = text.arg("qkv", packed), "qkv".index(name) * h * d
        limits = ints([b, t, at + h * d])
        attributes = f"starts = {ints([0, 0, at])}, limits = {limits}, strides = {ints([1, 1, 1])}"
        base = text.op(f"%{name}_slice", "slice", [(base, packed)], flat, attributes)
    else:
        base = text.arg(name, flat)
    split = tensor([b, t, h, d], case.dtype)
    value = text.op(f"%{name}_heads", "reshape", [(base, flat)], split)
    permutation = f"permutation = {ints([0, 2, 1, 3])}"
    return text.op(f"%{name}_t", "transpose", [(value, split)], type_, permutation), type_


def result(text: Text, case: Case, name: str, value: str, shape: list[int]) -> tuple[str, str]:
    """A [B,H,T,D] result in the layout's form."""
    b, h, t, d = shape
    if case.layout == "plain":
        return value, tensor(shape, case.dtype)
    moved, flat = tensor([b, t, h, d], case.dtype), tensor([b, t, h * d], case.dtype)
    permutation = f"permutation = {ints([0, 2, 1, 3])}"
    value = text.op(f"%{name}_moved", "transpose", [(value, tensor(shape, case.dtype))], moved, permutation)
    return text.op(f"%{name}_flat", "reshape", [(value, moved)], flat), flat


def nova_text(case: Case, backward: bool, mask_grad: bool = False) -> str:
    """The kernel at level 1."""
    text, shapes = Text(), case.shapes
    names = ["dout", "q", "k", "v", "out"] if backward else ["q", "k", "v"]
    operands = [operand(text, case, name) for name in names]
    statistic = tensor(shapes["lse"], case.statistic)
    if backward:
        operands.append((text.arg("lse", statistic), statistic))
    if case.mask:
        mask_dtype = {"bool": "i1", "float": case.dtype if case.dtype != "f64" else "f64"}[case.mask.split(":")[0]]
        type_ = tensor(case.mask_shape, mask_dtype)
        operands.append((text.arg("mask", type_), type_))
    if case.dropout:
        operands.append((text.arg("seed", "tensor<i64>"), "tensor<i64>"))
    flag = lambda x: "true" if x else "false"  # noqa: E731
    attributes = (
        f"has_mask = {flag(case.mask)}, has_seed = {flag(case.dropout)}, causal = {flag(case.causal)}, "
        f"scale = {case.factor:.17e} : f64, dropout_p = {case.dropout:.17e} : f64, stream = {case.stream} : i64"
    )
    present = {"has_mask": bool(case.mask), "has_seed": bool(case.dropout), "mask_grad": mask_grad}
    if not backward:
        types = f"({tensor(shapes['out'], case.dtype)}, {statistic})"
        text.op("%r:2", "attention", operands, types, attributes, **present)
        out = result(text, case, "o", "%r#0", shapes["out"])
        return text.function([out, ("%r#1", statistic)])
    attributes += f", mask_grad = {flag(mask_grad)}"
    gradients = [tensor(shapes[name], case.dtype) for name in "qkv"]
    types = ", ".join([*gradients, *([operands[6][1]] if mask_grad else [])])
    text.op(f"%r:{3 + mask_grad}", "attention_backward", operands, f"({types})", attributes, **present)
    returned = [result(text, case, f"d{name}", f"%r#{i}", shapes[name]) for i, name in enumerate("qkv")]
    if case.layout == "packed":
        b, h, t, d = shapes["q"]
        packed = tensor([b, t, 3 * h * d], case.dtype)
        returned = [(text.op("%dqkv", "concat", returned, packed, "dim = 2 : i64"), packed)]
    if mask_grad:
        returned.append(("%r#3", operands[6][1]))
    return text.function(returned)


def lowered(text: str, target: targets.Target | None = None) -> str:
    return str(pass_.run(mlir.parse(text), target or targets.host()))


_kernels: dict[str, Loaded] = {}


def kernel(case: Case, backward: bool, mask_grad: bool = False, target: targets.CpuTarget | None = None) -> Loaded:
    """The compiled kernel; compiled once a test run."""
    key = repr((case, backward, mask_grad, target))
    if key not in _kernels:
        _kernels[key] = load_kernel(lowered(nova_text(case, backward, mask_grad), target), target)
    return _kernels[key]


def inputs(case: Case, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random operands in the plain layout."""
    generator = torch.Generator().manual_seed(seed)
    make = lambda shape: torch.randn(shape, generator=generator).to(TORCH[case.dtype])  # noqa: E731
    tensors = {name: make(case.shapes[name]) for name in ("q", "k", "v", "dout")}
    if case.mask.startswith("bool"):
        tensors["mask"] = torch.rand(case.mask_shape, generator=generator) < 0.7
    elif case.mask:
        tensors["mask"] = make(case.mask_shape)
    if case.dropout:
        tensors["seed"] = torch.tensor(1234567890123 + seed)
    return tensors


def laid_out(case: Case, name: str, value: torch.Tensor) -> torch.Tensor:
    """[B,H,T,D] to the layout's buffer."""
    return value if case.layout == "plain" else value.transpose(1, 2).flatten(2).contiguous()


def plain(case: Case, value: torch.Tensor, heads: int) -> torch.Tensor:
    return value if case.layout == "plain" else value.unflatten(2, (heads, -1)).transpose(1, 2)


def _arguments(case: Case, tensors: dict[str, torch.Tensor], names: list[str]) -> list[torch.Tensor]:
    arguments = []
    for name in names:
        if name in ("lse", "mask", "seed"):
            arguments.append(tensors[name].contiguous())
        elif case.layout == "packed" and name in "qkv":
            if name == "q":
                arguments.append(torch.cat([laid_out(case, n, tensors[n]) for n in "qkv"], 2).contiguous())
        else:
            arguments.append(laid_out(case, name, tensors[name]).contiguous())
    return arguments


def run_forward(case: Case, tensors: dict[str, torch.Tensor], loaded: Loaded | None = None) -> dict[str, torch.Tensor]:
    shape = case.shapes["out"]
    if case.layout != "plain":
        shape = [shape[0], shape[2], shape[1] * shape[3]]
    outputs = [poisoned(shape, TORCH[case.dtype]), poisoned(case.shapes["lse"], DTYPES[case.statistic])]
    names = ["q", "k", "v", *(n for n in ("mask", "seed") if n in tensors)]
    (loaded or kernel(case, False)).call(_arguments(case, tensors, names), outputs)
    return {"out": plain(case, outputs[0], case.heads), "lse": outputs[1]}


def run_backward(
    case: Case, tensors: dict[str, torch.Tensor], mask_grad: bool = False, loaded: Loaded | None = None
) -> dict[str, torch.Tensor]:
    """`tensors` also holds out and lse."""
    names = ["dout", "q", "k", "v", "out", "lse", *(n for n in ("mask", "seed") if n in tensors)]
    arguments = _arguments(case, tensors, names)
    heads = {"q": case.heads, "k": case.kv_heads, "v": case.kv_heads}
    outputs = [poisoned(laid_out(case, n, tensors[n]).shape, TORCH[case.dtype]) for n in "qkv"]
    if case.layout == "packed":
        outputs = [torch.cat(outputs, 2)]
    if mask_grad:
        outputs.append(poisoned(case.mask_shape, tensors["mask"].dtype))
    (loaded or kernel(case, True, mask_grad)).call(arguments, outputs)
    gradients = outputs[0].chunk(3, 2) if case.layout == "packed" else outputs[:3]
    result = {f"d{n}": plain(case, g, heads[n]) for n, g in zip("qkv", gradients, strict=True)}
    return result | ({"dmask": outputs[-1]} if mask_grad else {})


def keep_mask(case: Case, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The reference dropout mask: 1 where kept."""
    shape = [case.batch, case.heads, case.queries, case.keys]
    return (philox.uniform(int(tensors["seed"]), case.stream, shape) >= case.dropout).double()


def reference(
    case: Case, tensors: dict[str, torch.Tensor], dtype: torch.dtype = torch.float64
) -> dict[str, torch.Tensor]:
    """Everything in `dtype`, by autograd through the plain definition."""
    q, k, v = (tensors[n].detach().to(dtype, copy=True).requires_grad_() for n in "qkv")
    repeat = case.heads // case.kv_heads
    scores = q @ k.repeat_interleave(repeat, 1).transpose(-1, -2) * case.factor
    mask = tensors.get("mask")
    if mask is not None:
        mask = mask if mask.dtype == torch.bool else mask.detach().to(dtype, copy=True).requires_grad_()
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if case.causal:
        scores = scores.masked_fill(~torch.ones(case.queries, case.keys, dtype=torch.bool).tril(), -math.inf)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    lse = scores.logsumexp(-1)
    probabilities = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    if case.dropout:
        keep = keep_mask(case, tensors).to(dtype)
        probabilities = probabilities * keep / (1 - case.dropout) if case.dropout < 1 else probabilities * 0
    out = probabilities @ v.repeat_interleave(repeat, 1)
    out.backward(tensors["dout"].to(dtype))
    result = {"out": out, "lse": lse, "dq": q.grad, "dk": k.grad, "dv": v.grad}
    if mask is not None and mask.dtype != torch.bool:
        result["dmask"] = mask.grad
    return {name: value.detach() for name, value in result.items()}


def check(
    case: Case, seed: int = 0, mask_grad: bool = False, target: targets.CpuTarget | None = None,
    make: Callable[[Case, bool, bool], Any] | None = None, roundoff: float = 0.0,
) -> None:  # fmt: skip
    """Runs forward and backward; every element within the float32 reference's own error (factor 3), 16-bit ones
    within two roundings; `roundoff`: of the operands, where they are rounded.

    `make(case, backward, mask_grad)` gives the kernel to run: by default the host's."""
    make = make or (lambda case, backward, mask_grad: kernel(case, backward, mask_grad, target))
    tensors = inputs(case, seed)
    exact = reference(case, tensors)
    compute = torch.float64 if case.dtype == "f64" else torch.float32
    eager = reference(case, tensors, compute)
    outputs = run_forward(case, tensors, make(case, False, False))
    # backward starts from its own forward's results, as in a step
    saved = tensors | {"out": outputs["out"].contiguous(), "lse": outputs["lse"]}
    outputs |= run_backward(case, saved, mask_grad, make(case, True, mask_grad))
    for name, value in outputs.items():
        want = exact[name]
        assert value.shape == want.shape, name
        assert torch.equal(value.isfinite(), want.isfinite()), f"{name} is not finite where it should be"
        difference = torch.where(want.isfinite(), value.double() - want, 0.0).abs()
        # gradients that cancel to nothing carry the rounding of what cancelled
        family = [x for n, x in exact.items() if n == name or n[0] == name[0] == "d"]
        size = max((torch.where(x.isfinite(), x, 0.0).abs().amax().item() for x in family if x.numel()), default=0.0)
        own = torch.where(want.isfinite(), eager[name].double() - want, 0.0).abs()
        roundings = 4 if compute == torch.float32 else 16  # in float64 the reference itself is no better
        allowed = 3 * (own.amax().item() if own.numel() else 0.0) + roundings * size * torch.finfo(compute).eps
        if case.dtype in ("bf16", "f16") and name != "lse":
            allowed = size * 2 * torch.finfo(TORCH[case.dtype]).eps  # out is rounded before delta is taken from it
        allowed = max(allowed, size * 2 * roundoff)
        worst = difference.amax().item() if difference.numel() else 0.0
        assert worst <= allowed, f"{name}: error {worst:.3g}, allowed {allowed:.3g}"
