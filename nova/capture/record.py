"""Records one real run of a training step as a functional graph.

The step runs as it would without Nova, on its real tensors, under a dispatch mode that sees every operation of
the forward, the backward and the optimizer, and a function mode that sees PyTorch's Python calls:

    loss = model(x); loss.backward(); opt.step()
        ->  %w %x %m %v ... placeholders        what the step read: parameters, state, arguments, numbers, the seed
            aten / nova operations               values only, nothing changes in place
            output (%loss, %w', %m', %v', ...)   what it returned, what it changed

`record` returns everything a replay and its guards need. If Nova refuses the step, model, optimizer, gradients and
generator are put back as they were; an exception of the user's own leaves what eager leaves.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, fx
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from nova.capture import averaging, dynamic, finish, optimizers, scaler, schedulers
from nova.capture import cuda_rules as _cuda_rules  # noqa: F401  (registers the rules)
from nova.capture import random_rules as _random_rules  # noqa: F401  (registers the rules)
from nova.capture.function_mode import FunctionMode
from nova.capture.functionalize import Lifted, Storage, Values
from nova.capture.grads import Leaves
from nova.capture.lines import Lines
from nova.capture.patching import no_modes, replaced, stand_in
from nova.capture.rng import StepRandom
from nova.capture.rules import RULES, check_results, find_rule
from nova.capture.scalars import MATH_FUNCTIONS, Root, ScalarGuard, TracedFloat, math_replacement
from nova.capture.signature import CapturedStep, Source, TensorType
from nova.capture.sources import ObjectMap, is_user_file
from nova.capture.versions import Versions
from nova.capture.views import aten, geometry, is_leaf
from nova.errors import CaptureError, NovaError

_CPU = torch.device("cpu")
_current_node: Callable[[], Any] = torch._C._current_autograd_node
_sequence: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


@dataclass
class Recording:
    """One run of a step and all that was learned from it."""

    result: Any
    step: CapturedStep
    inputs: list[Any]  # what each input stood for: tensors, numbers (float), None for the seed
    members: list[list[tuple[Source | None, Tensor]]]  # for each input, every tensor that is a window on it
    consts: list[Any]  # objects without a source: Source("const", k) is consts[k]
    scalar_guards: list[ScalarGuard]
    grad_guards: list[tuple[Source, bool]]  # (leaf, whether its .grad must be None at the start)
    grads_used: list[Source]  # leaves whose .grad is an input, perhaps under another name
    traced: list[Source]  # numbers that may change freely, apart from scalar_guards
    modules: list[torch.nn.Module]
    optimizers: list[torch.optim.Optimizer]
    general_optimizers: list[torch.optim.Optimizer]  # recorded operation by operation
    once: list[str] = field(default_factory=list)  # why this run must not be replayed (state was created in it)
    rollback: Callable[[], None] = lambda: None


class Recorder(TorchDispatchMode):
    """The dispatch mode and everything it keeps while a step runs."""

    def __init__(self, objects: ObjectMap):
        super().__init__()
        self.objects = objects
        self.graph = fx.Graph()
        self.anchor = self.graph.placeholder("end")  # placeholders stand before it, operations after it
        self.values = Values(self.emit, self.placeholder, self.lifted_input, self.at_start)
        self.values.first_write = self.back_up
        self.values.canonical = self.canonical
        self.values.external = lambda t: objects.get(t) is not None
        self.values.ambiguous = self.forbid_replay
        self.lines = Lines()
        self.line = self.lines.here()
        self.random = StepRandom()
        self.leaves = Leaves()
        self.versions = Versions(tensor for tensor, _ in objects.tensors)
        self.hyper = optimizers.HyperParameters(self)
        self.lifted: list[Lifted] = []
        self.scalars: dict[tuple[Source, int], tuple[Root, fx.Node, Tensor]] = {}
        self.roots: dict[tuple[Source, int], Root] = {}
        self.constants: dict[float, Tensor] = {}
        self.scalar_guards: dict[ScalarGuard, None] = {}
        self.consts: list[Any] = []
        self.effects: list[dict[str, Any]] = []
        self.assignments: list[tuple[Source, Any, type]] = []
        self.rebound: dict[int, tuple[Tensor, Tensor]] = {}
        self.general: list[torch.optim.Optimizer] = []
        self.stepping: list[torch.optim.Optimizer] = []
        self.found_inf: Tensor | None = None
        self.undo: list[Callable[[], None]] = []
        self.written: list[Storage] = []  # inputs that were written to, with what they held
        self.phase = 0
        self.active = True
        self.error: NovaError | None = None
        self.once: list[str] = []
        self.has_dynamic = False  # some size depends on data
        self.dynamic: dict[tuple[int, ...], list[fx.Node]] = {}  # nodes of each data-dependent shape
        self.literal_sizes = False  # the user wrote the sizes that the running call asks for
        self.size_like: fx.Node | None = None  # what the user's expand_as names
        self.literal_shape: list[int] | None = None  # of the running reshape, as the user wrote it
        self._operands: dict[int, Sequence[fx.Node]] = {}  # autograd sequence number -> operands of its forward
        self.recomputing: int | None = None  # the checkpointed region that runs again
        self._regions: dict[int, int] = {}
        self._seed_node: fx.Node | None = None
        self._seeds: dict[torch.device, Tensor] = {}
        self.grad_scalers: list[Any] = []
        self._by_storage: dict[int, list[Tensor]] | None = None

    # ---- dispatch ----

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            rule = RULES.get(func)
            if rule is None:
                rule = RULES[func] = find_rule(func)
            self.line = self.lines.current()
            try:
                return rule(self, func, args, kwargs or {})
            except NovaError as error:
                if error.source is None:
                    error = type(error)(str(error), self.line)
                raise self.fail(error) from None

    def fail(self, error: NovaError) -> NovaError:
        """Remembers the first refusal: the user's own `except` must not swallow it."""
        self.error = self.error or error
        return error

    # ---- nodes ----

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # wrapping every dispatch for the benefit of torch.compile would cost more than the dispatch

    def note_leaf(self, t: Tensor) -> None:
        if t.requires_grad and id(t) not in self.leaves.leaves and is_leaf(t):
            self.leaves.note(t)

    def nodes(self, value: Any) -> Any:
        """Arguments of an operation with tensors replaced by their nodes."""
        if isinstance(value, Tensor):
            self.note_leaf(value)
            return self.values.node(value)
        if type(value) in (list, tuple):
            widened = self.values.widened
            found = type(value)(self.nodes(v) for v in value)
            # A window beside the earlier ones made its input wider: what was found before is not in the graph any more.
            return found if widened == self.values.widened else self.nodes(value)
        return value

    def emit(self, target: Any, args: tuple[Any, ...], type_: Any, kwargs: dict[str, Any] | None = None) -> fx.Node:
        """Appends one operation."""
        if self.has_dynamic:
            target, args = dynamic.arguments(self, target, args, type_)
        node = self.graph.create_node("call_function", target, args, kwargs or {})
        node.meta["type"] = type_
        node.meta["src"] = self.line
        if self.has_dynamic or target in dynamic.DATA_DEPENDENT:
            dynamic.mark(self, node)
            if node.args and isinstance(node.args[0], fx.Node):
                self.remember_operands(node.all_input_nodes)
        if self.recomputing is not None or type(_current_node()).__name__ == "CheckpointFunctionBackward":
            self.mark_recomputed(node)
        return node

    def remember_operands(self, nodes: Sequence[fx.Node]) -> None:
        """The operands of the forward operation that is running: its derivative may need their sizes."""
        if _current_node() is None and nodes:
            self._operands.setdefault(_sequence() - 1, nodes)

    def forward_operands(self) -> Sequence[fx.Node]:
        """The operands of the forward operation whose derivative is running."""
        return self._operands.get(_current_node()._sequence_nr(), ()) if self.lines.in_formula() else ()

    def forward_operand(self) -> fx.Node | None:
        """The first of them."""
        return next(iter(self.forward_operands()), None)

    def forbid_replay(self, reason: str) -> None:
        """This run is right, but another would not be: the next call records again."""
        if reason not in self.once:
            self.once.append(reason)

    def mark_recomputed(self, node: fx.Node) -> None:
        """meta["recompute"]: a checkpointed forward that runs again must not be merged with its first run."""
        region = self.recomputing
        if region is None:
            key = _current_node()._sequence_nr()
            region = self._regions.setdefault(key, len(self._regions))
        node.meta["recompute"] = region

    def at_start(self, target: Any, args: tuple[Any, ...], type_: Any) -> fx.Node:
        """An operation on a fresh placeholder, before everything recorded so far."""
        first = self.anchor
        for a in args:
            if isinstance(a, fx.Node) and a.op != "placeholder":
                first = a
        with self.graph.inserting_after(first):
            node = self.graph.create_node("call_function", target, args, {})
        node.meta["type"] = type_
        node.meta["src"] = self.line
        return node

    def placeholder(self, type_: TensorType) -> fx.Node:
        with self.graph.inserting_before(self.anchor):
            node = self.graph.placeholder("input")
        node.meta["type"] = type_
        node.meta["src"] = self.line
        return node

    def item(self, whole: fx.Node, index: int, type_: TensorType | None) -> fx.Node:
        node = self.graph.create_node("call_function", operator.getitem, (whole, index), {})
        node.meta["type"] = type_
        node.meta["src"] = self.line
        if "dynamic" in whole.meta:
            dynamic.mark(self, node)
        if "recompute" in whole.meta:
            node.meta["recompute"] = whole.meta["recompute"]
        return node

    def cast(self, node: fx.Node, dtype: torch.dtype, type_: TensorType) -> fx.Node:
        return self.emit(aten._to_copy.default, (node,), type_, {"dtype": dtype})

    def full(self, like: Tensor, value: Any) -> fx.Node:
        type_ = self.values.type_of(like)
        value = bool(value) if like.dtype == torch.bool else value
        return self.emit(
            aten.full.default, (list(like.shape), value), type_, {"dtype": like.dtype, "device": like.device}
        )

    def results(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Records an operation and gives each tensor it returned its node."""
        if isinstance(out, Tensor):
            self.values.define(out, self.emit(func, args, self.values.type_of(out), kwargs))
        elif isinstance(out, (tuple, list)):
            types = tuple(self.values.type_of(t) if isinstance(t, Tensor) else None for t in out)
            whole = self.emit(func, args, types, kwargs)
            for i, t in enumerate(out):
                if isinstance(t, Tensor):
                    self.values.define(t, self.item(whole, i, types[i]))
                else:
                    check_results(self, func, t)
        else:
            check_results(self, func, out)

    # ---- inputs ----

    def lifted_input(self, lifted: Lifted) -> None:
        tensor = lifted.tensor
        self.note_leaf(tensor)  # whatever rule reads it first: its `.grad` is still what it was before the step
        if tensor.requires_grad and not is_leaf(tensor) and torch.is_grad_enabled():
            # A replay has no way to continue a backward pass into what was computed outside.
            raise CaptureError(
                "the step reads a tensor that was computed outside it and requires grad, so its gradient would leave "
                "the step; compute it inside the step, or pass it detached (x.detach())",
                self.line,
            )
        self.lifted.append(lifted)

    def canonical(self, t: Tensor) -> Tensor:
        """The reachable tensor to lift for a storage that is first seen through `t` (say, `p.data`)."""
        if self.objects.source(t) is not None or id(t) in self.leaves.by_grad:
            return t
        if self._by_storage is None:
            self._by_storage = {}
            for tensor, _ in self.objects.tensors:
                if tensor.layout is torch.strided:
                    self._by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
        found = self._by_storage.get(t.untyped_storage()._cdata, [])
        same = (c for c in found if geometry(c) == geometry(t))
        return next(same, found[0] if found else t)

    def source_of(self, obj: Any) -> Source:
        """The path to an object, or a place among the constants that the capture holds."""
        source = self.objects.source(obj)
        if source is None:
            for k, held in enumerate(self.consts):
                if held is obj:
                    return Source("const", k)
            self.consts.append(obj)
            source = Source("const", len(self.consts) - 1)
        return source

    def back_up(self, storage: Storage, t: Tensor) -> None:
        """Copy on first write of everything that exists outside the step."""
        if storage.input is None or storage.backup is not None:
            return
        with no_modes():
            memory = t.untyped_storage()
            storage.backup = (memory, memory.clone())
            self.written.append(storage)

    def note_rebinding(self, t: Tensor) -> None:
        """`t.data = ...` gives a tensor other memory."""
        if id(t) not in self.rebound:
            with no_modes():
                old = t.detach()
            self.values.storage(old)
            self.rebound[id(t)] = (t, old)

    # ---- numbers ----

    def traced(self, source: Source, value: float) -> TracedFloat:
        """A number of the user's program as a traced one."""
        key = (source, self.phase)
        root = self.roots.get(key)
        if root is None:
            root = self.roots[key] = Root(source, self.phase, float(value))
        return TracedFloat(float(value), self, lambda: self.root_tensor(root), (root,), True)

    def root_tensor(self, root: Root) -> Tensor:
        assert root.source is not None
        key = (root.source, root.phase)
        if key not in self.scalars:
            with no_modes():
                tensor = torch.tensor(root.value, dtype=torch.float64)
            node = self.placeholder(TensorType((), "f64"))
            self.values.define(tensor, node)
            self.scalars[key] = (root, node, tensor)
        return self.scalars[key][2]

    def scalar(self, function: Callable[..., Any], *args: Any) -> Tensor:
        with torch._C.DisableTorchFunction():
            return function(*args)

    def scalar_tensor(self, value: Any) -> Tensor:
        """A hyper-parameter as a 0-d tensor."""
        if isinstance(value, TracedFloat):
            return value.tensor
        if isinstance(value, Tensor):
            return value if value.dim() == 0 else value.reshape(())
        if value not in self.constants:
            self.constants[value] = torch.full((), float(value), dtype=torch.float64)
        return self.constants[value]

    def concretise(self, root: Root, op: str, other: float, result: bool) -> None:
        """Python saw the value of a traced number."""
        if root.source is None:
            raise self.fail(CaptureError(
                "the step uses the gradient scale in a Python decision, which reads a tensor's value; it may only flow "
                "into tensors and outputs", self.lines.here(),
            ))  # fmt: skip
        self.scalar_guards[ScalarGuard(root.source, root.phase, op, other, result)] = None

    # ---- randomness ----

    def next_stream(self) -> int:
        with no_modes():
            return self.random.next_stream(self.line)

    def seed_tensor(self, device: torch.device = _CPU) -> Tensor:
        """The step's one seed, as an operand of draws on a device."""
        if device not in self._seeds:
            with no_modes():
                seed = self.random.ensure_seed().to(device)
            if self._seed_node is None:
                self._seed_node = self.placeholder(TensorType((), "i64"))
            self.values.define(seed, self._seed_node)
            self._seeds[device] = seed
        return self._seeds[device]

    # ---- host effects and undoing ----

    @contextmanager
    def host_effect(self, effect: dict[str, Any]) -> Iterator[None]:
        with self.hyper.on_host():
            self.effects.append(effect)
            yield

    def undo_state(self, optimizer: Any, params: Sequence[Tensor]) -> None:
        """Optimizer state of these parameters is about to be created."""
        if optimizer is None:
            return
        before = {id(p): (p, dict(optimizer.state[p]) if p in optimizer.state else None) for p in params}

        def undo() -> None:
            for p, state in before.values():
                if state is None:
                    optimizer.state.pop(p, None)
                else:
                    optimizer.state[p] = state

        self.undo.append(undo)

    def undo_scheduler(self, sched: Any, snapshot: Callable[[Any], dict[str, Any]]) -> None:
        chain = [sched, *getattr(sched, "_schedulers", ())]
        saved = [(s, snapshot(s)) for s in chain]

        def undo() -> None:
            for s, state in saved:
                vars(s).update(state)

        self.undo.append(undo)

    def note_scaler(self, grad_scaler: Any) -> None:
        if all(known is not grad_scaler for known in self.grad_scalers):
            self.grad_scalers.append(grad_scaler)
            states = grad_scaler.__dict__.get("_per_optimizer_states")
            if states is not None:
                copy = {k: {**v, "found_inf_per_device": dict(v["found_inf_per_device"])} for k, v in states.items()}

                def undo() -> None:
                    states.clear()
                    states.update(copy)
                    grad_scaler._per_optimizer_states = states

                self.undo.append(undo)

    def rollback(self) -> None:
        """Puts back everything the step changed: contents, gradients, optimizer state, the generator."""
        with no_modes():
            for t, old in self.rebound.values():
                t.data = old
            for storage in reversed(self.written):  # the first copy of memory that two storages share is the right one
                memory, copy = storage.backup
                memory.copy_(copy)
            self.leaves.restore()
            self.hyper.restore()
            for undo in reversed(self.undo):
                undo()
            self.random.rollback()


# ---- the surroundings of a recorded step -------------------------------------------------------------------------

_PLAIN_TENSORS = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _ignoring_modes(original: Callable[..., bool]) -> Callable[..., bool]:
    """`has_torch_function` for PyTorch's own Python functions: look inside them, for all but tensor subclasses."""

    def check(*args: Any) -> bool:
        flat = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
        return any(isinstance(a, Tensor) and type(a) not in _PLAIN_TENSORS for a in flat) and original(*args)

    return check


@contextmanager
def _flag(read: Callable[[], bool], write: Callable[[bool], Any], value: bool) -> Iterator[None]:
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def _batch_norm_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Batch norm with momentum=None divides by its batch counter, which PyTorch reads with float()."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if (
            self.momentum is not None
            or not self.training
            or self.running_mean is None
            or self.num_batches_tracked is None
        ):
            return original(self, x)
        self._check_input_dim(x)
        self.num_batches_tracked.add_(1)
        mean, var = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        out = torch.nn.functional.batch_norm(x, mean, var, self.weight, self.bias, True, 1.0, self.eps)
        if not x.numel():
            return out  # a batch of nothing has no statistics: those before stay
        with torch.no_grad():
            share = 1.0 / self.num_batches_tracked.double()
            for running, now in ((self.running_mean, mean), (self.running_var, var)):
                running.copy_(now * share.to(now.dtype) + running * (1.0 - share).to(now.dtype))
        return out

    return forward


