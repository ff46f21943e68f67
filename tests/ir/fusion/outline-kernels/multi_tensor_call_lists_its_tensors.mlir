// RUN: nova-opt form-dispatches outline-kernels
// All parameters, then all gradients, then what they share; the body describes one tensor of any size.
func.func @step(%p: tensor<4x3xf32>, %q: tensor<5xf32>, %gp: tensor<4x3xf32>, %gq: tensor<5xf32>, %lr: tensor<f64>, %z: tensor<f64>)
    -> (tensor<4x3xf32>, tensor<5xf32>) {
  %2 = "nova.sgd"(%p, %gp, %lr, %z, %z, %z) {nesterov = false, maximize = false, has_buf = false, has_first = false, has_found_inf = false,
      operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0, 0>}
      : (tensor<4x3xf32>, tensor<4x3xf32>, tensor<f64>, tensor<f64>, tensor<f64>, tensor<f64>) -> tensor<4x3xf32>
  %3 = "nova.sgd"(%q, %gq, %lr, %z, %z, %z) {nesterov = false, maximize = false, has_buf = false, has_first = false, has_found_inf = false,
      operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 0, 0, 0>}
      : (tensor<5xf32>, tensor<5xf32>, tensor<f64>, tensor<f64>, tensor<f64>, tensor<f64>) -> tensor<5xf32>
  return %2, %3 : tensor<4x3xf32>, tensor<5xf32>
}
// CHECK: func.func private @sgd_0_of_2_0{{.*}}nova.body = "sgd_0", nova.count = 2 : i64, nova.inplace = [array<i64: 0, 0>, array<i64: 1, 1>]
// CHECK: call @sgd_0_of_2_0(%arg0, %arg1, %arg2, %arg3, %arg4, %arg5)
// CHECK: func.func private @sgd_0(%{{.*}}: tensor<2xf32> {nova.list}, %{{.*}}: tensor<2xf32> {nova.list}, %{{.*}}: tensor<f64>, %{{.*}}: tensor<f64>)
