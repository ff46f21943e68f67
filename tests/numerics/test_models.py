"""Twenty training steps of each model by the rule of tests/trajectories.py; whole, the same bits, and none at all."""

import pytest
import torch

import nova
from tests import models, trajectories

RAGGED = [
    ("mlp", {}), ("gpt2", {}), ("llama", {}), ("bert", {}), ("convnet", {}), ("lstm", {}), ("gan", {}),
    ("gpt2", {"batch": 1, "length": 1}), ("gpt2", {"batch": 5, "length": 33, "width": 72, "heads": 3, "vocab": 101}),
    ("llama", {"batch": 2, "length": 37, "width": 72, "heads": 3, "kv_heads": 1}),
]  # fmt: skip


@pytest.mark.parametrize(
    "name,overrides", RAGGED, ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v.values()))
)
def test_twenty_steps(name, overrides):
    trajectories.check(name, overrides)


def test_runs_are_bitwise_equal():
    first, state, _ = trajectories.run("gpt2", {"steps": 5}, torch.float32, True)
    second, again, _ = trajectories.run("gpt2", {"steps": 5}, torch.float32, True)
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
