"""Learning-rate schedulers inside a step: host arithmetic that runs for real now and again on every replay.

opt.step(); sched.step()     the optimizer reads lr in phase 0; effect 0 is sched.step(); later reads are phase 1
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import lr_scheduler

from nova.capture.patching import no_modes, replaced
from nova.capture.scalars import TracedFloat
from nova.errors import CaptureError

if TYPE_CHECKING:
    from nova.capture.record import Recorder


def _plain(recorder: Recorder, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        raise recorder.fail(CaptureError(
            "a scheduler reads a tensor's value inside the step (ReduceLROnPlateau.step(loss)); call it outside",
            recorder.lines.here(),
        ))  # fmt: skip
    return value.concrete() if isinstance(value, TracedFloat) else value


def _snapshot(scheduler: Any) -> dict[str, Any]:
    keep = {"optimizer", "_schedulers", "lr_lambdas", "_scale_fn_ref", "_scale_fn_custom"}
    state = {}
    for key, value in vars(scheduler).items():
        state[key] = (
            copy.copy(value)
            if key in keep or callable(value)
            else copy.deepcopy(value)
            if key != "optimizer"
            else value
        )
    state["optimizer"] = vars(scheduler).get("optimizer")
    return state


def patch(recorder: Recorder, stack: ExitStack) -> None:
    depth = [0]

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            if depth[0]:
                return original(self, *args, **kwargs)
            args = tuple(_plain(recorder, a) for a in args)
            kwargs = {k: _plain(recorder, v) for k, v in kwargs.items()}
            recorder.undo_scheduler(self, _snapshot)
            effect = {
                "kind": "call",
                "target": recorder.source_of(self),
                "method": "step",
                "args": list(args),
                "kwargs": kwargs,
            }
            depth[0] += 1
            try:
                with recorder.host_effect(effect), no_modes():
                    return original(self, *args, **kwargs)
            finally:
                depth[0] -= 1

        return step

    kinds = {v for v in vars(lr_scheduler).values() if isinstance(v, type)}
    kinds |= set(_subclasses(lr_scheduler.LRScheduler))
    for kind in kinds:
        if "step" in vars(kind) and issubclass(kind, lr_scheduler.LRScheduler):
            stack.enter_context(replaced(kind, "step", wrap(vars(kind)["step"])))


def _subclasses(kind: type) -> list[type]:
    direct: list[type] = kind.__subclasses__()
    return [found for sub in direct for found in (sub, *_subclasses(sub))]
