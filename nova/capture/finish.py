"""The end of a recording: what the step returned, what it changed, and the calling convention of the graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from nova.capture import cleanup, outputs
from nova.capture.functionalize import Lifted, Storage
from nova.capture.grads import Leaf
from nova.capture.scalars import TracedFloat
from nova.capture.signature import CapturedStep, InputSpec, OutputSpec, Role, Signature, Source, TensorType
from nova.capture.sources import extend
from nova.capture.views import geometry, is_contiguous, is_leaf, memory_order
from nova.errors import CaptureError

if TYPE_CHECKING:
    from nova.capture.record import Recorder, Recording


@dataclass
class Draft:
    """Outputs as nodes, while input numbers are not yet known."""

    nodes: list[fx.Node] = field(default_factory=list)
    specs: list[OutputSpec] = field(default_factory=list)
    inputs: list[Lifted | None] = field(default_factory=list)  # of state outputs
    by_object: dict[int, int] = field(default_factory=dict)
    out_spec: Any = None
    effects: list[dict[str, Any]] = field(default_factory=list)
    views: list[tuple[dict[str, Any], Storage]] = field(default_factory=list)  # descriptions of windows on inputs
    windows: dict[int, dict[str, Any]] = field(default_factory=dict)  # of those returned, by tensor
    shared: dict[int, int | None] = field(default_factory=dict)  # new storages returned more than once: their output
    grad_guards: list[tuple[Source, bool]] = field(default_factory=list)
    grads_used: list[Source] = field(default_factory=list)  # leaves whose `.grad` is an input

    def add(self, node: fx.Node, spec: OutputSpec, lifted: Lifted | None = None) -> int:
        self.nodes.append(node)
        self.specs.append(spec)
        self.inputs.append(lifted)
        return len(self.nodes) - 1


def draft(recorder: Recorder, result: Any) -> Draft:
    """Reads the last value of everything that leaves the step (the recorder's modes are on)."""
    out = Draft()
    recorder.hyper.unwrap()
    out.shared = dict.fromkeys(_returned_together(recorder, result))
    out.out_spec = outputs.describe(
        result,
        lambda t: _output(recorder, out, t, "user"),
        lambda n: _number(recorder, out, n),
        recorder.objects.source,
    )
    for leaf in recorder.leaves.leaves.values():
        _gradient(recorder, out, leaf)
    _assignments(recorder, out)
    _state(recorder, out)
    return out


def _output(recorder: Recorder, out: Draft, t: Tensor, kind: Any) -> dict[str, Any]:
    source = recorder.objects.source(t)
    if source is not None and kind == "user":
        return {"source": source}
    if kind == "user" and (view := _window(recorder, out, t) or _part(recorder, out, t)) is not None:
        return {"window": view}
    if id(t) not in out.by_object:
        if kind == "user" and t.layout is not torch.strided:
            raise CaptureError("the step returns a sparse tensor; return it dense", recorder.line)
        node = recorder.values.node(t)
        strides = t.stride() if t.layout is torch.strided and not is_contiguous(tuple(t.shape), t.stride()) else None
        if strides is not None and memory_order(tuple(t.shape), strides) is None:
            strides = None  # expanded, or with holes: a fresh tensor is dense
        out.by_object[id(t)] = out.add(node, OutputSpec(kind, recorder.values.type_of(t), None, strides))
    return {"output": out.by_object[id(t)]}


def _window(recorder: Recorder, out: Draft, t: Tensor) -> dict[str, Any] | None:
    """How a replay makes a returned tensor that lies in the memory of an input; None for any other."""
    storage = recorder.values.get(t) if t.layout is torch.strided else None
    if storage is None or storage.input is None or id(t) in out.by_object or not _is_users(recorder, storage):
        return None
    if id(t) not in out.windows:
        out.windows[id(t)] = outputs.describe_window(geometry(t), len(out.windows))
        out.views.append((out.windows[id(t)], storage))
    return out.windows[id(t)]


def _returned_together(recorder: Recorder, result: Any) -> Iterator[int]:
    """The identities of storages, made by the step, in which several of the returned tensors lie."""
    found: dict[int, tuple[Storage, set[int]]] = {}
    for t in outputs.tensors_in(result):
        storage = recorder.values.get(t) if t.layout is torch.strided and t.numel() else None
        if storage is not None and storage.input is None:
            found.setdefault(id(storage), (storage, set()))[1].add(id(t))
    for key, (storage, tensors) in found.items():
        _, sizes, strides, _, bits = storage.base
        dense = not bits and memory_order(sizes, strides) is not None
        if len(tensors) > 1 and dense and not recorder.values.varies(storage):
            yield key


def _part(recorder: Recorder, out: Draft, t: Tensor) -> dict[str, Any] | None:
    """How a replay makes a returned tensor that shares what the step made with another: as a window on one output."""
    storage = recorder.values.get(t) if t.layout is torch.strided else None
    if storage is None or id(storage) not in out.shared or id(t) in out.by_object:
        return None
    index = out.shared[id(storage)]
    if index is None:
        view = storage.views[storage.base]
        strides = None if is_contiguous(*storage.base[1:3]) else storage.base[2]
        index = out.add(recorder.values.read_base(storage), OutputSpec("user", view.type, None, strides))
        out.shared[id(storage)] = index
        if geometry(t) == storage.base:
            out.by_object[id(t)] = index
    if out.by_object.get(id(t)) == index:
        return None
    if id(t) not in out.windows:
        found = out.windows[id(t)] = outputs.describe_window(geometry(t), len(out.windows))
        found["output"] = index
        found["offset"] -= storage.base[0] * storage.base[3].itemsize // t.dtype.itemsize
    return out.windows[id(t)]


def _is_users(recorder: Recorder, storage: Storage) -> bool:
    """Whether an input's memory is seen outside the step: by a tensor that is found there, or as a buffer's."""
    assert storage.input is not None
    members = storage.input.members
    if any(recorder.objects.source(member) is not None for member in members):
        return True
    state = _state_sources(recorder)
    if any(_source(recorder, member, state) is not None for member in members):
        return True
    return not storage.input.tensor.untyped_storage().resizable()  # over a NumPy array, say, and not PyTorch's own


def _number(recorder: Recorder, out: Draft, number: TracedFloat) -> dict[str, Any]:
    if number.is_root and number.roots[0].phase == 0:
        return {"source": number.roots[0].source}
    node = recorder.values.node(number.tensor)
    return {"float": out.add(node, OutputSpec("user", TensorType((), "f64")))}


def _is_outside(recorder: Recorder, t: Tensor) -> bool:
    """Whether a tensor existed before the step."""
    if recorder.objects.source(t) is not None:
        return True
    storage = recorder.values.get(t) if t.layout is torch.strided else None
    return storage is not None and storage.input is not None


def _gradient(recorder: Recorder, out: Draft, leaf: Leaf) -> None:
    """What a replay must leave in one leaf's `.grad`, and what it must find there."""
    if not _is_outside(recorder, leaf.tensor):
        return
    final, initial = recorder.leaves.final(leaf), leaf.initial
    source = recorder.source_of(leaf.tensor)
    used = initial is not None and initial.layout is torch.strided and recorder.values.get(initial) is not None
    if not leaf.overwritten and (leaf.read or final is not initial or used):
        out.grad_guards.append((source, initial is None))
        if used:
            out.grads_used.append(source)
    if final is initial and not (leaf.overwritten and final is None):
        return
    if final is None:
        out.effects.append({"kind": "grad_none", "param": source})
        return
    storage = recorder.values.get(final) if final.layout is torch.strided else None
    known = recorder.objects.source(final)
    if known is not None:
        out.effects.append({"kind": "grad_source", "param": source, "value": known})
    elif storage is not None and storage.input is not None:
        effect = {"kind": "grad_view", "param": source, **outputs.describe_window(geometry(final))}
        out.views.append((effect, storage))
        out.effects.append(effect)
    else:
        index = _output(recorder, out, final, "grad")["output"]
        out.effects.append({"kind": "grad", "param": source, "output": index})


def _assignments(recorder: Recorder, out: Draft) -> None:
    """Hyper-parameters that the step itself changed."""
    for source, value, kind in recorder.assignments:
        described = {"const": value} if not isinstance(value, TracedFloat) else _number(recorder, out, value)
        out.effects.append({"kind": "assign", "target": source, "value": described, "type": kind.__name__})


def _state(recorder: Recorder, out: Draft) -> None:
    """New contents of lifted storages."""
    values: dict[int, tuple[Storage, fx.Node]] = {}
    for storage in list(recorder.values.storages.values()):
        if storage.input is not None and storage.written:
            node = recorder.values.read_base(storage)
            if node is not storage.input.node:
                values[id(storage)] = (storage, node)
    for t, old in recorder.rebound.values():
        storage = recorder.values.storage(old)
        if recorder.values.get(t) is storage and geometry(t) == geometry(old):
            continue
        if storage.input is None or storage.input.flat or t.shape != old.shape or t.dtype != old.dtype:
            raise CaptureError(
                "the step gives a tensor memory of another shape through `.data`; do it outside the step", recorder.line
            )
        node = recorder.values.node(t)
        if node is not storage.input.node:
            values[id(storage)] = (storage, node)
    for storage, node in values.values():
        lifted = storage.input
        assert lifted is not None
        out.add(node, OutputSpec("state", lifted.type), lifted)


# ---- the signature -----------------------------------------------------------------------------------------------


def recording(recorder: Recorder, result: Any, out: Draft) -> Recording:
    """Cleans the graph and names its inputs."""
    from nova.capture.record import Recording

    graph = recorder.graph
    graph.output(tuple(out.nodes))
    graph.erase_node(recorder.anchor)
    cleanup.join_lists(graph)
    cleanup.drop_dead(graph)
    signature, inputs, members = _inputs(recorder, out)
    for view, storage in out.views:
        _place_window(graph, view, storage)
    signature.out_spec = out.out_spec
    signature.effects = [*recorder.effects, *out.effects]
    signature.uses_rng = recorder.random.seed is not None
    if recorder.random.seed is not None:
        recorder.random.finish()
    step = CapturedStep(graph, signature, None, "step")
    once = [*recorder.once, *_created(recorder)]
    return Recording(
        result=_plain_result(result), step=step, inputs=inputs, members=members, consts=recorder.consts,
        scalar_guards=list(recorder.scalar_guards), grad_guards=out.grad_guards, grads_used=out.grads_used,
        traced=[source for source, phase in recorder.roots if phase == 0], modules=list(recorder.lines.called.values()),
        optimizers=list(recorder.hyper.optimizers.values()), general_optimizers=recorder.general, once=once,
        rollback=recorder.rollback,
    )  # fmt: skip


def _place_window(graph: fx.Graph, view: dict[str, Any], storage: Storage) -> None:
    """Names the input that a window is on, and counts its offset from where that starts."""
    assert storage.input is not None
    node, size = storage.input.node, getattr(torch, view["dtype"]).itemsize
    view["input"] = next(i for i, n in enumerate(_placeholders(graph)) if n is node)
    view["offset"] -= storage.base[0] * storage.base[3].itemsize // size


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "placeholder"]


