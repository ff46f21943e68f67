// RUN: nova-opt split-loss-head form-dispatches
// 1.6 GB of logits: their maxima and sums are taken tile by tile in the contraction's kernel; the merge is small.
func.func @step(%x: tensor<8192x64xf32>, %w: tensor<50304x64xf32>, %t: tensor<8192xi64>) -> (tensor<f32>, tensor<8192x50304xf32>) {
  %l = "nova.linear"(%x, %w) : (tensor<8192x64xf32>, tensor<50304x64xf32>) -> tensor<8192x50304xf32>
  %loss, %lse = "nova.sce"(%l, %t) {has_weight = false, ignore_index = -100 : i64, label_smoothing = 0.0 : f64, reduction = 1 : i64}
      : (tensor<8192x50304xf32>, tensor<8192xi64>) -> (tensor<f32>, tensor<8192xf32>)
  return %loss, %l : tensor<f32>, tensor<8192x50304xf32>
}
// CHECK: nova.linear{{.*}}nova.group = 0 : i64, nova.kind = "contraction"
// CHECK: nova.sce_partials"(%{{[0-9]+}}) {nova.group = 0
// CHECK: nova.sce_merge{{.*}}classes = 50304 : i64{{.*}}nova.group = 1 : i64, nova.kind = "loops"
