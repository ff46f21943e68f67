// RUN: nova-opt form-dispatches
// %2 could only join %0's kernel if the matmul between them ran inside it.
func.func @step(%x: tensor<8x8xf32>) -> tensor<8x8xf32> {
  %0 = "nova.exp"(%x) : (tensor<8x8xf32>) -> tensor<8x8xf32>
  %1 = "nova.matmul"(%0, %x) : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  %2 = "nova.mul"(%0, %1) : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  return %2 : tensor<8x8xf32>
}
// CHECK: nova.exp{{.*}}nova.group = 0
// CHECK: nova.matmul{{.*}}nova.group = 1
// CHECK: nova.mul{{.*}}nova.group = 1
