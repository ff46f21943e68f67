"""Every kernel of the census on every architecture: no spills, no stack, no warnings, and the promised instructions."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from census.machine_code import NEEDS_TOOLS, Kernel, check

FAMILIES = sorted(path.stem for path in Path(__file__).parent.glob("kernels_*.py"))
KERNELS: list[Kernel] = [k for family in FAMILIES for k in importlib.import_module(f"census.{family}").KERNELS]
CASES = [(kernel, arch) for kernel in KERNELS for arch in kernel.archs]


@NEEDS_TOOLS
@pytest.mark.parametrize(("kernel", "arch"), CASES, ids=[f"{k.name}-{arch}" for k, arch in CASES])
def test_kernel(kernel: Kernel, arch: str) -> None:
    check(kernel, arch)


def test_names_are_unique() -> None:
    names = [kernel.name for kernel in KERNELS]
    assert len(names) == len(set(names))
