"""A small replay of recorded steps for the capture tests: guards on call metadata, the graph run in PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from capture_graph import Interpreter
from torch import Tensor

from nova.capture.outputs import rebuild
from nova.capture.record import Recording, record
from nova.capture.rng import draw_seed
from nova.capture.sources import ObjectMap, Roots


def metadata(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.stride(), value.requires_grad
    if isinstance(value, (list, tuple)):
        return tuple(metadata(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, metadata(v)) for k, v in value.items())
    return value if not isinstance(value, float) else float


class Replayed:
    """`step` recorded when something it depends on is new, replayed otherwise."""

    def __init__(self, function: Any):
        self.function = function
        self.recordings: list[tuple[Any, Recording, Interpreter]] = []
        self.captures = 0

    def key(self, args: Any, kwargs: Any) -> Any:
        objects = ObjectMap(self.function, args, kwargs)
        modules = tuple((f.obj.training, tuple(map(id, f.obj._parameters.values()))) for f in objects.of_kind("module"))
        tensors = tuple((t.requires_grad, tuple(t.shape)) for t, s in objects.tensors if not str(s).endswith("grad"))
        return metadata(args), metadata(kwargs), modules, tensors[:0] or tuple(r for r in tensors if r[0])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key, roots = self.key(args, kwargs), Roots(self.function, args, kwargs)
        for known, recording, run in self.recordings:
            if known == key and self.holds(recording, roots):
                return self.replay(recording, run, roots)
        recording = record(self.function, args, kwargs)
        self.captures += 1
        if not recording.once:
            self.recordings.append((key, recording, Interpreter(recording.step)))
        return recording.result

    def resolve(self, recording: Recording, roots: Roots, source: Any) -> Any:
        if source.root != "const":
            return roots.resolve(source)
        obj = recording.consts[source.key]
        from nova.capture.sources import follow

        for step in source.path:
            obj = follow(obj, step)
        return obj

    def holds(self, recording: Recording, roots: Roots) -> bool:
        try:
            for source, is_none in recording.grad_guards:
                if (self.resolve(recording, roots, source).grad is None) != is_none:
                    return False
            for guard in recording.scalar_guards:
                if guard.phase == 0 and not guard.holds(self.resolve(recording, roots, guard.source)):
                    return False
            for spec, was in zip(recording.step.signature.inputs, recording.inputs, strict=True):
                if spec.role not in ("scalar", "seed"):
                    now = self.resolve(recording, roots, spec.source)
                    if now.shape != was.shape or now.stride() != was.stride() or now.dtype != was.dtype:
                        return False
        except (KeyError, AttributeError, IndexError, TypeError):
            return False
        return True

    def replay(self, recording: Recording, run: Interpreter, roots: Roots) -> Any:
        signature = recording.step.signature
        returned = {}
        tensors, scalars, seed = [], [], 0
        specs = list(signature.inputs)
        for spec in specs:
            if spec.role not in ("scalar", "seed"):
                tensors.append(self.resolve(recording, roots, spec.source))
        phase, numbers = 0, {}
        host = [e for e in signature.effects if e["kind"] == "call"]
        for phase in range(len(host) + 1):
            for i, spec in enumerate(specs):
                if spec.role == "scalar" and spec.phase == phase:
                    numbers[i] = float(self.resolve(recording, roots, spec.source))
            if phase < len(host):
                effect = host[phase]
                getattr(self.resolve(recording, roots, effect["target"]), effect["method"])(
                    *effect["args"], **effect["kwargs"]
                )
        scalars = [numbers[i] for i in sorted(numbers)]
        if signature.uses_rng:
            seed = draw_seed()
        sources(signature.out_spec, lambda s: returned.setdefault(s, self.resolve(recording, roots, s)))
        fresh = run(tensors, scalars, seed)
        outputs: list[Any] = []
        remaining = iter(fresh)
        for spec in signature.outputs:
            outputs.append(None if spec.kind == "state" else next(remaining))
        with torch.no_grad():
            for effect in signature.effects:
                self.apply(recording, roots, effect, outputs, tensors)
        return rebuild(
            signature.out_spec,
            outputs,
            lambda s: returned[s],
            lambda view: self.window(recording, roots, view, outputs),
        )

    def window(self, recording: Recording, roots: Roots, view: Any, outputs: list[Any] = ()) -> Tensor:
        if "output" in view:
            return outputs[view["output"]].as_strided(view["size"], view["stride"], view["offset"])
        spec = recording.step.signature.inputs[view["input"]]
        t = self.resolve(recording, roots, spec.source).detach()
        return t.as_strided(view["size"], view["stride"], t.storage_offset() + spec.span_offset + view["offset"])

    def apply(self, recording: Recording, roots: Roots, effect: Any, outputs: list[Any], tensors: list[Tensor]) -> None:
        match effect["kind"]:
            case "grad_none":
                self.resolve(recording, roots, effect["param"]).grad = None
            case "grad":
                self.resolve(recording, roots, effect["param"]).grad = outputs[effect["output"]]
            case "grad_source":
                self.resolve(recording, roots, effect["param"]).grad = self.resolve(recording, roots, effect["value"])
            case "grad_view":
                self.resolve(recording, roots, effect["param"]).grad = self.window(recording, roots, effect)
            case "assign":
                target = effect["target"]
                owner = target.__class__(target.root, target.key, target.path[:-1])
                ((kind, value),) = effect["value"].items()
                number = (
                    float(outputs[value])
                    if kind == "float"
                    else value
                    if kind == "const"
                    else self.resolve(recording, roots, value)
                )
                self.resolve(recording, roots, owner)[target.path[-1][1]] = (
                    int(number) if effect["type"] == "int" else number
                )


def sources(tree: Any, visit: Any) -> None:
    ((kind, value),) = tree.items()
    if kind == "source":
        visit(value)
    elif kind in ("tuple", "list"):
        for v in value:
            sources(v, visit)
    elif kind in ("dict",):
        for _, v in value:
            sources(v, visit)
    elif kind in ("namedtuple", "sequence", "dataclass", "mapping"):
        for v in value[2]:
            sources(v[1] if kind in ("dataclass", "mapping") else v, visit)
