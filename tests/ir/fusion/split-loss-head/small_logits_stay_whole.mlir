// RUN: nova-opt split-loss-head
func.func @step(%x: tensor<32x64xf32>, %w: tensor<257x64xf32>, %t: tensor<32xi64>) -> tensor<f32> {
  %l = "nova.linear"(%x, %w) : (tensor<32x64xf32>, tensor<257x64xf32>) -> tensor<32x257xf32>
  %loss, %lse = "nova.sce"(%l, %t) {has_weight = false, ignore_index = -100 : i64, label_smoothing = 0.0 : f64, reduction = 1 : i64}
      : (tensor<32x257xf32>, tensor<32xi64>) -> (tensor<f32>, tensor<32xf32>)
  return %loss : tensor<f32>
}
// CHECK: nova.sce"
// CHECK-NOT: sce_partials