def _inputs(recorder: Recorder, out: Draft) -> tuple[Signature, list[Any], list[list[tuple[Source | None, Tensor]]]]:
    kept = {id(lifted) for lifted in out.inputs if lifted is not None} | {id(storage.input) for _, storage in out.views}
    by_node: dict[fx.Node, Any] = {lifted.node: lifted for lifted in recorder.lifted}
    by_node |= {node: root for root, node, _ in recorder.scalars.values()}
    state = _state_sources(recorder)
    buffers = {id(b) for m in recorder.lines.called.values() for b in m._buffers.values() if b is not None}
    signature = Signature()
    values: list[Any] = []
    members: list[list[tuple[Source | None, Tensor]]] = []
    index: dict[int, int] = {}
    graph = recorder.graph
    for node in _placeholders(graph):
        what = by_node.get(node)
        if not node.users and not (isinstance(what, Lifted) and id(what) in kept):
            graph.erase_node(node)
            continue
        index[id(what)] = node.meta["input"] = len(signature.inputs)
        if isinstance(what, Lifted):
            spec = _tensor_spec(recorder, what, state, buffers)
            values.append(what.tensor)
            members.append([(_source(recorder, m, state), m) for m in what.members])
        elif what is not None:
            spec = InputSpec(str(what.source), "scalar", node.meta["type"], what.source, phase=what.phase)
            values.append(what.value)
            members.append([])
        else:
            spec = InputSpec("seed", "seed", node.meta["type"], Source("seed", "seed"))
            values.append(None)
            members.append([])
        node._rename(_identifier(spec.name))
        signature.inputs.append(spec)
    for output, lifted in zip(out.specs, out.inputs, strict=True):
        if lifted is not None:
            output = replace(output, input=index[id(lifted)], counted=recorder.versions.moved(lifted.tensor))
        signature.outputs.append(output)
    return signature, values, members


