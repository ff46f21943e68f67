"""Randomness of a step: one seed drawn from PyTorch's generator, and a static stream for every draw.

    torch.manual_seed(0); step()     seed = randint() of the generator; dropout 1 = stream 0, dropout 2 = stream 1
    replay                           seed = the next randint(); the streams are in the graph

While a step is recorded the generator moves at every draw, so that its state identifies the draw: activation
checkpointing saves the state, restores it and runs the forward again, and that must find the same stream.
At the end the generator is left as a replay leaves it: one seed further than at the start.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nova.errors import CaptureError, SourceLine

SEED_BOUND = 2**63 - 1


def draw_seed() -> int:
    """One step's seed. Replays call this too."""
    return int(torch.randint(SEED_BOUND, (), generator=torch.default_generator))


class StepRandom:
    """Streams and the generator's states during one recording."""

    def __init__(self) -> None:
        with torch._C.DisableTorchFunction():
            self.start = torch.default_generator.get_state()
        self._seen: dict[bytes, int] = {}
        self._known: set[bytes] = set()  # states that draws of this step led to
        self.seed: Tensor | None = None
        self.streams = 0

    def _state(self) -> bytes:
        return torch.default_generator.get_state().numpy().tobytes()

    def ensure_seed(self) -> Tensor:
        """The seed tensor, drawn when the first draw needs it (dispatch modes must be off)."""
        if self.seed is None:
            self._known.add(self.start.numpy().tobytes())
            now = torch.default_generator.get_state()
            torch.default_generator.set_state(self.start)
            self.seed = torch.tensor(draw_seed())
            torch.default_generator.set_state(now)
        return self.seed

    def next_stream(self, line: SourceLine) -> int:
        """The stream of a draw: a new one, or the earlier draw's when its generator state was restored."""
        self.ensure_seed()
        before = self._state()
        stream = self._seen.get(before)
        if stream is None:
            if before not in self._known:
                raise CaptureError(
                    "the step seeds PyTorch's random generator; seed it outside the step (a replayed step draws one "
                    "seed from it)",
                    line,
                )
            stream = self._seen[before] = self.streams
            self.streams += 1
        torch.rand((), generator=torch.default_generator)
        self._known.add(self._state())
        return stream

    def finish(self) -> None:
        """Leaves the generator as a replay would."""
        if self.seed is not None:
            torch.default_generator.set_state(self.start)
            draw_seed()

    def rollback(self) -> None:
        torch.default_generator.set_state(self.start)
