"""One capture from end to end: walk, snapshot, record under watch, settle what Python did, build the guards.

    ObjectMap      what the step can reach, and how
    Snapshot       what all of it looked like
    record         the real run, as a graph
    settle         Python state that changed: an effect to replay, or a refusal (everything is put back)
    build_guards   what a later call must find

If Nova refuses, the model, the optimizer and every Python object are as before the call. If the user's own code
raises, everything is as eager would have left it.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nova.capture import python_state
from nova.capture.environment import ENVIRONMENT_NAMES, environment, restore_environment
from nova.capture.guard_builder import Observed, build_guards, place
from nova.capture.guards import GRAD_NONE, GRAD_SET, GuardSet
from nova.capture.interrupts import Interrupts
from nova.capture.memory import Region, distance, overlap, region_of, span_of
from nova.capture.python_state import MISSING, Change, Snapshot, Watch
from nova.capture.reads import Reads
from nova.capture.replay import tree_classes
from nova.capture.scalars import ScalarGuard, may_read_unasked
from nova.capture.signature import CapturedStep, Signature, Source
from nova.capture.sources import ObjectMap, extend, is_plain
from nova.errors import CaptureError, NovaError, SourceLine, UnsupportedError
from nova.jit import one_recording
from nova.jit import recording as recording_threads

_RNN_CACHES = (("attr", "_flat_weights"), ("attr", "_flat_weight_refs"))
_ITEMS = [("item", i) for i in range(4)]  # of a tuple of numbers, such as betas


@dataclass
class Capture:
    """A captured step with everything that its replay needs."""

    name: str
    step: CapturedStep
    guards: GuardSet
    result: Any = None  # what the recording run returned
    inputs: list[Any] = field(default_factory=list)  # what each input stood for, in the order of the signature
    consts: list[Any] = field(default_factory=list)
    classes: dict[str, Any] = field(default_factory=dict)  # classes of the output tree
    optimizers: list[Source] = field(default_factory=list)  # those whose state must exist before the step
    once: list[str] = field(default_factory=list)  # why this run must not be replayed
    truncated: bool = False  # the walk met its limit
    unseen: list[str] = field(default_factory=list)  # arrays that were too large to copy
    rollback: Callable[[], None] = lambda: None  # undoes the whole run

    @property
    def signature(self) -> Any:
        return self.step.signature


def line_of(function: Any) -> SourceLine | None:
    """Where a step is defined: the line named by errors that have no better one."""
    code = getattr(function, "__code__", None)
    if isinstance(code, types.CodeType):
        return SourceLine(code.co_filename, code.co_firstlineno, code.co_name)
    for inner in (
        getattr(function, "__func__", None),
        getattr(function, "func", None),
        vars(type(function)).get("__call__"),
    ):
        if inner is not None and inner is not function:
            return line_of(inner)
    return None


def capture(
    function: Any, args: Sequence[Any], kwargs: dict[str, Any], name: str, objects: ObjectMap | None = None
) -> Capture:
    """Runs a step once, for real, and captures it. One at a time: PyTorch is patched meanwhile, and watched whole."""
    with one_recording, Interrupts() as interrupts:
        return _capture(function, args, kwargs, name, objects, interrupts)


def _capture(
    function: Any, args: Sequence[Any], kwargs: dict[str, Any], name: str, objects: ObjectMap | None,
    interrupts: Interrupts,
) -> Capture:  # fmt: skip
    from nova.capture.record import record

    objects = objects if objects is not None else ObjectMap(function, args, kwargs)
    line = line_of(function)
    _refuse_subclasses(objects, line)
    _refuse_scripts(objects, line)
    before = environment()
    snapshot, watch = Snapshot(objects), Watch(objects)
    thread = threading.get_ident()
    recording_threads.add(thread)
    try:
        recording = record(watch.watched(function, interrupts), args, kwargs, objects)
        if watch.refused is not None:  # the user's own `except` swallowed it
            recording.rollback()
            raise watch.refused
    except NovaError as error:
        snapshot.restore()
        if error.source is None and "line" not in str(error):
            raise type(error)(str(error), line) from error
        raise
    except Exception:
        if watch.refused is not None:
            snapshot.restore()
            raise watch.refused from None
        raise
    finally:
        recording_threads.discard(thread)

    def rollback() -> None:
        recording.rollback()
        snapshot.restore()
        restore_environment(before)

    try:
        return _settled(name, objects, snapshot, watch, recording, before, line, rollback)
    except NovaError:
        rollback()
        raise


def _refuse_subclasses(objects: ObjectMap, line: SourceLine | None) -> None:
    """Tensors that are made of others (nested, masked, distributed) have no memory of their own to compile for."""
    for tensor, source in objects.tensors:
        if source.root in ("arg", "kwarg") and (
            tensor.is_nested or type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        ):
            name = "nested tensor" if type(tensor) is torch.Tensor else type(tensor).__name__
            raise UnsupportedError(
                f"{source} is a {name}, which cannot be an input of the step; pass its parts, or a padded tensor", line
            )


def _refuse_scripts(objects: ObjectMap, line: SourceLine | None) -> None:
    """TorchScript keeps parameters and attributes out of Python's reach: their changes would not be seen."""
    for reached in list(objects.reached.values()):
        if isinstance(reached.obj, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"{objects.source(reached.obj)} is a module of TorchScript, whose state cannot be watched; use the "
                "module that it was made of (its parameters load with load_state_dict)", line
            )  # fmt: skip


