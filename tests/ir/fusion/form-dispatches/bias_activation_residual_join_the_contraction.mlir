// RUN: nova-opt form-dispatches
// A linear layer, its activation (the pre-activation is read by the backward too) and a residual: one kernel each.
func.func @step(%x: tensor<6x8xf32>, %w: tensor<16x8xf32>, %b: tensor<16xf32>, %w2: tensor<8x16xf32>, %dy: tensor<6x16xf32>)
    -> (tensor<6x8xf32>, tensor<6x16xf32>) {
  %0 = "nova.linear"(%x, %w, %b) : (tensor<6x8xf32>, tensor<16x8xf32>, tensor<16xf32>) -> tensor<6x16xf32>
  %1 = "nova.gelu"(%0) {approximate = "none"} : (tensor<6x16xf32>) -> tensor<6x16xf32>
  %2 = "nova.linear"(%1, %w2) : (tensor<6x16xf32>, tensor<8x16xf32>) -> tensor<6x8xf32>
  %3 = "nova.add"(%x, %2) : (tensor<6x8xf32>, tensor<6x8xf32>) -> tensor<6x8xf32>
  %4 = "nova.gelu_backward"(%dy, %0) {approximate = "none"} : (tensor<6x16xf32>, tensor<6x16xf32>) -> tensor<6x16xf32>
  return %3, %4 : tensor<6x8xf32>, tensor<6x16xf32>
}
// CHECK: nova.linear{{.*}}nova.group = 0 : i64, nova.kind = "contraction"
// CHECK: nova.gelu"{{.*}}nova.group = 0
// CHECK: nova.gelu_backward{{.*}}nova.group = 0
// CHECK: nova.linear{{.*}}nova.group = 1
// CHECK: nova.add{{.*}}nova.group = 1
