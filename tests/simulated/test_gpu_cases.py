"""Small cases of gpu_case_list.py on the warp simulator: what a GPU is asked, with fresh data and poisoned memory."""

from __future__ import annotations

import pytest

from tests import gpu_case_list, gpu_cases
from tests.simulated.test_whole_steps import simulated  # noqa: F401  (a fixture)

NAMES = [
    "elementwise/shape-7", "elementwise/shape-3x0x5", "elementwise/special-bf16", "rows/rms-norm-5x1-f32",
    "cross_entropy/plain-37x11-f32", "whole/9-f32", "copies/writes", "indexed/embedding-40-7x5-f32", "indexed/index",
    "contractions/1x1x1-bf16", "contractions/0x8x8-bf16", "contractions/64x64x0-f16", "layers/rnn",
    "layers/empty-mlp",
]  # fmt: skip
SLOW = [
    "contractions/33x65x17-bf16", "contractions/33x65x17-tf32", "contractions/vectors",
    "attention/values-of-another-width-f32", "attention/full-17x1-f32", "layers/gru",
]  # fmt: skip


@pytest.mark.parametrize("name", [*NAMES, *[pytest.param(name, marks=pytest.mark.lengthy) for name in SLOW]])
def test_case(simulated, name):  # noqa: F811
    gpu_cases.check(gpu_case_list.cases()[name], "cpu")
    assert simulated.driver.called("cuLaunchKernel") or "empty" in name or "x0" in name or "/0x" in name
