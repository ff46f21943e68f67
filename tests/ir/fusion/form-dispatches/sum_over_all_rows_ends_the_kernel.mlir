// RUN: nova-opt form-dispatches
// Every row needs the column mean, which is known only after the last row: a second kernel.
func.func @step(%x: tensor<64x32xf32>) -> tensor<64x32xf32> {
  %0 = "nova.reduce_sum"(%x) {dims = array<i64: 0>, keepdim = true} : (tensor<64x32xf32>) -> tensor<1x32xf32>
  %1 = "nova.sub"(%x, %0) : (tensor<64x32xf32>, tensor<1x32xf32>) -> tensor<64x32xf32>
  return %1 : tensor<64x32xf32>
}
// CHECK: nova.reduce_sum{{.*}}nova.group = 0
// CHECK: nova.sub{{.*}}nova.group = 1
