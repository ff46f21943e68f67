"""PyTorch's optimizers inside a recorded step.

`step()` of every optimizer runs as ordinary Python (hooks, closures, lazily created state, schedulers' counters),
with three changes while a step is recorded:

  hyper-parameters   floats of `param_groups` are traced numbers: inputs of the graph, read again on each replay
  lazy state         is created before it is recorded, so that it is an input like any later step's state
  the update         of SGD, Adam, AdamW, Adagrad and RMSprop (plain, foreach and fused alike) is one `nova`
                     operation a parameter; other optimizers are recorded operation by operation, on their
                     capturable path, whose step counts are tensors

    _multi_tensor_adamw(params, grads, ...)  ->  p', m', v', _, step' = nova.adam(p, g, m, v, None, step, %lr, ...)
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.optim
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    _default_to_fused_or_foreach,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from nova.capture import general_optimizers
from nova.capture import optimizer_ops as _optimizer_ops  # noqa: F401  (registers the operators)
from nova.capture.patching import no_modes, replaced, stand_in
from nova.capture.scalars import TracedFloat
from nova.capture.signature import Source
from nova.capture.sources import extend

if TYPE_CHECKING:
    from nova.capture.record import Recorder

RECOGNISED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop)
# entries of a parameter group that are numbers even when they were given as an int
_NUMBERS = {
    "lr",
    "momentum",
    "dampening",
    "weight_decay",
    "eps",
    "alpha",
    "lr_decay",
    "lambd",
    "momentum_decay",
    "beta2_decay",
}


class HyperParameters:
    """The traced numbers that stand in `param_groups` while a step is recorded."""

    def __init__(self, recorder: Recorder):
        self.recorder = recorder
        self.optimizers: dict[int, Optimizer] = {}
        self._wrapped: list[tuple[dict[Any, Any], Any, Any, Any, Source]] = []  # table, key, original, traced, source
        self._first: dict[tuple[int, Any], tuple[dict[Any, Any], Any]] = {}  # what stood there before the step

    def wrap(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self.optimizers:
            return
        self.optimizers[id(optimizer)] = optimizer
        self._wrap(optimizer)

    def _wrap(self, optimizer: Optimizer) -> None:
        groups = extend(self.recorder.source_of(optimizer), ("attr", "param_groups"))
        for g, group in enumerate(optimizer.param_groups):
            source = extend(groups, ("item", g))
            for key, value in list(group.items()):
                if type(value) is float or (type(value) is int and key in _NUMBERS):
                    self._put(group, key, value, extend(source, ("item", key)))
                elif type(value) in (tuple, list) and value and all(type(v) is float for v in value):
                    at = extend(source, ("item", key))
                    traced = type(value)(self.recorder.traced(extend(at, ("item", k)), v) for k, v in enumerate(value))
                    group[key] = traced
                    self._wrapped.append((group, key, value, traced, at))
                    self._first.setdefault((id(group), key), (group, value))
        if not isinstance(optimizer, RECOGNISED):
            self._wrap_counts(optimizer)

    def _wrap_counts(self, optimizer: Optimizer) -> None:
        """Step counts that are Python numbers (SparseAdam)."""
        base = self.recorder.source_of(optimizer)
        for name, state in self.states(optimizer):
            if isinstance(state, dict):
                for key, value in state.items():
                    if type(value) in (int, float):
                        self._put(state, key, value, extend(extend(base, ("state", name)), ("item", key)))

    def _put(self, table: dict[Any, Any], key: Any, value: Any, source: Source) -> None:
        traced = table[key] = self.recorder.traced(source, value)
        self._wrapped.append((table, key, value, traced, source))
        self._first.setdefault((id(table), key), (table, value))

    @staticmethod
    def states(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
        for g, group in enumerate(optimizer.param_groups):
            for i, p in enumerate(group["params"]):
                if p in optimizer.state:
                    yield f"{g}.{i}", optimizer.state[p]

    def unwrap(self) -> None:
        """Puts plain numbers back. A number that the step itself changed becomes an effect of the replay."""
        for table, key, original, traced, source in self._wrapped:
            now: Any = table.get(key)
            if now is traced:
                table[key] = original
            elif isinstance(now, TracedFloat):
                self.recorder.assignments.append((source, now, type(original)))
                table[key] = type(original)(now.plain)
            elif type(now) in (tuple, list) and any(isinstance(v, TracedFloat) for v in now):
                for k, v in enumerate(now):
                    if v is not traced[k]:
                        self.recorder.assignments.append((extend(source, ("item", k)), v, float))
                table[key] = type(now)(v.plain if isinstance(v, TracedFloat) else v for v in now)
            elif type(now) in (int, float) and now != original:
                self.recorder.assignments.append((source, now, type(original)))
        self._wrapped.clear()

    def restore(self) -> None:
        """Puts back what stood there before the step, whatever the step or a scheduler set since."""
        for (_, key), (table, value) in self._first.items():
            table[key] = value

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Plain numbers for the time of a host effect (a scheduler), new traced ones afterwards."""
        self.unwrap()
        try:
            yield
        finally:
            self.recorder.phase += 1
            for optimizer in self.optimizers.values():
                self._wrap(optimizer)


