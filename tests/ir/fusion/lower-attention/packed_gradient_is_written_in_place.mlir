// RUN: nova-opt lower-attention
// The three gradients are concatenated into one buffer: one pass writes its three parts.
func.func private @attention(%dout: tensor<4x64x64xf32>, %qkv: tensor<4x64x192xf32>, %out: tensor<4x64x64xf32>, %lse: tensor<4x4x64xf32>) -> (tensor<4x64x192xf32>) {
  %dout_heads = "nova.reshape"(%dout) {} : (tensor<4x64x64xf32>) -> tensor<4x64x4x16xf32>
  %dout_t = "nova.transpose"(%dout_heads) {permutation = array<i64: 0, 2, 1, 3>} : (tensor<4x64x4x16xf32>) -> tensor<4x4x64x16xf32>
  %q_slice = "nova.slice"(%qkv) {starts = array<i64: 0, 0, 0>, limits = array<i64: 4, 64, 64>, strides = array<i64: 1, 1, 1>} : (tensor<4x64x192xf32>) -> tensor<4x64x64xf32>
  %q_heads = "nova.reshape"(%q_slice) {} : (tensor<4x64x64xf32>) -> tensor<4x64x4x16xf32>
  %q_t = "nova.transpose"(%q_heads) {permutation = array<i64: 0, 2, 1, 3>} : (tensor<4x64x4x16xf32>) -> tensor<4x4x64x16xf32>
  %k_slice = "nova.slice"(%qkv) {starts = array<i64: 0, 0, 64>, limits = array<i64: 4, 64, 128>, strides = array<i64: 1, 1, 1>} : (tensor<4x64x192xf32>) -> tensor<4x64x64xf32>
  %k_heads = "nova.reshape"(%k_slice) {} : (tensor<4x64x64xf32>) -> tensor<4x64x4x16xf32>
  %k_t = "nova.transpose"(%k_heads) {permutation = array<i64: 0, 2, 1, 3>} : (tensor<4x64x4x16xf32>) -> tensor<4x4x64x16xf32>
  %v_slice = "nova.slice"(%qkv) {starts = array<i64: 0, 0, 128>, limits = array<i64: 4, 64, 192>, strides = array<i64: 1, 1, 1>} : (tensor<4x64x192xf32>) -> tensor<4x64x64xf32>
  %v_heads = "nova.reshape"(%v_slice) {} : (tensor<4x64x64xf32>) -> tensor<4x64x4x16xf32>
  %v_t = "nova.transpose"(%v_heads) {permutation = array<i64: 0, 2, 1, 3>} : (tensor<4x64x4x16xf32>) -> tensor<4x4x64x16xf32>
  %out_heads = "nova.reshape"(%out) {} : (tensor<4x64x64xf32>) -> tensor<4x64x4x16xf32>
  %out_t = "nova.transpose"(%out_heads) {permutation = array<i64: 0, 2, 1, 3>} : (tensor<4x64x4x16xf32>) -> tensor<4x4x64x16xf32>
  %r:3 = "nova.attention_backward"(%dout_t, %q_t, %k_t, %v_t, %out_t, %lse) {has_mask = false, has_seed = false, causal = true, scale = 2.50000000000000000e-01 : f64, dropout_p = 0.00000000000000000e+00 : f64, stream = 5 : i64, mask_grad = false, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>} : (tensor<4x4x64x16xf32>, tensor<4x4x64x16xf32>, tensor<4x4x64x16xf32>, tensor<4x4x64x16xf32>, tensor<4x4x64x16xf32>, tensor<4x4x64xf32>) -> (tensor<4x4x64x16xf32>, tensor<4x4x64x16xf32>, tensor<4x4x64x16xf32>)
  %dq_moved = "nova.transpose"(%r#0) {permutation = array<i64: 0, 2, 1, 3>} : (tensor<4x4x64x16xf32>) -> tensor<4x64x4x16xf32>
  %dq_flat = "nova.reshape"(%dq_moved) {} : (tensor<4x64x4x16xf32>) -> tensor<4x64x64xf32>
  %dk_moved = "nova.transpose"(%r#1) {permutation = array<i64: 0, 2, 1, 3>} : (tensor<4x4x64x16xf32>) -> tensor<4x64x4x16xf32>
  %dk_flat = "nova.reshape"(%dk_moved) {} : (tensor<4x64x4x16xf32>) -> tensor<4x64x64xf32>
  %dv_moved = "nova.transpose"(%r#2) {permutation = array<i64: 0, 2, 1, 3>} : (tensor<4x4x64x16xf32>) -> tensor<4x64x4x16xf32>
  %dv_flat = "nova.reshape"(%dv_moved) {} : (tensor<4x64x4x16xf32>) -> tensor<4x64x64xf32>
  %dqkv = "nova.concat"(%dq_flat, %dk_flat, %dv_flat) {dim = 2 : i64, operandSegmentSizes = array<i32: 3, 0, 0, 0, 0, 0, 0, 0>} : (tensor<4x64x64xf32>, tensor<4x64x64xf32>, tensor<4x64x64xf32>) -> tensor<4x64x192xf32>
  return %dqkv : tensor<4x64x192xf32>
}

// CHECK: func.func private @attention({{.*}}, %[[INTO:.*]]: tensor<4x64x192xf32> {nova.out})
// CHECK-NOT: nova.concat
// CHECK: %[[R:.*]]:3 = "nova.online_attention_backward"({{.*}}, %[[INTO]], %[[INTO]], %[[INTO]])
// CHECK-SAME: dk_access = array<i64: 64, 12288, 16, 192, 1>
// CHECK-SAME: dq_access = array<i64: 0, 12288, 16, 192, 1>
// CHECK-SAME: dv_access = array<i64: 128, 12288, 16, 192, 1>
// CHECK-NEXT: return %[[R]]#2
