"""Process-wide state that PyTorch's behaviour depends on: guarded as a whole, and put back by a refused step."""

from __future__ import annotations

import sys
import uuid
import weakref
from collections import deque
from functools import partial
from typing import Any

import torch
from torch._C import _functorch  # type: ignore[attr-defined]
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

_HOOK_TABLES = (
    ("torch.nn.modules.module", "_global_forward_hooks"),
    ("torch.nn.modules.module", "_global_forward_pre_hooks"),
    ("torch.nn.modules.module", "_global_backward_hooks"),
    ("torch.nn.modules.module", "_global_backward_pre_hooks"),
    ("torch.optim.optimizer", "_global_optimizer_pre_hooks"),
    ("torch.optim.optimizer", "_global_optimizer_post_hooks"),
)


_PROCESS = uuid.uuid4().hex
_HELD = 256
_tokens: dict[int, tuple[Any, str]] = {}  # id -> what leads to the object, its name; goes when the object does
_held: deque[Any] = deque()  # objects that cannot be referred to weakly: the oldest goes when there are many


def token(obj: Any) -> str:
    """A name that no other object has, also none that comes to lie at its address, in this process or another."""
    reference, name = _tokens.get(id(obj), (None, ""))
    if reference is None or reference() is not obj:
        try:
            reference = weakref.ref(obj, partial(_forget, id(obj)))
        except TypeError:
            reference = _hold(obj)
        name = f"{_PROCESS}.{uuid.uuid4().hex}"
        _tokens[id(obj)] = reference, name
    return name


def _hold(obj: Any) -> Any:
    """What leads to an object that stays until many others came after it; a later token of it is another one."""
    _held.append(obj)
    if len(_held) > _HELD:
        _tokens.pop(id(_held.popleft()), None)
    return lambda: obj


def _forget(address: int, reference: Any) -> None:
    known = _tokens.get(address)
    if known is not None and known[0] is reference:
        del _tokens[address]


def environment() -> tuple[Any, ...]:
    """Grad mode, autocast, default dtype, determinism, float32 matmul precision, global hooks, TF32, default device."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        str(torch.get_autocast_dtype("cpu")),
        torch.is_autocast_enabled("cuda"),
        str(torch.get_autocast_dtype("cuda")),
        str(torch.get_default_dtype()),
        torch.are_deterministic_algorithms_enabled(),
        matmul_precision(),
        tuple(token(hook) for table in global_hook_tables() for hook in table.values()),
        tf32_allowed(),
        default_devices(),
    )


def _modes() -> list[Any]:
    """The modes around this call that see every PyTorch function or operation."""
    c: Any = torch._C
    found = [c._get_function_stack_at(at) for at in range(c._len_torch_function_stack())]
    return found + [c._get_dispatch_stack_at(at) for at in range(c._len_torch_dispatch_stack())]


def default_devices() -> str:
    """`torch.set_default_device` and `with torch.device(...)`."""
    return ", ".join(str(mode.device) for mode in _modes() if isinstance(mode, DeviceContext))


def watching() -> str:
    """What around this call runs Python inside every operation, or gives each another meaning, or checks it, so that
    no replay can stand for it; "" if nothing does."""
    found = [f"the mode {type(mode).__name__}" for mode in _modes() if not isinstance(mode, DeviceContext)]
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        found.append("hooks on saved tensors")
    if torch.is_anomaly_enabled():
        found.append("anomaly detection")
    if _functorch.peek_interpreter_stack() is not None:
        found.append("a transform of torch.func")
    elif forward_ad._current_level >= 0:
        found.append("a level of forward-mode differentiation")
    return ", ".join(found)


def matmul_precision() -> str:
    """PyTorch's float32 matmul precision; it has no answer where the two interfaces for it were both used."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "mixed"


def tf32_allowed() -> bool:
    """Whether PyTorch may compute float32 matmuls on a GPU in TF32."""
    matmul = torch.backends.cuda.matmul
    said = getattr(matmul, "fp32_precision", "none")
    if said == "none":
        said = getattr(torch.backends, "fp32_precision", "none")
    try:
        return said == "tf32" or (said == "none" and matmul.allow_tf32)
    except RuntimeError:
        return False


def restore_environment(state: tuple[Any, ...]) -> None:
    """Puts back what a refused step left changed."""
    torch.set_grad_enabled(state[0])
    torch.set_default_dtype(getattr(torch, state[6].removeprefix("torch.")))
    torch.use_deterministic_algorithms(state[7])
    if state[8] != matmul_precision():
        torch.set_float32_matmul_precision(state[8])
    if state[11] != default_devices():
        torch.set_default_device(state[11] or None)


ENVIRONMENT_NAMES = (
    "grad mode", "inference mode", "autocast on the CPU", "the CPU autocast dtype", "autocast on CUDA",
    "the CUDA autocast dtype", "the default dtype", "use_deterministic_algorithms", "the float32 matmul precision",
    "global hooks", "TF32 in CUDA matmuls", "the default device",
)  # fmt: skip


def global_hook_tables() -> list[dict[Any, Any]]:
    return [getattr(sys.modules[module], name) for module, name in _HOOK_TABLES if module in sys.modules]


def fast_checks(state: tuple[Any, ...], space: dict[str, Any], on_gpu: bool) -> list[str]:
    """Python lines of the check of this state that runs on every call; what they name is put into `space`."""
    space.update(
        grad=torch.is_grad_enabled, inference=torch.is_inference_mode_enabled, autocast=torch.is_autocast_enabled,
        autocast_type=torch.get_autocast_dtype, default=torch.get_default_dtype, hooks=global_hook_tables(),
        deterministic=torch._C._get_deterministic_algorithms, D=torch.get_default_dtype(),
        functions=torch._C._len_torch_function_stack, operations=torch._C._len_torch_dispatch_stack,
        anomaly=torch.is_anomaly_enabled, saved=torch._C._autograd._top_saved_tensors_default_hooks,
        matmul=torch._C._get_float32_matmul_precision if state[8] != "mixed" else matmul_precision,
        devices=default_devices, transforms=_functorch.peek_interpreter_stack, forward_ad=forward_ad,
    )  # fmt: skip
    lines = [
        f"if grad() is not {state[0]} or inference() is not {state[1]}: return None",
        f"if deterministic() is not {state[7]}: return None",
        f"if autocast('cpu') is not {state[2]} or autocast('cuda') is not {state[4]}: return None",
    ]
    count = len(state[11].split(", ")) if state[11] else 0
    lines.append(f"if functions() != {count} or operations() or anomaly() or saved(False) is not None: return None")
    lines.append("if transforms() is not None or forward_ad._current_level >= 0: return None")
    if count:
        lines.append(f"if devices() != {state[11]!r}: return None")
    for position, device in ((2, "cpu"), (4, "cuda")):
        if state[position]:
            space[f"autocast_{device}"] = torch.get_autocast_dtype(device)
            lines.append(f"if autocast_type({device!r}) is not autocast_{device}: return None")
    lines.append(f"if default() is not D or matmul() != {state[8]!r}: return None")
    if on_gpu:
        space["tf32"] = tf32_allowed
        lines.append(f"if tf32() is not {state[10]}: return None")
    if state[9]:
        space["environment"], space["state"] = environment, state
        lines.append("if environment() != state: return None")
    else:
        lines.append("if any(hooks): return None")
    return lines
