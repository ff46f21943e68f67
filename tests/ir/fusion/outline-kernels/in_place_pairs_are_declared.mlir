// RUN: nova-opt form-dispatches outline-kernels
// dx may replace dy or y: nothing that comes after dx reads them again. A contraction's operands are read until the end.
func.func @step(%dy: tensor<64x32xf32>, %y: tensor<64x32xf32>, %w: tensor<32x32xf32>) -> (tensor<64x32xf32>, tensor<64x32xf32>) {
  %0 = "nova.softmax_backward"(%dy, %y) {dim = 1 : i64} : (tensor<64x32xf32>, tensor<64x32xf32>) -> tensor<64x32xf32>
  %1 = "nova.matmul"(%y, %w) : (tensor<64x32xf32>, tensor<32x32xf32>) -> tensor<64x32xf32>
  return %0, %1 : tensor<64x32xf32>, tensor<64x32xf32>
}
// CHECK: func.func private @softmax_backward_0{{.*}}nova.inplace = [array<i64: 0, 0>, array<i64: 1, 0>]
// CHECK: func.func private @matmul_0{{.*}}nova.inplace = []
