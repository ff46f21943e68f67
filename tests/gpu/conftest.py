"""Tests on hardware: skipped where PyTorch finds no GPU. Kernels are compiled once and kept between tests."""

from __future__ import annotations

import pytest
import torch


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
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(precision)
    torch.cuda.synchronize()
