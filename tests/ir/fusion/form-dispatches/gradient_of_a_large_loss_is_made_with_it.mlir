// RUN: nova-opt form-dispatches
// The mean's divisor is counted by a kernel of its own, although the loss reads the labels too: then the gradient can be
// made where a row of the logits has just been read.
func.func @step(%x: tensor<4096x8192xf32>, %t: tensor<4096xi64>, %g: tensor<f32>) -> (tensor<f32>, tensor<4096x8192xf32>) {
  %0:2 = "nova.sce"(%x, %t) {has_weight = false, ignore_index = -100 : i64, label_smoothing = 0.0 : f64, reduction = 1 : i64} : (tensor<4096x8192xf32>, tensor<4096xi64>) -> (tensor<f32>, tensor<4096xf32>)
  %1 = "nova.sce_backward"(%g, %x, %t, %0#1) {has_weight = false, ignore_index = -100 : i64, label_smoothing = 0.0 : f64, reduction = 1 : i64} : (tensor<f32>, tensor<4096x8192xf32>, tensor<4096xi64>, tensor<4096xf32>) -> tensor<4096x8192xf32>
  return %0#0, %1 : tensor<f32>, tensor<4096x8192xf32>
}
// CHECK: nova.reduce_sum{{.*}}nova.group = [[COUNT:[0-9]+]]
// CHECK: nova.sce"{{.*}}nova.group = [[LOSS:[0-9]+]]
// CHECK: nova.sce_backward{{.*}}nova.group = [[LOSS]]
