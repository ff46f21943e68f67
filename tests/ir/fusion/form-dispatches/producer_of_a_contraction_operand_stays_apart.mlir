// RUN: nova-opt form-dispatches
// Nothing elementwise goes into a contraction's body: its operand is stored. A transpose is only access.
func.func @step(%x: tensor<6x8xf32>, %w: tensor<6x16xf32>) -> tensor<8x16xf32> {
  %0 = "nova.exp"(%x) : (tensor<6x8xf32>) -> tensor<6x8xf32>
  %1 = "nova.transpose"(%0) {permutation = array<i64: 1, 0>} : (tensor<6x8xf32>) -> tensor<8x6xf32>
  %2 = "nova.matmul"(%1, %w) : (tensor<8x6xf32>, tensor<6x16xf32>) -> tensor<8x16xf32>
  return %2 : tensor<8x16xf32>
}
// CHECK: nova.exp{{.*}}nova.group = 0 : i64, nova.kind = "loops"
// CHECK: nova.transpose"(%{{.*}}) {permutation = array<i64: 1, 0>}
// CHECK: nova.matmul{{.*}}nova.group = 1 : i64, nova.kind = "contraction"