def _settled(
    name: str, objects: ObjectMap, snapshot: Snapshot, watch: Watch, recording: Any, before: tuple[Any, ...],
    line: SourceLine | None, rollback: Callable[[], None],
) -> Capture:  # fmt: skip
    for what, was, now in zip(ENVIRONMENT_NAMES, before, environment(), strict=True):
        if was != now:
            raise CaptureError(
                f"the step leaves {what} changed: it was {was}, is now {now}. Change it outside the step.", line
            )
    signature = recording.step.signature
    policy = _Policy(objects, recording, watch)
    changed = {output.input for output in signature.outputs if output.kind == "state"}
    written = [memory_of(t) for t in map(recording.inputs.__getitem__, changed) if t.device.type == "cpu"]
    python_state.settle(snapshot, policy.allows, line, written)
    for scheduler, epoch, where in watch.rates_read:
        if policy.before.get((id(scheduler), ("attr", "last_epoch")), epoch) != epoch:
            raise CaptureError(
                "the step reads a learning rate from a scheduler that it has stepped; a replay steps it afterwards. "
                "Read it outside the step, or before scheduler.step()",
                where,
            )
    for fact in recording.scalar_guards:
        if fact.phase and fact.source.root != "const":
            holder, step = objects.roots.slot(fact.source)
            if (id(holder), step) in policy.before:
                raise CaptureError(
                    f"the step's Python decides on {fact.source} after a scheduler has moved it, which a replay cannot "
                    "check beforehand. Call scheduler.step() at the end of the step, or outside it",
                    line,
                )
    if any(map(may_read_unasked, watch.codes)):
        arguments = [s for s in recording.traced if s.root in ("arg", "kwarg")]
        recording.scalar_guards += [ScalarGuard(s, 0, "value", objects.roots.resolve(s)) for s in arguments]
    signature.effects += policy.effects()
    seen = Observed(
        codes=set(watch.codes),
        globals=watch.codes,
        library=watch.library,
        modules=list(watch.modules.values()),
        optimizers=list(watch.optimizers.values()),
        numbers=_places(
            objects,
            {s.source for s in signature.inputs if s.role == "scalar"} | {g.source for g in recording.scalar_guards},
        ),
        unread=_places(objects, set(recording.traced)),
        inputs=[spec.source for spec in signature.inputs if spec.role not in ("scalar", "seed")],
        before=policy.before,
        facts=list(recording.scalar_guards),
        asked=watch.asked,
        listed=watch.listed,
        held={held.data_ptr() for held in recording.consts if isinstance(held, torch.Tensor)},
        rewritten=snapshot.overlapping(written),
    )
    for members in recording.members:
        known = [(source, tensor) for source, tensor in members if source is not None and source.root != "const"]
        seen.inputs += [source for source, _ in known]
        if len(known) > 1:
            seen.aliases.append([(source, distance(tensor, known[0][1])) for source, tensor in known])
    seen.memory = _regions(signature, recording, changed, line)
    for effect in signature.effects:
        if effect["kind"] != "assign" and (target := effect.get("target", effect.get("param"))).root != "const":
            seen.inputs.append(target)
    for source, none in recording.grad_guards:
        seen.grads[id(_resolve(objects, recording, source))] = GRAD_NONE if none else GRAD_SET
    # A gradient that something else holds too may be an input under that name: it must still be the leaf's gradient.
    seen.inputs += [extend(leaf, ("attr", "grad")) for leaf in recording.grads_used if leaf.root != "const"]
    for module in watch.training_set.values():
        # Set before it was read: what it was does not matter, and a replay sets it whatever it finds.
        seen.unread.add((id(module), ("attr", "training")))
        if (source := objects.source(module)) is not None:
            signature.effects.append(_set_effect(source, "training", module.training))
            seen.inputs.append(source)
    if policy.created and Reads(seen.codes, seen.asked, objects).optimizer_state:
        recording.once.append("it created optimizer state, and its Python looks at `.state`")
    guards = build_guards(objects, seen, before)
    if seen.unsure:
        recording.once.append(f"its Python may have read {seen.unsure[0]}, which its tensors write to")
    classes: dict[str, Any] = {}
    tree_classes(recording.result, classes)
    sources = [source for opt in watch.optimizers.values() if (source := objects.source(opt)) is not None]
    recording.step.guards = guards
    recording.step.name = name
    recording.step.tf32 = bool(before[10]) or before[8] in ("high", "medium")
    return Capture(
        name, recording.step, guards, recording.result, recording.inputs, list(recording.consts), classes, sources,
        list(recording.once), objects.truncated, [str(reached.source) for reached in snapshot.unseen],
        rollback=rollback,
    )  # fmt: skip