def _missing_state(optimizer: Optimizer, group: dict[str, Any]) -> list[Tensor]:
    return [p for p in group["params"] if p.grad is not None and not optimizer.state.get(p)]


def _patched_init_group(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    """`_init_group` that creates missing state outside the recording."""

    def _init_group(self: Optimizer, group: dict[str, Any], *lists: Any, **kwargs: Any) -> Any:
        with no_modes():
            missing = _missing_state(self, group)
            if missing:
                recorder.undo_state(self, missing)
                original(self, group, *([] for _ in lists), **{k: [] for k in kwargs})
        return original(self, group, *lists, **kwargs)

    return _init_group


def _update(
    recorder: Recorder,
    operator: Any,
    tensors: list[Tensor | None],
    outputs: list[Tensor | None],
    *scalars: Any,
    **options: Any,
) -> None:
    """Runs and records one update, and writes its results back."""
    results = operator(*tensors, *(recorder.scalar_tensor(s) for s in scalars), **options)
    for target, value in zip(outputs, results, strict=True):
        if target is not None:
            target.copy_(value)


def _uncounted(fused: bool | None, *tensors: list[Tensor]) -> Any:
    """Where eager's fused kernels write to these tensors: their versions stay as they are."""
    written = tuple(t for ts in tensors for t in ts if t is not None)
    return torch.autograd._unsafe_preserve_version_counter(written) if fused else nullcontext()


def _plain(tensors: list[Tensor], differentiable: bool, *grads: list[Tensor]) -> bool:
    """Whether the one-operation form means the same: dense, real, no gradients through the update."""
    return not differentiable and not any(
        t.is_complex() or t.layout is not torch.strided for t in (*tensors, *(g for gs in grads for g in gs))
    )


def _found_inf(recorder: Recorder, found_inf: Tensor | None) -> Tensor | None:
    return found_inf if found_inf is not None else recorder.found_inf


def _unscaled(grads: list[Tensor], grad_scale: Tensor | None) -> None:
    """Fused optimizers divide by the scale themselves and leave the divided gradients behind."""
    if grad_scale is not None:
        for g in grads:
            g.div_(grad_scale)


def _by_foreach(params: list[Tensor], foreach: bool | None, fused: bool | None) -> bool:
    """Whether eager PyTorch would run SGD's multi-tensor code."""
    if foreach is None and fused is None:
        _, foreach = _default_to_fused_or_foreach(params, differentiable=False, use_fused=False)
    return bool(foreach)


def _look_ahead(
    recorder: Recorder, grads: list[Tensor], buffers: list[Tensor], momentum: Any, found_inf: Tensor | None
) -> None:
    """What multi-tensor SGD with Nesterov momentum leaves in `.grad`: it adds the momentum there, in place."""
    factor = recorder.scalar_tensor(momentum)
    for g, buffer in zip(grads, buffers, strict=True):
        ahead = g + buffer * factor
        g.copy_(ahead if found_inf is None else torch.where(found_inf.reshape(()) != 0, g, ahead))


def _patched_sgd(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def sgd(
        params, d_p_list, momentum_buffer_list, has_sparse_grad=False, foreach=None, fused=None, grad_scale=None,
        found_inf=None, *, weight_decay, momentum, lr, dampening, nesterov, maximize,
    ):  # fmt: skip
        if not _plain(params, False, d_p_list) or (isinstance(lr, Tensor) and lr.requires_grad):
            with general_optimizer():
                return original(
                    params, d_p_list, momentum_buffer_list, has_sparse_grad, False, False, weight_decay=weight_decay,
                    momentum=momentum, lr=lr, dampening=dampening, nesterov=nesterov, maximize=maximize,
                )  # fmt: skip
        found_inf = _found_inf(recorder, found_inf)
        moving = momentum != 0
        with torch._C.DisableTorchFunction():
            fresh, first = [i for i, b in enumerate(momentum_buffer_list) if b is None] if moving else [], None
            if fresh:
                dampened = dampening != 0
                recorder.undo_state(recorder.stepping[-1] if recorder.stepping else None, [params[i] for i in fresh])
                with no_modes():
                    for i in fresh:
                        momentum_buffer_list[i] = torch.zeros_like(params[i], memory_format=torch.preserve_format)
                    # zeros are exact for a first step unless it is dampened: then a flag that the step itself clears
                    first = torch.ones((), dtype=torch.float32, device=params[0].device) if dampened else None
            with _uncounted(fused, params, d_p_list, momentum_buffer_list):
                _unscaled(d_p_list, grad_scale)
                for i, (p, g) in enumerate(zip(params, d_p_list, strict=True)):
                    buf = momentum_buffer_list[i] if moving else None
                    _update(
                        recorder, torch.ops.nova.sgd.default, [p, g, buf, None], [p, buf], lr, momentum, dampening,
                        weight_decay, nesterov=nesterov, maximize=maximize, found_inf=found_inf,
                        first=first if i in fresh else None,
                    )  # fmt: skip
                if nesterov and moving and not maximize and _by_foreach(params, foreach, fused) and weight_decay == 0:
                    _look_ahead(recorder, d_p_list, momentum_buffer_list, momentum, found_inf)
            if first is not None:
                done = torch.zeros_like(first)
                first.copy_(done if found_inf is None else torch.where(found_inf.reshape(()) != 0, first, done))

    return sgd


def _patched_adam(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def adam(
        params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, foreach=None, capturable=False,
        differentiable=False, fused=None, grad_scale=None, found_inf=None, has_complex=False,
        decoupled_weight_decay=False, *, amsgrad, beta1, beta2, lr, weight_decay, eps, maximize,
    ):  # fmt: skip
        if not _plain(params, differentiable, grads):
            with general_optimizer():
                return original(
                    params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, False, True, differentiable,
                    False, None, None, has_complex, decoupled_weight_decay, amsgrad=amsgrad, beta1=beta1, beta2=beta2,
                    lr=lr, weight_decay=weight_decay, eps=eps, maximize=maximize,
                )  # fmt: skip
        found_inf = _found_inf(recorder, found_inf)
        moments = (exp_avgs, exp_avg_sqs, max_exp_avg_sqs)
        with torch._C.DisableTorchFunction(), _uncounted(fused, params, grads, *moments):
            _unscaled(grads, grad_scale)
            for i, (p, g) in enumerate(zip(params, grads, strict=True)):
                largest = max_exp_avg_sqs[i] if amsgrad else None
                _update(
                    recorder, torch.ops.nova.adam.default, [p, g, exp_avgs[i], exp_avg_sqs[i], largest, state_steps[i]],
                    [p, exp_avgs[i], exp_avg_sqs[i], largest, state_steps[i]], lr, beta1, beta2, eps, weight_decay,
                    decoupled=decoupled_weight_decay, amsgrad=amsgrad, maximize=maximize, found_inf=found_inf,
                )  # fmt: skip

    return adam


def _patched_adagrad(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def adagrad(
        params, grads, state_sums, state_steps, fused=None, grad_scale=None, found_inf=None, has_sparse_grad=False,
        foreach=None, differentiable=False, has_complex=False, *, lr, weight_decay, lr_decay, eps, maximize,
    ):  # fmt: skip
        if not _plain(params, differentiable, grads):
            with general_optimizer():
                return original(
                    params, grads, state_sums, state_steps, False, None, None, has_sparse_grad, False, differentiable,
                    has_complex, lr=lr, weight_decay=weight_decay, lr_decay=lr_decay, eps=eps, maximize=maximize,
                )  # fmt: skip
        found_inf = _found_inf(recorder, found_inf)
        with torch._C.DisableTorchFunction(), _uncounted(fused, params, grads, state_sums):
            _unscaled(grads, grad_scale)
            for p, g, total, step in zip(params, grads, state_sums, state_steps, strict=True):
                _update(
                    recorder, torch.ops.nova.adagrad.default, [p, g, total, step], [p, total, step], lr, lr_decay, eps,
                    weight_decay, maximize=maximize, found_inf=found_inf,
                )  # fmt: skip

    return adagrad


def _patched_rmsprop(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def rmsprop(
        params, grads, square_avgs, grad_avgs, momentum_buffer_list, state_steps, foreach=None, maximize=False,
        differentiable=False, capturable=False, has_complex=False, *, lr, alpha, eps, weight_decay, momentum, centered,
    ):  # fmt: skip
        if not _plain(params, differentiable, grads):
            with general_optimizer():
                return original(
                    params, grads, square_avgs, grad_avgs, momentum_buffer_list, state_steps, False, maximize,
                    differentiable, True, has_complex, lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay,
                    momentum=momentum, centered=centered,
                )  # fmt: skip
        found_inf = _found_inf(recorder, None)
        moving = momentum > 0
        with torch._C.DisableTorchFunction():
            for i, (p, g) in enumerate(zip(params, grads, strict=True)):
                mean, buf = (grad_avgs[i] if centered else None), (momentum_buffer_list[i] if moving else None)
                _update(
                    recorder, torch.ops.nova.rmsprop.default, [p, g, square_avgs[i], mean, buf, state_steps[i]],
                    [p, square_avgs[i], mean, buf, state_steps[i]], lr, alpha, eps, momentum, weight_decay,
                    centered=centered, maximize=maximize, found_inf=found_inf,
                )  # fmt: skip

    return rmsprop


def _zero_grad(
    recorder: Recorder, original: Callable[..., Any], parameters: Callable[[Any], Iterator[Tensor]]
) -> Callable[..., Any]:
    """zero_grad(set_to_none=True) assigns without looking: whether a gradient was there must not matter."""

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        if not set_to_none:
            return original(self, set_to_none)
        for p in parameters(self):
            recorder.leaves.assigned(p)
            with torch._C.DisableTorchFunction():
                p.grad = None
        return None

    return zero_grad


def _optimizer_parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


@contextmanager
def general_optimizer() -> Iterator[None]:
    """PyTorch's own optimizer code with step counts left in tensors, as under a compiler."""
    with replaced(torch.compiler, "is_compiling", lambda: True):
        yield


def patch(recorder: Recorder, stack: ExitStack) -> None:
    """Installs everything for the time of one recording."""
    optim = torch.optim
    for module, name, make in (
        (sys.modules["torch.optim.sgd"], "sgd", _patched_sgd), (sys.modules["torch.optim.adam"], "adam", _patched_adam),
        (sys.modules["torch.optim.adagrad"], "adagrad", _patched_adagrad),
        (sys.modules["torch.optim.rmsprop"], "rmsprop", _patched_rmsprop),
    ):  # fmt: skip
        stack.enter_context(stand_in(module, name, make(recorder, getattr(module, name))))
    general_optimizers.patch(recorder, stack)
    for kind in vars(optim).values():
        if isinstance(kind, type) and issubclass(kind, Optimizer) and "_init_group" in vars(kind):
            stack.enter_context(stand_in(kind, "_init_group", _patched_init_group(recorder, vars(kind)["_init_group"])))
    stack.enter_context(
        stand_in(Optimizer, "zero_grad", _zero_grad(recorder, Optimizer.zero_grad, _optimizer_parameters))
    )
    module_zero = _zero_grad(recorder, torch.nn.Module.zero_grad, lambda m: m.parameters())
    stack.enter_context(stand_in(torch.nn.Module, "zero_grad", module_zero))
    _hooks(recorder, stack)


def _hooks(recorder: Recorder, stack: ExitStack) -> None:
    running: list[ExitStack] = []
    this = threading.get_ident()

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if threading.get_ident() != this:
            return  # the hooks are PyTorch's global ones, and another thread's optimizer is no part of the step
        context = ExitStack()
        running.append(context)
        recorder.hyper.wrap(optimizer)
        recorder.stepping.append(optimizer)
        context.callback(recorder.stepping.pop)
        if not isinstance(optimizer, RECOGNISED):
            recorder.general.append(optimizer)
            if type(optimizer).__module__.startswith("torch.optim"):
                _prepare_general(recorder, optimizer, context)

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if threading.get_ident() == this:
            running.pop().close()

    def abandon() -> None:
        while running:
            running.pop().close()

    stack.callback(register_optimizer_step_pre_hook(before).remove)
    stack.callback(register_optimizer_step_post_hook(after).remove)
    stack.callback(abandon)


def _prepare_general(recorder: Recorder, optimizer: Optimizer, context: ExitStack) -> None:
    """PyTorch's less used optimizers: single-tensor code, step counts in tensors."""
    context.enter_context(general_optimizer())
    for group in optimizer.param_groups:
        for key, value in (("capturable", True), ("foreach", False)):
            if key in group:
                context.callback(group.__setitem__, key, group[key])
                group[key] = value
    if isinstance(optimizer, torch.optim.SparseAdam):
        with no_modes():
            for group in optimizer.param_groups:
                for p in _missing_state(optimizer, group):
                    recorder.undo_state(optimizer, [p])
                    zeros = torch.zeros_like(p, memory_format=torch.preserve_format)
                    optimizer.state[p] = {"step": 0, "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
        recorder.hyper._wrap_counts(optimizer)
