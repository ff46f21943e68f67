"""What the kernels of a compiled step on a GPU have found, as far as the host knows without waiting.

    device   slot 0: the flag of the step      slot k: int64[4] of (flag, value, address of slot 0's flag, 0)
    host     page-locked: the slots after step 0, 1, 2, ... of the last RING steps; PENDING until a step's copy arrives

A check sets its slot's flag and the step's. That stays set until the error is raised, and whatever writes lifted state
does nothing meanwhile. So the first step that found something and those launched after it leave parameters, optimizer
state and buffers as they were, as if the exception had come at once. The step counts that the host has moved on for
them are put back.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from nova.runtime.step_plan import ERROR_BYTES

RING = 64  # steps that may be under way
PENDING = -1
_WORDS = ERROR_BYTES // 8


class Pinned:
    """Page-locked words on the host."""

    def __init__(self, device: Any, words: int):
        self._device, self.address = device, device.pinned(8 * words)
        self.words = (ctypes.c_int64 * words).from_address(self.address)
        ctypes.memset(self.address, 0, 8 * words)

    def __del__(self) -> None:
        self._device.driver.result("cuMemFreeHost", self.address)


class ErrorRecords:
    """The records of one executable. Steps are numbered as they are launched."""

    def __init__(self, slots: int, device: Any, where: torch.device):
        self.slots, self.words = slots, slots * _WORDS
        self.tensor = torch.zeros(self.words, dtype=torch.int64, device=where)  # on the device
        clean = torch.zeros(self.words, dtype=torch.int64)
        clean[_WORDS + 2 :: _WORDS] = self.tensor.data_ptr()
        self._clean = clean.to(where)
        self.clear()
        self._host = Pinned(device, RING * self.words)
        self._launched = self._known = 0  # steps; those before `_known` have found nothing
        self._open = False  # the last step may still fail to be launched
        self._counts: deque[Sequence[torch.Tensor]] = deque()  # of the steps from `_known` on

    def clear(self) -> None:
        self.tensor.copy_(self._clean)

    @property
    def full(self) -> bool:
        """Whether the host must wait for the device before another step."""
        return self._launched - self._known >= RING

    def next(self, counts: Sequence[torch.Tensor]) -> int:
        """Where on the host the records of the step that is launched now go. `counts`: what it counts up there."""
        place = self._launched % RING * self.words
        self._host.words[place] = PENDING
        self._launched += 1
        self._open = True
        self._counts.append(counts)
        return self._host.address + 8 * place

    def cancel(self) -> None:
        """The step that `next` was for could not be launched as a whole. May be said twice."""
        if self._open:
            self._open = False
            self._launched -= 1
            self._counts.pop()

    def bad(self) -> bool:
        """Whether a step is known to have found an error; forgets the good ones before it."""
        words = self._host.words
        while self._known < self._launched:
            flag = words[self._known % RING * self.words]
            if flag:
                return flag != PENDING
            self._known += 1
            self._counts.popleft()
        return False

    def all_known(self) -> bool:
        """Whether the records of every step have arrived: its kernels have run to their end."""
        self.bad()
        return self._known == self._launched

    def take(self) -> dict[int, int]:
        """Slot -> value of the first bad step, once all steps are done. Everything is as before that step then."""
        first = self._known % RING * self.words
        entry = self._host.words[first : first + self.words]
        found = {k: entry[k * _WORDS + 1] for k in range(1, self.slots) if entry[k * _WORDS]}
        for counts in self._counts:
            put_back(counts)
        self._counts.clear()
        self._known = self._launched
        self.clear()
        return found


def put_back(counts: Sequence[torch.Tensor]) -> None:
    """Numbers on the host that a step has counted up and that it should not have."""
    if counts:
        with torch.no_grad():
            torch._foreach_sub_([count.detach() for count in counts], 1)
