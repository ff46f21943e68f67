"""Twenty training steps of a model, compiled, against eager in float32 and float64 from the same state.

Rounding is the only difference allowed: the distance between compiled and eager float32 must be no more than three
times the distance between eager float32 and eager float64, for the losses, for all parameters and buffers together, and
for each kind of optimizer state together. A single tensor may be ten times as far: Adam turns one element whose gradient
is almost zero into a whole step up or down, and whichever run that element favours is luck.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import nova
from tests import models

FLOOR = 8 * torch.finfo(torch.float32).eps


def losses_of(out) -> list[torch.Tensor]:
    return [t.detach() for t in (out.values() if isinstance(out, dict) else [out])]


def restore(case: models.Case, saved: dict[str, torch.Tensor]) -> None:
    """Puts a case back into an earlier state, in place; optimizer state that did not exist then becomes zero."""
    with torch.no_grad():
        for name, t in case.state().items():
            t.copy_(saved[name]) if name in saved else t.zero_()


def run(
    name: str, overrides: dict, dtype: torch.dtype, compiled: bool, device: str = "cpu"
) -> tuple[torch.Tensor, dict[str, torch.Tensor], Callable]:
    """(losses, state, step). The same numbers on every device: they are drawn on the CPU."""
    torch.manual_seed(11)
    case = models.build(name, **overrides)
    for m in case.models:
        m.to(device, dtype)
    batches = [[t.to(device, dtype if t.is_floating_point() else t.dtype) for t in b] for b in case.batches]
    step = case.step
    if compiled:
        step = nova.jit(case.step)
        saved = {k: v.clone() for k, v in case.state().items()}
        step(*batches[0])  # records; the steps that count are all compiled ones
        restore(case, saved)
    losses = [losses_of(step(*b)) for b in batches]
    nova.synchronize()
    return torch.tensor([[t.item() for t in row] for row in losses], dtype=torch.float64), case.state(), step


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double(), b.double()
    return ((a - b).norm() / b.norm().clamp_min(1e-12)).item() if a.numel() else 0.0


def kind_of(key: str) -> str:
    return key.rpartition(".")[2] if key.startswith("opt") else "model"


State = dict[str, torch.Tensor]


def problems(state: State, eager: State, exact: State) -> list[str]:
    """Where a compiled run's final state is too far from eager's."""
    assert state.keys() == eager.keys()
    bad = []
    for key, got in state.items():
        mine, theirs = distance(got, eager[key]), distance(eager[key], exact[key])
        if not mine <= 10 * theirs + FLOOR:
            bad.append(f"{key}: {mine:.2e} against {theirs:.2e}")
    for kind in {kind_of(k) for k in state}:
        a, b, c = (
            torch.cat([s[k].double().flatten().cpu() for k in state if kind_of(k) == kind])
            for s in (state, eager, exact)
        )
        if not distance(a, b) <= 3 * distance(b, c) + FLOOR:
            bad.append(f"{kind}: {distance(a, b):.2e} against {distance(b, c):.2e}")
    return bad


def check(name: str, overrides: dict, device: str = "cpu", first: float = 1e-6) -> Callable:
    """Asserts the rule above; `first` bounds the first losses' relative difference. Returns the compiled step."""
    exact_losses, exact, _ = run(name, overrides, torch.float64, False, device)
    eager_losses, eager, _ = run(name, overrides, torch.float32, False, device)
    nova_losses, state, step = run(name, overrides, torch.float32, True, device)
    assert torch.allclose(nova_losses[0], eager_losses[0], rtol=first, atol=0), (nova_losses[0], eager_losses[0])
    mine, theirs = distance(nova_losses, eager_losses), distance(eager_losses, exact_losses)
    assert mine <= 3 * theirs + FLOOR, f"losses: {mine:.2e} against {theirs:.2e}"
    bad = problems(state, eager, exact)
    assert not bad, "\n".join(bad)
    return step
