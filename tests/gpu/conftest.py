"""Tests on hardware: skipped where PyTorch finds no GPU. Kernels are compiled once and kept between tests.

`pytest tests/gpu -n 16` runs all of them, `-m quick` some of every family. Many test processes at a time compile best
with `NOVA_WORKERS=0`, which is what a process under pytest-xdist takes unless something else is asked for.
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
    if torch.cuda.is_available():
        return
    for item in items:
        if "tests/gpu/" in str(item.path):
            item.add_marker(pytest.mark.skip(reason="no GPU"))


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
