"""Optimizer steps and clipping on a GPU: parameters and state as close to float64 as eager's (factor 3)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import nova
from tests.numerics.test_optimizers import OPTIMIZERS, SGD, Adagrad, Adam, AdamW, RMSprop
from tests.trajectories import FLOOR, distance

MORE = [
    (SGD, {"lr": 0.1, "momentum": 0.9, "foreach": False}), (Adam, {"lr": 1e-2, "foreach": False}),
    (Adam, {"lr": 1e-2, "capturable": True}), (AdamW, {"lr": 1e-2, "fused": True, "amsgrad": True}),
    (AdamW, {"lr": 1e-2, "fused": True, "maximize": True}), (AdamW, {"lr": 1e-2, "foreach": False}),
    (Adagrad, {"lr": 0.1, "foreach": True}), (RMSprop, {"lr": 1e-2, "foreach": True, "momentum": 0.9}),
]  # fmt: skip
SHAPES = [(65, 33), (65,), (1,), (7, 3, 5), (2049,), (0, 4)]


def tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [s for p in optimizer.param_groups[0]["params"] for s in [optimizer.state[p]]]
    return [v for s in states for v in s.values() if isinstance(v, torch.Tensor)]


def train(kind: type, options: dict, dtype: torch.dtype, transform, steps: int = 6):
    torch.manual_seed(3)
    parameters = [nn.Parameter(torch.randn(s).to("cuda", dtype)) for s in SHAPES]
    options = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    optimizer = kind(parameters, **options)

    def step(gradients):
        for p, g in zip(parameters, gradients, strict=True):
            p.grad = g * 1.5
        optimizer.step()

    run = transform(step)
    for _ in range(steps):
        run([torch.randn(s).to("cuda", dtype) for s in SHAPES])
    nova.synchronize()
    return [p.detach() for p in parameters], tensors(optimizer), run


def together(found: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.double().flatten().cpu() for t in found])


@pytest.mark.parametrize(
    "kind,options", [*OPTIMIZERS, *MORE],
    ids=[f"{kind.__name__}-{'-'.join(k if v is True else f'{k}={v}' for k, v in options.items())}"
         for kind, options in (*OPTIMIZERS, *MORE)],
)  # fmt: skip
def test_optimizer(kind, options):
    exact, exact_state, _ = train(kind, options, torch.float64, lambda f: f)
    eager, eager_state, _ = train(kind, options, torch.float32, lambda f: f)
    got, state, step = train(kind, options, torch.float32, nova.jit)
    for name, mine, theirs, truth in (
        ("parameters", got, eager, exact), ("state", state, eager_state, exact_state),
    ):  # fmt: skip
        assert [t.device for t in mine] == [t.device for t in theirs]
        if not truth:
            continue
        error, allowed = (distance(together(x), together(truth)) for x in (mine, theirs))
        assert error <= 3 * allowed + FLOOR, f"{name}: {error:.2e} against {allowed:.2e}"
    assert step.captures == 1
    assert step._variants[0].executable.left_to_pytorch == {}


@pytest.mark.quick
def test_low_precision_parameters():
    for dtype in (torch.bfloat16, torch.float16):
        for options in ({"lr": 1e-2, "eps": 1e-3}, {"lr": 1e-2, "eps": 1e-3, "fused": True}):  # (1e-8 is 0 in f16)
            options["eps"] = 1e-2  # of the size of what float16 rounds to zero in eager's second moments
            got, _, _ = train(AdamW, options, dtype, nova.jit)
            eager, _, _ = train(AdamW, options, dtype, lambda f: f)
            # moments are rounded on every step: a few roundings apart
            assert distance(together(got), together(eager)) <= 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("how", ["norm2", "norm_inf", "norm1", "norm3", "value"])
def test_clipping(how, foreach):
    shapes = [s for s in SHAPES if 0 not in s]  # an empty tensor has no largest element
    order = {"norm2": 2.0, "norm_inf": float("inf"), "norm1": 1.0, "norm3": 3.0}.get(how)

    def make(dtype):
        torch.manual_seed(4)
        parameters = [nn.Parameter(torch.zeros(s, device="cuda", dtype=dtype)) for s in shapes]

        def step(gradients, scale):
            for p, g in zip(parameters, gradients, strict=True):
                p.grad = g * scale
            if how == "value":
                nn.utils.clip_grad_value_(parameters, 0.5, foreach=foreach)
                return torch.cat([p.grad.flatten() for p in parameters])
            total = nn.utils.clip_grad_norm_(parameters, 1.0, norm_type=order, foreach=foreach)
            return torch.cat([total[None], *[p.grad.flatten() for p in parameters]])

        data = [[torch.randn(s).to("cuda", dtype) for s in shapes] for _ in range(5)]
        return step, data

    scales = (1.0, 100.0, 1e-4, 0.0, 3.0)
    results = {}
    for dtype in (torch.float64, torch.float32):
        step, data = make(dtype)
        results[dtype] = [step(g, torch.tensor(s, device="cuda")) for g, s in zip(data, scales, strict=True)]
    step, data = make(torch.float32)
    step = nova.jit(step)
    for i, (g, s) in enumerate(zip(data, scales, strict=True)):
        got = step(g, torch.tensor(s, device="cuda"))
        eager, exact = results[torch.float32][i], results[torch.float64][i]
        assert distance(got, exact) <= 3 * distance(eager, exact) + FLOOR, i
    nova.synchronize()
