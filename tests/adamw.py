"""AdamW by a multi-tensor kernel beside PyTorch's in float32 and float64, from the same parameters and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

LR, BETA1, BETA2, EPS, DECAY = 1e-2, 0.9, 0.99, 1e-8, 0.1


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def operands(params, grads, m, v, steps, found_inf: float = 0.0) -> list[torch.Tensor]:
    """What the kernel takes, in order of its arguments and results, which are in place."""
    shared = [*map(scalar, (LR, BETA1, BETA2, EPS, DECAY)), torch.tensor(found_inf)]
    return [*params, *grads, *m, *v, *steps, *shared, *params, *m, *v, *steps]


def follows_pytorch(call: Callable[[list[int], list[torch.Tensor]], None], params: Sequence[torch.Tensor], count: int):
    """Asserts that `count` steps by `call(numbers of elements, operands)` are as close to float64 as PyTorch's."""
    reference = [p.clone().requires_grad_() for p in params]
    exact = [p.double().requires_grad_() for p in params]
    hyper = {"lr": LR, "betas": (BETA1, BETA2), "eps": EPS, "weight_decay": DECAY}
    optimizers = [torch.optim.AdamW(ps, foreach=False, **hyper) for ps in (reference, exact)]
    m, v = ([torch.zeros(p.shape) for p in params] for _ in range(2))
    steps = [torch.zeros(()) for _ in params]
    for _ in range(count):
        grads = [torch.randn(p.shape) for p in params]
        for ps in (reference, exact):
            for p, g in zip(ps, grads, strict=True):
                p.grad = g.to(p.dtype)
        for optimizer in optimizers:
            optimizer.step()
        call([p.numel() for p in params], operands(params, grads, m, v, steps))
    for p, r, e in zip(params, reference, exact, strict=True):
        assert (p - e).norm() <= 3 * (r - e).norm() + 1e-7 * e.norm()
    assert all(s.item() == count for s in steps)


def inf_changes_nothing(call: Callable[[list[int], list[torch.Tensor]], None], sizes: Sequence[Sequence[int]]) -> None:
    """Asserts that a step whose gradients are said to be infinite leaves everything as it was."""
    p, g, m, v = ([torch.randn(s) for s in sizes] for _ in range(4))
    steps = [torch.full((), 3.0) for _ in sizes]
    before = [[t.clone() for t in ts] for ts in (p, g, m, v, steps)]
    call([x.numel() for x in p], operands(p, g, m, v, steps, found_inf=1.0))
    for was, now in zip(before, (p, g, m, v, steps), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(was, now, strict=True))
