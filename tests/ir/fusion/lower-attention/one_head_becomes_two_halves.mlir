// RUN: nova-opt lower-attention
// One long head is one task: two halves, over query groups and over key blocks, keep both cores busy.
func.func private @attention(%dout: tensor<1x1x512x64xf32>, %q: tensor<1x1x512x64xf32>, %k: tensor<1x1x512x64xf32>, %v: tensor<1x1x512x64xf32>, %out: tensor<1x1x512x64xf32>, %lse: tensor<1x1x512xf32>) -> (tensor<1x1x512x64xf32>, tensor<1x1x512x64xf32>, tensor<1x1x512x64xf32>) {
  %r:3 = "nova.attention_backward"(%dout, %q, %k, %v, %out, %lse) {has_mask = false, has_seed = false, causal = false, scale = 1.25000000000000000e-01 : f64, dropout_p = 0.00000000000000000e+00 : f64, stream = 5 : i64, mask_grad = false, operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0>} : (tensor<1x1x512x64xf32>, tensor<1x1x512x64xf32>, tensor<1x1x512x64xf32>, tensor<1x1x512x64xf32>, tensor<1x1x512x64xf32>, tensor<1x1x512xf32>) -> (tensor<1x1x512x64xf32>, tensor<1x1x512x64xf32>, tensor<1x1x512x64xf32>)
  return %r#0, %r#1, %r#2 : tensor<1x1x512x64xf32>, tensor<1x1x512x64xf32>, tensor<1x1x512x64xf32>
}

// CHECK: %[[DQ:.*]] = "nova.online_attention_backward_query"
// CHECK: %[[DKV:.*]]:2 = "nova.online_attention_backward_key"
// CHECK-NEXT: return %[[DQ]], %[[DKV]]#0, %[[DKV]]#1
