"""Twenty training steps of each model on a GPU by the rule of tests/trajectories.py, and the same bits every time."""

from __future__ import annotations

import pytest
import torch

from tests import trajectories

RAGGED = [
    ("mlp", {}), ("gpt2", {}), ("llama", {}), ("bert", {}), ("convnet", {}), ("lstm", {}), ("gan", {}),
    ("gpt2", {"batch": 1, "length": 1}), ("gpt2", {"batch": 5, "length": 33, "width": 72, "heads": 3, "vocab": 101}),
    ("gpt2", {"batch": 2, "length": 128, "width": 128, "heads": 2, "vocab": 1000, "layers": 3}),
    ("llama", {"batch": 2, "length": 37, "width": 72, "heads": 3, "kv_heads": 1}),
]  # fmt: skip


@pytest.mark.parametrize("name,overrides", [
    pytest.param(name, options, id="-".join(map(str, [name, *options.values()])),
                 marks=[] if options else [pytest.mark.quick])
    for name, options in RAGGED
])  # fmt: skip
def test_twenty_steps(name, overrides):
    step = trajectories.check(name, overrides, "cuda", first=2e-6)
    assert step.captures == 1 and step.compilations == 1
    assert step._variants[0].executable.left_to_pytorch == {}


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "convnet"])
def test_runs_are_bitwise_equal(name):
    first, state, _ = trajectories.run(name, {}, torch.float32, True, "cuda")
    second, again, _ = trajectories.run(name, {}, torch.float32, True, "cuda")
    assert torch.equal(first, second)
    assert all(torch.equal(state[k], again[k]) for k in state)


def test_a_gpu_agrees_with_a_cpu():
    """Both compiled: not the same bits, the same training."""
    cpu, state, _ = trajectories.run("gpt2", {"steps": 5}, torch.float32, True)
    gpu, found, _ = trajectories.run("gpt2", {"steps": 5}, torch.float32, True, "cuda")
    torch.testing.assert_close(gpu, cpu, rtol=1e-5, atol=0)
    assert state.keys() == found.keys()