def _demanding(original: Callable[..., Any], message: str) -> Callable[..., Any]:
    """A PyTorch function whose check `if torch.any(...)`, which reads values, becomes an operation that may raise."""

    def none(found: Tensor) -> bool:
        torch.ops.nova.demand(~found, message)
        return False

    def run(*args: Any, **kwargs: Any) -> Any:
        with replaced(torch, "any", none):
            return original(*args, **kwargs)

    return run


def _is_causal_hint(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Transformers look into a mask for whether it is causal; attention with the mask gives the same unhinted."""
    return bool(is_causal)


def _surroundings(recorder: Recorder, stack: ExitStack, function: Any) -> None:
    """Portable operations, one thread, patched Python surface."""
    stack.enter_context(torch.autograd.set_multithreading_enabled(False))
    if "torch._dynamo" in sys.modules:  # what torch.compile has made runs as it was written, and is recorded
        stack.enter_context(torch.compiler.set_stance("force_eager"))
    stack.enter_context(_flag(torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, False))
    stack.enter_context(_flag(torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled, False))
    stack.enter_context(_flag(torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False))
    for module in (torch.nn.functional, torch.functional, torch.autograd):
        for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"):
            if hasattr(module, name):
                stack.enter_context(replaced(module, name, _ignoring_modes(getattr(module, name))))
    # checking the arguments of torch.distributions reads their values
    stack.enter_context(replaced(torch.distributions.Distribution, "_validate_args", False))
    call = torch.nn.Module.__call__

    def __call__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        recorder.lines.enter(self)
        try:
            return call(self, *args, **kwargs)
        finally:
            recorder.lines.leave()

    stack.enter_context(replaced(torch.nn.Module, "__call__", __call__))
    stack.enter_context(stand_in(_BatchNorm, "forward", _batch_norm_forward(_BatchNorm.forward)))
    loss = torch.nn.functional.gaussian_nll_loss
    stack.enter_context(
        replaced(torch.nn.functional, "gaussian_nll_loss", _demanding(loss, "var has negative entry/entries"))
    )
    transformer = sys.modules["torch.nn.modules.transformer"]
    stack.enter_context(replaced(transformer, "_detect_is_causal_mask", _is_causal_hint))
    _patch_checkpoint(recorder, stack)
    averaging.patch(stack)
    optimizers.patch(recorder, stack)
    scaler.patch(recorder, stack)
    schedulers.patch(recorder, stack)
    _patch_math(stack)


def _patch_checkpoint(recorder: Recorder, stack: ExitStack) -> None:
    """Notes when torch.utils.checkpoint (not reentrant) runs a forward again."""
    hook = torch.utils.checkpoint._recomputation_hook
    enter, leave = hook.__enter__, hook.__exit__

    def __enter__(self: Any) -> Any:
        recorder.recomputing = recorder._regions.setdefault(-1 - len(recorder._regions), len(recorder._regions))
        return enter(self)

    def __exit__(self: Any, *error: Any) -> Any:
        recorder.recomputing = None
        return leave(self, *error)

    stack.enter_context(replaced(hook, "__enter__", __enter__))
    stack.enter_context(replaced(hook, "__exit__", __exit__))


def _patch_math(stack: ExitStack) -> None:
    """`math.sqrt(lr)` must see that lr is traced; also where a user's module imported the function by name."""
    replacements = {name: math_replacement(name, original) for name, original in MATH_FUNCTIONS.items()}
    originals = {id(original): name for name, original in MATH_FUNCTIONS.items()}
    for name, value in replacements.items():
        if getattr(math, name) is MATH_FUNCTIONS[name]:  # else it is someone's Python, which asks numbers itself
            stack.enter_context(replaced(math, name, value))
    for module in list(sys.modules.values()):
        filename = getattr(module, "__file__", None)
        if filename is None and getattr(module, "__name__", "") != "__main__":
            continue
        if filename is not None and not is_user_file(filename):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in originals:
                stack.enter_context(replaced(module, name, replacements[originals[id(value)]]))


def record(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], objects: ObjectMap | None = None
) -> Recording:
    """Runs the step once, for real, and records it."""
    objects = objects if objects is not None else ObjectMap(function, args, kwargs)
    recorder = Recorder(objects)
    recorder.line = recorder.lines.here()
    try:
        with ExitStack() as stack:
            stack.callback(recorder.hyper.unwrap)
            for found in list(objects.of_kind("optimizer")):
                recorder.hyper.wrap(found.obj)
            _surroundings(recorder, stack, function)
            args = [recorder.traced(Source("arg", i), a) if type(a) is float else a for i, a in enumerate(args)]
            kwargs = {k: recorder.traced(Source("kwarg", k), v) if type(v) is float else v for k, v in kwargs.items()}
            stack.callback(setattr, recorder, "active", False)
            with FunctionMode(recorder), recorder:
                result = function(*args, **kwargs)
                if recorder.error is not None:
                    raise recorder.error
                with torch._C.DisableTorchFunction(), torch.no_grad():
                    draft = finish.draft(recorder, result)
        if recorder.error is not None:
            raise recorder.error
        return finish.recording(recorder, result, draft)
    except NovaError:
        recorder.rollback()
        raise
    except BaseException:
        if recorder.error is not None:
            recorder.rollback()
            raise recorder.error from None
        with no_modes():
            recorder.random.finish()
        raise


__all__ = ["Recorder", "Recording", "geometry", "record"]
