"""Twenty training steps of each model, compiled, against eager in float32 and float64 from the same state.

Rounding is the only difference allowed: the distance between compiled and eager float32 must be no more than three
times the distance between eager float32 and eager float64, for the losses, for all parameters and buffers together, and
for each kind of optimizer state together. A single tensor may be ten times as far: Adam turns one element whose gradient
is almost zero into a whole step up or down, and whichever run that element favours is luck.
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import models

import nova

FLOOR = 8 * torch.finfo(torch.float32).eps
RAGGED = [
    ("mlp", {}), ("gpt2", {}), ("llama", {}), ("bert", {}), ("convnet", {}), ("lstm", {}), ("gan", {}),
    ("gpt2", {"batch": 1, "length": 1}), ("gpt2", {"batch": 5, "length": 33, "width": 72, "heads": 3, "vocab": 101}),
    ("llama", {"batch": 2, "length": 37, "width": 72, "heads": 3, "kv_heads": 1}),
]  # fmt: skip


def losses_of(out) -> list[float]:
    return [t.item() for t in (out.values() if isinstance(out, dict) else [out])]


def restore(case: models.Case, saved: dict[str, torch.Tensor]) -> None:
    """Puts a case back into an earlier state, in place; optimizer state that did not exist then becomes zero."""
    with torch.no_grad():
        for name, t in case.state().items():
            t.copy_(saved[name]) if name in saved else t.zero_()


def run(name: str, overrides: dict, dtype: torch.dtype, compiled: bool):
    torch.manual_seed(11)
    case = models.build(name, **overrides)
    for m in case.models:
        m.to(dtype)
    batches = [[t.to(dtype) if t.is_floating_point() else t for t in b] for b in case.batches]
    step = case.step
    if compiled:
        step = nova.jit(case.step)
        saved = {k: v.clone() for k, v in case.state().items()}
        step(*batches[0])  # records; the steps that count are all compiled ones
        restore(case, saved)
    losses = [losses_of(step(*b)) for b in batches]
    return torch.tensor(losses, dtype=torch.float64), case.state(), step


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double(), b.double()
    return ((a - b).norm() / b.norm().clamp_min(1e-12)).item() if a.numel() else 0.0


@pytest.mark.parametrize(
    "name,overrides", RAGGED, ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v.values()))
)
def test_twenty_steps(name, overrides):
    exact_losses, exact, _ = run(name, overrides, torch.float64, False)
    eager_losses, eager, _ = run(name, overrides, torch.float32, False)
    nova_losses, state, _ = run(name, overrides, torch.float32, True)
    assert torch.allclose(nova_losses[0], eager_losses[0], rtol=1e-6, atol=0), (nova_losses[0], eager_losses[0])
    assert distance(nova_losses, eager_losses) <= 3 * distance(eager_losses, exact_losses) + FLOOR
    assert state.keys() == eager.keys()
    bad = []
    for key, got in state.items():
        mine, theirs = distance(got, eager[key]), distance(eager[key], exact[key])
        if not mine <= 10 * theirs + FLOOR:
            bad.append(f"{key}: {mine:.2e} against {theirs:.2e}")
    for kind in {kind_of(k) for k in state}:
        a, b, c = (
            torch.cat([s[k].double().flatten() for k in state if kind_of(k) == kind]) for s in (state, eager, exact)
        )
        if not distance(a, b) <= 3 * distance(b, c) + FLOOR:
            bad.append(f"{kind}: {distance(a, b):.2e} against {distance(b, c):.2e}")
    assert not bad, "\n".join(bad)


def kind_of(key: str) -> str:
    return key.rpartition(".")[2] if key.startswith("opt") else "model"


def test_runs_are_bitwise_equal():
    first, state, _ = run("gpt2", {"steps": 5}, torch.float32, True)
    second, again, _ = run("gpt2", {"steps": 5}, torch.float32, True)
    assert torch.equal(first, second)
    assert all(torch.equal(state[k], again[k]) for k in state)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_whole(name):
    """Nothing of the transformer steps is left to PyTorch."""
    torch.manual_seed(0)
    case = models.build(name, steps=1)
    report = nova.explain(case.step, *case.batches[0])
    assert report.fallbacks == [], report.fallbacks
    assert len(report.kernels) > 5


def test_empty_batch():
    torch.manual_seed(0)
    case = models.build("mlp", steps=1)
    step = nova.jit(case.step)
    x, y = torch.empty(0, 64), torch.empty(0, 64)
    for _ in range(2):
        assert torch.isnan(step(x, y))
