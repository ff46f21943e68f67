"""A second process finds the stored capture: it neither traces nor loads MLIR, and computes the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, sys, warnings
import torch
from torch import nn
import nova

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)

@nova.jit
def step(x, y):
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    return {"loss": loss.detach()}

losses = []
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(4):
        losses.append(step(torch.randn(6, 8), torch.randn(6, 4))["loss"].item())
print(json.dumps({
    "losses": losses, "captures": getattr(step, "captures", 0), "loads": getattr(step, "loads", 0),
    "traced": "nova.capture.record" in sys.modules, "mlir": "nova.mlir" in sys.modules,
    "warned": [str(w.message) for w in caught],
}))
"""


def run(folder: Path, cache: Path, **environment: str) -> dict:
    path = folder / "program.py"
    path.write_text(PROGRAM)
    env = {**os.environ, "NOVA_CACHE": str(cache), "PYTHONPATH": os.getcwd(), **environment}
    out = subprocess.run([sys.executable, str(path)], env=env, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout.splitlines()[-1])


@pytest.mark.slow
def test_warm_process(tmp_path):
    cache = tmp_path / "cache"
    eager = run(tmp_path, cache, NOVA="0")
    cold = run(tmp_path, cache)
    warm = run(tmp_path, cache)
    assert cold["losses"] == pytest.approx(eager["losses"], rel=1e-5)
    assert warm["losses"] == cold["losses"], "the same code from the same state"
    assert (cold["captures"], cold["loads"]) == (1, 0)
    assert (warm["captures"], warm["loads"]) == (0, 1)
    assert not warm["traced"] and not warm["mlir"]
    assert not any("lr_scheduler" in text for text in warm["warned"]), warm["warned"]
    # Damage every stored capture: reported, and captured again.
    files = [path for path in (cache / "capture").rglob("*") if path.is_file()]
    assert files
    for path in files:
        path.write_bytes(path.read_bytes()[:100])
    again = run(tmp_path, cache)
    assert again["captures"] == 1 and again["losses"] == cold["losses"]
    assert any("Nova cache" in text for text in again["warned"])
