// RUN: nova-opt lower-attention
// The gradient of an additive mask sums over the dims the mask repeats along (stride 0): an op of its own.
func.func private @attention(%dout: tensor<4x4x64x16xf32>, %q: tensor<4x4x64x16xf32>, %k: tensor<4x4x64x16xf32>, %v: tensor<4x4x64x16xf32>, %out: tensor<4x4x64x16xf32>, %lse: tensor<4x4x64xf32>, %mask: tensor<1x4x64x64xf32>) -> (tensor<4x4x64x16xf32>, tensor<4x4x64x16xf32>, tensor<4x4x64x16xf32>, tensor<1x4x64x64xf32>) {
  %r:4 = "nova.attention_backward"(%dout, %q, %k, %v, %out, %lse, %mask) {has_mask = true, has_seed = false, causal = false, scale = 2.50000000000000000e-01 : f64, dropout_p = 0.00000000000000000e+00 : f64, stream = 5 : i64, mask_grad = true, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 1, 0>} : (tensor<4x4x64x16xf32>, tensor<4x4x64x16xf32>, tensor<4x4x64x16xf32>, tensor<4x4x64x16xf32>, tensor<4x4x64x16xf32>, tensor<4x4x64xf32>, tensor<1x4x64x64xf32>) -> (tensor<4x4x64x16xf32>, tensor<4x4x64x16xf32>, tensor<4x4x64x16xf32>, tensor<1x4x64x64xf32>)
  return %r#0, %r#1, %r#2, %r#3 : tensor<4x4x64x16xf32>, tensor<4x4x64x16xf32>, tensor<4x4x64x16xf32>, tensor<1x4x64x64xf32>
}

// CHECK: %[[R:.*]]:3 = "nova.online_attention_backward"
// CHECK-NEXT: %[[M:.*]] = "nova.online_attention_backward_mask"
// CHECK-SAME: dmask_access = array<i64: 0, 0, 4096, 64, 1>
// CHECK-NEXT: return %[[R]]#0, %[[R]]#1, %[[R]]#2, %[[M]]
