"""Which checks of a step find nothing that an earlier one has not found, and which kernels may look at its flag."""

from __future__ import annotations

import torch
from torch import nn

import nova
from nova import mlir
from nova.fusion import raises, records

TEXT = """
func.func @step(%t: tensor<9x8xf32>, %u: tensor<5x8xf32>, %i: tensor<2x3xi64>, %d: tensor<6x8xf32>)
    -> (tensor<2x3x8xf32>, tensor<2x3x8xf32>, tensor<9x8xf32>, tensor<1x3x8xf32>, tensor<6xi64>) {
  %a = "nova.take"(%t, %i) : (tensor<9x8xf32>, tensor<2x3xi64>) -> tensor<2x3x8xf32>
  %b = "nova.take"(%u, %i) : (tensor<5x8xf32>, tensor<2x3xi64>) -> tensor<2x3x8xf32>
  %f = "nova.reshape"(%i) : (tensor<2x3xi64>) -> tensor<6xi64>
  %c = "nova.take_backward"(%d, %f) {rows = 9 : i64, padding_idx = -1 : i64}
    : (tensor<6x8xf32>, tensor<6xi64>) -> tensor<9x8xf32>
  %h = "nova.slice"(%i) {starts = array<i64: 0, 0>, limits = array<i64: 1, 3>, strides = array<i64: 1, 1>}
    : (tensor<2x3xi64>) -> tensor<1x3xi64>
  %e = "nova.take"(%t, %h) : (tensor<9x8xf32>, tensor<1x3xi64>) -> tensor<1x3x8xf32>
  %s = "nova.add"(%f, %f) : (tensor<6xi64>, tensor<6xi64>) -> tensor<6xi64>
  return %a, %b, %c, %e, %s : tensor<2x3x8xf32>, tensor<2x3x8xf32>, tensor<9x8xf32>, tensor<1x3x8xf32>, tensor<6xi64>
}"""


def test_equal_checks_are_those_of_the_same_values_for_the_same_bounds():
    with mlir.context():
        module = mlir.parse(TEXT)
        function = records.read(module.body.operations[0])
    found = [raises.checks([op]) for op in function.ops if op.name != "reshape"]
    nine, five, backward, part, nothing = (found[k] for k in (0, 1, 2, -2, -1))
    assert len(nine) == 1 and nine == backward  # in another shape
    assert nine != five and part != nine and not nothing


def marks(step, *args) -> str:
    return nova.capture(step, *args).lower("h200").as_text()


def test_a_gradient_repeats_the_check_of_its_forward():
    table = nn.Embedding(9, 8)

    def step(i):
        table(i).square().sum().backward()
        table.weight.data -= 0.1 * table.weight.grad
        table.weight.grad = None

    text = marks(step, torch.tensor([1, 2, 3]))
    calls = [line for line in text.splitlines() if "call @" in line]
    assert "nova.repeats" not in calls[0] and sum("nova.repeats" in line for line in calls) == 1
    assert "nova.guarded" in text
