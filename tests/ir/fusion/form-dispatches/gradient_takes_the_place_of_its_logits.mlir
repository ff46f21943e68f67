// RUN: nova-opt form-dispatches
// Logits that nobody needs after the gradient: a kernel of its own can write the gradient in their place.
func.func @step(%h: tensor<4096x8192xf32>, %t: tensor<4096xi64>, %g: tensor<f32>) -> (tensor<f32>, tensor<4096x8192xf32>) {
  %x = "nova.exp"(%h) : (tensor<4096x8192xf32>) -> tensor<4096x8192xf32>
  %y = "nova.cumsum"(%x) {dim = 0 : i64} : (tensor<4096x8192xf32>) -> tensor<4096x8192xf32>
  %0:2 = "nova.sce"(%y, %t) {has_weight = false, ignore_index = -100 : i64, label_smoothing = 0.0 : f64, reduction = 1 : i64} : (tensor<4096x8192xf32>, tensor<4096xi64>) -> (tensor<f32>, tensor<4096xf32>)
  %1 = "nova.sce_backward"(%g, %y, %t, %0#1) {has_weight = false, ignore_index = -100 : i64, label_smoothing = 0.0 : f64, reduction = 1 : i64} : (tensor<f32>, tensor<4096x8192xf32>, tensor<4096xi64>, tensor<4096xf32>) -> tensor<4096x8192xf32>
  return %0#0, %1 : tensor<f32>, tensor<4096x8192xf32>
}
// CHECK: nova.sce"{{.*}}nova.group = [[LOSS:[0-9]+]]
// CHECK-NOT: nova.sce_backward{{.*}}nova.group = [[LOSS]]
// CHECK: nova.sce_backward
