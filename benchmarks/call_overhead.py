"""Host time of a compiled step around its kernels: guards, gathering of tensors and numbers, effects, outputs.

    python benchmarks/call_overhead.py            both models, checked natively
    python benchmarks/call_overhead.py --python   and by the checks without native code

No kernel runs: the executable is replaced by one that returns fresh empty outputs at once, so what is measured is
what Nova adds to every call. Nothing is reported while the machine is loaded. Targets: 200 us for a 12-layer GPT-2
(592 parameter and state tensors), 35 us for a 4-layer MLP with AdamW, guards and gathering alone.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
from common import interleave, quiet, save
from torch import nn
from torch.nn import functional as F

import nova


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.ln1(x)).chunk(3, -1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self, layers: int = 12, width: int = 64, vocabulary: int = 97, length: int = 16):
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight

    def forward(self, ids):
        x = self.token(ids) + self.position.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt():
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(ids, targets):
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, (torch.randint(97, (2, 16)), torch.randint(97, (2, 16)))


def mlp():
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x, y):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, (torch.randn(32, 64), torch.randn(32, 64))


class Nothing:
    """An executable that runs no kernel."""

    def __init__(self, signature):
        self.outputs = [torch.zeros(o.type.shape) for o in signature.outputs if o.kind != "state"]

    def reserve(self):
        pass

    def __call__(self, inputs, scalars=(), seed=0):
        return self.outputs


def measure(build, native: bool) -> dict[str, float] | None:
    """Medians in microseconds; None if the machine was too loaded to tell."""
    os.environ["NOVA_NATIVE"] = "1" if native else "0"
    torch.manual_seed(0)
    function, args = build()
    step = nova.jit(function, backend="interpret")
    step(*args)
    step(*args)
    variant = step._variants[0]
    binding = variant.bindings[0]
    variant.executable = Nothing(variant.capture.signature)
    assert binding.enter(args, {}) is not None
    contestants = {"guards": lambda: binding.enter(args, {}), "call": lambda: step(*args)}
    times = interleave(contestants, rounds=200 if native else 30, inner=20)
    if not all(quiet(timing) for timing in times.values()):
        return None
    return {
        "tensors": len(binding.stable),
        "objects": len(binding.dicts) + len(binding.lists),
        "guards_us": times["guards"].median * 1e6,
        "call_us": times["call"].median * 1e6,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--python", action="store_true", help="also measure the checks without native code")
    chosen = parser.parse_args()
    rows = []
    print(f"{'model':6} {'checks':7} {'tensors':>8} {'dicts, lists':>13} {'guards us':>10} {'whole call us':>14}")
    for name, build in (("MLP", mlp), ("GPT-2", gpt)):
        for native in (True, False) if chosen.python else (True,):
            found = measure(build, native)
            if found is None:
                return 1
            kind = "native" if native else "Python"
            rows.append({"model": name, "checks": kind, **found})
            print(
                f"{name:6} {kind:7} {found['tensors']:8} {found['objects']:13} {found['guards_us']:10.1f} "
                f"{found['call_us']:14.1f}"
            )
    print("saved", save("call_overhead", rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
