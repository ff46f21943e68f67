"""Captures on disk: signature, guards and effects as JSON, so that a warm process neither traces nor imports MLIR.

A capture is stored with everything needed to recognise a call it is right for (its guards) and to run it (signature,
effects, output tree; the executable has an entry of its own in the artifact cache). Values that JSON lacks are
tagged: {"!": "dtype", "v": "float32"}. What cannot be described (an object that is guarded by identity alone) makes a
capture unstorable; it is then recorded again in the next process.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import math
import sys
from typing import Any

import torch

from nova.capture import bytecode
from nova.capture.guards import GuardSet, Node, TensorMeta
from nova.capture.library_calls import Fact, Library
from nova.capture.replay import class_path, find_class
from nova.capture.scalars import ScalarGuard
from nova.capture.signature import InputSpec, OutputSpec, Signature, Source, TensorType
from nova.capture.sources import MODULE_TABLES, ObjectMap, is_plain, is_user_class, is_user_function, kind_of
from nova.capture.views import strides

VERSION = 5


class Unstorable(Exception):
    """Why a capture cannot be written to disk."""


# ---- values


def encode(value: Any) -> Any:
    """A plain value (or a Source, or a tree of them) as JSON."""
    if value is None or type(value) in (bool, int, str):
        return value
    match value:
        case float():
            return value if math.isfinite(value) else {"!": "float", "v": value.hex()}
        case Source():
            if value.root == "const":
                raise Unstorable("an object that only the capture holds")
            return {"!": "source", "v": [value.root, value.key, encode(value.path)]}
        case torch.Size():
            return {"!": "size", "v": list(value)}
        case tuple():
            return {"!": "tuple", "v": [encode(item) for item in value]}
        case list():
            return [encode(item) for item in value]
        case dict():
            if all(type(key) is str and key != "!" for key in value):
                return {key: encode(item) for key, item in value.items()}
            return {"!": "dict", "v": [[encode(key), encode(item)] for key, item in value.items()]}
        case bytes():
            return {"!": "bytes", "v": value.hex()}
        case complex():
            return {"!": "complex", "v": [value.real, value.imag]}
        case slice() | range():
            return {"!": type(value).__name__, "v": [encode(value.start), encode(value.stop), encode(value.step)]}
        case enum.Enum():
            return {"!": "enum", "v": [class_path(type(value)), value.name, _enum_meaning(value)]}
        case torch.dtype() | torch.layout() | torch.memory_format():
            return {"!": "torch", "v": str(value).removeprefix("torch.")}
        case torch.device():
            return {"!": "device", "v": str(value)}
        case ScalarGuard():
            return {"!": "fact", "v": [encode(getattr(value, field.name)) for field in dataclasses.fields(value)]}
    if value is Ellipsis:
        return {"!": "ellipsis", "v": None}
    raise Unstorable(f"a value of type {type(value).__name__}")


class _Changed:
    """What is equal to nothing."""


_CHANGED = _Changed()


def _enum_meaning(member: enum.Enum) -> str:
    """A digest of a member's value and of its class's methods, which the file of another process may give anew."""
    digest = hashlib.sha256(f"{type(member.value).__name__} {member.value!r}".encode())
    for name, value in sorted(vars(type(member)).items()):
        function = getattr(value, "__func__", getattr(value, "fget", value))
        if is_user_function(function):
            digest.update(f"{name} {bytecode.fingerprint(function.__code__)}".encode())
    return digest.hexdigest()


def decode(data: Any) -> Any:
    if isinstance(data, list):
        return [decode(item) for item in data]
    if not isinstance(data, dict):
        return data
    if "!" not in data:
        return {key: decode(item) for key, item in data.items()}
    kind, value = data["!"], data["v"]
    match kind:
        case "float":
            return float.fromhex(value)
        case "source":
            return Source(value[0], value[1], decode(value[2]))
        case "size":
            return torch.Size(value)
        case "tuple":
            return tuple(decode(item) for item in value)
        case "dict":
            return {decode(key): decode(item) for key, item in value}
        case "bytes":
            return bytes.fromhex(value)
        case "complex":
            return complex(*value)
        case "slice":
            return slice(*map(decode, value))
        case "range":
            return range(*map(decode, value))
        case "enum":
            found = find_class(value[0]).__members__.get(value[1])
            return found if found is not None and _enum_meaning(found) == value[2] else _CHANGED
        case "torch":
            return getattr(torch, value)
        case "device":
            return torch.device(value)
        case "fact":
            return ScalarGuard(*map(decode, value))
        case "ellipsis":
            return Ellipsis
    raise ValueError(f"unknown tag {kind!r} in a stored capture")


# ---- signature


def encode_signature(signature: Signature) -> dict[str, Any]:
    def tensor(type_: TensorType) -> list[Any]:
        return [list(type_.shape), type_.dtype, type_.device]

    return {
        "inputs": [
            [s.name, s.role, tensor(s.type), encode(s.source), s.flat, s.span_offset, s.phase] for s in signature.inputs
        ],
        "outputs": [[o.kind, tensor(o.type), o.input, encode(o.strides), o.counted] for o in signature.outputs],
        "out_spec": encode(signature.out_spec),
        "effects": encode(signature.effects),
        "uses_rng": signature.uses_rng,
    }


def decode_signature(data: dict[str, Any]) -> Signature:
    def tensor(found: list[Any]) -> TensorType:
        return TensorType(tuple(found[0]), found[1], found[2])

    return Signature(
        [InputSpec(n, r, tensor(t), decode(s), f, o, p) for n, r, t, s, f, o, p in data["inputs"]],
        [OutputSpec(k, tensor(t), i, decode(s), c) for k, t, i, s, c in data["outputs"]],
        decode(data["out_spec"]),
        decode(data["effects"]),
        data["uses_rng"],
    )


# ---- guards

_DESCRIBED = {
    "call", "builtin", "function", "method", "partial", "object", "dict", "group", "list", "tuple", "set", "class",
    "pymodule", "module", "optimizer", "tensor", "weakref", "wrapper",
}  # fmt: skip


def encode_guards(guards: GuardSet) -> dict[str, Any]:
    nodes = []
    for node in guards.nodes:
        if node.kind not in _DESCRIBED:
            raise Unstorable(f"an object of type {node.type}")
        nodes.append({
            "kind": node.kind, "parent": node.parent, "step": list(node.step), "type": node.type, "code": node.code,
            "keys": encode(node.keys), "meta": encode(dataclasses.astuple(node.meta)) if node.meta else None,
            "slots": [[list(step), kind, encode(rest[0]) if rest else 0] for step, (kind, *rest) in node.slots.items()],
        })  # fmt: skip
    return {
        "nodes": nodes, "environment": encode(guards.environment), "facts": encode(guards.facts),
        "aliases": encode(guards.aliases), "memory": encode(guards.memory),
        "library": [dataclasses.astuple(fact) for fact in guards.library.facts],
    }  # fmt: skip


def decode_guards(data: dict[str, Any]) -> GuardSet:
    nodes = []
    for found in data["nodes"]:
        slots = {
            tuple(step): (kind,) if kind in ("any", "missing", "empty") else (kind, decode(v))
            for step, kind, v in found["slots"]
        }
        meta = TensorMeta(*decode(found["meta"])) if found["meta"] else None
        nodes.append(Node(
            found["kind"], found["parent"], tuple(found["step"]), found["type"], slots, decode(found["keys"]), meta,
            found["code"],
        ))  # fmt: skip
    environment, facts, aliases, memory = (decode(data[n]) for n in ("environment", "facts", "aliases", "memory"))
    library = Library([Fact(*fact) for fact in data["library"]])
    return GuardSet(nodes, environment, facts, aliases, memory, library)


# ---- the key that is known before capture


def _versions() -> tuple[str, ...]:
    import nova

    return nova.__version__, torch.__version__, sys.version.split()[0], str(VERSION)


def key_before_capture(objects: ObjectMap, options: tuple[Any, ...]) -> str:
    """A hash of everything that finds a stored capture: code, module tree, metadata and aliases of tensors, versions.

    Values do not enter (the guards of what is found decide); the key must only keep unlike steps apart.
    """
    digest = hashlib.sha256(repr((_versions(), options)).encode())
    order: dict[int, int] = {}
    for reached in objects.reached.values():
        obj, kind = reached.obj, reached.kind
        if _is_state(reached):
            continue
        words: list[Any] = [
            kind,
            reached.step,
            order.get(id(reached.parent.obj)) if reached.parent else str(reached.source),
        ]
        order[id(obj)] = len(order)
        match kind:
            case "tensor":
                words += [
                    str(obj.dtype),
                    () if obj.is_nested else tuple(obj.shape),
                    strides(obj),
                    obj.requires_grad,
                    str(obj.device),
                ]
            case "function":
                words.append(bytecode.fingerprint(obj.__code__))
            case "module":
                words += [class_path(type(obj)), obj.training]
                words += [
                    tuple(order.get(id(v), -1) for v in getattr(obj, t).values() if v is not None)
                    for t in MODULE_TABLES
                ]
            case "optimizer" | "object":
                words.append(class_path(type(obj)))
            case "class":
                if is_user_class(obj):
                    words.append(class_path(obj))
            case "dict" | "list" | "tuple" | "set":
                words.append(class_path(type(obj)))
        digest.update(repr(words).encode())
    for value in (*objects.roots.args, *objects.roots.kwargs.values()):
        digest.update(
            repr(value).encode() if is_plain(value) and not isinstance(value, float) else kind_of(value).encode()
        )
    return digest.hexdigest()


def _is_state(reached: Any) -> bool:
    """Optimizer state and other things that appear while a step runs: they must not make a first call differ."""
    found = reached
    while found is not None:
        if found.step[0] in ("state", "value", "key") or found.step in (("attr", "state"), ("attr", "grad")):
            return True
        found = found.parent
    return False


# ---- whole captures


def encode_capture(signature: Signature, guards: GuardSet, name: str, optimizers: list[Source]) -> str:
    return json.dumps({
        "version": VERSION, "name": name, "signature": encode_signature(signature), "guards": encode_guards(guards),
        "optimizers": encode(optimizers),
    })  # fmt: skip


def decode_capture(text: str) -> tuple[Signature, GuardSet, str, list[Source]]:
    data = json.loads(text)
    if data.get("version") != VERSION:
        raise ValueError(f"a capture of version {data.get('version')}, not {VERSION}")
    signature, guards = decode_signature(data["signature"]), decode_guards(data["guards"])
    return signature, guards, data["name"], decode(data["optimizers"])
