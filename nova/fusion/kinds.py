"""Which ops are kernels by themselves, of which kind, and which stay in the step."""

from __future__ import annotations

OPTIMIZERS = frozenset({"sgd", "adam", "adagrad", "rmsprop"})
ATTENTION = frozenset({"attention", "attention_backward"})
ALONE = {
    "attention": "attention_forward", "attention_backward": "attention_backward", "take_backward": "scatter",
    "scatter": "scatter", "index_put": "scatter", "as_strided_scatter": "scatter", "max_pool2d_backward": "scatter",
    "cumsum": "scan", "cumprod": "scan", "foreach_norm": "multi_tensor",
}  # fmt: skip
STEP_OPS = frozenset({"aten_call", "bucket_ready", "func.call"})
