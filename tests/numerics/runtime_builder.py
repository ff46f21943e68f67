"""A kernel builder for pool tests: the text says how to behave. Runs in worker processes, without PyTorch."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Built:
    name: str
    entry: str
    object_code: bytes
    workspace: int
    llvm_ir: str


def build(text: str, target: Any) -> Built:
    """Texts: echo X, slow X, fail, print X, die PATH (once: leaves PATH behind), die always."""
    word, _, rest = text.partition(" ")
    if word == "fail":
        raise ValueError("this kernel cannot be compiled")
    if word == "die" and (rest == "always" or not Path(rest).exists()):
        if rest != "always":
            Path(rest).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "print":
        print(rest, flush=True)
    if word == "slow":
        time.sleep(0.2)
    torch = "torch" in sys.modules
    return Built("k", f"entry_{word}", f"{text}|{target}|{os.getpid()}|{torch}".encode() * 3, len(text), "; ir " + rest)
