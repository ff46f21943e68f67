"""Captures kept for other processes: a warm process finds, checks and binds one, and never traces.

    key known before capture  ->  ["capture" entry]  guards + signature of every variant captured under that key
                              ->  ["step" entry]     the executable of the variant whose guards hold

Optimizer state that PyTorch creates on the first step is an input of every capture, so it is created here, as the
recording run did, before the guards are asked again.
"""

from __future__ import annotations

import hashlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from nova.capture import store
from nova.capture.guards import GONE, GuardSet, Mismatch, follow_call
from nova.capture.replay import find_class
from nova.capture.signature import CapturedStep, Signature, Source
from nova.capture.sources import ObjectMap, Roots
from nova.config import Options, knobs

_OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop)


def usable(options: Options) -> bool:
    return knobs.disk_cache and options.backend == "compile" and knobs.dump is None


def key_of(objects: ObjectMap, options: Options) -> str:
    from nova.gpu import ptxas
    from nova.runtime.key import Key, compiler_version
    from nova.schedule import target

    devices = {str(tensor.device) for tensor, _ in objects.tensors if tensor.device.type == "cuda"} | {"cpu"}
    return Key.of({
        "before capture": store.key_before_capture(objects, options.key()),
        "target": [repr(target.by_name(device)) for device in sorted(devices)],
        "ptxas": ptxas.version() if len(devices) > 1 else "",
        "compiler": compiler_version(),
        "disabled": sorted(knobs.disabled_passes), "threads": torch.get_num_threads(),
    }).digest  # fmt: skip


def save(
    key: str, signature: Signature, guards: GuardSet, name: str, optimizers: list[Source], executable: Any
) -> bool:
    """Keeps a capture. False where it cannot be described on disk; it then lives in this process only."""
    from nova.runtime import executable as executables
    from nova.runtime.cache import shared

    try:
        _check_classes(signature.out_spec)
        text = store.encode_capture(signature, guards, name, optimizers)
    except store.Unstorable:
        return False
    digest = hashlib.sha256((key + text).encode()).hexdigest()
    executables.save(executable, digest, name=name)
    cache = shared()
    with cache.lock("capture", key):
        entry = cache.get("capture", key)
        known = dict(entry.meta.get("variants", {})) if entry is not None else {}
        known[digest] = text
        cache.put("capture", key, {"variants": known})
    return True


def stored(key: str) -> Iterator[tuple[str, Callable[[], tuple[CapturedStep, GuardSet, list[Source]]]]]:
    """(digest, how to decode it) of the captures under a key."""
    from nova.runtime.cache import shared

    entry = shared().get("capture", key)
    if entry is None:
        return
    for digest, text in entry.meta.get("variants", {}).items():
        yield digest, partial(_decode, text)


def _decode(text: str) -> tuple[CapturedStep, GuardSet, list[Source]]:
    signature, guards, name, optimizers = store.decode_capture(text)
    return CapturedStep(None, signature, guards, name), guards, optimizers


def damaged(digest: str, error: Exception) -> None:
    from nova.runtime.cache import CacheWarning

    warnings.warn(f"Nova cache: ignoring capture {digest[:12]}: {error}; capturing again", CacheWarning, stacklevel=2)


def _check_classes(tree: Any) -> None:
    """Classes that a replay must construct have to be found by name in another process."""
    if isinstance(tree, dict):
        for kind, value in tree.items():
            if kind in ("mapping", "namedtuple", "sequence", "dataclass"):
                try:
                    find_class(f"{value[0]}:{value[1]}")
                except (ImportError, AttributeError):
                    raise store.Unstorable(f"class {value[1]}") from None
            _check_classes(value)
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            _check_classes(item)


# ---- state that the first step creates


def check_with_state(guards: GuardSet, roots: Roots) -> Mismatch | list[Any]:
    """`guards.check`, after creating the optimizer and scaler state it expects; undone where the guards fail anyway."""
    found = guards.check(roots)
    if isinstance(found, list) or found.what != GONE:
        return found
    undo = _create_state(guards, roots)
    if not undo:
        return found
    found = guards.check(roots)
    if not isinstance(found, list):
        for action in undo:
            action()
    return found


def _create_state(guards: GuardSet, roots: Roots) -> list[Callable[[], None]]:
    undo: list[Callable[[], None]] = []
    for index, node in enumerate(guards.nodes):
        if node.kind == "optimizer":
            wanted = [str(key) for kind, key in node.slots if kind == "state"]
            optimizer = _node_object(guards, index, roots)
            if ("attr", "state") in node.slots:
                continue  # the step's Python looks at whether there is any
            if isinstance(optimizer, _OPTIMIZERS) and wanted:
                undo += _create_optimizer_state(optimizer, wanted)
        elif node.type == "torch.amp.grad_scaler.GradScaler" and ("attr", "_scale") in node.slots:
            scaler = _node_object(guards, index, roots)
            if isinstance(scaler, torch.amp.GradScaler) and scaler._scale is None:
                scaler._lazy_init_scale_growth_tracker(torch.device(scaler._device))
                undo.append(partial(scaler.__dict__.update, _scale=None, _growth_tracker=None))
    return undo


def _node_object(guards: GuardSet, index: int, roots: Roots) -> Any:
    """The object of one node, or None."""
    steps = []
    while index > 0:
        steps.append(guards.nodes[index].step)
        index = guards.nodes[index].parent
    obj: Any = roots
    try:
        for step in reversed(steps):
            obj = follow_call(obj, step)
    except (KeyError, IndexError, AttributeError, TypeError, ValueError):
        return None
    return obj


def _create_optimizer_state(optimizer: torch.optim.Optimizer, wanted: list[str]) -> list[Callable[[], None]]:
    """What the first `step()` would create for these parameters ("group.index"), with PyTorch's own code."""
    by_group: dict[int, list[torch.Tensor]] = {}
    for key in wanted:
        group, position = map(int, key.split("."))
        try:
            param = optimizer.param_groups[group]["params"][position]
        except IndexError:
            return []
        if not optimizer.state.get(param):
            by_group.setdefault(group, []).append(param)
    undo: list[Callable[[], None]] = []
    for group, params in by_group.items():
        settings = {**optimizer.param_groups[group], "params": params}
        if settings.get("momentum") and settings.get("dampening"):
            continue  # SGD's first step is not dampened, so it is not the step that was captured
        grads = [p.grad for p in params]
        for p in params:
            p.grad = p.detach()  # only looked at: it says that the parameter takes part
        try:
            create: Any = optimizer._init_group  # type: ignore[attr-defined]
            lists = [name for name in inspect.signature(create).parameters if name != "group"]
            create(settings, *([] for _ in lists))
            if isinstance(optimizer, torch.optim.SGD) and settings["momentum"] != 0:
                for p in params:
                    zeros = torch.zeros_like(p, memory_format=torch.preserve_format)
                    optimizer.state[p].setdefault("momentum_buffer", zeros)
        finally:
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad
        undo += [partial(optimizer.state.pop, p, None) for p in params]
    return undo
