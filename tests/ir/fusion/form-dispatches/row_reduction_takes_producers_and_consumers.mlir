// RUN: nova-opt form-dispatches
// Scale, softmax, and what follows it over the same rows are one kernel; so is a column sum of the result.
func.func @step(%x: tensor<64x32xf32>, %y: tensor<64x32xf32>) -> (tensor<64x32xf32>, tensor<32xf32>) {
  %0 = "nova.mul"(%x, %y) : (tensor<64x32xf32>, tensor<64x32xf32>) -> tensor<64x32xf32>
  %1 = "nova.softmax"(%0) {dim = 1 : i64} : (tensor<64x32xf32>) -> tensor<64x32xf32>
  %2 = "nova.add"(%1, %x) : (tensor<64x32xf32>, tensor<64x32xf32>) -> tensor<64x32xf32>
  %3 = "nova.reduce_sum"(%2) {dims = array<i64: 0>, keepdim = false} : (tensor<64x32xf32>) -> tensor<32xf32>
  return %2, %3 : tensor<64x32xf32>, tensor<32xf32>
}
// CHECK-COUNT-4: nova.group = 0 : i64, nova.kind = "loops"
// CHECK-NOT: nova.group