def _identifier(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name).strip("_")[:60] or "input"


def _state_sources(recorder: Recorder) -> dict[int, Source]:
    """Optimizer state by tensor, also what was created in this very step."""
    found: dict[int, Source] = {}
    for optimizer in recorder.hyper.optimizers.values():
        base = recorder.source_of(optimizer)
        for name, state in recorder.hyper.states(optimizer):
            if isinstance(state, dict):
                for key, value in state.items():
                    if isinstance(value, Tensor):
                        found[id(value)] = extend(extend(base, ("state", name)), ("item", key))
    return found


def _source(recorder: Recorder, t: Tensor, state: dict[int, Source]) -> Source | None:
    source = recorder.objects.source(t) or state.get(id(t))
    if source is None and id(t) in recorder.leaves.by_grad:
        leaf = recorder.leaves.by_grad[id(t)].tensor
        parent = _source(recorder, leaf, state)
        source = extend(parent, ("attr", "grad")) if parent is not None else None
    return source or _attribute_source(recorder, t)


def _attribute_source(recorder: Recorder, t: Tensor) -> Source | None:
    """Tensors that a gradient scaler created in this step."""
    for scaler in recorder.grad_scalers:
        for name in ("_scale", "_growth_tracker"):
            if getattr(scaler, name, None) is t:
                base = recorder.objects.source(scaler)
                return extend(base, ("attr", name)) if base is not None else None
    return None


