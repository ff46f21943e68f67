"""Planned peak of the GPT-2-structure step against what eager PyTorch allocates: both count live state."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import typer

import nova
from nova.measure import bytes_held, peak_allocated

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests")]


def main(
    batch: int = 8, length: int = 128, width: int = 192, heads: int = 6, layers: int = 4, vocab: int = 256
) -> None:
    import models
    from common import save

    torch.manual_seed(0)
    case = models.build(
        "gpt2", steps=2, batch=batch, length=length, width=width, heads=heads, layers=layers, vocab=vocab
    )
    case.step(*case.batches[0])  # optimizer state exists
    state = bytes_held(case.state().values())
    eager = state + peak_allocated(lambda: case.step(*case.batches[1]))
    memory = nova.explain(case.step, *case.batches[1]).memory
    result = {
        "state": state, "eager_peak": eager, "nova_peak": memory.step_bytes + state, "arena": memory.arena,
        "lower_bound": memory.lower_bound, "ratio": (memory.step_bytes + state) / eager,
    }  # fmt: skip
    for name, value in result.items():
        print(f"{name:12} {value:,.3f}" if isinstance(value, float) else f"{name:12} {value:,}")
    print("saved", save("memory", result))


if __name__ == "__main__":
    typer.run(main)
