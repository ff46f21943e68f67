"""Verifiers name the op, what is wrong, and the shapes; the parser runs them, and points at the line."""

import re

import pytest

from nova import mlir
from nova.dialect import base, ops  # noqa: F401

ARGUMENTS = {
    "a": "tensor<3x5xf32>",
    "b": "tensor<5x7xf32>",
    "c": "tensor<4xf32>",
    "h": "tensor<3x5xbf16>",
    "i": "tensor<3xi64>",
    "f": "tensor<3x5xi1>",
    "q": "tensor<2x4x5x6xf32>",
    "k": "tensor<2x3x7x6xf32>",
    "s": "tensor<f64>",
}

# (op, operands, result types, attributes, message)
WRONG = [
    ("add", "a b", "3x5xf32", "", "nova.add: shapes do not broadcast: [3, 5], [5, 7]"),
    ("add", "a h", "3x5xf32", "", "operands f32[3,5], bf16[3,5] differ in dtype"),
    ("mul", "a a", "5x3xf32", "", "result f32[5,3] is not the broadcast of f32[3,5], f32[3,5]"),
    ("lt", "a a", "3x5xf32", "", "result f32[3,5] must be bool"),
    ("exp", "i", "3xi64", "", "operand i64[3] must have a dtype of kind 'float'"),
    ("gelu", "a", "3x5xf32", 'approximate = "erf"', "approximate is 'none' or 'tanh', not 'erf'"),
    ("gelu", "a", "3x5xf32", "", "attribute approximate is missing"),
    ("reduce_sum", "a", "5xf32", "dims = [0], keepdim = false", "attribute dims must be of kind ints, got [0]"),
    (
        "reduce_sum",
        "a",
        "3xf32",
        "dims = array<i64: 0>, keepdim = false",
        "result f32[3] of reducing f32[3,5] over [0] must have shape [5]",
    ),
    ("reduce_max", "a", "3x5xf32", "dims = array<i64: 2>, keepdim = true", "reduced dim 2 is out of range for rank 2"),
    ("matmul", "a a", "3x5xf32", "", "contracted dims of f32[3,5] and f32[3,5] differ: 5 and 3"),
    ("linear", "a h", "3x3xf32", "", "operands f32[3,5] and bf16[3,5] must be floats of one dtype"),
    ("linear", "a b", "3x5xf32", "", "input f32[3,5] and weight f32[5,7] differ in the contracted dim"),
    ("linear", "a a c", "3x3xf32", "", "bias f32[4] must have shape [3]"),
    ("reshape", "a", "4x4xf32", "", "cannot reshape f32[3,5] to f32[4,4]: 15 elements"),
    ("transpose", "a", "3x3xf32", "permutation = array<i64: 0, 0>", "[0, 0] does not permute f32[3,5]"),
    ("broadcast", "c", "3x5xf32", "dims = array<i64: 1>", "dim 0 of f32[4] does not broadcast to dim 1 of f32[3,5]"),
    (
        "slice",
        "a",
        "3x6xf32",
        "starts = array<i64: 0, 0>, limits = array<i64: 3, 6>, strides = array<i64: 1, 1>",
        "slice 0:6:1 of dim 1 is out of bounds for [3, 5]",
    ),
    ("concat", "a b", "8x5xf32", "dim = 0 : i64", "f32[3,5] and f32[5,7] do not concatenate along dim 0"),
    (
        "as_strided",
        "a",
        "2xf32",
        "size = array<i64: 2>, stride = array<i64: 1>, offset = 14 : i64",
        "reads element 15 of f32[3,5], which has 15",
    ),
    ("take", "a a", "3x5x5xf32", "", "index f32[3,5] must be i64 or i32"),
    ("where", "a a a", "3x5xf32", "", "condition f32[3,5] must be i1"),
    (
        "layer_norm",
        "a c",
        "3x5xf32 3x1xf32 3x1xf32",
        "axes = 1 : i64, eps = 1.0e-5",
        "parameter f32[4] of input f32[3,5] must have shape [5]",
    ),
    (
        "attention",
        "q k k",
        "2x4x5x6xf32 2x4x5xf32",
        "has_mask = false, has_seed = false, causal = true, scale = 1.0, dropout_p = 0.0, stream = 0 : i64",
        "3 key heads of f32[2,3,7,6] do not divide 4 query heads",
    ),
    (
        "sce",
        "a c",
        "f32 3xf32",
        "has_weight = false, ignore_index = -100, label_smoothing = 0.0, reduction = 1",
        "target f32[4] must be i64[3]",
    ),
    ("cast", "a", "5x3xf64", "", "cast changes shape: f32[3,5] to f64[5,3]"),
    (
        "aten_call",
        "a",
        "3x5xf32",
        'op = "aten.sin.default", args = "{\\"args\\": [], \\"kwargs\\": {}}"',
        "args uses operands [] of 1",
    ),
    ("constant", "", "3xf32", "value = dense<1.0> : tensor<2xf32>", "value f32[2] does not fit result f32[3]"),
]


def module_text(op: str, operands: str = "", results: str = "", attrs: str = "") -> str:
    arguments = ", ".join(f"%{name}: {type_}" for name, type_ in ARGUMENTS.items())
    names = operands.split()
    types = [f"tensor<{result}>" for result in results.split()]
    given = [ARGUMENTS[name] for name in names]
    segments = base.segment_texts(op, given, types, flags(attrs))
    left = f"%r:{len(types)} = " if types else ""
    listed = ", ".join(f"%{name}" for name in names)
    text = f'"nova.{op}"({listed}) {{{", ".join([*([attrs] if attrs else []), *segments])}}}'
    return f"func.func @step({arguments}) {{\n{left}{text} : ({', '.join(given)}) -> ({', '.join(types)})\nreturn\n}}"


def flags(attrs: str) -> dict[str, bool]:
    return {name: value == "true" for name, value in re.findall(r"(\w+) = (true|false)", attrs)}


@pytest.mark.parametrize("case", WRONG, ids=lambda case: f"{case[0]}: {case[4]}")
def test_a_verifier_names_what_is_wrong(case):
    *op, message = case
    with pytest.raises(Exception) as raised:
        mlir.parse(module_text(*op))
    assert message in str(raised.value), raised.value
    assert f"nova.{op[0]}" in str(raised.value)


def test_errors_point_at_the_line():
    with pytest.raises(Exception, match=r'"-":2:8: nova.exp: operand i64'):
        mlir.parse(module_text("exp", "i", "3xi64"))


def test_unknown_ops_are_refused():
    with pytest.raises(Exception, match=r"unregistered operation 'nova.expo'"):
        mlir.parse(module_text("expo", "a", "3x5xf32"))


def test_wrong_arity_is_refused():
    with pytest.raises(Exception, match="operands"):
        mlir.parse(module_text("add", "a", "3x5xf32"))


def test_verify_finds_what_a_pass_broke():
    module = mlir.parse(module_text("exp", "a", "3x5xf32"))
    block = module.body.operations[0].regions[0].blocks[0]
    block.operations[0].operation.operands[0] = block.arguments[1]
    with pytest.raises(Exception, match=r"result f32\[3,5\] is not the broadcast of f32\[5,7\]"):
        module.operation.verify()


def test_text_is_the_whole_op():
    module = mlir.parse(module_text("cast", "a", "3x5xf64"))
    assert str(mlir.parse(str(module))) == str(module)
