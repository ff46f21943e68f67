// RUN: nova-opt simplify
// Elementwise ops broadcast by themselves; an explicit broadcast stays where it alone gives the shape.

// CHECK-LABEL: func.func @bias
// CHECK-NEXT:    %[[A:.*]] = "nova.add"(%arg0, %arg1) : (tensor<3x5xf32>, tensor<5xf32>) -> tensor<3x5xf32>
// CHECK-NEXT:    %[[C:.*]] = "nova.reshape"(%arg2) : (tensor<3xf32>) -> tensor<3x1xf32>
// CHECK-NEXT:    %[[M:.*]] = "nova.mul"(%[[A]], %[[C]]) : (tensor<3x5xf32>, tensor<3x1xf32>) -> tensor<3x5xf32>
// CHECK-NEXT:    return %[[M]]
func.func @bias(%x: tensor<3x5xf32>, %b: tensor<5xf32>, %c: tensor<3xf32>) -> tensor<3x5xf32> {
  %0 = "nova.broadcast"(%b) {dims = array<i64: 1>} : (tensor<5xf32>) -> tensor<3x5xf32>
  %1 = "nova.add"(%x, %0) : (tensor<3x5xf32>, tensor<3x5xf32>) -> tensor<3x5xf32>
  %2 = "nova.broadcast"(%c) {dims = array<i64: 0>} : (tensor<3xf32>) -> tensor<3x5xf32>
  %3 = "nova.mul"(%1, %2) : (tensor<3x5xf32>, tensor<3x5xf32>) -> tensor<3x5xf32>
  return %3 : tensor<3x5xf32>
}

// CHECK-LABEL: func.func @needed
// CHECK:         nova.broadcast
// CHECK-NEXT:    nova.exp
func.func @needed(%b: tensor<5xf32>) -> tensor<3x5xf32> {
  %0 = "nova.broadcast"(%b) {dims = array<i64: 1>} : (tensor<5xf32>) -> tensor<3x5xf32>
  %1 = "nova.exp"(%0) : (tensor<3x5xf32>) -> tensor<3x5xf32>
  return %1 : tensor<3x5xf32>
}
