// RUN: nova-opt lower-attention
// A padding mask [B,1,1,S] is read as it is: stride 0 over heads and queries.
func.func private @attention(%q: tensor<4x4x64x16xf32>, %k: tensor<4x2x64x16xf32>, %v: tensor<4x2x64x16xf32>, %mask: tensor<4x1x1x64xi1>) -> (tensor<4x4x64x16xf32>, tensor<4x4x64xf32>) {
  %r:2 = "nova.attention"(%q, %k, %v, %mask) {has_mask = true, has_seed = false, causal = false, scale = 2.50000000000000000e-01 : f64, dropout_p = 0.00000000000000000e+00 : f64, stream = 5 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 1, 0>} : (tensor<4x4x64x16xf32>, tensor<4x2x64x16xf32>, tensor<4x2x64x16xf32>, tensor<4x1x1x64xi1>) -> (tensor<4x4x64x16xf32>, tensor<4x4x64xf32>)
  return %r#0, %r#1 : tensor<4x4x64x16xf32>, tensor<4x4x64xf32>
}

// CHECK: "nova.online_attention"
// CHECK-SAME: mask_access = array<i64: 0, 64, 0, 0, 1>
// CHECK-SAME: sizes = array<i64: 4, 4, 2, 64, 64, 16, 16>
