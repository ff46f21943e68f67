// RUN: nova-opt form-dispatches
// x * r is read by both row sums' kernels; multiplying again costs less than storing and reading it.
func.func @step(%x: tensor<64x32xf32>, %r: tensor<64x1xf32>, %w: tensor<32x32xf32>) -> (tensor<64x32xf32>, tensor<64xf32>, tensor<32xf32>) {
  %0 = "nova.mul"(%x, %r) : (tensor<64x32xf32>, tensor<64x1xf32>) -> tensor<64x32xf32>
  %1 = "nova.softmax"(%0) {dim = 1 : i64} : (tensor<64x32xf32>) -> tensor<64x32xf32>
  %2 = "nova.matmul"(%1, %w) : (tensor<64x32xf32>, tensor<32x32xf32>) -> tensor<64x32xf32>
  %3 = "nova.add"(%2, %0) : (tensor<64x32xf32>, tensor<64x32xf32>) -> tensor<64x32xf32>
  %4 = "nova.reduce_sum"(%3) {dims = array<i64: 1>, keepdim = false} : (tensor<64x32xf32>) -> tensor<64xf32>
  %5 = "nova.reduce_sum"(%3) {dims = array<i64: 0>, keepdim = false} : (tensor<64x32xf32>) -> tensor<32xf32>
  return %3, %4, %5 : tensor<64x32xf32>, tensor<64xf32>, tensor<32xf32>
}
// CHECK: nova.mul{{.*}}nova.group = 0
// CHECK: nova.softmax{{.*}}nova.group = 0
// CHECK-DAG: nova.mul{{.*}}nova.group = 1
// CHECK-DAG: nova.matmul{{.*}}nova.group = 1
// CHECK: nova.add{{.*}}nova.group = 1
