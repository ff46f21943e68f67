"""Layer norm, GELU and softmax cross entropy, forward and backward (paper section 6.1): achieved bytes a second.

Backward is timed over a saved forward for everyone: layer norm's mean and 1/deviation are inputs of Nova's, GELU's
needs no result of the forward. Where a contestant's backward is not to be had by itself, the forward's time is taken
off that of both: Nova's cross entropy, and Liger's, which makes the gradient in its forward and in the place of the
logits (it is given some of its own). The rows "both" show forward and backward in one step, as training has them.
Bytes are what an operator must move: every input once, every output once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import nova
from nova.bench import timing

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Operator:
    """`function(x, *rest)` on x of [rows, columns]; `passes`: tensors of x's size moved by forward and by backward.

    Both together move what backward does: no result of forward but a scalar is asked for.
    """

    name: str
    rows: int
    columns: int
    function: Callable[..., Tensor]
    rest: Callable[[int, int, torch.dtype], tuple[Tensor, ...]]
    passes: tuple[int, int]
    scalar: bool = False
    liger: Callable[..., Tensor] | None = None
    save: Callable[..., tuple[Tensor, ...]] = lambda *_: ()  # what PyTorch's forward keeps for its backward
    gradient: Callable[..., tuple[Tensor, ...]] | None = None  # its backward: (x, grad, saved, *rest)


def _liger_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_layer_norm

    return liger_layer_norm(x, weight, bias, 1e-5)


def _liger_cross_entropy(x: Tensor, labels: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_cross_entropy

    return liger_cross_entropy(x, labels)


def _layer_norm_rest(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    weight, bias = torch.randn(2, columns, device="cuda", dtype=dtype).unbind()
    return weight.clone().requires_grad_(), bias.clone().requires_grad_()


def _labels(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return (torch.randint(columns, (rows,), device="cuda"),)


def _layer_norm_saved(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return torch.native_layer_norm(x, x.shape[-1:], weight, bias, 1e-5)[1:]


def _layer_norm_gradient(x: Tensor, grad: Tensor, saved: tuple[Tensor, ...], *rest: Tensor) -> tuple[Tensor, ...]:
    mean, rstd = saved
    return torch.ops.aten.native_layer_norm_backward(grad, x, x.shape[-1:], mean, rstd, *rest, [True, True, True])


OPERATORS = (
    Operator(
        "layer_norm", 16384, 768, lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), _layer_norm_rest, (2, 3),
        liger=_liger_layer_norm, save=_layer_norm_saved, gradient=_layer_norm_gradient,
    ),
    Operator("gelu", 16384, 3072, F.gelu, lambda *_: (), (2, 3)),
    Operator("cross_entropy", 16384, 50304, F.cross_entropy, _labels, (1, 2), True, _liger_cross_entropy),
)  # fmt: skip


@dataclass
class Set:
    """One input set, the gradient that comes in, what a forward saves, and the forward of each PyTorch contestant."""

    x: Tensor
    rest: tuple[Tensor, ...]
    grad: Tensor
    kept: tuple[Tensor, ...]
    saved: dict[str, Tensor]

    @property
    def leaves(self) -> list[Tensor]:
        return [t for t in (self.x, *self.rest) if t.requires_grad]


def make_sets(op: Operator, dtype: torch.dtype, count: int) -> list[Set]:
    sets = []
    for _ in range(count):
        x = torch.randn(op.rows, op.columns, device="cuda").to(dtype).requires_grad_()
        grad = torch.ones((), device="cuda", dtype=dtype) if op.scalar else torch.randn_like(x)
        rest = op.rest(op.rows, op.columns, dtype)
        with torch.no_grad():
            sets.append(Set(x, rest, grad, op.save(x, *rest), {}))
    return sets


def forward(function: Callable[..., Tensor], sets: list[Set]) -> timing.Run:
    def run(i: int) -> Tensor:
        with torch.no_grad():
            return function(sets[i].x.detach(), *sets[i].rest)

    return run


def in_place(function: Callable[..., Tensor], sets: list[Set]) -> timing.Run:
    """Forward and backward of a function that overwrites its first argument with the gradient."""
    own = [s.x.detach().clone().requires_grad_() for s in sets[:2]]

    def run(i: int) -> Any:
        x, s = own[i % len(own)], sets[i]
        return torch.autograd.grad(function(x, *s.rest), x, s.grad)

    return run


def backward(name: str, function: Callable[..., Tensor], sets: list[Set]) -> timing.Run:
    """autograd.grad over a saved forward."""

    def run(i: int) -> Any:
        s = sets[i]
        if name not in s.saved:
            s.saved[name] = function(s.x, *s.rest)
        return torch.autograd.grad(s.saved[name], s.leaves, s.grad, retain_graph=True)

    return run


def both(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """Forward and backward in one step."""

    def step(x: Tensor, grad: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        y = function(x, *rest)
        return torch.autograd.grad(y, [t for t in (x, *rest) if t.requires_grad], grad)

    return step


def whole(step: Callable[..., Any], sets: list[Set]) -> timing.Run:
    def run(i: int) -> Any:
        return step(sets[i].x, sets[i].grad, *sets[i].rest)

    return run


def alone(gradient: Callable[..., Any], sets: list[Set]) -> timing.Run:
    """A backward that is given what the forward saved."""

    def run(i: int) -> Any:
        s = sets[i]
        with torch.no_grad():
            return gradient(s.x.detach(), s.grad, s.kept, *s.rest)

    return run


def measure(op: Operator, dtype_name: str, rounds: int) -> list[dict[str, Any]]:
    """Rows for forward, for backward and for both together of one operator in one dtype."""
    dtype = DTYPES[dtype_name]
    size = op.rows * op.columns * dtype.itemsize
    sets = make_sets(op, dtype, timing.sets_for(2 * size, least=2, most=8))
    functions = {"eager": op.function, "torch.compile": torch.compile(op.function)}
    if op.liger and timing.liger() is not None:
        functions["liger"] = op.liger
    nova_forward, nova_both = nova.jit(op.function), nova.jit(both(op.function))
    nova_backward = nova.jit(op.gradient) if op.gradient else None

    forwards = {name: forward(f, sets) for name, f in functions.items()} | {"nova": forward(nova_forward, sets)}
    backwards = {name: backward(name, f, sets) for name, f in functions.items()}
    backwards["nova"] = alone(nova_backward, sets) if nova_backward else whole(nova_both, sets)
    wholes = {name: whole(both(f), sets) for name, f in functions.items()} | {"nova": whole(nova_both, sets)}
    if op.scalar:  # no backward by itself
        if "liger" in functions:
            wholes["liger"] = in_place(functions["liger"], sets)
        backwards = {name: run for name, run in backwards.items() if name not in ("nova", "liger")}
    median = {}
    for direction, runs in (("forward", forwards), ("backward", backwards), ("both", wholes)):
        found = timing.interleave(runs, len(sets), rounds)
        median[direction] = {name: t.median for name, t in found.items()}
        for s in sets:
            s.saved.clear()
    for name in median["both"].keys() - median["backward"].keys():
        median["backward"][name] = median["both"][name] - median["forward"][name]
    errors = _errors(op, sets[0], nova_forward, nova_backward, nova_both)
    return [_row(op, dtype_name, direction, median[direction], size, errors[direction]) for direction in median]


def _row(op: Operator, dtype_name: str, direction: str, seconds: dict[str, float], size: int, error: Any) -> dict:
    moved = op.passes[direction != "forward"] * size
    copy = timing.copy_bandwidth(moved)
    best, own = min(t for name, t in seconds.items() if name != "nova"), seconds["nova"]
    return {
        "op": op.name, "dtype": dtype_name, "direction": direction, "bytes": moved, "seconds": seconds,
        "of_copy": moved / own / copy, "copy_bandwidth": copy, "ratio": best / own, "error": error,
    }  # fmt: skip


def _errors(op: Operator, s: Set, nova_forward: Any, nova_backward: Any, nova_both: Any) -> dict[str, Any]:
    """Relative errors of Nova's and eager's results against float64, on a slice of rows where rows are independent."""
    with torch.no_grad():
        got, eager = nova_forward(s.x, *s.rest), op.function(s.x, *s.rest)
    leaf = s.x.detach().double().requires_grad_()
    rest = tuple(t.detach().double().requires_grad_() if t.is_floating_point() else t for t in s.rest)
    exact = op.function(leaf, *rest)
    found = {"both": nova_both(s.x, s.grad, *s.rest)}
    found["backward"] = alone(nova_backward, [s])(0) if nova_backward else found["both"]
    theirs = torch.autograd.grad(op.function(s.x, *s.rest), s.leaves, s.grad)
    wanted = torch.autograd.grad(exact, [leaf, *(t for t in rest if t.requires_grad)], s.grad.double())
    return {
        "forward": {"nova": timing.relative_error(got, exact), "eager": timing.relative_error(eager, exact)},
        **{
            direction: {
                "nova": [timing.relative_error(a, b) for a, b in zip(mine, wanted, strict=True)],
                "eager": [timing.relative_error(a, b) for a, b in zip(theirs, wanted, strict=True)],
            }
            for direction, mine in found.items()
        },
    }


def run(rounds: int = 9, names: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """All operators, or those named, in float32 and bfloat16."""
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False  # its backward is run many times over one forward
    rows = []
    for op in OPERATORS:
        if names and op.name not in names:
            continue
        for dtype_name in DTYPES:
            rows += measure(op, dtype_name, rounds)
            torch.cuda.empty_cache()
    return rows


def line(row: dict[str, Any]) -> tuple[str, ...]:
    """A row for the table."""
    seconds = row["seconds"]
    others = [f"{seconds[name] * 1e6:.1f}" if name in seconds else "-" for name in ("eager", "torch.compile", "liger")]
    own = f"{seconds['nova'] * 1e6:.1f}"
    return (
        f"{row['op']} {row['direction']} {row['dtype']}",
        *others,
        own,
        f"{row['ratio']:.2f}",
        f"{row['of_copy']:.2f}",
    )


HEADER = ("us a call", "eager", "torch.compile", "liger", "nova", "best other / nova", "of copy")
