"""Tests on hardware: skipped where PyTorch finds no GPU. Kernels are compiled once and kept between tests.

`pytest tests/gpu -n 16 --dist worksteal` runs all but those that want the GPU to themselves, which `pytest tests/gpu -m
alone` runs; `-m quick` picks some of every family. Test processes side by side compile in themselves (NOVA_WORKERS=0).
"""

from __future__ import annotations

import os

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("NOVA_WORKERS", "0")
    torch.set_num_threads(1)


def pytest_configure(config):
    config.addinivalue_line("markers", "quick: some tests of every family, for a first look at a machine")
    config.addinivalue_line("markers", "alone: measures time or memory of a GPU that others must leave alone")


def pytest_collection_modifyitems(items):
    there = torch.cuda.is_available()
    crowd = "PYTEST_XDIST_WORKER" in os.environ
    for item in items:
        if "tests/gpu/" not in str(item.path):
            continue
        if item.path.name == "test_runtime_gpu.py":
            item.add_marker(pytest.mark.alone)
        if not there:
            item.add_marker(pytest.mark.skip(reason="no GPU"))
        elif crowd and item.get_closest_marker("alone"):
            item.add_marker(pytest.mark.skip(reason="wants the GPU to itself: -m alone, without -n"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A process whose CUDA context is lost ends: the tests that it still has go to another one."""
    report = yield
    if report.failed and "PYTEST_XDIST_WORKER" in os.environ and torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except Exception as lost:
            text = f"{item.nodeid}: the CUDA context is lost: {str(lost).splitlines()[0]}\n{report.longreprtext}\n"
            os.write(2, text.encode())
            os._exit(3)
    return report


@pytest.fixture(autouse=True)
def settings():
    """Full float32 in eager, as in compiled steps."""
    precision = torch.get_float32_matmul_precision()
    convolutions = torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = convolutions
    torch.cuda.synchronize()
