"""torch.optim.swa_utils.AveragedModel inside a recorded step.

ema.update_parameters(model)     PyTorch asks `n_averaged == 0` in Python and copies; here every call averages, and the
                                 model's own value is selected where the count is still zero
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from nova.capture.patching import stand_in


def patch(stack: ExitStack) -> None:
    swa = sys.modules.get("torch.optim.swa_utils")
    if swa is not None:
        stack.enter_context(stand_in(swa.AveragedModel, "update_parameters", _update_parameters))


@torch.no_grad()
def _update_parameters(self: Any, model: torch.nn.Module) -> None:
    mine: Iterable[Tensor] = self.parameters()
    theirs: Iterable[Tensor] = model.parameters()
    if self.use_buffers:
        mine = itertools.chain(self.module.parameters(), self.module.buffers())
        theirs = itertools.chain(theirs, model.buffers())
    else:
        for own, other in zip(self.module.buffers(), model.buffers(), strict=True):
            own.detach().copy_(other.detach())
    groups: dict[Any, list[tuple[Tensor, Tensor]]] = {}
    for own, other in zip(mine, theirs, strict=False):
        groups.setdefault((own.device, own.dtype), []).append((own.detach(), other.detach().to(own.device)))
    for (device, _), pairs in groups.items():
        count = self.n_averaged.to(device)
        for (own, other), average in zip(pairs, _averages(self, pairs, count), strict=True):
            own.copy_(torch.where(count == 0, other.to(own.dtype), average))
    self.n_averaged += 1


def _averages(self: Any, pairs: list[tuple[Tensor, Tensor]], count: Tensor) -> list[Tensor]:
    """What the averaged model's function makes of each pair, whose tensors stay as they are."""
    several = self.multi_avg_fn
    # PyTorch's own equal-weight average hands 1 / (count + 1) to an operation that reads it.
    if several is not None and getattr(several, "__qualname__", "") != "get_swa_multi_avg_fn.<locals>.swa_update":
        averages = [own.clone() for own, _ in pairs]
        several(averages, [other for _, other in pairs], count)
        return averages
    function = self.avg_fn or (lambda own, other, count: own + (other - own) / (count + 1))
    return [function(own, other, count).to(own.dtype) for own, other in pairs]
