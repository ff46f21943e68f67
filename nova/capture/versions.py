"""Version counters: a replay counts the writes of a step where eager's operations would have.

    y = w.exp(); step(x); y.sum().backward()      eager: "modified by an inplace operation", if the step wrote to w

Which counters a step moves is seen while it is recorded: writes through `.data` and the running statistics of batch
norm move none. PyTorch's own function takes 45 ns a tensor; native code takes 2, where it finds the counters.
Nothing about memory layout is assumed: the offsets are found by looking for what `detach()` shares and `.data` does
not, and then checked.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch

from nova.runtime import orc, tensor_layout

_WORDS = 24  # of a TensorImpl that are looked at
_COUNTS = range(8, 24, 4)  # where a count may lie in a counter, after its table of virtual functions


class Versions:
    """The counters of a step's tensors before it ran."""

    def __init__(self, tensors: Iterable[torch.Tensor]):
        self._before = {id(tensor): _version(tensor) for tensor in tensors}

    def moved(self, tensor: torch.Tensor) -> bool:
        """Whether the step counted a write to a tensor; one that it made itself starts at nought."""
        return _version(tensor) != self._before.get(id(tensor), 0)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def bumper(positions: Sequence[int], use_native: bool) -> Callable[[list[Any]], Any]:
    """A function that counts a write to the tensors at these positions of a list."""
    if not positions:
        return lambda inputs: None
    native = _native() if use_native else None
    if native is None:
        increment = torch._C._increment_version  # type: ignore[attr-defined]
        return lambda inputs: increment([inputs[position] for position in positions])
    bump, count, places = native[0], len(positions), (ctypes.c_int64 * len(positions))(*positions)
    return lambda inputs: bump(inputs, places, count)


# ---- native code


def _words(address: int, count: int) -> list[int]:
    return list((ctypes.c_uint64 * count).from_address(address))


def _find_counter() -> tuple[int, int] | None:
    """Offsets of the pointer to the counter in a TensorImpl, and of the count in the counter."""
    tensor = torch.zeros(3)
    shares, has_own = tensor.detach(), tensor.data
    mine, same, other = (_words(t._cdata, _WORDS) for t in (tensor, shares, has_own))
    found = [
        i for i in range(_WORDS) if mine[i] == same[i] != other[i] and min(mine[i], other[i]) > 1 << 16
        and mine[i] % 8 == 0
    ]  # fmt: skip
    if len(found) != 1:
        return None
    read = []
    for _ in range(3):
        read.append([ctypes.c_uint32.from_address(mine[found[0]] + at).value for at in _COUNTS])
        tensor.add_(1)
    counts = [at for k, at in enumerate(_COUNTS) if [row[k] for row in read] == [0, 1, 2]]
    return (8 * found[0], counts[0]) if len(counts) == 1 else None


def _text(impl: int, counter: int, count: int) -> str:
    """`nova_bump(list, positions, count)`: one more write to each tensor. Inference tensors have no counter."""
    return f"""
declare ptr @PyList_GetItem(ptr, i64)

define void @nova_bump(ptr %list, ptr %positions, i64 %count) {{
entry:
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%i_next, %next]
  %more = icmp ult i64 %i, %count
  br i1 %more, label %tensor, label %done
tensor:
  %position_p = getelementptr i64, ptr %positions, i64 %i
  %position = load i64, ptr %position_p
  %object = call ptr @PyList_GetItem(ptr %list, i64 %position)
  %impl_p = getelementptr i8, ptr %object, i64 {impl}
  %impl = load ptr, ptr %impl_p
  %counter_p = getelementptr i8, ptr %impl, i64 {counter}
  %counter = load ptr, ptr %counter_p
  %none = icmp eq ptr %counter, null
  br i1 %none, label %next, label %add
add:
  %count_p = getelementptr i8, ptr %counter, i64 {count}
  %before = atomicrmw add ptr %count_p, i32 1 monotonic
  br label %next
next:
  %i_next = add i64 %i, 1
  br label %loop
done:
  ret void
}}
"""


@cache
def _native() -> tuple[Any, Any] | None:
    """`nova_bump` and the library that holds it; None where a layout is unknown."""
    layout = tensor_layout.tensor_layout()
    # Whatever the user's default device and grad mode are.
    with torch.device("cpu"), torch.enable_grad(), torch.inference_mode(False):
        counter = _find_counter()
        if layout is None or counter is None:
            return None
        library = orc.load(orc.compile_ir(_text(layout.impl, *counter)), ["nova_bump"])
        # PYFUNCTYPE: called with the GIL held, since the code reads Python objects.
        bump = ctypes.PYFUNCTYPE(None, ctypes.py_object, ctypes.c_void_p, ctypes.c_int64)(library["nova_bump"])
        return (bump, library) if _agrees(bump) else None


def _agrees(bump: Any) -> bool:
    """Whether PyTorch sees the writes that native code counts, on tensors of every kind that a step writes to."""
    base, leaf = torch.zeros(4, 4), torch.nn.Parameter(torch.zeros(2, 2))
    with torch.inference_mode():
        inference = torch.zeros(2)
    samples = [base, base[1:], leaf, leaf.detach(), leaf.data, torch.zeros(2, 3).t(), torch.zeros(()), inference]
    before = list(map(_version, samples))
    for position in range(len(samples)):
        bump(samples, (ctypes.c_int64 * 1)(position), 1)
    moved = [now - was for now, was in zip(map(_version, samples), before, strict=True)]
    return moved == [2, 2, 2, 2, 1, 1, 1, 0]  # a view and what it is of share a counter
