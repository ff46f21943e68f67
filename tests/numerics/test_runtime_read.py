"""From the outlined @step in MLIR to a call: what `read_step` understands, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from nova import mlir
from nova.dialect.ops import REGISTRY
from nova.errors import CompileError
from nova.runtime import executable, key
from nova.runtime.read_step import read_step
from tests.numerics import runtime_kernels as kernels

STEP = """
module {
  module @kernels {
    func.func private @add_0(%a: tensor<6xf32>, %b: tensor<6xf32>, %y: tensor<6xf32>) -> tensor<6xf32>
        attributes {nova.kernel = "loops"} {
      return %a : tensor<6xf32>
    }
  }
  func.func private @scale_0(tensor<6xf32>, tensor<f64>) -> tensor<6xf32> attributes {nova.kernel = "loops"}
  func.func private @add_0(tensor<6xf32>, tensor<6xf32>) -> tensor<6xf32>
      attributes {nova.kernel = "loops", nova.inplace = [[0, 0], [1, 0]]}
  func.func private @checked_0(tensor<5xi64>) -> tensor<5xi64>
      attributes {nova.kernel = "loops", nova.raises = "IndexError: label {value} is out of range"}
  func.func @step(%w: tensor<6xf32> {nova.role = "param", nova.name = "w", nova.donates = 1 : i64},
                  %x: tensor<2x3xf32> {nova.role = "arg", nova.name = "x"},
                  %labels: tensor<5xi64> {nova.role = "arg", nova.name = "labels"},
                  %lr: tensor<f64> {nova.role = "scalar", nova.name = "lr"},
                  %seed: tensor<i64> {nova.role = "seed", nova.name = "seed"})
      -> (tensor<2x3xf32> {nova.kind = "user", nova.strides = array<i64: 1, 2>}, tensor<6xf32> {nova.kind = "state"},
          tensor<f32> {nova.kind = "user"}, tensor<5xi64> {nova.kind = "user"}, tensor<2xi1> {nova.kind = "user"}) {
    %flat = "nova.reshape"(%x) : (tensor<2x3xf32>) -> tensor<6xf32>
    %ok = func.call @checked_0(%labels) : (tensor<5xi64>) -> tensor<5xi64> loc("h.0"("train.py":12:3))
    %step = func.call @scale_0(%flat, %lr) : (tensor<6xf32>, tensor<f64>) -> tensor<6xf32>
    %new = func.call @add_0(%w, %step) : (tensor<6xf32>, tensor<6xf32>) -> tensor<6xf32>
    %shaped = "nova.reshape"(%new) : (tensor<6xf32>) -> tensor<2x3xf32>
    %sum = "nova.aten_call"(%shaped) {SEGMENTS, op = "aten::sum.default",
        args = "{\\"args\\": [{\\"t\\": 0}], \\"kwargs\\": {}}"} : (tensor<2x3xf32>) -> tensor<f32>
    %flags = "nova.constant"() {value = dense<[true, false]> : tensor<2xi1>} : () -> tensor<2xi1>
    return %shaped, %new, %sum, %ok, %flags : tensor<2x3xf32>, tensor<6xf32>, tensor<f32>, tensor<5xi64>, tensor<2xi1>
  }
}
"""
_CALL = REGISTRY["aten_call"]
_OPERANDS = _CALL.operands.segments([((2, 3), "f32")], {})
_RESULTS = _CALL.results.segments([((), "f32")], {})
STEP = STEP.replace(
    "SEGMENTS",
    f"operandSegmentSizes = array<i32: {', '.join(map(str, _OPERANDS))}>, "
    f"resultSegmentSizes = array<i32: {', '.join(map(str, _RESULTS))}>",
)


def objects():
    return {"scale_0": kernels.scale(6), "add_0": kernels.add(6), "checked_0": kernels.checked_copy(5)}


def test_module_becomes_an_executable():
    step = executable.build(mlir.parse(STEP), objects())
    assert [i.name for i in step.plan.inputs] == ["w", "x", "labels"] and step.plan.scalars == 1 and step.plan.seeded
    w, x, labels = torch.randn(6), torch.randn(2, 3), torch.arange(5)
    want = w + x.reshape(6) * 0.5
    shaped, total, ok, flags = step([w, x, labels], [0.5], 3)
    assert torch.allclose(w, want) and torch.equal(shaped.reshape(6), w) and shaped.stride() == (1, 2)
    assert torch.allclose(total, want.sum()) and torch.equal(ok, labels) and flags.tolist() == [True, False]
    before = w.clone()
    with pytest.raises(IndexError, match="label -4 is out of range\n  at train.py, line 12"):
        step([w, x, torch.tensor([0, -4, 1, 1, 1])], [0.5], 3)
    assert torch.equal(w, before)
    assert step.memory_plan.donated


def test_operation_that_is_not_outlined_is_refused():
    text = STEP.replace('"nova.reshape"(%new) : (tensor<6xf32>)', '"nova.relu"(%x) : (tensor<2x3xf32>)')
    with pytest.raises(CompileError, match=r"nova\.relu"):
        read_step(mlir.parse(text))


def test_key_ignores_names_and_lines_and_sees_the_rest():
    def digest(text: str) -> str:
        return key.module_key(mlir.parse(text), options={"precision": "f32"}).digest

    plain = digest(STEP)
    renamed = STEP.replace("@scale_0", "@other_7").replace("%new", "%fresh").replace('"w"', '"h.0.weight"')
    assert digest(renamed.replace("train.py", "test.py").replace(":12:3", ":99:1")) == plain
    edits = [("nova.donates = 1", "nova.donates = 0"), ('nova.role = "param"', 'nova.role = "buffer"'),
             ("%w, %step", "%step, %w"), ("[[0, 0], [1, 0]]", "[[0, 0]]"), ("array<i64: 1, 2>", "array<i64: 3, 1>"),
             ("[true, false]", "[true, true]"), ("sum.default", "mean.default")]  # fmt: skip
    for old, new in edits:
        assert digest(STEP.replace(old, new)) != plain, old