def _tensor_spec(recorder: Recorder, lifted: Lifted, state: dict[int, Source], buffers: set[int]) -> InputSpec:
    tensor, source, offset = lifted.tensor, None, lifted.span_offset
    for member in lifted.members:
        source = _source(recorder, member, state)
        if source is not None:
            offset += int(tensor.storage_offset() - member.storage_offset())
            tensor = lifted.tensor = member
            break
    source = source or recorder.source_of(tensor)
    role: Role
    if source.root == "const":
        role = "const"
    elif id(tensor) in recorder.leaves.by_grad or (source.path and source.path[-1] == ("attr", "grad")):
        role = "grad"
    elif id(tensor) in state:
        role = "opt_state"
    elif isinstance(tensor, torch.nn.Parameter) or (tensor.requires_grad and is_leaf(tensor)):
        role = "param"
    elif id(tensor) in buffers:
        role = "buffer"
    else:
        role = "arg" if source.root in ("arg", "kwarg") else "external"
    return InputSpec(str(source), role, lifted.type, source, lifted.flat, offset if lifted.flat else 0)


def _created(recorder: Recorder) -> list[str]:
    """Optimizer state that the step made with recorded operations: a replay would make it anew every time."""
    reasons = []
    for optimizer in recorder.hyper.optimizers.values():
        for name, state in recorder.hyper.states(optimizer):
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, Tensor) and value.layout is torch.strided:
                    storage = recorder.values.get(value)
                    if storage is not None and storage.input is None:
                        reasons.append(
                            f"{type(optimizer).__name__} created its state {key!r} of parameter {name} in this step"
                        )
    return reasons


def _plain_result(value: Any) -> Any:
    """The step's result with traced numbers as floats."""
    if isinstance(value, TracedFloat):
        return value.plain
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_plain_result, value))
    if type(value) in (tuple, list):
        return type(value)(map(_plain_result, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for name, part in vars(value).items():
            if isinstance(part, TracedFloat):
                object.__setattr__(value, name, part.plain)
    if type(value) is dict:
        return {k: _plain_result(v) for k, v in value.items()}
    return value
