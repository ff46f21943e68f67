// RUN: nova-opt lower-attention
// Heads cut out of one packed projection: q, k and v are offsets into it, and out is written heads last.
func.func private @attention(%qkv: tensor<4x64x192xf32>) -> (tensor<4x64x64xf32>, tensor<4x4x64xf32>) {
  %q_slice = "nova.slice"(%qkv) {starts = array<i64: 0, 0, 0>, limits = array<i64: 4, 64, 64>, strides = array<i64: 1, 1, 1>} : (tensor<4x64x192xf32>) -> tensor<4x64x64xf32>
  %q_heads = "nova.reshape"(%q_slice) {} : (tensor<4x64x64xf32>) -> tensor<4x64x4x16xf32>
  %q_t = "nova.transpose"(%q_heads) {permutation = array<i64: 0, 2, 1, 3>} : (tensor<4x64x4x16xf32>) -> tensor<4x4x64x16xf32>
  %k_slice = "nova.slice"(%qkv) {starts = array<i64: 0, 0, 64>, limits = array<i64: 4, 64, 128>, strides = array<i64: 1, 1, 1>} : (tensor<4x64x192xf32>) -> tensor<4x64x64xf32>
  %k_heads = "nova.reshape"(%k_slice) {} : (tensor<4x64x64xf32>) -> tensor<4x64x4x16xf32>
  %k_t = "nova.transpose"(%k_heads) {permutation = array<i64: 0, 2, 1, 3>} : (tensor<4x64x4x16xf32>) -> tensor<4x4x64x16xf32>
  %v_slice = "nova.slice"(%qkv) {starts = array<i64: 0, 0, 128>, limits = array<i64: 4, 64, 192>, strides = array<i64: 1, 1, 1>} : (tensor<4x64x192xf32>) -> tensor<4x64x64xf32>
  %v_heads = "nova.reshape"(%v_slice) {} : (tensor<4x64x64xf32>) -> tensor<4x64x4x16xf32>
  %v_t = "nova.transpose"(%v_heads) {permutation = array<i64: 0, 2, 1, 3>} : (tensor<4x64x4x16xf32>) -> tensor<4x4x64x16xf32>
  %r:2 = "nova.attention"(%q_t, %k_t, %v_t) {has_mask = false, has_seed = false, causal = true, scale = 2.50000000000000000e-01 : f64, dropout_p = 0.00000000000000000e+00 : f64, stream = 5 : i64, operandSegmentSizes = array<i32: 1, 1, 1, 0, 0>} : (tensor<4x4x64x16xf32>, tensor<4x4x64x16xf32>, tensor<4x4x64x16xf32>) -> (tensor<4x4x64x16xf32>, tensor<4x4x64xf32>)
  %o_moved = "nova.transpose"(%r#0) {permutation = array<i64: 0, 2, 1, 3>} : (tensor<4x4x64x16xf32>) -> tensor<4x64x4x16xf32>
  %o_flat = "nova.reshape"(%o_moved) {} : (tensor<4x64x4x16xf32>) -> tensor<4x64x64xf32>
  return %o_flat, %r#1 : tensor<4x64x64xf32>, tensor<4x4x64xf32>
}

// CHECK: func.func private @attention(%[[X:.*]]: tensor<4x64x192xf32>, %[[OUT:.*]]: tensor<4x64x64xf32> {nova.out}, %[[LSE:.*]]: tensor<4x4x64xf32> {nova.out})
// CHECK-SAME: nova.kernel = "attention_forward"
// CHECK-NOT: nova.transpose
// CHECK: %[[R:.*]]:2 = "nova.online_attention"(%[[X]], %[[X]], %[[X]], {{.*}}, %[[OUT]], %[[LSE]])
// CHECK-SAME: causal = true
// CHECK-SAME: k_access = array<i64: 64, 12288, 16, 192, 1>
// CHECK-SAME: out_access = array<i64: 0, 4096, 16, 64, 1>
// CHECK-SAME: q_access = array<i64: 0, 12288, 16, 192, 1>
// CHECK-SAME: v_access = array<i64: 128, 12288, 16, 192, 1>
// CHECK-NEXT: return %[[R]]#0, %[[R]]#1
