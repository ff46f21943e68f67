// RUN: nova-opt form-dispatches outline-kernels
// One kernel reads %x row by row and column by column: writing the result in its place would change what is still read.
func.func @step(%x: tensor<8x8xf32> {nova.role = "arg"}, %y: tensor<8x8xf32> {nova.role = "arg"}) -> tensor<8x8xf32> {
  %0 = "nova.as_strided"(%x) {offset = 0 : i64, size = array<i64: 8, 8>, stride = array<i64: 1, 8>} : (tensor<8x8xf32>) -> tensor<8x8xf32>
  %1 = "nova.add"(%x, %0) : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  %2 = "nova.mul"(%1, %y) : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  return %2 : tensor<8x8xf32>
}
// CHECK: func.func private @{{.*}}(tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32> attributes {nova.inplace = [array<i64: 1, 0>], nova.kernel = "loops"}
