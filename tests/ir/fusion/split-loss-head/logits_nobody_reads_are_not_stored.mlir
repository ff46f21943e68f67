// RUN: nova-opt split-loss-head form-dispatches outline-kernels
// Without a backward the partials pick the target's logit too, and the logits never reach memory.
func.func @step(%x: tensor<8192x64xf32>, %w: tensor<50304x64xf32>, %t: tensor<8192xi64>) -> tensor<f32> {
  %l = "nova.linear"(%x, %w) : (tensor<8192x64xf32>, tensor<50304x64xf32>) -> tensor<8192x50304xf32>
  %loss, %lse = "nova.sce"(%l, %t) {has_weight = false, ignore_index = -100 : i64, label_smoothing = 0.0 : f64, reduction = 1 : i64}
      : (tensor<8192x50304xf32>, tensor<8192xi64>) -> (tensor<f32>, tensor<8192xf32>)
  return %loss : tensor<f32>
}
// CHECK-NOT: -> tensor<8192x50304xf32>
// CHECK: func.func @step
// CHECK: call @linear_sce_partials_0
// CHECK-SAME: -> (tensor<8192x{{[0-9]+}}xf32>, tensor<8192x{{[0-9]+}}xf32>, tensor<8192x{{[0-9]+}}xf32>)
// CHECK: call @sce_merge_0