def _regions(signature: Signature, recording: Any, changed: set[Any], line: SourceLine | None) -> list[Region]:
    """The memory of every input; refused where two storages over the same memory would have to be one input."""
    found = [
        (region_of(spec, index in changed), recording.inputs[index])
        for index, spec in enumerate(signature.inputs)
        if spec.role not in ("scalar", "seed")
    ]
    shared = overlap([span_of(tensor, region) for region, tensor in found])
    if shared is not None:
        names = [_name_of(found[at][0][0]) for at in shared]
        raise CaptureError(
            f"the step writes to memory that {names[0]} and {names[1]} share through two storages "
            "(torch.from_numpy or torch.frombuffer of one buffer, say). Make one of them a view of the other tensor",
            line,
        )
    return [region for region, _ in found]


def _name_of(source: Source) -> str:
    return "a tensor made in the step" if source.root == "const" else str(source)


def memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of a tensor's storage."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _set_effect(source: Source, name: str, value: Any) -> dict[str, Any]:
    return {"kind": "set", "target": source, "name": name, "value": value}


def _places(objects: ObjectMap, sources: set[Source]) -> set[tuple[int, Any]]:
    return {place(objects.roots, source) for source in sources if source.root != "const"}


def _resolve(objects: ObjectMap, recording: Any, source: Source) -> Any:
    return recording.consts[int(source.key)] if source.root == "const" else objects.roots.resolve(source)


class _Policy:
    """Which changes of Python state a replay accounts for."""

    def __init__(self, objects: ObjectMap, recording: Any, watch: Watch):
        self.objects, self.recording, self.watch = objects, recording, watch
        self.before: dict[tuple[int, Any], Any] = {}
        self._effects: list[dict[str, Any]] = []
        self.scheduled = any(effect["kind"] == "call" for effect in recording.step.signature.effects)
        self.stepped = set(watch.optimizers)
        self.created = False  # whether an optimizer got state that it did not have

    def effects(self) -> list[dict[str, Any]]:
        return self._effects

    def allows(self, change: Change) -> bool:
        if isinstance(change.holder.obj, torch.nn.RNNBase) and change.step in _RNN_CACHES:
            return True  # lists of its own weights, which it makes anew after one was replaced
        allowed = self._allows(change)
        # State that the first step creates is an input like any later step's: it must exist on the next call.
        created = (change.before is None or change.before is MISSING) and isinstance(change.after, (torch.Tensor, dict))
        if not created or change.holder.kind == "tensor":
            self.before[id(change.holder.obj), change.step] = change.before
        return allowed

    def _allows(self, change: Change) -> bool:
        holder, (kind, key) = change.holder, change.step
        if holder.kind == "tensor":
            if key == "requires_grad":
                self._effects.append({"kind": "requires_grad", "target": holder.source, "value": change.after})
            return True  # .grad is the recorder's business
        if holder.kind == "module" and change.step == ("attr", "training"):
            if id(holder.obj) not in self.watch.training_set:
                self._effects.append(
                    {"kind": "set", "target": holder.source, "name": "training", "value": change.after}
                )
            return True
        if holder.kind == "optimizer":
            if kind == "attr" and str(key).startswith("_") and is_plain(change.after):
                self._effects.insert(0, _set_effect(holder.source, str(key), change.after))
                return True
            return False
        owner = self._owner(holder)
        if owner is None:
            return False
        if isinstance(owner, torch.optim.Optimizer):
            if ("attr", "state") in self._steps(holder) or any(step[0] == "state" for step in self._steps(holder)):
                self.created |= change.before is MISSING
                return id(owner) in self.stepped
            # Hyper-parameters: a scheduler moved them, or the recorder saw the assignment.
            assigned = self._assigned()
            return (
                self.scheduled
                or any(extend(change.source, step) in assigned for step in _ITEMS)
                or change.source in assigned
            )
        if isinstance(owner, torch.optim.lr_scheduler.LRScheduler):
            return self.scheduled
        return isinstance(owner, torch.amp.GradScaler)

    def _assigned(self) -> set[Any]:
        effects = self.recording.step.signature.effects
        return {effect["target"] for effect in effects if effect["kind"] == "assign"}

    def _steps(self, holder: Any) -> list[Any]:
        steps = []
        while holder is not None and holder.kind != "optimizer":
            steps.append(holder.step)
            holder = holder.parent
        return steps

    def _owner(self, holder: Any) -> Any:
        """The optimizer, scheduler or scaler that an object belongs to."""
        kinds = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
        while holder is not None:
            if isinstance(holder.obj, kinds):
                return holder.obj
            holder = holder.parent
        return None


__all__ = ["MISSING", "Capture", "capture", "line_of"]
