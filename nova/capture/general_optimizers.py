"""Numbers of the optimizers that are recorded operation by operation: as exact as the Python numbers of eager.

Eager reads a step count out of its float32 tensor and computes with Python's numbers, which are float64. A recording
cannot read; in the arithmetic of the tensor, `1 - beta2**step` loses most of its digits while `step` is small.

    nadam, adamax    `_get_value(step)`, as eager has it, gives a traced number: the tensor's value in float64
    radam, asgd      decide on their numbers, so they stay on the path that leaves them in tensors: float64 ones
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import Tensor

from nova.capture.patching import no_modes, stand_in
from nova.capture.scalars import Root, TracedFloat

if TYPE_CHECKING:
    from nova.capture.record import Recorder

_COUNTED = {"radam": ("state_steps",), "asgd": ("state_steps", "mus", "etas")}


def patch(recorder: Recorder, stack: ExitStack) -> None:
    """Installs both for the time of one recording."""
    for name in ("nadam", "adamax"):
        module = sys.modules[f"torch.optim.{name}"]
        update = f"_single_tensor_{name}"
        stack.enter_context(stand_in(module, "_get_value", _reader(recorder)))
        stack.enter_context(stand_in(module, update, _with_numbers(getattr(module, update))))
    for name, lists in _COUNTED.items():
        module = sys.modules[f"torch.optim.{name}"]
        update = f"_single_tensor_{name}"
        stack.enter_context(stand_in(module, update, _with_doubles(getattr(module, update), lists)))


def _reader(recorder: Recorder) -> Callable[[Any], Any]:
    def _get_value(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        with no_modes():
            value = float(x)
        return TracedFloat(value, recorder, x.double(), (Root(None, 0, value),))

    return _get_value


def _with_numbers(original: Callable[..., None]) -> Callable[..., None]:
    def update(*lists: Any, capturable: bool, **options: Any) -> None:
        original(*lists, capturable=False, **options)

    return update


def _with_doubles(original: Callable[..., None], names: tuple[str, ...]) -> Callable[..., None]:
    """The update computes with float64 copies of its numbers; what it leaves in them goes back where it was."""
    order = original.__code__.co_varnames

    def update(*lists: list[Tensor], **options: Any) -> None:
        given = list(lists)
        for name in names:
            given[order.index(name)] = [t.double() for t in lists[order.index(name)]]
        original(*given, **options)
        for name in names:
            at = order.index(name)
            for kept, now in zip(lists[at], given[at], strict=True):
                kept.add_(1) if name == "state_steps" else kept.copy_(now)

    return update
