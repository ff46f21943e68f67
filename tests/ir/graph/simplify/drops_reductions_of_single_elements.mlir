// RUN: nova-opt simplify
// Reducing a dim of size 1 only changes the shape.

// CHECK-LABEL: func.func @step
// CHECK-NEXT:    %[[R:.*]] = "nova.reshape"(%arg0) : (tensor<3x1x5xf32>) -> tensor<3x5xf32>
// CHECK-NEXT:    %[[S:.*]] = "nova.reduce_sum"(%arg0) {dims = array<i64: 2>, keepdim = false}
// CHECK-NEXT:    %[[T:.*]] = "nova.reshape"(%[[S]]) : (tensor<3x1xf32>) -> tensor<3xf32>
// CHECK-NEXT:    return %[[R]], %[[T]]
func.func @step(%x: tensor<3x1x5xf32>) -> (tensor<3x5xf32>, tensor<3xf32>) {
  %0 = "nova.reduce_max"(%x) {dims = array<i64: 1>, keepdim = false} : (tensor<3x1x5xf32>) -> tensor<3x5xf32>
  %1 = "nova.reduce_sum"(%x) {dims = array<i64: 1, 2>, keepdim = false} : (tensor<3x1x5xf32>) -> tensor<3xf32>
  return %0, %1 : tensor<3x5xf32>, tensor<3xf32>
}
