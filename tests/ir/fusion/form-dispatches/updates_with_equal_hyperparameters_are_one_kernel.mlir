// RUN: nova-opt form-dispatches
// Clipping scales each gradient by one number: it is computed in the update's kernel. Another learning rate, another kernel.
func.func @step(%p: tensor<4x3xf32>, %q: tensor<5xf32>, %r: tensor<7xf32>, %gp: tensor<4x3xf32>, %gq: tensor<5xf32>, %gr: tensor<7xf32>,
    %c: tensor<f32>, %lr: tensor<f64>, %lr2: tensor<f64>, %z: tensor<f64>) -> (tensor<4x3xf32>, tensor<5xf32>, tensor<7xf32>) {
  %0 = "nova.mul"(%gp, %c) : (tensor<4x3xf32>, tensor<f32>) -> tensor<4x3xf32>
  %1 = "nova.mul"(%gq, %c) : (tensor<5xf32>, tensor<f32>) -> tensor<5xf32>
  %2 = "nova.sgd"(%p, %0, %lr, %z, %z, %z) {nesterov = false, maximize = false, has_buf = false, has_first = false, has_found_inf = false,
      operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0, 0>}
      : (tensor<4x3xf32>, tensor<4x3xf32>, tensor<f64>, tensor<f64>, tensor<f64>, tensor<f64>) -> tensor<4x3xf32>
  %3 = "nova.sgd"(%q, %1, %lr, %z, %z, %z) {nesterov = false, maximize = false, has_buf = false, has_first = false, has_found_inf = false,
      operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0, 0>}
      : (tensor<5xf32>, tensor<5xf32>, tensor<f64>, tensor<f64>, tensor<f64>, tensor<f64>) -> tensor<5xf32>
  %4 = "nova.sgd"(%r, %gr, %lr2, %z, %z, %z) {nesterov = false, maximize = false, has_buf = false, has_first = false, has_found_inf = false,
      operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0, 0>}
      : (tensor<7xf32>, tensor<7xf32>, tensor<f64>, tensor<f64>, tensor<f64>, tensor<f64>) -> tensor<7xf32>
  return %2, %3, %4 : tensor<4x3xf32>, tensor<5xf32>, tensor<7xf32>
}
// CHECK: nova.mul{{.*}}nova.group = 0 : i64, nova.kind = "multi_tensor"
// CHECK: nova.sgd{{.*}}nova.group = 0
// CHECK: nova.mul{{.*}}nova.group = 0
// CHECK: nova.sgd{{.*}}nova.group = 0
// CHECK: nova.sgd{{.*}}nova.group = 1
