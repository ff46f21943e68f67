"""torch.amp.GradScaler inside a recorded step.

scaler.scale(loss)    loss * scale, where the scale is a lifted 0-d tensor
scaler.step(opt)      the optimizer always runs; its update is predicated on found_inf
scaler.update()       the new scale and growth count by 0-d arithmetic (rules.py)
scaler.get_scale()    a traced number that may flow into tensors and outputs, but not into a Python decision
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from nova.capture.optimizers import RECOGNISED
from nova.capture.patching import no_modes, stand_in
from nova.capture.scalars import Root, TracedFloat

if TYPE_CHECKING:
    from nova.capture.record import Recorder


@contextmanager
def predicated(recorder: Recorder, found_inf: Tensor) -> Iterator[None]:
    """Everything changed inside the block keeps its old value where an infinity was found."""
    old: dict[int, tuple[Tensor, Tensor]] = {}
    previous = recorder.values.first_write

    def remember(storage: Any, t: Tensor) -> None:
        previous(storage, t)
        if id(storage) not in old:
            offset, sizes, strides, dtype, _ = storage.base
            with no_modes():
                whole = t.detach().view(dtype).as_strided(sizes, strides, offset)
                copy = whole.clone()
            recorder.values.define(copy, storage.views[storage.base].node)
            old[id(storage)] = (whole, copy)

    recorder.values.first_write = remember
    try:
        yield
    finally:
        recorder.values.first_write = previous
    for whole, copy in old.values():
        whole.copy_(torch.where(found_inf != 0, copy, whole))


def patch(recorder: Recorder, stack: ExitStack) -> None:
    lazy_init = GradScaler._lazy_init_scale_growth_tracker

    def _lazy_init_scale_growth_tracker(self: GradScaler, dev: torch.device) -> None:
        """The scale is created before it is recorded: an input, as on every later step."""
        with no_modes():
            lazy_init(self, dev)

        def undo() -> None:
            self._scale = self._growth_tracker = None

        recorder.undo.append(undo)

    def _maybe_opt_step(
        self: GradScaler, optimizer: Any, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        found = list(optimizer_state["found_inf_per_device"].values())
        found_inf = found[0]
        for other in found[1:]:
            found_inf = found_inf + other.to(found_inf.device)
        if isinstance(optimizer, RECOGNISED) and all(
            g.grad is None or g.grad.layout is torch.strided for g in _params(optimizer)
        ):
            recorder.found_inf = found_inf
            try:
                return optimizer.step(*args, **kwargs)
            finally:
                recorder.found_inf = None
        with predicated(recorder, found_inf):
            return optimizer.step(*args, **kwargs)

    def get_scale(self: GradScaler) -> float:
        if not self._enabled:
            return 1.0
        if self._scale is None:
            return self._init_scale
        scale = self._scale
        with no_modes():
            value = float(scale)
        return TracedFloat(value, recorder, scale.double(), (Root(None, 0, value),))

    def remember(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: GradScaler, *args: Any, **kwargs: Any) -> Any:
            recorder.note_scaler(self)
            return method(self, *args, **kwargs)

        return run

    for name, value in (
        ("_lazy_init_scale_growth_tracker", _lazy_init_scale_growth_tracker), ("_maybe_opt_step", _maybe_opt_step),
        ("get_scale", get_scale), ("scale", remember(GradScaler.scale)), ("update", remember(GradScaler.update)),
        ("unscale_", remember(GradScaler.unscale_)),
    ):  # fmt: skip
        stack.enter_context(stand_in(GradScaler, name, value))


def _params(optimizer: Any) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])
