"""What PyTorch demands of the lists of a `torch._foreach_*` call, in its words.

The operations of a call are recorded one by one, so nothing else compares the lengths of its lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def count(arguments: Mapping[Any, Any]) -> int:
    """How many tensors a call is about. `arguments`: by name where it matters. Raises where lists do not fit."""
    lists = [value for value in arguments.values() if isinstance(value, (list, tuple))]
    tensors = [found for found in lists if all(isinstance(item, Tensor) for item in found)]
    number = len(tensors[0]) if tensors else 0
    for found in tensors[1:]:
        if len(found) != number:
            raise RuntimeError(f"Tensor lists must have the same number of tensors, got {number} and {len(found)}")
    if not number:
        raise RuntimeError("Tensor list must have at least one tensor.")
    if any(len(found) != number for found in lists):
        raise RuntimeError("Tensor list must have same number of elements as scalar list.")
    scalars, other = arguments.get("scalars"), arguments.get("other")
    if isinstance(scalars, Tensor) and len(scalars) != number:
        raise RuntimeError(
            f"Expected length of scalars to match input of length {number} but got {len(scalars)} instead."
        )
    if isinstance(other, Tensor) and other.dim() > 0:
        raise RuntimeError(
            f"scalar tensor expected to be 0 dim but it has {other.dim()} dimensions and {other.numel()} elements."
        )
    return number
