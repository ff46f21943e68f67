// RUN: nova-opt form-dispatches
// The transpose and reshape that put heads back are the layout in which attention writes; no kernel repacks.
func.func @step(%q: tensor<2x3x5x4xf32>, %w: tensor<12x12xf32>) -> tensor<2x5x12xf32> {
  %0:2 = "nova.attention"(%q, %q, %q) {has_mask = false, has_seed = false, causal = true, scale = 0.5 : f64, dropout_p = 0.0 : f64,
      stream = 0 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>}
      : (tensor<2x3x5x4xf32>, tensor<2x3x5x4xf32>, tensor<2x3x5x4xf32>) -> (tensor<2x3x5x4xf32>, tensor<2x3x5xf32>)
  %1 = "nova.transpose"(%0#0) {permutation = array<i64: 0, 2, 1, 3>} : (tensor<2x3x5x4xf32>) -> tensor<2x5x3x4xf32>
  %2 = "nova.reshape"(%1) : (tensor<2x5x3x4xf32>) -> tensor<2x5x12xf32>
  %3 = "nova.linear"(%2, %w) : (tensor<2x5x12xf32>, tensor<12x12xf32>) -> tensor<2x5x12xf32>
  return %3 : tensor<2x5x12xf32>
}
// CHECK: nova.attention{{.*}}nova.group = 0 : i64, nova.kind = "attention_forward"
// CHECK: nova.copy{{.*}}nova.group = 0
// CHECK: nova.linear{{.*}}nova.group = 1
